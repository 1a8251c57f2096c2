"""Least time that a collective takes, by its bytes and the bandwidths of the links."""

from __future__ import annotations

import math

from triton_dist.errors import InvalidArgument
from triton_dist.runtime.peaks import get_nic_gbps_per_gpu

__all__ = [
    "estimate_all_gather_time_ms",
    "estimate_reduce_scatter_time_ms",
    "get_nic_gbps_per_gpu",
]


def estimate_all_gather_time_ms(
    nbytes: float,
    world_size: int,
    local_world_size: int,
    intranode_bw: float,
    internode_bw: float,
) -> float:
    """Least milliseconds in which every rank gets the shards of all.

    Shards cross between hosts once for each host, rank by rank, and are handed round inside one
    while the next cross.

    Args:
        nbytes: of all shards together.
        world_size, local_world_size: ranks, and ranks on one host, which divide them.
        intranode_bw: of one rank to its peers on the host, one direction, in GB/s.
        internode_bw: of one rank to other hosts, one direction, in GB/s. With 0, of a link that
            is not known, as on CPU ranks, it takes for ever.

    Raises:
        InvalidArgument: ranks that do not divide into hosts.
    """
    if local_world_size < 1 or world_size % local_world_size:
        raise InvalidArgument(
            "estimate_all_gather_time_ms",
            "local_world_size",
            local_world_size,
            f"a divisor of world_size = {world_size}",
        )
    shard_mb = nbytes / world_size / 1e6
    inside = _milliseconds(shard_mb * (local_world_size - 1), intranode_bw)
    other_hosts = world_size // local_world_size - 1
    if other_hosts == 0:
        return inside
    return max(inside, _milliseconds(shard_mb, internode_bw)) * other_hosts + inside


def _milliseconds(megabytes: float, gbps: float) -> float:
    if megabytes == 0:
        return 0.0
    return megabytes / gbps if gbps > 0 else math.inf


# A reduce-scatter moves as many bytes the other way; ``nbytes``: of one rank's input.
estimate_reduce_scatter_time_ms = estimate_all_gather_time_ms
