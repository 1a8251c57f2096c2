"""A name of scripts for triton-runner."""

from __future__ import annotations

from typing import Any

import triton


def get_active_torch_device() -> Any:
    """The ``torch.device`` that Triton compiles for and launches on."""
    return triton.runtime.driver.active.get_active_torch_device()
