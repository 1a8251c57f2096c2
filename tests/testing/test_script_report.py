"""What the test scripts print, on GPUs and in the interpreter."""

from __future__ import annotations

import io

import pytest
import torch.distributed as dist

from triton_dist.test import utils
from triton_dist.testing.opinfo.base import Baseline
from triton_dist.testing.timing import Samples

CANDIDATES = {
    "op": Baseline("own", lambda: None),
    "GEMM alone": Baseline("gemm", lambda: None),
    "all-gather alone": Baseline("transfer", lambda: None),
    "serial": Baseline("peer", lambda: None),
}
TIMES = {"op": 2.5, "GEMM alone": 2.0, "all-gather alone": 1.0, "serial": 3.0}


def printed_times(monkeypatch, capsys, on_gpus):
    monkeypatch.setattr(utils, "is_cuda", lambda: on_gpus)
    samples = {name: Samples((time - 0.1, time, time + 0.1)) for name, time in TIMES.items()}
    utils.report_times("8x8x8", CANDIDATES, samples, "serial", "all-gather")
    return capsys.readouterr().out


def test_times_on_gpus_have_ratios_and_a_legend(monkeypatch, capsys):
    printed = printed_times(monkeypatch, capsys, on_gpus=True)
    (row,) = [line for line in printed.splitlines() if line.startswith("op ")]
    assert row.split() == ["op", "2.500", "2.400-2.600", "1.20", "1.25"]
    assert "limit max(GEMM, all-gather)          2.000" in printed
    assert "x serial: speedup over serial; / limit: time divided by the limit" in printed
    assert utils.NO_TIMES not in printed


def test_interpreted_times_have_a_warning_and_no_ratios(monkeypatch, capsys):
    printed = printed_times(monkeypatch, capsys, on_gpus=False)
    assert utils.NO_TIMES in printed
    (row,) = [line for line in printed.splitlines() if line.startswith("op ")]
    assert row.split() == ["op", "2.500"]
    assert "limit" not in printed
    assert "x serial" not in printed


@pytest.mark.parametrize(
    ("autotune", "variable", "tuned_now", "said"),
    [
        (False, "1", True, "no tuning: default config\n"),
        (True, "0", True, "no tuning: default config\n"),
        (True, "1", True, "config (tuned now): {'n': 7}\n"),
        (True, "1", False, "config (from the cache, no tuning): {'n': 7}\n"),
    ],
)
def test_where_a_config_came_from(monkeypatch, capsys, autotune, variable, tuned_now, said):
    class Op:
        def best_config(self, n):
            return {"n": n}

    monkeypatch.setenv("TRITON_DIST_AUTOTUNE", variable)
    utils.report_tuning(Op(), autotune, tuned_now, 7)
    assert capsys.readouterr().out == said


@pytest.mark.parametrize(("encoding", "mark"), [("utf-8", "✅ "), ("ascii", ""), ("latin-1", "")])
def test_the_mark_stands_where_it_can_be_encoded(monkeypatch, encoding, mark):
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr("sys.stdout", stream)
    utils.report_passed("float16, 8x8x8")
    printed = stream.buffer.getvalue().decode(encoding)
    assert printed == f"{mark}check passed: 2 ranks, cpu, float16, 8x8x8\n"
