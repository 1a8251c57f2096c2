"""Tuning kernels inside a function by calling it; reads from ``dispatch`` down."""
