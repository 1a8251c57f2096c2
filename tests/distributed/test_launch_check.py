"""``scripts/launch.sh test_<op>.py``: from a command to a checked, tuned, cached result.

Each command costs seconds before its ranks begin, so what only differs in the script's options is
run in ranks that are there at once.
"""

from __future__ import annotations

import pytest

from tests import commands
from tests.architecture.source import ROOT
from tests.docs.run_blocks import run_program

SCRIPTS = ROOT / "python" / "triton_dist" / "test" / "nvidia"

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def cache(tmp_path):
    """Variables that give all runs of a test one cache."""
    return {"TRITON_DIST_CACHE_DIR": str(tmp_path / "cache")}


@pytest.fixture
def launch(tmp_path, cache):
    """Runs launch.sh on CPU ranks."""

    def run(*arguments, **variables):
        return commands.launch(*arguments, cwd=tmp_path, **cache, **variables)

    return run


@pytest.fixture
def run_script(spawn_ranks, cache):
    """Runs a script on two ranks; what rank 0 prints."""

    def run(name, *options, **variables):
        path, env = str(SCRIPTS / name), cache | variables
        return spawn_ranks(2, run_program, path, *options, init=False, timeout=100, env=env)[0]

    return run


def passed(run, ranks):
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"✅ check passed: {ranks} ranks, cpu" in run.stdout
    return run.stdout


def test_check_tunes_then_uses_the_cache(launch):
    check = ("test_ag_gemm.py", "--case", "check")
    first = passed(launch(*check), 2)
    assert "tuned now" in first
    second = passed(launch(*check), 2)
    assert "from the cache, no tuning" in second
    assert "tuned now" not in second


def test_check_on_four_ranks_without_tuning(launch, tmp_path):
    """Into a pipe that takes no check mark."""
    options = (
        "--no-autotune", "--no-persistent", "--no-local-copy", "--no-trans_b", "--debug",
        "--dtype", "bfloat16",
    )  # fmt: skip
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    run = launch("--nproc_per_node=4", "test_ag_gemm.py", "--case", "check", *options, **ascii_only)
    assert run.returncode == 0, run.stderr
    assert "no tuning" in run.stdout
    assert "\ncheck passed: 4 ranks, cpu" in run.stdout
    assert not (tmp_path / "cache").exists()


def shows_times_that_mean_nothing(printed, rows):
    """And no rate or ratio that a GPU would have."""
    table = printed[printed.index("interpreted: times mean nothing") :]
    assert [row for row in rows if f"\n{row} " not in table] == []
    assert [
        word for word in ("TFLOP", "GB/s", "peaks", "x serial", "limit") if word in printed
    ] == []


def test_perf_shows_the_peers(run_script):
    perf = ("--case", "perf", "--M", "512", "--shape_id", "LLaMA-7B", "--no-autotune")
    shows_times_that_mean_nothing(
        run_script("test_ag_gemm.py", *perf),
        ["ag_gemm", "GEMM alone", "all-gather alone", "copy-engine all-gather alone"],
    )


GEMM_RS = ("--case", "check", "-M", "1300", "-N", "4672", "-K", "9024")


def test_gemm_rs_checks_what_it_tuned(run_script):
    printed = run_script("test_gemm_rs.py", *GEMM_RS)
    assert "tuned now" in printed
    assert "✅ check passed: 2 ranks, cpu" in printed


@pytest.mark.parametrize(
    "options",
    [
        ("--no-persistent", "--no-trans_b", "--has_bias", "--dtype", "float16"),
        ("--no-fuse_scatter", "--M_range", "1000-2000-1000", "--verify-iters=2"),
        ("--reduce_st", "--dtype", "float32", "--seed", "1"),
    ],
)
def test_gemm_rs_checks(run_script, options):
    printed = run_script("test_gemm_rs.py", "--no-autotune", *GEMM_RS, *options)
    assert printed.count("✅ check passed: 2 ranks, cpu") == 1 + ("--M_range" in options)
    assert "tuned now" not in printed


def test_gemm_rs_shows_the_peers(run_script):
    small = ("-M", "512", "-N", "2048", "-K", "4096", "--iters", "2", "--warmup", "0")
    shows_times_that_mean_nothing(
        run_script("test_gemm_rs.py", "--no-autotune", *small),
        ["gemm_rs", "GEMM alone", "reduce-scatter alone", "matmul + reduce-scatter"],
    )


STRESS = ("--case", "check", "--verify_shapes", "2", "--verify_hang", "6", "--iters", "1")


def test_allreduce_stress_of_what_it_tuned(launch):
    passed(launch("test_allreduce.py", *STRESS, "--simulate_straggler"), 2)


@pytest.mark.parametrize(
    "options",
    [
        ("--no-autotune", "--dtype", "fp32", "--alignment", "1"),
        ("--no-autotune", "--method", "two_shot", "--dtype", "fp16", "--debug"),
        ("--method", "collective", "--seed", "3"),
    ],
)
def test_allreduce_stress(run_script, options):
    printed = run_script("test_allreduce.py", *STRESS, *options)
    assert "✅ check passed: 2 ranks, cpu" in printed


def test_allreduce_and_all_gather_beside_the_library(run_script):
    few = ("--no-autotune", "--iters", "2", "--warmup_iters", "0")
    printed = run_script("test_allreduce.py", "--max_nbytes", "262144", *few)
    shows_times_that_mean_nothing(printed, [])
    assert [line.split()[0] for line in printed.splitlines() if "the default" in line] == [
        "128",
        "512",
    ]
    printed = run_script("test_all_gather.py", "--max_nbytes", "1048576", *few)
    assert "✅ check passed: 2 ranks, cpu" in printed
    shows_times_that_mean_nothing(printed, [])
    assert "2048 bytes:" in printed


FAILING = """
import os, sys
from triton_dist.utils import finalize_distributed, initialize_distributed
from triton_dist.kernels.nvidia import ag_gemm, create_ag_gemm_context
import torch, torch.distributed as dist
initialize_distributed()
with create_ag_gemm_context(10, 8, 8, torch.float32, dist.get_rank(), 2) as ctx:
    if dist.get_rank() == 1:
        os._exit(3)
    ag_gemm(torch.ones(5, 8), torch.ones(8, 4), ctx, autotune=False)
print("reached the end")
"""


def test_a_rank_that_dies_fails_the_command(launch, tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    run = launch("failing.py", TRITON_DIST_WAIT_TIMEOUT="5")
    assert run.returncode == 3, "the status of the rank that failed"
    assert run.stderr.endswith("launch.sh: rank 1 ended with status 3; what it said is above\n")
    assert "reached the end" not in run.stdout


def test_a_wrong_result_fails_the_command(launch, tmp_path):
    script = tmp_path / "broken.py"
    script.write_text(
        "import torch\n"
        "from triton_dist.test.nvidia import test_ag_gemm\n"
        "run = test_ag_gemm.run_ag_gemm\n"
        "test_ag_gemm.run_ag_gemm = lambda *args: run(*args) * 1.01\n"
        "test_ag_gemm.main()\n"
    )
    run = launch("broken.py", "--case", "check", "--no-autotune")
    assert run.returncode != 0
    assert "check passed" not in run.stdout
    assert "values differ by more than" in run.stdout + run.stderr
    assert "ChildFailedError" not in run.stderr
