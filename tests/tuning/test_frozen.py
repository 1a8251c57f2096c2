"""Calls that may not tune: frozen ones use a valid record of any rank or raise on all ranks, and
calls in a CUDA graph capture use a record or the default."""

from __future__ import annotations

import warnings
from contextlib import suppress

import pytest
import torch

from tests.tuning import ops
from tests.tuning.fakes import Rank, fingerprint, thread_ranks, together
from triton_dist import tune
from triton_dist._tuning.store import MemoryStore
from triton_dist.errors import CaptureInProgress, TritonDistError, TuningFrozen, TuningWarning

SPACE = [{"n": n} for n in (2, 1)]


def some(size, **options):
    return [
        Rank(each, SPACE, lambda _, config: config["n"], **options) for each in thread_ranks(size)
    ]


def tuned_disk() -> MemoryStore:
    """Has the record of a rank that tuned alone."""
    (rank,) = some(1)
    rank.tuned(1)
    return rank.disk


@pytest.mark.parametrize("size", [1, 2])
def test_a_call_that_would_tune_is_an_error_on_every_rank_before_anything_runs(size):
    ranks = some(size, frozen=True)
    errors = together(ranks)
    assert [type(error) for error in errors] == [TuningFrozen] * size
    assert [rank.calls for rank in ranks] == [[]] * size
    assert [rank.device.now for rank in ranks] == [0.0] * size
    text = str(errors[-1])
    for part in (
        "ops.run, key 1 on fake: no record. Tuning is forbidden",
        "call the function, or its tune()",
        "unset",
    ):
        assert part in text
    assert f"FROZEN is set on rank(s) {'0' if size == 1 else '0, 1'}." in text
    assert errors[0].ranks == tuple(range(size))
    assert isinstance(errors[0], TritonDistError)
    assert isinstance(errors[0], RuntimeError)


@pytest.mark.parametrize("frozen", [0, 1])
def test_one_rank_is_enough_and_is_named(frozen):
    ranks = some(2)
    ranks[frozen].frozen = True
    for error in together(ranks):
        assert isinstance(error, TuningFrozen)
        assert error.ranks == (frozen,)
        assert f"FROZEN is set on rank(s) {frozen}." in str(error)
    ranks[frozen].frozen = False
    for rank in ranks:
        rank.ranks.phases.clear()
    assert together(ranks) == [(1, {"n": 1})] * 2


@pytest.mark.parametrize("holder", [0, 1])
def test_a_record_of_any_rank_is_used(holder):
    ranks = some(2, frozen=True)
    ranks[holder].disk = tuned_disk()
    assert together(ranks) == [(1, {"n": 1})] * 2
    assert [rank.tuned.num_tunings for rank in ranks] == [0, 0]


def test_a_record_is_used_even_if_it_is_to_be_replaced():
    (rank,) = some(1, frozen=True, always_tune=True, disk=tuned_disk())
    assert rank.tuned(1) == (1, {"n": 1})
    assert rank.tuned.num_tunings == 0


def test_the_reason_why_a_record_is_not_valid_is_said():
    disk = tuned_disk()
    (rank,) = some(1, frozen=True, disk=disk, fingerprint=fingerprint(source={"run": "new"}))
    with pytest.raises(
        TuningFrozen, match=r"in memory is not valid: source: run changed"
    ) as caught:
        rank.tuned.tune(1)
    assert caught.value.reason in str(caught.value)


def test_a_key_that_is_missing_is_named_and_others_go_on():
    (rank,) = some(1, frozen=True, disk=tuned_disk())
    for _ in range(2):
        with pytest.raises(TuningFrozen, match=r"ops\.run, key 5 on fake"):
            rank.tuned(5)
        assert rank.tuned(1) == (1, {"n": 1})


@pytest.mark.parametrize("size", [1, 2])
def test_a_capture_does_not_get_the_default(size):
    ranks = some(size, frozen=True)
    for rank in ranks:
        rank.device.capturing = True
    assert [type(error) for error in together(ranks)] == [TuningFrozen] * size
    assert [rank.calls for rank in ranks] == [[]] * size


def test_the_variable(monkeypatch):
    A, B = torch.ones(2, 3), torch.ones(3, 4)
    ops.matmul.clear()
    ops.ran.clear()
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_FROZEN", "1")
    with pytest.raises(TuningFrozen, match=r"tests\.tuning\.ops\.matmul, key \(\(\(2, 3\)"):
        ops.matmul(A, B)
    assert ops.ran == []
    monkeypatch.delenv("TRITON_DIST_AUTOTUNE_FROZEN")
    record = ops.matmul.tune(A, B)
    ops.matmul.clear()
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_FROZEN", "1")
    assert ops.matmul.tune(A, B).digest == record.digest
    ops.matmul.clear()


def test_a_region_allows_what_the_variables_forbid(monkeypatch):
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE", "0")
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_FROZEN", "1")

    @tune.autotune([{"n": 2}], key_fn=lambda size: size, max_trials=1)
    def work(size, n):
        return n

    with suppress(ZeroDivisionError), tune.autotuning():
        with tune.autotuning():
            pass  # an inner one ends itself alone
        assert (work(3, autotune=False), work.num_tunings) == (2, 0)  # the caller's own word
        assert (work(3), work.num_tunings) == (2, 1)
        raise ZeroDivisionError
    assert (work(4), work.num_tunings) == (2, 1)  # off again: the first config
    monkeypatch.delenv("TRITON_DIST_AUTOTUNE")
    assert work(3) == 2  # chosen, so it is used
    with pytest.raises(TuningFrozen):
        work(4)


@pytest.fixture
def capturing(monkeypatch):
    """One rank in a capture, in which the device must be left alone."""
    (rank,) = some(1)
    rank.device.capturing = True

    def touched(*_, **__):
        raise AssertionError("the device is touched during a capture")

    for word in ("synchronize", "timer", "delay_stream", "flush_cache"):
        monkeypatch.setattr(rank.device, word, touched)
    return rank


def test_the_default_with_one_warning_a_key(capturing):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert capturing.tuned(1) == (1, {"n": 2})
        assert capturing.tuned(5) == (5, {"n": 2})
    assert [str(warning.message).split(":")[0] for warning in caught] == [
        "ops.run, key 1", "ops.run, key 5"
    ]  # fmt: skip
    assert {warning.category for warning in caught} == {TuningWarning}
    assert {warning.filename for warning in caught} == {__file__}
    assert capturing.calls == [{"n": 2}] * 4
    assert capturing.tuned.num_tunings == 0


def test_a_hit_asks_nobody(capturing):
    capturing.device.capturing = False
    (rank,) = some(1, disk=capturing.disk)
    rank.tuned(1)
    assert capturing.tuned(1) == (1, {"n": 1})  # from the record
    capturing.device.is_capturing = None
    assert capturing.tuned(1) == (1, {"n": 1})


def test_tune_refuses(capturing):
    with pytest.warns(TuningWarning), pytest.raises(CaptureInProgress, match=r"Call its tune\(\)"):
        capturing.tuned.tune(1)
