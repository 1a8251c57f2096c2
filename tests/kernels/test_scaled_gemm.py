"""``matmul`` of fp8 operands: recipes, sizes, special values, and what is refused."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from tests.fp8 import largest_error, quantised
from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.gemm.scales import (
    FP8,
    NO_SCALING,
    Recipe,
    library_matmul,
    num_scale_blocks,
)
from triton_dist.kernels.nvidia import (
    ag_gemm,
    create_ag_gemm_context,
    create_gemm_ar_context,
    create_gemm_rs_context,
    gemm_ar,
    gemm_rs,
    matmul,
)
from triton_dist.kernels.nvidia.gemm import get_config_space

E4M3, E5M2 = FP8
RECIPES = ("tensor", "row", "block")
TILES = get_config_space()


def operands(recipe, M, N, K, dtype=E4M3):
    generator = torch.Generator().manual_seed(M * 1000 + N + K)
    A, B = (torch.randn(size, generator=generator) for size in ((M, K), (N, K)))
    A[0] *= 50  # other rows and blocks get other scales
    B[:, : K // 2] /= 20
    return quantised(A, B, recipe, dtype)


def check(C, A, B, scaling):
    """The error of each element is within the bound of an fp32 sum, rounded once."""
    assert largest_error(C, A, B, scaling) <= 1


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("size", "dtype", "tile"),
    [
        ((1, 7, 16), E4M3, 0),
        ((1, 1, 1), E4M3, 1),
        ((37, 131, 144), E5M2, 0),  # partial blocks, read by descriptors
        ((19, 257, 401), E4M3, 1),  # primes, read by pointers
        ((3, 136, 384), E4M3, 2),
    ],
)
def test_every_recipe_size_and_path(recipe, size, dtype, tile):
    A, B, scaling = operands(recipe, *size, dtype)
    for persistent in (True, False):
        C = matmul.fn(A, B, TILES[tile], persistent, **scaling._asdict())
        assert C.dtype is torch.bfloat16
        check(C, A, B, scaling)
    check(library_matmul(A, B, scaling), A, B, scaling)


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("recipe", RECIPES)
def test_output_dtype_bias_and_fast_accumulation(recipe, out_dtype):
    A, B, scaling = operands(recipe, 33, 144, 160)
    bias = torch.linspace(-3, 3, 144).to(out_dtype)
    scaling = scaling._replace(bias=bias, out_dtype=out_dtype, use_fast_accum=True)
    for C in (
        matmul(A, B, autotune=False, **scaling._asdict()),
        matmul.fn(A, B, TILES[0], False, **scaling._asdict()),
        matmul.fn(A, B, None, **scaling._asdict()),
    ):
        assert C.dtype is out_dtype
        check(C, A, B, scaling)


def test_bias_without_scales():
    A, B = torch.randn(5, 24).bfloat16(), torch.randn(24, 40).bfloat16()
    bias = torch.randn(40).bfloat16()
    expected = (A.double() @ B.double() + bias.double()).bfloat16()
    torch.testing.assert_close(matmul(A, B, autotune=False, bias=bias), expected)


def test_a_single_scale_beside_row_scales():
    A, B, scaling = operands("row", 20, 48, 64)
    for one in ("A_scale", "B_scale"):
        mixed = scaling._replace(**{one: torch.full((1,), 0.25)})
        assert mixed.recipe(A, B) is Recipe.ROW
        check(matmul(A, B, autotune=False, **mixed._asdict()), A, B, mixed)
        check(library_matmul(A, B, mixed), A, B, mixed)


@pytest.mark.parametrize("n", [256, 300])  # 256: as many blocks along N as along K
def test_both_layouts_of_block_scales_of_b(n):
    A, B, scaling = operands("block", 4, n, 256)
    deepseek = scaling.B_scale
    assert deepseek.shape == (num_scale_blocks(n), 2)
    transposed = scaling._replace(B_scale=deepseek.t())
    expected = matmul(A, B, autotune=False, **scaling._asdict())
    check(expected, A, B, scaling)
    assert torch.equal(matmul(A, B, autotune=False, **transposed._asdict()), expected)
    assert torch.equal(transposed.dequantised(A, B)[1], scaling.dequantised(A, B)[1])


def every_value(dtype):
    return torch.arange(256, dtype=torch.uint8).view(dtype)


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, for infinite addends
@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("persistent", [True, False])
def test_subnormals_saturated_values_infinity_and_nan(dtype, persistent):
    """Each of the 256 bit patterns alone in its row, times one: the product is its value."""
    A = torch.zeros(256, 16).to(dtype)
    A.view(torch.uint8)[:, 3] = every_value(dtype).view(torch.uint8)
    B = torch.ones(16, 16).to(E4M3).T
    one = torch.ones(1)
    options = {"A_scale": one, "B_scale": one, "out_dtype": torch.float32}
    C = matmul.fn(A, B, TILES[2], persistent, **options)
    expected = every_value(dtype).float()[:, None].expand(256, 16)
    torch.testing.assert_close(C, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, for inf * 0
@pytest.mark.parametrize("recipe", RECIPES)
def test_scales_that_are_zero_infinite_or_nan(recipe):
    A, B, scaling = operands(recipe, 20, 136, 256)
    for value in (0.0, math.inf, math.nan):
        scale = scaling.A_scale.clone(memory_format=torch.preserve_format)
        scale[(0, 1) if recipe == "block" else 0] = value
        special = scaling._replace(A_scale=scale)
        C = matmul(A, B, autotune=False, **special._asdict())
        a, b = special.dequantised(A, B, torch.float64)
        expected = (a @ b).float()
        # An infinite scale of a row multiplies its sum: infinity where the reference has NaN.
        assert torch.equal(C.isfinite(), expected.isfinite())
        finite = expected.isfinite()
        torch.testing.assert_close(C.float()[finite], expected[finite], rtol=2**-7, atol=1e-2)


def test_long_sums_are_exact_where_fp32_is():
    """4,096 ones and then small addends: an accumulator of 14 bits would lose them."""
    A = torch.ones(1, 8192).to(E4M3)
    A[:, 4096:] = 2.0**-6
    B = torch.ones(16, 8192).to(E4M3).T
    one = torch.ones(1)
    C = matmul(A, B, autotune=False, A_scale=one, B_scale=one, out_dtype=torch.float32)
    assert torch.equal(C, torch.full((1, 16), 4096 + 64.0))


def test_tuning_keys():
    A, B, scaling = operands("row", 16, 32, 64)
    key = matmul.key_fn(A, B, **scaling._asdict())
    assert key.recipe == "row"
    assert key.out_dtype is torch.bfloat16
    plain = torch.ones(16, 64), torch.ones(64, 32)
    assert len(matmul.key_fn(*plain, **NO_SCALING._asdict())) == 6  # as before fp8


def refused():
    A, B, scaling = operands("row", 16, 256, 256)
    block_a, block_b = operands("block", 16, 256, 256)[2][:2]
    row_a, row_b = scaling[:2]
    yield "A_scale is None", {"A_scale": None}
    yield "B_scale is 2", {"B_scale": 2}
    yield "A_scale.dtype", {"A_scale": row_a.half()}
    yield "B_scale.device", {"B_scale": row_b.to("meta")}
    yield "A_scale.requires_grad", {"A_scale": row_a.clone().requires_grad_()}
    for name, given in (
        ("too few", {"A_scale": row_a[:-1]}),
        ("too many", {"B_scale": torch.ones(257)}),
        ("3-D", {"B_scale": row_b[:, None, None]}),
        ("strided", {"A_scale": torch.ones(16, 2)[:, 0]}),
        ("two recipes", {"A_scale": block_a}),
        ("row-major blocks of A", {"A_scale": block_a.contiguous(), "B_scale": block_b}),
        ("strided blocks of B", {"A_scale": block_a, "B_scale": torch.ones(2, 4)[:, ::2]}),
        ("blocks of other size", {"A_scale": block_a, "B_scale": torch.ones(2, 3)}),
    ):
        yield f"A_scale, B_scale is .* recipe  # {name}", given
    yield r"B\.stride\(\)", {"B": B.contiguous()}
    yield r"B\.dtype", {"B": B.to(E5M2)}
    yield r"B\.dtype", {"B": B.to(torch.bfloat16)}
    yield "out_dtype is torch.int8", {"out_dtype": torch.int8}
    yield "bias is 1", {"bias": 1}
    yield r"bias\.dtype", {"bias": torch.ones(256)}
    yield r"bias\.shape", {"bias": torch.ones(255).bfloat16()}
    yield r"A_scale is 'torch.float32, shape \(", {"A": A.bfloat16(), "B": B.bfloat16()}
    yield (
        "out_dtype is",
        {
            "A": A.half(),
            "B": B.half(),
            "A_scale": None,
            "B_scale": None,
            "out_dtype": torch.bfloat16,
        },
    )


@pytest.mark.parametrize(("message", "given"), list(refused()), ids=lambda each: str(each)[:30])
def test_what_is_refused(message, given):
    A, B, scaling = operands("row", 16, 256, 256)
    call = {"A": A, "B": B, **scaling._asdict(), **given}
    for reject in (matmul.key_fn, functools.partial(matmul, autotune=False)):
        with pytest.raises(InvalidArgument, match=message.partition("  #")[0]):
            reject(**call)


def test_fp8_needs_a_gpu_that_multiplies_it(monkeypatch):
    from triton_dist.runtime.device import current_device

    A, B, scaling = operands("tensor", 16, 16, 16)
    monkeypatch.setattr(type(current_device()), "multiplies_fp8", False)
    with pytest.raises(InvalidArgument, match=r"compute capability 8\.9"):
        matmul(A, B, **scaling._asdict())


def test_ag_gemm_checks_scales_and_prunes_what_sends_none():
    A, B, scaling = operands("row", 16, 32, 64)
    options = {"A_scale": scaling.A_scale, "B_scale": scaling.B_scale, "use_fast_accum": True}
    with create_ag_gemm_context(16, 32, 64, E4M3, 0, 1) as ctx:
        check(ag_gemm(A, B, ctx, autotune=False, **options), A, B, scaling)
        check(ag_gemm.fn(A, B, ctx, algorithm="serial", **options), A, B, scaling)
        key, _ = ag_gemm.key_fn(A, B, ctx, **options)
        assert key[-5:] == ("row", (False, False), torch.bfloat16, True, False)
        fits = [
            each for each in ag_gemm.config_space if ag_gemm.prune_fn(each, A, B, ctx, **options)
        ]
        assert {each["algorithm"] for each in fits} == {"full_mesh_push"}
        for message, given in (
            ("A_scale is None", {"A_scale": None}),
            ("A_scale, B_scale is", {"A_scale": scaling.A_scale[:-1]}),
            (r"B\.dtype", {"B": B.to(E5M2)}),
            (r"A\.dtype", {"A": A.to(E5M2)}),
            (r"B\.stride", {"B": B.contiguous()}),
            ("out_dtype", {"out_dtype": torch.int8}),
        ):
            call = {"A": A, "B": B, **options, **given}
            for reject in (ag_gemm.key_fn, functools.partial(ag_gemm, autotune=False)):
                with pytest.raises(InvalidArgument, match=f"ag_gemm: {message}"):
                    reject(ctx=ctx, **call)
        with pytest.raises(InvalidArgument, match="another algorithm for fp8"):
            ag_gemm.fn(A, B, ctx, TILES[0], algorithm="fused_push", **options)
    with (
        create_ag_gemm_context(16, 32, 64, torch.float16, 0, 1) as ctx,
        pytest.raises(InvalidArgument, match=r"A_scale is 'torch.float32, shape \("),
    ):
        ag_gemm.key_fn(A.half(), B.half(), ctx, **options)


@pytest.mark.parametrize(
    ("op", "create"), [(gemm_rs, create_gemm_rs_context), (gemm_ar, create_gemm_ar_context)]
)
def test_sums_over_ranks_check_scales(op, create, monkeypatch):
    A, B, scaling = operands("block", 16, 32, 144)
    options = {"A_scale": scaling.A_scale, "B_scale": scaling.B_scale}
    with create(16, 32, 0, 1, 1, torch.float16) as ctx:
        C = op(A, B, ctx, autotune=False, **options)
        check(C, A, B, scaling)
        key, _ = op.key_fn(A, B, ctx, **options)
        assert key[-5:] == ("block", (False, False), torch.float16, False, False)
        for message, given in (
            ("A_scale is None", {"A_scale": None}),
            ("A_scale, B_scale is", {"B_scale": scaling.B_scale[:, :1]}),
            (r"B\.dtype", {"B": B.to(E5M2)}),
            (r"B\.stride", {"B": B.contiguous()}),
            (r"B\.dtype", {"B": B.half()}),
            (r"A_scale is 'torch.float32, shape \(", {"A": A.half(), "B": B.half()}),
        ):
            call = {"A": A, "B": B, **options, **given}
            for reject in (op.key_fn, functools.partial(op, autotune=False)):
                with pytest.raises(InvalidArgument, match=message):
                    reject(ctx=ctx, **call)
        monkeypatch.setattr(ctx, "num_ranks", 2)
        ctx.checked_keys.clear()
        with pytest.raises(InvalidArgument, match="pad K_per_rank with zeros to 256"):
            op.key_fn(A, B, ctx, **options)
        monkeypatch.undo()
