"""Tensor-parallel layers with fp8 weights, over real processes, and the quantisation."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.layers import fp8_ranks
from triton_dist.layers.nvidia import TP_MLP, EP_MoE, TP_Attn, TP_MoE
from triton_dist.layers.nvidia.fp8 import quantise


@pytest.mark.parametrize(
    ("kind", "recipe", "columns", "compiles"),
    # Each layer and each kind of scales occurs. Each kind of scales compiles once.
    [
        (TP_MLP, "static", 24, True),
        (TP_Attn, "row", 0, True),
        (TP_MoE, "block", 136, False),  # two blocks, the last is partial
        (EP_MoE, "row", 24, False),
        *(
            pytest.param(*each, False, marks=pytest.mark.stress)
            for each in (
                (TP_MLP, "block", 136),
                (TP_Attn, "block", 0),
                (TP_MoE, "static", 24),
                (EP_MoE, "static", 24),
                (EP_MoE, "block", 136),
            )
        ),
    ],
)
def test_served_layers(on_two_ranks, kind, recipe, columns, compiles):
    assert on_two_ranks(fp8_ranks.served, kind, recipe, columns, compiles) == [3, 3]


@pytest.mark.parametrize(
    ("recipe", "columns"),
    [
        ("row", 24),
        pytest.param("block", 256, marks=pytest.mark.stress),
    ],
)
def test_fp8_experts_that_ranks_share(on_two_ranks, recipe, columns):
    run = functools.partial(fp8_ranks.served, expert_tensor_parallel_size=2)
    assert on_two_ranks(run, EP_MoE, recipe, columns, False) == [3, 3]


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        (TP_MoE, "static"),
        (TP_Attn, "static"),
        *(
            pytest.param(*each, marks=pytest.mark.stress)
            for each in ((TP_MoE, "block"), (EP_MoE, "static"), (TP_Attn, "block"))
        ),
    ],
)
def test_served_by_one_rank(kind, recipe):
    assert fp8_ranks.served(kind, recipe, 24, compiles=False) == 3


def test_shards_that_are_padding(on_two_ranks):
    """Rank 0 has the only block; the shard of rank 1 is padding. Block scales compile here."""
    assert on_two_ranks(fp8_ranks.served, TP_MLP, "block", 100, True) == [3, 3]


@pytest.mark.parametrize("recipe", ["row", "block"])  # dense, and of experts
def test_a_model_folder_of_fp8_weights(on_two_ranks, tmp_path, recipe):
    pytest.importorskip("safetensors", reason="needs safetensors, of the extra models")
    for errors in on_two_ranks(fp8_ranks.loaded, tmp_path, recipe):
        assert max(errors) < 0.1, errors


def test_weights_that_are_refused(on_two_ranks):
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


@pytest.mark.parametrize("silu_mul", [False, True])
def test_rows_quantised_by_static_scales(silu_mul):
    """The largest scale counts, and large elements become 448 times it."""
    large = -80.0 if silu_mul else -5e4  # exp of more overflows
    x = torch.tensor([[3.0, large, 5e4, float("nan")] * (1 + silu_mul)] * 70).bfloat16()
    out, scale = quantise(x, False, silu_mul, torch.tensor([0.5, 2.0, 1.0]))
    assert scale.tolist() == [2]
    gate, up = x.float().chunk(2, 1) if silu_mul else (x.float(), None)
    wanted = gate if up is None else torch.nn.functional.silu(gate) * up
    wanted = (wanted / 2).clamp(-448, 448).to(out.dtype)
    assert torch.equal(out.view(torch.uint8) & 127, wanted.view(torch.uint8) & 127)
    assert torch.equal(out.float() < 0, wanted.float() < 0)
