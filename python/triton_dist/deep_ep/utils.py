"""Events and configs in the calls of ``Buffer``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from triton_dist.runtime.device import current_device


@dataclass
class Config:
    """Limits of a dispatch or combine. Only ``num_sms`` has an effect; ops tune the rest."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return 0: the first calls allocate memory for their number of tokens."""
        return 0

    get_rdma_buffer_size_hint = get_nvl_buffer_size_hint


class EventHandle:
    """The work that is queued on the current stream at creation.

    Args:
        tensors: results of the work.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        device = current_device()
        self._wait, self._tensors = device.record_event(), tensors
        self._ordered_streams, self._is_in_graph = {device.current_stream()}, device.is_capturing()
        self.is_awaited = False

    def current_stream_wait(self) -> None:
        """Make the current stream wait for the work."""
        self._wait(*self._tensors)
        self._ordered_streams.add(current_device().current_stream())
        self.is_awaited = True

    def must_be_awaited(self) -> bool:
        """Return whether the current stream may run before the end of the work.

        A graph capture cannot wait for work outside of the graph, and streams outside cannot wait
        for work in the graph. So if the work or the current stream is in a graph, only one wait, by
        any stream, is required.
        """
        device = current_device()
        if device.current_stream() in self._ordered_streams:
            return False
        return not (self.is_awaited and (self._is_in_graph or device.is_capturing()))


class EventOverlap:
    """An event of a call; as a context manager, it makes the current stream wait at the end.

    Args:
        event: ``None`` for a call on the current stream, which needs no wait.
        extra_tensors: tensors that stay allocated as long as this object.
    """

    def __init__(
        self,
        event: EventHandle | None = None,
        extra_tensors: tuple[torch.Tensor, ...] | None = None,
    ) -> None:
        self.event, self.extra_tensors = event, extra_tensors

    def current_stream_wait(self) -> None:
        """Make the current stream wait for the event."""
        if self.event is not None:
            self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: Any) -> None:
        self.current_stream_wait()
