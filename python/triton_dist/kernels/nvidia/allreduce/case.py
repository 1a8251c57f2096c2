"""Facts of all-reduce."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from triton_dist.kernels.common import vendor
from triton_dist.kernels.common.case import Call, Cost, Operands, Peer, symmetric_all_reduces
from triton_dist.kernels.common.collective.case import CollectiveCase, Size
from triton_dist.kernels.nvidia.allreduce import all_reduce, create_allreduce_ctx

IN_PLACE = "library, in place"


class AllReduceCase(CollectiveCase):
    """Operand ``x``; gives its sum."""

    transfer = "all-reduce"
    create = staticmethod(create_allreduce_ctx)

    def library(self, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        return vendor.all_reduce(x.clone(), group)

    def peers(self, operands: Operands, ctx: Any) -> dict[str, Peer]:
        """Also torch's own over symmetric memory on GPUs, whose input is copied there first; and
        the library's in place, without the copy, on zeros, unchecked."""
        x, group = operands["x"], ctx.group
        zeros = torch.zeros_like(x)
        symmetric = symmetric_all_reduces(x, lambda staged: staged.copy_(x), group)
        return {
            **super().peers(operands, ctx),
            **{name: self.whole(call, operands, group) for name, call in symmetric.items()},
            IN_PLACE: Peer("peer", lambda: vendor.all_reduce(zeros, group)),
        }

    def cost(self, shape: Size, dtype: torch.dtype, num_ranks: int) -> Cost:
        """Each shard crosses the links to the rank that adds it, and its sum back to all."""
        cost = super().cost(shape, dtype, num_ranks)
        return dataclasses.replace(cost, link_bytes=2 * cost.link_bytes)

    def bad_calls(self, good: Operands, num_ranks: int) -> dict[str, dict[str, Any]]:
        packets = {"packets": True, "way": "two_shot"}
        return {**super().bad_calls(good, num_ranks), "packets": packets}

    def recorded_call(self, key: Any) -> Call:
        *_, method, in_place = key
        (x, ctx), _ = super().recorded_call(key)
        return (x, ctx), {"method": method, **({"output": x} if in_place else {})}

    def sample_keys(self) -> Iterator[tuple[Any, ...]]:
        for exponent in range(10, 22):
            for in_place in (False, True):
                yield 1 << exponent, torch.bfloat16, True, 4, None, in_place


CASE = AllReduceCase(all_reduce)
