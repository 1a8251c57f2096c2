"""What every rank does in the tests of MoE ops with fp8 operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.calls import some_configs
from tests.fp8 import error_of_sum, quantised_experts
from triton_dist.debugging import races
from triton_dist.errors import InvalidArgument, RankDisagreement
from triton_dist.kernels.common.gemm.scales import FP8, Scaling
from triton_dist.kernels.common.moe.spaces import grouped_tiles
from triton_dist.kernels.nvidia import (
    ag_group_gemm,
    create_ag_group_gemm_context,
    create_moe_ar_context,
    create_moe_rs_context,
    run_moe_reduce_ar,
    run_moe_reduce_rs,
)
from triton_dist.runtime.device import current_device

GATHERS = (
    {"algorithm": "arrivals"},
    {"algorithm": "arrivals", "num_groups": 3, "gather": "ring_push_1d"},
    {"algorithm": "serial"},
    {"algorithm": "serial", "gather": "collective"},
)
LIBRARY = {"algorithm": "library"}
SUMS = (
    {"algorithm": "chunks", "num_chunks": 1},
    {"algorithm": "chunks", "num_chunks": 3},
    {"algorithm": "serial"},
    {"algorithm": "serial", "reduction": "topk_exchange"},
    {"algorithm": "serial", "reduction": "collective"},
)
ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-23}
E4M3, E5M2 = FP8


def random(seed: int, *sizes: int) -> torch.Tensor:
    values = torch.randn(sizes, generator=torch.Generator().manual_seed(seed))
    return values.to(current_device().torch_device)


def ids_of(M: int, topk: int, E: int) -> torch.Tensor:
    """Random ids, some of nobody; the first expert has no token."""
    ids = torch.randint(-1, E + 1, (M, topk), generator=torch.Generator().manual_seed(M)).int()
    return ids.masked_fill(ids == 0, -1).to(current_device().torch_device)


def products(a: torch.Tensor, b: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The fp64 products of routes, and the sums of the magnitudes of their addends."""
    expected = a.new_zeros(ids.numel(), b.shape[2])
    magnitudes = torch.zeros_like(expected)
    for route, expert in enumerate(ids.flatten().tolist()):
        if 0 <= expert < len(b):
            row = a[route // (ids.numel() // len(a))]
            expected[route], magnitudes[route] = row @ b[expert], row.abs() @ b[expert].abs()
    return expected, magnitudes


def tiles(options: dict[str, Any], number: int) -> dict[str, Any]:
    tiled = options["algorithm"] != "library"
    found = grouped_tiles()  # the last ones are warp-specialized on Hopper
    return {**options, "gemm_config": found[-number % len(found)]} if tiled else options


def gathered(recipe: str, m: int, N: int, K: int, dtype: torch.dtype) -> int:
    """Every algorithm in turn, with other operands in each call. Scales differ between ranks."""
    rank, size, E, topk = dist.get_rank(), dist.get_world_size(), 4, 2
    ids, results = ids_of(m * size, topk, E), []
    with create_ag_group_gemm_context(m * size, N, K, E, topk, E4M3, rank, size, size) as ctx:
        algorithms = GATHERS + (() if recipe == "block" or (N | K) % 16 else (LIBRARY,))
        for call, options in enumerate(algorithms):
            shards = [random(10 * call + r, m, K) * (1 + r) for r in range(size)]
            B = random(77 + rank, E, N, K) / K**0.5
            each = [quantised_experts(shard, B, recipe, dtype) for shard in shards]
            a, b, scales = each[rank]
            C = ag_group_gemm.fn(a, b, ctx, ids, **scales, **tiles(options, call))
            a.view(torch.uint8).fill_(127)  # NaN: the call must have sent it
            scales["A_scale"].fill_(torch.nan)
            results.append((C, B, shards, options))
        for C, B, shards, options in results:
            both = [
                Scaling(**scales).dequantised(a, b, torch.float64)
                for a, b, scales in (quantised_experts(shard, B, recipe, dtype) for shard in shards)
            ]
            expected, magnitudes = products(torch.cat([a for a, _ in both]), both[0][1], ids)
            bound = error_of_sum(K, C.is_cuda) * magnitudes
            bound += ROUNDOFF[C.dtype] * expected.abs() + 2.0**-30
            error = (C.double() - expected).abs().div(bound).nan_to_num(nan=9.0).max()
            assert error <= 1, (options, error)
    return len(results)


def summed(recipe: str, all_rows: bool, m: int, N: int, k: int, dtype: torch.dtype) -> int:
    """Every algorithm. The sums and their roundings add to the bound of a product."""
    rank, size, E, topk = dist.get_rank(), dist.get_world_size(), 3, 2
    M = m * size - all_rows if m > 1 else m * size
    op = run_moe_reduce_ar if all_rows else run_moe_reduce_rs
    create = create_moe_ar_context if all_rows else create_moe_rs_context
    ids, choices = ids_of(M, topk, E), random(3, M, topk).sigmoid()
    each = [
        quantised_experts(random(5 + r, M * topk, k), random(9 + r, E, N, k) / k**0.5, recipe)
        for r in range(size)
    ]
    expected, magnitudes, rounded = choices.new_zeros(3, M, N, dtype=torch.float64)
    for x, weights, scales in each:
        parts = products(*Scaling(**scales).dequantised(x, weights, torch.float64), ids)
        product, magnitude = (part.view(M, topk, N) for part in parts)
        scaled = choices.double()[..., None]
        expected += (product * scaled).sum(1)
        magnitudes += (magnitude * scaled).sum(1)
        rounded += (product * scaled).abs().sum(1) + (product * scaled).sum(1).abs()
    in_fp32 = (topk + size + 2) * 2.0**-24
    bound = (error_of_sum(k, choices.is_cuda) + in_fp32) * magnitudes
    bound += ROUNDOFF[dtype] * (rounded + size * expected.abs()) + 2.0**-30
    own = slice(None) if all_rows else slice(rank * m, (rank + 1) * m)
    x, weights, scales = each[rank]
    algorithms = SUMS[1:3] if recipe == "block" else SUMS
    if recipe != "block" and (N | k) % 16 == 0 and dtype is torch.bfloat16:
        algorithms += (LIBRARY,)
    with create(rank, size, size, m * size * topk, N, E, topk, dtype) as ctx:
        for call, options in enumerate(algorithms):
            C = op.fn(x, weights, ids, choices, ctx, **scales, **tiles(options, call))
            assert C.dtype is dtype
            error = (C.double() - expected[own]).abs().div(bound[own]).nan_to_num(nan=9.0).max()
            assert error <= 1, (options, error)
        if N * k <= 256:  # a tuning of larger operands takes long in the interpreter
            with some_configs(op):
                tuned = op(x, weights, ids, choices, ctx, **scales)
            assert (tuned.double() - expected[own]).abs().le(bound[own]).all()
    return len(algorithms)


def refusals() -> None:
    """Errors of the ranks' operands, and of ranks whose recipes differ."""
    rank, size, E, topk, m, N, K = dist.get_rank(), dist.get_world_size(), 4, 2, 3, 32, 256
    ids = ids_of(m * size, topk, E)
    A, B = random(rank, m, K), random(9, E, N, K)
    row, block = (quantised_experts(A, B, recipe) for recipe in ("row", "block"))
    sizes = (m * size, N, K, E, topk)
    with create_ag_group_gemm_context(*sizes, E4M3, rank, size, size) as ctx:
        for message, options in (
            ("A_scale is None", {}),
            ("recipe", {"A_scale": row[2]["A_scale"], "B_scale": block[2]["B_scale"]}),
        ):
            with pytest.raises(InvalidArgument, match=message):
                ag_group_gemm(*row[:2], ctx, ids, **options)
        with pytest.raises(InvalidArgument, match=r"a\.dtype"):
            ag_group_gemm(A.bfloat16(), row[1], ctx, ids)
        a, b, scales = (row, block)[rank]
        with pytest.raises(RankDisagreement):
            ag_group_gemm(a, b, ctx, ids, **scales)
        for options in (GATHERS[0], GATHERS[2]):  # kernels detect it too

            def call(**chosen: Any) -> None:
                ag_group_gemm.fn(a, b, ctx, ids, **scales, **tiles(chosen, 0))
                ctx.check()

            with races.expected(), pytest.raises(RankDisagreement, match="3 rows, scales of block"):
                call(**options)
            ctx.reset()
    with create_ag_group_gemm_context(*sizes, torch.bfloat16, rank, size, size) as ctx:
        for a, b, message in (
            (*row[:2], r"a\.dtype"),
            (A.bfloat16(), row[1].bfloat16(), "A_scale is 'torch.float32, shape .* a is "),
        ):
            with pytest.raises(InvalidArgument, match=message):
                ag_group_gemm(a, b, ctx, ids, **row[2])
    routes = m * size * topk
    with create_moe_rs_context(rank, size, size, routes, N, E, topk, torch.float16) as ctx:
        x, weights, scales = quantised_experts(random(1, routes, K), B, "row")
        choices = A.new_ones(m * size, topk)
        few = {**scales, "A_scale": scales["A_scale"][1:]}
        for message, options in (("A_scale is None", {}), ("recipe", few)):
            with pytest.raises(InvalidArgument, match=message):
                run_moe_reduce_rs(x, weights, ids, choices, ctx, **options)
        with pytest.raises(InvalidArgument, match=r"A_scale is 'torch.* x is "):
            run_moe_reduce_rs(x.half(), weights.half(), ids, choices, ctx, **scales)
