"""GEMM-AllReduce: ``sum over ranks of A @ B``, on every rank, the transfer hidden behind the
product.

Abstraction
    A tensor-parallel layer ends with A sharded by columns, [M, K / W] on each of W ranks, and B by
    rows, [K / W, N]. Each rank's product is one addend of the whole, which every rank needs. M is
    anything from 1 on: no rank's share needs a particular size.

    Tiles travel (``algorithms.py``) in one shot, crossing the link once with W - 1 times the bytes,
    for few rows (decode); or in two, with 2 (W - 1) / W times the bytes.

Timeline of one call in two shots (W = 4, two chunks), on every rank at once
    GEMM      r+1's │ r+2's │ r+3's │ own │ r+1's │ r+2's │ r+3's │ own │ copy to C
    parts      └ → r+1 └ → r+2 └ → r+3     └ → r+1 └ → r+2 └ → r+3
    sums                               └ → all ─────────────────── └ → all
    Blocks of rows, one a rank, are cut in ``num_chunks`` chunks. With one, all sums travel in the
    last W-th of the GEMM; with more, those of a chunk travel while the next one is multiplied.

Numerics
    A tile is accumulated in fp32 (fp32 operands as ``torch.backends.cuda.matmul.allow_tf32`` says)
    and rounded once to the output's dtype, in which it travels; the own one too. The W partial sums
    are added in fp32 in the order of ranks, the bias comes last, and the sum is rounded once. One
    shot and two: the same bits on every rank and, for a config, at every call, whoever is late.
    Serial: products are the library's, their sum likewise; the bias is added to the rounded sum.
    The same on one rank, which has a plain product. A collective adds as its library does.

Built this way because (more: docs/explanation/gemm_all_reduce.md)
    * a wait is for tiles that peers have at earlier places of the order: no circle of waits;
    * sums are copied to C by a launch of its own: ``copy_to_local=False`` spares it;
    * flags and slots take turns without a barrier: those of two shots as ``slots/epochs.py`` says;
      one shot is an exchange (``exchange/protocol.py``), one launch, as few rows take few us.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from triton_dist.kernels.common.op import op
from triton_dist.kernels.nvidia.gemm_allreduce.algorithms import ALGORITHMS, Call
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
    agree_fn=lambda A, *_, **__: f"A of {A.shape[0]} rows",
    version="3",  # another one when results that are shipped (records/) should not be used any more
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
    accepted_key: tuple[Any, ...] | None = None,
) -> torch.Tensor:
    """``sum over ranks of A @ B``, plus ``bias``, on every rank; tuned over all ranks. Returns
    [M, N], contiguous. Numerics: the module.

    About calls, and arguments that are not here: the docstring of ``triton_dist.kernels.nvidia``.

    Args:
        A: [M, K_per_rank], any strides; M from 1 on.
        B: [K_per_rank, N], any strides.
        way: ``"one_shot"``, ``"one_shot_in_packets"``, ``"two_shot"``,
            ``"two_shot_in_one_launch"``, ``"serial"``, ``"collective"``,
            ``"symmetric_collective"``; default ``"by_size"``, one shot or two. One shot, packets
            and one launch are for an M of up to the context's ``one_shot_rows``, ``packet_rows``
            and ``exchanged_rows``.
        num_chunks: in which a rank's rows are added and sent, at most, in ``"two_shot"``; of
            ``"serial"``, the pieces of its all-reduce.
        reduction: of ``"serial"``: its all-reduce in ``"one_shot"`` or ``"two_shot"`` (tuned).
        num_ctas, block_bytes: its launch (tuned).
        bias: [N], contiguous, the same on all ranks; added once.
        copy_to_local: ``False``: the result may be a view of the context's memory, which is valid
            until the call after the next one with this context begins; a copy is spared.
        method: older name of the way: a ``GEMMAllReduceMethod`` is the way of its value.
    """
    return Call(
        A, B, ctx, gemm_config, persistent, num_chunks, bias, straggler_option, method, algorithm,
        num_ctas, block_bytes, accepted_key, copy_to_local, reduction,
    ).run()  # fmt: skip
