"""Timelines of all ranks, on which the calls of ops carry the work that their cases say."""

from triton_dist.timelines.recording import group_profile

__all__ = ["group_profile"]
