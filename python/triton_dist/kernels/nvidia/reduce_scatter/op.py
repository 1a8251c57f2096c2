"""Reduce-scatter: each rank's shard of the sum of a tensor over all ranks.

Ways
    ``"push"``: every rank stores the parts of each shard into its owner's memory, who adds them:
    one launch, without a barrier (``kernels/common/exchange/protocol.py`` says why it is right).
    ``"copy_engine"``: copy engines push the parts, without an SM; a kernel adds what has come. For
    many bytes.
    ``"collective"``: the group's own: NCCL, gloo on CPU ranks.

Numerics
    Parts travel as they are and are added in fp32 in the order of ranks; the sum is rounded once.
    The same inputs give the same bits, whoever is late. A collective adds as its library does.
"""

from __future__ import annotations

import torch

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common import vendor
from triton_dist.kernels.common.collective import context as collective_context
from triton_dist.kernels.common.collective.op import (
    Collective,
    CopyEngine,
    Push,
    PushingContext,
    PushMethod,
    ShardsCall,
)
from triton_dist.kernels.common.context import buffer_of
from triton_dist.kernels.common.exchange.kernels import kernel_reduce_scatter
from triton_dist.kernels.common.exchange.pushed import kernel_add_pushed
from triton_dist.kernels.common.op import Ways, op
from triton_dist.runtime.ranks import Group


class ReduceScatterMethod(PushMethod):
    """Ways to come by the shards of the sum."""

    PUSH = "push"
    """Programs store parts into their owners' memory, who add them: one launch."""
    COPY_ENGINE = "copy_engine"
    """Copy engines push them, and a kernel adds as they come: for many bytes."""
    COLLECTIVE = "collective"
    """The group's reduce-scatter: NCCL, gloo on CPU ranks."""


class ReduceScatterContext(PushingContext):
    """Symmetric memory for reduce-scatters, of any dtype. A context manager."""

    name = "reduce_scatter"


def create_reduce_scatter_ctx(
    workspace_nbytes: int,
    rank: int,
    world_size: int,
    local_world_size: int,
    *,
    group: Group = None,
) -> ReduceScatterContext:
    """Allocate what ``reduce_scatter`` needs. Collective over ``group`` (default: the world, else
    this process). Takes about four times ``workspace_nbytes`` on each rank.

    Args:
        workspace_nbytes: the largest x in bytes.
        rank, world_size: this rank in the group, and the group's size.
        local_world_size: ranks on one host; clamped to ``world_size``, which must lie on one host.

    Raises:
        InvalidArgument: on every rank, for a value that cannot work.
        RankDisagreement: ranks ask for different contexts.
        SymmetricMemoryFull: on every rank, if some rank has too little memory.
    """
    return collective_context.create(
        ReduceScatterContext, "create_reduce_scatter_ctx", workspace_nbytes, rank, world_size,
        local_world_size, group,
    )  # fmt: skip


def _check(x: torch.Tensor, ctx: ReduceScatterContext, output: torch.Tensor | None) -> None:
    buffer = buffer_of(ctx, ReduceScatterContext, "reduce_scatter", "create_reduce_scatter_ctx")
    device = buffer.device.torch_device
    collective_context.check_tensor("reduce_scatter", "x", x, device)
    if x.ndim < 1 or x.shape[0] % ctx.num_ranks:
        expected = f"a first dimension that is a multiple of world_size = {ctx.num_ranks}"
        raise InvalidArgument("reduce_scatter", "x.shape", tuple(x.shape), expected)
    if x.nbytes > ctx.workspace_nbytes:
        expected = f"at most the context's workspace_nbytes = {ctx.workspace_nbytes}"
        raise InvalidArgument("reduce_scatter", "x.nbytes", x.nbytes, expected)
    if output is not None:
        numel = x.numel() // ctx.num_ranks
        collective_context.check_output("reduce_scatter", output, x, numel, device)


class Call(ShardsCall):
    """One call of ``reduce_scatter``."""

    ways = Ways("reduce_scatter", (Push(), CopyEngine(), Collective()))
    gathers = False
    push, take_pushed = kernel_reduce_scatter, kernel_add_pushed
    check = staticmethod(_check)
    collective = staticmethod(vendor.reduce_scatter_into)


@op(
    ways=Call.ways,
    call=Call,
    sizes=Call.sizes,
    key_fn=Call.key_fn,
    agree_fn=collective_context.exact_size,
    version="2",  # another one when results that are shipped (records/) should not be used any more
)
def reduce_scatter(
    x: torch.Tensor,
    ctx: ReduceScatterContext,
    output: torch.Tensor | None = None,
    method: ReduceScatterMethod | None = None,
    num_ctas: int | None = None,
    block_bytes: int | None = None,
    num_pieces: int | None = None,
    straggler_option: tuple[int, int] | None = None,
    way: str | None = None,
) -> torch.Tensor:
    """This rank's shard of the sum of x over all ranks; tuned over all ranks. Returns ``output``,
    or a new tensor [M / world size, …].

    fp32 accumulation in the order of ranks, rounded once: the same bits at every call (see the
    module).

    All ranks call alike; more about calls: the docstring of ``triton_dist.kernels.nvidia``.

    Args:
        x: [M, …], fp16, bf16 or fp32, contiguous; M is a multiple of the ranks, and rank r owns
            ``x[r * M / world size:]``. 16 bytes move at a time where x begins on 16 bytes and a
            shard has a multiple of 16 elements.
        ctx: from ``create_reduce_scatter_ctx``.
        output: where the shard goes, contiguous; in memory apart from x.
        way: the algorithm: ``"push"``, ``"copy_engine"`` or ``"collective"``, see the module
            (tuned); default: ``"push"``.
        num_ctas, block_bytes: programs, and bytes that one moves at a time, a power of two (tuned).
        num_pieces: in how many pieces a program's share travels (tuned).
        straggler_option: (rank, cycles): that rank sleeps so long before it, for tests.
        method: older name of the way, which is that of its value. Tuned with it, the tuning is of
            that way.

    Raises:
        InvalidArgument, ContextFinalized: before anything is launched.
    """
    return Call(
        x, ctx, output, method, num_ctas, block_bytes, num_pieces, straggler_option, way
    ).run()  # fmt: skip
