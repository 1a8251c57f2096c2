"""What every rank does in the tests of ops that end a mixture-of-experts layer, on CPU ranks and on
GPUs alike; ``name`` says which op."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.distributed.calls import some_configs
from tests.distributed.every_op_ranks import launched, refusal
from tests.distributed.group_gemm_calls import LAYOUTS
from tests.distributed.unequal_rows_ranks import told_in_between
from triton_dist.debugging import races
from triton_dist.errors import RankDisagreement, TritonDistError
from triton_dist.kernels.common.moe.spaces import grouped_tiles
from triton_dist.kernels.nvidia import (
    run_moe_reduce_ar_triton_non_overlap,
    run_moe_reduce_rs_triton_non_overlap,
)
from triton_dist.runtime.device import current_device
from triton_dist.runtime.launch import Launcher
from triton_dist.runtime.ranks import group_for
from triton_dist.testing import assert_allclose
from triton_dist.testing.opinfo.moe import GroupedShape
from triton_dist.testing.opinfo.moe_reduce import MOE_REDUCE_AR as AR
from triton_dist.testing.opinfo.moe_reduce import MOE_REDUCE_RS as RS
from triton_dist.testing.opinfo.moe_reduce import MoEReduceOpInfo
from triton_dist.testing.timing import capture_graph

INFOS: dict[str, MoEReduceOpInfo] = {info.name: info for info in (RS, AR)}
ALONE = {
    RS.name: run_moe_reduce_rs_triton_non_overlap,
    AR.name: run_moe_reduce_ar_triton_non_overlap,
}
NAN = float("nan")
OWN = {RS.name: ("push", "topk_exchange"), AR.name: ("two_shot", "one_shot", "topk_exchange")}
Algorithm = dict[str, Any]


def algorithms(name: str, chunks: tuple[int, ...] = (1, 3)) -> Iterator[Algorithm]:
    """Those that give the same bits at every call."""
    # Interpreted, a tile's size costs little and their number much; sizes here are clipped by all.
    ours = {"gemm_config": grouped_tiles()[1 if current_device().interprets else 0]}
    for num_chunks in chunks:
        yield {"algorithm": "chunks", "num_chunks": num_chunks, **ours}
    for reduction in OWN[name]:
        yield {"algorithm": "serial", "reduction": reduction, **ours}


def every(name: str, dtype: torch.dtype) -> Iterator[Algorithm]:
    """All; torch's product where it takes the dtype without a word to the host."""
    yield from algorithms(name)
    if current_device().interprets or current_device().has_nccl:
        yield {"algorithm": "serial", "reduction": "collective", "gemm_config": grouped_tiles()[0]}
    if current_device().interprets or dtype is torch.bfloat16:
        yield {"algorithm": "library", "reduction": OWN[name][0]}


def tokens(name: str, rows: int) -> int:
    """Tokens of a call, of which a rank owns about ``rows``: a number that is hard for the op."""
    size = dist.get_world_size()
    return rows * size if name == RS.name else rows * size - 1


def operands(
    name: str, shape: GroupedShape, dtype: torch.dtype, routing: str = "random"
) -> dict[str, torch.Tensor]:
    """New random ones; ``routing``: ``"random"`` has ids of nobody, whose weights are NaN."""
    info, size = INFOS[name], dist.get_world_size()
    data = info.operands(shape, dtype, size)
    reroute(data, routing)
    return data


def reroute(data: dict[str, torch.Tensor], routing: str) -> None:
    """Other ids, the same on all ranks."""
    ids, choices, E = data["chosen_experts"], data["expert_weight"], len(data["weights"])
    drawn = torch.randint(-1, E + 1, ids.shape, device=ids.device)
    if routing == "random":
        ids.copy_(drawn)
    elif routing == "one":
        ids.fill_(E - 1)
    elif routing == "nobody":
        ids.fill_(-1)
    elif routing == "few":
        ids.copy_(drawn.clamp(0, max(0, E // 2 - 1)))
    dist.broadcast(ids, 0)
    choices.nan_to_num_(0.5)
    choices.masked_fill_((ids < 0) | (ids >= E), NAN)


@contextmanager
def context(name: str, shape: GroupedShape, dtype: torch.dtype, **options: Any) -> Iterator[Any]:
    """A context whose memory holds NaN where peers write."""
    with INFOS[name].context(shape, dtype, **options) as ctx:
        for slot in range(2):
            ctx.buffer.slots.region_of_slot(slot, "shards").local.fill_(NAN)
        current_device().synchronize()
        group_for(None).barrier("memory is poisoned")
        yield ctx


def check(name: str, C: torch.Tensor, data: dict[str, torch.Tensor], what: object) -> None:
    info = INFOS[name]
    limit = info.tolerance(C.dtype, dist.get_world_size())
    try:
        assert_allclose(C, info.reference(data), rtol=limit, atol=limit)
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from None


def every_algorithm(
    name: str, dtype: torch.dtype, shape: GroupedShape, rows: tuple[int, ...]
) -> int:
    """Calls of several sizes in turn, each in every way, with nothing between them; checked at the
    end."""
    results = []
    info = INFOS[name]
    sizes = [GroupedShape(tokens(name, n), shape.N, shape.K, shape.E, shape.topk) for n in rows]
    with context(name, sizes[0], dtype) as ctx:
        for number, size in enumerate(sizes):
            data = operands(name, size, dtype, ("random", "nobody", "one", "few")[number % 4])
            for algorithm in every(name, dtype):
                args, _ = info.arguments(data, ctx)
                results.append((info.op.fn(*args, **algorithm), data, algorithm))
        for C, data, algorithm in results:
            check(name, C, data, algorithm)
    return len(results)


def layouts(name: str, shapes: tuple[GroupedShape, ...]) -> int:
    """Call with weights of each layout, and with the last layout in a further shape.

    No size is a multiple of a tile. Ids have 64 bits and weights of routes 16. Each layout is
    called with half of the algorithms.
    """
    count, info, dtype = 0, INFOS[name], torch.float16
    for number, shape in enumerate(shapes):
        with context(name, shape, dtype) as ctx:
            for index, (layout, meta_with_layout) in [*enumerate(LAYOUTS.items())][
                2 if number else 0 :
            ]:
                data = operands(name, shape, dtype)
                data["weights"] = meta_with_layout(data["weights"])
                data["chosen_experts"] = data["chosen_experts"].long()
                data["expert_weight"] = data["expert_weight"].to(dtype)
                for algorithm in [*algorithms(name, chunks=(2,))][index % 2 :: 2]:
                    args, _ = info.arguments(data, ctx)
                    check(name, info.op.fn(*args, **algorithm), data, (shape, layout, algorithm))
                    count += 1
    return count


def same_bits(name: str, shape: GroupedShape, rounds: int) -> int:
    """Call every algorithm with the same operands while another rank is late each time.

    All results have the same bits, on all ranks if the ranks receive the same rows.
    """
    info, count, size = INFOS[name], 0, dist.get_world_size()
    with context(name, shape, torch.bfloat16) as ctx:
        data = operands(name, shape, torch.bfloat16)
        args, _ = info.arguments(data, ctx)
        first = None
        for number in range(rounds):
            for late, algorithm in enumerate(algorithms(name), number):
                if late % size == ctx.rank:
                    current_device().sleep(1_000_000)
                C = info.op.fn(*args, **algorithm)
                first = C.clone() if first is None else first
                assert torch.equal(C, first), algorithm
                count += 1
        check(name, first, data, "the first")
        if name == AR.name:
            others = [torch.empty_like(first) for _ in range(size)]
            dist.all_gather(others, first)
            assert all(torch.equal(each, first) for each in others)
    return count


def replayed(name: str, shape: GroupedShape, rounds: int, most_algorithms: int = 99) -> int:
    """A captured call in each way, or in the first ones, replayed with other ids each time; again
    with the same bits, while another rank is late."""
    info, count = INFOS[name], 0
    with context(name, shape, torch.bfloat16) as ctx:
        for algorithm in itertools.islice(every(name, torch.bfloat16), most_algorithms):
            data, out = operands(name, shape, torch.bfloat16), []
            args, _ = info.arguments(data, ctx)
            replay = capture_graph(lambda a=args, w=algorithm, o=out: o.append(info.op.fn(*a, **w)))
            for number in range(rounds):
                info.refill(data, ctx.num_ranks)
                reroute(data, ("random", "even", "one", "few")[number % 4])
                if out:
                    out[-1].fill_(NAN)
                replay()
                check(name, out[-1], data, (algorithm, number))
                if algorithm.get("reduction") != "collective":
                    first = out[-1].clone()
                    out[-1].fill_(NAN)
                    if number % (2 * ctx.num_ranks) == ctx.rank:
                        current_device().sleep(200_000)
                    replay()
                    assert torch.equal(out[-1], first), (algorithm, number)
                count += 1
        ctx.check()
    return count


def tuned(name: str, shape: GroupedShape) -> tuple[int, list[str]]:
    """Tunings of calls in one range, and what the caller may fix."""
    info, dtype = INFOS[name], torch.bfloat16
    before, configs = info.op.num_tunings, []
    with context(name, shape, dtype) as ctx, some_configs(info.op):
        for fixed in ((), (), (2,), (None, False, grouped_tiles()[1])):
            data = operands(name, shape, dtype)
            args, _ = info.arguments(data, ctx)
            check(name, info.op(*args, *fixed), data, fixed)
            configs.append(str(info.op.best_config(*args, *fixed)["algorithm"]))
        info.op.clear()
    return info.op.num_tunings - before, configs


def without_context(name: str, shape: GroupedShape) -> None:
    """The product, then the collective; and what it refuses."""
    data = operands(name, shape, torch.bfloat16)
    args, _ = INFOS[name].arguments(data, None)
    call = ALONE[name]
    check(name, call(*args[:4], n_chunks=7, config=grouped_tiles()[0]), data, "not overlapped")
    function = call.__name__
    with pytest.raises(TritonDistError, match=f"{function}: expert_weight.shape is"):
        call(*args[:3], args[3][:-1])
    with pytest.raises(TritonDistError, match=f"{function}: config is"):
        call(*args[:4], config="128x256")


def launches(name: str, shape: GroupedShape) -> dict[str, list[str]]:
    """Names of kernels that the third call of each way launches."""
    info, seen = INFOS[name], {}
    with context(name, shape, torch.bfloat16) as ctx:
        data = operands(name, shape, torch.bfloat16)
        args, _ = info.arguments(data, ctx)
        for algorithm in algorithms(name, chunks=(2,)):
            for _ in range(2):
                info.op.fn(*args, **algorithm)
            with launched() as names:
                info.op.fn(*args, **algorithm)
            seen[f"{algorithm['algorithm']} {algorithm.get('reduction', '')}".strip()] = names
    return seen


def other_ids_on_one_rank(name: str, shape: GroupedShape) -> tuple[str, str]:
    """What this rank is told at the first call of a key; and, where every call compares, at a later
    one, behind and before calls that all make alike."""
    info = INFOS[name]
    info.op.clear()
    with context(name, shape, torch.float16) as ctx:
        data = info.operands(shape, torch.float16, ctx.num_ranks)
        if ctx.rank == 1:
            data["chosen_experts"][0, 0] += 1
        args, _ = info.arguments(data, ctx)
        error = refusal(lambda: info.op(*args))
    assert isinstance(error, RankDisagreement)
    comparing = mock.patch.dict("os.environ", TRITON_DIST_DEBUG="agree")
    algorithm = next(algorithms(name))
    with comparing, context(name, shape, torch.float16) as ctx:
        alike, _ = info.arguments(info.operands(shape, torch.float16, ctx.num_ranks), ctx)
        info.op.fn(*alike, **algorithm)
        with mock.patch.object(Launcher, "run") as launched:
            later = refusal(lambda: info.op.fn(*args[:4], ctx, **algorithm))
        launched.assert_not_called()
        info.op.fn(*alike, **algorithm)
    assert isinstance(later, RankDisagreement)
    return str(error), str(later)


def other_tokens_on_one_rank(name: str, shape: GroupedShape) -> list[dict[int, object]]:
    """By way, what each rank came with as this one is told, behind calls with equal numbers."""
    info, told = INFOS[name], []
    with context(name, shape, torch.float16) as ctx:
        size = ctx.num_ranks
        data = info.operands(shape, torch.float16, size)
        args, _ = info.arguments(data, ctx)
        fewer = shape.M - size * (ctx.rank == 1)
        x, weights, ids, choices, _ = args
        other = (x[: fewer * shape.topk], weights, ids[:fewer], choices[:fewer], ctx)
        for algorithm in algorithms(name, chunks=(2,)):
            info.op.fn(*args, **algorithm)

            def call(algorithm: Algorithm = algorithm) -> None:
                info.op.fn(*other, **algorithm)
                ctx.check()

            # Parts lie as far apart as the rank has tokens.
            with races.expected(), told_in_between(ctx.rank == 1):
                error = refusal(call)
            assert isinstance(error, RankDisagreement)
            told.append(dict(error.by_rank))
            ctx.reset()
        check(name, info.op.fn(*args, **algorithm), data, "after a reset")
    return told
