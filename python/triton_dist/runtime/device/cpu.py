"""The CPU as a device: kernels run in Triton's interpreter, a thread stands for the copy engine."""

from __future__ import annotations

import os
import platform
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from triton_dist import knobs
from triton_dist.errors import WaitTimeout
from triton_dist.runtime import waits
from triton_dist.runtime.addresses import describe_address
from triton_dist.runtime.deadlines import is_overdue
from triton_dist.runtime.device.transfer import AwaitFlag, Copy, OwnRows, Step
from triton_dist.runtime.triton_compat import is_interpreting

_HOPPER_SHARED_MEMORY = 232_448
_GPU_CLOCK_HZ = 1.7e9
_SPIN_SECONDS = 200e-6


class CpuDevice:
    """This host's processors. Work is synchronous but for copy streams."""

    name = "cpu"
    torch_device = torch.device("cpu")
    # Programs of a persistent grid. They run one after another, so a few show all there is to see:
    # several tiles a program, and several programs.
    num_sms = 3
    # The interpreter does a descriptor access 3 to 5 times faster than pointer arithmetic.
    prefers_descriptors = True
    # Kernels are interpreted, to see that they work, not how fast they are: a few configs show it.
    interprets: bool = True
    # Libraries are no candidates here: CPU ranks are there to run our kernels, which would not win.
    has_nccl: bool = False
    has_async_tp: bool = False
    launches_block: bool = False

    @property
    def runs_kernels(self) -> bool:
        """Kernels of this process can run: they were decorated for the interpreter."""
        return is_interpreting()

    def synchronize(self, seconds: float | None = None) -> None:
        """Nothing to wait for: kernels return when done, and a call joins its copy streams."""

    def timer(self) -> CpuTimer:
        return CpuTimer()

    def ranged(self, name: str) -> AbstractContextManager[None]:
        """Nothing: NVTX is of GPUs."""
        return nullcontext()

    def flush_cache(self) -> None:
        """Nothing: an interpreted kernel's time is the interpreter's, not the memory's."""

    def facts(self) -> Mapping[str, str]:
        return {
            # What is not interpreted is other code, and takes other times.
            "gpu": "none (interpreter)" if is_interpreting() else "none",
            "cpu": platform.machine(),
            "cores": str(os.cpu_count()),
        }

    def shared_memory_bytes(self) -> int:
        """Hopper's limit, so that a config space is pruned here as it would be there."""
        return _HOPPER_SHARED_MEMORY

    def is_capturing(self) -> bool:
        return False

    def host_word(self) -> torch.Tensor:
        """int64 [1], 0, that kernels can write and the host can read at any time."""
        return torch.zeros(1, dtype=torch.int64)

    def peek(self, words: torch.Tensor) -> torch.Tensor:
        """Copy of what is there now."""
        return words.clone()

    def sleep(self, cycles: int) -> None:
        """Sleep for as long as a GPU would take for ``cycles``."""
        time.sleep(cycles / _GPU_CLOCK_HZ)

    def sleep_milliseconds(self, milliseconds: float) -> None:
        time.sleep(milliseconds / 1e3)

    def capture(self, call: Callable[[], object], seconds: float) -> Callable[[], object]:
        """``call`` itself: there is no launch that a graph would spare."""
        return call

    def hold(self, queueing: float = 0.0) -> None:
        """Nothing: calls are not queued, they run."""

    def aside(self, work: Callable[[], object]) -> None:
        """Do ``work`` now: only copy streams queue anything, each on a thread of its own."""
        work()

    def copy_stream(self, stream: object = None) -> CpuCopyStream:
        """A thread that stands for a side stream; there are no streams to choose from."""
        return CpuCopyStream()

    def transfer(self, steps: Sequence[Step], streams: Sequence[CpuCopyStream]) -> CpuTransfer:
        return CpuTransfer(steps, streams)

    def current_stream(self) -> int:
        return 0

    def repeated_launch(self, *_: Any, **__: Any) -> None:
        """None: the interpreter compiles nothing that could be laid out."""

    def launches_are_watched(self) -> bool:
        return False


class CpuTimer:
    """Wall clock."""

    def start(self) -> None:
        self._begin = time.perf_counter()

    def stop(self) -> None:
        self._end = time.perf_counter()

    def is_done(self) -> bool:
        return True  # nothing is queued

    def milliseconds(self) -> float:
        return (self._end - self._begin) * 1e3


class CpuCopyStream:
    """A thread that does copies and flag writes in order, while kernels run on the caller's
    thread. It ends when the stream is closed, or dropped."""

    def __init__(self) -> None:
        self._steps: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._abandoned = threading.Event()
        threading.Thread(
            target=_run_steps, args=(self._steps,), name="triton_dist-copy-stream", daemon=True
        ).start()
        self._end_thread = weakref.finalize(self, self._steps.put, None)
        self._end_thread.atexit = False

    def _queue(self, step: Callable[[], object]) -> None:
        def guarded() -> None:
            if self._failure is not None or self._abandoned.is_set():
                return  # the rest would write on top of missing data
            try:
                step()
            except Exception as failure:  # raised on the thread that joins
                self._failure = failure

        self._steps.put(guarded)

    def join_current(self) -> None:
        """Wait until all that was queued is done; raise what went wrong in it."""
        done = threading.Event()
        self._steps.put(done.set)
        done.wait()
        failure, self._failure = self._failure, None
        self._abandoned.clear()
        if failure is not None:
            raise failure

    def abandon(self) -> None:
        """Leave out what is queued and not done, until the next ``join_current``."""
        self._abandoned.set()

    def close(self) -> None:
        """End the thread once all that was queued is done."""
        self._end_thread()

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self._queue(lambda: destination.copy_(source))

    def write_flag(self, flags: torch.Tensor, index: int, value: int) -> None:
        self._queue(lambda: flags[index].fill_(value))

    def wait_flag(self, flags: torch.Tensor, index: int, value: int) -> None:
        self._queue(lambda: _spin_until_equal(flags, index, value, self._abandoned))


def _run_steps(steps: queue.SimpleQueue[Callable[[], object] | None]) -> None:
    with torch.inference_mode():  # else tensors made in it could not be written
        while (step := steps.get()) is not None:
            step()
            del step  # it refers to the stream


class CpuTransfer:
    """Steps that are queued in order each time the transfer is started."""

    def __init__(self, steps: Sequence[Step], streams: Sequence[CpuCopyStream]) -> None:
        self._steps, self._streams = steps, streams
        self._has_kernel = True

    def start(self, own: torch.Tensor, current: int) -> None:
        """Queue the steps; what the caller did before is done."""
        self._queue(own.detach())  # else copies would give their destination a history for autograd

    def fork(self, current: int) -> None:
        """Queue the steps now: the kernel whose flags they await runs to its end when it is
        launched, and may itself wait for what such steps of a peer bring."""
        self._has_kernel = False
        self._queue(None)

    def queue(self) -> None:
        """The kernel whose flags the steps await has run."""
        self._has_kernel = True

    def join(self, current: int) -> None:
        """Wait until all that was queued is done; raise what went wrong in it. Steps that await the
        flags of a kernel that failed are left out."""
        for stream in self._streams:
            if not self._has_kernel:
                stream.abandon()
            stream.join_current()

    def _queue(self, own: torch.Tensor | None) -> None:
        """Queue the steps; ``own`` is what ``OwnRows`` are rows of."""
        for step in self._steps:
            stream = self._streams[step.stream]
            if isinstance(step, Copy):
                source = step.source
                if isinstance(source, OwnRows):
                    assert own is not None
                    source = own[source.first : source.end]
                stream.copy(step.destination, source)
            elif isinstance(step, AwaitFlag):
                stream.wait_flag(step.flags, step.index, step.value)
            else:
                stream.write_flag(step.flags, step.index, step.value)


def _spin_until_equal(
    flags: torch.Tensor, index: int, value: int, abandoned: threading.Event
) -> None:
    limit = waits.interpreted_limit_seconds()
    deadline = time.monotonic() + limit
    while int(flags[index]) != value and not abandoned.is_set():
        if is_overdue(deadline, limit):
            raise WaitTimeout(
                rank=knobs.rank.get(),
                program="copy stream",
                flag=describe_address(flags.data_ptr() + index * flags.element_size()),
                expected=value,
                seen=int(flags[index]),
                seconds=limit,
            )
        time.sleep(_SPIN_SECONDS)
