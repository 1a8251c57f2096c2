"""Layers of models on the ops of this package."""
