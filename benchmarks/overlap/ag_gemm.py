"""AllGather-GEMM in the harness."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from triton_dist.kernels.nvidia import (
    AllGatherGEMMTensorParallelContext,
    ag_gemm,
    create_ag_gemm_context,
)
from triton_dist.runtime.device import current_device
from triton_dist.testing.ag_gemm_peers import SERIAL, ag_gemm_peers, is_own_algorithm
from triton_dist.testing.overlap import Candidate
from triton_dist.testing.reference import all_gather_matmul
from triton_dist.utils import rand_tensor

from .shapes import Shape
from .workload import TUNED, TUNED_AGAIN, Choice, Workload

_SCALE = 0.1
"""Of A's values: products of up to 16384 terms stay small numbers in every dtype."""


@contextmanager
def open_ag_gemm(shape: Shape, dtype: torch.dtype, choice: Choice) -> Iterator[Workload]:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    with create_ag_gemm_context(shape.M, shape.N, shape.K, dtype, rank, num_ranks) as ctx:
        yield AllGatherGEMM(shape, dtype, choice, ctx)


class AllGatherGEMM:
    """A: U(-0.1, 0.1) [M / W, K]; B: U(-1, 1) [K, N / W], column-major."""

    serial = SERIAL

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        choice: Choice,
        ctx: AllGatherGEMMTensorParallelContext,
    ) -> None:
        device = current_device().torch_device
        self._A = torch.empty(shape.M // ctx.num_ranks, shape.K, dtype=dtype, device=device)
        self._B = rand_tensor([shape.N // ctx.num_ranks, shape.K], dtype, device).T
        self._ctx, self._choice = ctx, choice
        self.refresh()
        before = ag_gemm.tuning_count
        self._record = ag_gemm.tune(self._A, self._B, ctx)
        self._winner = ag_gemm.best_config(self._A, self._B, ctx)
        tuned_now = ag_gemm.tuning_count > before
        self.note = f"tuned now, {self._record.seconds:.1f} s" if tuned_now else "from the cache"

    def candidates(self) -> Mapping[str, Candidate]:
        winner = self._candidate(self._winner)
        others = {
            f"{'own' if is_own_algorithm(config) else 'vendor'} {number}": self._candidate(config)
            for number, config in enumerate(self._others(), start=1)
        }
        peers = ag_gemm_peers(self._A, self._B, self._ctx)
        return {**peers, TUNED: winner, **others, TUNED_AGAIN: winner}

    def refresh(self) -> None:
        self._A.copy_(rand_tensor(self._A.shape, self._A.dtype, self._A.device) * _SCALE)

    def recover(self) -> None:
        self._ctx.buffer.reset()

    def _candidate(self, config: Mapping[str, Any]) -> Candidate:
        A, B, ctx, arguments = self._A, self._B, self._ctx, dict(config)
        return Candidate(
            "own" if is_own_algorithm(config) else "vendor",
            lambda: ag_gemm.fn(A, B, ctx, **arguments),
            lambda: all_gather_matmul(A, B),
            str(config),
        )

    def _others(self) -> list[Any]:
        """Configs beside the winner, best first by the record: all, or the best few and in any case
        the best of an own algorithm."""
        space, record = ag_gemm.config_space, self._record
        measured = [trial for trial in record.trials if hasattr(trial.outcome, "median")]
        measured.sort(key=lambda trial: trial.outcome.median)
        found = (space.find(trial.digest) for trial in measured)
        ranked = [each for each in found if each is not None and each != self._winner]
        if self._choice.every:
            return ranked
        few = ranked[: self._choice.best]
        if not any(map(is_own_algorithm, [self._winner, *few])):
            few += [each for each in ranked if is_own_algorithm(each)][:1]
        return few
