"""``torch.compiler.disable`` for programs that may never compile anything."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, of which, and of what it calls, ``torch.compile`` traces nothing.

    ``torch.compiler.disable`` imports torch._dynamo, which takes a second. Until something else has
    imported that, nothing can be traced, and ``function`` is called as it is.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        return torch.compiler.disable(function)(*args, **kwargs)

    return call
