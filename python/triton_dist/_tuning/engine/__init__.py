"""The tuning engine. It uses devices, ranks, stores and searches through protocols only."""
