"""Seed random number generators, save and restore their states, and create random operands."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from triton_dist.errors import InvalidArgument
from triton_dist.runtime.device import current_device

Size = int | Callable[[], int]


def seed_everything(seed: int) -> None:
    """Seed the random generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def init_seed(seed: int = 0) -> None:
    """Call ``seed_everything``. Disable TF32 and 16-bit accumulation in matrix products."""
    seed_everything(seed)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


class RandomState:
    """Saved states of the random number generators that a call may use.

    These are torch's default generators of the CPU and of each GPU, each ``torch.Generator`` in
    ``values``, and the global generators of Python and NumPy (not with ``torch_only``). The default
    generators of GPUs are included only if CUDA is initialised. GPU generators are skipped during a
    capture of the current stream, because their states cannot be read then.
    """

    def __init__(self, values: Any = (), torch_only: bool = False) -> None:
        given = (each for each in tree_leaves(values) if isinstance(each, torch.Generator))
        generators = [torch.default_generator, *given]
        if torch.cuda.is_initialized():
            generators += torch.cuda.default_generators
            if torch.cuda.is_current_stream_capturing():
                generators = [each for each in generators if each.device.type != "cuda"]
        self._torch = [(each, each.get_state()) for each in generators]
        self._python = None if torch_only else random.getstate()
        self._numpy = None if torch_only else np.random.get_state(legacy=False)

    def rewind(self, numpy: bool = True) -> None:
        """Restore the states. This takes 60 µs for NumPy and 5 µs for all other generators."""
        for generator, state in self._torch:
            generator.set_state(state)
        if self._python is not None:
            random.setstate(self._python)
        if numpy and self._numpy is not None:
            np.random.set_state(self._numpy)

    def has_changed(self) -> bool:
        """Return whether the states of torch's generators have changed."""
        return any(not torch.equal(each.get_state(), state) for each, state in self._torch)


def rand_tensor(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | int | None = None
) -> torch.Tensor:
    """Return uniform random values: floats in [-1, 1), or integers from the dtype's minimum to its
    maximum - 1.

    Args:
        shape: shape of the tensor.
        dtype: a floating or integer dtype.
        device: device of the tensor; default: the device on which this process runs kernels.

    Raises:
        InvalidArgument: ``dtype`` is neither a floating nor an integer dtype.
    """
    if not isinstance(dtype, torch.dtype) or dtype == torch.bool or dtype.is_complex:
        raise InvalidArgument("rand_tensor", "dtype", dtype, "a floating or integer torch.dtype")
    device = current_device().torch_device if device is None else device
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return torch.randint(limits.min, limits.max, tuple(shape), dtype=dtype, device=device)
    return (torch.rand(tuple(shape), dtype=torch.float32, device=device) * 2 - 1).to(dtype)


def generate_data(
    configs: Iterable[Sequence[Any] | None],
) -> Iterator[tuple[torch.Tensor | None, ...]]:
    """Yield tuples of random tensors, without end. A tuple has a tensor per entry of ``configs``.

    An entry describes a tensor: (shape, dtype, (scale, offset)) or (shape, dtype, (scale, offset),
    device). Values are uniform in [offset - scale, offset + scale). An entry ``None`` yields
    ``None``. The shape is a size, a sequence of sizes, or a function that returns a shape. A size
    is an int or a function that returns an int. Functions are called again for each tuple.
    """
    entries = list(configs)
    while True:
        yield tuple(None if entry is None else _operand(*entry) for entry in entries)


def _operand(
    shape: Size | Sequence[Size],
    dtype: torch.dtype,
    scale_and_offset: tuple[float, float],
    device: torch.device | str | int | None = None,
) -> torch.Tensor:
    shape_or_size = shape() if callable(shape) else shape
    sizes = [shape_or_size] if isinstance(shape_or_size, int) else shape_or_size
    exact_shape = tuple(size() if callable(size) else size for size in sizes)
    device = current_device().torch_device if device is None else device
    scale, offset = scale_and_offset
    if dtype.is_floating_point:
        floats = torch.rand(exact_shape, dtype=torch.float32, device=device) * 2 - 1
        return (floats * scale + offset).to(dtype)
    integers = torch.randint(-int(scale), int(scale), exact_shape, device=device)
    return (integers + int(offset)).to(dtype)
