"""What is tested of GEMM-ReduceScatter alone, over real processes: the kernels in the interpreter,
memory in /dev/shm."""

from __future__ import annotations

from tests.distributed import gemm_rs_ranks


def test_vendor_methods_take_turns_with_ours(spawn_ranks):
    assert spawn_ranks(3, gemm_rs_ranks.library_alternating, 4) == [8] * 3


def test_what_peers_wait_for_comes_before_another_launch(spawn_ranks):
    """To load a kernel, or to launch one that is not loaded, waits for the GEMM to end, and that
    for what the peers push; and so may freeing of memory that is garbage."""
    order = [
        "compile kernel_add_deferred, uncollected",
        "run kernel_gemm_scatter_persistent, uncollected",
        "queue, uncollected",
        "run kernel_add_deferred",
        "run kernel_finish_epoch",
    ]
    assert spawn_ranks(2, gemm_rs_ranks.order_of_row_blocks) == [order] * 2
