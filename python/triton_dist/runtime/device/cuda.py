"""One NVIDIA GPU: timing, hardware facts, CUDA graphs, and streams for copies between GPUs."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from triton_dist import knobs
from triton_dist.runtime.device import cuda_copies, cuda_driver
from triton_dist.runtime.device.cuda_copies import CudaCopyStream, CudaTransfer
from triton_dist.runtime.device.cuda_launch import (
    RepeatedLaunch,
    can_repeat,
    must_launch_through_triton,
    scratch_bytes,
)
from triton_dist.runtime.device.transfer import Step
from triton_dist.runtime.garbage import no_garbage_collection
from triton_dist.runtime.sharing import ranks_per_gpu
from triton_dist.runtime.triton_compat import is_interpreting

_SPIN_SECONDS = 5e-3  # a wait polls without sleeping for this time, ...
_POLL_SECONDS = 50e-6  # ... then sleeps this long between polls
# Limits of ``delay_stream``. Queueing an overlapped op takes 0.3 ms, on some hosts more. If a call
# synchronises with the device, it waits until the delay ends, so the delay has an upper limit.
_MIN_DELAY_MILLISECONDS, _MAX_DELAY_MILLISECONDS = 0.5, 5.0
_DELAY_PER_QUEUEING_TIME = 1.5
_GRAPH_MEMORY_DIVISOR = 16
"""Release the memory of destroyed graphs when it exceeds 1/16 of the GPU's memory."""
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


class CudaDevice:
    """The GPU with CUDA ordinal ``index``."""

    name = "cuda"
    # Capabilities: kernels query them instead of the device's name (see ``CpuDevice``).
    interprets: bool = False
    runs_kernels: bool = True

    def __init__(self, index: int) -> None:
        self.index = index
        self.torch_device = torch.device("cuda", index)
        self._properties = torch.cuda.get_device_properties(index)
        self.num_sms: int = self._properties.multi_processor_count
        # Cached, because each access of torch's ``clock_rate`` takes 0.6 ms (H200).
        self._clock_khz: int = self._properties.clock_rate
        # Tensor descriptors compile to TMA for compute capability 9.0 and above. On older GPUs,
        # pointers are faster.
        self.prefers_descriptors: bool = self._properties.major >= 9
        self.multiplies_fp8: bool = (self._properties.major, self._properties.minor) >= (8, 9)
        # True: a launch returns only after its kernel has ended. Ops then exclude algorithms in
        # which a blocking launch would deadlock. Read once, as by CUDA. ``make sanitize`` sets the
        # variable, because launches block under compute-sanitizer.
        self.launches_block: bool = knobs.get_bool_env("CUDA_LAUNCH_BLOCKING")
        self._last_thread = 0
        self._failed_graphs: list[torch.cuda.CUDAGraph] = []
        self._reserved_bytes = 0  # torch's reserved bytes after the last release of graph memory

    def synchronize(self, seconds: float | None = None) -> None:
        """Wait for all queued work. Raise ``TimeoutError`` if it takes longer than ``seconds``."""
        if seconds is None:
            torch.cuda.synchronize(self.index)
            return
        end_event = torch.cuda.Event()
        # An event on the legacy default stream waits for all blocking streams. Each call of an op
        # makes the current stream wait for the op's side streams, so the event covers these too.
        end_event.record(torch.cuda.current_stream(self.index))
        begin = time.monotonic()
        while not end_event.query():
            waited = time.monotonic() - begin
            if waited > seconds:
                raise TimeoutError(
                    f"cuda:{self.index} did not finish its queued work within {seconds:.1f} s"
                )
            if waited > _SPIN_SECONDS:  # a sleep would lengthen short waits
                time.sleep(_POLL_SECONDS)

    def timer(self) -> CudaTimer:
        return CudaTimer()

    def flush_cache(self) -> None:
        """Evict the contents of the L2 cache by reading a buffer that is several times larger.

        Writing the buffer would leave dirty lines, whose write-back would slow down the next call.
        A GEMM that reads 117 MB takes 40.6 µs after writing, 33.4 µs after reading, and 33.2 µs
        without a flush (H200).
        """
        torch.amax(self._flush_buffer, 0, out=self._flush_result)

    @functools.cached_property
    def _flush_buffer(self) -> torch.Tensor:
        elements = max(4 * self._properties.L2_cache_size, 64 << 20) // 4
        return torch.zeros(elements, dtype=torch.float32, device=self.torch_device)

    @functools.cached_property
    def _flush_result(self) -> torch.Tensor:
        return torch.empty((), dtype=torch.float32, device=self.torch_device)

    def facts(self) -> Mapping[str, str]:
        return {
            "gpu": self._properties.name + _sharing_suffix(),
            "gpus_on_host": str(torch.cuda.device_count()),
            "capability": f"{self._properties.major}.{self._properties.minor}",
            "sms": str(self.num_sms),
            "driver": _driver_version(),
            "peer_access": _peer_access(),
        }

    @contextlib.contextmanager
    def nvtx_range(self, name: str) -> Iterator[None]:
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()

    @property
    def has_nccl(self) -> bool:
        """Whether NCCL can be used, which requires one rank per GPU. Torch's async tensor
        parallelism uses torch's symmetric memory, which requires it too."""
        return ranks_per_gpu() == 1

    has_async_tp = has_nccl

    def shared_memory_bytes(self) -> int:
        # torch's type stubs do not know the field
        return int(self._properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def host_word(self) -> torch.Tensor:
        """Return a zeroed, pinned int64 [1] that kernels can write while the host reads it."""
        return torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=True)

    @functools.cached_property
    def _reader(self) -> cuda_copies.ConcurrentReader:
        return cuda_copies.ConcurrentReader(self.torch_device)

    def peek(self, words: torch.Tensor) -> torch.Tensor | None:
        """Return a copy of ``words`` on the host, made while kernels run, or ``None`` if it takes
        too long (see ``ConcurrentReader``)."""
        return self._reader.read(words)

    def sleep(self, cycles: int) -> None:
        """Keep the current stream busy for about ``cycles`` SM clock cycles."""
        torch.cuda._sleep(cycles)

    def sleep_milliseconds(self, milliseconds: float) -> None:
        """Keep the current stream busy for ``milliseconds``, longer below the maximum SM clock."""
        self.sleep(int(milliseconds * self._clock_khz))

    def capture(self, call: Callable[[], object], seconds: float) -> Callable[[], object]:
        """Run ``call`` once on a side stream, capture it in a CUDA graph, and return the replay.

        The first run performs what cannot be captured, such as loading kernels.

        Raises:
            TimeoutError: the first run did not finish within ``seconds``.
            Exception: ``call`` raised it, in the first run or in the capture.
        """
        # torch frees the memory of destroyed graphs only when an allocation outside a capture finds
        # the GPU full. An allocation in a capture fails instead. Therefore free the memory here.
        # Without this, 103 GB were reserved after some thousand graphs.
        reserved = torch.cuda.memory_reserved(self.index)
        if reserved - self._reserved_bytes > self._properties.total_memory // _GRAPH_MEMORY_DIVISOR:
            torch.cuda.empty_cache()
            self._reserved_bytes = torch.cuda.memory_reserved(self.index)
        self._reserved_bytes = min(reserved, self._reserved_bytes)
        side = torch.cuda.Stream(self.torch_device)
        side.wait_stream(torch.cuda.current_stream(self.index))
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream(self.index).wait_stream(side)
        self.synchronize(seconds)
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        # Not ``torch.cuda.graph``: it waits without a time limit, and if the capture fails, its
        # stream stays current.
        with torch.cuda.stream(side), no_garbage_collection():
            # thread_local: other threads (watchdogs, other tunings) may use the GPU.
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                call()
                graph.capture_end()
            except BaseException:
                # Errors of ``capture_end`` would hide the error that broke the capture.
                with warnings.catch_warnings(), contextlib.suppress(RuntimeError):
                    warnings.simplefilter("ignore")
                    graph.capture_end()
                # If ``capture_end`` failed, torch before 2.13 assumes that the capture continues
                # and never releases memory again (pytorch/pytorch#180395). The allocator still
                # calls the graph object, so keep the object alive.
                with contextlib.suppress(RuntimeError):  # newer torch has ended the allocation
                    torch._C._cuda_endAllocateToPool(self.index, pool)
                    self._failed_graphs.append(graph)
                raise
        return graph.replay

    def delay_stream(self, queueing_seconds: float = 0.0) -> None:
        """Keep the current stream busy until the host has queued the next call. The measured time
        of that call then excludes launch overhead.

        Args:
            queueing_seconds: the longest time that the host has taken to queue this call.
        """
        milliseconds = 1e3 * _DELAY_PER_QUEUEING_TIME * queueing_seconds
        milliseconds = min(milliseconds, _MAX_DELAY_MILLISECONDS)
        self.sleep_milliseconds(max(milliseconds, _MIN_DELAY_MILLISECONDS))

    def run_on_side_stream(self, work: Callable[[], object]) -> None:
        """Run ``work`` on a new stream, which does not wait for earlier work of the current stream.
        Later work of the current stream waits for ``work``."""
        current, side = torch.cuda.current_stream(self.index), torch.cuda.Stream(self.torch_device)
        with torch.cuda.stream(side):
            work()
        current.wait_stream(side)

    @functools.cached_property
    def second_stream(self) -> torch.cuda.Stream:
        """The stream of ``fork``."""
        return torch.cuda.Stream(self.torch_device)

    def fork(
        self, work: Callable[[], object], *inputs: torch.Tensor, after_current: bool = True
    ) -> Callable[..., None]:
        """Run ``work``, which reads ``inputs``, on a second stream after the current stream's work.
        Without ``after_current``, only earlier work of the second stream precedes it. Return a
        function ``join(*tensors)``, as ``record_event`` does, for the end of ``work``."""
        side = self.second_stream
        if after_current:
            side.wait_stream(torch.cuda.current_stream(self.index))
        for tensor in inputs:
            tensor.record_stream(side)
        with torch.cuda.stream(side):
            work()
            return self.record_event()

    def record_event(self) -> Callable[..., None]:
        """Record an event on the current stream, and return a function ``join(*tensors)``.

        ``join`` makes the stream that is current when ``join`` is called wait for the event. It
        also registers ``tensors`` with torch's allocator as used on that stream. In a capture, the
        allocator then does not reuse their memory.
        """
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.index))

        def join(*tensors: torch.Tensor) -> None:
            stream = torch.cuda.current_stream(self.index)
            stream.wait_event(event)
            for tensor in tensors:
                tensor.record_stream(stream)

        return join

    def copy_stream(self, stream: torch.cuda.Stream | None = None) -> CudaCopyStream:
        return CudaCopyStream(self.torch_device, stream, staged=ranks_per_gpu() > 1)

    def transfer(self, steps: Sequence[Step], streams: Sequence[CudaCopyStream]) -> CudaTransfer:
        """Return a transfer that queues ``steps`` each time it is started."""
        return CudaTransfer(steps, streams)

    @functools.cached_property
    def _context(self) -> int:
        return cuda_driver.primary_context(self.index)

    def current_stream(self) -> int:
        """Return the handle of the current stream. Set a CUDA context if the thread has none."""
        thread = threading.get_ident()
        if thread != self._last_thread:
            cuda_driver.use_context(self._context)
            self._last_thread = thread
        return torch._C._cuda_getCurrentRawStream(self.index)

    def repeated_launch(
        self,
        compiled: Any,
        grid: Sequence[int],
        arguments: Mapping[str, Any],
        varying: Sequence[str],
        scratch: Callable[[int], torch.Tensor],
    ) -> RepeatedLaunch | None:
        """Return a pre-built launch of ``compiled``, or ``None`` if only Triton can launch it.

        Args:
            varying: names of the pointer arguments whose addresses differ between launches.
            scratch: allocates the given number of bytes, which no concurrent launch uses.
        """
        if self.is_capturing() or not can_repeat(compiled, arguments):
            return None  # scratch memory allocated in a capture would belong to the graph
        nbytes = scratch_bytes(compiled, grid)
        return RepeatedLaunch(
            compiled, grid, arguments, varying, scratch(nbytes) if nbytes else None
        )

    def must_launch_through_triton(self) -> bool:
        """Return whether pre-built launches must not be used."""
        return must_launch_through_triton()


class CudaTimer:
    def __init__(self) -> None:
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def start(self) -> None:
        self._begin.record()

    def stop(self) -> None:
        self._end.record()

    def is_done(self) -> bool:
        return bool(self._end.query())

    def milliseconds(self) -> float:
        return float(self._begin.elapsed_time(self._end))


def _sharing_suffix() -> str:
    """Return a suffix for the GPU name if ranks share the GPU or kernels are interpreted."""
    if is_interpreting():
        return " (interpreter)"
    ranks = ranks_per_gpu()
    return f" (shared by {ranks} ranks)" if ranks > 1 else ""


@functools.cache
def _driver_version() -> str:
    """Return the driver version, or else the CUDA version that it supports, or "unknown"."""
    with suppress(OSError):
        found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+\d)\s", _DRIVER_FILE.read_text())
        if found is not None:
            return found.group(1)
    version = ctypes.c_int()
    status = cuda_driver.function("cuDriverGetVersion")(ctypes.byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}" if status == 0 else "unknown"


@functools.cache
def _peer_access() -> str:
    """Return the GPU pairs with peer access: ``full mesh of 4``, ``6 of 12 pairs``, ``none``."""
    count = torch.cuda.device_count()
    pairs = list(itertools.permutations(range(count), 2))
    num_reached = sum(torch.cuda.can_device_access_peer(*pair) for pair in pairs)
    if num_reached == 0:
        return "none"
    if num_reached == len(pairs):
        return f"full mesh of {count}"
    return f"{num_reached} of {len(pairs)} pairs"
