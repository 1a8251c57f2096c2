"""AllGather-GEMM calls with fresh data, checked after the last: the same on CPU ranks and on GPUs.

Every operand is a function of the rank and of the call, so a rank knows what to expect by itself:
no collective of a check lines the ranks up, and calls follow one another as in production.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import triton

from tests.distributed.compiled_ahead import is_rehearsal, note
from triton_dist.kernels.common.slots.epochs import SLOTS
from triton_dist.kernels.nvidia import ag_gemm, create_ag_gemm_context
from triton_dist.kernels.nvidia.gemm import get_config_space, prune_fn_by_shared_memory
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for
from triton_dist.testing import assert_allclose
from triton_dist.testing.opinfo.base import tolerance

NAN = float("nan")


def default_tiles(dtype: torch.dtype = torch.float16) -> triton.Config:
    """The first tiles whose stages fit the device's shared memory in ``dtype``."""
    matrix = torch.empty(1, 1, dtype=dtype, device="meta")
    return next(
        config
        for config in get_config_space(persistent=True) + get_config_space(persistent=False)
        if prune_fn_by_shared_memory({"config": config}, matrix)
    )


@contextmanager
def some_configs(op: Any) -> Iterator[None]:
    """Tune ``op`` over one config of each algorithm on CPU ranks, or two if it has one algorithm.

    Interpreting a config takes long. Tuning works alike for any number of configs, and other tests
    call each config on its own.
    """
    if not current_device().interprets:
        yield
        return
    by_algorithm: dict[str, list[Any]] = {}
    for config in op.config_space:
        by_algorithm.setdefault(config["algorithm"], []).append(config)
    of_each = 1 if len(by_algorithm) > 1 else 2
    few = [config for configs in by_algorithm.values() for config in configs[:of_each]]
    with mock.patch.object(op, "config_space", type(op.config_space)(few)):
        yield


def uniform(seed: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    values = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return values.to(dtype).to(current_device().torch_device)


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=current_device().torch_device)


def _inside(matrix: torch.Tensor, margin: int, step: int = 1) -> torch.Tensor:
    """``matrix`` as a part of a larger one that is NaN everywhere else."""
    rows, columns = (size * step + 2 * margin for size in matrix.shape)
    around = torch.full((rows, columns), NAN, dtype=matrix.dtype, device=matrix.device)
    part = around[
        margin : margin + matrix.shape[0] * step : step,
        margin : margin + matrix.shape[1] * step : step,
    ]
    return part.copy_(matrix)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "row-major": lambda b: b,
    "column-major": lambda b: b.T.contiguous().T,
    "slice of row-major": lambda b: _inside(b, 16),
    "slice of column-major": lambda b: _inside(b.T, 16).T,
    "misaligned slice": lambda b: _inside(b, 3),
    "every second": lambda b: _inside(b, 2, step=2),
}


class Calls:
    """Calls in one context over ``group`` (default: the world). Collective.

    What peers write to, and the workspace, hold NaN before the first call and are never lined up
    after it. A and the own rows of the workspace become NaN as soon as a call returned.
    """

    def __init__(
        self,
        max_rows: int,
        columns: int,
        K: int,
        dtype: torch.dtype = torch.float16,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        ranks = group_for(group)
        self.members = (
            dist.get_process_group_ranks(group or dist.group.WORLD)
            if dist.is_initialized()
            else [0]
        )
        self.dtype, self.columns, self.K = dtype, columns, K
        self.ctx = create_ag_gemm_context(
            max_rows * ranks.size, columns * ranks.size, K, dtype, ranks.rank, ranks.size,
            group=group,
        )  # fmt: skip
        for slot in range(SLOTS):
            self.ctx.buffer.slots.of_slot(slot, "shards").local.fill_(NAN)
        self.ctx.symm_workspace.fill_(NAN)
        current_device().synchronize()
        ranks.barrier("memory is poisoned")
        self._number = 0
        self._results: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self._gathered: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def __call__(
        self,
        rows: int,
        layout: str = "row-major",
        op: Callable[..., torch.Tensor] = ag_gemm.fn,
        **options: Any,
    ) -> None:
        """One call with ``rows`` rows a rank; ``op`` is ``ag_gemm`` or its function."""
        self._number += 1
        if op is ag_gemm.fn:
            options.setdefault("gemm_config", default_tiles(self.dtype))
        if is_rehearsal():
            self._note(rows, layout, options)
            return
        shards = [
            uniform(1000 * self._number + member, (rows, self.K), self.dtype)
            for member in self.members
        ]
        A = shards[self.ctx.rank].clone()
        own_seed = 1000 * self._number + 500 + self.members[self.ctx.rank]
        B = LAYOUTS[layout](uniform(own_seed, (self.K, self.columns), self.dtype))
        expected = (torch.cat(shards).double() @ B.double()).to(self.dtype)
        self.ctx.symm_workspace.fill_(NAN)
        if options.get("local_copy") is False:
            self.ctx.own_rows(rows).copy_(A)
            A.fill_(NAN)
        what = f"call {self._number}: {rows} rows a rank, B {layout}, {options}"
        if self._number % 2:  # every other call is asked for the gathered rows too
            options["gathered"] = torch.full_like(torch.cat(shards), NAN)
        C = op(A, B, self.ctx, **options)
        A.fill_(NAN)
        self.ctx.symm_workspace.fill_(NAN)
        if options.get("gathered") is not None:
            self._gathered.append((what, options["gathered"], torch.cat(shards)))
        self._results.append((what, C, expected))

    def _note(self, rows: int, layout: str, options: dict[str, Any]) -> None:
        A, B = empty((rows, self.K), self.dtype), empty((self.K, self.columns), self.dtype)
        note(lambda: ag_gemm._hooks.prepare(A, LAYOUTS[layout](B), self.ctx, **options))

    def skip(self) -> None:
        """Leave out the call that other ranks make now."""
        self._number += 1

    def check(self) -> int:
        """Compare all results; returns how many there were."""
        current_device().synchronize()
        limit = tolerance(self.dtype)
        for what, C, expected in self._results:
            try:
                assert_allclose(C, expected, rtol=limit, atol=limit)
            except AssertionError as error:
                raise AssertionError(f"{what}: {error}") from None
        for what, rows, shards in self._gathered:
            assert torch.equal(rows, shards), f"{what}: gathered rows"
        return len(self._results)

    def finish(self) -> int:
        """Check, and free the context."""
        count = self.check()
        self.ctx.finalize()
        return count
