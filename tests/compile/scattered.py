"""Checks of compiled kernels: their limits, and patterns in their PTX."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import triton

from triton_dist.testing.compile_only import HARDWARE, Compiled, compile_kernel

ACQUIRE = "ld.global.sys.acquire"
RELEASE = re.compile(r"(atom|red)\.global\.sys\.release|(atom|red)\.release\.sys\.global")
TMA_LOAD = re.compile(r"cp\.async\.bulk\.tensor\.\dd\.shared")
TMA_STORE = re.compile(r"cp\.async\.bulk\.tensor\.\dd\.global")
FULL_WAIT = re.compile(r"cp\.async\.bulk\.wait_group\s+0")
PROXY_FENCE = "fence.proxy.async.global"
WGMMA = "wgmma.mma_async"
REGISTERS = 65536


def matrix(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return a tensor without memory."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def right(
    K: int, N: int, layout: str = "row-major", dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Return the right operand of a product."""
    return matrix(N, K, dtype=dtype).T if layout == "column-major" else matrix(K, N, dtype=dtype)


def words(count: int = 4096) -> torch.Tensor:
    """Return flags or a table of addresses, without memory."""
    return matrix(count, dtype=torch.int64)


def compile_launch(launch: Any) -> Compiled:
    return compile_kernel(launch.kernel, *launch.args, grid=launch.grid, **launch.options)


def assert_fits(
    kernel: Compiled,
    *,
    stack_bytes: int = 0,
    programs: int = 1,
    tma_loads: int | None = None,
    has: Sequence[str | re.Pattern[str]] = (),
    lacks: Sequence[str | re.Pattern[str]] = (),
) -> None:
    """Assert that ``programs`` blocks fit on a multiprocessor and no more than ``stack_bytes``
    spill. Assert also how many TMA loads the PTX has, and which patterns it has and lacks."""
    assert kernel.stack_bytes <= stack_bytes
    # 1 KB of shared memory goes to each block beyond its own.
    limit = HARDWARE[kernel.arch].shared_memory_bytes + 1024
    assert (kernel.shared_memory_bytes + 1024) * programs <= limit
    assert kernel.registers * 32 * kernel.num_warps * programs <= REGISTERS
    assert f".target sm_{kernel.arch}" in kernel.ptx
    assert tma_loads is None or len(TMA_LOAD.findall(kernel.ptx)) == tma_loads
    missing = [each for each in has if not _finds(each, kernel.ptx)]
    found = [each for each in lacks if _finds(each, kernel.ptx)]
    assert (missing, found) == ([], [])


def _finds(pattern: str | re.Pattern[str], ptx: str) -> bool:
    return pattern in ptx if isinstance(pattern, str) else bool(pattern.search(ptx))


def quick(rows: Sequence[Any], *kept: Any) -> list[Any]:
    """Parameters of a test; all ``rows`` but ``kept`` run in ``make stress`` only."""
    assert set(kept) <= set(rows)
    return [pytest.param(*row, marks=() if row in kept else pytest.mark.stress) for row in rows]


def hardest(tiles: Sequence[triton.Config]) -> list[int]:
    """Indices of the tiles that no other one of as many warps surpasses, both in what a thread
    accumulates and in shared memory: the others fit if these do, and are compiled for GPUs in
    ``tests/gpu``, as every candidate is."""
    return [
        index
        for index, config in enumerate(tiles)
        if not any(
            _kind(other) == _kind(config)
            and (_burdens(other, place) > _burdens(config, index))
            and all(map(operator.ge, _burdens(other, place)[:2], _burdens(config, index)[:2]))
            for place, other in enumerate(tiles)
        )
    ]


def _kind(config: triton.Config) -> tuple[object, ...]:
    """What is another kernel, and not a larger one: few rows are multiplied otherwise."""
    tile = config.kwargs
    return config.num_warps, tile["BLOCK_SIZE_M"] == 16, tile.get("EPILOGUE_SUBTILE", False)


def _burdens(config: triton.Config, place: int) -> tuple[int, int, int]:
    """Elements that a thread accumulates, elements in shared memory; of equals the first counts."""
    rows, columns, depth = (config.kwargs[f"BLOCK_SIZE_{axis}"] for axis in "MNK")
    accumulated = rows * columns // config.num_warps
    return accumulated, (rows + columns) * depth * config.num_stages, -place


def assert_announced_later(ptx, every=1):
    """Before each release, and with nothing in between but what leads there: the full wait (one
    that ends in .read only says that shared memory may be reused), the fence between the proxies,
    and a barrier, since the release is another thread's. The first lies between the K loop of the
    program's next tile and that one's store. ``every``: only each so many-th release is of a tile
    that TMA stored."""
    for release in [*RELEASE.finditer(ptx)][::every]:
        wait = [*FULL_WAIT.finditer(ptx, 0, release.start())][-1]
        between = ptx[wait.start() : release.start()]
        assert not TMA_STORE.search(between)
        assert not re.search(r"\bbra\b", between)
        assert PROXY_FENCE in between
        assert "bar.sync" in between.split(PROXY_FENCE)[1]
    loaded = [*TMA_LOAD.finditer(ptx)][-1].end()
    assert RELEASE.search(ptx, loaded, TMA_STORE.search(ptx).start())
    assert_own_tiles_are_complete(ptx)


def assert_announced_at_once(ptx):
    """The same after the store, before anything else happens."""
    store = [*TMA_STORE.finditer(ptx)][-1]
    until_wait = ptx[store.end() : FULL_WAIT.search(ptx, store.end()).start()]
    assert not re.search(r"\bbra\b", until_wait)
    assert not RELEASE.search(until_wait)
    assert_own_tiles_are_complete(ptx)


def assert_own_tiles_are_complete(ptx):
    """After the store there is the full wait, the fence and a barrier, before flags are awaited and
    the tile is read back."""
    store = [*TMA_STORE.finditer(ptx)][-1]
    between = ptx[store.end() : ptx.index(ACQUIRE, store.end())]
    after_wait = between[FULL_WAIT.search(between).start() :]
    assert "bar.sync" in after_wait.split(PROXY_FENCE)[1]
