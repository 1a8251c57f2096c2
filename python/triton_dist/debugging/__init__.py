"""Checks of kernels, status of ranks and the debugger: what ``TRITON_DIST_DEBUG`` turns on."""
