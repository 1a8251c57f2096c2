"""Whether what is called now computes, or is only looked at."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

_KEYS = torch._C._TorchDispatchModeKey
_TRACERS = (_KEYS.FAKE, _KEYS.PROXY, _KEYS.FUNCTIONAL)


def computes(values: Iterable[Any]) -> bool:
    """Whether a function or kernel that is called with ``values`` would compute.

    It does not while torch traces (compile, export, ``make_fx``, ``torch.jit.trace``), under a
    ``FakeTensorMode``, and on fake or meta tensors.
    """
    # First, and by its public name: dynamo knows its value, and traces nothing behind it.
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if any(torch._C._get_dispatch_mode(tracer) is not None for tracer in _TRACERS):
        return False
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    fake: tuple[type, ...] = () if fakes is None else (fakes.FakeTensor,)
    return not any(
        isinstance(value, torch.Tensor) and (value.is_meta or isinstance(value, fake))
        for value in values
    )
