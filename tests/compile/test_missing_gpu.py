"""What a kernel says that is launched where no GPU is, and that is not interpreted."""

from __future__ import annotations

import pytest
import torch
import triton
from triton.backends import backends

from triton_dist._jit import jit
from triton_dist.errors import DeviceUnavailable


@jit
def nothing(x_ptr):
    pass


def test_a_kernel_without_a_gpu_says_what_to_set(monkeypatch):
    for backend in backends.values():
        monkeypatch.setattr(backend.driver, "is_active", lambda: False)
    for known in ("_active", "_default"):
        monkeypatch.setattr(triton.runtime.driver, known, None)
    with pytest.raises(DeviceUnavailable, match="Set TRITON_INTERPRET=1 before"):
        nothing[(1,)](torch.empty(1))
