"""Measurements of a config: runs, samples, checks, graphs, and samples over several inputs."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.tuning.fakes import SECONDS, FakeDevice, FakeTimer, Rank, thread_ranks, together
from triton_dist import tune
from triton_dist._tuning.engine.channel import Channel, Step
from triton_dist._tuning.engine.components import Hooks
from triton_dist._tuning.engine.trial import Sampler
from triton_dist._tuning.values import Config, Failure, Policy
from triton_dist.errors import InvalidArgument, RankDisagreement, WaitTimeout
from triton_dist.runtime import waits
from triton_dist.runtime.device.cpu import CpuDevice
from triton_dist.runtime.ranks import SoloRank


class Agreement(Channel):
    """Of one rank: there is nobody to wait for. Notes what a sampler does, in order."""

    def __init__(self, order=None, meet=lambda: None):
        super().__init__(SoloRank(), "op", SECONDS, SECONDS)
        self.order, self._meet = [] if order is None else order, meet

    def all_gather(self, step, value, user_seconds=0.0):
        self.order.append("meet")
        self._meet()
        return super().all_gather(step, value, user_seconds)

    def device_barrier(self):
        self.order.append("line up")


def sample(device, call, policy, number, ranks=None, run_checks=lambda: None, reset=lambda: None):
    sampler = Sampler(device, ranks or Agreement(), policy, SECONDS, run_checks)
    return sampler.sample(Step("measure"), call, number, reset)


def test_warm_up_runs_are_not_samples():
    device, durations = FakeDevice(), iter([50.0, 40.0, 1.0, 2.0, 3.0])
    call = lambda: device.advance(next(durations))  # noqa: E731
    assert sample(device, call, Policy(warmup=2), 3) == (1.0, 2.0, 3.0)
    assert device.flushes == 5


def test_what_happens_while_ranks_meet_is_not_timed():
    device = FakeDevice()
    ranks = Agreement(meet=lambda: device.advance(100.0))
    assert sample(device, lambda: device.advance(1.0), Policy(0), 2, ranks) == (1.0, 1.0)


def test_ranks_are_lined_up_after_what_holds_the_device():
    order = []

    class Recording(FakeDevice):
        def flush_cache(self):
            order.append("flush")

        def delay_stream(self, queueing=0.0):
            order.append("hold")

    sample(
        Recording(),
        lambda: order.append("run"),
        Policy(warmup=0),
        2,
        Agreement(order),
        run_checks=lambda: order.append("run_checks"),
        reset=lambda: order.append("reset"),
    )
    run = ["run_checks", "reset", "meet", "flush", "hold", "line up", "run"]
    assert order == [*run, *run, "run_checks"]


def test_the_device_is_held_for_as_long_as_queueing_took():
    held = []

    class Recording(FakeDevice):
        def delay_stream(self, queueing=0.0):
            held.append(queueing)

    naps = iter([0.02, 0.0, 0.0])
    sample(Recording(), lambda: time.sleep(next(naps)), Policy(warmup=0), 3)
    assert held[0] == 0.0
    assert held[1] > held[2] > 0.8 * held[1] >= 0.8 * 0.02  # but not for good


def test_the_first_sample_of_a_config_is_held_for_as_long_as_its_first_run_took_to_queue():
    """A library's call may take the host longer than the device: its time is not the host's."""
    held = []

    class Recording(FakeDevice):
        def delay_stream(self, queueing=0.0):
            held.append(queueing)

    slow, quick = (Step("measure", Config({"n": n})) for n in (1, 2))
    device = Recording()
    sampler = Sampler(device, Agreement(), Policy(warmup=0), SECONDS, lambda: None)
    sampler.note_queueing_seconds(slow.config, 5e-4)
    sampler.note_queueing_seconds(quick.config, 2.0)  # it was compiled then
    for at in (quick, slow, quick):
        sampler.sample(at, lambda: None, 1, lambda: None)
    assert held[0] == 1e-3
    assert held[1] == 5e-4
    assert held[2] < 1e-3


class Full(FakeDevice):
    def flush_cache(self):
        raise MemoryError("no room for the buffer")


def refuse():
    raise MemoryError("no room for a copy")


@pytest.mark.parametrize(
    ("device", "fails"),
    [(Full(), {}), (FakeDevice(), {"reset": refuse}), (FakeDevice(), {"run_checks": refuse})],
    ids=["flush", "reset", "run_checks"],
)
def test_a_rank_that_cannot_begin_meets_and_lines_up_all_the_same(device, fails):
    ranks, runs = Agreement(), []
    with pytest.raises(MemoryError, match="no room"):
        sample(device, lambda: runs.append(1), Policy(1), 4, ranks, **fails)
    assert (ranks.order, runs) == (["meet", "line up"] * 5, [])


def test_no_flush_when_the_policy_says_so():
    device = FakeDevice()
    sample(device, lambda: None, Policy(warmup=1, flush=False), 1)
    assert device.flushes == 0


def test_a_call_that_fails_is_not_repeated_but_meeting_is():
    ranks, runs = Agreement(), []

    def call():
        runs.append(1)
        if len(runs) == 2:
            raise ValueError("second run")

    with pytest.raises(ValueError, match="second run"):
        sample(FakeDevice(), call, Policy(warmup=1), 4, ranks)
    assert (len(runs), ranks.order) == (2, ["meet", "line up"] * 5)


def test_a_device_that_does_not_finish_is_a_timeout():
    device = FakeDevice()
    device.synchronize_error = TimeoutError("not finished")
    with pytest.raises(TimeoutError):
        sample(device, lambda: None, Policy(), 1)


def test_a_graph_is_captured_after_the_first_run_and_its_replay_is_measured():
    policy = Policy(warmup=1, repeat=3, timing="graph")
    ranks = [Rank(r, [{"n": 1}, {"n": 2}], lambda _, c: c["n"], policy=policy) for r in two()]
    assert together(ranks) == [(1, {"n": 1})] * 2
    for rank in ranks:
        assert rank.device.captures == 2
        # first run, two in capture, one of warm-up, three samples; and the call itself
        assert [call["n"] for call in rank.calls] == [1] * 7 + [2] * 7 + [1]


def test_what_one_rank_cannot_capture_no_rank_replays():
    policy = Policy(warmup=1, repeat=3, timing="graph")
    ranks = [Rank(r, [{"n": 1}, {"n": 2}], lambda _, c: c["n"], policy=policy) for r in two()]

    class Refusing(FakeDevice):
        def capture(self, call, seconds):
            replay = super().capture(call, seconds)
            if self.captures == 1:
                raise RuntimeError("operation not permitted when stream is capturing")
            return replay

    ranks[1].device = Refusing()
    assert together(ranks) == [(1, {"n": 2})] * 2
    outcome = ranks[0].tuned.tune(1).trials[0].outcome
    assert isinstance(outcome, Failure)
    assert (outcome.kind, outcome.rank) == ("launch", 1)
    assert "not permitted" in outcome.message
    assert [[call["n"] for call in rank.calls].count(1) for rank in ranks] == [3, 3]


def two():
    return thread_ranks(2)


def test_numbers_by_device_and_search():
    def runs(device, search, timing="events"):
        policy = Policy.for_device(device, timing=timing, search=search)
        return policy.warmup, policy.repeat

    assert Policy.for_device("cuda", timing="events", search="racing").rounds == (1, 2, 5)
    assert Policy.for_device("cpu", timing="events", search="racing").rounds == (2,)
    shared = Policy.for_device("cuda", timing="events", search="racing", gpu_is_shared=True)
    assert (shared.rounds, shared.repeat) == ((2,), 4)
    assert runs("cuda", "exhaustive") == (3, 10)
    assert runs("cuda", "racing") == (0, 10)
    assert runs("cuda", "racing", "graph") == (1, 10)
    assert runs("cpu", "exhaustive") == (1, 4)
    assert runs("cpu", "racing") == runs("cpu", "racing", "graph") == (0, 4)


def test_another_timing_is_another_policy():
    eager, graph = (
        Policy.for_device("cuda", timing=t, search="racing") for t in ("events", "graph")
    )
    assert eager.fingerprint_fields() != graph.fingerprint_fields()


def test_nothing_is_captured_on_cpu_ranks():
    def call():
        raise AssertionError("it is not run")

    assert CpuDevice().capture(call, 1.0) is call


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
        assert waits.defer(self.check)

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
        if not waits.defer(device.check):  # the call after the tuning
            return 0.0
        device.op((rank, config["n"], number) in gives_up)
        if (rank, config["n"], number, "raises") in gives_up:
            device.op(True)
            raise ValueError("and then it raises")
        return float(config["n"])

    options = {"policy": POLICY} | options
    deferred_checks = functools.partial(waits.deferred_checks, device, SECONDS)
    return Rank(ranks, CANDIDATES, cost, device=device, deferred_checks=deferred_checks, **options)


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


@pytest.mark.parametrize("timing", ["events", "graph"])
def test_a_sample_is_the_time_of_the_slowest_input(timing: str) -> None:
    policy = Policy(warmup=1, repeat=3, timing=timing)
    (rank,) = ranks(Hooks(input_variants=varied, worst_input=True), policy=policy)
    record = rank.tuned.tune(1)
    found = {trial.config["tile"]: trial.outcome.samples for trial in record.trials}
    assert found == {"lucky": (4.0,) * 3, "steady": (2.0,) * 3}


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
        assert tuned.num_tunings == tunings


@pytest.mark.parametrize("other", [{"restore": ("x",)}, {"reset_fn": print}])
def test_it_brings_nothing_back(other: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="input_variants_fn"):
        tune.autotune(SPACE, key_fn=lambda x: x, input_variants_fn=varied, **other)(
            lambda x, tile: x
        )
