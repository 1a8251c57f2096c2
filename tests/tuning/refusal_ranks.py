"""Calls that one rank cannot make, while another waits for it or comes later."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import triton

from tests.contextual.kernels import scale_kernel
from triton_dist.autotuner import contextual_autotune
from triton_dist.tune import autotune

SPACE = [{"n": 1}, {"n": 2}]
KEYS = {1: 1, 2: 2, 3: 3}


def ask_config_space() -> list[dict[str, int]]:
    if os.environ.get("REFUSE"):
        raise (
            KeyboardInterrupt if os.environ["REFUSE"] == "interrupt" else LookupError("no such GPU")
        )
    return SPACE


@autotune(SPACE, key_fn=lambda x, **_: KEYS[x] if is_other() else x)
def op(x: int, n: int) -> int:
    return x


@autotune(ask_config_space, key_fn=lambda x: x)
def with_callable_space(x: int, n: int) -> int:
    return x


@contextual_autotune(is_dist=True)
def contextual(function: Callable[[], object]) -> None:
    function()


def is_other() -> bool:
    return dist.get_rank() == 1


def ended(call: Callable[[], object]) -> tuple[str, str, float]:
    """Type and text of what it raised, and after how many seconds."""
    begin = time.monotonic()
    try:
        call()
    except BaseException as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", time.monotonic() - begin


def with_variable(name: str, value: str, call: Callable[[], object]) -> None:
    os.environ[name] = value
    try:
        call()
    finally:
        del os.environ[name]


tuned_kernel = triton.autotune([triton.Config({"BLOCK": block}) for block in (32, 64)], key=["n"])(
    scale_kernel
)


def launch() -> None:
    x = torch.ones(32)
    tuned_kernel[(1,)](x, torch.empty_like(x), 32)


def raise_key_error() -> None:
    raise KeyError("mine")


BAD_KNOB = ("TRITON_DIST_AUTOTUNE_GRACE", "soon")
BAD_SWITCH = ("TRITON_DIST_AUTOTUNE", "soon")
BROKEN: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "refused keyword": (lambda: op(2), lambda: op(2, n=2)),
    "missing argument": (lambda: op(2), lambda: op()),
    "wrong argument": (lambda: op(2), lambda: op(2, m=1)),
    "knob": (lambda: op(2), lambda: with_variable(*BAD_KNOB, lambda: op(2))),
    "config space": (
        lambda: with_callable_space(2),
        lambda: with_variable("REFUSE", "1", lambda: with_callable_space(2)),
    ),
    "tune": (lambda: op.tune(2), lambda: op.tune(2, n=1)),
    "contextual knob": (
        lambda: contextual(launch),
        lambda: with_variable(*BAD_KNOB, lambda: contextual(launch)),
    ),
    "switch": (lambda: op(2), lambda: with_variable(*BAD_SWITCH, lambda: op(2))),
    "switch of best_config": (
        lambda: op.best_config(2),
        lambda: with_variable(*BAD_SWITCH, lambda: op.best_config(2)),
    ),
    "contextual switch": (
        lambda: contextual(launch),
        lambda: with_variable(*BAD_SWITCH, lambda: contextual(launch)),
    ),
    "group": (lambda: op(2), lambda: op(2, autotune_pg=7)),
    "interrupt": (
        lambda: with_callable_space(2),
        lambda: with_variable("REFUSE", "interrupt", lambda: with_callable_space(2)),
    ),
    "contextual": (lambda: contextual(launch), lambda: contextual(raise_key_error)),
}
"""What rank 0 calls, and rank 1 meanwhile."""


def every_refusal() -> dict[str, tuple[str, str, float]]:
    """What each rank gets, in each of these; then all meet again."""
    seen = {}
    for name, calls in BROKEN.items():
        dist.barrier()
        seen[name] = ended(calls[dist.get_rank()])
    dist.barrier()
    assert op(1) == 1
    # Known on rank 0 already, which does not come: so rank 1 is told by nobody but itself.
    seen["hit on the other"] = ended(lambda: op(4 if is_other() else 1))
    assert op(2) == 2
    assert op.tuning_count == 2
    return seen


def one_does_not_come() -> list[tuple[str, str, float]]:
    """Rank 0's errors, while rank 1 calls in ways in which nothing is tuned."""
    seen = []
    for call in (
        lambda: op(3, autotune=False),
        lambda: op(3, n=1, autotune_allow_arg_overwrite=True),
    ):
        dist.barrier()
        seen.append(ended(call if is_other() else lambda: op(3)))
        dist.barrier()
    return seen
