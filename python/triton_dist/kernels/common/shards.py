"""Shards that a GEMM reads besides its own: what it has to know of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ShardPush:
    """Memory that a consumer needs to send this rank's shard itself (``gemm/fused_push.py``).

    shards, arrivals: int64 [num_ranks], addresses of each rank's gathered rows and flags.
    consumed: int32 [num_ranks], the last epoch whose shards each peer has consumed.
    num_comm_sms: programs that send. num_chunks: of a shard, along K.
    """

    shards: torch.Tensor
    arrivals: torch.Tensor
    consumed: torch.Tensor
    num_comm_sms: int
    num_chunks: int

    def options(self) -> dict[str, object]:
        return {
            "NUM_COMM_SMS": self.num_comm_sms,
            "NUM_CHUNKS": self.num_chunks,
            "shards_table": self.shards,
            "arrivals_table": self.arrivals,
            "consumed_ptr": self.consumed,
        }


@dataclass(frozen=True)
class GatheredShards:
    """The shards of the other ranks and the flags that say which rows are there.

    ``rows`` [M, K] contiguous; flag ``arrivals[s * flags_per_rank + c]`` stands for rows
    ``[c * chunk_rows, (c + 1) * chunk_rows)`` of shard s and is awaited to reach ``epoch[0]``. Both
    are int64 as in ``flags.py``; behind the epoch lies the guard of the waits.
    With a ``push`` the consumer sends the own shard, and flags stand for chunks along K.
    """

    rows: torch.Tensor
    arrivals: torch.Tensor
    epoch: torch.Tensor
    chunk_rows: int
    flags_per_rank: int
    push: ShardPush | None = None
