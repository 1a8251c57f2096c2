"""GEMM-AllReduce: the sum over ranks of ``A @ B`` on every rank, overlapped with the GEMM.

A tensor-parallel layer shards A by columns, [M, K / W] on each of W ranks, and B by rows,
[K / W, N]. Each rank's product is one addend of the output, which every rank needs. M can be any
positive number. For few rows (decode), one shot is used: each rank sends its product to all ranks,
W - 1 times the bytes of the product in one hop. In two shots, a rank sends 2 (W - 1) / W times the
bytes in two hops. ``algorithms.py`` has all algorithms.

Timeline of a two-shot call (W = 4, two chunks), on every rank at the same time:
    GEMM      r+1's │ r+2's │ r+3's │ own │ r+1's │ r+2's │ r+3's │ own │ copy to C
    addends    └ → r+1 └ → r+2 └ → r+3     └ → r+1 └ → r+2 └ → r+3
    sums                               └ → all ─────────────────── └ → all

Each rank owns one block of rows, which is divided into ``num_chunks`` chunks. With one chunk, all
sums are sent during the last 1/W of the GEMM. With more chunks, the sums of a chunk are sent while
the next chunk is multiplied.

Numerics: docs/reference/gemm_rs.md.

Design (docs/explanation/gemm_all_reduce.md):
    * A tile waits only for tiles that are earlier in the order of the peers, so waits have no
      cycle.
    * A separate launch copies the sums to C; ``copy_to_local=False`` omits it.
    * Calls alternate between two slots, and flags count calls, so a call has no barrier. Two-shot
      uses ``slots/epochs.py``. One-shot uses ``exchange/protocol.py`` in one launch, because few
      rows take only a few us.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from triton_dist.kernels.common.op import op
from triton_dist.kernels.nvidia.gemm_allreduce.algorithms import ALGORITHMS, Call, predict_ms
from triton_dist.kernels.nvidia.gemm_allreduce.context import (
    GEMMAllReduceMethod,
    GEMMAllReduceTensorParallelContext,
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
def gemm_ar(
    A: torch.Tensor,
    B: torch.Tensor,
    ctx: GEMMAllReduceTensorParallelContext,
    gemm_config: triton.Config | None = None,
    persistent: bool = True,
    method: GEMMAllReduceMethod | None = None,
    num_chunks: int = 1,
    reduction: str | None = None,
    num_ctas: int | None = None,
    block_bytes: int | None = None,
    bias: torch.Tensor | None = None,
    copy_to_local: bool = True,
    straggler_option: tuple[int, int] | None = None,
    algorithm: str | None = None,
    A_scale: torch.Tensor | None = None,
    B_scale: torch.Tensor | None = None,
    use_fast_accum: bool = False,
    validated_key: tuple[Any, ...] | None = None,
) -> torch.Tensor:
    """Return the sum over ranks of ``A @ B``, plus ``bias``, on every rank. Tuned over all ranks.

    ``docs/reference/gemm_rs.md`` describes the numerics. The docstring of
    ``triton_dist.kernels.nvidia`` has the rules for calls.

    Args:
        A: [M, K_per_rank], any strides, dtype of the context or fp8; M >= 1.
        B: [K_per_rank, N], any strides, dtype of the context. If A is fp8, B is e4m3 and K-major.
        ctx: context of ``create_gemm_ar_context``.
        gemm_config: tile sizes of our GEMM kernel (tuned).
        persistent: use the persistent GEMM kernel (tuned).
        method: ``algorithm`` as an enum member; kept for scripts of Triton-distributed.
        num_chunks: maximum number of chunks in which ``"two_shot"`` sums and sends a rank's rows;
            number of chunks of the all-reduce of ``"serial"`` (tuned).
        reduction: all-reduce of ``"serial"``: ``"one_shot"``, ``"two_shot"`` or
            ``"two_shot_in_packets"`` (tuned).
        num_ctas: number of programs of the all-reduce of ``"serial"`` (tuned).
        block_bytes: bytes that one of these programs moves at a time (tuned).
        bias: [N], contiguous, equal on all ranks; added once.
        copy_to_local: if ``False``, the result may be a view of the context's memory, which saves a
            copy. The next call with the context keeps the view valid; the call after it does not.
        straggler_option: ``(rank, cycles)``: delay ``rank`` by ``cycles`` clock cycles, for tests.
        algorithm: ``"one_shot"`` (M <= ``ctx.max_one_shot_M``), ``"one_shot_in_packets"`` (M <=
            ``ctx.max_packet_M``), ``"two_shot"``, ``"two_shot_in_one_launch"`` (M <=
            ``ctx.max_exchange_M``), ``"serial"``, ``"collective"`` or ``"symmetric_collective"``
            (tuned). Default without tuning: ``"by_size"``, one-shot or two-shot.
        A_scale, B_scale, use_fast_accum: as in ``matmul``, for fp8 operands. The output has the
            context's dtype. All ranks must use scales of equal granularity.
        validated_key: reserved for the tuner, which passes the key that it has computed.

    Returns:
        [M, N], contiguous, dtype of the context.

    Raises:
        InvalidArgument: an argument does not fit the context or the algorithm.
        ContextFinalized: ``ctx`` was finalized.
    """
    return Call(
        gemm_config, algorithm, A_scale, B_scale, use_fast_accum, validated_key, A, B, ctx,
        persistent, num_chunks, bias, straggler_option, method, num_ctas, block_bytes,
        copy_to_local, reduction,
    ).run()  # fmt: skip
