"""All-gather: the tensors of all ranks, one after the other, on every rank. Reduce-scatter: each
rank's shard of the sum of a tensor over all ranks.

Ways
    ``"push"``: every rank stores its tensor, or the parts of each shard, into its peers' memory,
    where they are copied out, or added: one launch, without a barrier
    (``kernels/common/exchange/protocol.py`` says why it is right).
    ``"copy_engine"``: copy engines push, without an SM; a kernel copies out or adds what has come.
    For many bytes.
    ``"collective"``: the group's own: NCCL, gloo on CPU ranks.

Numerics
    An all-gather copies elements. Parts of a sum travel as they are and are added in fp32 in the
    order of ranks; the sum is rounded once. The same inputs give the same bits, whichever rank is
    late. A collective adds as its library does.
"""

from __future__ import annotations

import torch

from triton_dist.kernels.common.collective.context import exact_size
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
    agree_fn=exact_size,
    version="2",  # another one when results that are shipped (records/) should not be used any more
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
    accepted_key: object = None,
) -> torch.Tensor:
    """x of all ranks, in their order; tuned over all ranks. Returns ``output``, or a new tensor
    [world size * M, …].

    All ranks call alike; more about calls: the docstring of ``triton_dist.kernels.nvidia``.

    Args:
        x: [M, …], fp16, bf16 or fp32, contiguous, of the same shape on every rank. 16 bytes move at
            a time where it begins on 16 bytes and has a multiple of 16 elements.
        ctx: from ``create_all_gather_ctx``.
        output: where all goes, contiguous; x is the part of it where it goes, or apart from it.
        way: the algorithm: ``"push"``, ``"copy_engine"`` or ``"collective"``, see the module
            (tuned); default: ``"push"``.
        num_ctas, block_bytes: programs, and bytes that one moves at a time, a power of two (tuned).
        num_chunks: in how many pieces a program's share travels (tuned).
        straggler_option: (rank, cycles): that rank sleeps so long before it, for tests.
        method: older name of the way, which is that of its value. Tuned with it, the tuning is of
            that way.

    Raises:
        InvalidArgument, ContextFinalized: before anything is launched.
    """
    return AllGatherCall(
        x, ctx, output, method, num_ctas, block_bytes, num_chunks, straggler_option, algorithm,
        accepted_key,
    ).run()  # fmt: skip


@op(
    algorithms=ReduceScatterCall.algorithms,
    call=ReduceScatterCall,
    sizes=ReduceScatterCall.sizes,
    key_fn=ReduceScatterCall.key_fn,
    agree_fn=exact_size,
    version="2",  # another one when results that are shipped (records/) should not be used any more
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
    accepted_key: object = None,
) -> torch.Tensor:
    """This rank's shard of the sum of x over all ranks; tuned over all ranks. Returns ``output``,
    or a new tensor [M / world size, …].

    fp32 accumulation in the order of ranks, rounded once: the same bits at every call (see the
    module).

    All ranks call alike; more about calls: the docstring of ``triton_dist.kernels.nvidia``. Errors,
    and arguments that are not here: those of ``all_gather``.

    Args:
        x: [M, …], fp16, bf16 or fp32, contiguous; M is a multiple of the ranks, and rank r owns
            ``x[r * M / world size:]``. 16 bytes move at a time where x begins on 16 bytes and a
            shard has a multiple of 16 elements.
        ctx: from ``create_reduce_scatter_ctx``.
        output: where the shard goes, contiguous; in memory apart from x.
    """
    return ReduceScatterCall(
        x, ctx, output, method, num_ctas, block_bytes, num_chunks, straggler_option, algorithm,
        accepted_key,
    ).run()  # fmt: skip
