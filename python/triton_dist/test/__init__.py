"""Launchable test and performance scripts; `scripts/launch.sh` finds them by name."""
