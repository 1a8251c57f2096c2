"""A recorded winner that fails today: all ranks tune again, or the error names the record."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import pytest
import torch
import triton

from tests.tuning.fakes import Rank, in_threads, thread_ranks, together
from triton_dist._tuning.engine.choice import add_note
from triton_dist._tuning.engine.components import Hooks
from triton_dist.errors import InvalidArgument, NoValidConfig, TuningWarning

SPACE = [{"n": 1}, {"n": 2}, {"n": 3}]
TOO_LARGE = triton.runtime.errors.OutOfResources(300000, 232448, "shared memory")


class PTXASError(Exception):
    """As Triton's, which is not exported."""


def another_start(before: list[Rank], broken, **options) -> list[Rank]:
    """Ranks of the next start, in which ``broken(rank)`` is what a run of config 2 raises."""

    def cost(rank: int, config: dict[str, int]) -> float:
        error = broken(rank)
        if config["n"] == 2 and error is not None:
            raise error
        return {1: 3.0, 2: 1.0, 3: 6.0}[config["n"]]

    disks = [rank.disk for rank in before]
    return [
        Rank(ranks, SPACE, cost, disk=disk, **options)
        for ranks, disk in zip(thread_ranks(len(disks)), disks, strict=True)
    ]


def tuned(size: int, **options) -> list[Rank]:
    """Ranks that tuned, with config 2 as the winner."""
    nothing = [Rank(ranks, SPACE, lambda *_: 0.0) for ranks in thread_ranks(size)]
    first = another_start(nothing, lambda rank: None, **options)
    assert together(first) == [(1, {"n": 2})] * size
    return first


@pytest.fixture
def shown(caplog: pytest.LogCaptureFixture) -> Callable[[BaseException], str]:
    """What a user sees: before Python 3.11 some errors can carry no note, which is logged then."""

    def show(error: BaseException) -> str:
        text = "".join(traceback.format_exception(error))
        return text if hasattr(error, "add_note") else text + caplog.text

    return show


@pytest.mark.parametrize(
    "error",
    [
        TOO_LARGE,
        PTXASError("Internal Triton PTX codegen error"),
        triton.compiler.errors.CompilationError("", None, "no such layout"),
        RuntimeError("PassManager::run failed"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("failing", [{0, 1}, {0}, {1}], ids=str)
def test_all_ranks_tune_again_when_the_winner_fails_on_one(error, failing):
    before = tuned(2)
    ranks = another_start(before, lambda rank: error if rank in failing else None)
    with pytest.warns(
        TuningWarning, match=r"config \{'n': 2\} of the tuning record .* failed on rank"
    ):
        assert together(ranks) == [(1, {"n": 1})] * 2
    assert [rank.tuned.num_tunings for rank in ranks] == [1, 1]
    for rank in ranks:
        rank.calls.clear()
    assert together(ranks) == [(1, {"n": 1})] * 2
    assert [rank.calls for rank in ranks] == [[{"n": 1}]] * 2
    again = another_start(ranks, lambda rank: error)
    assert together(again) == [(1, {"n": 1})] * 2
    assert [rank.tuned.num_tunings for rank in again] == [0, 0]


@pytest.mark.parametrize("failing", [{0, 1}, {1}], ids=str)
def test_another_error_carries_a_note_that_names_the_record(failing, shown):
    ranks = another_start(tuned(2), lambda rank: KeyError("mine") if rank in failing else None)
    results = together(ranks)
    for rank, result in enumerate(results):
        if rank not in failing:
            assert result == (1, {"n": 2})
            continue
        assert type(result) is KeyError
        assert result.args[0].partition("\n")[0] == "mine"
        assert "config {'n': 2} of the tuning record" in shown(result)
        assert "triton-dist clear run, or set TRITON_DIST_AUTOTUNE_ALWAYS_TUNE=1" in shown(result)
    assert [rank.tuned.num_tunings for rank in ranks] == [0, 0]
    # The choice is kept on all ranks: the next call is a hit, and sends no message.
    phases = [len(rank.ranks.phases) for rank in ranks]
    assert [type(result) for result in together(ranks)] == [type(result) for result in results]
    assert [len(rank.ranks.phases) for rank in ranks] == phases


def test_ranks_that_fail_in_different_ways_do_not_wait_for_one_another(shown):
    errors = [KeyError("mine"), TOO_LARGE]
    ranks = another_start(tuned(2), lambda rank: errors[rank])
    results = together(ranks)
    assert results == errors
    assert all("of the tuning record" in shown(result) for result in results)


def test_a_function_that_changes_its_arguments_is_not_run_twice():
    """It ran on one rank: to tune, and to run again, would change its arguments once more."""
    x = [torch.zeros(1), torch.zeros(1)]
    hooks = Hooks(restored_arguments=("x",))
    ranks = another_start(tuned(2), lambda rank: TOO_LARGE if rank else None, hooks=hooks)
    for rank in ranks:
        rank.key_fn = rank.tuned.key_fn = lambda x, **_: 1
    results = together(ranks, x[0])
    assert results[0][1] == {"n": 2}
    assert results[1] is TOO_LARGE
    again = another_start(tuned(2), lambda rank: TOO_LARGE, hooks=hooks)
    for rank in again:
        rank.key_fn = rank.tuned.key_fn = lambda x, **_: 1
    with pytest.warns(TuningWarning, match="tuned again"):
        assert [result[1] for result in together(again, x[0])] == [{"n": 1}] * 2


def test_a_rank_that_only_asks_for_the_config_keeps_no_other_waiting(shown):
    ranks = another_start(tuned(2), lambda rank: TOO_LARGE if rank else None)
    calls = [lambda: ranks[0].tuned.best_config(1), lambda: ranks[1].tuned(1)]
    first, second = in_threads(calls)
    assert dict(first) == {"n": 2}
    assert second is TOO_LARGE
    assert "of the tuning record" in shown(second)


@pytest.mark.parametrize("setting", ["frozen", "capturing"])
def test_where_nothing_may_be_tuned_the_error_names_the_record(setting, shown):
    (rank,) = another_start(tuned(1), lambda rank: TOO_LARGE)
    rank.frozen, rank.device.capturing = setting == "frozen", setting == "capturing"
    (result,) = together([rank])
    assert result is TOO_LARGE
    assert "of the tuning record" in shown(result)


def test_a_refused_argument_carries_no_note(shown):
    error = InvalidArgument("run", "x", 1, "a tensor")
    (rank,) = another_start(tuned(1), lambda rank: error)
    (result,) = together([rank])
    assert result is error
    assert "of the tuning record" not in shown(result)


def test_no_config_works_any_more():
    ranks = another_start(tuned(2), lambda rank: TOO_LARGE)
    for rank in ranks:
        rank.cost = lambda *_: raises(TOO_LARGE)
    for result in together(ranks):
        assert type(result) is NoValidConfig
        assert "shared memory" in str(result)


def raises(error: Exception) -> float:
    raise error


def test_running_out_of_device_memory_is_not_the_records_fault():
    error = torch.OutOfMemoryError("CUDA out of memory")
    (rank,) = another_start(tuned(1), lambda rank: error)
    assert together([rank]) == [error]
    assert rank.tuned.num_tunings == 0


def test_a_note_before_python_has_notes(caplog):
    class Old(Exception):
        add_note = None

        def __getattribute__(self, name):
            if name == "add_note":
                raise AttributeError(name)
            return super().__getattribute__(name)

    error = Old("mine")
    add_note(error, "and a note")
    assert str(error) == "mine\nand a note"
    add_note(other := Old(1, 2), "and another")
    assert other.args == (1, 2)
    assert "and another" in caplog.text
