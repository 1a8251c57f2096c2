"""The scheduler of a grid: order, turns, failure, interruption. Without Triton."""

from __future__ import annotations

import functools
import signal
import threading

import pytest

from triton_dist.runtime import cooperative_grid
from triton_dist.runtime.cooperative_grid import CooperativeGrid, pause


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def run(count, body, state=None):
    CooperativeGrid(count, body, {} if state is None else state).run()


def test_no_programs():
    run(0, lambda program: pytest.fail("there is none"))


def ring(count, log):
    """Program i ends after i + 1 did; the last one at once."""
    done = [False] * count + [True]

    def body(program):
        while not done[program + 1]:
            log.append(program)
            pause()
        done[program] = True
        log.append(f"{program} ended")

    return body


def test_every_program_may_wait_for_the_next():
    log = []
    run(6, ring(6, log))
    assert [entry for entry in log if isinstance(entry, str)] == [
        f"{i} ended" for i in reversed(range(6))
    ]


@pytest.mark.parametrize("residents", [1, 2, 3])
def test_few_programs_may_begin_before_one_ends(residents):
    running, most, log = set(), [], []

    def body(program):
        running.add(program)
        most.append(len(running))
        for _ in range(2):
            pause()
        running.remove(program)
        log.append(program)

    CooperativeGrid(7, body, {}, residents).run()
    assert max(most) == residents
    assert sorted(log) == list(range(7))


def test_turns_go_round_robin():
    log = []

    def body(program):
        for _ in range(3):
            log.append(program)
            pause()

    run(3, body)
    assert log == [0, 1, 2] * 3


def test_a_waiting_program_gets_a_turn_whenever_another_ends():
    log, released = [], []

    def body(program):
        if program == 0:
            while not released:
                pause()
        if program == 3:
            released.append(True)
        log.append(program)

    run(6, body)
    assert log == [1, 2, 3, 0, 4, 5]


def test_each_program_finds_the_state_that_it_left():
    state, seen = {}, []

    def body(program):
        state["grid_idx"] = program
        for _ in range(3):
            pause()
            seen.append((program, state["grid_idx"]))

    run(4, body, state)
    assert len(seen) == 12
    assert all(program == index for program, index in seen)


def test_pause_says_whether_another_program_ran():
    answers = []
    run(1, lambda program: answers.append(pause()))
    assert answers == [False]

    def body(program):
        for _ in range(1 + program):
            answers.append((program, pause()))

    run(2, body)
    assert answers[1:] == [(0, True), (1, True), (1, False)]
    assert pause() is False


def test_who_has_looked_in_vain_for_long_looks_less_often(monkeypatch):
    slept = []
    monkeypatch.setattr(cooperative_grid.time, "sleep", slept.append)
    for looks in (0, 4, 10_000):
        pause(looks)
    assert slept == pytest.approx([200e-6, 1e-3, 5e-3])
    slept.clear()

    def body(program):
        while len(slept) < 2:  # for something outside the grid
            pause(4)

    run(3, body)
    assert slept == pytest.approx([1e-3] * 2)


def test_who_says_what_it_waits_for_gets_no_turn_before():
    arrived, turns = [], []

    def body(program):
        if program == 3:
            for number in range(5):
                pause()
                arrived.append(number)
            return
        while len(arrived) <= program:
            pause(0, functools.partial(lambda before: len(arrived) == before, len(arrived)))
            turns.append((program, len(arrived)))

    run(4, body)
    # Each sees every change once until its own has come, and nothing in between.
    assert sorted(turns) == [(0, 1), (1, 1), (1, 2), (2, 1), (2, 2), (2, 3)]


@pytest.mark.parametrize("count", [1, 3])
def test_all_programs_wait_for_something_outside(count, monkeypatch):
    slept = []
    monkeypatch.setattr(cooperative_grid.time, "sleep", slept.append)

    def body(program):
        pause(0, lambda: len(slept) < 5)

    run(count, body)
    assert len(slept) == 5
    assert slept[0] == pytest.approx(200e-6)


def test_only_waiting_programs_cost_a_thread():
    threads = set()

    def body(program):
        threads.add(threading.get_ident())
        if program == 50:
            pause()

    run(100, body)
    assert len(threads) == 2


@pytest.mark.parametrize("failing", [0, 3, 7])
def test_the_first_exception_ends_the_grid(failing):
    unwound = []

    def body(program):
        try:
            if program == failing:
                pause()
                raise LookupError(program)
            while True:
                pause()
        finally:
            unwound.append(program)

    with pytest.raises(LookupError, match=str(failing)):
        run(8, body)
    assert sorted(unwound) == list(range(8))


def test_a_grid_within_a_program():
    log = []

    def outer(program):
        run(2, lambda inner: (pause(), log.append((program, inner))))
        pause()

    run(2, outer)
    assert sorted(log) == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize("count", [1, 4])
def test_an_interrupt_ends_waiting_programs(count):
    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(count, lambda program: [pause() for _ in iter(int, 1)])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
