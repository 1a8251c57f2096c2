"""Ranges of a user's own rounding, also one that is another today than when records were made."""

from __future__ import annotations

import math
import time
from collections import namedtuple
from pathlib import Path

import pytest

from triton_dist.errors import TuningWarning
from triton_dist.knobs import InvalidKnob
from triton_dist.tune import autotune

Key = namedtuple("Key", "M N")
NS = [{"n": 1}, {"n": 2}]


def power_of_two(n):
    return 2 ** math.ceil(math.log2(n))


def steps_of(width):
    return lambda n: -(-n // width) * width


def tuned_in(rounding, space=NS, name="M", key_fn=lambda x, M: x, **options):
    """A function with records of its own name; another call of this gives the same one anew."""

    def step(x, M, **config):
        return config

    return autotune(space, key_fn, scope="rank", sizes={name: rounding}, **options)(step)


def test_a_rounding_is_not_asked_for_a_size_that_cannot_be_called_or_may_fail_at_it():
    """``log2(0)`` raises; so does a ladder of ends beyond its last one, which a record knows."""
    step = tuned_in(power_of_two)
    for M in (2, 1, 1):
        step("layer", M)
    step.clear()
    assert step("layer", 2) in NS
    tuned_in(steps_of(1000))("ladder", 2000)

    def to_1500(n):
        return {True: 1500}[n <= 1500]

    assert tuned_in(to_1500)("ladder", 1400) in NS


def test_a_record_that_was_measured_in_another_range_is_not_used_nor_a_neighbour():
    assert tuned_in(steps_of(1024)).tune("layer", 5).at == (5,)
    step = tuned_in(steps_of(128))
    found = step.tune("layer", 1000)
    assert (found.at, found.carried, step.tuning_count) == ((1000,), "", 1)
    assert tuned_in(steps_of(512)).tune("layer", 1500).carried == "carried over from M=1024"
    assert tuned_in(steps_of(300)).tune("layer", 1300).carried == ""


@pytest.mark.parametrize(
    ("before", "sizes", "now"),
    [("M", (500, 512), "MN"), ("MN", (500, 512), "M"), ("MN", (600, 512), "M")],
)
def test_records_made_when_other_names_were_sizes_are_tuned_again(before, sizes, now):
    def of(names):
        def step(m, k, n):
            return n

        return autotune(NS, Key, scope="rank", sizes=tuple(names))(step)

    of(before).tune(500, 512)
    step = of(now)
    step(*sizes)
    assert step.tuning_count == 1


def test_no_rows_say_nothing_about_some():
    def cost(tile):
        return 0.0002 + 0.0003 * abs(math.log2(tile) - 10)

    @autotune([{"tile": 1 << t} for t in range(12)], lambda x, M: x, scope="rank", sizes=("M",))
    def step(x, M, tile):
        if M:
            time.sleep(cost(tile))
        return tile

    step("layer", 0)
    record = step.tune("layer", 1)
    assert (record.carried, len(record.trials)) == ("", 12)


def test_where_all_of_the_few_fail_all_are_tried():
    """Tiles that divide M: what is fast at 512 does not work at 511."""

    def prepare(x, M, tile):
        if M % tile:
            raise ValueError(f"{M} is no multiple of {tile}")

    space = [{"tile": 1}, *({"tile": 4 << t} for t in range(8))]

    @autotune(space, lambda x, M: x, scope="rank", sizes=("M",), prepare_fn=prepare)
    def step(x, M, tile):
        time.sleep(0.005 if tile == 1 else 0.0002)
        return tile

    assert step("layer", 512) > 1
    with pytest.warns(TuningWarning, match="8 of 9 configs failed"):
        assert step("layer", 511) == 1
    record = step.tune("layer", 511)
    assert record.carried == ""
    assert len(record.trials) == len(space)


@pytest.mark.filterwarnings("ignore::triton_dist.errors.TuningWarning")
def test_safe_fn_and_waves_fn_see_whole_configs_and_keys_where_the_caller_gives_some_values():
    seen = {"safe": set(), "waves": set()}

    def is_safe(config):
        seen["safe"].add((config["way"], config["n"]))
        return config["way"] == "library"

    def waves(key, config):
        seen["waves"].add((key.M, config["way"], config["n"]))
        return 1.0

    space = [{"way": way, "n": n} for way in ("library", "tiles") for n in (1, 2)]

    @autotune(space, Key, scope="rank", sizes=("M",), safe_fn=is_safe, waves_fn=waves)
    def step(m, k, way, n):
        return way, n

    for m in (512, 500):
        assert step(m, 7, n=2, autotune_allow_arg_overwrite=True)[1] == 2
    whole = {("library", 2), ("tiles", 2)}
    assert seen["safe"] == whole
    assert seen["waves"] == {(M, *each) for M in (511, 512) for each in whole}


def test_a_size_by_keyword_behind_others_by_place():
    @autotune(NS, lambda *others, M: 0, scope="rank", sizes=("M",))
    def step(x, *rest, M, n):
        return M

    assert step.tune(1, 7, 9, M=2000).at == (2000,)


def test_a_size_that_key_fn_returns_beside_the_argument_is_said_once_where_it_is_called():
    step = autotune(NS, lambda M: Key(M, 7), scope="rank", sizes=("M",))(lambda M, n: n)
    with pytest.warns(TuningWarning, match="M is an argument, which sizes= adds") as said:
        step(500)
    assert [Path(each.filename) for each in said] == [Path(__file__)]
    assert "Leave it out of what key_fn returns" in str(said[0].message)
    step(501)
    step(600)
    assert step.tuning_count == 2


def test_a_key_that_gave_way_to_others_is_at_hand_again(monkeypatch):
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_KEYS", "2")
    step = autotune(NS, lambda x: x, scope="rank")(lambda x, n: n)
    for x in (0, 1, 2, 0):
        step(x)
    assert list(step._hits) == [2, 0]
    assert step.tuning_count == 3


@pytest.mark.parametrize("value", ["inf", "nan", "-1"])
@pytest.mark.parametrize("knob", ["TRANSFER_MS", "TIMEOUT"])
def test_times_are_numbers(monkeypatch, knob, value):
    monkeypatch.setenv(f"TRITON_DIST_AUTOTUNE_{knob}", value)
    with pytest.raises(InvalidKnob, match=f"TRITON_DIST_AUTOTUNE_{knob}='{value}', expected"):
        autotune(NS, lambda x: x, scope="rank")(lambda x, n: n)(1)
