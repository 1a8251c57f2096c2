"""A sum of products over ranks in one launch, for few rows: tiles go to who needs them, and once
all are multiplied, all programs add what has come.

``A[M, K] @ B[K, N]`` is this rank's addend. Who adds a row:

=============  ===========  ==================================================================
``TO_OWNERS``  ``PASS_ON``
=============  ===========  ==================================================================
no             no           all ranks: an all-reduce in one shot
yes            no           its owner, each rank M / NUM_RANKS rows in turn: a reduce-scatter
yes            yes          its owner, who sends the sum to all: an all-reduce in two shots;
                            the last owners may have fewer rows, or none
=============  ===========  ==================================================================

A program stores each of its tiles, rounded to the output's dtype, into this rank's part of a slot
of who adds it, [source rank, rows, N] with ``shard_elements`` elements a part. When it has stored
all, it tells the programs of the same number on all ranks, its own one too. Then what a rank adds
is dealt out to all its programs in *strips* of ``REDUCE_ROWS`` rows of a tile's columns. Who has a
strip waits for those programs of all ranks that have multiplied it, and adds the parts in fp32 in
the order of ranks: the same bits at every call, and on every rank. Sums that are passed on go to
[M, N] behind the parts of each rank's slot; who has added all its strips says so, and each program
takes those of its number from there.

Tiles are of the whole product, whoever needs their rows: B is read once for each BLOCK_SIZE_M rows,
not once for each rank. Each rank begins behind its own rows, so that not all send to the same one
at the same time.

This is an exchange (``exchange.py``), with its memory, its count of calls, and its reasons why a
slot is free: every call waits for something of every peer. So there is no look at the peers before
the kernel, and nothing to tell them behind it.

Nobody waits in a circle once all programs of a launch run, at most one on each multiprocessor: they
send before they wait, and wait for nothing but other programs' sending. But of ``TO_OWNERS`` these
have other numbers, so unlike the other exchanges this one gets nowhere while some program finds no
multiprocessor. Kernels that end by themselves only delay it. One of another stream that waits for
peers itself, such as a collective of NCCL, may hold multiprocessors of one rank and find none on
another: beside these, take other ways.

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
    await_programs,
    begin_call,
    behind,
    flags_at_ranks,
    slot_offset,
    tell_ranks,
)
from triton_dist.kernels.common.gemm_launch import config_for
from triton_dist.kernels.common.launch import Launch, as_rows, dot_precision, fits_descriptor
from triton_dist.kernels.common.row_bucket import row_bucket
from triton_dist.kernels.common.scattered_gemm_launch import rows_at_once, tiles_of_slab
from triton_dist.kernels.common.scattered_tiles import (
    add_partials,
    store_tile_by_pointers,
    target_at,
)
from triton_dist.kernels.common.tile_product import multiply_operands, operands_at
from triton_dist.kernels.common.tiles import number_in_group, tile_in_group


@jit
def _turn(rank, tiles_m, NUM_RANKS: tl.constexpr):
    """With which row of tiles a rank begins: that behind its own ones."""
    return (rank + 1) * tiles_m // NUM_RANKS % tiles_m


@jit(do_not_specialize=["M", "rank"])
def kernel_gemm_exchange(
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
    TO_OWNERS: tl.constexpr,
    PASS_ON: tl.constexpr,
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
    flags = flags_at_ranks(arrivals_ptr, arrivals_table, rank, NUM_RANKS, LANES)
    epoch = begin_call(calls_ptr)
    offset = slot_offset(epoch, slot_elements)
    tiles_m = tl.cdiv(M, BLOCK_SIZE_M)
    tiles_n = tl.cdiv(N, BLOCK_SIZE_N)
    # Of what a rank adds: its rows in a slot, its first one, and how many there are.
    rows, own_begin, own_rows = M, 0, M
    if TO_OWNERS:
        rows = tl.cdiv(M, NUM_RANKS)
        own_begin = rank * rows
        own_rows = min(rows, M - own_begin)
    a, b = operands_at(
        a_ptr, b_ptr, M, N, K, stride_bk, stride_bn,
        DESCRIPTORS, B_COLUMN_MAJOR, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K,
    )  # fmt: skip
    for tile in range(tl.program_id(0), tiles_m * tiles_n, NUM_SMS):
        m, n = tile_in_group(tile, tiles_m, tiles_n, GROUP_SIZE_M)
        row = (m + _turn(rank, tiles_m, NUM_RANKS)) % tiles_m * BLOCK_SIZE_M
        column = n * BLOCK_SIZE_N
        accumulator = multiply_operands(
            a, b, row, column, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, DESCRIPTORS,
            B_COLUMN_MAJOR, INPUT_PRECISION, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K,
        )  # fmt: skip
        for step in tl.static_range(1, NUM_RANKS + 1):
            adds = (rank + step) % NUM_RANKS
            first_row = row
            if TO_OWNERS:  # before its first row, or behind its last one, nothing is stored
                first_row = row - adds * rows
            if (first_row < rows) & (first_row > -BLOCK_SIZE_M):
                target_ptr = target_at(slots_table, adds, slots_ptr) + offset
                store_tile_by_pointers(
                    target_ptr + rank.to(tl.int64) * shard_elements, accumulator, first_row, column,
                    rows, N, "tile", BLOCK_SIZE_M, BLOCK_SIZE_N,
                )  # fmt: skip
    value = epoch * MAX_PIECES + 1
    tell_ranks(flags, 0, value, NUM_RANKS, LANES)
    sums_offset = offset + NUM_RANKS * shard_elements.to(tl.int64)  # with PASS_ON: [M, N]
    own_offset = 0  # of the own rows in C
    if PASS_ON:
        own_offset = rank.to(tl.int64) * rows * N
    strips_m = tl.cdiv(own_rows, REDUCE_ROWS)
    for strip in range(tl.program_id(0), strips_m * tiles_n, tl.num_programs(0)):
        row, n = strip % strips_m * REDUCE_ROWS, strip // strips_m
        last_row = min(row + REDUCE_ROWS, own_rows) - 1
        token = 0
        first_m, last_m = (own_begin + row) // BLOCK_SIZE_M, (own_begin + last_row) // BLOCK_SIZE_M
        for m in range(first_m, last_m + 1):
            sources = tl.arange(0, LANES)  # of which each came to this tile in its own turn
            turned = (m + tiles_m - _turn(sources, tiles_m, NUM_RANKS)) % tiles_m
            number = number_in_group(turned, n, tiles_m, tiles_n, GROUP_SIZE_M)
            token += await_programs(arrivals_ptr, guard_ptr, 0, number % NUM_SMS, value, NUM_RANKS)
        add_partials(
            slots_ptr + offset, shard_elements, bias_ptr, c_ptr + own_offset, row, n * BLOCK_SIZE_N,
            own_rows, N, token, rank, slots_table, sums_offset + own_offset,
            NUM_RANKS, HAS_BIAS, "all" if PASS_ON else "tile", REDUCE_ROWS, BLOCK_SIZE_N,
            REDUCE_ROWS,
        )  # fmt: skip
    if PASS_ON:
        tell_ranks(flags, 1, value, NUM_RANKS, LANES)
        # Strips of the same number are those of the programs of the same number.
        token = await_peers(arrivals_ptr, guard_ptr, 1, value, NUM_RANKS, LANES)
        for step in tl.static_range(1, NUM_RANKS):
            owner = (rank + step) % NUM_RANKS
            owned = min(rows, M - owner * rows)
            first = owner.to(tl.int64) * rows * N
            _copy_strips(
                slots_ptr + behind(sums_offset, token) + first, c_ptr + first, owned, N, tiles_n,
                REDUCE_ROWS, BLOCK_SIZE_N,
            )  # fmt: skip


@jit
def _copy_strips(
    from_ptr, to_ptr, rows, N, tiles_n, REDUCE_ROWS: tl.constexpr, BLOCK_SIZE_N: tl.constexpr
):
    """Copy this program's strips of [rows, N]."""
    strips_m = tl.cdiv(rows, REDUCE_ROWS)
    inside = tl.arange(0, REDUCE_ROWS)[:, None] * N + tl.arange(0, BLOCK_SIZE_N)[None, :]
    for strip in range(tl.program_id(0), strips_m * tiles_n, tl.num_programs(0)):
        row, column = strip % strips_m * REDUCE_ROWS, strip // strips_m * BLOCK_SIZE_N
        mask = (tl.arange(0, REDUCE_ROWS) < rows - row)[:, None]
        mask &= (tl.arange(0, BLOCK_SIZE_N) < N - column)[None, :]
        block = inside + (row.to(tl.int64) * N + column)
        # Not from L1, where what the last use left may be.
        values = tl.load(from_ptr + block, mask=mask, cache_modifier=".cg")
        tl.store(to_ptr + block, values, mask=mask)


def programs_of(config: triton.Config, M: int, N: int, num_sms: int) -> int:
    """Programs of a launch for [M, N]."""
    most: int = min(num_sms, MAX_CTAS.value)
    return min(most, tiles_of_slab(config, M, N))


def options_of(
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    config: triton.Config,
    num_ranks: int,
    num_sms: int,
    persistent: bool,
) -> dict[str, Any]:
    """What every kernel takes that multiplies tiles and sums them in one launch."""
    precision = dot_precision(A.dtype)
    options = {
        **config_for(config, A.dtype).all_kwargs(),
        "NUM_RANKS": num_ranks,
        "DESCRIPTORS": persistent
        and precision != "ieee"
        and A.is_contiguous()
        and fits_descriptor(A, B),
        "HAS_BIAS": bias is not None,
        "B_COLUMN_MAJOR": B.stride(0) == 1,
        "INPUT_PRECISION": precision,
        "NUM_SMS": min(num_sms, MAX_CTAS.value),
    }
    options.pop("EPILOGUE_SUBTILE", None)  # of TMA stores
    return options


def exchanged_gemm(
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
    to_owners: bool,
    pass_on: bool = False,
) -> Launch:
    """The launch that computes ``A @ B``, sends it to who needs it, and sums what comes into C.

    Args:
        A: [M, K]. B: [K, N], any strides, both. C: [M, N], or of ``to_owners`` alone
            [M / num_ranks, N], and then M is a multiple of ``num_ranks``; contiguous.
        bias: [N], added to the sum; contiguous.
        slots: of an exchange, as its kernels take them. shard_elements: of a part in a slot.
        persistent: read A and B through descriptors where they can be. As for ``sharded_gemm``,
            what is not contiguous, or no multiple of 16 bytes, goes by pointers all the same.
    """
    A = as_rows(A)
    (M, K), N = A.shape, B.shape[1]
    num_ctas = programs_of(config, M, N, num_sms)
    block_m, block_n = config.kwargs["BLOCK_SIZE_M"], config.kwargs["BLOCK_SIZE_N"]
    options: dict[str, Any] = {
        **options_of(A, B, bias, config, num_ranks, num_sms, persistent),
        "LANES": triton.next_power_of_2(num_ranks),
        "TO_OWNERS": to_owners,
        "PASS_ON": pass_on,
        "REDUCE_ROWS": rows_at_once(block_m, block_n, num_ranks * A.element_size()),
    }
    if to_owners:
        # The same for all of a bucket, so that one kernel serves it.
        rows = triton.cdiv(row_bucket(M), num_ranks)
        strip = _rows_of_a_strip(rows, triton.cdiv(N, block_n), options["NUM_SMS"])
        options["REDUCE_ROWS"] = min(options["REDUCE_ROWS"], strip)
    arguments = (
        A, B, C, C if bias is None else bias, *slots, shard_elements, M, N, K, *A.stride(),
        *B.stride(), rank,
    )  # fmt: skip
    return Launch(kernel_gemm_exchange, (num_ctas,), arguments, options)


def _rows_of_a_strip(rows: int, columns: int, programs: int) -> int:
    """A power of two with which ``rows`` rows in ``columns`` columns of strips are about one strip
    for each program."""
    each: int = triton.next_power_of_2(triton.cdiv(rows * columns, programs))
    return each
