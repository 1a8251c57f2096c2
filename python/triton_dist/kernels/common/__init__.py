"""What several ops share: tile orders, GEMM cores, launch preparation."""
