"""Timelines of all ranks, with the FLOPs and bytes of each op call."""
