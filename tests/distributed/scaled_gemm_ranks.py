"""What every rank does in the tests of GEMMs of fp8 operands, on CPU ranks and on GPUs alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton

from tests.distributed.every_op_ranks import refusal
from tests.distributed.gemm_calls import default_tiles, uniform
from tests.fp8 import error_of_sum, largest_error, quantised
from triton_dist.debugging import races
from triton_dist.errors import InvalidArgument, RankDisagreement
from triton_dist.kernels.common.gemm.scales import (
    BLOCK_ELEMENTS,
    FP8,
    Recipe,
    Scaling,
    async_tp_supports,
    library_supports,
    num_scale_blocks,
)
from triton_dist.kernels.common.gemm.spaces import (
    FEW_ROWS,
    fits_registers,
    warp_specialized_tiles,
)
from triton_dist.kernels.common.libraries import has_async_tp
from triton_dist.kernels.nvidia import (
    ag_gemm,
    create_ag_gemm_context,
    create_gemm_ar_context,
    create_gemm_rs_context,
    gemm_ar,
    gemm_rs,
)
from triton_dist.runtime.device import current_device

Operands = tuple[torch.Tensor, torch.Tensor, Scaling]


def operands(seed: int, recipe: str, M: int, N: int, K: int, dtype: torch.dtype) -> Operands:
    """Return operands whose scales differ between seeds, rows and blocks."""
    A, B = (uniform(10 * seed + each, (n, K), torch.float32) for each, n in enumerate((M, N)))
    A *= 1 + seed % 7
    A[0] *= 20
    B[:, : K // 2] /= 30
    return quantised(A, B, recipe, dtype)


def all_rows(shards: list[Operands]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gathered A and its scales, by row or by block."""
    A = torch.cat([a.view(torch.uint8) for a, _, _ in shards]).view(shards[0][0].dtype)
    scales = []
    for a, b, scaling in shards:
        assert scaling.A_scale is not None
        is_block = scaling.recipe(a, b) is Recipe.BLOCK
        scales.append(scaling.A_scale if is_block else scaling.A_scale.expand(len(a)))
    scale = torch.cat(scales)
    return A, scale.t().contiguous().t() if scale.ndim == 2 else scale


def runs(algorithm: str, A: torch.Tensor, B: torch.Tensor, scaling: Scaling) -> bool:
    """Return whether an algorithm multiplies these operands, if it is a library's."""
    if algorithm in ("row_blocks", "serial", "collective"):
        return library_supports(A, B, scaling)
    if algorithm not in ("async_tp", "symmetric_collective"):
        return True
    fits = algorithm == "symmetric_collective" or async_tp_supports(A, B, scaling)
    return fits and has_async_tp() and library_supports(A, B, scaling)


GATHERED = (
    {"algorithm": "full_mesh_push", "num_streams": 2, "num_chunks": 3},
    {"algorithm": "full_mesh_push", "persistent": False, "num_chunks": 2},
    {"algorithm": "ring_push_1d", "num_streams": 2, "num_chunks": 3},
    {"algorithm": "serial"},
    {"algorithm": "collective"},
    {"algorithm": "async_tp"},
)


def ag_gemm_of(
    recipe: str, rows: int, N: int, K: int, dtype: torch.dtype, out_dtype: torch.dtype
) -> list[float]:
    """Return the relative error of each call. Slots are used again, with other scales."""
    rank, size = dist.get_rank(), dist.get_world_size()
    results = []
    with create_ag_gemm_context(rows * size, N * size, K, dtype, rank, size) as ctx:
        for number, options in enumerate(3 * GATHERED[:1] + GATHERED[1:]):
            seeds = [size * number + each for each in range(size)]
            shards = [operands(seed, recipe, rows, N, K, dtype) for seed in seeds]
            A, B, scaling = shards[rank]
            if not runs(options["algorithm"], A, B, scaling._replace(out_dtype=out_dtype)):
                continue
            rest = {**options, "A_scale": scaling.A_scale, "B_scale": scaling.B_scale}
            if number % 2:
                rest["gathered"] = torch.empty(rows * size, K, dtype=dtype, device=A.device)
            rest["use_fast_accum"] = number == 2
            C = ag_gemm.fn(A, B, ctx, default_tiles(dtype), out_dtype=out_dtype, **rest)
            results.append((C, shards, rest.get("gathered"), rest["use_fast_accum"]))
        current_device().synchronize()
        errors = []
        for C, shards, gathered, fast in results:
            A, scale = all_rows(shards)
            assert C.dtype is out_dtype
            assert gathered is None or torch.equal(gathered.view(torch.uint8), A.view(torch.uint8))
            B, scaling = shards[rank][1:]
            errors.append(
                largest_error(C, A, B, scaling._replace(A_scale=scale, use_fast_accum=fast))
            )
    return errors


def late_block_scales() -> list[bool]:
    """Return whether each shard of each call was multiplied by the scales of this call.

    Each rank in turn sends late. A and B are 1, so results are exact. All tiles of the
    warp-specialised kernel are used, which only GPUs have.
    """
    tiles = [each for each in warp_specialized_tiles() if fits_registers(each, Recipe.BLOCK, False)]
    rank, size, device = dist.get_rank(), dist.get_world_size(), current_device()
    rows, N, K = 128, 256, 256
    A, B = torch.ones(rows, K).to(FP8[0]), torch.ones(N, K).to(FP8[0])
    A, B = A.to(device.torch_device), B.to(device.torch_device).t()
    B_scale = torch.ones(num_scale_blocks(N), num_scale_blocks(K), device=A.device)
    results = []
    with create_ag_gemm_context(rows * size, N * size, K, FP8[0], rank, size) as ctx:
        for number in range(4 * size * len(tiles)):
            # The slot had other scales two calls ago.
            scales = [2.0 ** ((number + each) % 5) for each in range(size)]
            A_scale = torch.full((num_scale_blocks(K), rows), scales[rank], device=A.device).t()
            if rank == number % size:
                device.sleep(2_000_000)
            config = tiles[number // (4 * size)]
            C = ag_gemm.fn(A, B, ctx, config, A_scale=A_scale, B_scale=B_scale)
            results.append((C, scales))
        device.synchronize()
    return [
        bool((shard == K * scale).all())
        for C, scales in results
        for shard, scale in zip(C.chunk(size), scales, strict=True)
    ]


def one_rank_has_another_recipe() -> list[tuple[str, str]]:
    """Return the errors of tuned calls for which rank 1 passes other scales."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows, N, K, dtype = 6, 56, 144, FP8[0]
    A, B, row = operands(1, "row", rows, N, K, dtype)
    tensor = Scaling(torch.ones(1, device=A.device), torch.ones(1, device=A.device))
    seen = []
    others: tuple[dict[str, Any], ...] = (
        tensor._asdict(),
        row._replace(A_scale=tensor.A_scale)._asdict(),
        row._replace(out_dtype=torch.float16)._asdict(),
        row._replace(use_fast_accum=True)._asdict(),
    )
    with create_ag_gemm_context(rows * size, N * size, K, dtype, rank, size) as ctx:
        for other in others:
            options = other if rank == 1 else row._asdict()
            options.pop("bias")
            error = refusal(lambda: ag_gemm(A, B, ctx, **options))  # noqa: B023  # called here
            seen.append((type(error).__name__, str(error)))
    return seen


def scales_of_another_layout() -> list[dict[int, object]]:
    """Let rank 1 pass scales by block, the others by row, in calls that are not tuned.

    Return the values of ranks in the error of each algorithm. After a reset the context works.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    # On GPUs the library multiplies whole groups of blocks only.
    N, K = (64, 512) if current_device().torch_device.type == "cuda" else (56, 272)
    rows, dtype, seen = 6, FP8[0], []
    with create_ag_gemm_context(rows * size, N * size, K, dtype, rank, size) as ctx:

        def call(recipe: str, **options: Any) -> float:
            shards = [operands(seed, recipe, rows, N, K, dtype) for seed in range(size)]
            A, B, scaling = shards[rank]
            scales = {"A_scale": scaling.A_scale, "B_scale": scaling.B_scale}
            C = ag_gemm.fn(A, B, ctx, default_tiles(dtype), **scales, **options)
            ctx.check()
            A, scale = all_rows(shards)
            return largest_error(C, A, B, scaling._replace(A_scale=scale))

        for options in GATHERED[:4]:
            assert call("row", **options) <= 1
            with races.expected(), pytest.raises(RankDisagreement, match="the rows of A") as error:
                call("block" if rank == 1 else "row", **options)
            seen.append(error.value.by_rank)
            ctx.reset()
            assert call("block", **options) <= 1
    return seen


SCATTERED = (
    {"algorithm": "fused"},
    {"algorithm": "fused", "persistent": False},
    {"algorithm": "copy_engine", "num_chunks": 2},
    {"algorithm": "row_blocks"},
    {"algorithm": "row_blocks", "num_chunks": 2},
    {"algorithm": "one_launch"},
    {"algorithm": "one_launch", "splits": 3},
    {"algorithm": "serial"},
    {"algorithm": "collective"},
    {"algorithm": "async_tp"},
)
REDUCED = (
    {"algorithm": "two_shot", "num_chunks": 2},
    {"algorithm": "two_shot", "persistent": False},
    {"algorithm": "one_shot"},
    {"algorithm": "one_shot_in_packets"},
    {"algorithm": "two_shot_in_one_launch"},
    {"algorithm": "serial"},
    {"algorithm": "collective"},
    {"algorithm": "symmetric_collective"},
)


def error_of_sums(
    C: torch.Tensor, shards: list[Operands], rows: slice, bias: torch.Tensor, splits: int = 1
) -> float:
    """Return the largest error of a sum of products relative to its bound.

    Each product, or with SPLIT_K each product over a part of K, is rounded to the output's dtype.
    Libraries also round each of their W - 1 partial sums, and the sum before and after the bias is
    added.
    """
    roundoff = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-23}[C.dtype]
    expected, bound = bias.double().expand(C.shape).clone(), 0.0
    for A, B, scaling in shards:
        a, b = scaling.dequantised(A, B, torch.float64)
        expected += a[rows] @ b
        bound += error_of_sum(A.shape[1], C.is_cuda) * (a[rows].abs() @ b.abs())
        steps = num_scale_blocks(A.shape[1])
        ends = [BLOCK_ELEMENTS * (steps * each // splits) for each in range(splits + 1)]
        for part in map(slice, ends, ends[1:]):
            bound += len(shards) * roundoff * (a[rows, part] @ b[part]).abs()
    bound += 2 * roundoff * (expected.abs() + bias.double().abs())
    error = ((C.double() - expected).abs() / bound).nan_to_num(nan=float("inf"))
    return float(error.max())


def sum_of(name: str, recipe: str, M: int, N: int, K: int, dtype: torch.dtype) -> list[float]:
    """Return the relative error of each call of ``gemm_rs`` or ``gemm_ar``."""
    rank, size = dist.get_rank(), dist.get_world_size()
    scatters = name == "gemm_rs"
    op, create, algorithms = (
        (gemm_rs, create_gemm_rs_context, SCATTERED)
        if scatters
        else (gemm_ar, create_gemm_ar_context, REDUCED)
    )
    M = M * size if scatters else M
    rows = slice(rank * (M // size), (rank + 1) * (M // size)) if scatters else slice(0, M)
    results = []
    with create(M, N, rank, size, size, dtype) as ctx:
        for number, options in enumerate(algorithms):
            seeds = [size * number + each for each in range(size)]
            shards = [operands(seed, recipe, M, N, K, FP8[number % 2]) for seed in seeds]
            A, B, scaling = shards[rank]
            if not runs(options["algorithm"], A, B, scaling._replace(out_dtype=dtype)):
                continue
            bias = uniform(number, (1, N), torch.float32)[0].to(dtype)
            scales = {"A_scale": scaling.A_scale, "B_scale": scaling.B_scale}
            rest, tiles = dict(options), default_tiles(A.dtype)
            splits = rest.pop("splits", 1)
            if splits > 1 and M > FEW_ROWS:
                continue
            if splits > 1:
                # Wide tiles with few rows multiply (B.T @ A.T).T.
                split = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 256, "SPLIT_K": splits}
                tiles = triton.Config({**tiles.kwargs, **split}, num_stages=2)
            C = op.fn(A, B, ctx, tiles, bias=bias, **scales, **rest)
            results.append((C, shards, rows, bias, splits))
        algorithm, splits = ("one_launch", 9) if scatters else ("two_shot_in_one_launch", 2)
        tiles = triton.Config({**tiles.kwargs, "SPLIT_K": splits}, tiles.num_warps)
        with pytest.raises(InvalidArgument, match="SPLIT_K"):
            op.fn(A, B, ctx, tiles, algorithm=algorithm, **scales)
        current_device().synchronize()
        assert all(C.dtype is dtype for C, *_ in results)
        return [error_of_sums(*each) for each in results]
