"""What a tuning says: lines, a bar, a table, and logs beside the record."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import logging
import os
import re
import sys
import time
import warnings
from pathlib import Path

import pytest

from tests.tuning.fakes import Rank, thread_ranks, together
from triton_dist._tuning import store
from triton_dist._tuning.engine.channel import Clock
from triton_dist._tuning.engine.components import Hooks
from triton_dist._tuning.engine.progress import Progress
from triton_dist._tuning.engine.report import summary
from triton_dist._tuning.search import Exhaustive, Racing
from triton_dist._tuning.store import FileLog
from triton_dist._tuning.values import Config, Failure, Key, Measurement, Trial, TuningRecord
from triton_dist._warn import deferred_warnings, warn
from triton_dist.errors import NoValidConfig, TuningWarning
from triton_dist.tune import autotune

from .fakes import fingerprint

SPACE = [{"n": n} for n in (4, 2, 3, 1)]


def cost(rank, config):
    if config["n"] == 3:
        raise RuntimeError("no such kernel\nimage")
    return config["n"]


def tuned_ranks(folder, size=1, cost=cost, **options):
    ranks = [Rank(each, SPACE, cost, folder=folder, **options) for each in thread_ranks(size)]
    return ranks, together(ranks)


def fails(rank, config):
    raise ZeroDivisionError


def events(folder: Path) -> list[dict]:
    (path,) = folder.glob("*.log.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_and_table(tmp_path, capsys):
    tuned_ranks(tmp_path, size=2, verbose=True)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == (
        "autotune ops.run, key 1: no record; tuning 4 configs (0 pruned) on 2 ranks"
    )
    assert lines[1].startswith("  [1/4] 4.0000 ms {'n': 4}  (best 4.0000 ms, ")
    assert lines[1].endswith(" s left)")
    assert (
        "[3/4] failed, launch on rank 0: RuntimeError: no such kernel image: {'n': 3}" in lines[3]
    )
    assert "(best 2.0000 ms, 1 failed, " in lines[3]
    assert lines[4] == "  [4/4] 1.0000 ms {'n': 1}  (best 1.0000 ms, 1 failed)"
    assert lines[5].split() == ["ms", "spread", "to", "best", "to", "default", "samples", "config"]
    assert lines[6].endswith("{'n': 1}  <- winner")
    assert lines[6].split()[:5] == ["1.0000", "0.0%", "1.000x", "0.250x", "3"]
    assert lines[8].endswith("{'n': 4}  <- default")
    assert lines[9].startswith("  the winner by rank: rank 0 was the slowest in 3 of 3 samples")
    assert lines[10].startswith("  to best, to default: time relative to the fastest config")
    assert "1 x launch, the first: RuntimeError: no such kernel image" in lines[11]
    assert "compile 0.0 s, measure " in lines[12]
    assert re.search(r"search \d+\.\d s, agree \d+\.\d s, other \d+\.\d s$", lines[12])
    assert "best of 3 measured (1 failed or pruned)" in lines[13]
    assert len(lines) == 14


def record(*outcomes):
    trials = tuple(Trial.of(Config({"n": n}), each) for n, each in enumerate(outcomes))
    return TuningRecord(Key("f", "1", "fake"), fingerprint(), trials, "now", 2.0)


def test_the_table_has_the_top_and_the_default():
    slow_first = [Measurement((10.0 - n, 10.0 - n, 11.0 - n), 0) for n in range(9)]
    default = Config({"n": 0}).digest
    lines = summary(record(*slow_first), default, {"measure": 1.0})
    shown = [line.partition("{")[2] for line in lines if "{" in line]
    assert shown[0] == "'n': 8}  <- winner"
    assert [text[:6] for text in shown[1:]] == ["'n': 7", "'n': 6", "'n': 5", "'n': 4", "'n': 0"]
    assert "and 3 more" in lines[-3]
    assert "0.200x" in lines[1]


def test_the_table_without_a_default_or_a_spread():
    failed = Failure("compile", "word " * 100, 0)
    lines = summary(
        record(failed, Measurement((1.0,), 0), failed, Failure("timeout", "late", 1)),
        Config({"n": 0}).digest,
        {},
    )
    assert lines[1].split()[:5] == ["1.0000", "-", "1.000x", "-", "1"]
    assert lines[3].startswith("  2 x compile, the first: word word")
    assert len(lines[3]) < 250
    assert lines[4] == "  1 x timeout, the first: late"


def test_pruned_configs_are_named():
    pruned = [Failure("pruned", "fits dropped it")] * 25
    lines = summary(record(Measurement((1.0,), 0), *pruned), "", {})
    named = [line for line in lines if line.startswith("  pruned: ")]
    assert named == [f"  pruned: {{'n': {n}}}, fits dropped it" for n in range(1, 21)]
    assert "  and 5 more were pruned" in lines


class _Gone:
    """Standard error that nobody reads any more."""

    def isatty(self):
        return False

    def write(self, text):
        raise BrokenPipeError

    flush = write


@pytest.mark.parametrize("stderr", ["none", "pipe", "closed"])
def test_no_call_fails_for_a_report_that_cannot_be_written(tmp_path, capsys, monkeypatch, stderr):
    streams = {"none": None, "pipe": _Gone(), "closed": io.StringIO()}
    streams["closed"].close()
    monkeypatch.setattr(sys, "stderr", streams[stderr])
    monkeypatch.setattr(warnings, "showwarning", _write_like_python)
    monkeypatch.setattr(logging, "raiseExceptions", True)
    logger = logging.getLogger("triton_dist.tuning")
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler(sys.stderr)])
    monkeypatch.setattr(logger, "level", logging.INFO)
    monkeypatch.setattr(logger, "propagate", False)
    warnings.simplefilter("always", TuningWarning)
    rank = Rank(thread_ranks(1)[0], SPACE, mostly, folder=tmp_path, verbose=True)
    assert rank.tuned(1) == (1, {"n": 1})
    assert capsys.readouterr().out == ""


def _write_like_python(message, *_):
    with contextlib.suppress(OSError):
        if sys.stderr is not None:
            sys.stderr.write(str(message))


def test_a_bar_on_a_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    tuned_ranks(tmp_path, verbose=True, search=Racing)
    out, err = capsys.readouterr()
    assert out == ""
    assert "best of 3 measured" in err
    # A race asks again for configs in the middle: what stays is how many were tried.
    last = [line for line in err.splitlines() if "best 1.0000 ms, 1 failed" in line][-1]
    assert re.findall(r"\d/4", last) == ["4/4"]


def test_the_bar_is_taken_down_when_the_tuning_fails(tmp_path, capsys, monkeypatch):
    import rich.progress

    stopped = []
    stop = rich.progress.Progress.stop
    monkeypatch.setattr(
        rich.progress.Progress, "stop", lambda bar: (stopped.append(bar), stop(bar))
    )
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    _, (error,) = tuned_ranks(tmp_path, cost=fails, verbose=True)
    assert isinstance(error, NoValidConfig)
    assert stopped


def mostly(rank, config):
    if config["n"] > 1:
        raise RuntimeError(f"no room for {config['n']}")
    return config["n"]


def test_a_choice_is_stored_before_a_warning_of_its_tuning_is_raised(tmp_path):
    ranks = [Rank(each, SPACE, mostly, folder=tmp_path) for each in thread_ranks(2)]
    warned, result = together(ranks)  # pytest makes warnings errors
    assert isinstance(warned, TuningWarning)
    assert together(ranks) == [result, result] == [(1, {"n": 1})] * 2
    assert [rank.tuned.num_tunings for rank in ranks] == [1, 1]


def test_a_warning_does_not_replace_an_exception():
    @deferred_warnings()
    def warn_and_raise():
        warn("a warning that is an error", TuningWarning)
        raise KeyError

    with pytest.raises(KeyError):
        warn_and_raise()


def test_most_configs_fail_is_one_warning_with_the_first_cause(tmp_path):
    ranks = [Rank(each, SPACE, mostly, folder=tmp_path) for each in thread_ranks(1)]
    line = inspect.currentframe().f_lineno + 2
    with pytest.warns(TuningWarning) as caught:
        ranks[0].tuned(1)
    (warning,) = caught
    assert (
        "autotune ops.run, key 1: 3 of 4 configs failed, the first, {'n': 4}: launch on rank 0: "
        "RuntimeError: no room for 4" in str(warning.message)
    )
    assert (warning.filename, warning.lineno) == (__file__, line)


def test_half_of_the_configs_fail_and_pruned_ones_do_not_count(tmp_path):
    def half(rank, config):
        return 1 / (config["n"] > 1)

    _, results = tuned_ranks(tmp_path, cost=half, prune_fn=lambda config, x: config["n"] < 3)
    assert results == [(1, {"n": 2})]


def test_all_that_a_verbose_call_says_is_logged_without_it(tmp_path, caplog, capsys):
    caplog.set_level(logging.DEBUG, "triton_dist")
    tuned_ranks(tmp_path, size=2)
    assert {entry.name for entry in caplog.records} == {"triton_dist.tuning"}
    logged = [(entry.levelname, entry.message) for entry in caplog.records]
    assert len(logged) == 14
    assert logged[0][0] == "INFO"
    assert logged[0][1].startswith("autotune ops.run, key 1: no record; tuning 4 configs")
    assert [level for level, _ in logged[1:5]] == ["DEBUG"] * 4
    assert "best of 3 measured" in logged[-1][1]
    assert capsys.readouterr() == ("", "")


def test_the_library_configures_no_logging():
    logger = logging.getLogger("triton_dist")
    assert [type(each) for each in logger.handlers] == [logging.NullHandler]
    assert logger.level == logging.NOTSET
    assert logger.propagate


class SlowSearch(Exhaustive):
    def ask(self):
        time.sleep(0.02)
        return super().ask()

    def tell(self, request, outcome):
        time.sleep(0.02)
        super().tell(request, outcome)


def test_events_of_a_tuning(tmp_path, monkeypatch):
    prepare = Hooks(prepare=lambda x, n: time.sleep(0.02))
    monkeypatch.setattr(Progress, "store_outcome", slowly(Progress.store_outcome))
    tuned_ranks(tmp_path, size=2, hooks=prepare, search=SlowSearch)
    begin, *outcomes, winner = events(tmp_path)
    assert begin["event"] == "begin"
    assert (begin["function"], begin["key"], begin["ranks"]) == ("ops.run", "1", 2)
    assert (begin["candidates"], begin["pruned"]) == (4, 0)
    assert [event["shown"] for event in outcomes] == [f"{{'n': {n}}}" for n in (4, 2, 3, 1)]
    assert {event["event"] for event in outcomes} == {"outcome"}
    assert outcomes[0]["samples"] == [4.0, 4.0, 4.0]
    assert outcomes[2]["failure"]["kind"] == "launch"
    assert (winner["event"], winner["shown"], winner["ms"]) == ("winner", "{'n': 1}", 1.0)
    phases = winner["phases"]
    assert set(phases) == {"compile", "measure", "search", "agree", "other"}
    assert phases["compile"] >= 0.08
    assert phases["search"] >= 0.16
    assert phases["other"] >= 0.08
    assert sum(phases.values()) == pytest.approx(winner["seconds"], abs=0.01)
    assert all("time" in event for event in events(tmp_path))


def slowly(function):
    def call(*args):
        time.sleep(0.02)
        return function(*args)

    return call


def test_time_of_earlier_starts_is_accounted_for(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Progress, "seconds", 100.0)  # as after a start that goes on
    tuned_ranks(tmp_path, verbose=True)
    spent = capsys.readouterr().err.splitlines()[-2]
    assert spent.startswith("  of 100.0 s: compile ")
    parts = re.findall(r"([\d.]+) s(?:,|$)", spent)
    assert sum(map(float, parts)) == pytest.approx(100, abs=0.3)


def test_each_rank_has_a_log_that_says_what_it_is_at(tmp_path):
    tuned_ranks(tmp_path, size=2)
    for rank in range(2):
        (path,) = tmp_path.glob(f"*.rank-{rank}.log")
        text = path.read_text()
        assert f"rank {rank}: autotune ops.run, key 1" in text
        assert text.index("[2/4] 3 samples of {'n': 2}") < text.index("[2/4] 2.0000 ms")
        assert "best of 3 measured" in text


def test_what_ended_a_tuning_is_logged(tmp_path):
    _, (error,) = tuned_ranks(tmp_path, cost=fails)
    assert isinstance(error, NoValidConfig)
    assert events(tmp_path)[-1]["event"] == "ended"
    assert events(tmp_path)[-1]["error"].startswith("NoValidConfig: ")
    (path,) = tmp_path.glob("*.rank-0.log")
    assert "ended by NoValidConfig" in path.read_text()


def test_logs_lie_beside_the_record_and_a_cached_result_adds_nothing():
    tuned = autotune([{"n": 1}, {"n": 2}], lambda x: x, scope="rank")(lambda x, n: n)
    tuned(1)
    folder = Path(os.environ["TRITON_DIST_CACHE_DIR"])
    (jsonl,) = folder.rglob("*.log.jsonl")
    (record,) = folder.rglob("*.json")
    assert jsonl.parent == record.parent
    assert jsonl.name == f"{record.stem}.log.jsonl"
    before = jsonl.read_text()
    tuned.clear()
    tuned(1)
    assert (tuned.num_tunings, jsonl.read_text()) == (1, before)


def test_a_disk_that_becomes_full_is_no_error(tmp_path):
    log = FileLog(tmp_path / "a.json", 0)
    log.event("begin", n=1)

    class Full:
        def write(self, text):
            raise OSError(28, "No space left on device")

        def close(self):
            raise OSError(28, "No space left on device")

    log.close()
    log._events._file = Full()
    log.event("outcome", n=2)
    log.event("outcome", n=3)
    log.close()
    assert [event["n"] for event in events(tmp_path)] == [1]


def test_lines_of_several_writers_stay_whole(tmp_path):
    logs = [FileLog(tmp_path / "a.json", 0) for _ in range(4)]
    for n in range(50):
        for log in logs:
            log.event("outcome", n=n, text="x" * 500)
    for log in logs:
        log.close()
    lines = (tmp_path / "a.log.jsonl").read_text().splitlines()
    assert len([json.loads(line) for line in lines]) == 200


def test_a_log_line_is_one_write_to_a_file_that_stays_open(tmp_path, monkeypatch):
    """A candidate takes tens of milliseconds at least: this takes some microseconds."""
    log = FileLog(tmp_path / "a.json", 0)
    log.line("the file is open")
    monkeypatch.setattr(store.log, "make_folder", None)
    monkeypatch.setattr(store.log, "open_regular", None)
    monkeypatch.setattr(os, "fsync", None)
    for n in range(3):
        log.line(f"line {n}")
        lines = (tmp_path / "a.rank-0.log").read_text().splitlines()
        assert lines[-1].endswith(f" line {n}")  # before the file is closed
    log.close()


def test_a_phase_within_a_phase_does_not_count():
    clock = Clock()
    with clock.phase("compile"), clock.phase("agree"):
        time.sleep(0.01)
    with pytest.raises(ValueError, match="measured"), clock.phase("measure"):
        raise ValueError("measured")
    with clock.phase("agree"):
        pass
    assert clock.seconds["compile"] >= 0.01
    assert clock.seconds["agree"] < clock.seconds["compile"]
