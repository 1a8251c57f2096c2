"""While a CUDA graph is captured: a record or the default is used, nothing is tuned or awaited."""

from __future__ import annotations

import warnings

import pytest

from tests.tuning.fakes import Rank, thread_ranks
from triton_dist.errors import CaptureInProgress, TuningWarning

SPACE = [{"n": n} for n in (2, 1)]


def one(**options):
    (rank,) = (
        Rank(each, SPACE, lambda _, config: config["n"], **options) for each in thread_ranks(1)
    )
    return rank


@pytest.fixture
def capturing(monkeypatch):
    """One rank in a capture, in which the device must be left alone."""
    rank = one()
    rank.device.capturing = True

    def touched(*_, **__):
        raise AssertionError("the device is touched during a capture")

    for word in ("synchronize", "timer", "hold", "flush_cache"):
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
    assert capturing.tuned.tuning_count == 0


def test_a_hit_asks_nobody(capturing):
    capturing.device.capturing = False
    rank = one(disk=capturing.disk)
    rank.tuned(1)
    assert capturing.tuned(1) == (1, {"n": 1})  # from the record
    capturing.device.is_capturing = None
    assert capturing.tuned(1) == (1, {"n": 1})


def test_a_record_is_used_even_if_it_is_to_be_replaced(capturing):
    one(disk=capturing.disk).tuned(1)
    capturing.always_tune = True
    assert capturing.tuned(1) == (1, {"n": 1})


def test_tune_refuses(capturing):
    with (
        pytest.warns(TuningWarning),
        pytest.raises(CaptureInProgress, match="Call its tune\\(\\)"),
    ):
        capturing.tuned.tune(1)
