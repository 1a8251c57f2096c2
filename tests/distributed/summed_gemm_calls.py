"""Calls with fresh data of ops that sum products over ranks, checked after the last, and what tests
have to know of such an op: the same on CPU ranks and on GPUs.

Every operand is a function of the rank and of the call, so a rank knows what to expect by itself:
no collective of a check lines the ranks up, and calls follow one another as in production.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from tests.distributed.ag_gemm_calls import LAYOUTS, NAN, default_tiles, empty, uniform
from tests.distributed.compiled_ahead import is_rehearsal, note
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for
from triton_dist.testing import assert_allclose
from triton_dist.testing.opinfo.base import tolerance

Algorithm: TypeAlias = dict[str, Any]
"""Keyword arguments that say how the product of a call is summed."""


class SummedCalls(ABC):
    """Calls in one context over ``group`` (default: the world) of an op that sums products over
    ranks. Collective.

    Parts that peers write hold NaN before the first call and are never lined up after it. A becomes
    NaN as soon as a call returned.
    """

    name: str
    op: Any
    """The tuned op."""
    create: Callable[..., Any]
    """Creates a context."""
    config_space: Callable[[], Sequence[Any]]
    poisoned: tuple[str, ...]
    """Regions of a slot that hold NaN at first."""
    flags: tuple[str, ...]
    """Regions of a slot that count epochs."""

    options: Mapping[str, Any] = MappingProxyType({})
    """Of a context that serves all ``algorithms``."""
    algorithms: Sequence[Algorithm]
    tiled: Sequence[Algorithm]
    """Those that give the same bits, in any context."""
    row_blocks: Algorithm
    """That of row blocks, which travel in chunks."""
    epoch_algorithms: Sequence[Algorithm]
    """Those that count epochs."""
    layout_algorithms: Sequence[Algorithm]
    """For layouts of B."""
    in_turn: Sequence[Algorithm]
    """After each other without a look at the peers, except where ``looks`` says."""
    in_trials: Sequence[Algorithm]
    """Then while waits are bounded; the last of them twice after that."""
    looks: Sequence[int]
    """How often calls so made looked at their peers."""
    overdue: Sequence[str]
    """What gives up in each way with both kernels, where no peer comes."""

    fewest_configs: int
    """That a tuning on GPUs tries."""
    every_rows: Sequence[int]
    """For calls of every way; the first is the most."""
    many: int
    """Rows that clip a tile."""
    few: int
    operand_algorithms: Sequence[tuple[int, Sequence[Algorithm]]]
    """Rows of each shape, and ways for layouts of A."""
    chunked_rows: Sequence[int]
    tuned_calls: Sequence[Mapping[str, Any]]
    """Each is a tuning of its own."""

    @staticmethod
    @abstractmethod
    def rows_of_a(rows: int, num_ranks: int) -> int:
        """Rows of A in a call with ``rows``."""

    @staticmethod
    @abstractmethod
    def own_rows(rows: int, rank: int) -> slice:
        """Rows of the sum that a rank gets."""

    @staticmethod
    @abstractmethod
    def bias_seed(rank: int) -> int:
        """The same for ranks that have the same bias."""

    @staticmethod
    @abstractmethod
    def multiplies_by_torch(algorithm: Algorithm) -> bool:
        """Whether the product is torch.matmul's."""

    @staticmethod
    @abstractmethod
    def full_rows(algorithm: Algorithm) -> int:
        """Rows that keep a whole GPU busy."""

    def __init__(
        self,
        max_rows: int,
        columns: int,
        K: int,
        dtype: torch.dtype = torch.float16,
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        ranks = group_for(group)
        self.members = (
            dist.get_process_group_ranks(group or dist.group.WORLD)
            if dist.is_initialized()
            else [0]
        )
        self.dtype, self.columns, self.K = dtype, columns, K
        max_M = self.rows_of_a(max_rows, ranks.size)
        self.ctx = self.create(
            max_M, columns, ranks.rank, ranks.size, ranks.size, dtype, tp_group=group, **options
        )
        for region in self.poisoned:
            for slot in range(2):
                self.ctx.buffer.slots.of_slot(slot, region).local.fill_(NAN)
        current_device().synchronize()
        ranks.barrier("memory is poisoned")
        self.results: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self._number = 0

    def __call__(
        self,
        rows: int,
        layout: str = "row-major",
        a_layout: str = "row-major",
        op: Callable[..., torch.Tensor] | None = None,
        has_bias: bool = False,
        **options: Any,
    ) -> None:
        """One call with ``rows`` rows; ``op`` is the tuned op or, by default, its function."""
        self._number += 1
        if op is None:
            op = self.op.fn
            options.setdefault("gemm_config", default_tiles(self.dtype))
        M = self.rows_of_a(rows, len(self.members))
        if is_rehearsal():
            self._note(M, layout, a_layout, has_bias, options)
            return
        seed = 1000 * self._number
        operands = [
            (
                uniform(seed + member, (M, self.K), self.dtype),
                uniform(seed + 500 + member, (self.K, self.columns), self.dtype),
            )
            for member in self.members
        ]
        mine = self.own_rows(rows, self.ctx.rank)
        total = sum(a.double()[mine] @ b.double() for a, b in operands)
        A, B = operands[self.ctx.rank]
        if has_bias:
            bias_seed = seed + 900 + self.bias_seed(self.ctx.rank)
            bias = uniform(bias_seed, (1, self.columns), self.dtype)[0]
            total = total + bias.double()
            options["bias"] = bias
        A = LAYOUTS[a_layout](A.clone())
        C = op(A, LAYOUTS[layout](B), self.ctx, **options)
        A.fill_(NAN)
        shown = {name: value for name, value in options.items() if name != "bias"}
        what = f"call {self._number}: {rows} rows, A {a_layout}, B {layout}, {shown}"
        self.results.append((what, C, total.to(self.dtype)))

    def _note(
        self, M: int, layout: str, a_layout: str, has_bias: bool, options: dict[str, Any]
    ) -> None:
        A, B = empty((M, self.K), self.dtype), empty((self.K, self.columns), self.dtype)
        if has_bias:
            options["bias"] = empty((self.columns,), self.dtype)
        prepare = self.op._hooks.prepare
        note(lambda: prepare(LAYOUTS[a_layout](A), LAYOUTS[layout](B), self.ctx, **options))

    def skip(self) -> None:
        """Leave out the call that other ranks make now."""
        self._number += 1

    def reset(self) -> None:
        """Bring the flags of all ranks back to one state. Collective."""
        self.ctx.reset()

    def check(self) -> int:
        """Compare all results; returns how many there were."""
        current_device().synchronize()
        relative = tolerance(self.dtype, len(self.members))
        # Standard deviation of a sum of products of U(-1, 1), each of which has one of 1 / 3.
        absolute = relative * max(1.0, (self.K * len(self.members)) ** 0.5 / 3)
        for what, C, expected in self.results:
            try:
                assert_allclose(C, expected, rtol=relative, atol=absolute)
            except AssertionError as error:
                raise AssertionError(f"{what}: {error}") from None
        return len(self.results)

    def finish(self) -> int:
        """Check, and free the context."""
        count = self.check()
        self.ctx.finalize()
        return count
