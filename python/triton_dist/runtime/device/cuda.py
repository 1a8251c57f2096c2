"""One NVIDIA GPU: timing, facts, and streams whose copies use a copy engine and no SM."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import re
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch._C._distributed_c10d import _SymmetricMemory

_WAIT_VALUE_EQ = 0x1  # CU_STREAM_WAIT_VALUE_EQ
_SPIN_SECONDS = 5e-3
_POLL_SECONDS = 50e-6
_HOLD_MILLISECONDS = 0.5
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


class CudaDevice:
    """The GPU with CUDA ordinal ``index``."""

    name = "cuda"

    def __init__(self, index: int) -> None:
        self.index = index
        self.torch_device = torch.device("cuda", index)
        self._properties = torch.cuda.get_device_properties(index)
        self.num_sms: int = self._properties.multi_processor_count
        # Asked once: torch asks the driver each time, for 0.6 ms (measured on H200).
        self._kilohertz: int = self._properties.clock_rate
        # Tensor descriptors become TMA from compute capability 9.0 on; before, pointers are faster.
        self.prefers_descriptors: bool = self._properties.major >= 9

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
        """Overwrite a buffer several times the size of the L2 cache."""
        self._flush_buffer.zero_()

    @functools.cached_property
    def _flush_buffer(self) -> torch.Tensor:
        nbytes = max(4 * self._properties.L2_cache_size, 64 << 20)
        return torch.empty(nbytes, dtype=torch.int8, device=self.torch_device)

    def facts(self) -> Mapping[str, str]:
        capability = f"{self._properties.major}.{self._properties.minor}"
        return {
            "gpu": self._properties.name,
            "gpus_on_host": str(torch.cuda.device_count()),
            "capability": capability,
            "sms": str(self.num_sms),
            "driver": _driver_version(),
            "peer_access": _peer_access(),
        }

    def shared_memory_bytes(self) -> int:
        """Largest dynamic shared memory of one block, in bytes (opt-in limit)."""
        # torch's type stubs do not know the field
        return int(self._properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

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
        side = torch.cuda.Stream(self.torch_device)
        side.wait_stream(torch.cuda.current_stream(self.index))
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream(self.index).wait_stream(side)
        self.synchronize(seconds)
        graph = torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`: it waits without a limit, and leaves its stream current when the
        # capture breaks.
        with torch.cuda.stream(side):
            # Other threads may go on using the GPU: watchdogs, and tunings of other groups.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                call()
            except BaseException:
                # What ending it now raises or warns of says less than what broke it.
                with warnings.catch_warnings(), contextlib.suppress(RuntimeError):
                    warnings.simplefilter("ignore")
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay

    def hold(self) -> None:
        """Keep the current stream busy until the host has queued a call behind it, so that launch
        overhead is not measured (about 0.3 ms for an overlapped op)."""
        self.sleep_milliseconds(_HOLD_MILLISECONDS)

    def copy_stream(self) -> CudaCopyStream:
        return CudaCopyStream(self.torch_device)


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


class CudaCopyStream:
    """A high-priority side stream for copies between GPUs.

    Nothing that it queues needs an SM: copies go to a copy engine, flag writes and waits to the
    stream's front end. So a full grid that spins on what it brings cannot starve it (a one-block
    wait kernel in this place dead-locked all ranks, measured on H200).
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1)

    def after_current(self) -> None:
        """Let what follows begin only after all that the current stream holds now."""
        self._stream.wait_stream(torch.cuda.current_stream())

    def join_current(self) -> None:
        """Let the current stream go on only after all that this stream holds now."""
        torch.cuda.current_stream().wait_stream(self._stream)

    def close(self) -> None:
        """Nothing to end: torch keeps a pool of streams."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Queue ``destination.copy_(source)``; both contiguous, same shape and dtype."""
        with torch.cuda.stream(self._stream):
            destination.copy_(source, non_blocking=True)

    def write_flag(self, flags: torch.Tensor, index: int, value: int) -> None:
        """Queue ``flags[index] = value``; ``flags`` is a contiguous 1-D int32 tensor."""
        with torch.cuda.stream(self._stream):
            _SymmetricMemory.stream_write_value32(flags.view(torch.uint32), index, value)

    def wait_flag(self, flags: torch.Tensor, index: int, value: int) -> None:
        """Hold what follows until ``flags[index] == value``."""
        address = flags.data_ptr() + index * flags.element_size()
        status = _driver().cuStreamWaitValue32_v2(
            ctypes.c_void_p(self._stream.cuda_stream),
            ctypes.c_uint64(address),
            ctypes.c_uint32(value),
            ctypes.c_uint(_WAIT_VALUE_EQ),
        )
        if status != 0:
            raise RuntimeError(
                f"cuStreamWaitValue32 failed with CUresult {status} on {self._stream}"
            )


@functools.cache
def _driver() -> ctypes.CDLL:
    # torch has no binding for the wait half of stream memory operations.
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _driver_version() -> str:
    """Version of the installed driver, such as ``550.54.15``; where the kernel does not show it,
    that of CUDA that it supports, as ``major.minor``."""
    with suppress(OSError):
        found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+\d)\s", _DRIVER_FILE.read_text())
        if found is not None:
            return found.group(1)
    version = ctypes.c_int()
    status = _driver().cuDriverGetVersion(ctypes.byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}" if status == 0 else "unknown"


@functools.cache
def _peer_access() -> str:
    """How the host's GPUs reach one another's memory: ``full mesh of 4``, ``6 of 12 pairs``, or
    ``none``.

    NVLink is not told from PCIe here, but a host whose GPUs are joined differently is.
    """
    count = torch.cuda.device_count()
    pairs = list(itertools.permutations(range(count), 2))
    reached = sum(torch.cuda.can_device_access_peer(*pair) for pair in pairs)
    if reached == 0:
        return "none"
    return f"full mesh of {count}" if reached == len(pairs) else f"{reached} of {len(pairs)} pairs"
