"""Sizes: ranges that share a tuning, of a user's own rounding too, and what a new size takes over
from its neighbours."""

from __future__ import annotations

import collections
import json
import math
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tuning.fakes import SECONDS, Rank, fingerprint, in_threads, thread_ranks, together
from triton_dist import tune
from triton_dist._tuning.sizes.neighbours import Neighbour, Neighbours, log_slowdowns
from triton_dist._tuning.store import MemoryStore
from triton_dist._tuning.values import (
    Config,
    Key,
    Measurement,
    Sizes,
    Trial,
    TuningRecord,
    bucket,
    fine_bucket,
    pack,
    unpack,
)
from triton_dist.errors import (
    CaptureInProgress,
    InvalidArgument,
    RankDisagreement,
    TuningFrozen,
    TuningTimeout,
    TuningWarning,
)
from triton_dist.knobs import InvalidKnob
from triton_dist.tune import autotune

Keyed = collections.namedtuple("Keyed", ["M", "N"])
SIZES = Sizes("run", {"M": fine_bucket})
SPACE = [{"tile": tile} for tile in (1, 2, 4, 8, 16, 32, 64, 128)]


def ranks(size: int = 1, seconds: float = SECONDS, **options: Any) -> list[Rank]:
    """Ranks whose fastest tile is the one nearest to M / 64, in the sense of a ratio."""
    options = {"cost": cost_of(), "space": SPACE, "sizes": SIZES} | options
    return [
        Rank(rank, key_fn=lambda x, **_: Keyed(x, "n"), **options)
        for rank in thread_ranks(size, seconds)
    ]


def cost_of() -> Any:
    """Milliseconds of a run: of the M that ``sized`` says is called now."""

    def cost(rank: int, config: dict[str, Any]) -> float:
        ratio = config["tile"] * 64 / cost.M
        return 0.1 * max(ratio, 1 / ratio)

    cost.M = 64
    return cost


def call(all_ranks: list[Rank], M: int, **options: Any) -> list[Any]:
    for rank in all_ranks:
        rank.cost.M = M
    return together(all_ranks, M, **options)


def is_library(config: Any) -> bool:
    return bool(config["tile"] == "library")


def runs(rank: Rank) -> int:
    number = len(rank.calls)
    rank.calls.clear()
    return number


@given(st.integers(1, 1 << 20))
def test_ranges_are_in_order_hold_their_sizes_and_grow_with_them(n):
    end = fine_bucket(n)
    assert end >= n
    assert fine_bucket(end) == end
    assert fine_bucket(end + 1) > end
    assert end - n < max(16, n / 4 if n <= 256 else n / 8)
    assert (end % 32 == 0) == (n % 32 == 0)  # by themselves
    if n > 16:
        assert (end + (end % 32 == 31)) % 16 == 0  # tiles, or all but the last row of them
    if n > 512:
        assert end - n < n / 16
    if 512 < n <= 2048:
        assert end - n < 32
    if n > 2048:
        assert (end + (end % 32 == 31)) % 128 == 0
        assert end - n < max(128, n / 31)


def test_ranges_up_to_16384_are_about_three_hundred():
    ends = {fine_bucket(n) for n in range(1, 16385)}
    aligned = sum(end % 32 == 0 for end in ends)
    assert aligned == 4 + 28 + 32 + 48 + 32
    assert len(ends) - aligned == 5 + 7 + 28 + 32 + 48 + 32
    assert [fine_bucket(n) for n in (1054, 1056, 1088, 2050, 2080, 2144)] == [
        1055, 1056, 1088, 2175, 2176, 2176
    ]  # fmt: skip
    assert fine_bucket(0) == 0
    for wrong in (-1, 2048.0, "8"):
        with pytest.raises(InvalidArgument, match=f"n is {wrong!r}, expected an int, 0 or more"):
            fine_bucket(wrong)


def test_integers_of_numpy_are_sizes():
    (rank,) = ranks()
    call([rank], np.int64(500))
    runs(rank)
    for size in (500, np.int32(500), np.uint16(501)):
        call([rank], size)
    assert runs(rank) == 3
    assert fine_bucket(np.int64(2050)) == fine_bucket(2050)
    assert bucket(np.int32(2050)) == bucket(2050)
    for wrong in (True, np.float32(8), torch.tensor(8)):
        with pytest.raises(InvalidArgument, match="expected an int, 0 or more"):
            SIZES.rounded_key(Keyed(wrong, "n"))


def test_a_range_is_tuned_once_and_its_other_sizes_cost_no_word():
    (rank,) = ranks()
    call([rank], 500)
    runs(rank)
    rank.ranks.phases.clear()
    for M in (481, 501, 511):
        assert call([rank], M)[0] == (M, {"tile": 8})
    assert runs(rank) == 3
    assert rank.ranks.phases == []
    assert rank.tuned.num_tunings == 1


def test_a_neighbour_takes_few_runs_and_a_far_size_a_tuning():
    (rank,) = ranks()
    call([rank], 512)
    whole = runs(rank)
    assert call([rank], 640)[0][1] == {"tile": 8}
    brief = runs(rank)
    assert brief < whole / 2
    record = rank.tuned.tune(640)
    assert record.warm_started_from == "warm-started from M=512"
    assert len(record.trials) < len(SPACE)
    call([rank], 4096)
    assert runs(rank) == whole
    assert rank.tuned.tune(4096).warm_started_from == ""


def test_what_is_carried_over_follows_the_size():
    (rank,) = ranks()
    chosen = {}
    for M in (256, *range(320, 1025, 64), *range(1152, 4097, 128)):
        chosen[M] = call([rank], M)[0][1]["tile"]
    for M, tile in chosen.items():
        fastest = min(max(each * 64 / M, M / each / 64) for each in (1, 2, 4, 8, 16, 32, 64))
        assert max(tile * 64 / M, M / tile / 64) < 1.2 * fastest, (M, tile)


def test_the_time_to_spend_bounds_a_brief_race_and_zero_means_none():
    def spent(milliseconds: float) -> float:
        (rank,) = ranks(warm_start_ms=milliseconds)
        call([rank], 512)
        runs(rank)
        call([rank], 576)
        return sum(rank.cost(0, config) for config in rank.calls)

    few, some, whole = spent(0.1), spent(2.0), spent(0.0)
    assert few < 1.5
    assert few < some < 2.5
    assert whole > 2 * some


def test_what_no_neighbour_could_try_is_no_reason_to_leave_it_out():
    """Of two algorithms one is for few rows alone, where it is the faster one."""
    space = [
        {"algorithm": algorithm, "tile": tile}
        for algorithm in ("any", "few rows")
        for tile in (4, 8, 16, 32)
    ]

    def prune_fn(config: Any, M: int, **_: Any) -> bool:
        return config["algorithm"] == "any" or M <= 512

    def cost(rank: int, config: dict[str, Any]) -> float:
        return 0.1 * config["tile"] / (1 + (config["algorithm"] == "few rows"))

    (rank,) = ranks(space=space, prune_fn=prune_fn, cost=cost)
    assert call([rank], 1024)[0][1]["algorithm"] == "any"
    assert call([rank], 576)[0][1]["algorithm"] == "any"
    assert rank.tuned.tune(576).warm_started_from == "warm-started from M=1024"
    assert call([rank], 512)[0][1] == {"algorithm": "few rows", "tile": 4}
    assert rank.tuned.tune(512).warm_started_from == ""
    # Where a neighbour knows both, few race again, and upward nothing is new.
    assert call([rank], 448)[0][1] == {"algorithm": "few rows", "tile": 4}
    assert rank.tuned.tune(448).warm_started_from == "warm-started from M=512; M=576"
    assert call([rank], 640)[0][1]["algorithm"] == "any"
    assert rank.tuned.tune(640).warm_started_from.startswith("warm-started from")


def test_all_ranks_take_the_leaders_neighbours():
    leader, other = ranks(2)
    call([leader, other], 512)
    other.tuned.clear()  # as after a restart, with another cache
    leader.tuned.clear()
    assert [result[1] for result in call([leader, other], 576)] == [{"tile": 8}] * 2
    assert leader.tuned.tune.__self__.num_tunings == 2


def test_one_safe_config_of_each_name_races_at_every_size():
    def cost(rank: int, config: dict[str, Any]) -> float:
        return {"a": 0.3, "b": 0.2, "c": 0.4, 1: 0.1, 2: 0.9}[config["tile"]]

    space = [{"tile": 1}, {"tile": 2}, *({"tile": name} for name in "abc")]
    names = {"a": "one", "b": "one", "c": "other"}
    (rank,) = ranks(cost=cost, space=space, fallback_fn=lambda config: names.get(config["tile"]))
    rank.cost.M = 0
    together([rank], 512)
    record = rank.tuned.tune(576)
    assert {trial.config["tile"] for trial in record.trials} == {1, "b", "c"}


def test_the_safe_configs_that_neighbours_tried_are_brought_to_one_scale():
    def neighbour(M: int, far: float, warm_started_from: str, **ms: float) -> Neighbour:
        trials = [
            Trial.of(Config({"algorithm": n}), Measurement((each,), 0)) for n, each in ms.items()
        ]
        key = Key.of("run", Keyed(M, "n"), "fake")
        record = TuningRecord(
            key, fingerprint(), tuple(trials), "2030", 1.0, warm_started_from=warm_started_from
        )
        return Neighbour((M,), far, record, log_slowdowns(record))

    # The slow one was tried beside none that is fast, and twice, quite near.
    every = neighbour(4096, 0.9, "", ours=0.9, good=1.02, slow=1.06, library=1.07)
    beside = [
        neighbour(M, far, "warm-started", slow=1.0, library=1.01)
        for M, far in ((2176, 0.1), (2304, 0.2))
    ]
    kinds = {"good": "serial", "slow": "serial", "library": "library"}
    family = SIZES.family(Keyed(2049, "n"))
    near = Neighbours(family, [*beside, every], lambda config: kinds.get(config["algorithm"]))
    kept = [Config({"algorithm": algorithm}) for algorithm in ("slow", "library", "good", "ours")]
    assert [config["algorithm"] for config in near.fallbacks(kept)] == ["good", "library"]


def test_where_tuning_is_forbidden_neighbours_on_both_sides_decide():
    (rank,) = ranks()
    call([rank], 512)
    call([rank], 640)
    rank.frozen = True
    runs(rank)
    assert call([rank], 576)[0] == (576, {"tile": 8})
    assert runs(rank) == 1
    record = rank.tuned.tune(576)
    assert record.warm_started_from == "predicted from M=640; M=512"
    call([rank], 570)
    with_far = call([rank], 8192)[0]
    assert isinstance(with_far, TuningFrozen)


def test_where_tuning_is_forbidden_one_who_learned_from_others_is_asked_too():
    (rank,) = ranks()
    call([rank], 1024)
    assert call([rank], 640)[0][1] == {"tile": 8}
    rank.frozen = True
    assert call([rank], 400)[0] == (400, {"tile": 8})  # 1024 is too far
    assert rank.tuned.tune(400).warm_started_from == "predicted from M=640"


def library_and_tiles(rank: int, config: dict[str, Any]) -> float:
    """The library's time grows with M; ours is that of all rows of its tiles of 128."""
    M = library_and_tiles.M
    return M / 1000 if config["tile"] == "library" else 0.97 * -(-M // 128) * 128 / 1000


def sized(**options: Any) -> list[Rank]:
    space = [{"tile": 128}, {"tile": "library"}]
    return ranks(cost=library_and_tiles, space=space, fallback_fn=is_library, **options)


def test_within_a_range_the_exact_size_decides():
    (rank,) = sized()
    call([rank], 2047)
    call([rank], 2175)
    rank.ranks.phases.clear()
    used = {M: call([rank], M)[0][1]["tile"] for M in range(2049, 2176) if M % 32}
    assert rank.ranks.phases == []  # from what all ranks know
    switch = round(0.97 * 2175)
    for M, tile in used.items():
        if abs(M - switch) > 35:  # 1 % is nobody's loss, and in doubt the library is used
            assert tile == ("library" if switch > M else 128), M
    assert dict(rank.tuned.best_config(2050)) == {"tile": "library"}
    assert dict(rank.tuned.best_config(2175)) == {"tile": 128}


@pytest.mark.parametrize("rival", ["library", 64])
def test_of_a_shipped_record_only_what_passes_prune_fn_today_is_used(rival):
    """Tiles or library, where the other one won: its time says that it is faster elsewhere."""
    winner = 128 if rival == "library" else "library"
    measured, asked_for = (2175, 2050) if winner == 128 else (2050, 2175)
    times = {
        1919: {128: 2.0, "library": 1.8, 64: 2.2},
        measured: {winner: 2.0, rival: 2.06 if winner == 128 else 2.01},
    }

    def cost(rank: int, config: dict[str, Any]) -> float:
        return times[cost.M].get(config["tile"], 9.0)

    space = [{"tile": tile} for tile in (128, 64, "library")]
    found = fingerprint(version="7")
    options = {"space": space, "fallback_fn": is_library}
    (source,) = ranks(cost=cost, fingerprint=found, warm_start_ms=0, **options)
    for M in times:
        call([source], M)
    shipped = list(unpack(pack([record for record, _ in source.disk.records()])))

    def used(prune_fn: Any) -> Any:
        store = MemoryStore()
        for record in shipped:
            store.put(record)
        (rank,) = ranks(cost=cost_of(), fingerprint=found, prune_fn=prune_fn, disk=store, **options)
        rank.tuned.best_config(measured)
        asked.clear()
        return rank.tuned.best_config(asked_for)["tile"]

    asked: list[Any] = []

    def not_the_rival(config: Any, x: int) -> bool:
        asked.append(config)
        return config["tile"] != rival

    assert used(None) == rival
    assert used(not_the_rival) == winner
    assert not asked  # what was learned at the first call of the range serves all of it


def beside_a_library(cost: Any) -> list[Rank]:
    """A rank with tiles of 64 and a library, which is safe."""
    space = [{"tile": "library"}, {"tile": 64}]
    return ranks(cost=cost, space=space, fallback_fn=is_library, warm_start_ms=0)


# Milliseconds of the library and of the tiles by size, in the order in which sizes were measured;
# what is used at other sizes.
BESIDE_A_LIBRARY: dict[str, tuple[dict[int, tuple[float, float]], dict[int, Any]]] = {
    "a library that takes other tiles from some row on grows no faster than the size": (
        {4039: (1.40, 1.60), 4097: (1.46, 1.53)}, {4222: "library"}),
    "between two measured sizes its time is between theirs": (
        {2178: (1.24, 1.40), 2050: (1.23, 1.24)}, {2170: "library"}),
    "between two measured sizes, of which it is slow at one": (
        {2178: (1.60, 1.40), 2050: (1.23, 1.24)}, {2170: 64}),
    "multiples of 32 do not tell how a time goes on between them": (
        {2112: (1.3, 1.03), 2050: (1.0, 1.03)}, {2080: 64, 2170: "library"}),
    "nor does a size that is a row below": ({49: (1.05, 0.9), 48: (1.0, 0.9)}, {33: 64}),
    "nor a row above": ({48: (1.0, 1.2), 49: (1.05, 1.2)}, {63: "library"}),
    "a time of nothing": ({1798: (1.0, 1.0), 1665: (0.0, 0.0)}, {1700: "library"}),
}  # fmt: skip
# Tiles are used at a size that was not measured if they are surely faster: by 3 %, not by 1 %.
for _lead, _used in ((0.99, "library"), (0.97, 64)):
    for _order in ((40,), (30, 40), (40, 30)):
        _times = dict.fromkeys(_order, (1.0, _lead))
        BESIDE_A_LIBRARY[f"faster by {_lead}, {_order}"] = _times, {40: 64, 33: _used}


@pytest.mark.parametrize("case", BESIDE_A_LIBRARY)
def test_beside_a_library(case):
    times, used = BESIDE_A_LIBRARY[case]

    def cost(rank: int, config: dict[str, Any]) -> float:
        return times[cost.M][config["tile"] != "library"]

    (rank,) = beside_a_library(cost)
    for M in times:
        call([rank], M)
    assert {M: rank.tuned.best_config(M)["tile"] for M in used} == used


def test_sizes_are_apart_where_the_rounding_says_so():
    family = SIZES.family(Keyed(512, "n"))
    assert [M for M in (1, 16, 31, 32, 2175, 2176) if family.have_single_sizes((M,))] == [
        1,
        32,
        2176,
    ]
    hundreds = Sizes("run", {"M": lambda n: -(-n // 100) * 100}).family(Keyed(512, "n"))
    assert not hundreds.have_single_sizes((800,))  # a multiple of 32, as 700 is not


def test_where_nothing_was_measured_the_winner_has_no_start_on_another_library():
    """Near 2050, where one won, it is used unless the other should be 1 % faster."""
    times = {2050: {"one": 1.0, "other": 1.001}, 2310: {"one": 1.056, "other": 1.011}}

    def cost(rank: int, config: dict[str, Any]) -> float:
        return times[cost.M][config["library"]]

    space = [{"library": name} for name in ("one", "other")]
    (rank,) = ranks(cost=cost, space=space, fallback_fn=lambda _: True, warm_start_ms=0)
    for M in reversed(times):
        call([rank], M)
    expected = {2050: "one", 2076: "one", 2086: "other", 2175: "other"}
    assert {M: rank.tuned.best_config(M)["library"] for M in expected} == expected


def test_no_rows_are_a_size_too():
    """The nearest other size is measured too, and tells how a library's time grows from none."""
    pairs = {"M": lambda M: -(-M // 2) * 2}
    space = [{"n": 1}, {"n": 2}]
    tuned = tune.autotune(space, lambda M: (), sizes=pairs, fallback_fn=lambda config: True)(
        lambda M, n: M
    )
    assert [tuned(M=M) for M in (1, 0, 2, 0)] == [1, 0, 2, 0]


def test_what_was_measured_inside_a_range_counts_for_its_own_size_shipped_too():
    found = fingerprint(version="7")
    (rank,) = sized(fingerprint=found)
    call([rank], 1900)
    assert call([rank], 2060)[0][1] == {"tile": "library"}
    record = rank.tuned.tune(2060)
    assert record.measured_sizes == (2060,)
    assert call([rank], 2170)[0][1] == {"tile": 128}
    store = MemoryStore()
    for shipped in unpack(pack([record for record, _ in rank.disk.records()])):
        store.put(shipped)
    (there,) = sized(fingerprint=found, disk=store, frozen=True)
    assert [call([there], M)[0][1]["tile"] for M in (2060, 2170)] == ["library", 128]
    assert call([there], 2300)[0][1]  # predicted
    assert there.tuned.tune(2300).measured_sizes == ()


def test_a_library_that_won_is_used_where_no_smaller_size_was_measured():
    (rank,) = sized()
    call([rank], 2304)
    assert call([rank], 2060)[0][1] == {"tile": "library"}
    assert rank.tuned.tune(2060).warm_started_from
    assert call([rank], 2060)[0][1] == {"tile": "library"}


def test_all_ranks_switch_at_one_size():
    """Rank 1 has another cache: what the leader knows is used."""
    leader, other = sized(size=2)
    call([leader, other], 2047)
    call([leader, other], 2175)
    other.disk._records.clear()
    for rank in (leader, other):
        rank.tuned.clear()
    leader_only = leader.disk.records()
    assert list(leader_only)
    for M in (2175, *range(2051, 2175, 4)):
        one, two = call([leader, other], M)
        assert one == two, M
    assert leader.tuned.num_tunings == other.tuned.num_tunings == 2


def test_in_doubt_a_safe_config_is_predicted():
    def cost(rank: int, config: dict[str, Any]) -> float:
        return {"library": 0.11, 1: 0.1}[config["tile"]]

    space = [{"tile": 1}, {"tile": "library"}]
    (rank,) = ranks(cost=cost, space=space, fallback_fn=is_library)
    together([rank], 512)
    rank.frozen = True
    assert together([rank], 576)[0][1] == {"tile": 1}
    assert together([rank], 960)[0][1] == {"tile": "library"}


def broken(config: Any, x: int) -> bool:
    raise ZeroDivisionError("no stages")


def broken_waves(key: Keyed, config: Any) -> float:
    if key.M != 512:
        raise ZeroDivisionError("no stages")
    return 1.0


WITHOUT_WAVES = Sizes("run", {"M": fine_bucket}, broken_waves)


@pytest.mark.parametrize("raising", ["prune_fn", "waves_fn"])
@pytest.mark.parametrize("frozen", [True, False])
def test_what_raises_where_nothing_is_measured_is_told_with_its_cause(frozen, raising):
    """On every rank, frozen or in a capture; the leader's error keeps the exception itself."""
    both = ranks(2, sizes=WITHOUT_WAVES if raising == "waves_fn" else SIZES)
    call(both, 512)
    for rank in both:
        if raising == "prune_fn":
            rank.tuned.prune_fn = broken
        rank.frozen, rank.device.capturing = frozen, not frozen
    errors = call(both, 576)
    for error in errors:
        assert type(error) is (TuningFrozen if frozen else CaptureInProgress)
        cause = f"{raising} raised ZeroDivisionError: no stages on rank 0"
        for part in ("ops.run", "Keyed(576, 'n')", cause):
            assert part in str(error)
    assert isinstance(errors[0].__cause__, ZeroDivisionError)


def test_a_waves_fn_that_raises_ends_all():
    both = ranks(2, sizes=WITHOUT_WAVES)
    call(both, 512)
    leader, other = call(both, 576)
    assert type(leader) is ZeroDivisionError
    assert type(other) is RankDisagreement
    assert "waves_fn of ops.run" in str(other)
    assert "waves_fn raised ZeroDivisionError: no stages" in str(other)


def test_what_is_predicted_in_a_capture_is_measured_after_it():
    (rank,) = ranks()
    call([rank], 512)
    rank.device.capturing = True
    assert call([rank], 576)[0][1] == {"tile": 8}
    rank.device.capturing = False
    call([rank], 576)
    assert rank.tuned.tune(576).warm_started_from == "warm-started from M=512"


def test_ranks_must_be_in_one_range():
    first, second = ranks(2)
    results = in_threads([lambda: first.tuned(512), lambda: second.tuned(4096)])
    assert all(isinstance(result, RankDisagreement) for result in results)
    assert "512" in str(results[0])


def test_a_rank_at_a_new_size_beside_one_at_a_known_size_says_what_to_look_for():
    """Rank 0's call is a hit, which sends nothing and so cannot tell."""
    first, second = ranks(2, seconds=0.5)
    call([first, second], 512)
    result, error = in_threads([lambda: first.tuned(512), lambda: second.tuned(4096)])
    assert result == (512, {"tile": 8})
    assert isinstance(error, TuningTimeout)
    assert error.missing == (0,)
    for part in ("ops.run", "rank(s) 0 did", "key of this rank is Keyed(M=4096", "Keyed(M=512"):
        assert part in str(error)


@pytest.mark.parametrize("size", ["512", 512.0, -1, None, True])
def test_a_size_that_is_none_is_refused(size):
    (rank,) = ranks()
    (error,) = together([rank], size)
    assert isinstance(error, InvalidArgument)
    assert "size M" in str(error)


def test_a_key_without_the_size_is_refused():
    (rank,) = ranks()
    rank.tuned.key_fn = lambda x, **_: (x, "n")
    (error,) = together([rank], 512)
    assert isinstance(error, InvalidArgument)
    assert "a named tuple with the fields M" in str(error)


def test_exact_sizes_are_bounded_and_come_back_without_a_word():
    (rank,) = ranks(max_cached_keys=3)
    for M in range(481, 512):
        call([rank], M)
    assert len(rank.tuned._cached_arguments) == 3
    assert rank.tuned.num_tunings == 1
    rank.ranks.phases.clear()
    call([rank], 481)
    assert rank.ranks.phases == []


def test_records_of_other_functions_keys_and_hardware_are_no_neighbours():
    family = SIZES.family(Keyed(512, ("n", 3)))
    key = lambda value: Key.of("run", value, "fake")  # noqa: E731
    assert family.sizes_of(key(Keyed(640, ("n", 3)))) == (640,)
    assert family.show((640,)) == "M=640"
    for other in (
        Keyed(640, ("n", 4)),
        (640, ("n", 3)),
        Keyed(640, "n"),
        640,
        Keyed("x", ("n", 3)),
    ):
        assert family.sizes_of(key(other)) is None, other
    store = MemoryStore()
    (one,) = ranks(disk=store)
    call([one], 512)
    (other,) = ranks(disk=store)
    other.tuned.fn.__qualname__ = "another"
    call([other], 640)
    assert other.tuned.tune(640).warm_started_from == ""


def test_arguments_of_the_function_are_sizes_too():
    @tune.autotune(
        [{"tile": 1}, {"tile": 2}], lambda x, M, N=3, **_: x, scope="rank", sizes=("M", "N")
    )
    def run(x, M, N=3, tile=1):
        return M, tile

    run("a", 500)
    run("a", M=511, N=4)
    assert run.num_tunings == 1
    run("a", 511, 5)
    assert run.num_tunings == 2
    run("b", 500)
    record = run.tune("a", 511, 5)
    assert record.warm_started_from == "warm-started from M=511, N=4"
    assert "Sized" in json.dumps(record.key.text)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((1,), "names of arguments"), ({"M": 64}, "a function of a size"), ([""], "names of")],
)
def test_bad_sizes_are_refused_where_they_are_given(sizes, expected):
    with pytest.raises(InvalidArgument, match=expected):
        tune.autotune([{"tile": 1}], lambda x: x, sizes=sizes)


def test_a_carried_record_survives_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_DIST_CACHE_DIR", str(tmp_path))

    @tune.autotune([{"tile": 1}, {"tile": 2}], lambda M: 0, scope="rank", sizes=("M",))
    def run(M, tile=1):
        return M, tile

    run(512)
    run(640)
    run.clear()
    record = run.tune(640)
    assert record.warm_started_from == "warm-started from M=512"
    assert run.num_tunings == 2
    run.clear()
    run(704)  # both are found on disk
    assert run.tune(704).warm_started_from == "warm-started from M=640; M=512"
    assert Config({"tile": 1}) in list(run.config_space)


def test_what_safe_fn_returns_tells_configs_apart():
    tuned = tune.autotune(
        [{"n": 1}, {"n": 2}], lambda M: (), sizes=("M",), fallback_fn=lambda config: [1]
    )(lambda M, n: M)
    tuned(M=4096)
    with pytest.raises(InvalidArgument, match=r"result of fallback_fn is \[1\], expected True"):
        tuned(M=3999)


Pair = namedtuple("Pair", "M N")
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
    assert tuned_in(steps_of(1024)).tune("layer", 5).measured_sizes == (5,)
    step = tuned_in(steps_of(128))
    found = step.tune("layer", 1000)
    assert (found.measured_sizes, found.warm_started_from, step.num_tunings) == ((1000,), "", 1)
    assert (
        tuned_in(steps_of(512)).tune("layer", 1500).warm_started_from == "warm-started from M=1024"
    )
    assert tuned_in(steps_of(300)).tune("layer", 1300).warm_started_from == ""


@pytest.mark.parametrize(
    ("before", "sizes", "now"),
    [("M", (500, 512), "MN"), ("MN", (500, 512), "M"), ("MN", (600, 512), "M")],
)
def test_records_made_when_other_names_were_sizes_are_tuned_again(before, sizes, now):
    def of(names):
        def step(m, k, n):
            return n

        return autotune(NS, Pair, scope="rank", sizes=tuple(names))(step)

    of(before).tune(500, 512)
    step = of(now)
    step(*sizes)
    assert step.num_tunings == 1


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
    assert (record.warm_started_from, len(record.trials)) == ("", 12)


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
    assert record.warm_started_from == ""
    assert len(record.trials) == len(space)


@pytest.mark.filterwarnings("ignore::triton_dist.errors.TuningWarning")
def test_safe_fn_and_waves_fn_see_whole_configs_and_keys_where_the_caller_gives_some_values():
    seen = {"fallback": set(), "waves": set()}

    def is_fallback(config):
        seen["fallback"].add((config["algorithm"], config["n"]))
        return config["algorithm"] == "library"

    def waves(key, config):
        seen["waves"].add((key.M, config["algorithm"], config["n"]))
        return 1.0

    space = [{"algorithm": algorithm, "n": n} for algorithm in ("library", "tiles") for n in (1, 2)]

    @autotune(space, Pair, scope="rank", sizes=("M",), fallback_fn=is_fallback, waves_fn=waves)
    def step(m, k, algorithm, n):
        return algorithm, n

    for m in (512, 500):
        assert step(m, 7, n=2, autotune_allow_arg_overwrite=True)[1] == 2
    whole = {("library", 2), ("tiles", 2)}
    assert seen["fallback"] == whole
    assert seen["waves"] == {(M, *each) for M in (511, 512) for each in whole}


def test_a_size_by_keyword_behind_others_by_place():
    @autotune(NS, lambda *others, M: 0, scope="rank", sizes=("M",))
    def step(x, *rest, M, n):
        return M

    assert step.tune(1, 7, 9, M=2000).measured_sizes == (2000,)


def test_a_size_that_key_fn_returns_beside_the_argument_is_said_once_where_it_is_called():
    step = autotune(NS, lambda M: Pair(M, 7), scope="rank", sizes=("M",))(lambda M, n: n)
    with pytest.warns(TuningWarning, match="M is both an argument, which sizes= adds") as said:
        step(500)
    assert [Path(each.filename) for each in said] == [Path(__file__)]
    assert "Remove it from the result of key_fn" in str(said[0].message)
    step(501)
    step(600)
    assert step.num_tunings == 2


def test_a_key_that_gave_way_to_others_is_at_hand_again(monkeypatch):
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_KEYS", "2")
    step = autotune(NS, lambda x: x, scope="rank")(lambda x, n: n)
    for x in (0, 1, 2, 0):
        step(x)
    assert list(step._cached_arguments) == [2, 0]
    assert step.num_tunings == 3


@pytest.mark.parametrize("value", ["inf", "nan", "-1"])
@pytest.mark.parametrize("knob", ["WARM_START_MS", "TIMEOUT"])
def test_times_are_numbers(monkeypatch, knob, value):
    monkeypatch.setenv(f"TRITON_DIST_AUTOTUNE_{knob}", value)
    with pytest.raises(InvalidKnob, match=f"TRITON_DIST_AUTOTUNE_{knob}='{value}', expected"):
        autotune(NS, lambda x: x, scope="rank")(lambda x, n: n)(1)
