"""Random calls of an overlapped op: what every rank does, on CPUs and on GPUs.

Whatever ranks must do alike (rows, config, order) is drawn from a generator that all seed alike;
what makes them differ (data, and who is late, and by how much) from one of each rank's own.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.compiled_ahead import compile_together
from triton_dist.kernels.common.libraries import LibraryAlgorithm
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for
from triton_dist.testing.assertions import count_mismatches
from triton_dist.testing.opinfo import GEMM_OPINFOS
from triton_dist.testing.opinfo.base import Operands
from triton_dist.testing.opinfo.gemm import GEMMOpInfo, Shape
from triton_dist.utils import init_seed

_CAPTURE_SECONDS = 60.0


@dataclass(frozen=True)
class Load:
    """How much of what."""

    calls: int
    max_rows: int
    """Of a rank, or all where ranks do not share them; so for columns and K."""
    columns: int
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


OPS = GEMM_OPINFOS


class _Stress:
    """What the two kinds of stress share. Collective."""

    def __init__(self, load: Load) -> None:
        rank = dist.get_rank()
        self.load, self.info, self.device = load, OPS[load.op], current_device()
        init_seed(load.seed)  # for its other half: references that accumulate in fp32
        self.shared = random.Random(load.seed)
        self.own = random.Random(1 + 1000 * load.seed + rank)
        self.values = torch.Generator(self.device.torch_device).manual_seed(1 + load.seed + rank)
        self.ctx = self.info.context(self.shape(load.max_rows), load.dtype)
        self.wrong: list[str] = []
        self._pending: list[tuple[str, Operands, torch.Tensor]] = []

    def shape(self, rows: int) -> Shape:
        load = self.load
        return self.info.shape_from_rank(rows, load.columns, load.K, dist.get_world_size())

    def operands(self, rows: int) -> Operands:
        """Those of a call that has ``rows`` rows a rank."""
        size = dist.get_world_size()
        return self.info.operands(self.shape(rows), self.load.dtype, size, self.values)

    def call(self, operands: Operands, **options: Any) -> torch.Tensor:
        args, kwargs = self.info.arguments(operands, self.ctx)
        C: torch.Tensor = self.info.op.fn(*args, **kwargs, **options)
        return C

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

    def check_later(self, what: str, operands: Operands, C: torch.Tensor) -> None:
        self._pending.append((what, operands, C))
        if len(self._pending) == self.load.batch:
            self.check()

    def check(self) -> None:
        """Compare what is pending, with one look at the device for all of it."""
        if not self._pending:
            return
        tolerance = self.info.tolerance(self.load.dtype, dist.get_world_size())
        counts = torch.stack(
            [
                count_mismatches(C, self.info.reference(given), rtol=tolerance, atol=tolerance)
                for _, given, C in self._pending
            ]
        ).tolist()
        self.wrong += [
            f"{what}: {count} of {C.numel()} values"
            for (what, _, C), count in zip(self._pending, counts, strict=True)
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
        operands = stress.operands(rows)
        given = operands | {"A": operands["A"].clone()}
        stress.be_late()
        C = stress.call(given, **config, straggler_option=straggler)
        given["A"].fill_(float("nan"))  # the caller may do so as soon as the call returned
        stress.check_later(f"call {number}, {rows} rows a rank, {config}", operands, C)
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
        stress.info.refill(each.operands, dist.get_world_size(), stress.values)
        kept = each.operands | {"A": each.operands["A"].clone()}
        stress.be_late()
        each.replay()
        each.operands["A"].fill_(float("nan"))
        C = each.latest["C"].clone()
        stress.check_later(f"replay {number}, {each.what}", kept, C)
    return stress.finish()


class _Capture:
    """A captured call, with the operands that it reads and the output that it writes."""

    def __init__(self, stress: _Stress, rows: int, config: dict[str, Any]) -> None:
        self.what, self.operands = f"{rows} rows a rank, {config}", stress.operands(rows)
        self.latest: dict[str, torch.Tensor] = {}
        self.replay: Callable[[], object] = stress.device.capture(
            lambda: self.latest.update(C=stress.call(self.operands, **config)),
            _CAPTURE_SECONDS,
        )


def drawn_configs(stress: _Stress) -> list[dict[str, Any]]:
    """Configs of own algorithms that compile on every rank; every way, then at random."""
    load, info = stress.load, stress.info
    args, kwargs = info.arguments(stress.operands(load.max_rows), stress.ctx)
    left, _ = info.op.config_space.prune(info.op.prune_fn, args, kwargs)
    # Those that use the memory of the context.
    library_runs = {method.value for method in LibraryAlgorithm}
    own = [config for config in left if config["algorithm"] not in library_runs]
    stress.shared.shuffle(own)
    algorithms = {info.algorithm_and_tunables(config): config for config in own}
    ordered = list(dict.fromkeys([*algorithms.values(), *own]))
    drawn: list[dict[str, Any]] = []
    most = max(load.configs, len(algorithms))
    if stress.device.name == "cuda":
        compile_together(
            functools.partial(_compiles, info, args, kwargs, config.arguments())
            for config in ordered[:most]
        )
    for config in ordered:
        if len(drawn) == most:
            break
        compiles = _compiles(info, args, kwargs, config.arguments())
        if all(group_for().all_gather("config compiles", compiles)):
            drawn.append(config.arguments())
    assert drawn, "no config of an own algorithm can be compiled here"
    return drawn


def _compiles(
    info: GEMMOpInfo, args: tuple[Any, ...], kwargs: dict[str, Any], config: dict[str, Any]
) -> bool:
    prepare = info.op._hooks.prepare
    assert prepare is not None
    try:
        prepare(*args, **kwargs, **config)
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
