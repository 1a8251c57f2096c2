"""Names of expert parallelism that Triton-distributed's scripts import, in their calls."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import ep_names_ranks
from tests.distributed.ep_names_ranks import on_device
from triton_dist.errors import InvalidArgument
from triton_dist.kernels.nvidia.all_to_all_vdev_2d_offset import (
    all_to_all_v_offset_op,
    all_to_all_v_offset_op_v2,
    create_context,
)

UNTUNED = {"TRITON_DIST_AUTOTUNE": "0"}


@pytest.mark.parametrize(("dtype", "has_scale"), [(torch.bfloat16, True), (torch.int8, False)])
def test_rows_sorted_by_expert(on_two, dtype, has_scale):
    more = on_two(ep_names_ranks.sorted_rows, dtype, has_scale, env=UNTUNED)
    assert more[0] > 0, "rank 0 returns more than max_m rows"


def test_layer_for_many_tokens(on_any, on_two):
    on_any(ep_names_ranks.layer, True, env=UNTUNED)
    on_two(ep_names_ranks.layer, False, env=UNTUNED)


def test_layer_for_few_tokens_is_exact(on_two):
    for quantise in (True, False):
        on_two(ep_names_ranks.low_latency_layer, quantise, env=UNTUNED)


def test_splits_in_2d(on_two):
    on_two(ep_names_ranks.splits_in_2d, torch.int8, env=UNTUNED)


def test_more_splits_than_rows_and_a_short_output(monkeypatch):
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE", "0")
    ctx = create_context(0, 1, 8, 1, 6, torch.int8, max_token_num_per_rank=4)
    rows = on_device(torch.arange(18, dtype=torch.int8).view(3, 6))
    splits = on_device(torch.tensor([0, 1, 0, 0, 1, 0, 1, 0], dtype=torch.int32).view(8, 1))
    output = rows.new_zeros(4, 6)
    _, number = all_to_all_v_offset_op(ctx, False, rows, output, splits)
    assert torch.equal(output[: int(number)], rows)
    expected = "expected a tensor of nsplits = 8 elements"
    with pytest.raises(InvalidArgument, match=f"in_offset is None, {expected}"):
        all_to_all_v_offset_op(ctx, False, rows, output, splits, has_input_offset=True)
    with pytest.raises(InvalidArgument, match=rf"in_splits is \(7, 1\), {expected}"):
        all_to_all_v_offset_op(ctx, False, rows, output, splits[:7])
    ctx.ep.check()
    all_to_all_v_offset_op_v2(ctx, False, rows, output.zero_()[:2], splits, splits)
    assert torch.equal(output[:2], rows[:2])
    with pytest.raises(InvalidArgument, match=r"out\.shape"):
        ctx.ep.check()
    ctx.finalize()


def test_autograd_function(on_two):
    on_two(ep_names_ranks.fused_function, env=UNTUNED)


def test_own_scripts(on_two):
    on_two(ep_names_ranks.own_script, False, env=UNTUNED)
