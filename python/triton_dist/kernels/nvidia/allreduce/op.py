"""All-reduce: the sum of a tensor over all ranks, on every rank.

Ways
    ``"one_shot"``: every rank sends all of x to all, and adds: one crossing of the link. For few
    bytes. For very few in packets, words that say by themselves that they have come: twice the
    bytes, but no flag behind them (``kernels/common/exchange/packets.py``).
    ``"two_shot"``: every rank gets the parts of its shard, adds, and sends the sum to all: two
    crossings, but 2 (W - 1) / W of the bytes instead of W - 1. For many.
    ``"collective"``: the group's own: NCCL, gloo on CPU ranks.
    ``"by_size"``: one shot or two, by size; what a call takes that is not tuned.
    Ours are one launch, without a barrier, and store to peers instead of reading from them: a store
    needs no answer. ``kernels/common/exchange/protocol.py`` says why that is right.

Numerics
    In one shot and two, parts travel as they are and are added in fp32 in the order of ranks; the
    sum is rounded once. So every rank has the same bits, and the same inputs give the same bits,
    whoever is late and whichever of the two is taken.
    A collective adds as its library does.
"""

from __future__ import annotations

from typing import Any

import torch

from triton_dist import tune
from triton_dist.kernels.common.collective import context as collective_context
from triton_dist.kernels.common.op import op
from triton_dist.kernels.nvidia.allreduce.algorithms import (
    ALGORITHMS,
    Call,
    Sizes,
    algorithm_of,
    check_tensors,
)
from triton_dist.kernels.nvidia.allreduce.context import AllReduceContext, AllReduceMethod


def key_fn(
    x: torch.Tensor,
    ctx: AllReduceContext,
    output: torch.Tensor | None = None,
    method: AllReduceMethod | None = None,
    straggler_option: tuple[int, int] | None = None,
    *_: Any,
    **__: Any,
) -> Any:
    """Name what a tuning is for. Elements count in buckets, whether vectors fit, and whether the
    sum replaces x, of which a library need not make a copy then. A way that older keywords ask for
    is tuned by itself."""
    check_tensors(x, ctx, output)
    asked = algorithm_of(method)
    vectors = collective_context.fits_vectors(x, x.numel())
    in_place = output is not None and output.data_ptr() == x.data_ptr()
    return tune.bucket(x.numel()), x.dtype, vectors, ctx.num_ranks, asked, in_place


@op(
    algorithms=ALGORITHMS,
    call=Call,
    sizes=Sizes.of,
    key_fn=key_fn,
    agree_fn=collective_context.exact_size,
    version="2",  # another one when results that are shipped (records/) should not be used any more
)
def all_reduce(
    x: torch.Tensor,
    ctx: AllReduceContext,
    output: torch.Tensor | None = None,
    method: AllReduceMethod | None = None,
    straggler_option: tuple[int, int] | None = None,
    num_ctas: int | None = None,
    block_bytes: int | None = None,
    num_chunks: int | None = None,
    packets: bool | None = None,
    algorithm: str | None = None,
    accepted_key: object = None,
) -> torch.Tensor:
    """The sum of x over all ranks; tuned over all ranks. Returns ``output``, or a new tensor of x's
    shape.

    fp32 accumulation in the order of ranks, rounded once: the same bits on every rank and at every
    call, except with ``"collective"``.

    All ranks call alike; more about calls: the docstring of ``triton_dist.kernels.nvidia``.

    Args:
        x: fp16, bf16 or fp32, contiguous, of any shape. 16 bytes move at a time where it begins on
            16 bytes and has a multiple of 16 elements.
        ctx: from ``create_allreduce_ctx``.
        output: where the sum goes, contiguous; x itself, or memory apart from it.
        way: the algorithm: ``"one_shot"``, ``"two_shot"``, ``"collective"`` or ``"by_size"``, see
            the module (tuned); default: ``"by_size"``.
        num_ctas, block_bytes: programs, and bytes that one moves at a time, a power of two (tuned).
        num_chunks: in how many pieces a program's share travels, not in one shot (tuned).
        packets: whether one shot goes in packets, of up to 256 KB a launch; ``None``: by size
            (tuned).
        straggler_option: (rank, cycles): that rank sleeps so long before it, for tests.
        method: the member of ``AllReduceMethod`` for an algorithm (for Triton-distributed scripts).
            Only this algorithm is tuned then.

    Raises:
        InvalidArgument, ContextFinalized: before anything is launched.
    """
    return Call(
        x, ctx, output, method, straggler_option, num_ctas, block_bytes, num_chunks, packets,
        algorithm, accepted_key,
    ).run()  # fmt: skip
