"""Offsets of 2**31 elements and more within a tile, in views into sparse memory."""

from __future__ import annotations

import mmap
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from tests.distributed.gemm_calls import uniform
from triton_dist import jit
from triton_dist.kernels.common.scatter.one_launch import _copy_sub_tiles
from triton_dist.kernels.common.scatter.partials import SumOutput
from triton_dist.kernels.common.scatter.tiles import (
    add_deferred_tiles,
    add_partials,
    store_tile_by_pointers,
    tile_constants,
)
from triton_dist.kernels.common.scatter.to_all import copy_sums, kernel_copy_sums
from triton_dist.kernels.nvidia import (
    create_gemm_rs_context,
    create_sp_decode_context,
    gemm_non_persistent,
    gemm_persistent,
    gemm_rs,
    matmul,
    sp_decode_attn,
)
from triton_dist.language.signals import tagged
from triton_dist.testing import assert_allclose
from triton_dist.testing.opinfo.base import tolerance

# No multiple of 16 bytes, which descriptors would need; times the rows of a tile, beyond 2**31.
FAR = 2**27 + 1
ROWS, COLUMNS = 32, 16
MAP_NORESERVE = 0x4000  # Linux; the module mmap has it from Python 3.13 on


def spread(values, strides):
    """``values`` at these strides in memory of which only their own pages exist."""
    last = sum((size - 1) * stride for size, stride in zip(values.shape, strides, strict=True))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, (last + 1) * values.element_size(), flags=flags)
    flat = torch.frombuffer(memory, dtype=values.dtype)
    return flat.as_strided(values.shape, strides).copy_(values)


A, B = uniform(1, (5, 40), torch.float16), uniform(2, (40, 24), torch.float16)
PRODUCT = (A.double() @ B.double()).half()


def check(C):
    assert_allclose(C, PRODUCT, rtol=tolerance(A.dtype), atol=tolerance(A.dtype))


@pytest.mark.parametrize("op", [matmul, gemm_persistent, gemm_non_persistent])
def test_a_product_of_operands_that_are_far_apart_along_k(op):
    check(op(spread(A, (1, FAR)), B, autotune=False))
    check(op(A, spread(B, (FAR, 1)), autotune=False))


def test_tiles_that_are_summed_of_operands_that_are_far_apart_along_k():
    """By the first config of each algorithm."""
    first = {config["algorithm"]: config for config in reversed(list(gemm_rs.config_space))}
    assert {"fused", "one_launch"} < set(first)
    far = spread(B, (FAR, 1))
    with create_gemm_rs_context(5, 24, 0, 1, 8, torch.float16) as ctx:
        for config in first.values():
            check(gemm_rs.fn(A, far, ctx, **config))


def test_attention_to_tokens_of_a_page_that_are_far_apart():
    keys = uniform(3, (1, ROWS, 1, COLUMNS), torch.float16)
    q, lens = keys[:, 0], torch.full((1, 1), ROWS, dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    with create_sp_decode_context(0, 1, 1, 1, 1, COLUMNS, torch.float16) as ctx:
        near, _ = sp_decode_attn.fn(q, keys, keys, lens, ctx, table)
        far = spread(keys, (COLUMNS, FAR, COLUMNS, 1))
        assert torch.equal(sp_decode_attn.fn(q, far, far, lens, ctx, table)[0], near)


def test_kernels_use_64_bits_only_where_they_must():
    config = triton.Config(
        {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}
    )
    far = 2**31 // 64

    def of(a_stride, b_stride, columns):
        A = torch.empty_strided((64, 64), (1, a_stride), device="meta", dtype=torch.float16)
        B = torch.empty_strided((64, columns), (b_stride, 1), device="meta", dtype=torch.float16)
        return tile_constants(config, A, B)[0].INT64_OFFSETS

    assert not of(far - 1, far - 1, far - 1)
    assert of(far, 64, 64)
    assert of(64, far, 64)
    assert of(64, 64, far)
    slot = SimpleNamespace(epoch=None)
    for columns in (far - 1, far):
        to = SimpleNamespace(
            num_ranks=2, rank=0, mode="all", slot=slot, rows_per_row_block=lambda M: M // 2,
            kernel_arguments=lambda C, bias: (None, None),
        )  # fmt: skip
        C = torch.empty(128, columns, dtype=torch.float16, device="meta")
        deferred = add_deferred_tiles(C, None, config, to, M=128, num_sms=8)
        assert deferred.options["tile"].INT64_OFFSETS is (columns == far)
        copied = copy_sums(C, C, None, config, to, num_chunks=1, copy=True)
        assert copied.options["INT64_OFFSETS"] is (columns == far)


@jit
def kernel_store(
    out_ptr, partials_ptr, out, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INT64: tl.constexpr
):
    """Write a tile, then sum and copy it, by the functions that do so in kernels. Grid (1,)."""
    zero, rows = tl.program_id(0), tl.program_id(0) + ROWS
    block = tl.full((ROWS, COLUMNS), 1, tl.float32) * (1 + tl.arange(0, ROWS))[:, None]
    store_tile_by_pointers(partials_ptr, block, zero, zero, rows, N, False, ROWS, COLUMNS, INT64)
    add_partials(
        partials_ptr, zero, out, 0, 0, zero, zero, rows, N, zero, zero, 1, False, ROWS, COLUMNS,
        ROWS, INT64,
    )  # fmt: skip
    _copy_sub_tiles(out.c, out_ptr, zero, rows, N, 1, 1, 1, ROWS, COLUMNS, ROWS, INT64)


def test_a_tile_is_stored_summed_and_copied_where_its_rows_are_far_apart():
    values = torch.arange(1.0, ROWS + 1).half()[:, None].expand(ROWS, COLUMNS)
    partials, sums, out = (spread(torch.zeros(ROWS, COLUMNS).half(), (FAR, 1)) for _ in range(3))
    kernel_store[(1,)](out, partials, SumOutput(sums, None, None, None), FAR, ROWS, COLUMNS, True)
    for written in (partials, sums, out):
        assert torch.equal(written, values)


@jit
def kernel_flag(flag_ptr, size):
    tl.store(flag_ptr, tagged(tl.zeros((), tl.int32), size))


def test_sums_of_a_peer_are_copied_where_their_rows_are_far_apart():
    values = uniform(1, (ROWS, COLUMNS), torch.float16)
    sums, C = spread(values, (FAR, 1)), spread(torch.zeros_like(values), (FAR, 1))
    arrivals, epoch = torch.zeros(2, dtype=torch.int64), torch.zeros(16, dtype=torch.int64)
    kernel_flag[(1,)](arrivals, 2 * ROWS)
    kernel_copy_sums[(1,)](
        C, sums, arrivals, epoch, 2 * ROWS, ROWS, FAR, 1, 1, NUM_RANKS=2, COPY=True,
        BLOCK_SIZE_M=ROWS, BLOCK_SIZE_N=COLUMNS, GROUP_SIZE_M=1, COPY_ROWS=ROWS,
        INT64_OFFSETS=True,
    )  # fmt: skip
    assert torch.equal(C, values)
