"""Collectives that move shards, by exchanges or by copy engines."""
