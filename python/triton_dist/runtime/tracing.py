"""Detect calls that torch only traces, without data, and exclude functions from tracing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_leaves

_TRACING_MODES = frozenset({"FakeTensorMode", "ProxyTorchDispatchMode", "FunctionalTensorMode"})
_FAKE_TENSORS = frozenset({"FakeTensor", "FunctionalTensor"})


def is_traced(values: Iterable[Any]) -> bool:
    """Return whether a call with the arguments ``values`` is only traced and computes no data.

    Calls are traced under ``FakeTensorMode``, ``torch.compile``, ``torch.export``, ``make_fx``,
    ``torch.jit.trace`` and ``torch.fx``. Calls with a fake tensor or a tensor on the meta device
    count as traced. ``values`` may nest tuples, lists and dicts.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    modes = _python_dispatch._get_current_dispatch_mode_stack()
    return any(type(mode).__name__ in _TRACING_MODES for mode in modes) or any(
        map(_is_fake, tree_leaves(values))
    )


def _is_fake(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_meta or type(value).__name__ in _FAKE_TENSORS
    proxy = getattr(sys.modules.get("torch.fx"), "Proxy", None)
    return proxy is not None and isinstance(value, proxy)


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function``; ``torch.compile`` does not trace the wrapper or any function it calls.
    ``torch.compiler.disable`` imports torch._dynamo, which takes about a second. Nothing can be
    traced before torch._dynamo is imported. Until then, the wrapper calls ``function`` directly."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        return torch.compiler.disable(function)(*args, **kwargs)

    return call
