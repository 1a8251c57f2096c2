"""The tuner over real processes and gloo, and refused calls, for which no rank waits."""

from __future__ import annotations

import re

import pytest
import torch.distributed as dist

from tests.tuning import group_ranks, ops
from triton_dist import tune
from triton_dist._tuning.values import DIFFERS
from triton_dist.errors import InvalidArgument


def test_groups_that_were_destroyed_do_not_stay_in_memory(spawn_ranks):
    for alive, entries, said in spawn_ranks(2, group_ranks.groups_one_after_another):
        assert (alive, entries) == ([False] * 3, [1, 1, 1])
        assert "group is DeviceMesh(" in said
        assert "expected a process group that this rank belongs to" in said


def test_two_groups_tune_at_once(spawn_ranks):
    assert spawn_ranks(4, ops.tune_in_two_groups) == [(1, 1)] * 4


@pytest.mark.parametrize("contextual", [False, True])
def test_a_rank_in_a_collective_names_the_one_that_failed_before_it(spawn_ranks, contextual):
    limits = ("AUTOTUNE_TIMEOUT", "COMPILE_TIMEOUT")
    env = {f"TRITON_DIST_{limit}": "1.5" for limit in limits}
    said, _ = spawn_ranks(2, group_ranks.fails_before_a_collective, contextual, env=env, timeout=60)
    assert "rank(s) 1 did not arrive within 1.5 s: rank 1 failed: " in said
    assert "FileNotFoundError: no shard 1" in said
    assert "rank 0 is stuck in the user's code, where it may wait for the others" in said


def test_values_that_differ_by_rank(spawn_ranks):
    """Bound values may differ, also of hooks and partials in configs; a literal may not."""
    counts, bound, uncounted = [1, 0, 1], {"hook.size": "128"}, {"hook.rank": DIFFERS}
    configs = [f"{{'act': functools.partial(_scaled, {by})}}" for by in (2, 3)]
    for values, hooks, partials, said in spawn_ranks(2, group_ranks.values_of_each_kind):
        assert values == [[1, 1, 1], [0, 0, 0]]
        assert hooks == (counts, bound, uncounted)
        assert partials == (15, 0, configs)
        assert "rank 1: constant: SIZE was 64, is 65" in said


def test_a_choice_belongs_to_the_group_that_agreed_on_it(spawn_ranks):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = spawn_ranks(2, group_ranks.choices_and_groups, "127.0.0.1", store.port, init=False)
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
    waits, raises = spawn_ranks(2, group_ranks.every_refusal)
    assert set(OWN) == set(group_ranks.BROKEN)
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
    waits, _ = spawn_ranks(2, group_ranks.one_does_not_come, env=env)
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
