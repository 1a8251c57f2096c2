"""Ranges of rows that share a tuning of a GEMM."""

from __future__ import annotations

from triton_dist import tune


def most_rows(rows: int, num_ranks: int = 1) -> int:
    """The most rows of a shard, a row block or a product in the range that ``rows`` is in: the
    tuner's ranges are of M, which ``num_ranks`` share."""
    return tune.fine_bucket(rows * num_ranks) // num_ranks
