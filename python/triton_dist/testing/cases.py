"""Cases of all ops, found by the files ``kernels/nvidia/<op>/case.py``."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import Any

from triton_dist.kernels import nvidia
from triton_dist.kernels.common.case import Case
from triton_dist.kernels.common.gemm_case import GEMMCase


@functools.cache
def all_cases() -> dict[str, Case[Any]]:
    """Every case, by the name of its op."""
    found: list[Case[Any]] = []
    for folder in pkgutil.iter_modules(nvidia.__path__, f"{nvidia.__name__}."):
        if folder.ispkg and "case" in _modules_in(folder.name):
            found.append(importlib.import_module(f"{folder.name}.case").CASE)
    return {case.name: case for case in sorted(found, key=lambda case: case.name)}


def overlapped_cases() -> dict[str, Case[Any]]:
    """Cases of ops that hide a collective, by the name of the op."""
    return {name: case for name, case in all_cases().items() if case.overlaps}


def gemm_cases() -> dict[str, GEMMCase]:
    """Cases of GEMMs across ranks, by the name of the op."""
    return {name: case for name, case in all_cases().items() if isinstance(case, GEMMCase)}


def _modules_in(package: str) -> list[str]:
    return [each.name for each in pkgutil.iter_modules(importlib.import_module(package).__path__)]
