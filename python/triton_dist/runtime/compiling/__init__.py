"""Compile kernels in other processes into Triton's disk cache, where this process finds them."""

from triton_dist.runtime.compiling.pool import CompilePool

__all__ = ["CompilePool"]
