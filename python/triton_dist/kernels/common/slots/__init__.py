"""Symmetric memory whose calls alternate between two slots."""
