"""``scripts/launch.sh test_<op>.py``: from a command to a checked, tuned, cached result.

Each command costs seconds before its ranks begin, so what only differs in the script's options is
run in ranks that are there at once. The commands that the documentation prints are run in
``tests/docs/test_commands.py``.
"""

from __future__ import annotations

import pytest

from tests import commands
from tests.architecture.source import ROOT
from tests.docs.run_blocks import run_program, run_program_in_ascii
from triton_dist.errors import RanksFailed

SCRIPTS = ROOT / "python" / "triton_dist" / "test" / "nvidia"


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
        return spawn_ranks(2, run_program, path, *options, init=False, timeout=200, env=env)[0]

    return run


CHECK_THEN_FAIL = """
import torch, torch.distributed as dist
from triton_dist.kernels.nvidia import ag_gemm, create_ag_gemm_context
from triton_dist.test.nvidia import test_ag_gemm

test_ag_gemm.finalize_distributed = lambda: None
test_ag_gemm.main()
with create_ag_gemm_context(10, 8, 8, torch.float32, dist.get_rank(), 2) as ctx:
    if dist.get_rank() == 1:
        ag_gemm(torch.ones(5, 9), torch.ones(8, 4), ctx, autotune=False)
    ag_gemm(torch.ones(5, 8), torch.ones(8, 4), ctx, autotune=False)
print("reached the end")
"""


def test_a_command_checks_and_a_rank_that_fails_fails_it(launch, tmp_path):
    """Start the command once: after the check, rank 1 fails."""
    (tmp_path / "failing.py").write_text(CHECK_THEN_FAIL)
    run = launch("failing.py", "--case", "check", "--no-autotune", TRITON_DIST_WAIT_TIMEOUT="5")
    assert "✅ check passed: 2 ranks, cpu" in run.stdout, run.stdout + run.stderr
    assert run.returncode == 1, "the status of the rank that failed"
    error = "triton_dist.errors.InvalidArgument: ag_gemm: "
    assert f"\nlaunch.sh: rank 1 ended with status 1: {error}" in run.stderr
    assert (
        f"frames of triton_dist or Triton: TRITON_DIST_TRACEBACK=full shows all]\n[rank1]: {error}"
        in run.stderr
    )
    assert "python/triton_dist/" not in run.stderr, "its frames are folded"
    assert "ChildFailedError" not in run.stderr
    assert "reached the end" not in run.stdout


def test_check_without_tuning(spawn_ranks, tmp_path, cache):
    """Into a pipe that takes no check mark."""
    options = (
        "--no-autotune", "--no-persistent", "--no-local-copy", "--no-trans_b", "--debug",
        "--dtype", "fp8-block",
    )  # fmt: skip
    path = str(SCRIPTS / "test_ag_gemm.py")
    printed, _ = spawn_ranks(
        2, run_program_in_ascii, path, "--case", "check", *options, init=False, env=cache
    )
    assert "no tuning" in printed
    assert "\ncheck passed: 2 ranks, cpu" in printed
    assert not (tmp_path / "cache").exists()


GEMM_RS = ("--case", "check", "-M", "2600", "-N", "9344", "-K", "18048")


@pytest.mark.parametrize(
    "options",
    [
        (
            "--no-persistent",
            "--no-trans_b",
            "--has_bias",
            "--reduce_st",
            "--dtype",
            "float32",
            "--seed",
            "1",
        ),
        ("--no-fuse_scatter", "--M_range", "2000-4000-2000", "--verify-iters=2", "--dtype=fp8-row"),
    ],
)
def test_gemm_rs_checks(run_script, options):
    printed = run_script("test_gemm_rs.py", "--no-autotune", *GEMM_RS, *options)
    assert printed.count("✅ check passed: 2 ranks, cpu") == 1 + ("--M_range" in options)
    assert "tuned now" not in printed


def test_allreduce_checks(run_script):
    options = (
        "--stress", "--verify_shapes", "2", "--verify_hang", "6", "--iters", "1", "--no-autotune",
        "--dtype", "fp32", "--alignment", "1", "--method", "two_shot", "--seed", "3", "--debug",
        "--simulate_straggler",
    )  # fmt: skip
    assert "✅ check passed: 2 ranks, cpu" in run_script("test_allreduce.py", *options)


def test_all_gather_does_both_cases(run_script):
    few = ("--no-autotune", "--iters", "2", "--warmup_iters", "0", "--max_nbytes", "65536")
    printed = run_script("test_all_gather.py", *few)
    assert "✅ check passed: 2 ranks, cpu" in printed
    assert "interpreted: times are not meaningful" in printed
    assert "1024 bytes:" in printed
    assert "GB/s" not in printed


def test_a_wrong_result_is_an_error(spawn_ranks, tmp_path, cache):
    script = tmp_path / "broken.py"
    script.write_text(
        "import torch\n"
        "from triton_dist.test.nvidia import test_ag_gemm\n"
        "run = test_ag_gemm.AllGatherScript.run\n"
        "test_ag_gemm.AllGatherScript.run = lambda *args: run(*args) * 1.01\n"
        "test_ag_gemm.main()\n"
    )
    arguments = (str(script), "--case", "check", "--no-autotune")
    with pytest.raises(RanksFailed, match="values differ by more than"):
        spawn_ranks(2, run_program, *arguments, init=False, env=cache)
