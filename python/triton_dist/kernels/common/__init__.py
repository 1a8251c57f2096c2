"""Building blocks that several ops share: contexts, launches, kernels and their memory."""
