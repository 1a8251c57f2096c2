"""What every rank does in the tests of AllGather + grouped GEMM, on CPU ranks and on GPUs alike."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import triton

from tests.distributed.calls import NAN, some_configs
from tests.distributed.compiled_ahead import compiled_ahead, is_rehearsal
from tests.distributed.group_gemm_calls import LAYOUTS, ROUTINGS, AllGatherGroupGEMM, some_tiles
from triton_dist.debugging.checks import checking
from triton_dist.errors import InvalidArgument, RankDisagreement
from triton_dist.kernels.common.moe.rows import has_library_kernel
from triton_dist.kernels.nvidia import allgather_group_gemm, grouped_gemm
from triton_dist.kernels.nvidia.allgather_group_gemm import (
    ag_group_gemm,
    run_moe_ag_triton_non_overlap,
)
from triton_dist.runtime.device import current_device
from triton_dist.runtime.launch import Launch, Launcher
from triton_dist.testing import assert_allclose
from triton_dist.testing.opinfo.allgather_group_gemm import AG_GROUP_GEMM
from triton_dist.testing.opinfo.moe import routed_product
from triton_dist.testing.timing import capture_graph

# Rows of a rank, N of it, K, E, topk: no multiple of tiles; one route; more experts than routes; no
# multiple of 16 bytes.
SIZES = ((21, 40, 72, 4, 3), (1, 8, 16, 1, 1), (2, 24, 48, 13, 2), (13, 31, 33, 3, 10))
DEFAULTS = AllGatherGroupGEMM.algorithms


def defaults() -> list[dict[str, Any]]:
    """``DEFAULTS``, and the library where it is tried."""
    library = {"algorithm": "library", "gather": "collective"}
    return [*DEFAULTS, *([library] if has_library_kernel() else [])]


@compiled_ahead
def every_operand(number: int) -> int:
    """Call with all sizes and layouts; alternate between dtypes and algorithms."""
    count, kinds = 0, itertools.cycle(DEFAULTS)
    for index, sizes in enumerate(SIZES, number):
        calls = AllGatherGroupGEMM(*sizes, (torch.bfloat16, torch.float32)[index % 2])
        for layout, rows in zip(LAYOUTS, itertools.cycle((sizes[0], 1))):
            calls(rows, layout=layout, **next(kinds))
        count += calls.finish()
    return count


@compiled_ahead
def every_routing() -> int:
    """Routings, ids of both dtypes, each with a third of the algorithms."""
    calls = AllGatherGroupGEMM(21, 40, 72, 5, 2)
    for number, routing in enumerate(ROUTINGS):
        for options in DEFAULTS[number % 3 :: 3]:
            ids_dtype = (torch.int32, torch.int64)[number % 2]
            calls(21 - number, routing=routing, ids_dtype=ids_dtype, **options)
    return calls.finish()


def launches() -> dict[str, list[str]]:
    """By way, the kernels of a call that follows others, in their order; all accesses are checked
    to be within their memory."""
    calls, seen = AllGatherGroupGEMM(20, 40, 72, 4, 2), {}
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
    calls = AllGatherGroupGEMM(20, 40, 72, 4, 2)
    with mock.patch.object(allgather_group_gemm, name, kernel):
        calls(20, algorithm="arrivals")
        calls(20, algorithm="serial")
    assert all("BLOCK_SIZE_M" in options for options in used)
    assert not any("BLOCK_SIZE_N" in options for options in used)
    assert calls.finish() == len(used)
    return len(used)


def without_context() -> int:
    """The all-gather and the product one after the other."""
    calls = AllGatherGroupGEMM(20, 40, 72, 4, 2)
    for persistent in (False, True):
        shards, b, ids = calls.new_operands(20)
        with some_configs(grouped_gemm):
            C = run_moe_ag_triton_non_overlap(shards[calls.rank], b, ids, persistent=persistent)
        calls.results.append(("no context", C, routed_product(torch.cat(shards), b, ids)))
    calls.finish()
    return len(calls.results)


def ids_differ() -> list[str]:
    """What this rank gets when rank 1 comes with other ids; then a call that all make alike."""
    calls = AllGatherGroupGEMM(20, 48, 72, 4, 2)
    shards, b, ids = calls.new_operands(20)
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
        calls = AllGatherGroupGEMM(20, 48, 72, 4, 2)
    calls(20)
    shards, b, ids = calls.new_operands(20)
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
    calls, count = AllGatherGroupGEMM(rows, *sizes, torch.bfloat16), 0
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
        shards, b, ids = calls.new_operands(rows)
        a, out = shards[calls.rank].clone(), []

        def call(a=a, b=b, ids=ids, out=out, options=options) -> torch.Tensor:
            out.append(ag_group_gemm.fn(a, b, calls.ctx, ids, **options))
            return out[-1]

        call()
        replay = capture_graph(call)
        for _ in range(rounds):
            shards, _, new = calls.new_operands(rows, next(routings))
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
