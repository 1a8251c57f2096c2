"""One NVIDIA GPU: timing, facts, and streams whose copies use a copy engine and no SM."""

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
    has_launch_hooks,
    scratch_bytes,
)
from triton_dist.runtime.device.transfer import Step
from triton_dist.runtime.garbage import uncollected
from triton_dist.runtime.sharing import ranks_per_gpu
from triton_dist.runtime.triton_compat import is_interpreting

_SPIN_SECONDS = 5e-3
_POLL_SECONDS = 50e-6
# Queueing an overlapped op takes 0.3 ms, on some hosts more; the most is for calls that wait for
# the device themselves.
_LEAST_HOLD_MILLISECONDS, _MOST_HOLD_MILLISECONDS = 0.5, 5.0
_QUEUEING_MARGIN = 1.5
_KEPT_FOR_GRAPHS = 16
"""Part of the GPU's memory that graphs may leave behind."""
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


class CudaDevice:
    """The GPU with CUDA ordinal ``index``."""

    name = "cuda"
    # What kernels ask for, instead of which device it is (see ``CpuDevice``).
    interprets: bool = False
    runs_kernels: bool = True

    def __init__(self, index: int) -> None:
        self.index = index
        self.torch_device = torch.device("cuda", index)
        self._properties = torch.cuda.get_device_properties(index)
        self.num_sms: int = self._properties.multi_processor_count
        # Asked once: torch asks the driver each time, for 0.6 ms (measured on H200).
        self._kilohertz: int = self._properties.clock_rate
        # Tensor descriptors become TMA from compute capability 9.0 on; before, pointers are faster.
        self.prefers_descriptors: bool = self._properties.major >= 9
        # A launch returns when its kernel has ended: CUDA looks at the variable once, too. ``make
        # sanitize`` sets it, since under compute-sanitizer launches do so anyway.
        self.launches_block: bool = knobs.get_bool_env("CUDA_LAUNCH_BLOCKING")
        self._last_thread = 0
        self._broken: list[torch.cuda.CUDAGraph] = []
        self._reserved = 0  # bytes that torch held when graphs' memory was given back

    def synchronize(self, seconds: float | None = None) -> None:
        """Wait for all queued work; past ``seconds`` raise ``TimeoutError`` and leave
        it running."""
        if seconds is None:
            torch.cuda.synchronize(self.index)
            return
        reached = torch.cuda.Event()
        # An event on the legacy default stream is behind the work of all blocking streams; side
        # streams of ours are joined to the current stream before a call returns.
        reached.record(torch.cuda.current_stream(self.index))
        begin = time.monotonic()
        while not reached.query():
            waited = time.monotonic() - begin
            if waited > seconds:
                raise TimeoutError(
                    f"cuda:{self.index} did not finish its queued work within {seconds:.1f} s"
                )
            if waited > _SPIN_SECONDS:  # a sleep takes twice what is asked for
                time.sleep(_POLL_SECONDS)

    def timer(self) -> CudaTimer:
        return CudaTimer()

    def flush_cache(self) -> None:
        """Read a buffer several times the size of the L2 cache.

        Not overwrite it: the next call would pay for writing back what is left of that in the
        cache. On an H200 a product that reads 117 MB took 40.6 us then, and takes 33.4 now; 33.2
        without any flush.
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
        capability = f"{self._properties.major}.{self._properties.minor}"
        return {
            "gpu": self._properties.name + _manner(),
            "gpus_on_host": str(torch.cuda.device_count()),
            "capability": capability,
            "sms": str(self.num_sms),
            "driver": _driver_version(),
            "peer_access": _peer_access(),
        }

    @contextlib.contextmanager
    def ranged(self, name: str) -> Iterator[None]:
        """NVTX range for what is queued meanwhile."""
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()

    @property
    def has_nccl(self) -> bool:
        """NCCL takes one rank a GPU."""
        return ranks_per_gpu() == 1

    @property
    def has_async_tp(self) -> bool:
        """torch's own symmetric memory, on which its async tensor parallelism stands, too."""
        return ranks_per_gpu() == 1

    def shared_memory_bytes(self) -> int:
        """Largest dynamic shared memory of one block, in bytes (opt-in limit)."""
        # torch's type stubs do not know the field
        return int(self._properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def host_word(self) -> torch.Tensor:
        """int64 [1], 0, that kernels can write and the host can read at any time: pinned, so it has
        the same address for both."""
        return torch.zeros(1, dtype=torch.int64, pin_memory=True)

    @functools.cached_property
    def _peeks(self) -> cuda_copies.Peeks:
        return cuda_copies.Peeks(self.torch_device)

    def peek(self, words: torch.Tensor) -> torch.Tensor | None:
        """Return a host copy of the current values, made in parallel with running kernels, or
        ``None`` if that is impossible."""
        return self._peeks.read(words)

    def sleep(self, cycles: int) -> None:
        """Keep the current stream busy for about ``cycles`` SM clock cycles."""
        torch.cuda._sleep(cycles)

    def sleep_milliseconds(self, milliseconds: float) -> None:
        """The same for a time, at the SMs' top clock."""
        self.sleep(int(milliseconds * self._kilohertz))

    def capture(self, call: Callable[[], object], seconds: float) -> Callable[[], object]:
        """Run ``call`` once, on a side stream, since what happens only once (loading, allocating)
        cannot be captured; then capture it in a CUDA graph, and return its replay.

        Raises:
            TimeoutError: the run did not finish within ``seconds``.
            Exception: what ``call`` raised, in the run or in the capture.
        """
        # Release the memory of destroyed graphs once it is much. torch keeps it until an allocation
        # outside of a capture finds the GPU full. Inside of a capture a full GPU is an error: 103
        # GB were held after some thousand graphs.
        reserved = torch.cuda.memory_reserved(self.index)
        if reserved - self._reserved > self._properties.total_memory // _KEPT_FOR_GRAPHS:
            torch.cuda.empty_cache()
            self._reserved = torch.cuda.memory_reserved(self.index)
        self._reserved = min(reserved, self._reserved)
        side = torch.cuda.Stream(self.torch_device)
        side.wait_stream(torch.cuda.current_stream(self.index))
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream(self.index).wait_stream(side)
        self.synchronize(seconds)
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        # Not `torch.cuda.graph`: it waits without a limit, and leaves its stream current when the
        # capture breaks.
        with torch.cuda.stream(side), uncollected():
            # Other threads may go on using the GPU: watchdogs, and tunings of other groups.
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                call()
                graph.capture_end()
            except BaseException:
                # What ending it now raises or warns of says less than what broke it.
                with warnings.catch_warnings(), contextlib.suppress(RuntimeError):
                    warnings.simplefilter("ignore")
                    graph.capture_end()
                # Tell torch's allocator that the capture is over. If ending it failed, torch before
                # 2.13 assumes that it goes on (pytorch/pytorch#180395) and releases no memory any
                # more. The allocator still calls the graph, so the graph is kept.
                with contextlib.suppress(RuntimeError):  # a torch that has ended it
                    torch._C._cuda_endAllocateToPool(self.index, pool)
                    self._broken.append(graph)
                raise
        return graph.replay

    def hold(self, queueing: float = 0.0) -> None:
        """Keep the current stream busy until the host has queued a call after it, so that launch
        overhead is not measured. queueing: seconds that it has taken for such calls, at most."""
        needed = min(1e3 * _QUEUEING_MARGIN * queueing, _MOST_HOLD_MILLISECONDS)
        self.sleep_milliseconds(max(needed, _LEAST_HOLD_MILLISECONDS))

    def aside(self, work: Callable[[], object]) -> None:
        """Queue ``work`` on a stream of its own, so that it is done even if the current stream is
        held up; that goes on only after it."""
        current, side = torch.cuda.current_stream(self.index), torch.cuda.Stream(self.torch_device)
        with torch.cuda.stream(side):
            work()
        current.wait_stream(side)

    def copy_stream(self, stream: torch.cuda.Stream | None = None) -> CudaCopyStream:
        """A side stream for copies: ``stream``, or a new one."""
        return CudaCopyStream(self.torch_device, stream, staged=ranks_per_gpu() > 1)

    def transfer(self, steps: Sequence[Step], streams: Sequence[CudaCopyStream]) -> CudaTransfer:
        """``steps`` ready to be queued on ``streams``, any number of times."""
        return CudaTransfer(steps, streams)

    @functools.cached_property
    def _context(self) -> int:
        return cuda_driver.primary_context(self.index)

    def current_stream(self) -> int:
        """Handle of the calling thread's current stream, which it may give to the driver now."""
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
        """The launch of ``compiled`` laid out for repetition; ``None``: only Triton can launch it.

        ``scratch(n)`` gives n bytes that no other launch uses at the same time.
        """
        if self.is_capturing() or not can_repeat(compiled, arguments):
            return None  # what is allocated in a capture belongs to the graph
        nbytes = scratch_bytes(compiled, grid)
        return RepeatedLaunch(
            compiled, grid, arguments, varying, scratch(nbytes) if nbytes else None
        )

    def launches_are_watched(self) -> bool:
        """True if launches have to be Triton's own, for somebody to see them."""
        return has_launch_hooks()


class CudaTimer:
    """Device events on the current stream."""

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


def _manner() -> str:
    """Return a suffix for the hardware name if this process does not own its GPU alone."""
    if is_interpreting():
        return " (interpreter)"
    ranks = ranks_per_gpu()
    return f" (shared by {ranks} ranks)" if ranks > 1 else ""


@functools.cache
def _driver_version() -> str:
    """Return the version of the installed driver, such as ``550.54.15``. If the kernel module does
    not report it, return the CUDA version that the driver supports, as ``major.minor``."""
    with suppress(OSError):
        found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+\d)\s", _DRIVER_FILE.read_text())
        if found is not None:
            return found.group(1)
    version = ctypes.c_int()
    status = cuda_driver.function("cuDriverGetVersion")(ctypes.byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}" if status == 0 else "unknown"


@functools.cache
def _peer_access() -> str:
    """Return which GPUs of the host access one another's memory: ``full mesh of 4``, ``6 of 12
    pairs``, or ``none``. NVLink and PCIe are not distinguished.
    """
    count = torch.cuda.device_count()
    pairs = list(itertools.permutations(range(count), 2))
    reached = sum(torch.cuda.can_device_access_peer(*pair) for pair in pairs)
    if reached == 0:
        return "none"
    return f"full mesh of {count}" if reached == len(pairs) else f"{reached} of {len(pairs)} pairs"
