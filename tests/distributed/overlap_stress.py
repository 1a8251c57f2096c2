"""Random calls of an overlapped op: what every rank does, on CPUs and on GPUs.

Whatever ranks must do alike (rows, config, order) is drawn from a generator that all seed alike;
what makes them differ (data, and who is late, and by how much) from one of each rank's own.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from triton_dist.kernels.nvidia import (
    ag_gemm,
    create_ag_gemm_context,
    create_gemm_ar_context,
    create_gemm_rs_context,
    gemm_ar,
    gemm_rs,
)
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for
from triton_dist.testing.ag_gemm_peers import is_own_algorithm
from triton_dist.testing.assertions import count_mismatches
from triton_dist.testing.gemm_ar_peers import summed_product
from triton_dist.testing.gemm_rs_peers import summed_rows
from triton_dist.testing.reference import all_gather_matmul
from triton_dist.utils import init_seed

_CAPTURE_SECONDS = 60.0


@dataclass(frozen=True)
class StressedOp:
    """What differs between ops."""

    tuned: Any
    context: Callable[[Load], Any]
    rows_of_a: Callable[[int], int]
    """Rows of A from those that a rank has of what is sharded by rows."""
    expected: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    is_own: Callable[[Any], bool]
    way: Callable[[Any], Any]
    """How a config transfers: each way is among those that are drawn."""
    tolerance: dict[torch.dtype, float]


@dataclass(frozen=True)
class Load:
    """How much of what."""

    calls: int
    max_rows: int
    """Of a rank."""
    columns: int
    """Of a rank."""
    K: int
    dtype: torch.dtype
    configs: int
    """How many of the op's own, drawn at random, with every method among them."""
    batch: int = 10
    """Calls that follow one another with nothing in between; then all are checked."""
    late: float = 0.2
    """Share of the calls before, or in, which a rank is late."""
    most_cycles: int = 4_000_000
    """By how much at most: 2 ms on a GPU."""
    seed: int = 0
    op: str = "ag_gemm"


def _ag_gemm_context(load: Load) -> Any:
    """``columns`` are those of a rank, as K is everybody's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows, N = load.max_rows * size, load.columns * size
    return create_ag_gemm_context(rows, N, load.K, load.dtype, rank, size)


def _gemm_rs_context(load: Load) -> Any:
    """``columns`` are all, and K is that of a rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return create_gemm_rs_context(load.max_rows * size, load.columns, rank, size, size, load.dtype)


def _gemm_ar_context(load: Load) -> Any:
    """The same; ``max_rows`` are all."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return create_gemm_ar_context(load.max_rows, load.columns, rank, size, size, load.dtype)


OPS = {
    "ag_gemm": StressedOp(
        ag_gemm,
        _ag_gemm_context,
        lambda rows: rows,
        all_gather_matmul,
        is_own_algorithm,
        lambda config: config["way"],
        {torch.float16: 4e-3, torch.bfloat16: 2e-2},
    ),
    "gemm_rs": StressedOp(
        gemm_rs,
        _gemm_rs_context,
        lambda rows: rows * dist.get_world_size(),
        summed_rows,
        is_own_algorithm,
        lambda config: (config["way"], config.get("num_chunks")),
        {torch.float16: 1e-2, torch.bfloat16: 6e-2},
    ),
    "gemm_ar": StressedOp(
        gemm_ar,
        _gemm_ar_context,
        lambda rows: rows,
        summed_product,
        lambda config: config["way"] != "collective",
        lambda config: (config["way"], config.get("num_chunks")),
        {torch.float16: 1e-2, torch.bfloat16: 6e-2},
    ),
}


class _Stress:
    """What the two kinds of stress share. Collective."""

    def __init__(self, load: Load) -> None:
        rank = dist.get_rank()
        self.load, self.op, self.device = load, OPS[load.op], current_device()
        init_seed(load.seed)  # for its other half: references that accumulate in fp32
        self.shared = random.Random(load.seed)
        self.own = random.Random(1 + 1000 * load.seed + rank)
        self.values = torch.Generator(self.device.torch_device).manual_seed(1 + load.seed + rank)
        self.ctx = self.op.context(load)
        self.wrong: list[str] = []
        self._pending: list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def uniform(self, rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.rand(rows, columns, generator=self.values, device=self.device.torch_device)
        return ((values * 2 - 1) * scale).to(self.load.dtype)

    def operands(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B of a call that has ``rows`` rows a rank."""
        return self.a_of(rows), self.uniform(self.load.columns, self.load.K).T

    def a_of(self, rows: int) -> torch.Tensor:
        return self.uniform(self.op.rows_of_a(rows), self.load.K, 0.1)

    def be_late(self) -> None:
        """Now and then, on the stream or on the host; each rank when it likes."""
        if self.own.random() < self.load.late:
            self.device.sleep(self.own.randrange(self.load.most_cycles))
        if self.own.random() < self.load.late / 4:
            time.sleep(self.own.random() * 2e-3)

    def straggler(self) -> tuple[int, int] | None:
        """Rank and cycles of who is late in a call, after its copies are queued; alike on all."""
        if self.shared.random() >= self.load.late:
            return None
        rank = self.shared.randrange(dist.get_world_size())
        return rank, self.shared.randrange(self.load.most_cycles)

    def check_later(self, what: str, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor) -> None:
        self._pending.append((what, A, B, C))
        if len(self._pending) == self.load.batch:
            self.check()

    def check(self) -> None:
        """Compare what is pending, with one look at the device for all of it."""
        if not self._pending:
            return
        tolerance = self.op.tolerance[self.load.dtype]
        counts = torch.stack(
            [
                count_mismatches(C, self.op.expected(A, B), rtol=tolerance, atol=tolerance)
                for _, A, B, C in self._pending
            ]
        ).tolist()
        self.wrong += [
            f"{what}: {count} of {C.numel()} values"
            for (what, _, _, C), count in zip(self._pending, counts, strict=True)
            if count
        ]
        self._pending.clear()

    def finish(self) -> tuple[int, list[str]]:
        """Calls, and those that were wrong."""
        self.check()
        self.ctx.finalize()
        return self.load.calls, self.wrong


def random_calls(load: Load) -> tuple[int, list[str]]:
    """Calls with random rows, configs and stragglers, with fresh data each."""
    stress = _Stress(load)
    configs = drawn_configs(stress)
    for number in range(load.calls):
        rows = stress.shared.randint(1, load.max_rows)
        config = stress.shared.choice(configs)
        straggler = stress.straggler()
        A, B = stress.operands(rows)
        given = A.clone()
        stress.be_late()
        C = stress.op.tuned.fn(given, B, stress.ctx, **config, straggler_option=straggler)
        given.fill_(float("nan"))  # the caller may do so as soon as the call returned
        stress.check_later(f"call {number}, {rows} rows a rank, {config}", A, B, C)
    return stress.finish()


def random_replays(load: Load, graphs: int) -> tuple[int, list[str]]:
    """The same by replays, in random order, of calls captured in CUDA graphs.

    CPU ranks capture nothing: they call.
    """
    stress = _Stress(load)
    configs = drawn_configs(stress)
    captures = [
        _Capture(stress, stress.shared.randint(1, load.max_rows), configs[number % len(configs)])
        for number in range(graphs)
    ]
    for number in range(load.calls):
        each = stress.shared.choice(captures)
        A = stress.a_of(each.rows)
        each.A.copy_(A)
        stress.be_late()
        each.replay()
        each.A.fill_(float("nan"))
        C = each.latest["C"].clone()
        stress.check_later(f"replay {number}, {each.what}", A, each.B, C)
    return stress.finish()


class _Capture:
    """A captured call, with the operands that it reads and the output that it writes."""

    def __init__(self, stress: _Stress, rows: int, config: dict[str, Any]) -> None:
        self.what, self.rows = f"{rows} rows a rank, {config}", rows
        self.A, self.B = stress.operands(rows)
        self.latest: dict[str, torch.Tensor] = {}
        self.replay: Callable[[], object] = stress.device.capture(
            lambda: self.latest.update(C=stress.op.tuned.fn(self.A, self.B, stress.ctx, **config)),
            _CAPTURE_SECONDS,
        )


def drawn_configs(stress: _Stress) -> list[dict[str, Any]]:
    """Configs of own algorithms that compile on every rank; every way, then at random."""
    load, ctx, op = stress.load, stress.ctx, stress.op
    A, B = stress.operands(load.max_rows)
    own = [
        config
        for config in op.tuned.config_space
        if op.is_own(config) and op.tuned.prune_fn(config, A, B, ctx)
    ]
    stress.shared.shuffle(own)
    ways = {op.way(config): config for config in own}
    ordered = list(dict.fromkeys([*ways.values(), *own]))
    drawn: list[dict[str, Any]] = []
    for config in ordered:
        if len(drawn) == max(load.configs, len(ways)):
            break
        if all(group_for().gather("config compiles", _compiles(op, A, B, ctx, config.arguments()))):
            drawn.append(config.arguments())
    assert drawn, "no config of an own algorithm can be compiled here"
    return drawn


def _compiles(
    op: StressedOp, A: torch.Tensor, B: torch.Tensor, ctx: Any, arguments: dict[str, Any]
) -> bool:
    try:
        op.tuned._hooks.prepare(A, B, ctx, **arguments)
    except Exception:  # too much shared memory, say: the tuner would leave it out, too
        return False
    return True


def summarise(results: Sequence[tuple[int, list[str]]], calls: int) -> str:
    """Empty if every rank made so many calls and none was wrong; else what was."""
    lines = [
        f"rank {rank}: {count} calls, {len(wrong)} wrong: {'; '.join(wrong[:3])}"
        for rank, (count, wrong) in enumerate(results)
        if count != calls or wrong
    ]
    return "\n".join(lines)
