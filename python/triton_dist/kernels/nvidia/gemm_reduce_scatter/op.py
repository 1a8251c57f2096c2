"""GEMM-ReduceScatter: this rank's rows of the sum of ``A @ B`` over ranks, overlapped.

A tensor-parallel layer shards A by columns, [M, K / W] on each of W ranks, and B by rows,
[K / W, N]. Each rank's product is one addend, and each rank owns M / W rows of the sum. Each
finished tile is sent to the owner of its rows while the next tiles are computed.

Timeline of one call (W = 4), on every rank at the same time:
    GEMM         rank+1's rows │ rank+2's │ rank+3's │ own rows, each tile + the peers' ─ finish
    fused         └ each tile → rank+1     └ → rank+2  └ → rank+3
    copy engine              └ chunks → rank+1 └ → rank+2 └ → rank+3

In ``"fused"``, the program that computed a tile stores it into the owner's memory. In
``"copy_engine"``, tiles are stored locally and a copy engine pushes each peer's rows in
``num_chunks`` chunks. In both algorithms, the program that computes a tile of this rank's rows
waits for this tile from every peer and adds the tiles of all ranks. ``algorithms.py`` has the other
algorithms.

Numerics: docs/reference/gemm_rs.md.

Design (docs/explanation/gemm_reduce_scatter.md):
    * A program waits only after it has announced all its tiles for peers, so waits have no cycle.
    * A TMA store is asynchronous. ``publish_tile`` waits for its completion, and then the flag is
      set. This happens after the next tile is computed, when the store has usually finished.
    * Calls alternate between two slots, and flags count calls, so a call has no barrier
      (``slots/epochs.py``).
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from triton_dist.kernels.common.libraries import LibraryAlgorithm
from triton_dist.kernels.common.op import op
from triton_dist.kernels.nvidia.gemm_reduce_scatter.algorithms import ALGORITHMS, Call, predict_ms
from triton_dist.kernels.nvidia.gemm_reduce_scatter.context import (
    GEMMReduceScatterTensorParallelContext,
)


@op(
    algorithms=ALGORITHMS,
    call=Call,
    sizes=Call.sizes,
    key_fn=Call.key_fn,
    key_sizes=("M",),
    predict_ms=predict_ms,
    agree_fn=lambda A, *_, **__: f"A of {A.shape[0]} rows",
    version="3",  # change when the shipped results (records/) must no longer be used
)
def gemm_rs(
    A: torch.Tensor,
    B: torch.Tensor,
    ctx: GEMMReduceScatterTensorParallelContext,
    gemm_config: triton.Config | None = None,
    persistent: bool = True,
    fuse_scatter: bool | None = None,
    num_chunks: int = 1,
    method: LibraryAlgorithm | None = None,
    bias: torch.Tensor | None = None,
    reduce_st: bool | None = None,
    straggler_option: tuple[int, int] | None = None,
    num_ctas: int | None = None,
    block_bytes: int | None = None,
    algorithm: str | None = None,
    A_scale: torch.Tensor | None = None,
    B_scale: torch.Tensor | None = None,
    use_fast_accum: bool = False,
    validated_key: tuple[Any, ...] | None = None,
) -> torch.Tensor:
    """Return this rank's rows of the sum of ``A @ B`` over all ranks, plus ``bias``. Tuned.

    ``docs/reference/gemm_rs.md`` describes the numerics. The docstring of
    ``triton_dist.kernels.nvidia`` has the rules for calls.

    Args:
        A: [M, K_per_rank], any strides, dtype of the context or fp8; M is a multiple of the number
            of ranks.
        B: [K_per_rank, N], any strides, dtype of the context. If A is fp8, B is e4m3 and K-major.
        ctx: context of ``create_gemm_rs_context``.
        gemm_config: tile sizes of our GEMM kernel (tuned).
        persistent: use the persistent GEMM kernel (tuned).
        fuse_scatter: older name of ``algorithm``: ``True`` is ``"fused"``, ``False`` is
            ``"copy_engine"``.
        num_chunks: maximum number of chunks in which a copy engine pushes a rank's rows. With
            ``"serial"``: number of chunks of the reduce-scatter (tuned).
        method: ``algorithm`` as an enum member; kept for scripts of Triton-distributed.
        bias: [N], contiguous; added once to each row of this rank.
        reduce_st: add tiles to a single fp32 sum on the owner rank, instead of storing one addend
            per rank. Only ``"fused"`` supports this. Default: ``ctx.reduce_st``.
        straggler_option: ``(rank, cycles)``: delay ``rank`` by ``cycles`` clock cycles, for tests.
        num_ctas: number of programs of the reduce-scatter of ``"serial"`` (tuned).
        block_bytes: bytes that one of these programs moves at a time (tuned).
        algorithm: ``"fused"`` (default without tuning), ``"one_launch"`` or ``"serial"`` (both for
            M <= ``ctx.max_exchange_M``), ``"copy_engine"``, ``"row_blocks"``, ``"collective"`` or
            ``"async_tp"`` (tuned).
        A_scale, B_scale, use_fast_accum: as in ``matmul``, for fp8 operands. The output has the
            context's dtype. All ranks must use scales of equal granularity.
        validated_key: reserved for the tuner, which passes the key that it has computed.

    Returns:
        [M_per_rank, N], contiguous: rows ``[r * M_per_rank, (r + 1) * M_per_rank)`` on rank r.

    Raises:
        InvalidArgument: an argument does not fit the context or the algorithm.
        ContextFinalized: ``ctx`` was finalized.
    """
    return Call(
        gemm_config, algorithm, A_scale, B_scale, use_fast_accum, validated_key, A, B, ctx,
        persistent, num_chunks, bias, straggler_option, method, num_ctas, block_bytes, reduce_st,
        fuse_scatter,
    ).run()  # fmt: skip
