"""Collectives that move shards, by exchange kernels or by copy engines."""
