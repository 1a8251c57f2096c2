"""Deferred tiles: when a program defers its own tiles, and what the next kernel does with them."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl

from triton_dist import jit
from triton_dist.kernels.common.scatter.partials import ScatterSlot, SumOutput
from triton_dist.kernels.common.scatter.tiles import (
    MAY_WAIT,
    MUST_DEFER,
    NUM_BEGUN_WORD,
    Summing,
    Tile,
    count_begun_program,
    decide_whether_to_wait,
    kernel_add_deferred,
)

PROGRAMS, LINE = 3, 16


@jit
def kernel_decide(epoch_ptr, deferred_ptr, decisions_ptr, begins: tl.constexpr):
    """Of the programs, those below ``begins`` begin; all decide."""
    if tl.program_id(0) < begins:
        count_begun_program(epoch_ptr)
    decision = decide_whether_to_wait(epoch_ptr, deferred_ptr)
    tl.store(decisions_ptr + tl.program_id(0), decision)


@pytest.mark.parametrize("begins", [PROGRAMS, PROGRAMS - 1])
def test_a_program_stays_where_all_have_begun(begins):
    epoch = torch.zeros(LINE, dtype=torch.int64)
    left, decisions = (torch.zeros(PROGRAMS, dtype=torch.int32) for _ in range(2))
    kernel_decide[(PROGRAMS,)](epoch, left, decisions, begins)
    assert int(epoch[NUM_BEGUN_WORD.value]) == begins
    stays = begins == PROGRAMS
    assert decisions.tolist() == [MAY_WAIT.value if stays else MUST_DEFER.value] * PROGRAMS
    assert left.tolist() == [0 if stays else 1] * PROGRAMS


@pytest.mark.parametrize("has_left", [True, False])
def test_what_was_left_is_added_once_and_the_next_call_counts_anew(has_left):
    rows, N = 21, 19
    partials = torch.randn(rows, N, dtype=torch.float16)
    C = torch.full((rows, N), float("nan"), dtype=torch.float16)
    epoch = torch.zeros(LINE, dtype=torch.int64)
    epoch[NUM_BEGUN_WORD.value] = PROGRAMS
    flags = torch.zeros(8, dtype=torch.int64)
    left = torch.full((1,), int(has_left), dtype=torch.int32)
    slot = ScatterSlot(partials, rows * N, flags, flags, flags, epoch, left)
    kernel_add_deferred[(1,)](
        slot, SumOutput(C, None, None, None), N, rows, rows, 1, 0, NUM_SMS=1,
        tile=Tile(16, 16, 0, 1, False, False, "tf32"), summing=Summing(1, "tile", False, 16),
    )  # fmt: skip
    assert torch.equal(C, partials) if has_left else bool(C.isnan().all())
    assert int(epoch[NUM_BEGUN_WORD.value]) == 0
    assert left.tolist() == [0]
