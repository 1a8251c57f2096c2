"""What every rank does in tests of GEMM-AllReduce alone, on CPU ranks and on GPUs; what it does in
those of GEMM-ReduceScatter too is in ``summed_gemm_ranks``."""

from __future__ import annotations

import torch

from tests.distributed.ag_gemm_calls import default_tiles
from tests.distributed.compiled_ahead import compiled_ahead
from tests.distributed.every_op_ranks import refusal
from tests.distributed.gemm_ar_calls import ALGORITHMS, COLLECTIVE, PACKETS, SYMMETRIC, TILED, Calls
from triton_dist.kernels.nvidia import gemm_ar
from triton_dist.kernels.nvidia.gemm_allreduce.algorithms import sums_symmetric_memory
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for


def ones(rows: int, columns: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.ones(rows, columns, dtype=dtype, device=current_device().torch_device)


@compiled_ahead
def every_size(world: int) -> int:
    """Every way at sizes round multiples of the ranks and of row blocks."""
    calls = Calls(max_rows=16 * world + 1, columns=40, K=24)
    sizes = (1, 3, 5, world, world + 1, 16 * world - 1, 16 * world, 16 * world + 1)
    for rows in sizes:
        for algorithm in TILED:
            calls(rows, **algorithm)
    return calls.finish()


def same_bits_on_all_ranks() -> int:
    """Random operands: every rank has the bits of the first."""
    calls = Calls(max_rows=67, columns=72, K=72)
    for algorithm in ALGORITHMS:
        calls(67, **algorithm, persistent=True)
        calls(5, **algorithm, persistent=False)
    calls.check()
    for number, (what, C, _) in enumerate(calls.results):
        seen = group_for().all_gather(
            f"bits of call {number}", C.cpu().view(torch.int16).sum(dtype=torch.int64).item()
        )
        assert len(set(seen)) == 1, what
    return calls.finish()


def borrowed_results() -> int:
    """Without a copy, a result is memory of the context, which keeps it over the next call."""
    calls = Calls(max_rows=67, columns=72, K=72)
    memory = calls.ctx.buffer.slots
    for algorithm in (ALGORITHMS[3], ALGORITHMS[4]):
        for rows in (67, 3, 20):
            calls(rows, **algorithm)
            assert calls.borrowed().data_ptr() == memory["sums"].local.data_ptr()
    calls(67, **ALGORITHMS[1])
    inside = memory["sums"].local.data_ptr()
    assert calls.borrowed().data_ptr() != inside
    return calls.finish()


def whole_alternating(rounds: int) -> int:
    """Products that are summed as a whole, by libraries too, between calls by tiles, the number of
    rows changing; and what torch's sum in symmetric memory refuses."""
    calls = Calls(max_rows=64, columns=64, K=64, dtype=torch.bfloat16)
    has_symmetric = sums_symmetric_memory(torch.bfloat16, row_bytes=64 * 2)
    libraries = (COLLECTIVE, SYMMETRIC) if has_symmetric else (COLLECTIVE,)
    for number in range(rounds):
        library = libraries[number % len(libraries)]
        options = {"has_bias": number % 3 == 0, "copy_to_local": number % 4 < 2}
        calls(16 + 8 * (number % 3), **library, **options)
        calls(64 - 8 * (number % 2), **ALGORITHMS[number % len(ALGORITHMS)])
        calls(33, algorithm="serial", num_chunks=1 + number % 3, num_ctas=3)
    A, B = (ones(rows, 64, torch.bfloat16) for rows in (4, 64))
    if not has_symmetric:
        error = str(refusal(lambda: gemm_ar.fn(A, B, calls.ctx, **SYMMETRIC)))
        assert "symmetric_collective" in error
        assert "one GPU per rank" in error
    return calls.finish()


def too_large_for_one_shot() -> str:
    """A product of which not every rank can have all parts."""
    columns = 1 << 20
    calls = Calls(max_rows=3, columns=columns, K=1)
    A, B = ones(3, 1), ones(1, columns)
    error = refusal(lambda: gemm_ar.fn(A, B, calls.ctx, default_tiles(), algorithm="one_shot"))
    kept = gemm_ar.config_space.prune(gemm_ar.prune_fn, (A, B, calls.ctx), {})[0]
    assert all(config["algorithm"] != "one_shot" for config in kept)
    calls.ctx.finalize()
    return str(error)


def too_large_for_packets() -> str:
    """A product of which packets hold all but one row: those travel, one more is refused, and is
    not tried."""
    columns = 1 << 10
    calls = Calls(max_rows=129, columns=columns, K=1)
    calls(128, **PACKETS)
    A, B = ones(129, 1), ones(1, columns)
    error = refusal(lambda: gemm_ar.fn(A, B, calls.ctx, default_tiles(), **PACKETS))
    for rows, tried in ((128, True), (129, False)):
        kept = gemm_ar.config_space.prune(gemm_ar.prune_fn, (A[:rows], B, calls.ctx), {})[0]
        assert any(config["algorithm"] == PACKETS["algorithm"] for config in kept) is tried
    calls.finish()
    return str(error)
