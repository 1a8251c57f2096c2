"""AllGather-GEMM: ``C = all_gather(A) @ B`` with the transfer hidden behind the GEMM.

A tensor-parallel layer shards A by rows, [M / W, K] on each of W ranks, and B by columns,
[K, N / W]. Every rank needs all rows of A. Copy engines (the *producer*) push shards to the peers
and set a flag for each chunk of rows. One GEMM kernel (the *consumer*) waits for the flags of a
tile before it reads the tile's rows. It starts with the local shard and continues with the peers'
shards in the order of arrival. ``algorithms.py`` has the other algorithms.

Timeline of one call (W = 4, push):
    main stream   ─┬─ GEMM: local shard │ rank+1's │ rank+2's │ rank+3's ─┬─ finish
    copy stream    └─ shard → rank-1, flag │ → rank-2, flag │ → rank-3 ───┘

``finish`` is a kernel of one thread block. It reports to the peers that their shards have been
read, and increments the epoch, which counts the uses of the buffer. A call needs no barrier, no
flag reset and no copy of the local shard. In CUDA graphs, and after a call that did not wait for
all peers, another kernel of one thread block precedes the GEMM. It waits until the peers have read
the buffer.

The lower bound of the time is max(GEMM alone, all-gather alone) + the time until the first flag.
Copy engines use no SM. They use memory bandwidth, which a GEMM with K >= 4096 leaves free.

Design (docs/explanation/allgather_gemm.md):
    * Each shard is tiled separately and stores are clipped at its end, so no tile has two sources.
    * The loops over tiles and over K are nested. A single flattened loop would contain the wait,
      and Triton would not pipeline it.
    * Flags count epochs. Resetting flags instead would need a barrier between calls.
    * A full grid may wait only for work that needs no SM (copies and flags of a copy engine) or
      that already runs (in fused algorithms, the programs with the lowest ids send).
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from triton_dist.kernels.common.gemm.launch import sharded_gemm
from triton_dist.kernels.common.gemm.scales import scaling_of
from triton_dist.kernels.common.libraries import LibraryAlgorithm
from triton_dist.kernels.common.op import op
from triton_dist.kernels.common.peers import GatheredShards
from triton_dist.kernels.common.slots.gathered import AllGatherMethod
from triton_dist.kernels.nvidia.allgather_gemm.algorithms import ALGORITHMS, Call, Sizes, predict_ms
from triton_dist.kernels.nvidia.allgather_gemm.context import (
    AllGatherGEMMTensorParallelContext,
    check_operands,
)
from triton_dist.runtime.device import current_device


def key_fn(
    A: torch.Tensor,
    B: torch.Tensor,
    ctx: AllGatherGEMMTensorParallelContext,
    *_: Any,
    local_copy: bool = True,
    method: AllGatherMethod | LibraryAlgorithm | None = None,
    gathered: torch.Tensor | None = None,
    **options: Any,
) -> Any:
    """Return the tuning key. If ``method`` is passed, the key contains its algorithm."""
    scaling = scaling_of(**options)
    key = (check_operands(A, B, ctx, local_copy, gathered, scaling), local_copy)
    return key if method is None else (*key, ALGORITHMS.requested_algorithm(method))


@op(
    algorithms=ALGORITHMS,
    call=Call,
    sizes=Sizes.of,
    key_fn=key_fn,
    key_sizes=("M",),
    predict_ms=predict_ms,
    agree_fn=lambda A, *_, **__: f"A of {A.shape[0]} rows",
    version="2",  # change when the shipped results (records/) must no longer be used
)
def ag_gemm(
    A: torch.Tensor,
    B: torch.Tensor,
    ctx: AllGatherGEMMTensorParallelContext,
    gemm_config: triton.Config | None = None,
    persistent: bool | None = True,
    method: AllGatherMethod | LibraryAlgorithm | None = None,
    num_streams: int = 1,
    num_chunks: int = 1,
    local_copy: bool = True,
    straggler_option: tuple[int, int] | None = None,
    num_comm_sms: int | None = None,
    algorithm: str | None = None,
    gathered: torch.Tensor | None = None,
    A_scale: torch.Tensor | None = None,
    B_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    validated_key: tuple[Any, ...] | None = None,
) -> torch.Tensor:
    """Return ``all_gather(A) @ B``, [M, N_per_rank], over the ranks of ``ctx``. Tuned over all
    ranks.

    M is the sum of M_per_rank over all ranks. The rules for calls are in the docstring of
    ``triton_dist.kernels.nvidia``.

    Args:
        A: [M_per_rank, K], contiguous, dtype of the context. Do not overwrite it on another stream
            before the call has finished.
        B: [K, N_per_rank], any strides, dtype of the context. If A is fp8, B is e4m3 and K-major.
        ctx: context of ``create_ag_gemm_context``.
        gemm_config: tile sizes of our GEMM kernel (tuned).
        persistent: use the persistent GEMM kernel (tuned).
        method: ``algorithm`` as an enum member; kept for scripts of Triton-distributed.
        num_streams: number of copy streams, at least 1 (tuned).
        num_chunks: number of chunks of a shard, each with a flag (tuned). ``"fused_push"`` divides
            the shard along K; ``"serial"`` divides the part of the shard that each program sends.
        local_copy: if ``False``, this rank's rows are read from ``ctx.symm_workspace``, and only
            the shape of A is used.
        straggler_option: ``(rank, cycles)``: delay ``rank`` by ``cycles`` clock cycles, for tests.
        num_comm_sms: number of SMs that send in ``"fused_push"``, default 16; number of programs of
            the all-gather in ``"serial"``, default by size (tuned). Other algorithms ignore it.
        algorithm: ``"full_mesh_push"``, ``"ring_push_1d"``, ``"fused_push"``, ``"serial"`` (for
            M <= ``ctx.max_exchange_M``), ``"collective"`` or ``"async_tp"`` (tuned). Default
            without tuning: ``ctx.all_gather_method``.
        gathered: optional output [M, K], contiguous, that receives ``all_gather(A)``. It must not
            overlap this rank's rows. Pass it on all ranks or on no rank.
        A_scale, B_scale: fp32 scales of this rank's fp8 A and B, as in ``matmul``. All ranks must
            use equal granularity. Scales of A are gathered with A.
        out_dtype, use_fast_accum: as in ``matmul``; equal on all ranks.
        validated_key: reserved for the tuner, which passes the key that it has computed.

    Raises:
        InvalidArgument: an argument does not fit the context or the algorithm.
        ContextFinalized: ``ctx`` was finalized.
    """
    return Call(
        gemm_config, algorithm, A_scale, B_scale, use_fast_accum, validated_key, A, B, ctx,
        persistent, method, num_streams, num_chunks, local_copy, straggler_option, num_comm_sms,
        gathered, out_dtype,
    ).run()  # fmt: skip


def ag_gemm_persistent(
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    rank: int,
    num_ranks: int,
    gathered: GatheredShards,
    gemm_config: triton.Config,
) -> torch.Tensor:
    """Launch only the persistent GEMM kernel, which waits for shards: ``C = concat(shards) @ B``.

    Args:
        A: [M_per_rank, K], shard of this rank.
        B: [K, N_per_rank].
        C: [M, N_per_rank], output.
        rank: this rank.
        num_ranks: number of ranks.
        gathered: memory with the rows and flags of all ranks.
        gemm_config: tile sizes.

    Returns:
        C.
    """
    launch = sharded_gemm(
        A, B, C, gemm_config, num_sms=current_device().num_sms, persistent=True,
        rank=rank, num_ranks=num_ranks, gathered=gathered,
    )  # fmt: skip
    launch.run()
    return C


def local_copy_and_barrier_all(A: torch.Tensor, ctx: AllGatherGEMMTensorParallelContext) -> None:
    """Copy A [M_per_rank, K] to this rank's rows of ``ctx.symm_workspace``, then wait for all
    ranks."""
    ctx.own_rows(A.shape[0]).copy_(A.detach())
    ctx.barrier_all()
