"""Timelines of all ranks, on which the calls of ops carry the work that their cases say."""
