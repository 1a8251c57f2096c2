"""What compiled kernels must do that store tiles to other ranks: patterns in PTX for sm_90."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Any

import triton

from triton_dist.testing.compile_only import Compiled, compile_kernel

ACQUIRE = "ld.global.sys.acquire"
RELEASE = re.compile(r"(atom|red)\.global\.sys\.release|(atom|red)\.release\.sys\.global")
TMA_LOAD = re.compile(r"cp\.async\.bulk\.tensor\.\dd\.shared")
TMA_STORE = re.compile(r"cp\.async\.bulk\.tensor\.\dd\.global")
FULL_WAIT = re.compile(r"cp\.async\.bulk\.wait_group\s+0")
PROXY_FENCE = "fence.proxy.async.global"


def compile_launch(launch: Any) -> Compiled:
    return compile_kernel(launch.kernel, *launch.args, grid=launch.grid, **launch.options)


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
