"""Positions: indices of rows sorted by expert, the result of an expert-parallel dispatch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from triton_dist.kernels.common.context import Check


@dataclass(frozen=True, eq=False)
class Positions:
    """Routing that ``grouped_gemm`` uses for the result of a dispatch.

    A route is a pair of a token and an expert that was chosen for it. A position is the index of a
    route after sorting by expert.

    Attributes:
        ends: int32 [E], end of the positions of each expert. Positions from the last end on are
            unused.
        number: upper bound of the number of used positions.
        rows: int32 [number], row of A of each position; ``None``: A has one row per position.
        tokens: maximum number of tokens of a rank, for the tuning key.
        topk: number of experts per token, for the tuning key.
    """

    ends: torch.Tensor
    number: int
    rows: torch.Tensor | None
    tokens: int
    topk: int

    def limited(self, number: int) -> Positions:
        """Return these positions with the upper bound ``number`` of used positions."""
        number = max(number, 1)
        rows = None if self.rows is None else self.rows[:number]
        return Positions(self.ends, number, rows, self.tokens, self.topk)

    def of_sorted_rows(self) -> Positions:
        """Return these positions for an A that has one row per position."""
        return Positions(self.ends, self.number, None, self.tokens, self.topk)

    @property
    def key_parts(self) -> tuple[int, int, str, int]:
        """Parts of the tuning key: tokens, topk, how A is indexed, and ``number``."""
        kind = "position" if self.rows is None else "gathered"
        return self.tokens, self.topk, kind, self.number

    def numel(self) -> int:
        return self.number

    def checks(self, A: torch.Tensor, B: torch.Tensor) -> Iterator[Check]:
        """Yield the checks of A and B for these positions."""
        E = len(self.ends)
        yield "B.shape", tuple(B.shape), len(B) == E, f"[E = {E}, K, N]"
        shape, K = tuple(A.shape), B.shape[1]
        fits = A.ndim == 2 and shape[1] == K and (self.rows is not None or len(A) >= self.number)
        yield "A.shape", shape, fits, f"[rows of all positions, K = {K}]"
