"""What is refused, and that nobody waits for a rank that has failed before the first message."""

from __future__ import annotations

import re

import pytest

from tests.tuning import refusal_ranks
from triton_dist import tune
from triton_dist.errors import InvalidArgument

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
    waits, raises = spawn_ranks(2, refusal_ranks.every_refusal)
    assert set(OWN) == set(refusal_ranks.BROKEN)
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
    waits, _ = spawn_ranks(2, refusal_ranks.one_does_not_come, env=env)
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
        ({"vary_fn": lambda x: None}, "the result of vary_fn is None"),
    ],
)
def test_what_a_hook_returns_is_checked(options, named):
    given = {"config_space": [{"n": 1}, {"n": 2}], "key_fn": lambda x: 0} | options
    tuned = tune.autotune(**given)(lambda x, n: n)
    with pytest.raises(InvalidArgument, match=re.escape(named)):
        tuned(512)
