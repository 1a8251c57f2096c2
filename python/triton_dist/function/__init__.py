"""Autograd functions under the names that scripts for Triton-distributed import."""
