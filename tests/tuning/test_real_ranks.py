"""The tuner over real processes and gloo, and refused calls, for which no rank waits."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import re
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
from torch.distributed.device_mesh import DeviceMesh

from tests.contextual.kernels import autotuned, configs, scale, scale_kernel
from tests.tuning import ops
from triton_dist import tune
from triton_dist._tuning.engine import watchdog
from triton_dist._tuning.values import DIFFERS_BY_RANK
from triton_dist.autotuner import contextual_autotune
from triton_dist.errors import InvalidArgument, TritonDistError
from triton_dist.tune import autotune


def test_groups_that_were_destroyed_do_not_stay_in_memory(spawn_ranks):
    for alive, entries, said in spawn_ranks(2, groups_one_after_another):
        assert (alive, entries) == ([False] * 3, [1, 1, 1])
        assert "group is DeviceMesh(" in said
        assert "expected a process group that this rank belongs to" in said


def test_two_groups_tune_at_once(spawn_ranks):
    assert spawn_ranks(4, ops.tune_in_two_groups) == [(1, 1)] * 4


@pytest.mark.parametrize("contextual", [False, True])
def test_a_rank_in_a_collective_names_the_one_that_failed_before_it(spawn_ranks, contextual):
    limits = ("AUTOTUNE_TIMEOUT", "COMPILE_TIMEOUT")
    env = {f"TRITON_DIST_{limit}": "1.5" for limit in limits}
    said, _ = spawn_ranks(2, fails_before_a_collective, contextual, env=env, timeout=60)
    assert "rank(s) 1 did not arrive within 1.5 s: rank 1 failed: " in said
    assert "FileNotFoundError: no shard 1" in said
    assert "rank 0 is stuck in the user's code, where it may wait for the others" in said


def test_values_that_differ_by_rank(spawn_ranks):
    """Bound values may differ, also of hooks and partials in configs; a literal may not."""
    counts, bound, uncounted = [1, 0, 1], {"hook.size": "128"}, {"hook.rank": DIFFERS_BY_RANK}
    configs = [f"{{'act': functools.partial(_scaled, {by})}}" for by in (2, 3)]
    for values, hooks, partials, said in spawn_ranks(2, values_of_each_kind):
        assert values == [[1, 1, 1], [0, 0, 0]]
        assert hooks == (counts, bound, uncounted)
        assert partials == (15, 0, configs)
        assert "rank 1: constant: SIZE was 64, is 65" in said


def test_a_choice_belongs_to_the_group_that_agreed_on_it(spawn_ranks):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = spawn_ranks(2, choices_and_groups, "127.0.0.1", store.port, init=False)
    assert [seen.pop("alone") for seen in ranks] == [1, 2]
    assert [seen.pop("alone again") for seen in ranks] == [1, 2]
    assert ranks[0] == ranks[1]
    seen = ranks[0]
    assert seen["group"] == seen["in a world"] == seen["in the next world"]
    assert (seen["waited"], seen["tuned again"]) == (False, 0)
    assert seen["group first"] == seen["then none"]


OWN = {
    "refused keyword": ("InvalidArgument", "keyword n is 2"),
    "missing argument": ("TypeError", "missing a required argument: 'x'"),
    "wrong argument": ("TypeError", "unexpected keyword argument 'm'"),
    "knob": ("InvalidKnob", "TRITON_DIST_AUTOTUNE_GRACE='soon'"),
    "config space": ("LookupError", "no such GPU"),
    "tune": ("InvalidArgument", "keyword n is 1"),
    "contextual knob": ("InvalidKnob", "TRITON_DIST_AUTOTUNE_GRACE='soon'"),
    "switch": ("InvalidKnob", "TRITON_DIST_AUTOTUNE='soon'"),
    "switch of best_config": ("InvalidKnob", "TRITON_DIST_AUTOTUNE='soon'"),
    "contextual switch": ("InvalidKnob", "TRITON_DIST_AUTOTUNE='soon'"),
    "group": ("InvalidArgument", "group is 7"),
    "interrupt": ("KeyboardInterrupt", ""),
    "contextual": ("KeyError", "mine"),
}


@pytest.mark.filterwarnings("ignore::triton_dist.errors.TuningWarning")
def test_what_one_rank_raises_reaches_the_other_within_a_second_or_so(spawn_ranks):
    waits, raises = spawn_ranks(2, every_refusal)
    assert set(OWN) == set(BROKEN)
    for name, (kind, text) in OWN.items():
        own, message, seconds = raises[name]
        assert own == kind, (name, message)
        assert text in message
        assert seconds < 10, name
        other, message, seconds = waits[name]
        assert seconds < 10, (name, seconds)  # 0.75 where nothing else runs
        if kind == "KeyboardInterrupt":  # not a refusal of this call's arguments
            assert (other, "rank 1 left: KeyboardInterrupt" in message) == ("TuningTimeout", True)
            continue
        assert other == "RankDisagreement", (name, message)
        assert "  rank 0: valid\n" in message
        assert f"  rank 1: {kind}: " in message
        assert text in message
    assert raises["hit on the other"][0] == "KeyError"
    assert raises["hit on the other"][2] < 10


def test_a_rank_that_does_not_take_part_says_so(spawn_ranks):
    env = {"TRITON_DIST_AUTOTUNE_MEETING_TIMEOUT": "0.5"}
    waits, _ = spawn_ranks(2, one_does_not_come, env=env)
    (kind, untuned, _), (_, given, _) = waits
    assert kind == "TuningTimeout"
    assert "rank 1 called it with autotune=False" in untuned
    assert "TRITON_DIST_AUTOTUNE_MEETING_TIMEOUT sets the limit" in untuned
    assert "rank 1 called it with {'n': 1}, which leaves nothing to tune" in given


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def test_an_exception_without_a_text_fails_its_config_alone():
    @tune.autotune([{"n": 1}, {"n": 2}], key_fn=lambda x: 0)
    def step(x, n):
        if n == 1:
            raise Unspeakable
        return n

    assert step(1) == 2


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"config_space": lambda: None}, "the result of config_space is None"),
        ({"sizes": {"x": lambda n: n // 2}}, "512 rounded, size x is 256"),
        ({"sizes": {"x": lambda n: None}}, "512 rounded, size x is None"),
        ({"input_variants_fn": lambda x: None}, "the result of input_variants_fn is None"),
    ],
)
def test_what_a_hook_returns_is_checked(options, named):
    given = {"config_space": [{"n": 1}, {"n": 2}], "key_fn": lambda x: 0} | options
    tuned = tune.autotune(**given)(lambda x, n: n)
    with pytest.raises(InvalidArgument, match=re.escape(named)):
        tuned(512)


RANK = int(os.environ.get("RANK", "0"))
BEGIN = time.time()
MODE = "chosen"
if RANK == 1:
    MODE = "by rank"


def tuned(function: Callable[..., Any]) -> Any:
    return autotune([{"n": 1}, {"n": 2}], key_fn=lambda x: x)(function)


def make(rank: int, scale: float) -> Any:
    @tuned
    def op(x: int, n: int, peer: int = 1 - rank) -> Any:
        return RANK, BEGIN, MODE, rank, peer, scale

    return op


def _partial(rank: int, x: int, n: int) -> int:
    return rank


def values_that_differ_by_rank() -> Any:
    """Tunings of functions that read and bind the rank, twice; and of two that differ in what all
    ranks hold alike."""
    rank = dist.get_rank()
    counts = []
    for _ in range(2):  # the second time as a later start would
        ops = [make(rank, 2.0), make(rank, 3.0), tuned(functools.partial(_partial, rank))]
        for op in ops:
            op(1)
        counts.append([op.num_tunings for op in ops])
    return counts


def values_of_each_kind() -> Any:
    """Results of the next four functions."""
    return (
        values_that_differ_by_rank(),
        hooks_that_bind_the_rank(),
        partials_in_configs(),
        literals_that_differ(),
    )


def hooks_that_bind_the_rank() -> Any:
    """Tunings of a function whose configs have hooks that bind the rank, and a size, which all
    ranks hold alike; twice. Then what of it does not count."""
    rank = dist.get_rank()
    counts = []
    for size in (64, 64, 128):
        hook = _hook(rank, size)
        space = [{"config": triton.Config({"B": b}, pre_hook=hook)} for b in (16, 32)]

        @autotune(space, key_fn=lambda x: x)
        def op(x: int, config: triton.Config) -> None:
            config.pre_hook({})

        op(1)
        counts.append(op.num_tunings)
    fingerprint = op.tune(1).fingerprint
    return counts, dict(fingerprint.bound), dict(fingerprint.uncounted)


def partials_in_configs() -> Any:
    """Tunings of a function whose configs are partials, twice; and what calls and the record of the
    second have."""
    for _ in range(2):  # the second time as a later start would

        @autotune([{"act": functools.partial(_scaled, by)} for by in (2, 2, 3)], key_fn=lambda x: x)
        def op(x: int, act: Callable[[int], int]) -> int:
            return act(x)

        result = op(5)
    record = op.tune(5)
    return result, op.num_tunings, sorted(map(str, record.trials))


def _scaled(by: int, x: int) -> int:
    time.sleep(0.004 if by == 2 else 0.001)
    return by * x


def _hook(rank: int, size: int) -> Callable[[dict[str, Any]], None]:
    def hook(arguments: dict[str, Any]) -> None:
        arguments |= {"rank": rank, "size": size}

    return hook


def _favours_own(x: int, n: int) -> int:
    time.sleep(0.001 if n == RANK + 1 else 0.004)
    return n


def choices_and_groups(host: str, port: int) -> Any:
    """What is chosen alone, in a world, in the next one, over a group that is the world."""
    os.environ["TRITON_DIST_CACHE_DIR"] += f"-{RANK}"
    seen: dict[str, Any] = {}
    op = tuned(_favours_own)
    seen["alone"] = op(7)
    _begin(host, port, "first")
    seen["in a world"] = op(7)
    seen["group"] = op(7, autotune_pg=dist.group.WORLD)
    counted = op.num_tunings
    dist.destroy_process_group()
    seen["alone again"] = op(7)
    if RANK == 1:
        op.clear()  # stands for a process that was replaced
    _begin(host, port, "second")
    begin = time.monotonic()
    seen["in the next world"] = op(7)
    seen["waited"] = time.monotonic() - begin > 5
    seen["tuned again"] = op.num_tunings - counted
    # A group first on one rank, none on the other, for a key that is new.
    seen["group first"] = op(8, autotune_pg=dist.group.WORLD) if RANK else op(8)
    seen["then none"] = op(8)
    dist.destroy_process_group()
    return seen


def _begin(host: str, port: int, world: str) -> None:
    store = dist.PrefixStore(world, dist.TCPStore(host, port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=2)


def groups_one_after_another() -> tuple[list[bool], list[int], str]:
    """Which of three groups are alive after each was used and destroyed, and another one used; how
    many entries the tuner has then; and what a call over a mesh of one that was destroyed says."""
    op, groups = tuned(_favours_own), []
    for _ in range(3):
        group = dist.new_group([0, 1])
        mesh = DeviceMesh.from_group(group, "cpu")
        for _ in range(2):
            op(7, autotune_pg=group)
        groups.append(weakref.ref(group))
        dist.destroy_process_group(group)
        del group
    said = ""
    try:
        op(7, autotune_pg=mesh)
    except InvalidArgument as error:
        said = str(error)
    del mesh
    op(7, autotune_pg=dist.new_group([0, 1]))
    time.sleep(1)  # the watchdog's thread looks twice a second
    gc.collect()
    tables = (
        op._cached_arguments_by_group,
        op._choices.by_rounded_key,
        op._choices.by_ranks_and_key,
    )
    return [group() is not None for group in groups], [len(each) for each in tables], said


def literals_that_differ() -> str:
    """Ranks whose sources differ: no value of a rank, but two programs."""
    source = f"SIZE = {64 + dist.get_rank()}\ndef op(x, n):\n    return SIZE\n"
    folder = os.environ["TRITON_DIST_CACHE_DIR"] + f"-{dist.get_rank()}"
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, "two_programs.py")
    with open(path, "w") as file:
        file.write(source)
    spec = importlib.util.spec_from_file_location("two_programs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["two_programs"] = module
    spec.loader.exec_module(module)
    try:
        tuned(module.op)(1)
    except TritonDistError as error:
        return str(error)
    return ""


def fails_before_a_collective(contextual: bool) -> str:
    """Rank 1 raises in what is tuned, where rank 0 is in a collective: what the latter says.

    Rank 1 comes to the collective afterwards, so that rank 0 need not be ended.
    """
    said: list[str] = []
    watchdog._print = said.append
    total = torch.ones(4)

    def function() -> None:
        if dist.get_rank() == 1:
            raise FileNotFoundError("no shard 1")
        dist.all_reduce(total)

    @autotune([{"n": 1}, {"n": 2}], key_fn=lambda: 0)
    def called(n: int) -> None:
        function()

    kernel = autotuned(scale_kernel, configs(16, 32))

    @contextual_autotune(is_dist=True, n_repeat=1, n_warmup=1)
    def around() -> None:
        scale(kernel, torch.ones(64))
        function()

    with suppress(Exception):
        (around if contextual else called)()
    if dist.get_rank() == 1:
        dist.all_reduce(total)
    return said[0] if said else ""


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
    assert op.num_tunings == 2
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
