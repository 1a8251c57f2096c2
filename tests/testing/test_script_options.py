"""The command lines of the test scripts: one style, beside which the older ones mean the same."""

from __future__ import annotations

import importlib

import pytest

from triton_dist import knobs
from triton_dist.test.utils import ScriptParser


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
