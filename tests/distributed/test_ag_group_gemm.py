"""AllGather + grouped GEMM over real processes: the kernels in the interpreter."""

from __future__ import annotations

from tests.distributed import ag_group_gemm_ranks as ranks


def test_every_size_and_layout(on_few, rounds):
    """On CPU ranks each size in one dtype: tests/kernels/test_grouped_gemm.py multiplies both."""
    calls = len(ranks.LAYOUTS) * len(ranks.SIZES)
    for number in range(rounds(2, cpu=1)):
        assert set(on_few(ranks.every_operand, number)) == {calls}


def test_every_routing_and_way(on_few):
    calls = len(ranks.ROUTINGS) * len(ranks.DEFAULTS) // 3
    assert set(on_few(ranks.every_routing)) == {calls}


def test_a_call_takes_few_launches(on_two):
    of_map = ["kernel_count_routes", "kernel_map_blocks"]
    for seen in on_two(ranks.launches):
        assert seen == {
            "arrivals": [*of_map, "kernel_grouped_gemm", "kernel_finish_epoch"],
            "serial": [*of_map, "kernel_all_gather", "kernel_grouped_gemm"],
        }


def test_a_kernel_that_a_script_tunes_is_used(on_two):
    assert on_two(ranks.autotuned_kernel) == [2, 2]


def test_without_a_context(on_two):
    assert on_two(ranks.without_context) == [2, 2]


def test_ids_that_differ_are_found_before_anything_is_launched(on_two):
    for rank, (differ, refused, later) in enumerate(on_two(ranks.ids_differ)):
        assert "disagree on the ids of a call of ag_group_gemm" in later
        assert later.count("ids (40, 2), digest ") == 2
        assert differ.startswith("RankDisagreement")
        assert "digest" in differ
        kind = "InvalidArgument: " if rank == 1 else "RankDisagreement: "
        assert refused.startswith(kind)
