"""Limits of waits: none in production on GPUs, one while candidates are tried; who looks whether a
wait gave up."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from triton_dist.errors import WaitTimeout
from triton_dist.runtime import waits


def test_a_rank_that_shares_its_gpu_looks_in_its_turns_only(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with waits.bounded_waits(1.0):
        alone = waits.limit_polls()
        monkeypatch.setenv("TRITON_DIST_SHARE_GPUS", "1")
        assert waits.limit_polls() == alone // 4
        assert waits.limit_seconds() == 1.0


def test_kernels_on_gpus_wait_as_long_as_it_takes():
    assert waits.limit_seconds() is None
    assert waits.limit_polls() == 0


def test_limits_nest_and_end(monkeypatch):
    monkeypatch.setenv("TRITON_DIST_WAIT_TIMEOUT", "5")
    assert waits.interpreted_limit_seconds() == 5
    with waits.bounded_waits(7):
        assert waits.interpreted_limit_seconds() == 5
        with waits.bounded_waits(2):
            assert waits.limit_seconds() == 2
            assert waits.interpreted_limit_seconds() == 2
            assert waits.limit_polls() > 0
        assert waits.limit_seconds() == 7
    with pytest.raises(KeyError), waits.bounded_waits(2):
        raise KeyError
    assert waits.limit_seconds() is None


def test_polls_fit_an_int32():
    with waits.bounded_waits(1e9):
        assert waits.limit_polls() == 2**31 - 1
    with waits.bounded_waits(0.5):
        assert 0 < waits.limit_polls() < 2**31 - 1


class Device:
    """Lists the waits for it; with ``busy`` it does not finish."""

    def __init__(self) -> None:
        self.waits: list[float | None] = []
        self.busy = False

    def synchronize(self, seconds: float | None = None) -> None:
        self.waits.append(seconds)
        if self.busy:
            raise TimeoutError("busy")


def overdue(flag: str) -> WaitTimeout:
    return WaitTimeout(rank=0, program="op", flag=flag, expected=2, seen=1, seconds=1.0)


class Op:
    """``gave_up``: errors that its check finds, one each time; ``None`` when there is none."""

    def __init__(self, *gave_up: str) -> None:
        self.gave_up = [overdue(flag) for flag in gave_up]
        self.checks = 0

    def check(self) -> WaitTimeout | None:
        self.checks += 1
        return self.gave_up.pop(0) if self.gave_up else None


def test_a_check_is_made_by_the_op_unless_somebody_settles():
    op = Op()
    assert not waits.defer(op.check)
    with waits.deferred_checks(Device(), 3.0):
        assert waits.defer(op.check)
    assert not waits.defer(op.check)


def test_settling_waits_for_the_device_only_if_something_was_left():
    device, op = Device(), Op()
    with waits.deferred_checks(device, 3.0) as run_checks:
        run_checks()
        assert device.waits == []
        waits.defer(op.check)
        waits.defer(op.check)
        assert op.checks == 0
        run_checks()
        assert (op.checks, device.waits) == (1, [3.0])
        run_checks()  # as after the replay of a graph, which leaves nothing
        assert (op.checks, device.waits) == (2, [3.0, 3.0])


def test_all_checks_are_made_and_the_first_error_is_raised():
    ops = Op(), Op("second"), Op("third")
    with waits.deferred_checks(Device(), 3.0) as run_checks:
        for op in ops:
            waits.defer(op.check)
        with pytest.raises(WaitTimeout, match="second"):
            run_checks()
        assert [op.checks for op in ops] == [1, 1, 1]
        run_checks()  # nothing is left to be raised for what comes next


def test_a_device_that_does_not_finish_is_a_timeout_of_another_kind():
    device, op = Device(), Op()
    with waits.deferred_checks(device, 3.0) as run_checks:
        waits.defer(op.check)
        device.busy = True
        with pytest.raises(TimeoutError) as failure:
            run_checks()
        assert not isinstance(failure.value, WaitTimeout)
        assert op.checks == 0


def test_what_a_call_that_raised_has_left_is_not_kept():
    op = Op("first")

    def raises() -> None:
        with waits.deferred_checks(Device(), 3.0):
            waits.defer(op.check)
            raise KeyError

    with pytest.raises(KeyError):
        raises()
    assert (op.checks, op.gave_up) == (1, [])


def test_an_inner_settling_begins_with_what_the_outer_one_holds():
    device, outer_op, inner_op = Device(), Op("outer"), Op()
    with waits.deferred_checks(device, 3.0) as settle_outer:
        waits.defer(outer_op.check)
        with pytest.raises(WaitTimeout, match="outer"), waits.deferred_checks(device, 2.0):
            raise AssertionError("it has not begun")
        with waits.deferred_checks(device, 2.0) as run_checks:
            waits.defer(inner_op.check)
            before = outer_op.checks
            run_checks()
            assert (outer_op.checks, inner_op.checks) == (before, 1)
        before = inner_op.checks
        settle_outer()
        assert inner_op.checks == before


def test_other_threads_check_in_their_calls():
    with waits.deferred_checks(Device(), 3.0), ThreadPoolExecutor(1) as thread:
        assert thread.submit(waits.defer, Op().check).result() is False
