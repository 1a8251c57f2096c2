"""Compile, run and repeat kernel launches. A repeated launch takes a few µs of host time; a launch
through Triton takes tens of µs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import triton

from triton_dist.errors import CandidateFailed
from triton_dist.runtime.device import current_device
from triton_dist.runtime.triton_compat import has_allocator, is_interpreting

K = TypeVar("K")
V = TypeVar("V")
_TMA_ALIGNMENT = 16
_NO_TENSORS: Mapping[str, torch.Tensor] = {}


class BoundedDict(dict[K, V]):
    """A dict used as a cache: an insertion that would exceed ``max_entries`` first removes all
    entries. An entry takes a few KB."""

    max_entries = 4096

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self.max_entries and key not in self:
            self.clear()
        super().__setitem__(key, value)


@dataclass(frozen=True)
class Launch:
    """A kernel with its grid and arguments."""

    kernel: Any
    grid: tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]]
    args: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> Any:
        """Launch and return Triton's compiled kernel, or ``None`` in the interpreter."""
        # Triton allocates memory for device-side descriptors through an allocator. Keep the
        # allocator that the user may have set.
        if not has_allocator():
            triton.set_allocator(_allocate)
        return self.kernel[self.grid](*self.args, **self.options)

    def compile(self) -> None:
        """Compile and load the kernel without launching it.

        Raises:
            CandidateFailed: the kernel does not compile or does not fit the device.
        """
        if is_interpreting():
            return
        try:
            compiled = self.kernel.warmup(*self.args, grid=self.grid, **self.options)
            if compiled is not None:  # ``None`` if ``kernels_to_compile`` only lists kernels
                compiled._init_handles()
        except Exception as failure:  # Triton's compiler can raise any exception.
            raise CandidateFailed(f"{type(failure).__name__}: {failure}") from failure

    def preload(self, *next_launches: Launch) -> Launch:
        """Load the kernels of ``next_launches``, then return this launch.

        Loading a kernel waits for running kernels (``cuModuleLoadData``, driver 580). If this
        launch's kernel waits for other ranks, a later load would block the host until they arrive.
        """
        for launch in next_launches:
            launch.compile()
        return self


class Launcher:
    """Repeat launches with a few µs of host time each, unless their grid is callable. All launches
    share scratch memory for their TMA descriptors, so they must execute in order on the device."""

    def __init__(self) -> None:
        self._device = current_device()
        self._prepared: BoundedDict[Any, tuple[Any, Any]] = BoundedDict()
        self._scratch: torch.Tensor | None = None

    def run(
        self,
        key: Any,
        launch: Callable[[], Launch],
        tensors: Mapping[str, torch.Tensor] = _NO_TENSORS,
        keep_alive: Any = None,
    ) -> None:
        """Run ``launch()``, or repeat the earlier launch that had an equal key.

        Args:
            key: launches with equal keys may differ only in the addresses of ``tensors``. The key
                may contain the ``id`` of objects in ``keep_alive``.
            launch: builds the launch; called for new keys.
            tensors: tensors whose addresses differ between launches, by kernel argument. The name
                ``"out.c"`` is the member ``c`` of a named tuple ``out``.
            keep_alive: object to keep alive as long as the launch can be repeated.
        """
        addresses, address_bits = [], 0
        for tensor in tensors.values():
            address = tensor.data_ptr()
            addresses.append(address)
            address_bits |= address
        # Triton compiles separate kernels for 16-byte aligned pointers and for other pointers.
        if address_bits % _TMA_ALIGNMENT:
            key = key, tuple([address % _TMA_ALIGNMENT for address in addresses])
        prepared = self._prepared.get(key)
        must_use_triton = self._device.must_launch_through_triton()
        if prepared is not None and not must_use_triton:
            prepared[0](self._device.current_stream(), addresses)
            return
        new_launch = launch()
        compiled = new_launch.run()
        # Do not keep the kernel if launches must go through Triton, because a profiling tool may
        # have instrumented it.
        if compiled is None or callable(new_launch.grid) or must_use_triton:
            return
        names = new_launch.kernel.arg_names
        arguments = dict(zip(names, new_launch.args, strict=False)) | new_launch.options
        repeated = self._device.repeated_launch(
            compiled, new_launch.grid, arguments, tuple(tensors), self._scratch_buffer
        )
        if repeated is not None:
            self._prepared[key] = repeated, keep_alive

    def repeat(self, launch: Launch) -> None:
        """Run ``launch``, or repeat an earlier launch that differs only in tensor addresses."""
        # Arguments that are not tensors, and the dtypes of tensors, become part of the key.
        tensors, key_parts = {}, []
        for name, value in zip(launch.kernel.arg_names, launch.args, strict=False):
            fields = getattr(value, "_fields", None)
            members = {name: value}
            if fields is not None:
                members = {f"{name}.{each}": getattr(value, each) for each in fields}
            for each, member in members.items():
                if isinstance(member, torch.Tensor):
                    tensors[each] = member
                    key_parts.append(member.dtype)
                else:
                    key_parts.append(member)
        key = launch.kernel, launch.grid, tuple(key_parts), tuple(launch.options.items())
        self.run(key, lambda: launch, tensors)

    def _scratch_buffer(self, nbytes: int) -> torch.Tensor:
        if self._scratch is None or self._scratch.nbytes < nbytes:
            with torch.inference_mode(False):
                self._scratch = torch.empty(
                    nbytes, dtype=torch.int8, device=self._device.torch_device
                )
        return self._scratch


def _allocate(nbytes: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.int8, device="cuda")


def fits_descriptor(*matrices: torch.Tensor) -> bool:
    """Return whether TMA can address these 2-D tensors. TMA requires one stride of 1. The other
    stride and the address must be multiples of 16 bytes."""
    return all(
        min(matrix.stride()) == 1
        and max(matrix.stride()) * matrix.element_size() % _TMA_ALIGNMENT == 0
        and matrix.data_ptr() % _TMA_ALIGNMENT == 0
        for matrix in matrices
    )


def normalise_strides(matrix: torch.Tensor) -> torch.Tensor:
    """Return ``matrix`` with the strides of a contiguous tensor if it has a single row. PyTorch
    calls a one-row tensor contiguous whatever its row stride. Triton would compile different
    kernels for equal shapes with different row strides."""
    if matrix.shape[0] == 1 and matrix.is_contiguous():
        return matrix.as_strided(matrix.shape, (matrix.shape[1], 1))
    return matrix


def int32_vectors(device: torch.device, *sizes: int) -> tuple[torch.Tensor, ...]:
    """Return int32 vectors of ``sizes`` in one allocation, each at a multiple of 16 bytes."""
    padded = [-(-size // 4) * 4 for size in sizes]
    vectors = torch.empty(sum(padded), dtype=torch.int32, device=device).split(padded)
    return tuple(vector[:size] for vector, size in zip(vectors, sizes, strict=True))


def dot_precision(dtype: torch.dtype) -> str:
    """Return the ``input_precision`` for ``tl.dot``: ``"ieee"`` for fp32 unless torch allows TF32,
    else ``"tf32"``, which has no effect on other dtypes."""
    return (
        "ieee" if dtype is torch.float32 and not torch.backends.cuda.matmul.allow_tf32 else "tf32"
    )
