"""Samples that are the mean of several calls, as ``input_variants_fn`` says."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tuning.fakes import Rank, thread_ranks, together
from triton_dist import tune
from triton_dist._tuning.engine.parts import Hooks
from triton_dist._tuning.values import Policy
from triton_dist.errors import InvalidArgument, RankDisagreement

SPACE = [{"tile": "lucky"}, {"tile": "steady"}]
MILLISECONDS = {("lucky", 1): 1.0, ("lucky", 2): 4.0, ("steady", 1): 2.0, ("steady", 2): 2.0}
"""By tile, and by what the call comes with."""


def ranks(*hooks: Hooks, **options: Any) -> list[Rank]:
    """A rank with each of ``hooks``."""
    made: list[Rank] = []

    def cost(rank: int, config: dict[str, Any]) -> float:
        return MILLISECONDS[config["tile"], made[rank].x]

    for rank, own in zip(thread_ranks(len(hooks)), hooks, strict=True):
        made.append(Rank(rank, SPACE, cost, key_fn=lambda x, **_: "key", hooks=own, **options))
    return made


def varied(x: int, **_: Any) -> list[dict[str, int]]:
    return [{"x": 2}, {"x": 1}]


def test_what_wins_at_one_draw_alone_does_not_win() -> None:
    (alone,), (with_others,) = (
        ranks(Hooks()),
        ranks(Hooks(input_variants=lambda x, **_: [{"x": 2}])),
    )
    assert together([alone]) == [(1, {"tile": "lucky"})]
    assert together([with_others]) == [(1, {"tile": "steady"})]


@pytest.mark.parametrize("timing", ["events", "graph"])
def test_a_sample_is_the_mean_of_a_call_each(timing: str) -> None:
    policy = Policy(warmup=1, repeat=3, timing=timing)
    (rank,) = ranks(Hooks(input_variants=varied), policy=policy)
    record = rank.tuned.tune(1)
    found = {trial.config["tile"]: trial.outcome.samples for trial in record.trials}
    assert found == {"lucky": (2.0,) * 3, "steady": (2.0,) * 3}
    runs = [call["tile"] for call in rank.calls].count("lucky")
    captured = 2 if timing == "graph" else 0  # run once, and captured
    assert runs == 1 + 3 * (captured + policy.warmup + policy.repeat)


@pytest.mark.parametrize("result", [[{"y": 2}], [2]])
def test_what_are_no_arguments_of_the_call_is_refused(result: Any) -> None:
    (rank,) = ranks(Hooks(input_variants=lambda x, **_: result))
    with pytest.raises(InvalidArgument, match="names of arguments of the call: x"):
        rank.tuned(1)
    assert not rank.calls


def test_all_ranks_have_as_many_or_none_goes_on() -> None:
    both = ranks(*(Hooks(input_variants=lambda x, n=n, **_: [{"x": 2}] * n) for n in (1, 2)))
    for error in together(both):
        assert isinstance(error, RankDisagreement)
        assert "rank 0: 2 calls\n  rank 1: 3 calls" in str(error)
    assert not both[0].calls + both[1].calls


def test_what_it_raises_on_one_rank_is_told_on_the_other() -> None:
    def broken(x: int, **_: Any) -> list[dict[str, int]]:
        raise KeyError("no ids")

    told, own = together(ranks(Hooks(input_variants=varied), Hooks(input_variants=broken)))
    assert isinstance(own, KeyError)
    assert isinstance(told, RankDisagreement)
    assert "rank 1: KeyError: 'no ids'" in str(told)


def test_arguments_may_be_given_by_place_or_by_name() -> None:
    seen: list[tuple[Any, ...]] = []

    def input_variants(a: Any, b: Any, *rest: Any, c: Any = 0) -> list[dict[str, Any]]:
        return [{"a": 10}, {"c": 30}]

    @tune.autotune(
        [{"n": 1}, {"n": 2}], key_fn=lambda *_, **__: "key", input_variants_fn=input_variants
    )
    def function(a: Any, b: Any, *rest: Any, c: Any = 0, n: int = 0) -> None:
        seen.append((a, b, rest, c))

    function(1, 2, 3, c=4)
    assert set(seen) == {(1, 2, (3,), 4), (10, 2, (3,), 4), (1, 2, (3,), 30)}
    assert seen[-1] == (1, 2, (3,), 4)


def test_another_vary_fn_is_another_tuning() -> None:
    def function(x: int, n: int) -> int:
        return n

    space = [{"n": 1}, {"n": 2}]
    for input_variants, tunings in ((varied, 1), (varied, 0), (lambda x, **_: [{"x": 3}], 1)):
        tuned = tune.autotune(space, key_fn=lambda x: x, input_variants_fn=input_variants)(function)
        tuned(1)
        assert tuned.tuning_count == tunings


@pytest.mark.parametrize("other", [{"restore": ("x",)}, {"reset_fn": print}])
def test_it_brings_nothing_back(other: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="input_variants_fn"):
        tune.autotune(SPACE, key_fn=lambda x: x, input_variants_fn=varied, **other)(
            lambda x, tile: x
        )
