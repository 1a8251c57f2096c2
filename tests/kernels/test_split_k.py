"""Tiles that are cut along K, and shards that are visited together."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
import triton.language as tl

import triton_dist
from tests.distributed.calls import NAN
from tests.distributed.gemm_calls import LAYOUTS, uniform
from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.gemm.launch import sharded_gemm
from triton_dist.kernels.common.gemm.sharded import (
    SplitWorkspace,
    gathered_tile,
    publish_partial,
    split_of_work_item,
    sum_of_partials,
    work_items_of_tiles,
    workspace_size,
)
from triton_dist.runtime.device import current_device
from triton_dist.testing import assert_allclose
from triton_dist.testing.opinfo.base import tolerance


def tiles(m=32, n=64, k=32, warps=4, group=2, **split):
    sizes = {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k, "GROUP_SIZE_M": group}
    return triton.Config(sizes | split, num_warps=warps, num_stages=2)


def workspace(partials, counters):
    """With room for exactly that; what is read before it is written is NaN."""
    device = current_device().torch_device
    return SplitWorkspace(
        torch.full((partials,), NAN, device=device),
        torch.zeros(counters, dtype=torch.int32, device=device),
    )


# (parts, programs): some waves, and less than one. Seven are more than K has steps.
CUTS = ((2, 4), (3, 4), (2, 100), (7, 100))


SIZES = (
    ((16, 32, 4), torch.float16),
    ((32, 64, 8), torch.bfloat16),
    ((64, 64, 4), torch.float16),
    ((128, 16, 4), torch.bfloat16),
)


@pytest.mark.parametrize(
    ("parts", "num_sms", "size", "dtype"),
    [
        pytest.param(*cut, *size, marks=() if i == j else pytest.mark.stress)
        for i, cut in enumerate(CUTS)
        for j, size in enumerate(SIZES)
    ],
)
def test_a_sum_of_parts_is_the_product(parts, num_sms, size, dtype):
    m, n, warps = size
    config = tiles(m, n, warps=warps, SPLIT_K=parts)
    cut = 0
    for M, N, K in ((70, 136, 96), (1, 24, 16), (33, 72, 40)):
        count = triton.cdiv(M, m) * triton.cdiv(N, n)
        split = workspace(*workspace_size(config, count, num_sms))
        cut += split.counters.numel()
        A = uniform(1, (M, K), dtype)
        for layout in (
            "row-major",
            "column-major",
        ):  # the second finds counters in use
            B = LAYOUTS[layout](uniform(2, (K, N), dtype))
            C = torch.full((M, N), NAN, dtype=dtype, device=A.device)
            sharded_gemm(
                A, B, C, config, num_sms=num_sms, persistent=True, split_workspace=split
            ).run()
            expected = (A.double() @ B.double()).to(dtype)
            assert_allclose(C, expected, rtol=tolerance(dtype), atol=tolerance(dtype))
        assert not split.counters.any()
    assert cut > 0


@triton_dist.jit
def kernel_publish(
    values_ptr, order_ptr, partials, out_ptr, tile,
    SPLIT_K: tl.constexpr, NUM_WARPS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Publish the parts ``values_ptr`` [SPLIT_K, M, N] of one tile in the order of ``order_ptr``;
    ``out_ptr`` gets the sum as often as a part was the last."""
    offsets = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    for turn in range(SPLIT_K):
        part = tl.load(order_ptr + turn)
        value = tl.load(values_ptr + part * M * N + offsets)
        if publish_partial(value, partials, tile, part, SPLIT_K, NUM_WARPS):
            total = sum_of_partials(value, partials, tile, part, SPLIT_K, NUM_WARPS)
            tl.store(out_ptr + offsets, tl.load(out_ptr + offsets) + total)


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize(("m", "n", "warps"), [(16, 16, 4), (32, 64, 8), (128, 32, 4)])
def test_the_sum_does_not_depend_on_who_is_last(m, n, warps, parts):
    """Bit by bit: values whose fp32 sum, of more than two, depends on the order of its terms."""
    tile = 2
    values = uniform(3, (parts, m * n), torch.float32)
    values *= torch.tensor([[1e6], [1e-3], [-1e6], [1.0]])[:parts]
    expected = values[0]
    for value in values[1:]:
        expected = expected + value
    assert (expected != values.flip(0).cumsum(0)[-1]).any() == (parts > 2)
    for order in itertools.permutations(range(parts)):
        split = workspace((tile + 1) * parts * m * n, tile + 1)
        out = torch.zeros(m, n)
        kernel_publish[(1,)](
            values, torch.tensor(order, dtype=torch.int32), split, out, tile,
            SPLIT_K=parts, NUM_WARPS=warps, M=m, N=n,
        )  # fmt: skip
        assert torch.equal(out.flatten(), expected)
        assert split.partials[: tile * parts * m * n].isnan().all()  # of other tiles
        assert not split.counters.any()


@triton_dist.jit
def kernel_work_items(out_ptr, whole, tiles, SPLIT_K: tl.constexpr):
    """For each unit of work: tile, part, number of parts."""
    for unit in range(work_items_of_tiles(tiles, whole, SPLIT_K)):
        tile, part, num_splits = split_of_work_item(unit, whole, SPLIT_K)
        tl.store(out_ptr + 3 * unit, tile)
        tl.store(out_ptr + 3 * unit + 1, part)
        tl.store(out_ptr + 3 * unit + 2, num_splits)


@pytest.mark.parametrize(("whole", "parts"), [(0, 1), (0, 3), (4, 3), (7, 3), (9, 2)])
def test_every_part_of_every_tile_is_one_unit(whole, parts):
    tiles = 7
    expected = []
    for tile in range(tiles):
        num_splits = parts if tile >= whole else 1
        expected += [[tile, part, num_splits] for part in range(num_splits)]
    out = torch.full((len(expected) + 2, 3), -1, dtype=torch.int32)
    kernel_work_items[(1,)](out, whole, tiles, SPLIT_K=parts)
    assert out.tolist() == [*expected, [-1] * 3, [-1] * 3]


@triton_dist.jit
def kernel_gathered_tiles(
    out_ptr, tiles, num_ranks, tiles_m, tiles_n, SHARDS: tl.constexpr, GROUP_SIZE_M: tl.constexpr
):
    for tile in range(tiles):
        position, m, n = gathered_tile(tile, num_ranks, tiles_m, tiles_n, SHARDS, GROUP_SIZE_M)
        tl.store(out_ptr + 3 * tile, position)
        tl.store(out_ptr + 3 * tile + 1, m)
        tl.store(out_ptr + 3 * tile + 2, n)


@pytest.mark.parametrize("shards", [1, 2, 8])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_gathered_tile_is_visited_once(num_ranks, shards):
    for tiles_m, tiles_n, group in ((1, 5, 8), (3, 2, 2), (2, 3, 1)):
        count = (num_ranks - 1) * tiles_m * tiles_n
        out = torch.full((count, 3), -1, dtype=torch.int32)
        kernel_gathered_tiles[(1,)](
            out, count, num_ranks, tiles_m, tiles_n, SHARDS=shards, GROUP_SIZE_M=group
        )
        everything = itertools.product(range(1, num_ranks), range(tiles_m), range(tiles_n))
        assert sorted(map(tuple, out.tolist())) == list(everything)
        # Shards come in turn, groups of them one after another.
        groups = [(position - 1) // shards for position, _, _ in out.tolist()]
        assert groups == sorted(groups)


def test_shards_that_are_visited_together_share_columns_of_b():
    out = torch.full((15, 3), -1, dtype=torch.int32)
    kernel_gathered_tiles[(1,)](out, 15, 4, 1, 5, SHARDS=8, GROUP_SIZE_M=8)
    assert [n for _, _, n in out.tolist()] == [n for n in range(5) for _ in range(3)]
    assert [position for position, _, _ in out.tolist()] == [1, 2, 3] * 5


@pytest.mark.parametrize(
    ("split", "there"),
    [(None, "None"), ((36863, 9), r"\(36863, 9\)"), ((36864, 8), r"\(36864, 8\)")],
)
def test_a_workspace_that_is_too_small_is_refused(split, there):
    A, B = uniform(1, (70, 96), torch.float16), uniform(2, (96, 136), torch.float16)
    C = torch.empty(70, 136, dtype=torch.float16)
    config = tiles(64, 64, SPLIT_K=1)
    sharded_gemm(A, B, C, config, num_sms=3, persistent=True)  # needs none
    config = tiles(32, 64, SPLIT_K=2)
    message = f"split_workspace is {there}, expected a workspace of 36864 fp32 and 9 counters"
    with pytest.raises(InvalidArgument, match=message):
        sharded_gemm(
            A, B, C, config, num_sms=1000, persistent=True,
            split_workspace=split and workspace(*split),
        )  # fmt: skip


def test_the_kernel_on_pointers_cuts_nothing():
    A, B = uniform(1, (70, 96), torch.float16), uniform(2, (96, 137), torch.float16)
    C = torch.empty(70, 137, dtype=torch.float16)
    launch = sharded_gemm(A, B, C, tiles(SPLIT_K=4), num_sms=3, persistent=True)
    assert not {"SPLIT_K", "GROUP_SIZE_SHARDS"} & set(launch.options)
