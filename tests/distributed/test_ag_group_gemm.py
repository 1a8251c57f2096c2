"""AllGather + grouped GEMM over real processes: the kernels in the interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import ag_group_gemm_ranks as ranks
from triton_dist.kernels.nvidia.allgather_group_gemm.algorithms import ALGORITHMS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_size_and_layout(spawn_ranks, dtype):
    calls = len(ranks.LAYOUTS) * sum(len({sizes[0], 1}) for sizes in ranks.SIZES)
    assert spawn_ranks(2, ranks.every_operand, dtype) == [calls] * 2


def test_every_routing_and_way(spawn_ranks):
    calls = len(ranks.ROUTINGS) * len(ranks.DEFAULTS) // 2
    assert spawn_ranks(3, ranks.every_routing) == [calls] * 3


def test_every_candidate_gives_the_same(spawn_ranks):
    assert spawn_ranks(3, ranks.every_config) == [len(ALGORITHMS.config_space()) + 3] * 3


def test_any_rank_may_be_late(spawn_ranks):
    # One program at a time, which waits beside others that have not begun.
    room = {"TRITON_DIST_RESIDENT_PROGRAMS": "1"}
    assert spawn_ranks(3, ranks.late_ranks, env=room) == [3 * len(ranks.DEFAULTS)] * 3


def test_a_call_that_gave_up_leaves_nothing_behind(spawn_ranks):
    flags = [f"ag_group_gemm.{each}" for each in ("arrivals0", "arrivals0")]
    assert spawn_ranks(2, ranks.give_up_and_start_again) == [flags, []]


def test_a_call_takes_few_launches(spawn_ranks):
    of_map = ["kernel_count_routes", "kernel_map_blocks"]
    for seen in spawn_ranks(2, ranks.launches):
        assert seen == {
            "arrivals": [*of_map, "kernel_grouped_gemm", "kernel_finish_epoch"],
            "serial": [*of_map, "kernel_all_gather", "kernel_grouped_gemm"],
        }


def test_a_kernel_that_a_script_tunes_is_used(spawn_ranks):
    assert spawn_ranks(2, ranks.autotuned_kernel) == [2, 2]


def test_tuned_over_the_ranks(spawn_ranks):
    assert spawn_ranks(2, ranks.tuned) == [(1, 3)] * 2


def test_without_a_context(spawn_ranks):
    assert spawn_ranks(2, ranks.without_context) == [2, 2]


def test_ids_that_differ_are_found_before_anything_is_launched(spawn_ranks):
    for rank, (differ, refused, later) in enumerate(spawn_ranks(2, ranks.ids_differ)):
        assert "disagree on the ids of a call of ag_group_gemm" in later
        assert later.count("ids (40, 2), digest ") == 2
        assert differ.startswith("RankDisagreement")
        assert "digest" in differ
        kind = "InvalidArgument: " if rank == 1 else "RankDisagreement: "
        assert refused.startswith(kind)
