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
        max_positions: upper bound of the number of used positions.
        rows: int32 [max_positions], row of A of each position; ``None``: A has one row per
            position.
        max_tokens: maximum number of tokens of a rank, for the tuning key.
        topk: number of experts per token, for the tuning key.
    """

    ends: torch.Tensor
    max_positions: int
    rows: torch.Tensor | None
    max_tokens: int
    topk: int

    def limited_to(self, max_positions: int) -> Positions:
        """Return these positions with the upper bound ``max_positions`` of used positions."""
        max_positions = max(max_positions, 1)
        rows = None if self.rows is None else self.rows[:max_positions]
        return Positions(self.ends, max_positions, rows, self.max_tokens, self.topk)

    def for_sorted_rows(self) -> Positions:
        """Return these positions for an A that has one row per position."""
        return Positions(self.ends, self.max_positions, None, self.max_tokens, self.topk)

    @property
    def key_parts(self) -> tuple[int, int, str, int]:
        """Parts of the tuning key: tokens, topk, how A is indexed, and ``max_positions``."""
        kind = "position" if self.rows is None else "gathered"
        return self.max_tokens, self.topk, kind, self.max_positions

    def numel(self) -> int:
        return self.max_positions

    def checks(self, A: torch.Tensor, B: torch.Tensor) -> Iterator[Check]:
        """Yield the checks of A and B for these positions."""
        E = len(self.ends)
        yield "B.shape", tuple(B.shape), len(B) == E, f"[E = {E}, K, N]"
        shape, K = tuple(A.shape), B.shape[1]
        fits = (
            A.ndim == 2
            and shape[1] == K
            and (self.rows is not None or len(A) >= self.max_positions)
        )
        yield "A.shape", shape, fits, f"[rows of all positions, K = {K}]"
