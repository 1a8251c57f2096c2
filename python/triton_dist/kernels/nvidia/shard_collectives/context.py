"""Contexts of all-gather and reduce-scatter."""

from __future__ import annotations

import torch.distributed as dist

from triton_dist.errors import ContextFinalized
from triton_dist.kernels.common.collective import context as collective_context
from triton_dist.kernels.common.collective.pushed import PushedShards
from triton_dist.kernels.common.exchange.buffer import shard_bytes
from triton_dist.runtime.ranks import Group


class PushingContext(collective_context.CollectiveContext):
    """Context that also has memory for shards that copy engines push."""

    creator: str
    """Name of the function that creates it, for errors."""

    def __init__(
        self, workspace_nbytes: int, local_world_size: int, group: dist.ProcessGroup | None
    ) -> None:
        super().__init__(workspace_nbytes, local_world_size, group)
        shard_nbytes = shard_bytes(workspace_nbytes, self.num_ranks)
        with self._allocating() as own:
            found = self.buffer.disagreements
            self._pushed = own(PushedShards(shard_nbytes, group, self.name, found))

    @staticmethod
    def slot_bytes(nbytes: int, num_ranks: int) -> int:
        """Return the bytes of a shard, or of a part of one, from each rank."""
        return num_ranks * shard_bytes(nbytes, num_ranks)

    @property
    def pushed(self) -> PushedShards:
        if self._buffer is None:
            raise ContextFinalized(type(self).__name__)
        return self._pushed


class AllGatherContext(PushingContext):
    """Symmetric memory for all-gathers, of any dtype. A context manager."""

    name, creator = "all_gather", "create_all_gather_ctx"


class ReduceScatterContext(PushingContext):
    """Symmetric memory for reduce-scatters, of any dtype. A context manager."""

    name, creator = "reduce_scatter", "create_reduce_scatter_ctx"


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
        AllGatherContext, AllGatherContext.creator, workspace_nbytes, rank, world_size,
        local_world_size, group,
    )  # fmt: skip


def create_reduce_scatter_ctx(
    workspace_nbytes: int,
    rank: int,
    world_size: int,
    local_world_size: int,
    *,
    group: Group = None,
) -> ReduceScatterContext:
    """Allocate what ``reduce_scatter`` needs: like ``create_all_gather_ctx``, for an x of at most
    ``workspace_nbytes``."""
    return collective_context.create(
        ReduceScatterContext, ReduceScatterContext.creator, workspace_nbytes, rank, world_size,
        local_world_size, group,
    )  # fmt: skip
