"""GEMM-ReduceScatter: each rank's rows of ``sum over ranks of A @ B``, the transfer hidden behind
the product.

Abstraction
    A tensor-parallel layer ends with A sharded by columns, [M, K / W] on each of W ranks, and B by
    rows, [K / W, N]. Each rank's product is one addend of the whole, and each rank owns M / W rows
    of the sum. Serial code multiplies, then reduces and scatters. Here each finished tile travels
    to the rank that owns its rows while the next ones are computed.

Timeline of one call (W = 4), on every rank at once
    GEMM         rank+1's rows │ rank+2's │ rank+3's │ own rows, each tile + the peers' ─ finish
    fused         └ each tile → rank+1     └ → rank+2  └ → rank+3
    copy engine              └ chunks → rank+1 └ → rank+2 └ → rank+3
    ``algorithm="fused"``: the program that computed a tile stores it into its owner's memory.
    ``"copy_engine"``: tiles stay here, and a copy engine pushes the rows of each peer, in
    ``num_chunks`` chunks, as their tiles are complete. Either way the program that computes an own
    tile waits until the peers have sent theirs, and adds them.
    Other ways: ``algorithms.py``.

Numerics
    A tile is accumulated in fp32 (fp32 operands as ``torch.backends.cuda.matmul.allow_tf32`` says)
    and rounded once to the output's dtype, in which it travels; the own tile too. The W partial
    sums are added in fp32 in the order of ranks, the bias comes last, and the result is rounded
    once. Same operands and config: same bits, whoever is late; not with ``reduce_st=True``:
    unrounded fp32 tiles are added as they arrive. Products by a library: the bias is added to the
    rounded sum.

Built this way because (more, with measurements: docs/explanation/gemm_reduce_scatter.md)
    * whoever waits has announced all its tiles for others before: no circle of waits;
    * a TMA store is not complete when the next instruction runs: ``publish_tile`` waits in full
      before the flag is set, and comes when the next tile is computed;
    * flags and slots take turns without a barrier (``slots/epochs.py``).
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from triton_dist.kernels.common.libraries import LibraryAlgorithm
from triton_dist.kernels.common.op import op
from triton_dist.kernels.nvidia.gemm_reduce_scatter.algorithms import ALGORITHMS, Call
from triton_dist.kernels.nvidia.gemm_reduce_scatter.context import (
    GEMMReduceScatterTensorParallelContext,
)


@op(
    algorithms=ALGORITHMS,
    call=Call,
    sizes=Call.sizes,
    key_fn=Call.key_fn,
    key_sizes=("M",),
    agree_fn=lambda A, *_, **__: f"A of {A.shape[0]} rows",
    version="3",  # another one when results that are shipped (records/) should not be used any more
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
    accepted_key: tuple[Any, ...] | None = None,
) -> torch.Tensor:
    """This rank's rows of ``sum over ranks of A @ B``, plus ``bias``; tuned over all ranks. Returns
    [M_per_rank, N], contiguous: rank r's are rows ``[r * M_per_rank, (r + 1) * M_per_rank)``.
    Numerics: the module.

    About calls, and arguments that are not here: the docstring of ``triton_dist.kernels.nvidia``.

    Args:
        A: [M, K_per_rank], any strides; M is a multiple of the number of ranks.
        B: [K_per_rank, N], any strides.
        way: ``"fused"`` (default), ``"one_launch"`` and ``"serial"`` (both for an M of up to the
            context's ``exchanged_rows``), ``"copy_engine"``, ``"collective"`` or ``"async_tp"``.
        num_chunks: in which a copy engine pushes a rank's rows, at most; of ``"serial"``, the
            pieces of the reduce-scatter (tuned).
        num_ctas, block_bytes: of that reduce-scatter (tuned).
        bias: [N], contiguous; this rank's is added once to each of its rows.
        reduce_st: tiles are added to one fp32 sum on their owner, by ``"fused"`` alone; default:
            the context's.
        fuse_scatter, method: older names of the way: ``True`` is ``"fused"``, ``False``
            ``"copy_engine"``; a ``LibraryAlgorithm`` the way of its value.
    """
    return Call(
        A, B, ctx, gemm_config, persistent, num_chunks, bias, straggler_option, method, algorithm,
        num_ctas, block_bytes, accepted_key, reduce_st, fuse_scatter,
    ).run()  # fmt: skip
