"""Facts of all-gather."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from triton_dist.kernels.common import vendor
from triton_dist.kernels.common.case import Cost, Operands
from triton_dist.kernels.common.collective.case import ShardCase, Size
from triton_dist.kernels.nvidia.allgather import all_gather, create_all_gather_ctx


class AllGatherCase(ShardCase):
    """Operand ``x``, the own shard; gives the shards of all ranks one after the other."""

    transfer = "all-gather"
    create = staticmethod(create_all_gather_ctx)

    def elements(self, shape: Size, dtype: torch.dtype, num_ranks: int) -> int:
        return super().elements(shape, dtype, num_ranks) // num_ranks

    def shape_of(self, operands: Mapping[str, Any], num_ranks: int) -> Size:
        return Size(operands["x"].nbytes * num_ranks)

    def library(self, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        return vendor.all_gather_rows(x, group)

    def expected(self, operands: Operands, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        return vendor.all_gather_rows(operands["x"], group)

    def tolerance(self, dtype: torch.dtype, num_ranks: int) -> float:
        """None: what moves stays as it is."""
        return 0.0

    def cost(self, shape: Size, dtype: torch.dtype, num_ranks: int) -> Cost:
        nbytes, shard = shape.nbytes, shape.nbytes / num_ranks
        return Cost(
            dtype, flops=0, read_bytes=shard, written_bytes=nbytes, link_bytes=nbytes - shard
        )


CASE = AllGatherCase(all_gather)
