"""Shapes to measure: global M x N x K."""

from __future__ import annotations

import argparse
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Global sizes of a product: [M, K] by [K, N]."""

    M: int
    N: int
    K: int

    def __str__(self) -> str:
        return f"{self.M}x{self.N}x{self.K}"

    def scaled(self, divisor: int, num_ranks: int, any_rows: bool = False) -> Shape:
        """Every size divided; M and N rounded down to positive multiples of the ranks, M not with
        ``any_rows``."""
        M, N = (max(1, size // divisor // num_ranks) * num_ranks for size in (self.M, self.N))
        if any_rows:
            M = max(1, self.M // divisor)
        return Shape(M, N, max(1, self.K // divisor))


# Global N and K of tensor-parallel layers.
LAYERS = {
    "llama-70b-gate-up": (28672, 8192),
    "llama-405b-gate-up": (53248, 16384),
    "llama-70b-qkv": (10240, 8192),
    "mistral-7b-gate-up": (14336, 4096),
}
GOAL = (
    *(Shape(M, 28672, 8192) for M in (16384, 8192, 4096)),
    Shape(8192, 53248, 16384),
    Shape(8192, 10240, 8192),
    Shape(8192, 14336, 4096),
    Shape(4096, 10240, 8192),
    *(Shape(M, 28672, 8192) for M in (2048, 1024, 512)),
)
"""Compute-bound, balanced and small: what an overlapped op has to be good at."""


def parse_shapes(text: str) -> list[Shape]:
    """``M:N:K,M:N:K``, for argparse."""
    try:
        shapes = [Shape(*map(int, each.split(":"))) for each in text.split(",")]
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is not M:N:K,M:N:K,...") from None
    if any(size < 1 for shape in shapes for size in vars(shape).values()):
        raise argparse.ArgumentTypeError(f"{text!r} has a size that is not positive")
    return shapes


def parse_layers(text: str) -> list[tuple[int, int]]:
    """Names of ``LAYERS``, or ``all``, for argparse."""
    names = list(LAYERS) if text == "all" else text.split(",")
    unknown = [name for name in names if name not in LAYERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no layer {unknown[0]!r}; there are {', '.join(LAYERS)}")
    return [LAYERS[name] for name in names]


def parse_numbers(text: str) -> list[int]:
    """``512,1024``, for argparse."""
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers") from None
