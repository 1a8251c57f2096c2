"""Scripts for the ops of ``triton_dist.kernels.nvidia``."""
