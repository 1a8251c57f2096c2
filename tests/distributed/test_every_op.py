"""What all ops across ranks have in common, by their OpInfos: errors, contexts, autograd modes."""

from __future__ import annotations

import pytest

from tests.distributed import bad_input_ranks, every_op_ranks
from tests.distributed.every_op_ranks import NAMES

MAP = ["kernel_count_routes", "kernel_map_blocks"]
PUSHED_CHUNK = [
    "kernel_grouped_gemm", "kernel_topk_sum", "kernel_add_columns", "kernel_finish_epoch",
]  # fmt: skip
LAUNCHES = {
    "ag_gemm": ["copies", "kernel_gemm_persistent", "kernel_finish_epoch"],
    "ag_group_gemm": ["copies", *MAP, "kernel_grouped_gemm", "kernel_finish_epoch"],
    "all_gather": ["kernel_all_gather"],
    "all_reduce": ["kernel_all_reduce_packets"],
    "ep_combine": ["kernel_dispatch", "kernel_combine"],
    "ep_dispatch": ["kernel_dispatch", "kernel_expand"],
    "ep_dispatch_group_gemm": [
        "kernel_dispatch",
        "kernel_write_tile_records",
        "kernel_grouped_gemm",
    ],
    "gemm_ar": ["kernel_gemm_exchange"],
    "gemm_rs": ["kernel_gemm_scatter_persistent", "kernel_add_deferred", "kernel_finish_epoch"],
    "reduce_scatter": ["kernel_reduce_scatter"],
    "run_moe_reduce_ar": [*MAP, *PUSHED_CHUNK, "kernel_all_gather"],
    "run_moe_reduce_rs": [*MAP, *PUSHED_CHUNK],
    "sp_ag_attention": ["kernel_await_shard", "kernel_merge", "kernel_finish_epoch"],
    "ulysses_gemm_pre_attn": ["kernel_gemm_send", "kernel_receive_heads", "kernel_finish_epoch"],
    "ulysses_post_attn": ["kernel_exchange_heads"],
    "ulysses_post_attn_gemm": ["kernel_gemm_received", "kernel_finish_epoch"],
    "ulysses_pre_attn": ["kernel_exchange_heads"],
    "sp_decode_attn": ["kernel_decode_packets"],
}
"""What a call with the default config launches."""


@pytest.mark.parametrize("name", NAMES)
def test_errors_contexts_and_autograd_modes(on_two, name):
    first, other = on_two(every_op_ranks.everything, name)
    (seen, of_bad, of_good), _, history = first
    assert (of_bad, of_good) == other[0][1:]
    assert seen.keys() == other[0][0].keys()
    for case, (argument, message) in seen.items():
        other_argument, other_message = other[0][0][case]
        assert argument == other_argument
        assert message == other_message or "array(" in message  # prints a rank's own values
    assert of_bad == []
    for case, (argument, message) in seen.items():
        assert argument == case.split(" (")[0]
        assert message.startswith(f"{name}: {argument} is ")
        assert ("torch.no_grad()" in message) is argument.endswith("requires_grad")
    assert of_good == LAUNCHES[name]
    assert history == other[2] == 0
    for rank, (_, (create, refused, differs), _) in enumerate((first, other)):
        for case, (argument, message) in refused.items():
            assert argument == case.split(" (")[0]
            assert message.startswith(f"{create}: {argument} is ")
        assert f"rank is {rank + 1}, expected {rank}" in refused["rank"][1]
        assert "  rank 1: " in differs


def test_one_rank_that_differs_is_an_error_on_all(on_new):
    by_rank = on_new(bad_input_ranks.one_rank_differs, env={"TRITON_DIST_WAIT_TIMEOUT": "30"})
    for rank, seen in enumerate(by_rank):
        max_m, k, dtype, a_dtype, rows, layout, local_copy = seen
        own_fault = "InvalidArgument" if rank == 1 else "RankDisagreement"
        assert max_m[0] == a_dtype[0] == own_fault
        assert "max_M is" in max_m[1]
        assert "A.dtype is torch.bfloat16" in a_dtype[1]
        for kind, message in (k, dtype, rows, layout, local_copy):
            assert kind == "RankDisagreement"
            assert "  rank 1: " in message


@pytest.mark.parametrize("name", every_op_ranks.BY_NAME)
def test_an_algorithm_that_is_named_runs_untuned(on_two, name):
    first, second = on_two(every_op_ranks.named_algorithms, name)
    assert first == second > 1
