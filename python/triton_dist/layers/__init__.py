"""Model layers built on the ops of this package."""
