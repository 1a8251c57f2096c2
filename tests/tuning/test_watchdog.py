"""The watchdog ends what is stuck, and nothing else."""

from __future__ import annotations

import os
import subprocess
import threading
import time

import pytest

from triton_dist._tuning.engine import watchdog as module
from triton_dist._tuning.engine.watchdog import Watchdog
from triton_dist.errors import WATCHDOG_EXIT_STATUS

SHORT, LONG = 0.2, 60.0
PATIENCE = 30.0


@pytest.fixture
def ended(monkeypatch):
    """Set instead of ending this process; the thread that ends it is then done."""
    event = threading.Event()

    def end(status):
        assert status == WATCHDOG_EXIT_STATUS
        event.set()

    monkeypatch.setattr(module, "_end", end)
    return event


class Reports:
    """What a watch says and tells."""

    def __init__(self):
        self.reported, self.told = threading.Event(), threading.Event()

    def report(self):
        self.reported.set()
        return TimeoutError("config {'n': 1} is stuck")

    def tell(self, error):
        assert str(error) == "config {'n': 1} is stuck"
        self.told.set()


@pytest.fixture
def reports():
    return Reports()


def test_code_that_comes_back_in_time_is_left_alone(ended, reports):
    dog = Watchdog()
    with dog.watching(LONG, LONG, reports.report, reports.tell) as watch:
        watch.begin()
        watch.end()
    assert not watch.overdue
    assert not reports.reported.is_set()
    assert not ended.is_set()


def test_code_that_is_stuck_is_reported_told_and_ended(ended, reports, capfd):
    with Watchdog().watching(SHORT, SHORT, reports.report, reports.tell) as watch:
        watch.begin()
        assert ended.wait(PATIENCE)
        assert reports.told.wait(PATIENCE)
        assert watch.overdue
    said = capfd.readouterr().err
    assert "triton_dist: config {'n': 1} is stuck" in said
    assert "test_watchdog.py" in said  # the stacks
    assert f"ends with status {WATCHDOG_EXIT_STATUS}" in said


def test_code_that_comes_back_during_the_grace_is_reported_only(ended, reports):
    with Watchdog().watching(SHORT, LONG, reports.report, reports.tell) as watch:
        watch.begin()
        assert reports.told.wait(PATIENCE)
        watch.end()
    assert watch.overdue
    assert not ended.is_set()


def test_a_report_that_blocks_does_not_stop_the_end(ended):
    never = threading.Event()

    def block():
        never.wait(PATIENCE)
        return TimeoutError("said too late")

    with Watchdog().watching(SHORT, SHORT, block, lambda error: None) as watch:
        watch.begin()
        assert ended.wait(PATIENCE)
    never.set()


def test_time_between_end_and_begin_does_not_count(ended, reports):
    with Watchdog().watching(SHORT, SHORT, reports.report, reports.tell) as watch:
        for _ in range(3):
            watch.begin()
            watch.end()
            time.sleep(2 * SHORT)
    assert not reports.reported.is_set()


def test_time_in_a_pause_does_not_count_and_starts_anew_after_it(ended, reports):
    dog = Watchdog()
    with dog.watching(SHORT, SHORT, reports.report, reports.tell) as watch:
        watch.begin()
        with dog.paused():
            time.sleep(4 * SHORT)
            assert not reports.reported.is_set()
        assert ended.wait(PATIENCE)


def test_a_pause_is_of_its_thread_alone(ended, reports):
    dog = Watchdog()
    paused, done = threading.Event(), threading.Event()

    def pause():
        with dog.paused():
            paused.set()
            done.wait(PATIENCE)

    thread = threading.Thread(target=pause)
    thread.start()
    assert paused.wait(PATIENCE)
    with dog.watching(SHORT, SHORT, reports.report, reports.tell) as watch:
        watch.begin()
        assert ended.wait(PATIENCE)
    done.set()
    thread.join()


def test_a_watch_inside_another_is_on_its_own(ended, reports):
    inner, dog = Reports(), Watchdog()
    with dog.watching(LONG, LONG, reports.report, reports.tell) as watch:
        watch.begin()
        with dog.watching(SHORT, LONG, inner.report, inner.tell) as second:
            second.begin()
            assert inner.told.wait(PATIENCE)
    assert not reports.reported.is_set()


def test_one_thread_watches_all_and_the_first_watch_starts_it(ended, reports):
    def dogs():
        return sum(thread.name == "triton_dist-watchdog" for thread in threading.enumerate())

    before = dogs()
    dog = Watchdog()
    assert dogs() == before
    for _ in range(3):
        with dog.watching(LONG, LONG, reports.report, reports.tell) as watch:
            watch.begin()
        assert dogs() == before + 1


def test_time_in_which_the_process_was_stopped_does_not_count(ended, reports, monkeypatch):
    """All its threads stop, the watchdog too, and the clock goes on."""
    monkeypatch.setattr(module, "_LATE_SECONDS", 0.3)
    dog = Watchdog()
    with dog.watching(1.0, LONG, reports.report, reports.tell) as watch:
        watch.begin()
        with subprocess.Popen(
            ["sh", "-c", f"sleep 0.1; kill -STOP {os.getpid()}; sleep 2; kill -CONT {os.getpid()}"]
        ):
            pass
        time.sleep(0.3)
        assert not watch.overdue
        watch.end()
    assert not reports.reported.is_set()


def test_a_child_that_is_forked_in_the_middle_of_a_watch_is_not_watched(ended, reports):
    dog = module.watchdog
    with dog.watching(LONG, LONG, reports.report, reports.tell) as watch:
        watch.begin()
        dog._changed.acquire()
        try:
            child = os.fork()
            if child == 0:
                with dog.watching(LONG, LONG, reports.report, reports.tell):  # does not hang
                    os._exit(len(dog._watches) - 1)
        finally:
            dog._changed.release()
        assert os.waitpid(child, 0)[1] == 0
