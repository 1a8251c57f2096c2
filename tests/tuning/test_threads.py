"""Tuned functions called from several threads, and from one another."""

from __future__ import annotations

import math
import threading
import time

import torch

from tests.commands import python
from tests.tuning.fakes import in_threads
from triton_dist._tuning.engine.watchdog import watchdog
from triton_dist._tuning.shared import Gate
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
    assert tuned.tuning_count == 1


def test_sixteen_threads_on_sixteen_keys():
    tuned = make(lambda x, n: x)
    assert in_threads([lambda x=x: tuned(x) for x in range(16)]) == list(range(16))
    assert tuned.tuning_count == 16


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


def test_a_tuned_function_calls_a_tuned_function_both_cold():
    inner = make(lambda x, n: x + 1)
    outer = make(lambda x, n: inner(x) + inner(x + 1))
    assert outer(1) == 5
    assert (outer.tuning_count, inner.tuning_count) == (1, 2)
    assert outer(1) == 5


def test_both_cold_in_many_threads():
    inner = make(lambda x, n: x + 1)
    outer = make(lambda x, n: inner(x))
    assert in_threads([lambda: outer(1), lambda: inner(1)] * 8) == [2] * 16
    assert (outer.tuning_count, inner.tuning_count) == (1, 1)


def test_a_function_that_calls_itself():
    def run(x, n):
        return 1 if x == 0 else x * tuned(x - 1)

    tuned = make(run)
    assert tuned(4) == 24
    assert tuned.tuning_count == 5


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


def test_a_backward_pass_on_another_thread_calls_a_tuned_function():
    threads = set()

    def double(x, n):
        threads.add(threading.get_ident())
        return 2 * x

    inner = make(double, key_fn=len)

    @torch.enable_grad()
    def train(x, n):
        x = x.detach().requires_grad_()
        Deep.apply(x, 70, inner).sum().backward()
        return x.grad

    step = make(train, key_fn=len)
    assert torch.equal(step(torch.ones(3)), torch.full((3,), 2.0))
    assert torch.equal(step(torch.ones(5)), torch.full((5,), 2.0))
    assert threading.get_ident() not in threads
    assert (step.tuning_count, inner.tuning_count) == (2, 2)


ENDS_SLOWLY = """
import ctypes, sys, threading, time, torch
from triton_dist.runtime.inherited import InheritedValue

class Slow:
    def __del__(self):
        time.sleep(0.5)

def work():
    value, slow = InheritedValue("value"), Slow()
    value.put(value.put(1))
    count = sys.getrefcount(slow)
    torch._C._stash_obj_in_tls("slow", slow)
    if sys.getrefcount(slow) == count:  # torch 2.11 takes a reference without adding one
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(slow))

thread = threading.Thread(target=work)
thread.start()
thread.join()
print("joined")
"""


def test_a_process_waits_at_its_exit_for_threads_that_torch_still_cleans_up():
    """``join`` returned; torch drops what the thread put, which takes as long as under load."""
    ended = python("-c", ENDS_SLOWLY)
    assert (ended.returncode, ended.stdout) == (0, "joined\n"), ended.stderr


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


def test_a_backward_pass_in_a_backward_pass():
    def nested(function):
        @torch.enable_grad()
        def run(x, n):
            x = x.detach().requires_grad_()
            Deep.apply(x, 70, function).sum().backward()
            return x.grad

        return make(run, key_fn=len)

    inner = make(lambda x, n: 2 * x, key_fn=len)
    middle = nested(inner)
    outer = nested(middle)
    assert torch.equal(outer(torch.ones(3)), torch.full((3,), 2.0))
    assert [each.tuning_count for each in (outer, middle, inner)] == [1, 1, 1]


def test_who_worked_for_a_tuning_waits_for_the_next_one_as_any_other():
    world, alone = Gate(), Gate()
    order = []

    def enter(gate, name):
        with gate.turn():
            order.append(name)

    with world.turn():
        in_backward(lambda: enter(alone, "alone, meanwhile"))
        in_backward(lambda: enter(world, "meanwhile"))
    inside, leave = threading.Event(), threading.Event()

    def other():
        with world.turn():
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
    gate, inside = Gate(), []

    def enter():
        with gate.turn():
            inside.append(1)
            time.sleep(0.05)
            assert sum(inside) == 1
            inside.append(-1)

    with gate.turn():
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
            seen.append(watch.due)
        seen.append(watch.due)

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
            seen.append(watch.due)

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
        threading.Timer(0.2, lambda: (seen.append(watch.due), leave.set())).start()
        make(lambda x, n: x)(1)
        seen.append(watch.due)
        watch.end()
    thread.join()
    assert seen[0] == math.inf > seen[1]
