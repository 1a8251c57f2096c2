"""All-reduce: the sum of a tensor over all ranks, on every rank.

Algorithms:
    * ``"one_shot"``: every rank sends x to all ranks and adds all tensors. One hop; for small
      tensors. The smallest tensors are sent in packets, words that contain their own flags. Packets
      double the bytes but need no separate flag (``kernels/common/exchange/packets.py``).
    * ``"two_shot"``: every rank receives its shard of x from all ranks, adds, and sends the sum to
      all ranks. Two hops. On W ranks, a rank sends 2 (W - 1) / W times the bytes of x, instead of
      W - 1 times in one shot. For large tensors.
    * ``"two_shot_in_packets"``: two shots in packets. For medium sizes on more than two ranks.
    * ``"collective"``: all-reduce by ``torch.distributed`` (NCCL; gloo on CPU ranks).
    * ``"by_size"``: one-shot or two-shot by size; the default without tuning.

Each of our algorithms is one launch without a barrier. Ranks store to peers instead of loading from
them, because a store needs no round trip (``kernels/common/exchange/protocol.py``).

Numerics: docs/reference/all_reduce.md.
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
    """Return the tuning key.

    The key contains the number of elements, rounded to a range, and whether kernels can use 16-byte
    vectors. It also contains whether the sum replaces x (a library then saves a copy), and the
    algorithm that ``method`` selects.
    """
    check_tensors(x, ctx, output)
    requested = algorithm_of(method)
    vectors = collective_context.fits_vectors(x, x.numel())
    in_place = output is not None and output.data_ptr() == x.data_ptr()
    return tune.bucket(x.numel()), x.dtype, vectors, ctx.num_ranks, requested, in_place


@op(
    algorithms=ALGORITHMS,
    call=Call,
    sizes=Sizes.of,
    key_fn=key_fn,
    agree_fn=collective_context.size_text,
    version="2",  # change when the shipped results (records/) must no longer be used
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
    validated_key: object = None,
) -> torch.Tensor:
    """Return the sum of x over all ranks. Tuned over all ranks.

    The sum is accumulated in fp32 in the order of ranks and rounded once. Except with
    ``"collective"``, the result is bitwise equal on all ranks and in all calls. The rules for calls
    are in the docstring of ``triton_dist.kernels.nvidia``.

    Args:
        x: fp16, bf16 or fp32, contiguous, any shape. Kernels use 16-byte vectors if x is 16-byte
            aligned and its number of elements is a multiple of 16.
        ctx: context of ``create_allreduce_ctx``.
        output: optional output, contiguous, with the shape of x: x itself or separate memory.
        method: ``algorithm`` as an ``AllReduceMethod``, for scripts of Triton-distributed. Tuning
            then tries only this algorithm.
        straggler_option: ``(rank, cycles)``: delay ``rank`` by ``cycles`` clock cycles, for tests.
        num_ctas: number of programs of a launch (tuned).
        block_bytes: bytes that a program moves at a time, a power of two (tuned).
        num_chunks: number of chunks into which each program divides its elements; ignored by
            ``"one_shot"`` (tuned).
        packets: whether ``"one_shot"`` sends packets, with at most 256 KB of data per launch;
            ``None``: by size (tuned).
        algorithm: ``"one_shot"``, ``"two_shot"``, ``"collective"`` or ``"by_size"`` (tuned).
            Default without tuning: ``"by_size"``.
        validated_key: reserved for the tuner, which passes the key that it has computed.

    Returns:
        ``output``, or a new tensor with the shape of x.

    Raises:
        InvalidArgument: an argument does not fit the context or the algorithm.
        ContextFinalized: ``ctx`` was finalized.
    """
    return Call(
        x, ctx, output, method, straggler_option, num_ctas, block_bytes, num_chunks, packets,
        algorithm, validated_key,
    ).run()  # fmt: skip
