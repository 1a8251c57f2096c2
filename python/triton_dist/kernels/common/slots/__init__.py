"""Symmetric memory whose calls take turns between two slots."""
