"""Tune kernels inside a function by calling the function. Read ``dispatch`` first."""
