"""Reduce-scatter: each rank's shard of the sum of a tensor over all ranks.

Ways
    push         every rank stores the parts of each shard into its owner's memory, who adds them:
                 one launch, without a barrier (``kernels/common/exchange.py`` says why it is
                 right).
    copy engine  copy engines push the parts, without an SM; a kernel adds what has come. For many
                 bytes.
    collective   the group's own: NCCL, gloo on CPU ranks.

Numerics
    Parts travel as they are and are added in fp32 in the order of ranks; the sum is rounded once.
    The same inputs give the same bits, whoever is late. A collective adds as its library does.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from triton_dist import tune
from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.exchange_kernels import kernel_add_pushed, kernel_reduce_scatter
from triton_dist.kernels.nvidia import collective_context, vendor_reduce_scatter
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
    "ReduceScatterContext",
    "ReduceScatterMethod",
    "create_reduce_scatter_ctx",
    "reduce_scatter",
]


class ReduceScatterMethod(enum.Enum):
    """How the shards of the sum are come by."""

    PUSH = "push"
    """Programs store parts into their owners' memory, who add them: one launch."""
    COPY_ENGINE = "copy_engine"
    """Copy engines push them, and a kernel adds as they come: for many bytes."""
    COLLECTIVE = "collective"
    """The group's reduce-scatter: NCCL, gloo on CPU ranks."""

    def __repr__(self) -> str:
        return str(self)


_KERNELS = {
    ReduceScatterMethod.PUSH: kernel_reduce_scatter,
    ReduceScatterMethod.COPY_ENGINE: kernel_add_pushed,
}


class ReduceScatterContext(collective_context.PushingContext):
    """Symmetric memory for reduce-scatters, of any dtype. A context manager."""

    name = "reduce_scatter"

    @classmethod
    def slot_bytes(cls, workspace_nbytes: int, num_ranks: int) -> int:
        """A part of the shard from each rank."""
        return num_ranks * collective_context.shard_bytes(workspace_nbytes, num_ranks)


def create_reduce_scatter_ctx(
    workspace_nbytes: int,
    rank: int,
    world_size: int,
    local_world_size: int,
    *,
    group: dist.ProcessGroup | None = None,
) -> ReduceScatterContext:
    """Allocate what ``reduce_scatter`` needs. Collective over ``group`` (default: the world, else
    this process). Takes about twice ``workspace_nbytes`` on each rank.

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
    device = ctx.buffer.device.torch_device
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


def key_fn(
    x: torch.Tensor,
    ctx: ReduceScatterContext,
    output: torch.Tensor | None = None,
    *_: Any,
    **__: Any,
) -> Any:
    """What a tuning is for. Elements of a shard count in buckets, and whether vectors fit."""
    _check(x, ctx, output)
    elements = x.numel() // ctx.num_ranks
    vectors = elements % VECTOR_ELEMENTS == 0 and x.data_ptr() % 16 == 0
    return tune.bucket(elements), x.dtype, vectors, ctx.num_ranks


def prune_fn(
    config: Mapping[str, Any], x: torch.Tensor, ctx: ReduceScatterContext, *_: Any, **__: Any
) -> bool:
    if config["method"] is ReduceScatterMethod.COLLECTIVE:
        return ctx.num_ranks > 1
    if config["method"] is ReduceScatterMethod.COPY_ENGINE and (
        ctx.num_ranks == 1 or x.nbytes < PUSHED_FROM
    ):
        return False
    shape = Shape(config["num_ctas"], config["block_bytes"], config["num_pieces"])
    return is_worth_trying(shape, x.nbytes // ctx.num_ranks)


def config_space() -> list[dict[str, Any]]:
    """The default; every other shape; on GPUs also what torch brings (CPU ranks are there to run
    our kernels)."""
    shapes = dict.fromkeys((DEFAULT_SHAPE, *SMALL_SHAPES, *LARGE_SHAPES))
    space = [{"method": ReduceScatterMethod.PUSH, **tunables_of(shape)} for shape in shapes]
    pushed = [Shape(ctas, 16384, pieces) for ctas in (16, 64) for pieces in (1, 2, 4)]
    space += [{"method": ReduceScatterMethod.COPY_ENGINE, **tunables_of(shape)} for shape in pushed]
    if current_device().name == "cuda":
        space.append({"method": ReduceScatterMethod.COLLECTIVE, **tunables_of(None)})
    return space


def _prepare(
    x: torch.Tensor,
    ctx: ReduceScatterContext,
    output: torch.Tensor | None = None,
    method: ReduceScatterMethod = ReduceScatterMethod.PUSH,
    num_ctas: int | None = None,
    block_bytes: int | None = None,
    num_pieces: int | None = None,
    straggler_option: tuple[int, int] | None = None,
) -> None:
    """Compile a candidate's kernel without launching anything."""
    if method in _KERNELS and ctx.num_ranks > 1:
        shape = shape_of(num_ctas, block_bytes, num_pieces)
        out = x.new_empty(x.numel() // ctx.num_ranks) if output is None else output
        memory = ctx.pushed if method is ReduceScatterMethod.COPY_ENGINE else ctx.buffer
        memory.launch(_exchange(method, x, ctx, shape), x, out).compile()


def _recover(x: torch.Tensor, ctx: ReduceScatterContext, *_: Any, **__: Any) -> None:
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
def reduce_scatter(
    x: torch.Tensor,
    ctx: ReduceScatterContext,
    output: torch.Tensor | None = None,
    method: ReduceScatterMethod = ReduceScatterMethod.PUSH,
    num_ctas: int | None = None,
    block_bytes: int | None = None,
    num_pieces: int | None = None,
    straggler_option: tuple[int, int] | None = None,
) -> torch.Tensor:
    """This rank's shard of the sum of x over all ranks; tuned over all ranks. Returns ``output``,
    or a new tensor [M / world size, …].

    fp32 accumulation in the order of ranks, rounded once: the same bits at every call (see the
    module).

    All ranks call alike. Calls may follow one another without synchronisation and be captured in a
    CUDA graph, which all ranks then replay equally often. On the device, calls with one context
    follow one another, whatever streams they are made on.

    Args:
        x: [M, …], fp16, bf16 or fp32, contiguous; M is a multiple of the ranks, and rank r owns
            ``x[r * M / world size:]``. 16 bytes move at a time where x begins on 16 bytes and a
            shard has a multiple of 16 elements.
        ctx: from ``create_reduce_scatter_ctx``.
        output: where the shard goes, contiguous; not a part of x.
        method: how (tuned).
        num_ctas, block_bytes: programs, and bytes that one moves at a time, a power of two (tuned).
        num_pieces: in how many pieces a program's share travels (tuned).
        straggler_option: (rank, cycles): that rank sleeps so long before it, for tests.

    Raises:
        InvalidArgument, ContextFinalized: before anything is launched.
    """
    _check(x, ctx, output)
    if not isinstance(method, ReduceScatterMethod):
        raise InvalidArgument("reduce_scatter", "method", method, "a ReduceScatterMethod")
    shape = shape_of(num_ctas, block_bytes, num_pieces)
    x = x.detach()
    rows = x.shape[0] // ctx.num_ranks
    sums = x.new_empty((rows, *x.shape[1:])) if output is None else output
    ctx.sleep(straggler_option)
    flat, flat_sums = x.view(-1), sums.detach().view(-1)
    if ctx.num_ranks == 1:
        flat_sums.copy_(flat)
    elif method is ReduceScatterMethod.COLLECTIVE:
        vendor_reduce_scatter.reduce_scatter_into(flat_sums, flat, ctx.group)
    else:
        memory = ctx.pushed if method is ReduceScatterMethod.COPY_ENGINE else ctx.buffer
        memory.run(_exchange(method, flat, ctx, shape), flat, flat_sums)
    return sums


def _exchange(
    method: ReduceScatterMethod, x: torch.Tensor, ctx: ReduceScatterContext, shape: Shape
) -> Exchange:
    return Exchange(_KERNELS[method], x.numel() // ctx.num_ranks, x.numel(), shape)
