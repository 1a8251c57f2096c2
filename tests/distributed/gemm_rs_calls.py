"""GEMM-ReduceScatter calls with fresh data, checked after the last: the same on CPU ranks and on
GPUs; and what calls of GEMM-AllReduce share with them.

Every operand is a function of the rank and of the call, so a rank knows what to expect by itself:
no collective of a check lines the ranks up, and calls follow one another as in production.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.ag_gemm_calls import LAYOUTS, NAN, default_tiles, uniform
from triton_dist.kernels.nvidia import create_gemm_rs_context, gemm_rs
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for
from triton_dist.testing import assert_allclose

# Parts that are rounded to the dtype once each, and their sum once more.
TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 6e-2, torch.float32: 1e-4}


class SummedCalls:
    """Calls in one context over ``group`` (default: the world) of an op that sums products over
    ranks. Collective.

    Parts that peers write hold NaN before the first call and are never lined up after it. A becomes
    NaN as soon as a call returned.
    """

    op: Any
    poisoned: tuple[str, ...]
    """Regions of a slot."""

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
        self.ctx = self.create(
            self.rows_of_a(max_rows), columns, ranks.rank, ranks.size, ranks.size, dtype,
            tp_group=group, **options,
        )  # fmt: skip
        for region in self.poisoned:
            for slot in range(2):
                self.ctx.buffer.slots.of_slot(slot, region).local.fill_(NAN)
        current_device().synchronize()
        ranks.barrier("memory is poisoned")
        self.results: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self._number = 0

    def create(self, *args: Any, **options: Any) -> Any:
        """The context."""
        raise NotImplementedError

    def rows_of_a(self, rows: int) -> int:
        """Rows of A in a call with ``rows``."""
        raise NotImplementedError

    def own_rows(self, rows: int) -> slice:
        """Rows of the sum that this rank gets."""
        raise NotImplementedError

    def bias_seed(self) -> int:
        raise NotImplementedError

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
        M = self.rows_of_a(rows)
        seed = 1000 * self._number
        operands = [
            (
                uniform(seed + member, (M, self.K), self.dtype),
                uniform(seed + 500 + member, (self.K, self.columns), self.dtype),
            )
            for member in self.members
        ]
        mine = self.own_rows(rows)
        total = sum(a.double()[mine] @ b.double() for a, b in operands)
        A, B = operands[self.ctx.rank]
        if has_bias:
            bias = uniform(seed + 900 + self.bias_seed(), (1, self.columns), self.dtype)[0]
            total = total + bias.double()
            options["bias"] = bias
        A = LAYOUTS[a_layout](A.clone())
        C = op(A, LAYOUTS[layout](B), self.ctx, **options)
        A.fill_(NAN)
        shown = {name: value for name, value in options.items() if name != "bias"}
        what = f"call {self._number}: {rows} rows, A {a_layout}, B {layout}, {shown}"
        self.results.append((what, C, total.to(self.dtype)))

    def skip(self) -> None:
        """Leave out the call that other ranks make now."""
        self._number += 1

    def check(self) -> int:
        """Compare all results; returns how many there were."""
        current_device().synchronize()
        tolerance = TOLERANCE[self.dtype]
        # Of parts that cancel, the rounding of the parts is left: they grow with the root of K.
        absolute = tolerance * max(1.0, (self.K / 72) ** 0.5)
        for what, C, expected in self.results:
            try:
                assert_allclose(C, expected, rtol=tolerance, atol=absolute)
            except AssertionError as error:
                raise AssertionError(f"{what}: {error}") from None
        return len(self.results)

    def finish(self) -> int:
        """Check, and free the context."""
        count = self.check()
        self.ctx.finalize()
        return count


class Calls(SummedCalls):
    """Of GEMM-ReduceScatter; ``rows`` are those of a rank."""

    op, poisoned = gemm_rs, ("partials",)

    def create(self, *args: Any, **options: Any) -> Any:
        return create_gemm_rs_context(*args, **options)

    def rows_of_a(self, rows: int) -> int:
        return rows * len(self.members)

    def own_rows(self, rows: int) -> slice:
        return slice(self.ctx.rank * rows, (self.ctx.rank + 1) * rows)

    def bias_seed(self) -> int:
        return int(self.ctx.rank)
