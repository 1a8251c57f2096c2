"""Exchanges: kernels that send, wait and combine in one launch, and their memory."""
