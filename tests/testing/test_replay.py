"""Recorded spaces, and runs that are replayed from them."""

from __future__ import annotations

import gzip
import json
import warnings

import pytest

from tests.tuning.fakes import Rank, thread_ranks, together
from triton_dist._tuning.values import Config, Failure, Measurement, Policy, Request
from triton_dist.errors import CandidateFailed, TuningWarning
from triton_dist.testing.replay import RecordedSpace, Replay

RESULTS = [
    {"configuration": {"n": 1}, "invalidity": "correct", "times": {"runtimes": [3.0, 1.0, 2.0]}},
    {"configuration": {"n": 2}, "invalidity": "compile", "times": {}},
    {"configuration": {"n": 3}, "invalidity": "runtime", "times": {}},
]


@pytest.fixture
def space(tmp_path):
    path = tmp_path / "scan_T4.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"results": RESULTS}).encode()))
    return RecordedSpace.read(path)


def test_a_space_is_read(space, tmp_path):
    assert space.name == "scan"
    assert space.configs == tuple(Config({"n": n}) for n in (1, 2, 3))
    first, second, third = (space.runs[config.digest] for config in space.configs)
    assert first == (3.0, 1.0, 2.0)
    assert isinstance(second, Failure)
    assert isinstance(third, Failure)
    assert (second.kind, third.kind) == ("compile", "launch")
    plain = tmp_path / "scan.json"
    plain.write_text(json.dumps({"results": RESULTS}))
    assert RecordedSpace.read(plain) == space


@pytest.mark.parametrize("tree", [{}, [], {"results": [{"configuration": {"n": 1}}]}])
def test_what_is_no_space_is_refused(tmp_path, tree):
    path = tmp_path / "scan.json"
    path.write_text(json.dumps(tree))
    with pytest.raises(ValueError, match="T4"):
        RecordedSpace.read(path)


def test_runs_come_in_order_and_again(space):
    replay = Replay(space.runs)
    first, second, _ = space.configs
    seen = []
    for _ in range(4):
        replay(n=1)
        seen.append(replay.milliseconds)
    assert seen == [3.0, 4.0, 6.0, 9.0]
    with pytest.raises(CandidateFailed, match="compile"):
        replay.run(second)
    assert replay.milliseconds == 9.0
    assert replay.attempt(Request(first, 2), Policy(warmup=1)) == Measurement((2.0, 3.0), 1)


def test_a_config_is_run_once_before_it_is_measured(space):
    replay = Replay(space.runs)
    request = Request(space.configs[0], 1)
    assert replay.attempt(request, Policy(warmup=0)) == Measurement((1.0,), 0)
    assert replay.attempt(request, Policy(warmup=0)) == Measurement((2.0,), 0)
    assert isinstance(replay.attempt(Request(space.configs[2], 1), Policy()), Failure)
    assert replay.milliseconds == 6.0


def test_a_tuning_replayed_through_the_engine_is_the_same(space):
    """The device's clock moves as the recorded runs say."""
    replay = Replay(space.runs)

    def cost(_rank, config):
        before = replay.milliseconds
        replay(**config)
        return replay.milliseconds - before

    (rank,) = [Rank(thread_ranks(1)[0], [{"n": n} for n in (1, 2, 3)], cost)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TuningWarning)  # two of the three failed, when recorded
        assert together([rank]) == [(1, {"n": 1})]
    outcomes = [trial.outcome for trial in rank.tuned.tune(1).trials]
    # one first run, one of warm-up, then three samples
    assert outcomes[0] == Measurement((2.0, 3.0, 1.0), 1, "maximum")
    assert all(isinstance(outcome, Failure) for outcome in outcomes[1:])
