"""Base of the OpInfos of expert parallelism and of attention over ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Generator

from triton_dist.kernels.common import libraries
from triton_dist.runtime.ranks import group_for
from triton_dist.testing.opinfo.base import Baseline, Group, Operands, OpInfo, S, uniform

META_DEVICE = SimpleNamespace(torch_device=torch.device("meta"))
"""Meta device, for the objects that replace contexts in tests of keys."""


class ExchangeOpInfo(OpInfo[S]):
    """OpInfo of an op whose baseline is one of its own algorithms, which calls a library.

    Attributes:
        create: function that creates the op's context.
        baseline_algorithm: name of the op's algorithm that the baseline runs.
        random_operands: names of the operands to which ``refill`` writes random values.
    """

    serial_name, overlaps = "library", False
    create: ClassVar[Callable[..., Any]]
    baseline_algorithm: ClassVar[str] = "collective"
    random_operands: ClassVar[tuple[str, ...]]

    @abstractmethod
    def context_sizes(self, shape: S, num_ranks: int) -> tuple[int, ...]:
        """Return the sizes that ``create`` takes, for calls of up to ``shape``."""

    def context(self, shape: S, dtype: torch.dtype, group: Any = None, **options: Any) -> Any:
        ranks, create = group_for(group), type(self).create
        sizes = self.context_sizes(shape, ranks.size)
        return create(ranks.rank, ranks.size, ranks.size, *sizes, dtype, group=group, **options)

    def refill(
        self, operands: Operands, num_ranks: int, generator: Generator | None = None
    ) -> None:
        for name in self.random_operands:
            operands[name].copy_(uniform(operands[name].shape, operands[name].dtype, generator))

    def baselines(self, operands: Operands, ctx: Any) -> dict[str, Baseline]:
        args, _ = self.arguments(operands, ctx)
        call = lambda: self.output(self.op.fn(*args, algorithm=self.baseline_algorithm))  # noqa: E731
        return {self.serial_name: self.checked_baseline(call, operands, ctx.group)}


def gathered(shard: torch.Tensor, group: Group) -> torch.Tensor:
    is_alone = group_for(group).size == 1
    return shard if is_alone else libraries.all_gather_rows(shard.contiguous(), group)
