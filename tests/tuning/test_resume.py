"""Interrupted tunings resume: nothing is measured twice and the winner is the same. The journal on
disk keeps complete lines and ignores cut-off ones."""

from __future__ import annotations

import errno
import json
import os
import random
import threading
import time
from pathlib import Path

import pytest

from tests.distributed.chaos_rank import MILLISECONDS, Me, Moments, ScriptedTimer, is_victim, tuner
from tests.distributed.chaos_start import attempts, start
from tests.tuning.fakes import Rank, fingerprint, thread_ranks, together
from triton_dist._tuning.engine.components import Hooks
from triton_dist._tuning.search import Racing
from triton_dist._tuning.store import FileJournal, MemoryStore, journal
from triton_dist._tuning.values import Config, Failure, JournalEntry, Measurement, Policy
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
    assert not list(tmp_path.glob("*.journal"))


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
SEARCHES = ("racing", pytest.param("exhaustive", marks=pytest.mark.chaos))
POINTS = 30
IN_EVERY_RUN = 1
SECONDS = 15.0
"""A rank that is killed is noticed at once; one that is slow for its machine is not given up."""


# The fastest is at 17; close ones around it, far ones too, in no order.
SPACE_OF_24 = [{"n": 10 + (7 * place) % 24} for place in range(24)]


def race(me: Me) -> int:
    """What a race of 24 configs chooses; ``CHAOS_FATAL``: the moment at which the victim dies."""
    moments = Moments(int(os.environ["CHAOS_FATAL"]) if is_victim() else None)
    ScriptedTimer.jitter = 0.1

    def times(n: int) -> None:
        os.environ[MILLISECONDS] = str(1.0 + abs(n - 17) / 20)

    chosen: int = tuner(times, SPACE_OF_24, search=os.environ["CHAOS_SEARCH"])(7)
    (me.folder / f"{me.rank}.moments").write_text(str(moments.count))
    return chosen


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


HEAD = {"function": "op", "candidates": ["a", "b", "c"]}
OTHER = {"function": "op", "candidates": ["a"]}
STUCK = Failure("timeout", "rank 1 is stuck", 1)


def entry(n, config="a", outcome=None):
    return JournalEntry(n, config, 4, outcome or Measurement((1.0 + n, 2.0), 1, "maximum"), 0.25)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "key.journal"


def begun(path, head=HEAD, record=None):
    """A journal as the next start of the leader opens it, and what it is told."""
    opened = FileJournal(path)
    return opened, opened.begin(head, record)


def write(path, *entries, head=HEAD):
    opened, _ = begun(path, head)
    for each in entries:
        opened.append(each)
    opened.close()


def entries(path, head=HEAD, record=None):
    opened, known = begun(path, head, record)
    opened.close()
    return list(known)


def test_what_was_appended_is_told_to_the_next_start(path):
    written = [entry(0), entry(1, "b", STUCK), entry(2, "a")]
    write(path, *written)
    assert entries(path) == written
    assert entries(path) == written


def test_each_line_is_written_before_append_returns_and_on_the_disk_at_the_end(path, monkeypatch):
    synced = []

    def slow(file):
        written = path.read_bytes().count(b'"n"')
        time.sleep(0.05)
        synced.append(written)

    monkeypatch.setattr(os, "fsync", slow)
    journal = FileJournal(path)
    journal.begin(HEAD, None)
    for n in range(3):
        journal.append(entry(n))
        assert path.read_bytes().count(b'"n"') == n + 1
    journal.close()
    assert synced[0] == 0
    assert synced[-1] == 3
    assert not any("journal" in thread.name for thread in threading.enumerate())


@pytest.mark.parametrize("keep", [1, 20, -5, -1])
def test_a_line_that_was_cut_off_is_passed_over(path, keep):
    write(path, entry(0))
    whole = path.read_bytes()
    write(path, entry(1))
    added = path.read_bytes()[len(whole) :]
    path.write_bytes(whole + added[:keep])
    assert entries(path) == [entry(0), entry(1)][: 2 if keep == -1 else 1]
    write(path, entry(1, "c"))
    assert entries(path) == [entry(0), entry(1, "c")]


def test_a_cut_off_head_begins_anew(path):
    write(path, entry(0))
    path.write_bytes(path.read_bytes()[:20])
    assert entries(path) == []
    write(path, entry(0))
    assert entries(path) == [entry(0)]


@pytest.mark.parametrize("junk", [b"\xff\xfe\n", b"[1, 2]\n", b'{"n": 1}\n', b"[" * 100_000])
def test_what_is_no_entry_is_passed_over(path, junk):
    write(path, entry(0))
    with open(path, "ab") as file:
        file.write(b"\n" + junk)
    write(path, entry(1))
    assert entries(path) == [entry(0), entry(1)]


def test_an_entry_that_comes_again_replaces_what_followed(path):
    write(path, entry(0), entry(1, "b"), entry(2))
    write(path, entry(1, "c"))
    assert entries(path) == [entry(0), entry(1, "c")]


def test_after_a_gap_nothing_is_believed(path):
    write(path, entry(0), entry(2))
    assert entries(path) == [entry(0)]


def test_a_finished_journal_is_gone_on_with_only_until_its_record_is_there(path):
    opened, _ = begun(path)
    opened.append(entry(0))
    opened.finish("1234")
    opened.close()
    assert entries(path, record=None) == [entry(0)]
    assert entries(path, record="5678") == [entry(0)]
    assert entries(path, record="1234") == []


def test_any_rank_may_quarantine_while_another_leads(path):
    leader, _ = begun(path)
    leader.append(entry(0))
    assert FileJournal(path).quarantine(HEAD, "b", STUCK)
    leader.append(entry(1))
    leader.close()
    assert entries(path) == [entry(0), entry(1)]
    assert FileJournal(path).quarantined(HEAD) == {"b": STUCK}
    assert FileJournal(path).quarantined(OTHER) == {}


def test_a_quarantine_outlives_another_tunings_head_but_not_in_its_name(path):
    assert FileJournal(path).quarantine(HEAD, "b", STUCK)
    assert entries(path) == []
    assert FileJournal(path).quarantined(HEAD) == {"b": STUCK}
    entries(path, OTHER)
    assert FileJournal(path).quarantined(HEAD) == {}


def test_a_second_job_tunes_without_a_journal_and_disturbs_nothing(path):
    first, _ = begun(path)
    first.append(entry(0))
    second, known = begun(path)
    assert known == []
    second.append(entry(0, "c"))
    second.remove()
    first.append(entry(1))
    first.close()
    assert entries(path) == [entry(0), entry(1)]


def test_a_child_of_a_fork_does_not_lead(path):
    """It may outlive its parent, as a worker of a data loader does."""
    (journal, _), (reads, writes), (awaits, says) = begun(path), os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writes)
        os.write(says, b"!")
        os.read(reads, 1)  # until the parent is done
        os._exit(0)
    os.read(awaits, 1)  # it runs
    journal.append(entry(0))
    journal.close()
    assert entries(path) == [entry(0)], "the lock is free, though the child lives"
    os.close(writes)
    os.waitpid(child, 0)


def test_a_follower_removes_its_own_file_and_never_a_leaders(path):
    write(path, entry(0))
    FileJournal(path).remove()
    assert entries(path) == [entry(0)]
    own = path.with_name("own.journal")
    FileJournal(own).quarantine(HEAD, "b", STUCK)
    FileJournal(own).remove()
    assert not own.exists()


def refuses(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_is_full_from_the_beginning_keeps_nothing_and_raises_nothing(path, monkeypatch):
    monkeypatch.setattr(os, "open", refuses)
    opened, known = begun(path)
    assert known == []
    opened.append(entry(0))
    opened.finish("1234")
    opened.remove()
    assert not opened.quarantine(HEAD, "b", STUCK)
    assert opened.quarantined(HEAD) == {}


def test_a_disk_that_fills_up_keeps_what_was_before(path, monkeypatch):
    opened, _ = begun(path)
    opened.append(entry(0))
    with monkeypatch.context() as full:
        full.setattr(journal, "_write", refuses)
        opened.append(entry(1))
    opened.append(entry(2))
    opened.close()
    assert entries(path) == [entry(0)]


def test_a_line_that_the_disk_takes_half_is_the_last(path, monkeypatch):
    opened, _ = begun(path)
    write_all = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, data: write_all(file, data[: len(data) // 2]))
        opened.append(entry(0))
    opened.append(entry(1))
    opened.close()
    assert entries(path) == []


def started(path, *lines):
    """A start of the leader that ends without a word after these."""
    opened, known = begun(path)
    for line in lines:
        line(opened)
    opened.close()
    return known


def tries(config):
    return lambda opened: opened.trying(config)


def learns(n, config):
    return lambda opened: opened.append(entry(n, config))


def spares(config):
    return lambda opened: opened.ended_by_exception(config)


def test_a_config_that_ended_two_starts_is_not_tried_again(path):
    started(path, tries("a"), learns(0, "a"), tries("b"))
    assert FileJournal(path).quarantined(HEAD) == {}
    assert len(started(path, tries("b"))) == 1
    (config, failure), *others = FileJournal(path).quarantined(HEAD).items()
    assert (config, failure.kind, others) == ("b", "crashed", [])
    assert FileJournal(path).quarantined(OTHER) == {}


@pytest.mark.parametrize("end", [learns(0, "a"), spares("a")])
def test_a_config_that_came_to_its_end_or_did_not_end_the_process_is_not_blamed(path, end):
    started(path, tries("a"), end)
    started(path, tries("a"))
    assert FileJournal(path).quarantined(HEAD) == {}
