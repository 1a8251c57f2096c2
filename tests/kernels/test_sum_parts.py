"""The sum of parts after a product that adds nothing, interpreted, with flags that are set."""

from __future__ import annotations

import pytest
import torch
import triton

from triton_dist.errors import WaitTimeout
from triton_dist.kernels.common.scattered_gemm_launch import Scattering, chunks_of_slab
from triton_dist.kernels.common.specialized_scatter import sum_parts
from triton_dist.runtime.waits import bounded_waits
from triton_dist.testing.assertions import assert_bitwise_equal

NAN = float("nan")
EPOCH = 7
TILES = triton.Config({"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "GROUP_SIZE_M": 2})


def scattering(parts, rank, stride, num_chunks):
    """The own part is staged; the others have arrived; what is no part is NaN."""
    num_ranks, (rows, N), dtype = len(parts), parts[0].shape, parts[0].dtype
    staged, partials = (torch.full((num_ranks, stride), NAN, dtype=dtype) for _ in range(2))
    for source, part in enumerate(parts):
        (staged if source == rank else partials)[source, : rows * N] = part.flatten()
    chunks = len(chunks_of_slab(TILES, rows, N, num_chunks).rows)
    arrivals = torch.full((chunks, num_ranks), EPOCH, dtype=torch.int32)
    arrivals[:, rank] = 0
    epoch = torch.zeros(32, dtype=torch.int32)
    epoch[0] = EPOCH
    table = torch.zeros(num_ranks, dtype=torch.int64)
    return Scattering(
        "slab", rank, num_ranks, partials.flatten(), stride, table, table, arrivals, epoch, table,
        table, staged,
    )  # fmt: skip


def random_parts(num_ranks, rows, N, dtype):
    generator = torch.Generator().manual_seed(num_ranks * rows)
    return [torch.randn(rows, N, generator=generator).to(dtype) for _ in range(num_ranks)]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("num_ranks", "rows", "N", "num_chunks"),
    [(1, 5, 24, 1), (2, 70, 72, 2), (3, 1, 8, 1), (4, 150, 104, 4)],
)
def test_parts_are_added_in_fp32_in_the_order_of_ranks(
    num_ranks, rows, N, num_chunks, dtype, has_bias
):
    parts = random_parts(num_ranks, rows, N, dtype)
    bias = torch.randn(N).to(dtype) if has_bias else None
    total = parts[0].float().clone()  # of fp32, float() is no copy
    for part in parts[1:]:
        total += part.float()
    if bias is not None:
        total += bias.float()
    for rank in range(num_ranks):
        to = scattering(parts, rank, rows * N + 128, num_chunks)
        C = torch.full((rows, N), NAN, dtype=dtype)
        sum_parts(C, bias, TILES, to, num_sms=1, num_chunks=num_chunks).run()
        assert_bitwise_equal(C, total.to(dtype))


@pytest.mark.parametrize("late", [0, 2])
def test_each_chunk_of_each_peer_is_awaited(late):
    """With one that has not come, the first or the last, there is no sum."""
    parts = random_parts(2, 150, 104, torch.float16)
    to = scattering(parts, 0, 150 * 104, 3)
    assert len(to.arrivals) == 3
    to.arrivals[late, 1] = EPOCH - 1
    C = torch.empty(150, 104, dtype=torch.float16)
    with bounded_waits(0.2), pytest.raises(WaitTimeout) as caught:
        sum_parts(C, None, TILES, to, num_sms=1, num_chunks=3).run()
    assert (caught.value.expected, caught.value.seen) == (EPOCH, EPOCH - 1)
