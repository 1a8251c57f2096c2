"""All-reduce: the sum of a tensor over all ranks, on every rank.

Algorithms:
    * ``"one_shot"``: every rank sends x to all ranks and adds. One hop; for small tensors. The
      smallest tensors travel in packets, whose words carry their own flags. Packets double the
      bytes but need no separate flag (``kernels/common/exchange/packets.py``).
    * ``"two_shot"``: every rank receives the parts of its shard, adds, and sends the sum to all
      ranks. Two hops, but 2 (W - 1) / W times the bytes instead of W - 1. For large tensors.
    * ``"two_shot_in_packets"``: the same in packets. For medium sizes on more than two ranks.
    * ``"collective"``: the group's all-reduce (NCCL; gloo on CPU ranks).
    * ``"by_size"``: one-shot or two-shot by size; the default without tuning.

Our algorithms are one launch without a barrier. They store to peers instead of reading from them,
because a store needs no round trip (``kernels/common/exchange/protocol.py``).

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
    """Return the key that a tuning is recorded under.

    It contains the bucket of the number of elements, whether 16-byte vectors fit, whether the sum
    replaces x (a library then saves a copy), and the algorithm that ``method`` requires.
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
    agree_fn=collective_context.exact_size,
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
    accepted_key: object = None,
) -> torch.Tensor:
    """Return the sum of x over all ranks; tuned over all ranks.

    The sum is accumulated in fp32 in rank order and rounded once. Except with ``"collective"``, all
    ranks and all calls give the same bits. The rules for calls are in the docstring of
    ``triton_dist.kernels.nvidia``.

    Args:
        x: fp16, bf16 or fp32, contiguous, any shape. Copies use 16-byte vectors if x is 16-byte
            aligned and has a multiple of 16 elements.
        ctx: context of ``create_allreduce_ctx``.
        output: optional output, contiguous, with the shape of x: x itself or separate memory.
        method: ``algorithm`` as an ``AllReduceMethod``, for scripts of Triton-distributed. Tuning
            is then restricted to this algorithm.
        straggler_option: ``(rank, cycles)``: delay ``rank`` by ``cycles`` clock cycles, for tests.
        num_ctas: programs of a launch (tuned).
        block_bytes: bytes that a program moves per step, a power of two (tuned).
        num_chunks: chunks of a program's part, ignored by ``"one_shot"`` (tuned).
        packets: send ``"one_shot"`` in packets of at most 256 KB per launch; ``None``: by size
            (tuned).
        algorithm: ``"one_shot"``, ``"two_shot"``, ``"collective"`` or ``"by_size"`` (tuned).
            Default without tuning: ``"by_size"``.
        accepted_key: reserved for the tuner.

    Returns:
        ``output``, or a new tensor with the shape of x.

    Raises:
        InvalidArgument: an argument does not fit the context or the algorithm.
        ContextFinalized: ``ctx`` was finalized.
    """
    return Call(
        x, ctx, output, method, straggler_option, num_ctas, block_bytes, num_chunks, packets,
        algorithm, accepted_key,
    ).run()  # fmt: skip
