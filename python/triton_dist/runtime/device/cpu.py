"""The CPU as a device: kernels run in Triton's interpreter, and copies in threads."""

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
from triton_dist.runtime import marking, waits
from triton_dist.runtime.addresses import describe_address
from triton_dist.runtime.deadlines import is_overdue
from triton_dist.runtime.device.transfer import AwaitFlag, Copy, InputRows, Step
from triton_dist.runtime.triton_compat import is_interpreting

_HOPPER_SHARED_MEMORY_BYTES = 232_448
_GPU_CLOCK_HZ = 1.7e9
_POLL_SECONDS = 200e-6
_MAX_COPIED_FLAGS = 64  # a copy of at most this many integers sets flags


class CpuDevice:
    """The CPU device. All work is synchronous except copy streams."""

    name = "cpu"
    torch_device = torch.device("cpu")
    # Persistent kernels start this many programs. Three with several tiles each suffice for tests.
    num_sms = 3
    # The interpreter executes a descriptor access 3 to 5 times faster than pointer arithmetic.
    prefers_descriptors = True
    multiplies_fp8 = True
    second_stream = None
    # Interpreted kernels are run for correctness, not speed, so the config spaces are small.
    interprets: bool = True
    # Exclude libraries: they would always win on the CPU, and tests need to run our kernels.
    has_nccl: bool = False
    has_async_tp: bool = False
    launches_block: bool = False

    @property
    def runs_kernels(self) -> bool:
        """Return whether kernels were decorated for the interpreter."""
        return is_interpreting()

    def synchronize(self, seconds: float | None = None) -> None:
        """Do nothing: kernels are synchronous, and each call of an op waits for its copies."""

    def timer(self) -> CpuTimer:
        return CpuTimer()

    def nvtx_range(self, name: str) -> AbstractContextManager[None]:
        """Do nothing: NVTX needs a GPU."""
        return nullcontext()

    def flush_cache(self) -> None:
        """Do nothing: the interpreter's time does not depend on the CPU cache."""

    def facts(self) -> Mapping[str, str]:
        return {
            # Interpreted and plain functions have different latencies, so their records differ.
            "gpu": "none (interpreter)" if is_interpreting() else "none",
            "cpu": platform.machine(),
            "cores": str(os.cpu_count()),
        }

    def shared_memory_bytes(self) -> int:
        """Return Hopper's limit, so that config spaces are pruned as on a GPU."""
        return _HOPPER_SHARED_MEMORY_BYTES

    def is_capturing(self) -> bool:
        return False

    def host_word(self) -> torch.Tensor:
        """Return a zeroed int64 [1] that kernels can write and the host can read at any time."""
        return torch.zeros(1, dtype=torch.int64, device="cpu")

    def peek(self, words: torch.Tensor) -> torch.Tensor:
        """Return a copy of the current values."""
        return words.clone()

    def sleep(self, cycles: int) -> None:
        time.sleep(cycles / _GPU_CLOCK_HZ)

    def sleep_milliseconds(self, milliseconds: float) -> None:
        time.sleep(milliseconds / 1e3)

    def capture(self, call: Callable[[], object], seconds: float) -> Callable[[], object]:
        """Return ``call``: there is no launch overhead to remove."""
        return call

    def delay_stream(self, queueing_seconds: float = 0.0) -> None:
        """Do nothing: calls are synchronous."""

    def run_on_side_stream(self, work: Callable[[], object]) -> None:
        """Run ``work`` immediately: there are no streams except copy streams."""
        work()

    def fork(
        self, work: Callable[[], object], *inputs: torch.Tensor, after_current: bool = True
    ) -> Callable[..., None]:
        """Run ``work`` immediately, and return a function that does nothing."""
        work()
        return self.record_event()

    def record_event(self) -> Callable[..., None]:
        """Return a function that does nothing: work is synchronous."""
        return lambda *tensors: None

    def copy_stream(self, stream: object = None) -> CpuCopyStream:
        """Return a thread that acts as a side stream."""
        return CpuCopyStream()

    def transfer(self, steps: Sequence[Step], streams: Sequence[CpuCopyStream]) -> CpuTransfer:
        return CpuTransfer(steps, streams)

    def current_stream(self) -> int:
        return 0

    def repeated_launch(self, *_: Any, **__: Any) -> None:
        """Return ``None``: the interpreter has no compiled kernel to launch."""

    def must_launch_through_triton(self) -> bool:
        return False


class CpuTimer:
    def start(self) -> None:
        self._begin = time.perf_counter()

    def stop(self) -> None:
        self._end = time.perf_counter()

    def is_done(self) -> bool:
        return True  # nothing is queued

    def milliseconds(self) -> float:
        return (self._end - self._begin) * 1e3


class CpuCopyStream:
    """Thread that executes copies and flag writes in order, concurrently with kernels."""

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
        def run_unless_failed() -> None:
            if self._failure is not None or self._abandoned.is_set():
                return  # later steps rely on the data of this one
            try:
                step()
            except Exception as failure:  # raised on the thread that joins
                self._failure = failure

        self._steps.put(run_unless_failed)

    def join_current(self) -> None:
        """Wait for all queued steps. Raise the first exception of a step."""
        done = threading.Event()
        self._steps.put(done.set)
        done.wait()
        failure, self._failure = self._failure, None
        self._abandoned.clear()
        if failure is not None:
            raise failure

    def abandon(self) -> None:
        """Skip queued steps until the next ``join_current``."""
        self._abandoned.set()

    def close(self) -> None:
        self._end_thread()

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        # A small integer tensor contains flags, which a transfer may set by a copy.
        is_flag = not destination.is_floating_point() and destination.numel() <= _MAX_COPIED_FLAGS
        flags = destination if is_flag else destination[:0]
        self._queue(
            lambda: _run_step(
                "push", lambda: destination.copy_(source), flags, nbytes=destination.nbytes
            )
        )

    def write_flag(self, flags: torch.Tensor, index: int, value: int) -> None:
        flag = flags[index]
        self._queue(lambda: _run_step("notify", lambda: flag.fill_(value), flag))

    def wait_flag(self, flags: torch.Tensor, index: int, value: int) -> None:
        def step() -> None:
            _spin_until_equal(flags, index, value, self._abandoned)

        self._queue(lambda: _run_step("wait", step, flags[index]))


def _run_step(name: str, step: Callable[[], object], flags: torch.Tensor, nbytes: int = 0) -> None:
    """Run a step of a copy stream. If marks are on, record a mark ``name`` for the step, and the
    ``flags`` that it sets or awaits."""
    begin_ns = time.time_ns()
    step()
    marks, program = marking.current(), -threading.get_native_id()
    if marks is not None:
        end_ns = time.time_ns()
        is_set, time_ns = (False, end_ns) if name == "wait" else (True, begin_ns)
        for index, value in enumerate(flags.flatten().tolist()):
            address = flags.data_ptr() + index * flags.element_size()
            marks.add(marking.FlagEvent(is_set, program, 0, time_ns, address, value))
        marks.add(marking.Mark(name, program, 0, begin_ns, end_ns, nbytes))


def _run_steps(steps: queue.SimpleQueue[Callable[[], object] | None]) -> None:
    with torch.inference_mode():  # allows writes to tensors created in inference mode
        while (step := steps.get()) is not None:
            step()
            del step  # it refers to the stream


class CpuTransfer:
    """The steps of a transfer, which each ``start`` queues in order."""

    def __init__(self, steps: Sequence[Step], streams: Sequence[CpuCopyStream]) -> None:
        self._steps, self._streams = steps, streams
        self._has_kernel_run = True

    def start(self, source: torch.Tensor | tuple[torch.Tensor, ...], current_stream: int) -> None:
        tensors = source if isinstance(source, tuple) else (source,)
        # Detached: autograd must not track the copies.
        self._queue(tuple(each.detach() for each in tensors))

    def fork(self, current_stream: int) -> None:
        """Queue the steps, before the launch of the kernel that sets the flags they await. A launch
        on the CPU returns only when the kernel has ended. The kernel may wait for data that other
        ranks send by these steps, so the steps must be queued first."""
        self._has_kernel_run = False
        self._queue(())

    def queue(self) -> None:
        """Record that the kernel that sets the awaited flags has run."""
        self._has_kernel_run = True

    def join(self, current_stream: int) -> None:
        """Wait for the queued steps, and raise the first exception of a step. If the kernel failed,
        skip the steps that have not started."""
        for stream in self._streams:
            if not self._has_kernel_run:
                stream.abandon()
            stream.join_current()

    def _queue(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Queue the steps. ``tensors`` are the tensors that ``InputRows`` refers to."""
        for step in self._steps:
            stream = self._streams[step.stream]
            if isinstance(step, Copy):
                source = step.source
                if isinstance(source, InputRows):
                    rows = tensors[source.tensor][source.first : source.end]
                    source = rows if source.columns is None else rows[:, slice(*source.columns)]
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
        time.sleep(_POLL_SECONDS)
