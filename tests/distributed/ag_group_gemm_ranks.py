"""What every rank does in the tests of AllGather + grouped GEMM, on CPU ranks and on GPUs alike."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import triton

from tests.distributed.ag_gemm_calls import NAN, some_configs
from tests.distributed.compiled_ahead import compiled_ahead, is_rehearsal, note
from triton_dist.debugging.checks import checking
from triton_dist.errors import InvalidArgument, RankDisagreement, WaitTimeout
from triton_dist.kernels.common.launch import Launch, Launcher
from triton_dist.kernels.common.moe.rows import has_fast_library
from triton_dist.kernels.common.moe.spaces import grouped_tiles
from triton_dist.kernels.common.slots.epochs import SLOTS
from triton_dist.kernels.nvidia import allgather_group_gemm, grouped_gemm
from triton_dist.kernels.nvidia.allgather_group_gemm import (
    ag_group_gemm,
    create_ag_group_gemm_context,
    run_moe_ag_triton_non_overlap,
)
from triton_dist.kernels.nvidia.allgather_group_gemm.algorithms import ALGORITHMS
from triton_dist.runtime.device import current_device
from triton_dist.runtime.waits import bounded_waits
from triton_dist.testing import assert_allclose, poisoned_empty
from triton_dist.testing.opinfo.allgather_group_gemm import AG_GROUP_GEMM
from triton_dist.testing.opinfo.moe import routed_product
from triton_dist.testing.timing import captured

# Rows of a rank, N of it, K, E, topk. No multiple of tiles; one route; more experts than routes; no
# multiple of 16 bytes.
SIZES = ((21, 40, 72, 4, 3), (1, 8, 16, 1, 1), (2, 24, 48, 13, 2), (13, 31, 33, 3, 10))
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "row-major": lambda b: b,
    "column-major": lambda b: b.transpose(1, 2).contiguous().transpose(1, 2),
    "strided": lambda b: torch.stack([b, b], dim=-1).flatten(-2)[..., ::2],
}
ROUTINGS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "any": lambda ids, E: ids,  # from -1 to E
    "nobody's": lambda ids, E: torch.full_like(ids, -1),
    "one expert": lambda ids, E: torch.full_like(ids, E - 1),
    "beyond": lambda ids, E: ids + E,
    "own tokens alone": lambda ids, E: torch.where(_tokens_of(0, ids), ids, -1),
    "the last rank's alone": lambda ids, E: torch.where(
        _tokens_of(dist.get_world_size() - 1, ids), ids, E
    ),
}
"""Of random ids: what a routing makes of them."""
DEFAULTS = (
    {"algorithm": "arrivals"},
    {"algorithm": "arrivals", "num_groups": 2},
    {"algorithm": "arrivals", "num_groups": 4, "gather": "full_mesh_push"},
    {"algorithm": "arrivals", "num_groups": 3, "gather": "ring_push_1d"},
    {"algorithm": "serial"},
    {"algorithm": "serial", "gather": "collective"},
)
"""A config of each kind, without tiles."""


def _tokens_of(rank: int, ids: torch.Tensor) -> torch.Tensor:
    tokens = torch.arange(len(ids), device=ids.device)
    return (tokens * dist.get_world_size() // len(ids) == rank)[:, None]


def random(seed: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    values = torch.randn(sizes, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).to(current_device().torch_device)


def some_tiles(number: int) -> triton.Config:
    """Three by turns, which compile quickly; all of them are in ``every_config``."""
    tiles = grouped_tiles()
    return tiles[(-1, -3, len(tiles) // 2)[number % 3]]


class Calls:
    """Calls in one context, checked after the last. Collective.

    What peers write to holds NaN before the first call, all results do before they are written, and
    a becomes NaN as soon as a call returned. Operands are functions of the rank and of the call, so
    no collective of a check lines the ranks up.
    """

    def __init__(
        self, rows: int, N: int, K: int, E: int, topk: int, dtype: torch.dtype = torch.float16
    ) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.dtype, self.N, self.K, self.E, self.topk = dtype, N, K, E, topk
        size = self.num_ranks
        self.ctx = create_ag_group_gemm_context(
            rows * size, N, K, E, topk, dtype, self.rank, size, size
        )
        for slot in range(SLOTS):
            self.ctx.buffer.slots.of_slot(slot, "shards").local.fill_(NAN)
        current_device().synchronize()
        dist.barrier()
        self.number = 0
        self._results: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def operands(
        self, rows: int, routing: str = "any", ids_dtype: torch.dtype = torch.int32
    ) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """(the shards of all ranks, weights, ids) of a new call."""
        self.number += 1
        seed = 1000 * self.number
        shards = [random(seed + rank, (rows, self.K), self.dtype) for rank in range(self.num_ranks)]
        b = random(seed + 500 + self.rank, (self.E, self.K, self.N), torch.float32)
        generator = torch.Generator().manual_seed(seed)
        M = rows * self.num_ranks
        ids = torch.randint(-1, self.E + 1, (M, self.topk), generator=generator).to(ids_dtype)
        ids = ROUTINGS[routing](ids.to(current_device().torch_device), self.E)
        return shards, (b / self.K**0.5).to(self.dtype), ids

    def __call__(
        self,
        rows: int,
        routing: str = "any",
        layout: str = "row-major",
        ids_dtype: torch.dtype = torch.int32,
        op: Callable[..., torch.Tensor] = ag_group_gemm.fn,
        **options: Any,
    ) -> None:
        """One call with ``rows`` tokens a rank; ``op`` is ``ag_group_gemm`` or its function."""
        shards, b, ids = self.operands(rows, routing, ids_dtype)
        if op is ag_group_gemm.fn and options.get("algorithm") != "library":
            options.setdefault("gemm_config", some_tiles(self.number))
        if is_rehearsal():
            arguments = shards[self.rank], LAYOUTS[layout](b), self.ctx, ids
            note(lambda: ag_group_gemm._hooks.prepare(*arguments, **options))
            return
        expected = routed_product(torch.cat(shards), b, ids)
        a = shards[self.rank].clone()
        with poisoned_empty():
            C = op(a, LAYOUTS[layout](b), self.ctx, ids, **options)
        a.fill_(NAN)
        what = f"call {self.number}: {rows} rows, {routing}, {layout}, {options}"
        self._results.append((what, C, expected))

    def check(self) -> int:
        """Compare all results; returns how many there were."""
        current_device().synchronize()
        limit = AG_GROUP_GEMM.tolerance(self.dtype, self.num_ranks)
        for what, C, expected in self._results:
            try:
                assert_allclose(C, expected, rtol=limit, atol=limit)
            except AssertionError as error:
                raise AssertionError(f"{what}: {error}") from None
        return len(self._results)

    def finish(self) -> int:
        count = self.check()
        self.ctx.finalize()
        return count


def defaults() -> list[dict[str, Any]]:
    """``DEFAULTS``, and the library where it is tried."""
    library = {"algorithm": "library", "gather": "collective"}
    return [*DEFAULTS, *([library] if has_fast_library() else [])]


@compiled_ahead
def every_operand(dtype: torch.dtype) -> int:
    """Sizes x layouts, ways in turn."""
    count, kinds = 0, itertools.cycle(DEFAULTS)
    for sizes in SIZES:
        calls = Calls(*sizes, dtype)
        for layout in LAYOUTS:
            for rows in {sizes[0], 1}:
                calls(rows, layout=layout, **next(kinds))
        count += calls.finish()
    return count


@compiled_ahead
def every_routing() -> int:
    """Routings, ids of both dtypes, each with half of the ways: those with and without groups of
    arrivals, and a serial one."""
    calls = Calls(21, 40, 72, 5, 2)
    for number, routing in enumerate(ROUTINGS):
        for options in DEFAULTS[number % 2 :: 2]:
            ids_dtype = (torch.int32, torch.int64)[number % 2]
            calls(21 - number, routing, ids_dtype=ids_dtype, **options)
    return calls.finish()


@compiled_ahead
def every_config() -> int:
    """Every candidate of the tuner, and what a call that names nothing does."""
    calls = Calls(37, 144, 96, 3, 2, torch.bfloat16)
    for config in ALGORITHMS.config_space():
        calls(37, **config)
    calls(37, gemm_config=None)
    calls(37, op=ag_group_gemm, autotune=False)
    calls(37, algorithm="library", gather="collective")
    return calls.finish()


@compiled_ahead
def late_ranks() -> int:
    """Each rank in turn is late: on the host before a call, and on its stream within one. Nothing
    lines the ranks up in between; rows and ways change from call to call."""
    calls, kinds = Calls(20, 40, 72, 4, 2), itertools.cycle(DEFAULTS)
    for late in range(dist.get_world_size()):
        for number in range(len(DEFAULTS)):
            if dist.get_rank() == late:
                time.sleep(0.02)
            straggler = (late, 20_000_000) if number % 2 else None
            calls(1 + 7 * number % 20, straggler_option=straggler, **next(kinds))
    return calls.finish()


def give_up_and_start_again() -> list[str]:
    """Rank 0 calls alone, with a limit on its waits; after a reset all ranks call again. Flags that
    it waited for in vain."""
    overdue, calls = [], Calls(20, 40, 72, 4, 2)
    calls(20)
    calls.check()
    for options in ({}, {"gather": "ring_push_1d"}):
        if dist.get_rank() == 0:
            try:
                with bounded_waits(0.2):
                    calls(20, **options)
            except WaitTimeout as error:
                overdue.append(error.flag.split("[")[0])
        else:
            calls.number += 1
        dist.barrier()
        calls.ctx.reset()
        for rows in (5, 20, 11):
            calls(rows, **options)
    calls.finish()
    return overdue


def launches() -> dict[str, list[str]]:
    """By way, the kernels of a call that follows others, in their order; all accesses are checked
    to be within their memory."""
    calls, seen = Calls(20, 40, 72, 4, 2), {}
    run = Launch.run
    for algorithm in ("arrivals", "serial"):
        names: list[str] = []

        def noted(launch: Launch, names: list[str] = names) -> Any:
            names.append(launch.kernel.fn.__name__)
            return run(launch)

        for _ in range(3):  # the first look at their peers
            calls(20, algorithm=algorithm)
        with mock.patch.object(Launch, "run", noted), checking("bounds"):
            calls(20, algorithm=algorithm)
        seen[algorithm] = names
    calls.finish()
    return seen


def autotuned_kernel() -> int:
    """A script has put ``triton.autotune`` around the kernel."""
    name = "kernel_consumer_m_parallel_scatter_group_gemm"
    configs = [triton.Config({"BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32}, num_stages=2, num_warps=4)]
    kernel = triton.autotune(configs, key=["M", "N", "K"])(getattr(allgather_group_gemm, name))
    used: list[dict[str, Any]] = []
    run = kernel.run

    def noted(*args: Any, **options: Any) -> Any:
        used.append(options)
        return run(*args, **options)

    kernel.run = noted
    calls = Calls(20, 40, 72, 4, 2)
    with mock.patch.object(allgather_group_gemm, name, kernel):
        calls(20, algorithm="arrivals")
        calls(20, algorithm="serial")
    assert all("BLOCK_SIZE_M" in options for options in used)
    assert not any("BLOCK_SIZE_N" in options for options in used)
    assert calls.finish() == len(used)
    return len(used)


def tuned() -> tuple[int, int]:
    """How often it was tuned; then how many calls were right."""
    calls = Calls(20, 40, 72, 4, 2, torch.bfloat16)
    before = ag_group_gemm.tuning_count
    with some_configs(ag_group_gemm):
        for rows in (20, 20, 19):
            calls(rows, op=ag_group_gemm)
    return ag_group_gemm.tuning_count - before, calls.finish()


def without_context() -> int:
    """The all-gather and the product one after the other."""
    calls = Calls(20, 40, 72, 4, 2)
    for persistent in (False, True):
        shards, b, ids = calls.operands(20)
        with some_configs(grouped_gemm):
            C = run_moe_ag_triton_non_overlap(shards[calls.rank], b, ids, persistent=persistent)
        calls._results.append(("no context", C, routed_product(torch.cat(shards), b, ids)))
    return calls.finish()


def ids_differ() -> list[str]:
    """What this rank gets when rank 1 comes with other ids; then a call that all make alike."""
    calls = Calls(20, 48, 72, 4, 2)
    shards, b, ids = calls.operands(20)
    seen = []
    other = ids.clone()
    other[-1, -1] = 0 if int(other[-1, -1]) else 1
    for mine in (other, ids[:, :1].contiguous()) if dist.get_rank() == 1 else (ids, ids):
        try:
            ag_group_gemm(shards[calls.rank], b, calls.ctx, mine)
        except (RankDisagreement, InvalidArgument) as error:
            seen.append(f"{type(error).__name__}: {error}")
    calls(20)
    assert calls.finish() == 1
    return [*seen, unlike_ids_are_found_at_every_call()]


def unlike_ids_are_found_at_every_call() -> str:
    """What this rank gets at a later call of a key, after which all come alike again."""
    with mock.patch.dict("os.environ", TRITON_DIST_DEBUG="agree"):
        calls = Calls(20, 48, 72, 4, 2)
    calls(20)
    shards, b, ids = calls.operands(20)
    if calls.rank == 1:
        ids[-1, -1] = 0 if int(ids[-1, -1]) else 1
    with mock.patch.object(Launcher, "run") as launched, pytest.raises(RankDisagreement) as it:
        ag_group_gemm.fn(shards[calls.rank], b, calls.ctx, ids)
    launched.assert_not_called()
    calls(20)
    assert calls.finish() == 2
    return str(it.value)


@compiled_ahead
def replayed(rounds: int, algorithms: tuple[str, ...] = ()) -> int:
    """Graphs of each way, or of some, replayed with other tokens and routings each time; each
    replay twice, with the same bits, while another rank is late."""
    rows, *sizes = (13, 40, 48, 6, 2) if current_device().interprets else (61, 264, 512, 16, 4)
    calls, count = Calls(rows, *sizes, torch.bfloat16), 0
    routings, limit = (
        itertools.cycle(ROUTINGS),
        AG_GROUP_GEMM.tolerance(torch.bfloat16, calls.num_ranks),
    )
    for options in defaults():
        if options.get("gather") == "collective" and not current_device().has_nccl:
            continue
        if algorithms and options["algorithm"] not in algorithms:
            continue
        if options["algorithm"] != "library":
            options = {**options, "gemm_config": some_tiles(calls.number)}
        calls(rows, **options)
        if is_rehearsal():
            continue
        shards, b, ids = calls.operands(rows)
        a, out = shards[calls.rank].clone(), []

        def call(a=a, b=b, ids=ids, out=out, options=options) -> torch.Tensor:
            out.append(ag_group_gemm.fn(a, b, calls.ctx, ids, **options))
            return out[-1]

        call()
        replay = captured(call)
        for _ in range(rounds):
            shards, _, new = calls.operands(rows, next(routings))
            a.copy_(shards[calls.rank])
            ids.copy_(new)
            expected, found = routed_product(torch.cat(shards), b, ids), []
            for second in range(2):
                out[-1].fill_(NAN)
                if (count + second) % (2 * calls.num_ranks) == calls.rank:
                    current_device().sleep(200_000)
                replay()
                found.append(out[-1].clone())
            current_device().synchronize()
            assert_allclose(found[0], expected, rtol=limit, atol=limit)
            assert torch.equal(*found)
            count += 1
    calls.finish()
    return count
