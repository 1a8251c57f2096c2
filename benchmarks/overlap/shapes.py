"""Shapes to measure, parsed from the command line."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from triton_dist.test.utils import DTYPES, LAYER_CONFIGS
from triton_dist.testing.opinfo.base import RECIPES, OpInfo
from triton_dist.testing.opinfo.gemm import Shape
from triton_dist.testing.opinfo.moe import GroupedShape, RoutedOpInfo

S = TypeVar("S")

# Global N and K of tensor-parallel layers.
LAYERS = {
    "llama-70b-gate-up": (28672, 8192),
    "llama-405b-gate-up": (53248, 16384),
    "llama-70b-qkv": (10240, 8192),
    "mistral-7b-gate-up": (14336, 4096),
}
ALL_LAYERS = {**LAYERS, **{name: (each["N"], each["K"]) for name, each in LAYER_CONFIGS.items()}}
"""``LAYERS`` and the layers of the test scripts: N and K by name."""
DTYPE_CHOICES = [*DTYPES.values(), *RECIPES]


def parse_layer(text: str) -> tuple[int, int]:
    """Parse the name of a layer, or ``N:K``."""
    if text in ALL_LAYERS:
        return ALL_LAYERS[text]
    try:
        N, K = map(int, text.split(":"))
    except ValueError:
        names = ", ".join(ALL_LAYERS)
        raise argparse.ArgumentTypeError(f"{text!r} is neither N:K nor one of {names}") from None
    return N, K


def parse_shapes(text: str, shape_type: type[S] = Shape) -> list[S]:
    """Parse shapes such as ``8192:28672:8192,64:28672:8192``, each the fields of ``shape_type``."""
    names = ":".join(shape_type.__annotations__)
    try:
        shapes = [shape_type(*map(int, each.split(":"))) for each in text.split(",")]
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is not {names},{names},...") from None
    if any(size < 1 for shape in shapes for size in vars(shape).values()):
        raise argparse.ArgumentTypeError(f"{text!r} has a size that is not positive")
    return shapes


def layers_of(info: OpInfo[Any]) -> dict[str, Callable[[int], Any]]:
    """Return functions of M (rows) that return a shape of the op, by name of a layer or model."""
    if isinstance(info, RoutedOpInfo):
        return {
            name: functools.partial(_with_rows, shape) for name, shape in info.model_shapes.items()
        }
    return {
        name: functools.partial(_of_layer, info.shape_type, N, K) for name, (N, K) in LAYERS.items()
    }


def parse_layers(text: str, info: OpInfo[Any]) -> list[Callable[[int], Any]]:
    """Parse ``all``, or names from ``layers_of`` separated by commas."""
    layers = layers_of(info)
    names = list(layers) if text == "all" else text.split(",")
    unknown = [name for name in names if name not in layers]
    if unknown:
        raise argparse.ArgumentTypeError(f"no layer {unknown[0]!r}; there are {', '.join(layers)}")
    return [layers[name] for name in names]


def _with_rows(shape: GroupedShape, M: int) -> GroupedShape:
    return dataclasses.replace(shape, M=M)


def _of_layer(make_shape: Callable[[int, int, int], Any], N: int, K: int, M: int) -> Any:
    return make_shape(M, N, K)


def parse_numbers(text: str) -> list[int]:
    """Parse a list of numbers such as ``512,1024``."""
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers") from None
