"""Debug modes (``TRITON_DIST_DEBUG``): checks of kernels, status of ranks, and the debugger."""
