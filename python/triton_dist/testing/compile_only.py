"""Run Triton's JIT without a GPU: bind, specialise and compile to a cubin, but do not launch.

A substitute for the CUDA driver becomes Triton's active driver. ``@triton.autotune`` and
``OutOfResources`` errors then behave as on a GPU; launches are recorded instead of run. Pass CPU
tensors, or ``device="meta"`` tensors, which use no memory, instead of device tensors.

    >>> with compile_only(arch=90) as driver:
    ...     compiled = compile_kernel(matmul, a, b, c, M, N, K, grid=(132,), BLOCK_SIZE_M=128)
    >>> compiled.registers, compiled.stack_bytes, compiled.shared_memory_bytes

Kernels must be decorated while ``TRITON_INTERPRET`` is not set: Triton chooses between compiling
and interpreting at decoration.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.interpreter import InterpretedFunction

from triton_dist.errors import DeviceUnavailable, InvalidArgument
from triton_dist.runtime import triton_compat
from triton_dist.runtime.compiling.facts import resource_usage


@dataclass(frozen=True)
class Hardware:
    """Device properties that Triton's compiler and launcher query."""

    shared_memory_bytes: int
    """Largest shared memory of one block (opt-in limit)."""
    multiprocessors: int


HARDWARE = {  # by compute capability * 10
    80: Hardware(shared_memory_bytes=166912, multiprocessors=108),  # A100
    90: Hardware(shared_memory_bytes=232448, multiprocessors=132),  # H100, H200
    100: Hardware(shared_memory_bytes=232448, multiprocessors=148),  # B200
}
MAX_THREADS_PER_BLOCK = 1024


@dataclass(frozen=True)
class Compiled:
    """One kernel, compiled for one architecture, with its resource usage."""

    name: str
    arch: int
    num_warps: int
    num_stages: int
    registers: int
    """Registers per thread at launch."""
    stack_bytes: int
    """Local memory per thread in bytes: register spills and local arrays."""
    shared_memory_bytes: int
    """Dynamic shared memory per block in bytes."""
    kernel: Any
    """Triton's ``CompiledKernel``; ``kernel.asm`` has every stage from ``ttir`` to ``cubin``."""

    @property
    def ptx(self) -> str:
        return str(self.kernel.asm["ptx"])


@dataclass(frozen=True)
class Launch:
    """A recorded launch. ``args`` includes the ``tl.constexpr`` arguments."""

    name: str
    grid: tuple[int, int, int]
    args: tuple[Any, ...]


class _Utils:
    """Substitute for the native part of the driver: device properties and module loading."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._handles = itertools.count(1)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": self._hardware.shared_memory_bytes,
            "multiprocessor_count": self._hardware.multiprocessors,
            "max_num_regs": 65536,
            "warpSize": 32,
        }

    def load_binary(
        self, name: str, cubin: bytes, shared: int, device: int
    ) -> tuple[None, int, int, int, int]:
        """Return (module, function, registers, spilled words, max threads).

        The function is a unique number. The module is ``None``: from Triton 3.8 on, a kernel's
        destructor unloads its module with the driver that is active then, possibly a GPU's.
        """
        registers, stack = resource_usage(cubin)
        return None, next(self._handles), registers, stack // 4, MAX_THREADS_PER_BLOCK


class CompileOnlyDriver(triton_compat.HostDriver):
    """Triton driver for an architecture without its GPU.

    The driver returns the architecture, such as 90, as device index. Triton caches compiled kernels
    by device index, so one process can compile for several architectures in sequence.
    """

    def __init__(self, arch: int, hardware: Hardware) -> None:
        super().__init__(GPUTarget("cuda", arch, 32))
        self.arch = arch
        self.hardware = hardware
        self.utils = _Utils(hardware)
        self.launches: list[Launch] = []

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:
        """Return a function that ``CompiledKernel.run`` calls instead of the native launcher."""

        def launch(
            x: int, y: int, z: int, stream: int, function: int, packed: Any, launch_metadata: Any,
            enter: Any, exit_: Any, *args: Any,
        ) -> None:  # fmt: skip
            self.launches.append(Launch(metadata.name, (x, y, z), args))

        return launch

    def map_python_to_cpp_type(self, ty: str) -> str:
        from triton.backends.nvidia.driver import ty_to_cpp

        return str(ty_to_cpp(ty))

    def get_current_device(self) -> int:
        return self.arch

    def set_current_device(self, device: int) -> None:
        """Do nothing: there is one device."""

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
        return divmod(self.arch, 10)

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """Return a benchmark for ``@triton.autotune`` that compiles each config and returns equal
        times, so that the first config wins."""

        def benchmark(
            kernel_call: Callable[[], Any], *, quantiles: Sequence[float] = (0.5,), **_: Any
        ) -> list[float]:
            kernel_call()
            return [1.0] * len(quantiles)

        return benchmark


def install(
    arch: int = 90, *, shared_memory_bytes: int | None = None, multiprocessors: int | None = None
) -> CompileOnlyDriver:
    """From now on, make Triton compile kernels for ``sm_<arch>`` and record launches.

    Args:
        arch: compute capability times 10, a key of ``HARDWARE``.
        shared_memory_bytes: largest shared memory of a block; default: the architecture's.
        multiprocessors: number of SMs; default: the architecture's.

    Raises:
        InvalidArgument: ``arch`` is not in ``HARDWARE``.
    """
    if arch not in HARDWARE:
        raise InvalidArgument("install", "arch", arch, f"one of {sorted(HARDWARE)}")
    default = HARDWARE[arch]
    hardware = Hardware(
        default.shared_memory_bytes if shared_memory_bytes is None else shared_memory_bytes,
        default.multiprocessors if multiprocessors is None else multiprocessors,
    )
    triton_compat.pin_defaults()
    # Triton caches the shared-memory limit by device index; each call may set another limit.
    triton.compiler.compiler.max_shared_mem.cache_clear()
    driver = CompileOnlyDriver(arch, hardware)
    triton.runtime.driver.set_active(driver)
    return driver


@contextmanager
def compile_only(
    arch: int = 90, *, shared_memory_bytes: int | None = None, multiprocessors: int | None = None
) -> Iterator[CompileOnlyDriver]:
    """Context manager in which :func:`install` is active; yields the driver with ``launches``."""
    config = triton.runtime.driver
    before = config._active
    driver = install(arch, shared_memory_bytes=shared_memory_bytes, multiprocessors=multiprocessors)
    try:
        yield driver
    finally:
        config._active = before
        triton.compiler.compiler.max_shared_mem.cache_clear()


def compile_kernel(fn: Any, /, *args: Any, grid: Any = (1,), **kwargs: Any) -> Compiled:
    """Compile the kernel that ``fn[grid](*args, **kwargs)`` would launch.

    Args:
        fn: ``@triton.jit`` kernel, or one with ``@triton.autotune``, for which the first config
            that compiles is returned.

    Raises:
        OutOfResources: Triton's error, as on a GPU.
        DeviceUnavailable: no compile-only driver is installed, or ``fn`` is interpreted.
    """
    driver = triton.runtime.driver._active
    if not isinstance(driver, CompileOnlyDriver):
        raise DeviceUnavailable(
            "compile-only", "its driver is not installed", "Call install() or use compile_only()."
        )
    innermost = fn
    while not isinstance(innermost, InterpretedFunction) and hasattr(innermost, "run"):
        if isinstance(innermost, triton.JITFunction):
            break
        innermost = innermost.fn
    if isinstance(innermost, InterpretedFunction):
        raise DeviceUnavailable(
            "compile-only",
            f"{innermost.__name__} was decorated for the interpreter",
            "Import it in a process in which TRITON_INTERPRET is not set.",
        )
    kernel = fn.run(*args, grid=grid, warmup=False, **kwargs)
    registers, stack_bytes = resource_usage(kernel.asm["cubin"])
    return Compiled(
        name=kernel.metadata.name,
        arch=driver.arch,
        num_warps=kernel.metadata.num_warps,
        num_stages=kernel.metadata.num_stages,
        registers=registers,
        stack_bytes=stack_bytes,
        shared_memory_bytes=kernel.metadata.shared,
        kernel=kernel,
    )
