"""GEMM whose tiles go to all ranks, which all add all of them: an all-reduce of few rows, in one
launch.

``A[M, K] @ B[K, N]`` is this rank's addend of a product. A program stores each of its tiles,
rounded to the output's dtype, into this rank's part of every rank's slot, [source rank, M, N] with
``shard_elements`` elements a part. When it has stored all, it tells the programs of the same number
on its peers, waits for them, goes over its tiles again and adds the parts in fp32 in the order of
ranks: the same bits on every rank.

This is an exchange (``exchange.py``), with its memory, its count of calls, and its reasons why a
slot is free and nobody waits in a circle: no look at the peers before it, nothing to tell them
behind it.

Tiles are stored by ordinary stores: they are few, and a release orders such stores, while a TMA
store has to be waited for first, and needs a descriptor for each peer.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from triton_dist._jit import jit
from triton_dist.kernels.common.exchange import (
    MAX_CTAS,
    MAX_PIECES,
    await_peers,
    begin_call,
    flags_at_peers,
    slot_offset,
    tell_peers,
)
from triton_dist.kernels.common.gemm_launch import config_for
from triton_dist.kernels.common.launch import Launch, as_rows, dot_precision, fits_descriptor
from triton_dist.kernels.common.scattered_gemm_launch import rows_at_once, tiles_of_slab
from triton_dist.kernels.common.scattered_tiles import (
    add_partials,
    store_tile_by_pointers,
    target_at,
)
from triton_dist.kernels.common.tile_product import multiply_tile, multiply_tile_by_pointers
from triton_dist.kernels.common.tiles import tile_in_group


@jit(do_not_specialize=["M", "rank"])
def kernel_gemm_broadcast(
    a_ptr,
    b_ptr,
    c_ptr,
    bias_ptr,
    slots_ptr,
    slots_table,
    arrivals_ptr,
    arrivals_table,
    calls_ptr,
    guard_ptr,
    slot_elements,
    shard_elements,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    rank,
    NUM_RANKS: tl.constexpr,
    LANES: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    B_COLUMN_MAJOR: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    NUM_SMS: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
    REDUCE_ROWS: tl.constexpr,
):
    """``DESCRIPTORS``: read A and B through tensor descriptors (TMA from sm_90 on), else by
    pointers, of any strides. Grid (min(NUM_SMS, tiles),), up to ``MAX_CTAS``."""
    # What needs no product comes first, so that it is under way meanwhile.
    flags = flags_at_peers(arrivals_ptr, arrivals_table, rank, NUM_RANKS, LANES)
    epoch = begin_call(calls_ptr)
    offset = slot_offset(epoch, slot_elements)
    tiles_m = tl.cdiv(M, BLOCK_SIZE_M)
    tiles_n = tl.cdiv(N, BLOCK_SIZE_N)
    if DESCRIPTORS:
        a_desc = tl.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BLOCK_SIZE_M, BLOCK_SIZE_K])
        if B_COLUMN_MAJOR:
            b_desc = tl.make_tensor_descriptor(
                b_ptr, [N, K], [stride_bn, 1], [BLOCK_SIZE_N, BLOCK_SIZE_K]
            )
        else:
            b_desc = tl.make_tensor_descriptor(
                b_ptr, [K, N], [stride_bk, 1], [BLOCK_SIZE_K, BLOCK_SIZE_N]
            )
    for tile in range(tl.program_id(0), tiles_m * tiles_n, NUM_SMS):
        m, n = tile_in_group(tile, tiles_m, tiles_n, GROUP_SIZE_M)
        row, column = m * BLOCK_SIZE_M, n * BLOCK_SIZE_N
        if DESCRIPTORS:
            accumulator = multiply_tile(
                a_desc, b_desc, row, column, K, 0, 1,
                B_COLUMN_MAJOR, INPUT_PRECISION, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K,
            )  # fmt: skip
        else:
            accumulator = multiply_tile_by_pointers(
                a_ptr, b_ptr, row, M - row, column, N, K,
                stride_am, stride_ak, stride_bk, stride_bn,
                INPUT_PRECISION, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K,
            )  # fmt: skip
        for step in tl.static_range(1, NUM_RANKS + 1):
            target_ptr = target_at(slots_table, (rank + step) % NUM_RANKS, slots_ptr) + offset
            store_tile_by_pointers(
                target_ptr + rank.to(tl.int64) * shard_elements, accumulator, row, column, M, N,
                "tile", BLOCK_SIZE_M, BLOCK_SIZE_N,
            )  # fmt: skip
    value = epoch * MAX_PIECES + 1
    tell_peers(flags, 0, value, rank, NUM_RANKS, LANES)
    token = await_peers(arrivals_ptr, guard_ptr, 0, value, rank, NUM_RANKS)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, NUM_SMS):
        m, n = tile_in_group(tile, tiles_m, tiles_n, GROUP_SIZE_M)
        add_partials(
            slots_ptr + offset, shard_elements, bias_ptr, c_ptr, m * BLOCK_SIZE_M,
            n * BLOCK_SIZE_N, M, N, token, rank, slots_table, 0,
            NUM_RANKS, HAS_BIAS, "tile", BLOCK_SIZE_M, BLOCK_SIZE_N, REDUCE_ROWS,
        )  # fmt: skip


def programs_of(config: triton.Config, M: int, N: int, num_sms: int) -> int:
    """Programs of a launch for [M, N]."""
    most: int = min(num_sms, MAX_CTAS.value)
    return min(most, tiles_of_slab(config, M, N))


def broadcast_gemm(
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    bias: torch.Tensor | None,
    config: triton.Config,
    slots: tuple[Any, ...],
    shard_elements: int,
    *,
    rank: int,
    num_ranks: int,
    num_sms: int,
    persistent: bool,
) -> Launch:
    """The launch that computes ``A @ B``, sends it to all ranks, and sums what all send into C.

    Args:
        A: [M, K]. B: [K, N], any strides, both. C: [M, N], contiguous.
        bias: [N], added to the sum; contiguous.
        slots: of an exchange, as its kernels take them. shard_elements: of a part in a slot.
        persistent: read A and B through descriptors where they can be. As for ``sharded_gemm``,
            what is not contiguous, or no multiple of 16 bytes, goes by pointers all the same.
    """
    A = as_rows(A)
    (M, K), N = A.shape, B.shape[1]
    precision = dot_precision(A.dtype)
    block_m, block_n = config.kwargs["BLOCK_SIZE_M"], config.kwargs["BLOCK_SIZE_N"]
    options: dict[str, Any] = {
        **config_for(config, A.dtype).all_kwargs(),
        "NUM_RANKS": num_ranks,
        "LANES": triton.next_power_of_2(num_ranks),
        "DESCRIPTORS": persistent
        and precision != "ieee"
        and A.is_contiguous()
        and fits_descriptor(A, B),
        "HAS_BIAS": bias is not None,
        "B_COLUMN_MAJOR": B.stride(0) == 1,
        "INPUT_PRECISION": precision,
        "NUM_SMS": min(num_sms, MAX_CTAS.value),
        "REDUCE_ROWS": rows_at_once(block_m, block_n, num_ranks * A.element_size()),
    }
    options.pop("EPILOGUE_SUBTILE", None)  # of TMA stores
    arguments = (
        A, B, C, C if bias is None else bias, *slots, shard_elements, M, N, K, *A.stride(),
        *B.stride(), rank,
    )  # fmt: skip
    num_ctas = programs_of(config, M, N, num_sms)
    return Launch(kernel_gemm_broadcast, (num_ctas,), arguments, options)
