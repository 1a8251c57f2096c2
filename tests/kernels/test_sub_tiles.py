"""Which program adds which rows (``scatter/one_launch.py``), against all that must be so."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from triton_dist._jit import jit
from triton_dist.kernels.common.scatter.one_launch import (
    locate_sub_tile,
    programs_with_work,
    sub_tiles_of_program,
)
from triton_dist.runtime.device import current_device

MOST = tl.constexpr(64)  # sub-tiles of a program in a wave


@jit
def kernel_write_sub_tiles(
    out_ptr,
    own_begin,
    own_end,
    tiles_m,
    tiles_n,
    NUM_SMS: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    SUB_TILE_ROWS: tl.constexpr,
    SPLIT_K: tl.constexpr,
):
    """For each wave and program up to ``MOST`` rows (row, end, n, number) of out."""
    for wave in range(0, tiles_m * tiles_n, NUM_SMS):
        begin, end = sub_tiles_of_program(
            wave, own_begin, own_end, tiles_m, tiles_n, NUM_SMS, BLOCK_SIZE_M, SUB_TILE_ROWS,
            SPLIT_K,
        )  # fmt: skip
        tl.device_assert(end - begin <= MOST)
        for sub_tile in range(begin, end):
            row, end_row, n, number = locate_sub_tile(
                sub_tile, own_begin, own_end, tiles_m, BLOCK_SIZE_M, SUB_TILE_ROWS
            )
            at = wave // NUM_SMS * tl.num_programs(0) + tl.program_id(0)
            place = out_ptr + (at * MOST + sub_tile - begin) * 4
            tl.store(place, row)
            tl.store(place + 1, end_row)
            tl.store(place + 2, n)
            tl.store(place + 3, number)


def sub_tiles(own, tiles_m, tiles_n, groups, num_ctas, block_m, sub_tile_rows, splits=1):
    """(program, row, end, n, number of the tile) of each sub-tile that is not empty."""
    waves = -(-tiles_m * tiles_n // groups)
    out = torch.full((waves, num_ctas, MOST.value, 4), -1, dtype=torch.int32)
    out = out.to(current_device().torch_device)
    kernel_write_sub_tiles[(num_ctas,)](
        out, *own, tiles_m, tiles_n, groups, BLOCK_SIZE_M=block_m, SUB_TILE_ROWS=sub_tile_rows,
        SPLIT_K=splits,
    )  # fmt: skip
    for wave in out.tolist():
        for program, added in enumerate(wave):
            for row, end, n, number in added:
                if row < end:
                    yield program, row, min(end, row + sub_tile_rows), n, number


@settings(max_examples=12, deadline=None)
@given(
    rows=st.integers(1, 70),
    tiles_n=st.integers(1, 5),
    num_ranks=st.integers(1, 5),
    groups=st.integers(1, 9),
    splits=st.sampled_from([1, 1, 2, 3]),
    block_m=st.sampled_from([4, 8, 16]),
    sub_tile_rows=st.sampled_from([1, 2, 4]),
    to_owners=st.booleans(),
)
def test_each_row_is_added_once_by_a_program_that_may_wait_for_it(
    rows, tiles_n, num_ranks, groups, splits, block_m, sub_tile_rows, to_owners
):
    tiles_m, share = -(-rows // block_m), -(-rows // num_ranks) if to_owners else rows
    last = (num_ranks - 1) * share if to_owners else 0
    num_ctas = min(groups, programs_with_work(tiles_m, tiles_n, last, block_m)) * splits
    for rank in range(num_ranks):
        begin = rank * share if to_owners else 0
        end = min(begin + share, rows)
        seen = []
        for program, row, stop, n, number in sub_tiles(
            (begin, end), tiles_m, tiles_n, groups, num_ctas, block_m, sub_tile_rows, splits
        ):
            last_multiplier = number % groups * splits + splits - 1
            assert last_multiplier <= program, "it waits for a program that begins later"
            assert number // tiles_m == n
            assert {(begin + i) // block_m for i in (row, stop - 1)} == {number % tiles_m}
            seen += [(n, i) for i in range(row, stop)]
        assert sorted(seen) == [(n, i) for n in range(tiles_n) for i in range(end - begin)]


@pytest.mark.parametrize(
    ("rows", "block_m", "columns", "most"), [(512, 128, 32, 1), (64, 16, 64, 5)]
)
def test_all_programs_add_about_as_much(rows, block_m, columns, most):
    """Of 132 programs, for 4 ranks; 256 x 8192 in columns of 256, and the like."""
    tiles_m, share = rows // block_m, rows // 4
    num_ctas = min(132, programs_with_work(tiles_m, columns, 3 * share, block_m))
    for rank in (0, 3):
        own = (rank * share, (rank + 1) * share)
        added = Counter(
            sub_tile[0]
            for sub_tile in sub_tiles(own, tiles_m, columns, 132, num_ctas, block_m, block_m // 4)
        )
        assert max(added.values()) <= most
        assert len(added) >= 0.9 * min(132, sum(added.values()))
