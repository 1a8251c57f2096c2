"""Contexts of all-gather and reduce-scatter."""

from __future__ import annotations

import torch.distributed as dist

from triton_dist.errors import ContextFinalized
from triton_dist.kernels.common.collective import context as collective_context
from triton_dist.kernels.common.collective.pushed import PushedShards
from triton_dist.kernels.common.exchange.buffer import padded_shard_bytes
from triton_dist.runtime.ranks import Group


class ShardContext(collective_context.CollectiveContext):
    """Context with additional memory for shards that copy engines push."""

    creator: str
    """Name of the function that creates the context, for errors."""

    def __init__(
        self, workspace_nbytes: int, local_world_size: int, group: dist.ProcessGroup | None
    ) -> None:
        super().__init__(workspace_nbytes, local_world_size, group)
        shard_nbytes = padded_shard_bytes(workspace_nbytes, self.num_ranks)
        with self.allocating() as add:
            disagreements = self.buffer.disagreements
            self._pushed_shards = add(PushedShards(shard_nbytes, group, self.name, disagreements))

    @staticmethod
    def slot_bytes(nbytes: int, num_ranks: int) -> int:
        """Return the bytes of a slot, which receives one shard from each rank."""
        return num_ranks * padded_shard_bytes(nbytes, num_ranks)

    @property
    def pushed_shards(self) -> PushedShards:
        if self._buffer is None:
            raise ContextFinalized(type(self).__name__)
        return self._pushed_shards


class AllGatherContext(ShardContext):
    """Symmetric memory of ``all_gather``, for any dtype. A context manager."""

    name, creator = "all_gather", "create_all_gather_ctx"


class ReduceScatterContext(ShardContext):
    """Symmetric memory of ``reduce_scatter``, for any dtype. A context manager."""

    name, creator = "reduce_scatter", "create_reduce_scatter_ctx"


def create_all_gather_ctx(
    workspace_nbytes: int, rank: int, world_size: int, local_world_size: int, *, group: Group = None
) -> AllGatherContext:
    """Create the context of ``all_gather``. Collective over ``group``.

    Allocates about 4 * ``workspace_nbytes`` per rank.

    Args:
        workspace_nbytes: maximum bytes of a result.
        rank, world_size, local_world_size: this rank in the group, and the numbers of ranks of the
            group and of one host.
        group: process group; default: the world, or this process alone.

    Returns:
        The context. Call ``finalize()`` or use ``with`` to free it.

    Raises:
        InvalidArgument, RankDisagreement, SymmetricMemoryFull: see ``create_ag_gemm_context``.
    """
    return collective_context.create(
        AllGatherContext, AllGatherContext.creator, workspace_nbytes, rank, world_size,
        local_world_size, group,
    )  # fmt: skip


def create_reduce_scatter_ctx(
    workspace_nbytes: int, rank: int, world_size: int, local_world_size: int, *, group: Group = None
) -> ReduceScatterContext:
    """Create the context of ``reduce_scatter``. Collective over ``group``.

    ``create_all_gather_ctx`` describes memory, arguments and errors. Here ``workspace_nbytes`` is
    the maximum number of bytes of x.
    """
    return collective_context.create(
        ReduceScatterContext, ReduceScatterContext.creator, workspace_nbytes, rank, world_size,
        local_world_size, group,
    )  # fmt: skip
