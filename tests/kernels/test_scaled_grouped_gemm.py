"""``grouped_gemm`` of fp8 operands: recipes, sizes, routings, and what is refused."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.distributed.calls import some_configs
from tests.distributed.scaled_moe_ranks import products
from tests.fp8 import quantised_experts
from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.gemm.scales import FP8, Scaling
from triton_dist.kernels.common.moe.spaces import grouped_tiles
from triton_dist.kernels.nvidia import grouped_gemm
from triton_dist.testing import poisoned_empty

E4M3, E5M2 = FP8
RECIPES = ("tensor", "row", "block")
ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23}


def operands(recipe, M, topk, E, K, N, per_route=False, dtype=E4M3, low=-1):
    """Experts with other scales, ids of which some are nobody's, and no token for expert 0."""
    generator = torch.Generator().manual_seed(M * 1000 + N + K)
    A = torch.randn(M * topk if per_route else M, K, generator=generator)
    B = torch.randn(E, N, K, generator=generator) / K**0.5
    A[0] *= 5
    B *= torch.arange(1, E + 1)[:, None, None]
    B[:, N // 2 :] /= 20
    ids = torch.randint(low, E + 1, (M, topk), generator=generator).int()
    ids[ids == 0] = -1
    return (*quantised_experts(A, B, recipe, dtype), ids)


def check(C, A, B, scales, ids, activation=None):
    """Each element is within the bound of an fp32 sum of K scaled products, rounded once.

    silu(x) * y adds |y| times the error of x and |silu(x)| times that of y: silu' is at most 1.1.
    """
    a, b = Scaling(**scales).dequantised(A, B, torch.float64)
    expected, magnitudes = products(a, b, ids)
    bound = (A.shape[1] + 3) * 2.0**-24 * magnitudes
    if activation is not None:
        (x, y), (dx, dy) = expected.chunk(2, 1), bound.chunk(2, 1)
        silu = torch.nn.functional.silu(x)
        expected, bound = silu * y, 1.1 * dx * (y.abs() + dy) + (silu.abs() + dx) * dy
        bound = bound + 2.0**-20 * expected.abs()  # exp and the division
    bound = bound + ROUNDOFF[C.dtype] * expected.abs() + 2.0**-30
    assert (C.double() - expected).abs().div(bound).nan_to_num(nan=9.0).max() <= 1


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("sizes", "dtype", "tile"),
    [
        ((1, 1, 1, 16, 7), E4M3, 0),
        ((17, 3, 4, 144, 131), E5M2, 0),  # partial blocks, read by descriptors
        ((13, 2, 3, 401, 257), E4M3, 1),  # primes, read by pointers
        ((4, 2, 12, 272, 136), E4M3, 2),  # more experts than routes
    ],
)
def test_every_recipe_size_and_path(recipe, sizes, dtype, tile):
    A, B, scales, ids = operands(recipe, *sizes, dtype=dtype, per_route=tile == 1)
    with poisoned_empty():
        C = grouped_gemm.fn(A, B, ids, gemm_config=grouped_tiles()[tile], **scales)
    assert C.dtype is torch.bfloat16
    check(C, A, B, scales, ids)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("N", [96, 256])  # halves of partial blocks, and of whole ones
def test_gate_and_up_in_sorted_order(recipe, N):
    A, B, scales, ids = operands(recipe, 11, 2, 3, 160, N)
    options = {"activation": "silu_mul", "out_dtype": torch.float32, **scales}
    C = grouped_gemm(A, B, ids, autotune=False, **options)
    check(C, A, B, scales, ids, "silu_mul")
    by_expert = grouped_gemm(A, B, ids, order="sorted", autotune=False, **options)
    expert = torch.where((ids < 0) | (ids >= 3), 3, ids).flatten()
    assert torch.equal(by_expert, C[expert.argsort(stable=True)])
    if recipe != "block":
        options["out_dtype"] = torch.bfloat16
        library = grouped_gemm.fn(A, B, ids, algorithm="library", **options)
        torch.testing.assert_close(library, C.bfloat16(), rtol=2**-6, atol=2**-6 * C.abs().max())


@pytest.mark.parametrize("recipe", RECIPES)
def test_scales_of_padding_are_not_used(recipe):
    """NaN scales of a token without experts, and NaN after the scales of B."""
    A, B, scales, ids = operands(recipe, 6, 2, 2, 256, 40)
    C = grouped_gemm(A, B, ids, autotune=False, **scales)
    ids[2] = torch.tensor([-1, 2])
    if recipe != "tensor":
        scales["A_scale"][2] = torch.nan
    C = grouped_gemm(A, B, ids, autotune=False, **scales)
    assert torch.equal(C[4:6], torch.zeros(2, 40, dtype=torch.bfloat16))
    scales["A_scale"] = scales["A_scale"].nan_to_num(1.0)
    check(C, A, B, scales, ids)


def test_layouts_of_scales_and_mixed_recipes():
    A, B, scales, ids = operands("row", 9, 2, 3, 256, 256)
    expected = grouped_gemm(A, B, ids, autotune=False, **scales)
    for shape in ((3, 256), (3, 1, 256)):
        given = {**scales, "B_scale": scales["B_scale"].reshape(shape)}
        assert torch.equal(grouped_gemm(A, B, ids, autotune=False, **given), expected)
    single = {"A_scale": torch.full((1,), 0.5), "B_scale": scales["B_scale"]}
    check(grouped_gemm(A, B, ids, autotune=False, **single), A, B, single, ids)
    A, B, scales, ids = operands("block", 9, 2, 3, 256, 256)
    expected = grouped_gemm(A, B, ids, autotune=False, **scales)
    for changed in (
        {"B_scale": scales["B_scale"].mT},
        {"A_scale": scales["A_scale"].contiguous()},
    ):
        given = {**scales, **changed}
        assert torch.equal(grouped_gemm(A, B, ids, autotune=False, **given), expected)


def test_tuning_keys():
    A, B, scales, ids = operands("row", 9, 2, 3, 32, 32)
    key = grouped_gemm.key_fn(A, B, ids, **scales)
    assert (key.recipe, key.out_dtype, key.M) == ("row", torch.bfloat16, 9)
    plain = grouped_gemm.key_fn(A.half(), B.half(), ids)
    assert len(plain) == 10  # as before fp8
    with some_configs(grouped_gemm):
        tuned = grouped_gemm(A, B, ids, **scales)
        assert torch.equal(tuned, grouped_gemm(A, B, ids, **scales))
    check(tuned, A, B, scales, ids)


def refused():
    A, B, scales, _ = operands("row", 9, 2, 3, 256, 256)
    block = operands("block", 9, 2, 3, 256, 256)[2]
    yield "A_scale is None", {"A_scale": None}
    yield "B_scale is 2", {"B_scale": 2}
    yield "A_scale.dtype", {"A_scale": scales["A_scale"].half()}
    yield "B_scale.device", {"B_scale": scales["B_scale"].to("meta")}
    yield "A_scale, B_scale is .* recipe", {"A_scale": scales["A_scale"][:-1]}
    yield "A_scale, B_scale is .* recipe", {"A_scale": block["A_scale"]}
    yield (
        "A_scale, B_scale is .* recipe",
        {**block, "A_scale": block["A_scale"].repeat(1, 2)[:, :2]},
    )
    yield "A_scale, B_scale is .* recipe", {**block, "B_scale": block["B_scale"][:2]}
    yield r"B\.stride\(\)", {"B": B.contiguous()}
    yield r"B\.dtype", {"B": B.to(torch.bfloat16)}
    yield r"B\.dtype", {"B": B.to(E5M2)}
    yield "out_dtype is torch.int8", {"out_dtype": torch.int8}
    yield r"A_scale is 'torch.float32, shape \(", {"A": A.half(), "B": B.half()}
    yield "algorithm is 'library'", {**block, "algorithm": "library"}


@pytest.mark.parametrize(("message", "given"), list(refused()), ids=lambda each: str(each)[:30])
def test_what_is_refused(message, given):
    A, B, scales, ids = operands("row", 9, 2, 3, 256, 256)
    call = {"A": A, "B": B, "topk_ids": ids, **scales, **given}
    with pytest.raises(InvalidArgument, match=message):
        grouped_gemm(**call, autotune=False)
    if "algorithm" not in given:
        with pytest.raises(InvalidArgument, match=message):
            functools.partial(grouped_gemm.key_fn)(**call)
