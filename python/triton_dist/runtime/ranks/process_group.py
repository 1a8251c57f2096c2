"""The ranks of a torch process group: messages go over its own key-value store."""

from __future__ import annotations

from contextlib import suppress

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from triton_dist import knobs
from triton_dist.runtime.ranks.store_ranks import StoreRanks


class ProcessGroupRanks(StoreRanks):
    """Messages that all ranks of ``process_group`` send together."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group
        super().__init__(
            distributed_c10d._get_process_group_store(process_group),
            process_group.rank(),
            process_group.size(),
            dist.get_process_group_ranks(process_group),
        )
        self._is_world = process_group is dist.group.WORLD
        self._met_on_device: torch.Tensor | None = None

    def is_current(self) -> bool:
        """True if the process group was not destroyed yet; then nothing that was agreed in it
        counts any more."""
        return self.process_group in distributed_c10d._world.pg_map

    def meeting_seconds(self) -> float:
        """The knob's, else as long as the group's own collectives wait, else 30 minutes."""
        limit = knobs.autotune_meeting_timeout.get()
        if limit is not None:
            return limit
        seconds = []
        for device in self.process_group._device_types:
            with suppress(AttributeError, RuntimeError):  # not every backend has options
                options = self.process_group._get_backend(device).options
                seconds.append(options._timeout.total_seconds())
        return min(seconds, default=1800.0)

    def line_up(self) -> None:
        """On GPUs queue a one-element all-reduce on the current stream; gloo, which ranks have
        that share GPUs, waits for the stream and for the ranks. All ranks must be about to queue
        it, as after a barrier; else it would wait for the process group's timeout."""
        if not torch.cuda.is_available():
            return
        is_on_gpu = knobs.share_gpus.get() and torch.cuda.is_initialized()
        if is_on_gpu or "nccl" in dist.get_backend_config(self.process_group):
            if self._met_on_device is None:
                self._met_on_device = torch.zeros(1, device="cuda")
            dist.all_reduce(self._met_on_device, group=self.process_group)

    def _is_plain(self, is_on_this_host: bool) -> bool:
        return is_on_this_host and self._is_world
