"""Tiles, kernels and launches of GEMMs whose rows may come from several ranks."""
