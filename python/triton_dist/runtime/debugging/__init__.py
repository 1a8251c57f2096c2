"""Checks of kernels: what ``TRITON_DIST_DEBUG`` asks for."""
