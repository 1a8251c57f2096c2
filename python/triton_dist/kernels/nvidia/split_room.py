"""Where a context's GEMMs add up tiles that are cut along K (``common/split_k.py``)."""

from __future__ import annotations

import functools

import torch

from triton_dist.kernels.common.split_k import SplitWorkspace
from triton_dist.kernels.nvidia.allgather_gemm_tiles import room_for_parts
from triton_dist.runtime.device import current_device


class SplitRoom:
    """Room for the parts of every config that is tried; its partials come with the first use."""

    def __init__(self) -> None:
        self._device = current_device()
        with torch.inference_mode(False):
            # Now: zeros that are written in a capture would be there from its first replay on.
            _, counters = room_for_parts(self._device.num_sms)
            self._counters = torch.zeros(
                counters, dtype=torch.int32, device=self._device.torch_device
            )
        self._device.synchronize()  # calls may come on any stream

    @functools.cached_property
    def workspace(self) -> SplitWorkspace:
        """Allocated at the first use, once."""
        with torch.inference_mode(False):
            elements, _ = room_for_parts(self._device.num_sms)
            partials = torch.empty(elements, dtype=torch.float32, device=self._device.torch_device)
        return SplitWorkspace(partials, self._counters)

    def reset(self) -> None:
        """Bring it back to its first state after a GEMM that failed."""
        self._counters.zero_()
        self._device.synchronize()

    def free(self) -> None:
        """Free the partials; idempotent."""
        self.__dict__.pop("workspace", None)
