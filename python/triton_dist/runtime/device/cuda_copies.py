"""Copies by copy engines, without SMs: between GPUs and from a busy GPU to the host."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from triton_dist.runtime.device import cuda_driver
from triton_dist.runtime.device.transfer import AwaitFlag, Copy, InputRows, SetFlag, Step

_DriverCall = tuple[cuda_driver.Function, tuple[Any, ...]]
_STAGING_BYTES = 1 << 20


class CudaCopyStream:
    """High-priority side stream for copies between GPUs.

    Copies use a copy engine. Flag writes and flag waits use stream memory operations. Both need no
    SM, so they proceed while kernels that wait for the flags occupy all SMs. When a one-block
    kernel waited for the flag instead, all ranks deadlocked (H200).

    Args:
        staged: copy through pinned host memory, for ranks that share a GPU. A copy within one GPU
            runs on its SMs, and never starts while waiting kernels occupy all SMs (H100 and H200,
            driver 580). Copies to and from the host use copy engines.
    """

    def __init__(
        self, device: torch.device, stream: torch.cuda.Stream | None = None, staged: bool = False
    ) -> None:
        self._stream = stream or torch.cuda.Stream(device, priority=-1)
        self.handle: int = self._stream.cuda_stream
        self.staging = (
            torch.empty(_STAGING_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
            if staged
            else None
        )
        # Each call records the events again. A queued wait refers to the latest record at the time
        # of queueing, so one pair of events is enough for any number of unfinished calls.
        self._events = (torch.cuda.Event(), torch.cuda.Event())
        for event in self._events:
            event.record(self._stream)  # torch creates the CUDA event at the first record
        self.begun_event, self.done_event = (int(event.cuda_event) for event in self._events)

    def close(self) -> None:
        """Do nothing: torch reuses its streams."""


class CudaTransfer:
    """The steps of a transfer as pre-built driver calls, which each ``start`` queues in order."""

    def __init__(self, steps: Sequence[Step], streams: Sequence[CudaCopyStream]) -> None:
        # Values that change between starts: the caller's stream, and the address of each
        # ``InputRows``. The keys of addresses are (tensor, first row, byte offset).
        self._caller_stream = ctypes.c_void_p()
        self._input_addresses: dict[tuple[int, int, int], ctypes.c_uint64] = {}
        # Copies of columns, with their tensor, first row, and offset of the column in bytes.
        self._column_copies: list[tuple[cuda_driver.Memcpy2D, int, int, int]] = []
        self._streams = tuple(streams)  # keeps their events and memory alive
        begun = streams[0].begun_event
        self._fork_calls = [_call("cuEventRecord", begun, self._caller_stream)]
        self._fork_calls += [_call("cuStreamWaitEvent", each.handle, begun, 0) for each in streams]
        self._step_calls = [
            call for step in steps for call in self._calls_of(step, streams[step.stream])
        ]
        self._join_calls: list[_DriverCall] = []
        for each in streams:
            self._join_calls.append(_call("cuEventRecord", each.done_event, each.handle))
            self._join_calls.append(
                _call("cuStreamWaitEvent", self._caller_stream, each.done_event, 0)
            )

    def _calls_of(self, step: Step, stream: CudaCopyStream) -> Iterator[_DriverCall]:
        handle = stream.handle
        if isinstance(step, Copy):
            yield from self._copy_calls(step, stream)
            return
        address = step.flags.data_ptr() + step.index * step.flags.element_size()
        if isinstance(step, AwaitFlag):
            condition = cuda_driver.WAIT_VALUE_EQ
            yield _call("cuStreamWaitValue32_v2", handle, address, step.value, condition)
        else:
            assert isinstance(step, SetFlag)
            yield _call("cuStreamWriteValue32_v2", handle, address, step.value, 0)

    def _copy_calls(self, step: Copy, stream: CudaCopyStream) -> Iterator[_DriverCall]:
        destination, nbytes = step.destination.data_ptr(), step.destination.nbytes
        if isinstance(step.source, InputRows) and step.source.columns is not None:
            yield from self._column_copy_calls(step.destination, step.source, stream)
            return
        if stream.staging is None:
            source = self._address(step.source, 0)
            yield _call("cuMemcpyDtoDAsync_v2", destination, source, nbytes, stream.handle)
            return
        staging, max_bytes = stream.staging.data_ptr(), stream.staging.nbytes
        for begin in range(0, nbytes, max_bytes):
            source, size = self._address(step.source, begin), min(max_bytes, nbytes - begin)
            yield _call("cuMemcpyDtoHAsync_v2", staging, source, size, stream.handle)
            yield _call("cuMemcpyHtoDAsync_v2", destination + begin, staging, size, stream.handle)

    def _column_copy_calls(
        self, destination: torch.Tensor, source: InputRows, stream: CudaCopyStream
    ) -> Iterator[_DriverCall]:
        """Copy the columns ``source.columns`` to the contiguous ``destination``."""
        assert source.columns is not None
        item, rows = destination.element_size(), source.end - source.first
        width, column = destination.shape[1] * item, source.columns[0] * item
        staging = stream.staging
        max_rows = rows if staging is None else max(1, staging.nbytes // width)
        for begin in range(0, rows, max_rows):
            size, address = min(max_rows, rows - begin), destination.data_ptr() + begin * width
            copy = cuda_driver.Memcpy2D(
                source_type=cuda_driver.MEMORY_DEVICE, target_type=cuda_driver.MEMORY_DEVICE,
                target_device=address, target_pitch=width, width=width, height=size,
            )  # fmt: skip
            if staging is not None:
                copy.target_type, copy.target_host = cuda_driver.MEMORY_HOST, staging.data_ptr()
            self._column_copies.append((copy, source.tensor, source.first + begin, column))
            yield _call("cuMemcpy2DAsync_v2", ctypes.pointer(copy), stream.handle)
            if staging is not None:
                nbytes, host = size * width, staging.data_ptr()
                yield _call("cuMemcpyHtoDAsync_v2", address, host, nbytes, stream.handle)

    def _address(self, source: torch.Tensor | InputRows, begin: int) -> Any:
        if isinstance(source, InputRows):
            key = source.tensor, source.first, begin
            return self._input_addresses.setdefault(key, ctypes.c_uint64())
        return source.data_ptr() + begin

    def start(self, source: torch.Tensor | tuple[torch.Tensor, ...], current_stream: int) -> None:
        """Queue the steps after the work of ``current_stream``. ``source`` has the tensors that
        ``InputRows`` refers to. They are contiguous, unless columns are copied."""
        tensors = source if isinstance(source, tuple) else (source,)
        bases = [(x.data_ptr(), x.shape[1] * x.element_size()) for x in tensors]
        for (tensor, first, begin), c_address in self._input_addresses.items():
            base, row_bytes = bases[tensor]
            c_address.value = base + first * row_bytes + begin
        for copy, tensor, first, column in self._column_copies:
            pitch = tensors[tensor].stride(0) * tensors[tensor].element_size()
            copy.source_device = bases[tensor][0] + first * pitch + column
            copy.source_pitch = pitch
        self.fork(current_stream)
        self.queue()

    def fork(self, current_stream: int) -> None:
        """Make the side streams wait for the work queued on ``current_stream``."""
        self._caller_stream.value = current_stream
        _run(self._fork_calls, "queue a transfer")

    def queue(self) -> None:
        """Queue the steps, after a call of ``fork``.

        If steps await a flag that a kernel sets, launch the kernel between ``fork`` and ``queue``.
        With a single hardware queue, a wait that is queued before the kernel blocks the kernel. If
        the launch fails, do not call ``queue``.
        """
        _run(self._step_calls, "queue a transfer")

    def join(self, current_stream: int) -> None:
        """Make ``current_stream`` wait for all queued steps."""
        self._caller_stream.value = current_stream
        _run(self._join_calls, "wait for a transfer")


def _run(calls: list[_DriverCall], purpose: str) -> None:
    for function, arguments in calls:
        if status := function(*arguments):
            cuda_driver.check(status, purpose)


def _call(name: str, *values: Any) -> _DriverCall:
    return cuda_driver.function(name), cuda_driver.arguments(name, *values)


_MAX_READ_BYTES = 1 << 16
_MAX_READ_SECONDS = 1.0
_POLL_SECONDS = 1e-3


class ConcurrentReader:
    """Reader of device memory while kernels run.

    Stream, event and pinned memory are created in advance, because creating them may wait for
    running kernels. A read has a time limit. With ``CUDA_DEVICE_MAX_CONNECTIONS=1`` all streams
    share one hardware queue, and the read may have to wait for a kernel that waits for a peer.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device, priority=-1)
            self._pinned = torch.empty(
                _MAX_READ_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True
            )
            self._done = torch.cuda.Event()
            self._done.record(self._stream)

    def read(self, words: torch.Tensor) -> torch.Tensor | None:
        """Return a copy of ``words`` on the host, or ``None`` if ``words`` is larger than 64 KiB,
        an earlier read has not finished, or the copy takes longer than 1 s."""
        if words.nbytes > _MAX_READ_BYTES or not self._is_done(0.0):
            return None
        host = self._pinned[: words.nbytes].view(words.dtype).view(words.shape)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            host.copy_(words, non_blocking=True)
            self._done.record(self._stream)
        return host.clone() if self._is_done(_MAX_READ_SECONDS) else None

    def _is_done(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not self._done.query():
            if time.monotonic() > end:
                return False
            time.sleep(_POLL_SECONDS)
        return True
