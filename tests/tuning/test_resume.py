"""A tuning that was interrupted is gone on with: nothing is measured twice, the winner is the
same."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.distributed.chaos_start import attempts, start
from tests.tuning.fakes import Rank, fingerprint, thread_ranks, together
from tests.tuning.resume_rank import SEARCHES, race
from triton_dist._tuning.engine.parts import Hooks
from triton_dist._tuning.search import Racing
from triton_dist._tuning.store import FileJournal, MemoryStore
from triton_dist._tuning.values import Config, Failure, Policy
from triton_dist.errors import NoValidConfig, TuningAborted

SPACE = [{"n": n} for n in (4, 3, 1, 2)]


class Killed(BaseException):
    """Ends a tuning at once."""


def cost_is_n(rank, config):
    return float(config["n"])


def killed_at(n, run=1):
    """Costs n, but the process dies in the given run of one config."""
    runs = []

    def cost(rank, config):
        runs.append(config["n"])
        if config["n"] == n and runs.count(n) == run:
            raise Killed
        return float(config["n"])

    return cost


def one(folder, cost=cost_is_n, **options) -> Rank:
    return Rank(thread_ranks(1)[0], SPACE, cost, folder=folder, **options)


def interrupt(rank):
    with pytest.raises(Killed):
        rank.tuned(1)


def runs_of(rank) -> list[int]:
    """Configs that were tried, in order; the call itself, the last run, left out."""
    tried = [config["n"] for config in rank.calls[:-1]]
    return list(dict.fromkeys(tried))


@pytest.mark.parametrize("run", [1, 2, 5])
def test_what_was_measured_is_not_measured_again(tmp_path, run):
    interrupt(one(tmp_path, killed_at(1, run)))
    rank = one(tmp_path)
    assert rank.tuned(1) == (1, {"n": 1})
    assert runs_of(rank) == [1, 2]
    record = rank.tuned.tune(1)
    assert [trial.outcome.samples for trial in record.trials] == [(n,) * 3 for n in (4, 3, 1, 2)]


def test_a_second_interruption_is_gone_on_with_too(tmp_path):
    interrupt(one(tmp_path, killed_at(3)))
    interrupt(one(tmp_path, killed_at(2)))
    rank = one(tmp_path)
    rank.tuned(1)
    assert runs_of(rank) == [2]


def test_within_one_process_the_next_call_goes_on(tmp_path):
    rank = one(tmp_path, killed_at(1))
    interrupt(rank)
    rank.calls.clear()
    assert rank.tuned(1) == (1, {"n": 1})
    assert runs_of(rank) == [1, 2]


def test_once_it_is_finished_the_journal_is_gone(tmp_path):
    rank = one(tmp_path)
    rank.tuned(1)
    assert not list(tmp_path.glob("*.journal"))


def test_told_to_tune_always_it_goes_on_and_begins_anew_only_when_it_was_finished(tmp_path):
    disk = MemoryStore()
    one(tmp_path, disk=disk).tuned(1)
    interrupt(one(tmp_path, killed_at(1), disk=disk, always_tune=True))
    rank = one(tmp_path, disk=disk, always_tune=True)
    rank.tuned(1)
    assert runs_of(rank) == [1, 2]
    rank = one(tmp_path, disk=disk, always_tune=True)
    rank.tuned(1)
    assert runs_of(rank) == [4, 3, 1, 2]


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": fingerprint(source={"run": "5678"})},
        {"fingerprint": fingerprint(software={"torch": "2.9.2", "triton": "3.6.0"})},
        {"prune_fn": lambda config, x: config["n"] != 2},
    ],
)
def test_another_tuning_is_not_gone_on_with(tmp_path, change):
    interrupt(one(tmp_path, killed_at(1)))
    rank = one(tmp_path, **change)
    rank.tuned(1)
    assert runs_of(rank)[:3] == [4, 3, 1]


def test_another_search_takes_what_it_asks_for_too_and_measures_the_rest(tmp_path):
    interrupt(one(tmp_path, killed_at(1)))
    backwards = lambda candidates, policy, incumbent: Racing([*candidates][::-1], policy)  # noqa: E731
    rank = one(tmp_path, search=backwards)
    assert rank.tuned(1) == (1, {"n": 1})


def test_failures_are_told_again_too(tmp_path):
    def fails(rank, config):
        if config["n"] == 3:
            raise RuntimeError("bad PTX")
        if config["n"] == 1:
            raise Killed
        return config["n"]

    interrupt(one(tmp_path, fails))
    rank = one(tmp_path)
    rank.tuned(1)
    assert runs_of(rank) == [1, 2]
    assert rank.tuned.tune(1).trials[1].outcome == Failure("launch", "RuntimeError: bad PTX", 0)


def test_when_all_failed_the_next_start_tries_all_again(tmp_path):
    def fails(rank, config):
        raise RuntimeError("no such device")

    with pytest.raises(NoValidConfig):
        one(tmp_path, fails).tuned(1)
    rank = one(tmp_path)
    rank.tuned(1)
    assert runs_of(rank) == [4, 3, 1, 2]


def test_the_reference_of_check_fn_is_the_first_config_again(tmp_path):
    seen = []
    hooks = Hooks(check=lambda output, reference: seen.append(reference[1]["n"]) or True)
    interrupt(one(tmp_path, killed_at(1), hooks=hooks))
    seen.clear()
    one(tmp_path, hooks=hooks).tuned(1)
    assert seen == [4, 4]


def test_a_budget_of_time_counts_all_starts(tmp_path):
    policy = Policy(warmup=0, repeat=1, max_seconds=1e9)
    interrupt(one(tmp_path, killed_at(1), policy=policy))
    rank = one(tmp_path, policy=Policy(warmup=0, repeat=1, max_seconds=1e-9))
    rank.tuned(1)
    assert len(rank.tuned.tune(1).trials) == 1


def test_a_config_that_left_a_rank_broken_is_skipped_by_the_next_start(tmp_path):
    rank = one(tmp_path)

    def breaks(_, config):
        if config["n"] == 1:
            rank.device.synchronize_error = TimeoutError("still spinning")
            raise RuntimeError("launch failed")
        return config["n"]

    rank.cost = breaks
    with pytest.raises(TuningAborted):
        rank.tuned(1)
    rank = one(tmp_path)
    assert rank.tuned(1) == (1, {"n": 2})
    assert runs_of(rank) == [2]
    failure = rank.tuned.tune(1).trials[2].outcome
    assert (failure.kind, failure.rank) == ("launch", 0)


def test_a_quarantine_in_a_followers_own_folder_counts(tmp_path):
    folders = [tmp_path / "leader", tmp_path / "follower"]
    interrupt(one(folders[0], killed_at(3)))
    (path,) = folders[0].glob("*.journal")
    head = next(json.loads(line)["head"] for line in path.read_text().splitlines() if line)
    stuck = Failure("timeout", "rank 1 is stuck", 1)
    FileJournal(folders[1] / path.name).quarantine(head, Config({"n": 1}).digest, stuck)
    ranks = [
        Rank(rank, SPACE, cost_is_n, folder=folder)
        for rank, folder in zip(thread_ranks(2), folders, strict=True)
    ]
    assert together(ranks) == [(1, {"n": 2})] * 2
    assert ranks[0].tuned.tune(1).trials[2].outcome == stuck
    assert not list(tmp_path.rglob("*.journal"))


# Real processes, killed by the system at any moment: in a message to the others, in the middle of a
# line of the journal, between the record and the end of the journal.

WORLD = 2
POINTS = 30
IN_EVERY_RUN = 2
SECONDS = 15.0
"""A rank that is killed is noticed at once; one that is slow for its machine is not given up."""


@pytest.fixture(scope="module", params=SEARCHES)
def undisturbed(request, tmp_path_factory):
    """The search, and what it chose, how many requests it made, and each rank's moments."""
    folder = tmp_path_factory.mktemp(request.param)
    endings = start(WORLD, race, folder, 0, armed=False, CHAOS_SEARCH=request.param)
    ((chosen,),) = [{ending["chosen"] for ending in endings}]
    moments = [int((folder / f"{rank}.moments").read_text()) for rank in range(WORLD)]
    return request.param, chosen, attempts(folder), moments


def kill_and_go_on(undisturbed, point: int, folder: Path) -> None:
    search, chosen, requests, moments = undisturbed
    dice = random.Random(point)
    victim = dice.randrange(WORLD)
    fatal = str(dice.randrange(moments[victim]))
    env = {"CHAOS_SEARCH": search, "CHAOS_FATAL": fatal}
    endings = start(WORLD, race, folder, victim, seconds=SECONDS, **env)
    assert endings[victim]["error"] == "killed"
    for rank, ending in enumerate(endings):
        assert rank == victim or ending.get("error") == "TuningTimeout" or "chosen" in ending
    endings = start(WORLD, race, folder, victim, armed=False, seconds=SECONDS, **env)
    assert [ending.get("chosen") for ending in endings] == [chosen] * WORLD
    assert attempts(folder) <= requests + 1


@pytest.mark.parametrize("point", range(IN_EVERY_RUN))
def test_killed_at_a_random_point(undisturbed, point, tmp_path):
    kill_and_go_on(undisturbed, point, tmp_path)


@pytest.mark.chaos
@pytest.mark.parametrize("point", range(IN_EVERY_RUN, POINTS))
def test_killed_at_more_random_points(undisturbed, point, tmp_path):
    kill_and_go_on(undisturbed, point, tmp_path)
