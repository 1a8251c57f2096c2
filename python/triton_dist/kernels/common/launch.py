"""A kernel with everything that its launch needs."""

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


class Bounded(dict[K, V]):
    """A cache that a service with very many shapes cannot fill without end: a dict that is emptied
    before it has more than ``most`` entries. What comes then is made again. Entries here take a few
    KB each."""

    most = 4096

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self.most and key not in self:
            self.clear()
        super().__setitem__(key, value)


@dataclass(frozen=True)
class Launch:
    """One kernel launch that is ready to go: ``run`` it, or only ``compile`` what it would run."""

    kernel: Any
    grid: tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]]
    args: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> Any:
        """Launch; returns Triton's compiled kernel, ``None`` in the interpreter."""
        # Triton takes the memory of descriptors from an allocator that it keeps per thread context,
        # so each launch sets one. An allocator of the user stays.
        if not has_allocator():
            triton.set_allocator(_allocate)
        return self.kernel[self.grid](*self.args, **self.options)

    def compile(self) -> None:
        """Compile and load, launch nothing.

        Raises:
            CandidateFailed: it does not compile, or does not fit the device.
        """
        if is_interpreting():
            return
        try:
            compiled = self.kernel.warmup(*self.args, grid=self.grid, **self.options)
            if compiled is not None:  # None: somebody only looks what there is to compile
                compiled._init_handles()
        except Exception as failure:  # Triton's compiler raises whatever its passes raise
            raise CandidateFailed(f"{type(failure).__name__}: {failure}") from failure

    def followed_by(self, *others: Launch) -> Launch:
        """This launch, with those loaded that come after it.

        Loading a kernel waits for those that run (``cuModuleLoadData``, driver 580): after one
        that waits for peers, the host would queue nothing more until they have come.
        """
        for other in others:
            other.compile()
        return self


class Launcher:
    """Runs launches that come again and again: from the second time on in a few us of host time.

    All launches of one launcher must follow one another on the device, as the calls of one context
    do: they share the scratch memory of their descriptors.
    """

    def __init__(self) -> None:
        self._device = current_device()
        self._laid_out: Bounded[Any, tuple[Any, Any]] = Bounded()
        self._scratch: torch.Tensor | None = None

    def run(
        self,
        key: Any,
        launch: Callable[[], Launch],
        tensors: Mapping[str, torch.Tensor] = _NO_TENSORS,
        alive: Any = None,
    ) -> None:
        """Run ``launch()``, or repeat the one that had the same key.

        Args:
            key: equal only for launches that differ in nothing but the addresses of ``tensors``.
                May hold the ``id`` of what is in ``alive``.
            launch: makes the launch, the first time.
            tensors: those that may lie elsewhere each time, by the names of the kernel's arguments;
                a member of a tuple by both names, as in ``"out.c"``.
        """
        addresses, bits = [], 0
        for tensor in tensors.values():
            address = tensor.data_ptr()
            addresses.append(address)
            bits |= address
        # Triton compiles another kernel for pointers that are no multiples of 16 bytes, and TMA
        # takes none such.
        if bits % _TMA_ALIGNMENT:
            key = key, tuple([address % _TMA_ALIGNMENT for address in addresses])
        known = self._laid_out.get(key)
        watched = self._device.launches_are_watched()
        if known is not None and not watched:
            known[0](self._device.current_stream(), addresses)
            return
        made = launch()
        compiled = made.run()
        if compiled is None or callable(made.grid) or watched:  # maybe a kernel that makes marks
            return
        names = made.kernel.arg_names
        arguments = dict(zip(names, made.args, strict=False)) | made.options
        repeated = self._device.repeated_launch(
            compiled, made.grid, arguments, tuple(tensors), self._at_least
        )
        if repeated is not None:
            self._laid_out[key] = repeated, alive

    def repeat(self, launch: Launch) -> None:
        """Run a launch that was made anew, or repeat one that differs in addresses alone."""
        tensors, others = {}, []
        for name, value in zip(launch.kernel.arg_names, launch.args, strict=False):
            fields = getattr(value, "_fields", None)
            members = {name: value}
            if fields is not None:
                members = {f"{name}.{each}": getattr(value, each) for each in fields}
            for each, member in members.items():
                if isinstance(member, torch.Tensor):
                    tensors[each] = member
                    others.append(member.dtype)
                else:
                    others.append(member)
        key = launch.kernel, launch.grid, tuple(others), tuple(launch.options.items())
        self.run(key, lambda: launch, tensors)

    def _at_least(self, nbytes: int) -> torch.Tensor:
        if self._scratch is None or self._scratch.nbytes < nbytes:
            with torch.inference_mode(False):
                self._scratch = torch.empty(
                    nbytes, dtype=torch.int8, device=self._device.torch_device
                )
        return self._scratch


def _allocate(nbytes: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.int8, device="cuda")


def fits_descriptor(*matrices: torch.Tensor) -> bool:
    """Say whether TMA can read and write these 2-D tensors as they lie: one unit stride, the other
    stride and the start multiples of 16 bytes."""
    return all(
        min(matrix.stride()) == 1
        and max(matrix.stride()) * matrix.element_size() % _TMA_ALIGNMENT == 0
        and matrix.data_ptr() % _TMA_ALIGNMENT == 0
        for matrix in matrices
    )


def as_rows(matrix: torch.Tensor) -> torch.Tensor:
    """``matrix``; a contiguous one with the strides of such a one, since of a single row any
    stride counts as contiguous."""
    if matrix.shape[0] == 1 and matrix.is_contiguous():
        return matrix.as_strided(matrix.shape, (matrix.shape[1], 1))
    return matrix


def dot_precision(dtype: torch.dtype) -> str:
    """``input_precision`` of ``tl.dot`` that means for ``dtype`` what torch's matmul means now."""
    return (
        "ieee" if dtype is torch.float32 and not torch.backends.cuda.matmul.allow_tf32 else "tf32"
    )
