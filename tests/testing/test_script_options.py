"""Test scripts: their command lines and what they print."""

from __future__ import annotations

import importlib
import io

import pytest
import torch.distributed as dist

from triton_dist import knobs
from triton_dist.test import utils
from triton_dist.test.utils import ScriptParser
from triton_dist.testing.opinfo.base import Baseline
from triton_dist.testing.timing import Samples


@pytest.fixture
def parse(monkeypatch):
    """What a script makes of a command line."""

    def parse(script, line):
        monkeypatch.setattr("sys.argv", [f"{script}.py", *line.split()])
        module = importlib.import_module(f"triton_dist.test.nvidia.{script}")
        options = vars(module.get_args())
        options.pop("shape", None)
        return options

    return parse


@pytest.mark.parametrize(
    ("script", "line", "meant"),
    [
        ("test_ag_gemm", "", "--case check --M 8192 --dtype fp16"),
        ("test_ag_gemm", "--case perf -M 64", "--case perf --M 64"),
        ("test_gemm_rs", "", "--case perf -M 8192 -N 8192 -K 28672"),
        ("test_gemm_rs", "--check --warmup 7", "--case check --warmup_iters 7"),
        ("test_gemm_ar", "33 1024 4096", "--case perf -M 33 -N 1024 -K 4096"),
        ("test_gemm_ar", "33 1024 4096 --check", "--case check -M 33 -N 1024 -K 4096"),
        ("test_gemm_ar", "--check 33 1024 4096", "--case check --M 33 --N 1024 --K 4096"),
        ("test_gemm_ar", "33 --has_bias 1024 4096", "--has_bias -M 33 -N 1024 -K 4096"),
        ("test_moe_reduce_rs", "8 2 4 3 1 --check --autotune", "--case check 8 2 4 3 1"),
        ("test_moe_reduce_ar", "8 2 4 3 1", "--case perf --dtype fp16 8 2 4 3 1"),
        ("test_allreduce", "", "--case perf"),
        ("test_allreduce", "--stress --dtype fp32", "--case check --dtype float32"),
        ("test_all_gather", "--iters 2 --warmup_iters 1", "--iters 2 --warmup 1"),
        ("test_ag_moe", "--M 2048 --autotune", "--case perf -M 2048 --dtype fp16"),
        ("test_ag_moe", "--M 2048 --iters 10 --warmup_iters 20", "-M 2048 --warmup 20"),
        ("test_ep_a2a", "-M 8192 -N 7168 --check --autotune", "--case check -M 8192 --topk 8"),
        ("test_ep_a2a", "", "-M 4096 -N 7168 -G 256 --dtype bf16 --drop_ratio 0.1"),
        ("test_ep_ll_a2a", "--quant_group_size 128", "--case perf -M 8 --verify-iters 5"),
    ],
)
def test_older_options_mean_what_they_meant(parse, script, line, meant):
    assert parse(script, line) == parse(script, meant)


def test_a_range_of_rows_has_its_last(parse):
    assert [*parse("test_gemm_rs", "--M_range 8-16-4")["M_range"]] == [8, 12, 16]


def test_all_gather_does_both_cases_unless_told(parse):
    assert [parse("test_all_gather", line)["case"] for line in ("", "--case perf")] == [
        None,
        "perf",
    ]


@pytest.mark.parametrize(
    ("script", "line", "said"),
    [
        ("test_gemm_ar", "33 1024", "2 sizes, expected 3 (M N K) or none"),
        ("test_gemm_rs", "--dtype int8", "invalid choice: 'int8'"),
        ("test_ag_gemm", "--foo", "unrecognized arguments: --foo"),
        ("test_gemm_rs", "--verify-iters 0", "--verify-iters: '0': expected an integer, 1 or more"),
        ("test_gemm_rs", "--M_range 8-4-1", "--M_range: '8-4-1': expected FIRST-LAST-STEP, 1 <="),
        ("test_gemm_rs", "--M_range 5-x-1", "--M_range: '5-x-1': expected FIRST-LAST-STEP"),
        ("test_gemm_rs", "--M_range 1-2-0", "--M_range: '1-2-0': expected FIRST-LAST-STEP"),
        ("test_allreduce", "--iters 0", "--iters: '0': expected an integer, 1 or more"),
        ("test_allreduce", "--verify_shapes 0", "--verify_shapes: '0': expected an integer"),
        ("test_ep_a2a", "--use_aot", "--use_aot: kernels are compiled at the first call, or come"),
        ("test_allreduce", "--alignment 0", "--alignment: '0': expected an integer, 1 or more"),
    ],
)
def test_mistakes_end_with_a_sentence(parse, capsys, script, line, said):
    with pytest.raises(SystemExit) as end:
        parse(script, line)
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_rank_0_alone_is_heard_and_others_wait_for_it(monkeypatch, capsys):
    monkeypatch.setenv(knobs.rank.variable, "1")
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    for line, status in (["--case", "no"], 2), (["--help"], 0):
        with pytest.raises(SystemExit) as end:
            ScriptParser("", ["check"], "check").parse_args(line)
        assert end.value.code == status
    assert len(slept) == 1, "who asks for help has made no mistake"
    assert capsys.readouterr() == ("", "")


CANDIDATES = {
    "op": Baseline("own", lambda: None),
    "GEMM alone": Baseline("gemm", lambda: None),
    "all-gather alone": Baseline("transfer", lambda: None),
    "serial": Baseline("baseline", lambda: None),
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
    assert utils.TIMES_NOT_MEANINGFUL not in printed


def test_interpreted_times_have_a_warning_and_no_ratios(monkeypatch, capsys):
    printed = printed_times(monkeypatch, capsys, on_gpus=False)
    assert utils.TIMES_NOT_MEANINGFUL in printed
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
