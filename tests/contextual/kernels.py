"""Autotuned kernels, made anew for each test because a kernel keeps its choice, and subclasses of
Triton's ``Autotuner`` with a ``run`` of their own, as libraries have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner

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


class Table:
    """A library's table of winners: knows ``in`` and ``[]``, and could lie on disk."""

    def __init__(self) -> None:
        self.rows: dict[Any, str] = {}
        self.written: list[Any] = []

    def __contains__(self, key: Any) -> bool:
        return key in self.rows

    def __getitem__(self, key: Any) -> triton.Config:
        name, value = self.rows[key].split(": ")[:2]
        return triton.Config({name: int(value.split(",")[0])})

    def __setitem__(self, key: Any, config: triton.Config) -> None:
        self.written.append(config)
        self.rows[key] = str(config)


class TableTuner(Autotuner):
    """Looks in its own table, by keys of its own; else prunes, and benches by itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cache = Table()  # type: ignore[assignment]
        self.benched: list[int] = []

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        key = f"n is {self.nargs['n']}"
        if key not in self.cache:
            self.cache[key] = self.search(self.prune_configs(kwargs), args, kwargs)
        self.best_config = self.cache[key]
        return self.fn.run(*args, **kwargs, **self.best_config.all_kwargs())

    def search(self, configs: list[Any], args: Any, kwargs: Any) -> Any:
        for config in configs:
            self.benched.append(config.kwargs["BLOCK"])
            self.fn.run(*args, **kwargs, **config.all_kwargs())
        return configs[0]


class SuperTuner(Autotuner):
    """Does something of its own around Triton's ``run``, with a table that is no dict."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cache = Table()  # type: ignore[assignment]
        self.around = 0

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.around += 1
        return super().run(*args, **kwargs)


class LoneTuner(Autotuner):
    """Comes to nothing of Triton's."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn.run(*args, **kwargs, **self.configs[-1].all_kwargs())


def tuned_by(kind: type[Autotuner], kernel: Any, configs: list[Any], **options: Any) -> Any:
    return kind(kernel, kernel.arg_names, configs, ["n"], None, None, **options)
