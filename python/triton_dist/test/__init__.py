"""Test and performance scripts, which ``scripts/launch.sh`` finds by name."""
