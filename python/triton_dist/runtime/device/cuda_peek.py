"""Looks into a GPU's memory while its kernels run, or spin."""

from __future__ import annotations

import time

import torch

_BYTES = 1 << 16
_SECONDS = 1.0
_PAUSE_SECONDS = 1e-3


class Peeks:
    """Copies to the host on a stream of their own. Stream, event and pinned memory are made here,
    once, because that may wait for kernels that run.

    A look may find no way: with ``CUDA_DEVICE_MAX_CONNECTIONS=1`` all streams share a queue, and
    what stands first there may itself wait for a kernel that spins. So it has a limit, and a rank
    whose memory cannot be read from here may be seen by a peer.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device, priority=-1)
            self._pinned = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True)
            self._done = torch.cuda.Event()
            self._done.record(self._stream)

    def read(self, words: torch.Tensor) -> torch.Tensor | None:
        """``words`` on the host; ``None``: larger than 64 KiB, or not read within a second."""
        if words.nbytes > _BYTES or not self._is_done(0.0):  # an earlier look still stands in line
            return None
        host = self._pinned[: words.nbytes].view(words.dtype).view(words.shape)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            host.copy_(words, non_blocking=True)
            self._done.record(self._stream)
        return host.clone() if self._is_done(_SECONDS) else None

    def _is_done(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not self._done.query():
            if time.monotonic() > end:
                return False
            time.sleep(_PAUSE_SECONDS)
        return True
