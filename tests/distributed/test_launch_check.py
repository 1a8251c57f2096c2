"""``scripts/launch.sh test_<op>.py``: from a command to a checked, tuned, cached result."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.architecture.source import ROOT

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def launch(tmp_path):
    """Runs launch.sh on CPU ranks, with a cache that the test's runs share."""
    unwanted = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TRITON_INTERPRET", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    environment |= {
        "PYTHON": sys.executable,
        "TRITON_DIST_DEVICE": "cpu",
        "TRITON_DIST_CACHE_DIR": str(tmp_path / "cache"),
        "GLOO_SOCKET_IFNAME": "lo",
    }

    def run(*arguments, **variables):
        return subprocess.run(
            ["bash", str(ROOT / "scripts" / "launch.sh"), *arguments],
            env=environment | variables,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


def passed(run, ranks):
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"✅ check passed: {ranks} ranks, cpu" in run.stdout
    return run.stdout


def test_check_tunes_then_uses_the_cache_then_tunes_again(launch):
    check = ("test_ag_gemm.py", "--case", "check")
    first = passed(launch(*check), 2)
    assert "tuned now" in first
    second = passed(launch(*check), 2)
    assert "from the cache, no tuning" in second
    assert "tuned now" not in second
    third = passed(launch(*check, TRITON_DIST_AUTOTUNE_ALWAYS_TUNE="1"), 2)
    assert "tuned now" in third


def test_check_on_four_ranks_without_tuning(launch, tmp_path):
    options = (
        "--no-autotune", "--no-persistent", "--no-local-copy", "--no-trans_b", "--debug",
        "--dtype", "bfloat16",
    )  # fmt: skip
    run = launch("--nproc_per_node=4", "test_ag_gemm.py", "--case", "check", *options)
    assert "no tuning" in passed(run, 4)
    assert not (tmp_path / "cache").exists()


def test_perf_shows_the_peers_and_the_limit(launch):
    perf = ("--case", "perf", "--M", "512", "--shape_id", "LLaMA-7B", "--no-autotune")
    run = launch("test_ag_gemm.py", *perf)
    assert run.returncode == 0, run.stdout + run.stderr
    table = run.stdout[run.stdout.index("x serial") :]
    rows = ["ag_gemm", "GEMM alone", "all-gather alone", "copy-engine all-gather alone"]
    for row in [*rows, "all-gather + matmul", "limit max(GEMM, all-gather)"]:
        assert f"\n{row} " in table


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--no-autotune", "--no-persistent", "--no-trans_b", "--has_bias", "--dtype", "float16"),
        ("--no-autotune", "--no-fuse_scatter", "--M_range", "1000-2000-1000", "--verify-iters=2"),
        ("--no-autotune", "--reduce_st", "--dtype", "float32", "--seed", "1"),
    ],
)
def test_gemm_rs_checks(launch, options):
    small = ("-M", "1300", "-N", "4672", "-K", "9024")
    run = launch("test_gemm_rs.py", "--check", *small, *options)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("✅ check passed: 2 ranks, cpu") == 1 + ("--M_range" in options)
    assert ("tuned now" in run.stdout) is (options == ())


def test_gemm_rs_shows_the_peers_and_the_limit(launch):
    small = ("-M", "512", "-N", "2048", "-K", "4096", "--iters", "2", "--warmup", "0")
    run = launch("test_gemm_rs.py", "--no-autotune", *small)
    assert run.returncode == 0, run.stdout + run.stderr
    table = run.stdout[run.stdout.index("x serial") :]
    rows = ["gemm_rs", "GEMM alone", "reduce-scatter alone", "matmul + reduce-scatter"]
    for row in [*rows, "limit max(GEMM, reduce-scatter)"]:
        assert f"\n{row} " in table


@pytest.mark.parametrize(
    "options",
    [
        ("--simulate_straggler",),
        ("--no-autotune", "--dtype", "fp32", "--alignment", "1", "--iters", "1"),
        ("--no-autotune", "--method", "two_shot", "--dtype", "fp16", "--debug", "--iters", "1"),
        ("--method", "collective", "--iters", "1", "--seed", "3"),
    ],
)
def test_allreduce_stress(launch, options):
    run = launch("test_allreduce.py", "--stress", "--verify_shapes", "3", *options)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "✅ check passed: 2 ranks, cpu" in run.stdout


def test_allreduce_and_all_gather_beside_the_library(launch):
    few = ("--no-autotune", "--iters", "2", "--warmup_iters", "0")
    run = launch("test_allreduce.py", "--max_nbytes", "262144", *few)
    assert run.returncode == 0, run.stdout + run.stderr
    assert [line.split()[0] for line in run.stdout.splitlines() if "the default" in line] == [
        "128",
        "512",
    ]
    run = launch("test_all_gather.py", "--max_nbytes", "1048576", *few)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "✅ check passed: 2 ranks, cpu" in run.stdout
    assert "2048 bytes:" in run.stdout


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
    assert run.returncode != 0
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
