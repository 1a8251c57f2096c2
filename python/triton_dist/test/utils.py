"""Shapes, assertions and command lines that test scripts share."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from triton_dist import knobs
from triton_dist.runtime.distributed import finalize_distributed, initialize_distributed
from triton_dist.runtime.random import init_seed
from triton_dist.testing.assertions import assert_allclose, assert_bitwise_equal, bitwise_equal

__all__ = [
    "LAYER_CONFIGS",
    "assert_allclose",
    "assert_bitwise_equal",
    "bitwise_equal",
    "dtype_named",
]

# Global N and K of a feed-forward layer's first GEMM.
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
    """``"float16"`` to ``torch.float16``, for command lines."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


@contextmanager
def on_ranks(seed: int) -> Iterator[None]:
    """Run the body of a script on all ranks, each with its own random numbers."""
    initialize_distributed(seed)
    init_seed(seed + dist.get_rank())
    yield
    finalize_distributed()


DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Short names of dtypes and torch's."""
_UNTIL_ENDED = 60.0
"""Seconds; the launcher ends this process long before, as soon as rank 0 has ended."""


def at_least(least: int) -> Callable[[str], int]:
    """The type of an argument that is a number of something, ``least`` or more."""

    def number(word: str) -> int:
        value = int(word) if word.isdecimal() else -1
        if value < least:
            raise argparse.ArgumentTypeError(f"{word!r}: expected an integer, {least} or more")
        return value

    return number


class ScriptParser(argparse.ArgumentParser):
    """A parser of which rank 0 alone is heard, although every rank parses the same command line.

    Args:
        description: for ``--help``: the script's docstring.
        cases: what ``--case`` may be.
        default: the case without the option; ``None``: all of them, one after another.
    """

    def __init__(self, description: str | None, cases: Iterable[str], default: str | None) -> None:
        super().__init__(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        shown = "all of them" if default is None else default
        self.add_argument(
            "--case", choices=list(cases), default=default, help=f"what to do; default: {shown}"
        )

    def add_other_name(self, option: str, case: str) -> None:
        """Let ``option`` mean ``--case`` with ``case``."""
        self.add_argument(
            option, action="store_const", dest="case", const=case, default=argparse.SUPPRESS,
            help=f"the same as --case {case}",
        )  # fmt: skip

    def add_dtype(self, default: str) -> None:
        """``--dtype``, by torch's name or its short one; the value is torch's."""
        self.add_argument(
            "--dtype", default=default, choices=list(DTYPES.values()),
            type=lambda name: DTYPES.get(name, name), help="also by short names such as bf16",
        )  # fmt: skip

    def add_rounds(self, iters: int, warmup: int, least: int = 1) -> None:
        """``--iters``, ``least`` or more, and ``--warmup``, by either of two names."""
        self.add_argument("--iters", type=at_least(least), default=iters, help="rounds that count")
        self.add_argument(
            "--warmup",
            "--warmup_iters",
            type=at_least(0),
            default=warmup,
            help="rounds before those",
        )

    def _print_message(self, message: str, file: Any = None) -> None:
        if knobs.rank.get() == 0:
            super()._print_message(message, file)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """End this process; after a mistake, ranks other than 0 leave it the time to say so."""
        if status and knobs.rank.get() > 0:
            time.sleep(_UNTIL_ENDED)
        super().exit(status, message)
