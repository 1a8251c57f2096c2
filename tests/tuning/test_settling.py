"""Whether a wait gave up is looked up outside of what is timed, and is the candidate's failure."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import pytest

from tests.tuning.fakes import SECONDS, FakeDevice, FakeTimer, Rank, thread_ranks, together
from triton_dist._tuning.engine.parts import Hooks
from triton_dist._tuning.values import Failure, Policy
from triton_dist.errors import RankDisagreement, WaitTimeout
from triton_dist.runtime import waits

CANDIDATES = [{"n": 1}, {"n": 2}]
POLICY = Policy(warmup=1, repeat=3)
RUNS = 1 + POLICY.warmup + POLICY.repeat


def wait_timeout() -> Exception:
    return WaitTimeout(rank=0, program="op", flag="arrivals[3]", expected=2, seen=1, seconds=1.0)


class Device(FakeDevice):
    """Lists what happens in trials; has an op that waits, and a graph that repeats its waits."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.gave_up: Exception | None = None
        self.gives: Callable[[], Exception] = wait_timeout

    def synchronize(self, seconds=None) -> None:
        self.events.append("wait")
        super().synchronize(seconds)

    def timer(self) -> Timer:
        return Timer(self)

    def op(self, gives_up: bool) -> None:
        self.events.append("run")
        if gives_up:
            self.gave_up = self.gives()
        assert waits.leave(self.check)

    def check(self) -> Exception | None:
        self.events.append("check")
        found, self.gave_up = self.gave_up, None
        return found


class Timer(FakeTimer):
    def start(self) -> None:
        self._device.events.append("start")
        super().start()

    def stop(self) -> None:
        super().stop()
        self._device.events.append("stop")


def rank_of(ranks, gives_up, **options):
    """A rank whose op gives up in the runs, as ``(rank, n, number of the run of n)``."""
    device, runs = Device(), {1: 0, 2: 0, 3: 0}

    def cost(rank, config):
        number = runs[config["n"]]
        runs[config["n"]] += 1
        if not waits.leave(device.check):  # the call after the tuning
            return 0.0
        device.op((rank, config["n"], number) in gives_up)
        if (rank, config["n"], number, "raises") in gives_up:
            device.op(True)
            raise ValueError("and then it raises")
        return float(config["n"])

    options = {"policy": POLICY} | options
    settling = functools.partial(waits.settling, device, SECONDS)
    return Rank(ranks, CANDIDATES, cost, device=device, settling=settling, **options)


def outcomes(rank):
    return [trial.outcome for trial in rank.tuned.tune(1).trials]


def test_the_timed_part_holds_the_run_alone():
    (rank,) = [rank_of(ranks, ()) for ranks in thread_ranks(1)]
    assert together([rank]) == [(1, {"n": 1})]
    events = rank.device.events
    starts = [place for place, event in enumerate(events) if event == "start"]
    assert len(starts) == 2 * (POLICY.warmup + POLICY.repeat)
    for place in starts:
        assert events[place : place + 3] == ["start", "run", "stop"]
    between = [events[a:b].count("check") for a, b in itertools.pairwise(starts)]
    assert min(between) >= 1  # after each sample, before the next
    assert "check" in events[starts[-1] :]
    first = events.index("run")
    assert events[first : first + 3] == ["run", "wait", "check"]


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("number", range(RUNS))
def test_a_wait_that_gave_up_is_the_failure_of_its_candidate(who, number):
    recovered = []
    hooks = Hooks(recover=recovered.append)
    ranks = [rank_of(each, {(who, 1, number)}, hooks=hooks) for each in thread_ranks(2)]
    assert together(ranks) == [(1, {"n": 2})] * 2
    for first, second in map(outcomes, ranks):
        assert isinstance(first, Failure)
        assert (first.kind, first.rank) == ("timeout", who)
        assert "arrivals[3]" in first.message
        assert not isinstance(second, Failure)
    assert recovered == [1, 1]


@pytest.mark.parametrize(
    "left", [wait_timeout, lambda: RankDisagreement("rows", {0: 4, 1: 8})], ids=["wait", "rows"]
)
def test_a_call_that_raised_leaves_nothing_for_the_next_candidate(left):
    ranks = [rank_of(each, {(1, 1, 2, "raises")}) for each in thread_ranks(2)]
    for rank in ranks:
        rank.device.gives = left
    assert together(ranks) == [(1, {"n": 2})] * 2
    first, second = outcomes(ranks[0])
    assert "and then it raises" in first.message
    assert not isinstance(second, Failure)


@pytest.mark.parametrize("replay", range(POLICY.warmup + POLICY.repeat))
def test_replays_of_a_graph_are_looked_at_too(replay):
    """A replay calls no op, so nobody says anew that there is something to look at."""
    (rank,) = [
        rank_of(ranks, (), policy=Policy(warmup=1, repeat=3, timing="graph"))
        for ranks in thread_ranks(1)
    ]
    device, capture = rank.device, rank.device.capture
    replays = []

    def captured(call, seconds):
        capture(call, seconds)

        def again() -> None:
            replays.append(1)
            device.advance(1.0)
            if len(replays) == replay + 1:
                device.gave_up = WaitTimeout(
                    rank=0, program="op", flag="staged[1]", expected=2, seen=1, seconds=1.0
                )

        return again

    device.capture = captured
    assert together([rank]) == [(1, {"n": 2})]
    first, second = outcomes(rank)
    assert "staged[1]" in first.message
    assert not isinstance(second, Failure)
