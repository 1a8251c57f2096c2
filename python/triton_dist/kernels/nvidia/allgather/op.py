"""All-gather: the tensors of all ranks, one after the other, on every rank.

Ways
    ``"push"``: every rank stores its tensor into every peer's memory, where it is copied out: one
    launch, without a barrier (``kernels/common/exchange/protocol.py`` says why it is right).
    ``"copy_engine"``: copy engines push, without an SM; a kernel copies out what has come. For many
    bytes.
    ``"collective"``: the group's own: NCCL, gloo on CPU ranks.

Elements are copied as they are: the result is exact.
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
from triton_dist.kernels.common.exchange.kernels import kernel_all_gather
from triton_dist.kernels.common.exchange.pushed import kernel_copy_pushed
from triton_dist.kernels.common.op import Ways, op
from triton_dist.runtime.ranks import Group


class GatherMethod(PushMethod):
    """Ways for tensors to travel."""

    PUSH = "push"
    """Programs store into every peer's memory and copy out what they get: one launch."""
    COPY_ENGINE = "copy_engine"
    """Copy engines push them, and a kernel copies them out as they come: for many bytes."""
    COLLECTIVE = "collective"
    """The group's all-gather: NCCL, gloo on CPU ranks."""


class AllGatherContext(PushingContext):
    """Symmetric memory for all-gathers, of any dtype. A context manager."""

    name = "all_gather"


def create_all_gather_ctx(
    workspace_nbytes: int,
    rank: int,
    world_size: int,
    local_world_size: int,
    *,
    group: Group = None,
) -> AllGatherContext:
    """Allocate what ``all_gather`` needs. Collective over ``group`` (default: the world, else
    this process). Takes about four times ``workspace_nbytes`` on each rank.

    Args:
        workspace_nbytes: the largest result in bytes.
        rank, world_size: this rank in the group, and the group's size.
        local_world_size: ranks on one host; clamped to ``world_size``, which must lie on one host.

    Raises:
        InvalidArgument: on every rank, for a value that cannot work.
        RankDisagreement: ranks ask for different contexts.
        SymmetricMemoryFull: on every rank, if some rank has too little memory.
    """
    return collective_context.create(
        AllGatherContext, "create_all_gather_ctx", workspace_nbytes, rank, world_size,
        local_world_size, group,
    )  # fmt: skip


def _check(x: torch.Tensor, ctx: AllGatherContext, output: torch.Tensor | None) -> None:
    buffer = buffer_of(ctx, AllGatherContext, "all_gather", "create_all_gather_ctx")
    device = buffer.device.torch_device
    collective_context.check_tensor("all_gather", "x", x, device)
    if x.ndim < 1:
        raise InvalidArgument("all_gather", "x.shape", tuple(x.shape), "[M, …]")
    if x.nbytes * ctx.num_ranks > ctx.workspace_nbytes:
        expected = (
            f"at most the context's workspace_nbytes = {ctx.workspace_nbytes}, over world_size = "
            f"{ctx.num_ranks}"
        )
        raise InvalidArgument("all_gather", "x.nbytes", x.nbytes, expected)
    if output is not None:
        numel = x.numel() * ctx.num_ranks
        place = ctx.rank * x.nbytes
        collective_context.check_output("all_gather", output, x, numel, device, place)


class Call(ShardsCall):
    """One call of ``all_gather``."""

    ways = Ways("all_gather", (Push(), CopyEngine(), Collective()))
    gathers = True
    push, take_pushed = kernel_all_gather, kernel_copy_pushed
    check = staticmethod(_check)
    collective = staticmethod(vendor.all_gather_into)


@op(
    ways=Call.ways,
    call=Call,
    sizes=Call.sizes,
    key_fn=Call.key_fn,
    agree_fn=collective_context.exact_size,
    version="2",  # another one when results that are shipped (records/) should not be used any more
)
def all_gather(
    x: torch.Tensor,
    ctx: AllGatherContext,
    output: torch.Tensor | None = None,
    method: GatherMethod | None = None,
    num_ctas: int | None = None,
    block_bytes: int | None = None,
    num_pieces: int | None = None,
    straggler_option: tuple[int, int] | None = None,
    way: str | None = None,
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
