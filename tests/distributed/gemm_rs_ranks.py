"""What every rank does in tests of GEMM-ReduceScatter alone, on CPU ranks and on GPUs; what it does
in those of GEMM-AllReduce too is in ``summed_gemm_ranks``."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.distributed.ag_gemm_calls import NAN
from tests.distributed.gemm_rs_calls import Calls
from triton_dist.errors import WaitTimeout
from triton_dist.kernels.nvidia import vendor_reduce_scatter as vendor
from triton_dist.kernels.nvidia.allgather_gemm_tiles import WARP_SPECIALIZED_SPLIT_K_TILES
from triton_dist.kernels.nvidia.gemm import warp_specialized_tiles
from triton_dist.runtime.waits import bounded_waits


def vendor_in_turn(rounds: int) -> int:
    """What torch brings, between calls of our own, the number of rows changing."""
    calls = Calls(max_rows=32, columns=64, K=64)
    for number in range(rounds):
        for method in vendor.methods_here():
            calls(16 + 8 * (number % 3), method=method, gemm_config=None, has_bias=number % 2 == 0)
            calls(32 - 8 * (number % 2), fuse_scatter=number % 2 == 0)
    return calls.finish()


def specialized_warps() -> list[int]:
    """Every tile for specialised warps, whole and cut along K, in 1, 2 and 4 chunks, with clipped
    tiles; and operands that the ordinary kernel serves with such a config."""
    counts = []
    for most, columns, K in ((300, 520, 200), (1021, 2000, 520), (129, 2048, 4096)):
        calls = Calls(most, columns, K, torch.bfloat16)
        calls.ctx.split_workspace.partials.fill_(NAN)
        tiles = [*warp_specialized_tiles(), *WARP_SPECIALIZED_SPLIT_K_TILES]
        for number, config in enumerate(tiles):
            for rows, num_chunks in ((most, 1), (1, 2), (most // 2 + 1, 2), (most, 4)):
                calls(
                    rows, ("row-major", "column-major")[number % 2], gemm_config=config,
                    fuse_scatter=False, num_chunks=num_chunks, has_bias=num_chunks == 2,
                    straggler_option=(number % dist.get_world_size(), 2_000_000),
                )  # fmt: skip
            # A slice that TMA cannot read goes to the ordinary kernel, with the same config.
            calls(5, a_layout="every second", gemm_config=config, fuse_scatter=False)
        counts.append(calls.check())
        assert not calls.ctx.split_workspace.counters.any()
        calls.ctx.finalize()
    return counts


def specialized_warps_give_up() -> list[str]:
    """Rank 0 calls alone, with a limit on its waits, which are those of the sum; after a reset all
    ranks call again."""
    overdue = []
    calls = Calls(300, 520, 200, torch.bfloat16)
    options = {"gemm_config": warp_specialized_tiles()[0], "fuse_scatter": False}
    for num_chunks in (1, 2):
        calls(300, num_chunks=num_chunks, **options)
        calls.check()
        if dist.get_rank() == 0:
            try:
                with bounded_waits(0.2):
                    calls(300, num_chunks=num_chunks, **options)
            except WaitTimeout as error:
                overdue.append(error.flag.split("[")[0])
        else:
            calls.skip()
        dist.barrier()
        calls.ctx.reset()
    calls(300, **options)
    calls.finish()
    return overdue
