"""Autotuned kernels for the tests, made anew for each: a kernel keeps what was chosen for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

import triton_dist
from triton_dist.autotuner import contextual_autotune


@triton_dist.jit
def scale_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """y = 2 x"""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + index, tl.load(x_ptr + index, mask=index < n) * 2, mask=index < n)


@triton_dist.jit
def add_kernel(x_ptr, n, BLOCK: tl.constexpr):
    """x += 1, in place"""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + index, tl.load(x_ptr + index, mask=index < n) + 1, mask=index < n)


@triton_dist.jit
def sum_kernel(x_ptr, total_ptr, n, BLOCK: tl.constexpr):
    """total += sum(x)"""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(total_ptr, tl.sum(tl.load(x_ptr + index, mask=index < n, other=0.0)))


@triton_dist.jit
def scale_optionally_kernel(x_ptr, y_ptr, total_ptr, n, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """y = 2 x; total, if there is one, += number of programs"""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + index, tl.load(x_ptr + index, mask=index < n) * 2, mask=index < n)
    if COUNTS:
        tl.atomic_add(total_ptr, 1.0)


def configs(*blocks: int, **options: Any) -> list[triton.Config]:
    return [triton.Config({"BLOCK": block}, **options) for block in blocks]


def autotuned(kernel: Any, candidates: Sequence[triton.Config], **options: Any) -> Any:
    options.setdefault("key", ["n"])
    return triton.autotune(configs=list(candidates), **options)(kernel)


def scale(kernel: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    n = x.numel()
    kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, n)
    return y


def add(kernel: Any, x: torch.Tensor) -> torch.Tensor:
    n = x.numel()
    kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, n)
    return x


def total(kernel: Any, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    n = x.numel()
    kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, out, n)
    return out


def scaling(
    *blocks: int,
    fails: Sequence[int] = (),
    n_repeat: int = 1,
    n_warmup: int = 1,
    kernel: Any = scale_kernel,
    **options: Any,
) -> Any:
    """A contextual function that doubles its argument by a kernel with these ``blocks``.

    Its ``kernel`` and its ``spy``, which fails with the blocks ``fails``, are attributes.
    """
    tuner = autotuned(kernel, configs(*blocks), **options)
    function = contextual_autotune(n_repeat=n_repeat, n_warmup=n_warmup)(lambda x: scale(tuner, x))
    function.kernel, function.spy = tuner, Spy(tuner, *fails)
    return function


class Spy:
    """Stands for the kernel inside an ``Autotuner`` and notes with which BLOCK it is launched.

    Args:
        fails: blocks with which a launch raises.
    """

    def __init__(self, tuner: Any, *fails: int) -> None:
        self.fn, self.tuner, self.fails = tuner.fn, tuner, fails
        self.blocks: list[int] = []
        tuner.fn = self

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.blocks.append(kwargs["BLOCK"])
        if kwargs["BLOCK"] in self.fails:
            raise triton.runtime.errors.OutOfResources(1000, 100, "shared memory")
        return self.fn.run(*args, **kwargs)


def scale_optionally(kernel: Any, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    y = torch.empty_like(x)
    n = x.numel()
    kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, out, n, out is not None)
    return y
