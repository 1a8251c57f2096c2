"""Shapes to measure, as the command line names them."""

from __future__ import annotations

import argparse
from typing import TypeVar

from triton_dist.kernels.common.gemm_case import Shape

S = TypeVar("S")

# Global N and K of tensor-parallel layers.
LAYERS = {
    "llama-70b-gate-up": (28672, 8192),
    "llama-405b-gate-up": (53248, 16384),
    "llama-70b-qkv": (10240, 8192),
    "mistral-7b-gate-up": (14336, 4096),
}


def parse_shapes(text: str, kind: type[S] = Shape) -> list[S]:
    """``M:N:K,M:N:K``, or the sizes of an op's own ``kind`` of shape."""
    names = ":".join(kind.__annotations__)
    try:
        shapes = [kind(*map(int, each.split(":"))) for each in text.split(",")]
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is not {names},{names},...") from None
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
