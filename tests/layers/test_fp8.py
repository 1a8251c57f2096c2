"""Tensor-parallel layers with fp8 weights, over real processes, and the quantisation."""

from __future__ import annotations

import pytest
import torch

from tests.layers import fp8_ranks
from triton_dist.layers.nvidia.fp8 import quantise


@pytest.mark.parametrize(("recipe", "columns"), [("row", 24), ("block", 256)])
def test_served_experts(on_two_ranks, recipe, columns):
    assert on_two_ranks(fp8_ranks.served, recipe, columns) == [3, 3]


def test_experts_that_are_refused(on_two_ranks):
    on_two_ranks(fp8_ranks.refused)


@pytest.mark.parametrize("is_block", [False, True])
@pytest.mark.parametrize("silu_mul", [False, True])
@pytest.mark.parametrize("sizes", [(3, 300), (70, 128), (0, 16)])
def test_quantised_rows(is_block, silu_mul, sizes):
    """Each element is within half a unit of its last bit, and of the smallest subnormal."""
    generator = torch.Generator().manual_seed(1)
    rows, K = sizes
    x = torch.randn(rows, K * (1 + silu_mul), generator=generator).bfloat16()
    x[1:2] = 0
    out, scale = quantise(x, is_block, silu_mul)
    wanted = x.float()
    if silu_mul:
        gate, up = wanted.chunk(2, 1)
        wanted = torch.nn.functional.silu(gate) * up
    blocks = wanted.view(rows, 1, K)
    if is_block:
        padded = torch.nn.functional.pad(wanted, (0, -K % 128))
        blocks = padded.view(rows, padded.shape[1] // 128, 128)
        assert scale.t().is_contiguous()
    largest = blocks.abs().amax(2).clamp(min=1e-12) / 448
    torch.testing.assert_close(scale.view_as(largest), largest, rtol=1e-6, atol=0)
    factor = scale.repeat_interleave(128, 1)[:, :K] if is_block else scale[:, None]
    error = (out.float() * factor - wanted).abs()
    assert (error <= wanted.abs() * 2.0**-4 * 1.01 + factor * 2.0**-10 * 1.01).all()
