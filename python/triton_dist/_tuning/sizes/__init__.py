"""Tuning for ranges of sizes: what tuned neighbours predict for a new size."""
