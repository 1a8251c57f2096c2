"""Calls of AllGather + grouped GEMM with fresh data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import triton

from tests.distributed.calls import NAN, Calls, Options
from triton_dist.kernels.common.moe.spaces import grouped_tiles
from triton_dist.kernels.common.slots.epochs import NUM_SLOTS
from triton_dist.kernels.nvidia.allgather_group_gemm import (
    ag_group_gemm,
    create_ag_group_gemm_context,
)
from triton_dist.kernels.nvidia.allgather_group_gemm.algorithms import ALGORITHMS
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for
from triton_dist.testing import poisoned_empty
from triton_dist.testing.opinfo.allgather_group_gemm import AG_GROUP_GEMM
from triton_dist.testing.opinfo.moe import routed_product

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "row-major": lambda b: b,
    "column-major": lambda b: b.transpose(1, 2).contiguous().transpose(1, 2),
    "strided": lambda b: torch.stack([b, b], dim=-1).flatten(-2)[..., ::2],
}
ROUTINGS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "any": lambda ids, E: ids,  # from -1 to E
    "padding": lambda ids, E: torch.full_like(ids, -1),
    "one expert": lambda ids, E: torch.full_like(ids, E - 1),
    "beyond": lambda ids, E: ids + E,
    "first rank's tokens": lambda ids, E: torch.where(_tokens_of(0, ids), ids, -1),
    "last rank's tokens": lambda ids, E: torch.where(
        _tokens_of(dist.get_world_size() - 1, ids), ids, E
    ),
}
"""Functions of random ids and the number of experts."""


def _tokens_of(rank: int, ids: torch.Tensor) -> torch.Tensor:
    tokens = torch.arange(len(ids), device=ids.device)
    return (tokens * dist.get_world_size() // len(ids) == rank)[:, None]


def random(seed: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    values = torch.randn(sizes, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).to(current_device().torch_device)


def some_tiles(number: int) -> triton.Config:
    """Return one of three tiles in turn, which compile quickly."""
    tiles = grouped_tiles()
    return tiles[(-1, -3, len(tiles) // 2)[number % 3]]


class AllGatherGroupGEMM(Calls):
    """``rows`` are the tokens of a rank."""

    name, op = "ag_group_gemm", ag_group_gemm
    algorithms = (
        {"algorithm": "arrivals"},
        {"algorithm": "arrivals", "num_groups": 2},
        {"algorithm": "arrivals", "num_groups": 4, "gather": "full_mesh_push"},
        {"algorithm": "arrivals", "num_groups": 3, "gather": "ring_push_1d"},
        {"algorithm": "serial"},
        {"algorithm": "serial", "gather": "collective"},
    )
    many, few, row_step, config_rows, fewest_configs = 20, 20, 7, 37, 51
    tuned_calls = {"rows": 7}, {"rows": 6}, {"rows": 6, "routing_skew": "zipf"}
    tunings = 2
    gives_up = ({}, {"gather": "ring_push_1d"})
    overdue = ("ag_group_gemm.arrivals",) * 2

    def __init__(
        self,
        rows: int,
        N: int,
        K: int,
        E: int,
        topk: int,
        dtype: torch.dtype = torch.float16,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.N, self.K, self.E, self.topk = N, K, E, topk
        ranks = group_for(group)
        self.rank, self.num_ranks = ranks.rank, ranks.size
        ctx = create_ag_group_gemm_context(
            rows * ranks.size, N, K, E, topk, dtype, ranks.rank, ranks.size, ranks.size,
            group=group,
        )  # fmt: skip
        super().__init__(ctx, dtype, group, AG_GROUP_GEMM.tolerance(dtype, ranks.size))

    @classmethod
    def first(cls) -> AllGatherGroupGEMM:
        return cls(20, 40, 72, 4, 2)

    @classmethod
    def second(cls) -> AllGatherGroupGEMM:
        return cls(8, 24, 33, 3, 2, torch.float32)

    @classmethod
    def for_configs(cls) -> AllGatherGroupGEMM:
        columns = 72 if current_device().interprets else 144
        return cls(37, columns, 96, 3, 2, torch.bfloat16)

    @classmethod
    def in_group(cls, number: int, group: dist.ProcessGroup) -> AllGatherGroupGEMM:
        return cls(5 + number, 40, 72 - 8 * number, 4, 2, group=group)

    @classmethod
    def config_space(cls) -> list[Options]:
        """Return the candidates, a call without a config, and the library, tried or not."""
        library = {"algorithm": "library", "gather": "collective"}
        return [*ALGORITHMS.config_space(), {"gemm_config": None}, library]

    def poison(self) -> None:
        for slot in range(NUM_SLOTS):
            self.slots.region_of_slot(slot, "shards").local.fill_(NAN)

    def set_defaults(self, options: dict[str, Any]) -> None:
        if options.get("algorithm") != "library":
            options.setdefault("gemm_config", some_tiles(self.number))

    def operands(
        self, rows: int, routing: str = "any", ids_dtype: torch.dtype = torch.int32
    ) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """Return the shards of all ranks, weights and ids of call ``number``."""
        seed = 1000 * self.number
        shards = [random(seed + rank, (rows, self.K), self.dtype) for rank in range(self.num_ranks)]
        b = random(seed + 500 + self.rank, (self.E, self.K, self.N), torch.float32)
        generator = torch.Generator().manual_seed(seed)
        M = rows * self.num_ranks
        ids = torch.randint(-1, self.E + 1, (M, self.topk), generator=generator).to(ids_dtype)
        ids = ROUTINGS[routing](ids.to(current_device().torch_device), self.E)
        return shards, (b / self.K**0.5).to(self.dtype), ids

    def new_operands(self, *args: Any) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        self.number += 1
        return self.operands(*args)

    def arguments(
        self, rows: int, layout: str, options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], torch.Tensor]:
        routing, ids_dtype = options.pop("routing", "any"), options.pop("ids_dtype", torch.int32)
        shards, b, ids = self.operands(rows, routing, ids_dtype)
        expected = routed_product(torch.cat(shards), b, ids)
        return (shards[self.rank].clone(), LAYOUTS[layout](b), self.ctx, ids), expected

    def run(self, op: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        with poisoned_empty():
            return op(*args, **options)
