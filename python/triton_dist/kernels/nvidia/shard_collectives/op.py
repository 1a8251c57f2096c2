"""All-gather and reduce-scatter.

All-gather concatenates the tensors of all ranks, on every rank. Reduce-scatter returns each rank's
shard of the sum of a tensor over all ranks.

Algorithms:
    * ``"push"``: one launch without a barrier (``kernels/common/exchange/protocol.py``). In an
      all-gather, every rank stores its tensor into the peers' memory; each peer copies it to the
      output. In a reduce-scatter, every rank stores each shard into the memory of the rank that
      owns the shard; the owner adds.
    * ``"copy_engine"``: copy engines push shards without using an SM, and a kernel copies or adds
      received shards. For large tensors.
    * ``"collective"``: ``torch.distributed`` (NCCL; gloo on CPU ranks).

Numerics: addends are added in fp32 in the order of ranks, and the sum is rounded once. Equal inputs
give bitwise equal results. ``"collective"`` adds in the order of its library.
"""

from __future__ import annotations

import torch

from triton_dist.kernels.common.collective.context import size_text
from triton_dist.kernels.common.op import op
from triton_dist.kernels.nvidia.shard_collectives.algorithms import (
    AllGatherCall,
    GatherMethod,
    ReduceScatterCall,
    ReduceScatterMethod,
)
from triton_dist.kernels.nvidia.shard_collectives.context import (
    AllGatherContext,
    ReduceScatterContext,
)


@op(
    algorithms=AllGatherCall.algorithms,
    call=AllGatherCall,
    sizes=AllGatherCall.sizes,
    key_fn=AllGatherCall.key_fn,
    agree_fn=size_text,
    version="2",  # change when the shipped results (records/) must no longer be used
)
def all_gather(
    x: torch.Tensor,
    ctx: AllGatherContext,
    output: torch.Tensor | None = None,
    method: GatherMethod | None = None,
    num_ctas: int | None = None,
    block_bytes: int | None = None,
    num_chunks: int | None = None,
    straggler_option: tuple[int, int] | None = None,
    algorithm: str | None = None,
    validated_key: object = None,
) -> torch.Tensor:
    """Return x of all ranks, concatenated in the order of ranks. Tuned over all ranks.

    The rules for calls are in the docstring of ``triton_dist.kernels.nvidia``.

    Args:
        x: [M, …], fp16, bf16 or fp32, contiguous, with equal shapes on all ranks. Kernels use
            16-byte vectors if x is 16-byte aligned and its number of elements is a multiple of 16.
        ctx: context of ``create_all_gather_ctx``.
        output: optional output [W * M, …] for W ranks, contiguous. x must be this rank's part of
            ``output``, or separate memory.
        method: ``algorithm`` as a ``GatherMethod``. Tuning then tries only this algorithm.
        num_ctas: number of programs of a launch (tuned).
        block_bytes: bytes that a program moves at a time, a power of two (tuned).
        num_chunks: number of chunks into which each program divides its elements (tuned).
        straggler_option: ``(rank, cycles)``: delay ``rank`` by ``cycles`` clock cycles, for tests.
        algorithm: ``"push"``, ``"copy_engine"`` or ``"collective"`` (tuned; ``"push"`` if untuned).
        validated_key: reserved for the tuner, which passes the key that it has computed.

    Returns:
        ``output``, or a new tensor [W * M, …].

    Raises:
        InvalidArgument: an argument does not fit the context or the algorithm.
        ContextFinalized: ``ctx`` was finalized.
    """
    return AllGatherCall(
        x, ctx, output, method, num_ctas, block_bytes, num_chunks, straggler_option, algorithm,
        validated_key,
    ).run()  # fmt: skip


@op(
    algorithms=ReduceScatterCall.algorithms,
    call=ReduceScatterCall,
    sizes=ReduceScatterCall.sizes,
    key_fn=ReduceScatterCall.key_fn,
    agree_fn=size_text,
    version="2",  # change when the shipped results (records/) must no longer be used
)
def reduce_scatter(
    x: torch.Tensor,
    ctx: ReduceScatterContext,
    output: torch.Tensor | None = None,
    method: ReduceScatterMethod | None = None,
    num_ctas: int | None = None,
    block_bytes: int | None = None,
    num_chunks: int | None = None,
    straggler_option: tuple[int, int] | None = None,
    algorithm: str | None = None,
    validated_key: object = None,
) -> torch.Tensor:
    """Return this rank's shard of the sum of x over all ranks. Tuned over all ranks.

    The sum is accumulated in fp32 in the order of ranks and rounded once; ``"collective"`` adds in
    the order of its library. The rules for calls are in the docstring of
    ``triton_dist.kernels.nvidia``.

    Args:
        x: [M, …], fp16, bf16 or fp32, contiguous. M is a multiple of the number of ranks W; rank r
            owns ``x[r * M / W : (r + 1) * M / W]``. Kernels use 16-byte vectors if x is 16-byte
            aligned and a shard's number of elements is a multiple of 16.
        ctx: context of ``create_reduce_scatter_ctx``.
        output: optional output [M / W, …], contiguous; memory separate from x.
        method: ``algorithm`` as a ``ReduceScatterMethod``. Tuning then tries only this algorithm.
        num_ctas, block_bytes, num_chunks, straggler_option, algorithm, validated_key: see
            ``all_gather``.

    Returns:
        ``output``, or a new tensor [M / W, …].

    Raises:
        InvalidArgument: an argument does not fit the context or the algorithm.
        ContextFinalized: ``ctx`` was finalized.
    """
    return ReduceScatterCall(
        x, ctx, output, method, num_ctas, block_bytes, num_chunks, straggler_option, algorithm,
        validated_key,
    ).run()  # fmt: skip
