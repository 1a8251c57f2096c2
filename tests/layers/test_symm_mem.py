"""torch's fused scaled matmuls: our functions with their arguments, and theirs as candidates.

On CPU ranks torch's own fallbacks stand for its operators, which only GPUs have. tests/gpu runs
``gathers`` and ``scatters`` next to the operators.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common import libraries
from triton_dist.layers.nvidia.symm_mem import (
    fused_all_gather_scaled_matmul,
    fused_scaled_matmul_reduce_scatter,
)
from triton_dist.runtime.device import current_device
from triton_dist.runtime.symmetric.cuda import group_name
from triton_dist.testing.assertions import assert_allclose
from triton_dist.testing.opinfo import AG_GEMM, GEMM_RS
from triton_dist.testing.opinfo.gemm import Shape
from triton_dist.testing.opinfo.scaled import scales_of

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
K = 48
COLLECTIVES = torch.ops._c10d_functional
ALL_GATHER = COLLECTIVES.all_gather_into_tensor


def random(seed, *sizes):
    values = torch.randn(sizes, generator=torch.Generator().manual_seed(seed))
    return values.to(current_device().torch_device)


def of_torch(name):
    """An operator of torch, or its fallback on CPU ranks."""
    if current_device().name == "cuda":
        return getattr(torch.ops.symm_mem, name)
    return getattr(symm_mem, f"_{name}_fallback")


def single(value):
    """A scale of a whole tensor."""
    return torch.tensor(value, device=current_device().torch_device)


def gather(x, size, name):
    """torch's all-gather, of fp8 as bytes: gloo does not gather fp8."""
    if x.dtype is not E4M3:
        return ALL_GATHER(x, size, name)
    return COLLECTIVES.wait_tensor(ALL_GATHER(x.view(torch.uint8), size, name)).view(E4M3)


def scaled_mm(
    A, B, A_scale, B_scale, bias=None, result_scale=None, out_dtype=None, use_fast_accum=False
):
    """``torch._scaled_mm``, which in torch 2.11 has no row-wise scales on CPU."""
    product = (A.float() * A_scale) @ (B.float() * B_scale)
    return (product if bias is None else product + bias).to(out_dtype or A.dtype)


@contextlib.contextmanager
def fallbacks():
    """Make what torch's fallbacks call work on CPU ranks."""
    if current_device().name == "cuda":
        yield
        return
    with (
        mock.patch.object(COLLECTIVES, "all_gather_into_tensor", gather),
        mock.patch.object(torch.ops.aten, "_scaled_mm", scaled_mm),
        mock.patch.object(torch, "_scaled_mm", scaled_mm),
    ):
        yield


def gathers():
    """Every kind of ``A_scale`` and each dimension, for two B."""
    rank, size, name = dist.get_rank(), dist.get_world_size(), group_name(None)
    count = 0
    for shape, dim in (((8, K), 0), ((2, 4, K), 0), ((2, 4, K), 1), ((3, 2, 2, K), 1)):
        for kind in ("tensor", "sharded", "replicated"):
            A, leading = random(rank, *shape).to(E4M3), [*shape[:-1], 1]
            Bs = [random(7 + rank, n, K).to(E4M3).t() for n in (32, 16)]
            B_scales = [random(9, 1, n).abs() for n in (32, 16)]
            if kind == "tensor":
                A_scale, B_scales = single(0.5), [single(2.0), single(3.0)]
            elif kind == "sharded":
                A_scale = random(20 + rank, *leading).abs()
            else:
                leading[dim] *= size
                A_scale = random(20, *leading).abs()
            dtypes = [BF16, None if kind == "tensor" else BF16]
            biases = [random(3, 32).bfloat16() if kind == "sharded" else None, None]
            args = (A, Bs, A_scale, B_scales, dim, name, biases, [None, None], dtypes)
            rows, products = fused_all_gather_scaled_matmul(*args, [False, True])
            with fallbacks():
                expected = of_torch("fused_all_gather_scaled_matmul")(*args, [False, True])
            assert torch.equal(rows.float(), expected[0].float())
            for ours, theirs in zip(products, expected[1], strict=True):
                assert ours.dtype is theirs.dtype
                error = 2**-6 if ours.dtype is BF16 else 2**-3
                torch.testing.assert_close(ours.float(), theirs.float(), rtol=error, atol=error)
            count += 1
    return count


def scatters():
    rank, size, name = dist.get_rank(), dist.get_world_size(), group_name(None)
    for shape, out, dims in (
        ((8, K), [8, 32], (0, 0)), ((8, K), [2, 4, 32], (1, 0)), ((2, 4, K), [2, 4, 32], (1, 1)),
        ((2, 4, K), [2, 4, 32], (0, 0)),
    ):  # fmt: skip
        if current_device().name == "cuda" and dims[0] != dims[1]:
            continue  # torch's operator returns other rows than its fallback
        for reduce_op in ("sum", "avg"):
            A, B = random(rank, *shape).to(E4M3), random(9 + rank, 32, K).to(E4M3).t()
            scales = single(0.5 + rank), single(1.5)
            bias = None
            if reduce_op == "sum":
                scales = random(5 + rank, *shape[:-1], 1).abs(), random(6 + rank, 1, 32).abs()
                bias = random(4 + rank, 32).bfloat16()
            rest = (*dims, name, list(out), bias, None, BF16)
            ours = fused_scaled_matmul_reduce_scatter(A, B, *scales, reduce_op, *rest)
            with fallbacks():
                theirs = of_torch("fused_scaled_matmul_reduce_scatter")(A, B, *scales, "sum", *rest)
            theirs /= 1 if reduce_op == "sum" else size
            assert ours.is_contiguous()
            torch.testing.assert_close(ours, theirs, rtol=2**-5, atol=2**-3)


def refusals():
    name, scale = dist.group.WORLD.group_name, torch.ones(4, 1)
    A, B = torch.ones(4, K).to(E4M3), torch.ones(32, K).to(E4M3).t()

    def gathered(A_scale=scale, dim=0, result_scale=None, dtype=BF16, biases=(None,)):
        return fused_all_gather_scaled_matmul(
            A, [B], A_scale, [torch.ones(1, 32)], dim, name, biases, [result_scale], [dtype], [True]
        )

    def scattered(op="sum", dim=0, out=None, dtype=BF16, A_scale=scale):
        return fused_scaled_matmul_reduce_scatter(
            A, B, A_scale, torch.ones(1, 32), op, dim, dim, name, out, None, None, dtype
        )

    for message, call, arguments in (
        ("A_scale.shape", gathered, {"A_scale": torch.ones(4, 2)}),
        ("gather_dim", gathered, {"dim": 1}),
        ("result_scales", gathered, {"result_scale": torch.ones(1), "dtype": None}),
        (r"len\(biases\)", gathered, {"biases": ()}),
        ("reduce_op", scattered, {"op": "max"}),
        ("orig_scatter_dim", scattered, {"dim": 1}),
        ("output_shape", scattered, {"out": [8, 32]}),
        ("out_dtype", scattered, {"dtype": None}),
        ("A_scale.shape", scattered, {"A_scale": torch.ones(2, 1)}),
    ):
        with pytest.raises(InvalidArgument, match=message):
            call(**arguments)


def as_candidates():
    """``async_tp`` of fp8 operands calls torch's fused operators, with row-wise scales."""
    called = []

    def standing_for(function):
        def call(*args):
            called.append(function.__name__)
            return function(*args)

        return call

    operators = mock.Mock(
        fused_all_gather_scaled_matmul=standing_for(
            symm_mem._fused_all_gather_scaled_matmul_fallback
        ),
        fused_scaled_matmul_reduce_scatter=standing_for(
            symm_mem._fused_scaled_matmul_reduce_scatter_fallback
        ),
    )
    with (
        mock.patch.object(torch.ops, "symm_mem", operators),
        mock.patch.object(libraries, "group_name", return_value=dist.group.WORLD.group_name),
        mock.patch.object(libraries, "check_async_tp"),
        fallbacks(),
    ):
        for base, recipe, M in (
            (AG_GEMM, "fp8-tensor", 8), (AG_GEMM, "fp8-row", 8), (AG_GEMM, "fp8-row", 6),
            (GEMM_RS, "fp8-tensor", 8), (GEMM_RS, "fp8-row", 6),
        ):  # fmt: skip
            info, shape = base.with_dtype(recipe), Shape(M, 32, 96)
            with info.context(shape, BF16) as ctx:
                data = info.operands(shape, BF16, 2)
                C = info.op.fn(data["A"], data["B"], ctx, algorithm="async_tp", **scales_of(data))
                assert_allclose(C, info.reference(data), rtol=2**-6, atol=2**-6)
        for base in (AG_GEMM, GEMM_RS):
            info, shape = base.with_dtype("fp8-block"), Shape(8, 32, 512)
            with info.context(shape, BF16) as ctx:
                (A, B, _), scales = info.arguments(info.operands(shape, BF16, 2), ctx)
                with pytest.raises(InvalidArgument, match="another algorithm for block scales"):
                    info.op.fn(A, B, ctx, algorithm="async_tp", **scales)
    return len(called)


def test_functions_return_what_torch_returns(spawn_ranks):
    untuned = {"TRITON_DIST_AUTOTUNE": "0"}
    assert spawn_ranks(2, all_of_them, env=untuned) == [(12, 4), (12, 4)]


def all_of_them():
    count, called = gathers(), as_candidates()
    scatters()
    refusals()
    return count, called
