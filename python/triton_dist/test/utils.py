"""Common parts of the test scripts: shapes, assertions, command lines, checks, tables of times."""

from __future__ import annotations

import argparse
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from triton_dist import knobs
from triton_dist.profiler_utils import group_profile
from triton_dist.runtime.device import current_device
from triton_dist.runtime.distributed import finalize_distributed, initialize_distributed
from triton_dist.runtime.random import init_seed
from triton_dist.testing.assertions import assert_allclose, assert_bitwise_equal, bitwise_equal
from triton_dist.testing.opinfo.base import RECIPES, Baseline, Call, Operands, OpInfo
from triton_dist.testing.overlap import overlap_limit_ms
from triton_dist.testing.timing import Samples, capture_graph, time_interleaved
from triton_dist.tune import AutoTuner
from triton_dist.utils import dist_print, is_cuda

__all__ = [
    "LAYER_CONFIGS",
    "assert_allclose",
    "assert_bitwise_equal",
    "bitwise_equal",
    "dtype_named",
]

# Global N and K of the first GEMM of a feed-forward layer.
LAYER_CONFIGS = {
    "LLaMA-7B": {"N": 11008, "K": 4096},
    "LLaMA-3.1-8B": {"N": 14336, "K": 4096},
    "LLaMA-3.1-70B": {"N": 28672, "K": 8192},
    "LLaMA-3.1-405B": {"N": 53248, "K": 16384},
    "Mistral-7B": {"N": 14336, "K": 4096},
    "Qwen2-72B": {"N": 29568, "K": 8192},
    "GPT-3-175B": {"N": 49152, "K": 12288},
}


def dtype_named(name: str) -> torch.dtype:
    """Return the torch dtype called ``name``; for an fp8 recipe, the dtype of results, bf16."""
    dtype = torch.bfloat16 if name in RECIPES else getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


@contextmanager
def initialized_ranks(seed: int) -> Iterator[None]:
    """Context manager for the body of a script: initialise the ranks, each with its own seed."""
    initialize_distributed(seed)
    init_seed(seed + dist.get_rank())
    yield
    finalize_distributed()


DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Short names of dtypes, and torch's names."""
_SECONDS_BEFORE_EXIT = 60.0
"""Seconds of a sleep. The launcher ends this process earlier, when rank 0 has exited."""


def at_least(minimum: int) -> Callable[[str], int]:
    """Return an argparse type that accepts integers of at least ``minimum``."""

    def number(word: str) -> int:
        value = int(word) if word.isdecimal() else -1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{word!r}: expected an integer, {minimum} or more")
        return value

    return number


_COMMON_OPTIONS: dict[str, dict[str, Any]] = {
    "autotune": {"action": argparse.BooleanOptionalAction, "default": True},
    "persistent": {
        "action": argparse.BooleanOptionalAction,
        "help": "use the persistent GEMM kernel, or do not; default: tuned",
    },
    "profile": {"action": "store_true", "help": "write a trace of 20 calls to prof/"},
    "seed": {"type": int, "default": 42, "help": "seed of the data"},
    "trans_b": {
        "action": argparse.BooleanOptionalAction, "default": True, "help": "make B column-major"
    },
}  # fmt: skip


class ScriptParser(argparse.ArgumentParser):
    """An argument parser for all ranks that prints messages only on rank 0.

    Args:
        default: default of ``--case``; ``None``: run all cases in sequence.
        check_alias: option that means ``--case check``; empty: none.
    """

    def __init__(
        self,
        description: str | None,
        cases: Iterable[str] = ("check", "perf"),
        default: str | None = "perf",
        check_alias: str = "--check",
    ) -> None:
        super().__init__(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        default_text = "all" if default is None else default
        self.add_argument(
            "--case",
            choices=list(cases),
            default=default,
            help=f"case to run; default: {default_text}",
        )
        if check_alias:
            self.add_argument(
                check_alias, action="store_const", dest="case", const="check",
                default=argparse.SUPPRESS, help="same as --case check",
            )  # fmt: skip

    def add_common_options(self, *names: str) -> None:
        """Add the options ``names``, which several scripts have."""
        for name in names:
            self.add_argument(f"--{name}", **_COMMON_OPTIONS[name])

    def add_dtype(self, default: str, has_fp8: bool = False) -> None:
        """Add ``--dtype``, which accepts torch's names and short names, and ``RECIPES``."""
        self.add_argument(
            "--dtype", default=default, choices=[*DTYPES.values(), *(RECIPES if has_fp8 else ())],
            type=lambda name: DTYPES.get(name, name), help="short names such as bf16 work too",
        )  # fmt: skip

    def add_rounds(self, iters: int, warmup: int, minimum: int = 1) -> None:
        """Add ``--iters`` (``minimum`` or more) and ``--warmup`` (or ``--warmup_iters``)."""
        self.add_argument(
            "--iters", type=at_least(minimum), default=iters, help="number of measured rounds"
        )
        self.add_argument(
            "--warmup",
            "--warmup_iters",
            type=at_least(0),
            default=warmup,
            help="number of rounds before the measured rounds",
        )

    def _print_message(self, message: str, file: Any = None) -> None:
        if knobs.rank.get() == 0:
            super()._print_message(message, file)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Exit; after an error, other ranks wait so that rank 0 can print the message."""
        if status and knobs.rank.get() > 0:
            time.sleep(_SECONDS_BEFORE_EXIT)
        super().exit(status, message)


TIMES_NOT_MEANINGFUL = "interpreted: times are not meaningful; they only show that everything runs"
"""Text printed with times on CPU ranks instead of rates and ratios."""


def check_rank_by_rank(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Compare ``actual`` with ``expected``, one rank after the other. Collective.

    The errors of several ranks are then not mixed.
    """
    for rank in range(dist.get_world_size()):
        dist.barrier()
        if rank == dist.get_rank():
            assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def profile(name: str, enabled: bool, *calls: Callable[[], object]) -> None:
    """Write a trace of 20 runs of each call to prof/ if ``enabled``. Collective."""
    with group_profile(name, enabled):
        for call in calls:
            for _ in range(20 if enabled else 0):
                call()


class Script(ABC):
    """An op with the options of the command line.

    Args:
        info: OpInfo of the op.
        args: the command line.
        ctx: context of the op.
        options: arguments of each call in addition to the operands.
        fixed: tunables that the command line sets, which are then not tuned.
    """

    def __init__(
        self,
        info: OpInfo[Any],
        args: argparse.Namespace,
        ctx: Any,
        options: Mapping[str, Any] | None = None,
        fixed: Mapping[str, Any] | None = None,
    ) -> None:
        self.op, self.info, self.args, self.ctx = info.op, info, args, ctx
        self.options, self.fixed = dict(options or {}), dict(fixed or {})
        self.dtype, self.num_ranks = dtype_named(args.dtype), dist.get_world_size()
        self._num_tunings_before = self.op.num_tunings

    def operands(self, shape: Any, **layout: Any) -> Operands:
        """Return random operands of the dtype of the command line. Collective."""
        return self.info.operands(shape, self.dtype, self.num_ranks, **layout)

    def arguments(self, data: Operands) -> Call:
        """Return the arguments of a call, without tunables."""
        operands, options = self.info.arguments(data, self.ctx)
        return operands, {**options, **self.options}

    @abstractmethod
    def run(self, data: Operands) -> torch.Tensor:
        """Call the op with the options of the command line."""

    def check(self, data: Operands, *results: torch.Tensor) -> None:
        """Compare ``results``, by default the result of a call, with the reference. Collective."""
        results = results or (self.run(data),)
        expected = self.info.reference(data)
        for C in results:
            check_rank_by_rank(C, expected, self.info.tolerance(C.dtype, self.num_ranks))

    def report_tuning(self, data: Operands) -> None:
        """Print the config in use and its origin, unless the command line sets tunables."""
        if not self.fixed or not self.args.autotune:
            operands, options = self.arguments(data)
            tuned_now = self.op.num_tunings > self._num_tunings_before
            report_tuning(self.op, self.args.autotune, tuned_now, *operands, **options)

    def perf(
        self, data: Operands, title: object, rounds: int, warmup: int, trace: str = ""
    ) -> None:
        """Time the op, its parts and its baselines in CUDA graphs, then profile it if requested.

        ``trace`` is the name of the profile; default: the op's name and ``_perf``.
        """
        info = self.info
        candidates = {
            info.name: Baseline("own", lambda: self.run(data)),
            **info.baselines(data, self.ctx),
        }
        calls = {name: capture_graph(each.call) for name, each in candidates.items()}
        samples = time_interleaved(calls, rounds=rounds, warmup_rounds=warmup)
        ranks = f"{self.args.dtype} on {self.num_ranks} ranks"
        report_times(
            f"{title} {ranks}", candidates, samples, info.serial_name, info.collective_name
        )
        profile(trace or f"{info.name}_perf", self.args.profile, lambda: self.run(data))


def report_passed(details: str) -> None:
    """Print ``✅ check passed: 2 ranks, cpu, details`` on rank 0.

    The mark is omitted if standard output cannot encode it.
    """
    mark = "✅ "
    try:
        mark.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        mark = ""
    ranks, device = dist.get_world_size(), current_device().name
    dist_print(f"{mark}check passed: {ranks} ranks, {device}, {details}")


def report_tuning(
    op: AutoTuner[..., Any], autotune: bool, tuned_now: bool, /, *operands: Any, **options: Any
) -> None:
    """Print the config in use, and whether it was tuned now, recorded, or the default."""
    if not (autotune and knobs.autotune.get()):
        dist_print("no tuning: default config")
        return
    origin = "tuned now" if tuned_now else "from the cache, no tuning"
    dist_print(f"config ({origin}): {op.best_config(*operands, **options)}")


def report_times(
    title: str,
    candidates: Mapping[str, Baseline],
    samples: Mapping[str, Samples],
    serial_name: str,
    collective_name: str,
) -> None:
    """Print a table of median times; on GPUs, also quartiles and ratios.

    Args:
        title: line above the table.
        candidates: measured calls by name.
        samples: measurements by name.
        serial_name: name of the candidate that runs GEMM and collective in sequence.
        collective_name: name of the op's collective.
    """
    if not is_cuda():
        dist_print(f"{title}\n{TIMES_NOT_MEANINGFUL}\n{'':32}{'ms':>10}")
        for name, sample in samples.items():
            dist_print(f"{name:32}{sample.median:10.3f}")
        return
    limit_ms, base = overlap_limit_ms(candidates, samples), samples[serial_name].median
    rounds = len(samples[serial_name].milliseconds)
    dist_print(f"{title}, slowest rank, cold cache, median of {rounds} interleaved rounds:")
    dist_print(f"{'':32}{'ms':>10}{'quartiles':>20}{'x serial':>10}{'/ limit':>9}")
    for name, sample in samples.items():
        quartiles = "{:.3f}-{:.3f}".format(*sample.spread)
        ratios = f"{base / sample.median:10.2f}{sample.median / limit_ms:9.2f}"
        dist_print(f"{name:32}{sample.median:10.3f}{quartiles:>20}{ratios}")
    dist_print(f"{f'limit max(GEMM, {collective_name})':32}{limit_ms:10.3f}")
    dist_print(
        f"x serial: speedup over {serial_name}; / limit: time divided by the limit, the larger of "
        f"GEMM alone and the fastest {collective_name} alone"
    )
