"""Calls of the plain collectives with fresh data."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist

from tests.distributed.calls import NAN, Calls, Options, with_few_samples
from triton_dist.kernels.nvidia import (
    all_gather,
    all_reduce,
    create_all_gather_ctx,
    create_allreduce_ctx,
    create_reduce_scatter_ctx,
    reduce_scatter,
)
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for
from triton_dist.testing import assert_allclose
from triton_dist.testing.assertions import assert_bitwise_equal

NO_TAG = 0x7F
"""Byte of an unused word of a packet: the highest bit, which every tag sets, is zero."""
ROOM = 1 << 16  # bytes of a workspace
# (programs, bytes of a block, chunks): shards of zero, one and several blocks.
SHAPES = ((1, 512, 1), (8, 512, 1), (3, 2048, 4), (2, 1024, 16))


def shape(number: int) -> dict[str, int]:
    names = ("num_ctas", "block_bytes", "num_chunks")
    return dict(zip(names, SHAPES[number % len(SHAPES)], strict=True))


def addend(seed: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers whose sum in fp32 depends on the order of addition."""
    generator = torch.Generator().manual_seed(seed)
    magnitude = torch.randint(-3, 3, (elements,), generator=generator)
    values = torch.randn(elements, generator=generator) * 10.0**magnitude
    return values.to(dtype).to(current_device().torch_device)


def sum_in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    """Add in fp32, beginning with rank 0, and round once."""
    if len(parts) == 1:
        return parts[0]
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)


class Collective(Calls):
    """Rows are elements of a rank, or of a shard for a reduce-scatter."""

    create: ClassVar[Callable[..., Any]]
    names: ClassVar[tuple[str, ...]]
    """Algorithms of ours."""
    many, few, row_step, config_rows = 2000, 300, 613, 3000
    flags = ("arrivals", "consumed")

    def __init_subclass__(cls) -> None:
        cls.algorithms = [cls.algorithm(name) for name in cls.names]
        cls.epoch_algorithms = [cls.algorithm(name) for name in cls.names if name == "copy_engine"]
        cls.gives_up = [each | shape(2 * (i % 2)) for i, each in enumerate(cls.algorithms)]
        regions = {"copy_engine": "pushed.arrivals", "packets": "packets"}
        regions |= {"two_shot_in_packets": "packets"}
        cls.overdue = [f"{cls.name}.{regions.get(name, 'arrivals')}" for name in cls.names]
        cls.tuned_calls = (
            {"rows": 400, "in_place": cls.name == "all_reduce"},
            {"rows": 33, "dtype": torch.float32},
        )

    def __init__(
        self,
        workspace_nbytes: int = ROOM,
        dtype: torch.dtype = torch.float16,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        ranks = group_for(group)
        ctx = type(self).create(workspace_nbytes, ranks.rank, ranks.size, ranks.size, group=group)
        super().__init__(ctx, dtype, group, rtol=1e-2)
        self.by_library: list[torch.Tensor] = []
        """Results of a library, whose sums have any order."""

    @classmethod
    def first(cls) -> Collective:
        return cls()

    for_configs = first

    @classmethod
    def second(cls) -> Collective:
        return cls(dtype=torch.float32)

    @classmethod
    def in_group(cls, number: int, group: dist.ProcessGroup) -> Collective:
        return cls(group=group)

    @classmethod
    def few_configs(cls) -> AbstractContextManager[None]:
        """Small calls prune most configs, so few samples suffice."""
        if not current_device().interprets:
            return nullcontext()
        return mock.patch.object(
            cls.op, "_components_for", with_few_samples(cls.op._components_for)
        )

    @classmethod
    def config_space(cls) -> list[Options]:
        """Return the space, on CPU ranks without configs that differ only in more than 2 programs.

        Interpreting programs that have no work takes long.
        """
        most = 2 if current_device().interprets else 1 << 10
        space = [
            {**each, **({"num_ctas": min(each["num_ctas"], most)} if "num_ctas" in each else {})}
            for each in cls.op.config_space
        ]
        return [each for number, each in enumerate(space) if each not in space[:number]]

    @classmethod
    def algorithm(cls, name: str) -> dict[str, Any]:
        """Return options for an algorithm; packets are one of two variants of one shot."""
        if name in ("one_shot", "packets"):
            return {"algorithm": "one_shot", "packets": name == "packets"}
        return {"algorithm": name}

    @classmethod
    def in_sequence(cls, number: int, is_second: bool = False) -> Options:
        return {**super().in_sequence(number), **shape(number + is_second)}

    @staticmethod
    def expected(parts: list[torch.Tensor], rank: int) -> torch.Tensor:
        """Return the exact result for the operands of all ranks, flat."""
        return sum_in_order(parts)

    @property
    def slots(self) -> Any:
        return self.ctx.pushed_shards.slots

    def poison(self) -> None:
        """Fill with bytes that are NaN in every dtype, and packets with unused words."""
        self.ctx.buffer.memory["slots"].local.fill_(0xFF)
        self.ctx.buffer.memory["packets"].local.view(torch.uint8).fill_(NO_TAG)
        if self.epoch_algorithms:
            for slot in range(2):
                self.slots.region_of_slot(slot, "shards").local.fill_(0xFF)

    def arguments(
        self, rows: int, layout: str, options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], torch.Tensor]:
        dtype, rank = options.pop("dtype", self.dtype), self.ctx.rank
        length = rows * len(self.members) if self.name == "reduce_scatter" else rows
        parts = [addend(1000 * self.number + member, length, dtype) for member in self.members]
        around = torch.full((length + 1,), NAN, dtype=dtype, device=parts[0].device)
        x = around[1:] if options.pop("misaligned", False) else around[:length]
        x.copy_(parts[rank])
        if options.pop("in_place", False):
            options["output"] = x
        return (x, self.ctx), self.expected(parts, rank)

    def run(self, op: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        result = op(*args, **options)
        if "output" in options:
            assert result is args[0]
            result = result.clone()
        method = options.get("method")
        asked = options.get("algorithm") or (method.value if method else "")
        may_be_library = not asked and op is self.op and current_device().has_nccl
        if asked == "collective" or may_be_library:
            self.by_library.append(result)
        return result

    def compare(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Compare the bits, except the sums of a library."""
        if any(found is each for each in self.by_library) and self.name != "all_gather":
            assert_allclose(found, expected, rtol=1e-2, atol=5.0)
        else:
            assert_bitwise_equal(found, expected)


class AllReduce(Collective):
    name, op, create = "all_reduce", all_reduce, staticmethod(create_allreduce_ctx)
    names = ("one_shot", "packets", "two_shot", "two_shot_in_packets")


class ReduceScatter(Collective):
    name, op, create = "reduce_scatter", reduce_scatter, staticmethod(create_reduce_scatter_ctx)
    names = ("push", "copy_engine")

    @staticmethod
    def expected(parts: list[torch.Tensor], rank: int) -> torch.Tensor:
        return sum_in_order([part.chunk(len(parts))[rank] for part in parts])


class AllGather(Collective):
    name, op, create = "all_gather", all_gather, staticmethod(create_all_gather_ctx)
    names = ("push", "copy_engine")

    @staticmethod
    def expected(parts: list[torch.Tensor], rank: int) -> torch.Tensor:
        return torch.cat(parts)


COLLECTIVES = {each.name: each for each in (AllReduce, ReduceScatter, AllGather)}
