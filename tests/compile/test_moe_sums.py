"""The sum over choices, and what adds chunks of columns over ranks, for sm_90 without a GPU."""

from __future__ import annotations

import re

import pytest
import torch

from tests.compile.scattered import ACQUIRE, TMA_LOAD, compile_launch
from triton_dist.kernels.common.exchange.protocol import Peers, Plan, Slots
from triton_dist.kernels.common.exchange.pushed import Pushed
from triton_dist.kernels.common.launch import Launch
from triton_dist.kernels.common.moe.columns import kernel_add_columns
from triton_dist.kernels.common.moe.product import grouped_product
from triton_dist.kernels.common.moe.routing import block_map
from triton_dist.kernels.common.moe.spaces import GROUPED_TILES
from triton_dist.kernels.common.moe.topk_exchange import kernel_topk_exchange
from triton_dist.kernels.common.moe.topk_sum import topk_sum
from triton_dist.testing.compile_only import compile_only

M, N, E = 8192, 4096, 128


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def summed(topk, width, dtype=torch.bfloat16, is_sorted=False):
    ids = meta(M, topk, dtype=torch.int32)
    rows = meta(M * topk, dtype=torch.int32) if is_sorted else None
    choices = meta(M, topk, dtype=torch.float32)
    products, out = meta(M * topk, width, dtype=dtype), meta(M * N, dtype=dtype)
    launch = topk_sum(products, choices, ids, rows, out, E, slab_rows=M // 2, first=512, N=N)
    with compile_only(90):
        return compile_launch(launch)


@pytest.mark.parametrize(
    ("topk", "width"), [(1, 1024), (2, 128), (8, 128), (8, 4096), (10, 1024), (10, 4096)]
)
def test_choices_are_read_by_16_bytes_all_at_once(topk, width):
    kernel = summed(topk, width)
    assert kernel.stack_bytes == 0
    assert kernel.registers <= 128
    assert len(re.findall(r"ld\.global\.v4\.b32", kernel.ptx)) >= topk
    assert "st.global.v4.b32" in kernel.ptx
    # The last choice is on its way before the first is rounded.
    assert kernel.ptx.rindex("ld.global") < kernel.ptx.index("cvt.rn.bf16")


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 256), (torch.float16, 100)])
def test_other_dtypes_and_widths_fit(dtype, width):
    assert summed(8, width, dtype, is_sorted=True).stack_bytes == 0


def added(num_ranks, width, block_n, aligned=True, dtype=torch.bfloat16):
    words = meta(64, dtype=torch.int64)
    pushed = Pushed(meta(1 << 20, dtype=dtype), words, words)
    sizes = (M // num_ranks, N, width, 1 << 26, M, 1)
    options = {
        "NUM_RANKS": num_ranks, "ALIGNED": aligned, "BLOCK_SIZE_M": 2048 // block_n,
        "BLOCK_SIZE_N": block_n, "num_warps": 4,
    }  # fmt: skip
    operands = (meta(1 << 20, dtype=dtype), meta(1 << 20, dtype=dtype), pushed)
    with compile_only(90):
        return compile_launch(Launch(kernel_add_columns, (528,), (*operands, *sizes), options))


@pytest.mark.parametrize(
    ("num_ranks", "width", "block_n"),
    [(2, 512, 512), (4, 128, 128), (4, 4096, 1024), (8, 128, 128), (8, 4096, 1024)],
)
def test_parts_are_read_by_16_bytes_behind_their_flags(num_ranks, width, block_n):
    kernel = added(num_ranks, width, block_n)
    assert kernel.stack_bytes == 0
    assert kernel.registers <= 128
    loads = [*re.finditer(r"ld\.global\.cg\.v4\.b32", kernel.ptx)]
    assert len(loads) >= 2 * num_ranks  # 2048 elements, 16 a thread
    assert kernel.ptx.count(ACQUIRE) >= 1
    assert kernel.ptx.index(ACQUIRE) < loads[0].start()
    assert "st.global.v4.b32" in kernel.ptx


def exchanged(topk, num_ranks, whole, is_sorted=False, dtype=torch.bfloat16, width=N):
    words, table = meta(64, dtype=torch.int64), meta(16, dtype=torch.int64)
    slots, peers = (
        Slots(meta(1 << 20, dtype=dtype), table, 1 << 20),
        Peers(words, table, words, words),
    )
    ids = meta(64, topk, dtype=torch.int32)
    rows = meta(64 * topk, dtype=torch.int32) if is_sorted else None
    operands = meta(64 * topk, width, dtype=dtype), meta(64, topk, dtype=torch.float32), ids, rows
    out = meta(64, width, dtype=dtype)
    plan = Plan(num_ranks, num_ranks, 8192 // out.element_size(), 1)
    sizes = (32, width, E, 1 << 18, 64, 1)
    options = {"TOPK": topk, "WHOLE": whole, "plan": plan, "num_warps": 16}
    launch = Launch(kernel_topk_exchange, (128,), (*operands, out, slots, peers, *sizes), options)
    with compile_only(90):
        return compile_launch(launch)


@pytest.mark.parametrize(
    ("topk", "num_ranks", "whole", "is_sorted"),
    [(8, 2, False, False), (10, 8, True, True)],
)
def test_one_launch_sums_choices_as_it_loads_and_ranks_behind_their_flags(
    topk, num_ranks, whole, is_sorted
):
    kernel = exchanged(topk, num_ranks, whole, is_sorted)
    assert kernel.stack_bytes <= 16  # an address
    assert kernel.registers <= 128
    acquire = kernel.ptx.rindex("acquire")  # of the flags of all ranks
    before, after = kernel.ptx[:acquire], kernel.ptx[acquire:]
    own_slab = 1 if whole else num_ranks
    assert len(re.findall(r"ld\.global\.v4\.b32", before)) >= topk * own_slab
    # Here, and at each peer, and at last the sum.
    assert len(re.findall(r"st\.global\.v4\.b32", before)) >= num_ranks
    assert len(re.findall(r"ld\.global\.cg\.v4\.b32", after)) >= num_ranks
    assert "st.global.v4.b32" in after


def test_odd_columns_and_fp32_fit():
    assert added(4, 96, 128, aligned=False).stack_bytes == 0
    assert added(2, 256, 256, aligned=False, dtype=torch.float32).stack_bytes == 0
    assert exchanged(3, 2, False, dtype=torch.float32, width=100).stack_bytes == 0


def test_columns_of_weights_come_by_tma():
    """A chunk is a slice, whose strides are those of all weights."""
    weights = meta(E, 768, N)[:, :, 1024:2048]
    blocks = block_map(meta(M, 8, dtype=torch.int32), E, 128)
    launch = grouped_product(
        meta(M * 8, 768), weights, meta(M * 8, 1024), blocks, GROUPED_TILES[0], is_sorted=False,
        silu_mul=False,
    )  # fmt: skip
    with compile_only(90):
        kernel = compile_launch(launch)
    assert kernel.stack_bytes == 0
    assert len(TMA_LOAD.findall(kernel.ptx)) == kernel.num_stages
