"""Kernels, grouped by GPU vendor. Every kernel also runs in Triton's interpreter on CPU ranks."""
