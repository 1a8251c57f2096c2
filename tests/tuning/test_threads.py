"""Tuned functions called from several threads and from one another, and the watchdog, which ends
only code that is stuck."""

from __future__ import annotations

import math
import os
import subprocess
import threading
import time

import pytest
import torch

from tests.tuning.fakes import in_threads
from triton_dist._tuning.engine import watchdog as module
from triton_dist._tuning.engine.watchdog import Watchdog, watchdog
from triton_dist._tuning.shared import TuningLock
from triton_dist.errors import WATCHDOG_EXIT_STATUS
from triton_dist.tune import autotune


def make(run, key_fn=lambda x: x, space=({"n": 2}, {"n": 1}), **options):
    return autotune(list(space), key_fn, scope="rank", **options)(run)


def test_sixteen_threads_on_a_cold_key_tune_once():
    start = threading.Barrier(16)
    tuned = make(lambda x, n: (x, threading.Event().wait(n * 1e-4))[0])

    def body():
        start.wait()
        return tuned(1), tuned(1)

    assert in_threads([body] * 16) == [(1, 1)] * 16
    assert tuned.num_tunings == 1


def test_sixteen_threads_on_sixteen_keys():
    tuned = make(lambda x, n: x)
    assert in_threads([lambda x=x: tuned(x) for x in range(16)]) == list(range(16))
    assert tuned.num_tunings == 16


def test_a_thread_that_fails_leaves_the_key_to_the_others():
    failed = threading.Event()

    def run(x, n):
        if not failed.is_set():
            failed.set()
            raise KeyboardInterrupt
        return x

    tuned = make(run)

    def body():
        try:
            return tuned(1)
        except KeyboardInterrupt:
            return "interrupted"

    results = in_threads([body] * 8)
    assert sorted(results, key=str) == [1] * 7 + ["interrupted"]


def test_both_cold_in_many_threads():
    inner = make(lambda x, n: x + 1)
    outer = make(lambda x, n: inner(x))
    assert in_threads([lambda: outer(1), lambda: inner(1)] * 8) == [2] * 16
    assert (outer.num_tunings, inner.num_tunings) == (1, 1)


def test_a_function_that_calls_itself():
    def run(x, n):
        return 1 if x == 0 else x * tuned(x - 1)

    tuned = make(run)
    assert tuned(4) == 24
    assert tuned.num_tunings == 5


class Deep(torch.autograd.Function):
    """Its backward pass is inside so many others that torch gives it another thread, as all are
    given that run on a GPU."""

    @staticmethod
    def forward(ctx, x, depth, last):
        ctx.rest = (depth, last)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        depth, last = ctx.rest
        if depth == 0:
            return last(gradient), None, None
        with torch.enable_grad():
            x = gradient.detach().requires_grad_()
            Deep.apply(x, depth - 1, last).backward(torch.ones_like(x))
        return x.grad, None, None


_STASHED: list[object] = []
"""Torch 2.11 takes a reference of what is stashed without adding one."""


def as_worker(name, slot):
    """Make this thread one that works for the thread of ``slot``, as torch does for a pass."""
    _STASHED.append(slot)
    torch._C._stash_obj_in_tls(name, slot)


def in_backward(body):
    """Run ``body`` on another thread, for which this one waits."""
    with torch.enable_grad():
        x = torch.ones(1, requires_grad=True)
        Deep.apply(x, 70, lambda gradient: (body(), gradient)[1]).sum().backward()


def test_backward_passes_on_other_threads_call_tuned_functions():
    threads = set()

    def double(x, n):
        threads.add(threading.get_ident())
        return 2 * x

    def nested(function):
        @torch.enable_grad()
        def run(x, n):
            x = x.detach().requires_grad_()
            Deep.apply(x, 70, function).sum().backward()
            return x.grad

        return make(run, key_fn=len)

    inner = make(double, key_fn=len)
    middle = nested(inner)
    outer = nested(middle)
    for size in (3, 5):
        assert torch.equal(outer(torch.ones(size)), torch.full((size,), 2.0))
    assert threading.get_ident() not in threads
    assert [each.num_tunings for each in (outer, middle, inner)] == [2, 2, 2]


def test_who_worked_for_a_tuning_waits_for_the_next_one_as_any_other():
    world, alone = TuningLock(), TuningLock()
    order = []

    def enter(tuning_lock, name):
        with tuning_lock.hold():
            order.append(name)

    with world.hold():
        in_backward(lambda: enter(alone, "alone, meanwhile"))
        in_backward(lambda: enter(world, "meanwhile"))
    inside, leave = threading.Event(), threading.Event()

    def other():
        with world.hold():
            inside.set()
            leave.wait(10)
            order.append("the other")

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(10)
    threading.Timer(0.2, leave.set).start()
    in_backward(lambda: enter(world, "afterwards"))
    thread.join()
    assert order == ["alone, meanwhile", "meanwhile", "the other", "afterwards"]


def test_those_that_one_thread_waits_for_take_turns():
    tuning_lock, inside = TuningLock(), []

    def enter():
        with tuning_lock.hold():
            inside.append(1)
            time.sleep(0.05)
            assert sum(inside) == 1
            inside.append(-1)

    with tuning_lock.hold():
        state = torch._C._get_obj_in_tls("triton_dist.tuning")

        def helper():
            as_worker("triton_dist.tuning", state)
            enter()

        in_threads([helper] * 3)
    assert inside == [1, -1] * 3


def test_a_trial_is_paused_by_who_tunes_in_its_backward_pass():
    seen = []

    def tune_inside():
        seen.append(watchdog.is_inside())
        with watchdog.paused():
            seen.append(watch.deadline)
        seen.append(watch.deadline)

    with watchdog.watching(60.0, 1.0, lambda: TimeoutError(), lambda error: None) as watch:
        watch.begin()
        in_backward(tune_inside)
        watch.end()
    inside, paused, due = seen
    assert inside
    assert paused == math.inf > due
    assert not watchdog.is_inside()


def test_a_trial_is_paused_until_the_last_of_those_that_it_waits_for_has_tuned():
    early, late, seen = threading.Event(), threading.Event(), []

    with watchdog.watching(60.0, 1.0, lambda: TimeoutError(), lambda error: None) as watch:
        watch.begin()
        state = torch._C._get_obj_in_tls("triton_dist.watches")

        def helper(come: threading.Event, go: threading.Event):
            as_worker("triton_dist.watches", state)
            with watchdog.paused():
                come.set()
                go.wait(10)
            seen.append(watch.deadline)

        first = threading.Event()
        threads = [
            threading.Thread(target=helper, args=(late, first)),
            threading.Thread(target=helper, args=(early, late)),
        ]
        threads[1].start()
        early.wait(10)
        threads[0].start()
        threads[1].join()
        first.set()
        threads[0].join()
        watch.end()
    assert seen[0] == math.inf > seen[1]


def test_a_trial_does_not_run_while_it_waits_for_its_turn():
    inside, leave, seen = threading.Event(), threading.Event(), []

    def slow(x, n):
        inside.set()
        leave.wait(10)

    thread = threading.Thread(target=make(slow), args=(1,))
    thread.start()
    inside.wait(10)
    with watchdog.watching(60.0, 1.0, lambda: TimeoutError(), lambda error: None) as watch:
        watch.begin()
        threading.Timer(0.2, lambda: (seen.append(watch.deadline), leave.set())).start()
        make(lambda x, n: x)(1)
        seen.append(watch.deadline)
        watch.end()
    thread.join()
    assert seen[0] == math.inf > seen[1]


SHORT, LONG = 0.2, 60.0
PATIENCE = 30.0


@pytest.fixture
def ended(monkeypatch):
    """Set instead of ending this process; the thread that ends it is then done."""
    event = threading.Event()

    def end(status):
        assert status == WATCHDOG_EXIT_STATUS
        event.set()

    monkeypatch.setattr(module, "_exit", end)
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


def test_code_that_is_stuck_is_reported_told_and_ended(ended, reports, capfd):
    with Watchdog().watching(SHORT, SHORT, reports.report, reports.tell) as watch:
        watch.begin()
        assert ended.wait(PATIENCE)
        assert reports.told.wait(PATIENCE)
        assert watch.is_overdue
    said = capfd.readouterr().err
    assert "triton_dist: config {'n': 1} is stuck" in said
    assert "test_threads.py" in said  # the stacks
    assert f"ends with status {WATCHDOG_EXIT_STATUS}" in said


def test_code_that_comes_back_during_the_grace_is_reported_only(ended, reports):
    with Watchdog().watching(SHORT, LONG, reports.report, reports.tell) as watch:
        watch.begin()
        assert reports.told.wait(PATIENCE)
        watch.end()
    assert watch.is_overdue
    assert not ended.is_set()


def test_a_report_that_blocks_does_not_stop_the_end(ended):
    unblock, notified = threading.Event(), threading.Event()

    def block():
        unblock.wait(PATIENCE)
        return TimeoutError("reported too late")

    with Watchdog().watching(SHORT, SHORT, block, lambda error: notified.set()) as watch:
        watch.begin()
        assert ended.wait(PATIENCE)
    unblock.set()
    assert notified.wait(PATIENCE)  # otherwise the report is printed during the next test


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
    monkeypatch.setattr(module, "_STOPPED_DELAY_SECONDS", 0.3)
    dog = Watchdog()
    with dog.watching(1.0, LONG, reports.report, reports.tell) as watch:
        watch.begin()
        with subprocess.Popen(
            ["sh", "-c", f"sleep 0.1; kill -STOP {os.getpid()}; sleep 2; kill -CONT {os.getpid()}"]
        ):
            pass
        time.sleep(0.3)
        assert not watch.is_overdue
        watch.end()
    assert not reports.reported.is_set()


def test_a_child_that_is_forked_in_the_middle_of_a_watch_is_not_watched(ended, reports):
    dog = module.watchdog
    with dog.watching(LONG, LONG, reports.report, reports.tell) as watch:
        watch.begin()
        dog._watches_changed.acquire()
        try:
            child = os.fork()
            if child == 0:
                with dog.watching(LONG, LONG, reports.report, reports.tell):  # does not hang
                    os._exit(len(dog._watches) - 1)
        finally:
            dog._watches_changed.release()
        assert os.waitpid(child, 0)[1] == 0
