"""All-gather: the tensors of all ranks, one after the other, on every rank.

Ways
    push         every rank stores its tensor into every peer's memory, where it is copied out: one
                 launch, without a barrier (``kernels/common/exchange.py`` says why it is right).
    copy engine  copy engines push, without an SM; a kernel copies out what has come. For many
                 bytes.
    collective   the group's own: NCCL, gloo on CPU ranks.

Elements are copied as they are: the result is exact.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from triton_dist import tune
from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.exchange_kernels import kernel_all_gather, kernel_copy_pushed
from triton_dist.kernels.nvidia import collective_context, vendor
from triton_dist.kernels.nvidia.exchange import (
    DEFAULT_SHAPE,
    LARGE_SHAPES,
    PUSHED_FROM,
    SMALL_SHAPES,
    VECTOR_ELEMENTS,
    Exchange,
    Shape,
    is_worth_trying,
    shape_of,
    tunables_of,
)
from triton_dist.runtime.device import current_device

__all__ = [
    "AllGatherContext",
    "GatherMethod",
    "create_all_gather_ctx",
    "all_gather",
]


class GatherMethod(enum.Enum):
    """How tensors travel."""

    PUSH = "push"
    """Programs store into every peer's memory and copy out what they get: one launch."""
    COPY_ENGINE = "copy_engine"
    """Copy engines push them, and a kernel copies them out as they come: for many bytes."""
    COLLECTIVE = "collective"
    """The group's all-gather: NCCL, gloo on CPU ranks."""

    def __repr__(self) -> str:
        return str(self)


_KERNELS = {
    GatherMethod.PUSH: kernel_all_gather,
    GatherMethod.COPY_ENGINE: kernel_copy_pushed,
}


class AllGatherContext(collective_context.PushingContext):
    """Symmetric memory for all-gathers, of any dtype. A context manager."""

    name = "all_gather"

    @classmethod
    def slot_bytes(cls, workspace_nbytes: int, num_ranks: int) -> int:
        """The tensor of each rank."""
        return num_ranks * collective_context.shard_bytes(workspace_nbytes, num_ranks)


def create_all_gather_ctx(
    workspace_nbytes: int,
    rank: int,
    world_size: int,
    local_world_size: int,
    *,
    group: dist.ProcessGroup | None = None,
) -> AllGatherContext:
    """Allocate what ``all_gather`` needs. Collective over ``group`` (default: the world, else
    this process). Takes about twice ``workspace_nbytes`` on each rank.

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
    device = ctx.buffer.device.torch_device
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
        collective_context.check_output("all_gather", output, x, numel, device)


def key_fn(
    x: torch.Tensor,
    ctx: AllGatherContext,
    output: torch.Tensor | None = None,
    *_: Any,
    **__: Any,
) -> Any:
    """What a tuning is for. Elements count in buckets, and whether vectors fit."""
    _check(x, ctx, output)
    vectors = x.numel() % VECTOR_ELEMENTS == 0 and x.data_ptr() % 16 == 0
    return tune.bucket(x.numel()), x.dtype, vectors, ctx.num_ranks


def prune_fn(
    config: Mapping[str, Any], x: torch.Tensor, ctx: AllGatherContext, *_: Any, **__: Any
) -> bool:
    if config["method"] is GatherMethod.COLLECTIVE:
        return ctx.num_ranks > 1
    if config["method"] is GatherMethod.COPY_ENGINE and (
        ctx.num_ranks == 1 or x.nbytes * ctx.num_ranks < PUSHED_FROM
    ):
        return False
    shape = Shape(config["num_ctas"], config["block_bytes"], config["num_pieces"])
    return is_worth_trying(shape, x.nbytes)


def config_space() -> list[dict[str, Any]]:
    """The default; every other shape; on GPUs also what torch brings (CPU ranks are there to run
    our kernels)."""
    shapes = dict.fromkeys((DEFAULT_SHAPE, *SMALL_SHAPES, *LARGE_SHAPES))
    space = [{"method": GatherMethod.PUSH, **tunables_of(shape)} for shape in shapes]
    pushed = [Shape(ctas, 16384, pieces) for ctas in (16, 64) for pieces in (1, 2, 4)]
    space += [{"method": GatherMethod.COPY_ENGINE, **tunables_of(shape)} for shape in pushed]
    if current_device().name == "cuda":
        space.append({"method": GatherMethod.COLLECTIVE, **tunables_of(None)})
    return space


def _prepare(
    x: torch.Tensor,
    ctx: AllGatherContext,
    output: torch.Tensor | None = None,
    method: GatherMethod = GatherMethod.PUSH,
    num_ctas: int | None = None,
    block_bytes: int | None = None,
    num_pieces: int | None = None,
    straggler_option: tuple[int, int] | None = None,
) -> None:
    """Compile a candidate's kernel without launching anything."""
    if method in _KERNELS and ctx.num_ranks > 1:
        shape = shape_of(num_ctas, block_bytes, num_pieces)
        out = x.new_empty(x.numel() * ctx.num_ranks) if output is None else output
        memory = ctx.pushed if method is GatherMethod.COPY_ENGINE else ctx.buffer
        memory.launch(_exchange(method, x, ctx, shape), x, out).compile()


def _recover(x: torch.Tensor, ctx: AllGatherContext, *_: Any, **__: Any) -> None:
    """Bring the context of all ranks back to one state after a candidate failed on some rank."""
    ctx.reset()


@tune.autotune(
    config_space=config_space,
    key_fn=key_fn,
    prune_fn=prune_fn,
    prepare_fn=_prepare,
    recover_fn=_recover,
    agree_fn=lambda x, *_, **__: f"x of {x.numel()} elements",
    version="1",  # another one when results that are shipped (records/) should not be used any more
)
def all_gather(
    x: torch.Tensor,
    ctx: AllGatherContext,
    output: torch.Tensor | None = None,
    method: GatherMethod = GatherMethod.PUSH,
    num_ctas: int | None = None,
    block_bytes: int | None = None,
    num_pieces: int | None = None,
    straggler_option: tuple[int, int] | None = None,
) -> torch.Tensor:
    """x of all ranks, in their order; tuned over all ranks. Returns ``output``, or a new tensor
    [world size * M, …].

    All ranks call alike. Calls may follow one another without synchronisation and be captured in a
    CUDA graph, which all ranks then replay equally often. On the device, calls with one context
    follow one another, whatever streams they are made on.

    Args:
        x: [M, …], fp16, bf16 or fp32, contiguous, of the same shape on every rank. 16 bytes move at
            a time where it begins on 16 bytes and has a multiple of 16 elements.
        ctx: from ``create_all_gather_ctx``.
        output: where all goes, contiguous; x is not a part of it, or the one where it goes.
        method: how (tuned).
        num_ctas, block_bytes: programs, and bytes that one moves at a time, a power of two (tuned).
        num_pieces: in how many pieces a program's share travels (tuned).
        straggler_option: (rank, cycles): that rank sleeps so long before it, for tests.

    Raises:
        InvalidArgument, ContextFinalized: before anything is launched.
    """
    _check(x, ctx, output)
    if not isinstance(method, GatherMethod):
        raise InvalidArgument("all_gather", "method", method, "a GatherMethod")
    shape = shape_of(num_ctas, block_bytes, num_pieces)
    x = x.detach()
    rows = x.shape[0] * ctx.num_ranks
    gathered = x.new_empty((rows, *x.shape[1:])) if output is None else output
    ctx.sleep(straggler_option)
    flat, flat_gathered = x.view(-1), gathered.detach().view(-1)
    if ctx.num_ranks == 1:
        flat_gathered.copy_(flat)
    elif method is GatherMethod.COLLECTIVE:
        vendor.all_gather_into(flat_gathered, flat, ctx.group)
    else:
        memory = ctx.pushed if method is GatherMethod.COPY_ENGINE else ctx.buffer
        memory.run(_exchange(method, flat, ctx, shape), flat, flat_gathered)
    return gathered


def _exchange(
    method: GatherMethod, x: torch.Tensor, ctx: AllGatherContext, shape: Shape
) -> Exchange:
    return Exchange(_KERNELS[method], x.numel(), x.numel() * ctx.num_ranks, shape)
