"""AllGather-GEMM on GPUs: compiled kernels, copy engines, NVLink; what CPU ranks check, and graphs.

The functions of the ranks are those of tests/distributed.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.architecture.source import ROOT
from tests.distributed import ag_gemm_ranks, bad_input_ranks, op_ranks
from tests.distributed.gemm_calls import AllGatherGEMM
from tests.distributed.test_ag_gemm import (  # noqa: F401
    test_a_reset_lets_copies_go_on,
    test_calls_from_another_thread,
    test_every_schedule_and_both_kernels,
    test_every_size_and_layout,
    test_one_row_with_any_stride,
    test_only_calls_out_of_turn_look_at_their_peers,
    test_transfer_and_consumer_apart,
)
from tests.gpu.op_suite import GPUSlotSuite
from tests.gpu.ranks import few_ranks
from triton_dist.kernels.common.gemm.launch import (
    FUSED_PUSH_CANDIDATES,
    WARP_SPECIALIZED_SPLIT_K_TILES,
)
from triton_dist.kernels.common.gemm.spaces import WARP_SPECIALIZED_TILES

pytestmark = [pytest.mark.timeout(600), pytest.mark.gpu]


class TestAllGatherGEMM(GPUSlotSuite):
    kind = AllGatherGEMM


@few_ranks
def test_shapes_that_fill_the_gpu(on_gpus, rounds):
    number = rounds(6)
    assert set(on_gpus(ag_gemm_ranks.many_tiles, number)) == {20 * number}


@few_ranks
def test_shards_that_the_consumer_sends_itself(on_gpus, rounds):
    number = rounds(8)
    calls = 2 * len(FUSED_PUSH_CANDIDATES) + 4
    assert set(on_gpus(ag_gemm_ranks.fused_push, number)) == {number * calls}


hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="specialised warps are for compute capability 9.x",
)


@few_ranks
@hopper
def test_specialized_warps(on_gpus):
    tiles = len(WARP_SPECIALIZED_TILES) + len(WARP_SPECIALIZED_SPLIT_K_TILES)
    assert on_gpus(ag_gemm_ranks.specialized_warps)[0] == [3 * tiles] * 3


@few_ranks
@hopper
def test_specialized_warps_that_gave_up_leave_nothing_behind(on_gpus):
    overdue = on_gpus(ag_gemm_ranks.specialized_warps_give_up)
    assert len(overdue[0]) == len(WARP_SPECIALIZED_TILES)
    assert not any(overdue[1:])


@few_ranks
def test_methods_of_libraries_alternate_with_ours(on_gpus):
    counts = on_gpus(op_ranks.library_alternating, AllGatherGEMM, 6)
    assert set(counts) == {24 if torch.cuda.device_count() >= len(counts) else 12}


@pytest.mark.parametrize("tune", [False, True])
def test_disjoint_groups_work_at_the_same_time(on_ranks, tune):
    counts = on_ranks(4)(op_ranks.in_groups, [AllGatherGEMM], [[0, 2], [1, 3]], tune)
    assert counts == [3, 4, 3, 4]


@few_ranks
def test_one_rank_that_differs_is_an_error_on_all(on_gpus):
    for seen in on_gpus(bad_input_ranks.one_rank_differs):
        assert {kind for kind, _ in seen} <= {"InvalidArgument", "RankDisagreement"}


@few_ranks
def test_too_little_memory_says_how_much_is_missing(on_gpus):
    for kind, needed, _, message in on_gpus(bad_input_ranks.too_large):
        assert kind == "SymmetricMemoryFull"
        assert f"needs {needed} bytes" in message


@pytest.mark.parametrize(
    "options",
    [
        ["--debug"],
        ["--no-trans_b", "--no-local-copy", "--no-autotune"],
        ["--no-autotune", "--dtype", "bfloat16"],
        ["--no-persistent", "--no-autotune"],
    ],
    ids=" ".join,
)
def test_the_check_of_the_launcher(options, tmp_path):
    unwanted = ("TRITON_INTERPRET", "TRITON_DIST_DEVICE")
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    run = subprocess.run(
        [
            "bash", str(ROOT / "scripts/launch.sh"), "--nproc_per_node=2", "--share-gpus",
            "test_ag_gemm.py", "--case", "check", *options,
        ],
        env=kept | {"PYTHON": sys.executable},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert "✅ check passed: 2 ranks, cuda" in run.stdout
