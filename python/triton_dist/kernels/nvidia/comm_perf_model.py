"""Lower bounds of the time of a collective, from its bytes and the link bandwidths."""

from __future__ import annotations

import math

from triton_dist.errors import InvalidArgument
from triton_dist.runtime.peaks import get_nic_gbps_per_gpu

__all__ = ["estimate_all_gather_time_ms", "estimate_reduce_scatter_time_ms", "get_nic_gbps_per_gpu"]


def estimate_all_gather_time_ms(
    nbytes: float, world_size: int, local_world_size: int, intranode_bw: float, internode_bw: float
) -> float:
    """Return a lower bound, in milliseconds, of the time until every rank has all shards.

    The model sends each shard once to each other host. The ranks of that host redistribute the
    shard while the next shard is sent.

    Args:
        nbytes: total bytes of all shards.
        world_size: number of ranks.
        local_world_size: ranks per host; must divide ``world_size``.
        intranode_bw: bandwidth between one rank and its peers on the host, one direction, GB/s.
        internode_bw: bandwidth between one rank and other hosts, one direction, GB/s. If a
            bandwidth that is needed is 0 (unknown, as on CPU ranks), the result is infinite.

    Raises:
        InvalidArgument: ``local_world_size`` does not divide ``world_size``.
    """
    if local_world_size < 1 or world_size % local_world_size:
        raise InvalidArgument(
            "estimate_all_gather_time_ms",
            "local_world_size",
            local_world_size,
            f"a divisor of world_size = {world_size}",
        )
    shard_mb = nbytes / world_size / 1e6
    intranode_ms = _milliseconds(shard_mb * (local_world_size - 1), intranode_bw)
    other_hosts = world_size // local_world_size - 1
    if other_hosts == 0:
        return intranode_ms
    return max(intranode_ms, _milliseconds(shard_mb, internode_bw)) * other_hosts + intranode_ms


def _milliseconds(megabytes: float, gbps: float) -> float:
    if megabytes == 0:
        return 0.0
    return megabytes / gbps if gbps > 0 else math.inf


# A reduce-scatter moves equal bytes in the reverse direction. ``nbytes`` are the bytes of one
# rank's input.
estimate_reduce_scatter_time_ms = estimate_all_gather_time_ms
