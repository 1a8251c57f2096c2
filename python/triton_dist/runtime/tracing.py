"""Detect calls that are only traced or use fake tensors, and exclude functions from tracing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_leaves

_MODES = frozenset({"FakeTensorMode", "ProxyTorchDispatchMode", "FunctionalTensorMode"})
_FAKES = frozenset({"FakeTensor", "FunctionalTensor"})


def is_traced(values: Iterable[Any]) -> bool:
    """Return whether a call with ``values`` (nested in tuples, lists and dicts) computes nothing.

    This is the case under ``FakeTensorMode``, ``torch.export``, ``make_fx``, ``torch.jit.trace``
    and ``torch.fx``, and for fake tensors and tensors on the meta device.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    modes = _python_dispatch._get_current_dispatch_mode_stack()
    return any(type(mode).__name__ in _MODES for mode in modes) or any(
        map(_is_fake, tree_leaves(values))
    )


def _is_fake(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_meta or type(value).__name__ in _FAKES
    proxy = getattr(sys.modules.get("torch.fx"), "Proxy", None)
    return proxy is not None and isinstance(value, proxy)


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` such that ``torch.compile`` traces neither it nor its callees.

    ``torch.compiler.disable`` imports torch._dynamo, which takes a second. Before another import of
    torch._dynamo nothing can be traced, and ``function`` is called directly.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        return torch.compiler.disable(function)(*args, **kwargs)

    return call
