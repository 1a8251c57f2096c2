"""GEMM whose tiles go to the ranks that own their rows, and the sum of what arrives.

``A[M, K] @ B[K, N]`` is this rank's addend of a product; M consists of ``NUM_RANKS`` slabs of
``rows`` rows, one owned by each rank. A tile belongs to one slab and is stored, rounded to the
output's dtype, into this rank's part of the owner's slot:

    partials of a slot, on each rank: [source rank, max_rows, N], ``slot_stride`` elements a rank

Where the tiles of slab s go is ``targets_ptr[s]``, an address; what says that they are there is an
int32 at ``flags_ptr[s]``, also an address. Three ways (``SCATTER``):

``"tile"``      target: the owner's slot; flag ``[tile * NUM_RANKS + rank]`` on the owner is set to
                the epoch. The own slab comes last: the program that has computed one of its tiles
                waits for the same tile of every peer, and adds them all.
``"slab"``      target: memory of this rank, from which a copy engine pushes; one counter a slab
                counts its tiles. ``kernel_reduce_slab`` adds, afterwards.
``"add"``       target: one fp32 sum on the owner, to which tiles are added by atomics; flags as of
                ``"tile"``. Who finishes a tile of the own slab waits, rounds, and leaves zeros.

A sum is taken in fp32 over all ranks in their order, so ``"tile"`` and ``"slab"`` give the same
bits on every call; ``"add"`` adds in the order of arrival.

Nothing waits before its own tiles for others are on their way, and programs start in the order of
their numbers, so ranks cannot wait in a circle.
"""

from __future__ import annotations

import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.kernels.common.sharded_gemm import store_tile
from triton_dist.kernels.common.tile_product import multiply_tile, multiply_tile_by_pointers
from triton_dist.kernels.common.tiles import slab_in_scatter_order, tile_in_group

# Bytes of which every target is a multiple. The compiler knows nothing of an address from a table;
# without this it stores 2 bytes at a time.
TARGET_ALIGNMENT = tl.constexpr(16)


@jit
def address_at(table_ptr, slab, like_ptr):
    """Entry ``slab`` of a table of addresses, as a pointer of ``like_ptr``'s type."""
    return tl.load(table_ptr + slab).to(like_ptr.dtype)


@jit
def target_at(targets_ptr, slab, like_ptr):
    """Where the tiles of ``slab`` go. The hint stands here, since one on the result of a call is
    lost when the call is inlined (Triton 3.6)."""
    return tl.multiple_of(tl.load(targets_ptr + slab).to(like_ptr.dtype), TARGET_ALIGNMENT)


@jit
def announce_tile(
    flags_ptr, epoch_ptr, slab, tile, rank, NUM_RANKS: tl.constexpr, SCATTER: tl.constexpr
):
    """Say that a tile of ``slab`` is there, after ``publish_tile``. An own tile needs no flag."""
    if slab != rank:
        flag_ptr = address_at(flags_ptr, slab, epoch_ptr)
        if SCATTER == "slab":
            dl.notify(flag_ptr, 1, "add")
        else:
            dl.notify(flag_ptr + tile * NUM_RANKS + rank, tl.load(epoch_ptr))


@jit
def await_partials(arrivals_ptr, epoch_ptr, tile, rank, NUM_RANKS: tl.constexpr):
    """Wait for ``tile`` of every peer; gives a token."""
    epoch = tl.load(epoch_ptr)
    token = 0
    for step in range(1, NUM_RANKS):
        source = (rank + step) % NUM_RANKS
        token += dl.wait(arrivals_ptr + tile * NUM_RANKS + source, 1, epoch, epoch_ptr + 1)
    return token


@jit
def add_partials(
    partials_ptr,
    slot_stride,
    bias_ptr,
    c_ptr,
    row,
    column,
    rows,
    N,
    token,
    NUM_RANKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCATTER: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    REDUCE_ROWS: tl.constexpr,
):
    """Sum a tile over all ranks and store it to C [rows, N], some rows at a time, so that the
    parts fit in registers."""
    column_index = column + tl.arange(0, BLOCK_SIZE_N)
    column_mask = column_index < N
    inside = tl.arange(0, REDUCE_ROWS)[:, None] * N + tl.arange(0, BLOCK_SIZE_N)[None, :]
    for first in range(0, BLOCK_SIZE_M, REDUCE_ROWS):
        first_row = dl.consume_token(row + first, token)
        mask = (first_row + tl.arange(0, REDUCE_ROWS) < rows)[:, None] & column_mask[None, :]
        begin = first_row.to(tl.int64) * N + column
        total = tl.zeros((REDUCE_ROWS, BLOCK_SIZE_N), dtype=tl.float32)
        if SCATTER == "add":
            # What peers have added by atomics lies in L2; L1 may hold the zeros of the last use.
            sums = partials_ptr + begin + inside
            total += tl.load(sums, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(sums, tl.zeros_like(total), mask=mask)
        else:
            for source in tl.static_range(NUM_RANKS):
                parts = partials_ptr + source * slot_stride.to(tl.int64) + begin + inside
                part = tl.load(parts, mask=mask, other=0.0, cache_modifier=".cg")
                total += part.to(tl.float32)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + column_index, mask=column_mask, other=0.0)
            total += bias.to(tl.float32)[None, :]
        tl.store(c_ptr + begin + inside, total.to(c_ptr.dtype.element_ty), mask=mask)


@jit
def store_tile_by_pointers(
    target_ptr,
    accumulator,
    row,
    column,
    rows,
    N,
    SCATTER: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
):
    """Store a tile, or add it, at its place in [rows, N] from ``target_ptr`` on."""
    local_row, local_column = tl.arange(0, BLOCK_SIZE_M), tl.arange(0, BLOCK_SIZE_N)
    mask = (local_row < rows - row)[:, None] & (local_column < N - column)[None, :]
    # 64-bit only where it must be: an offset of 64 bits for each element would cost registers.
    tile_ptr = target_ptr + (row.to(tl.int64) * N + column)
    block = tile_ptr + (local_row[:, None] * N + local_column[None, :])
    if SCATTER == "add":
        tl.atomic_add(block, accumulator, mask=mask, sem="relaxed", scope="sys")
    else:
        tl.store(block, accumulator.to(target_ptr.dtype.element_ty), mask=mask)


@jit
def finish_tile(
    flags_ptr,
    arrivals_ptr,
    epoch_ptr,
    partials_ptr,
    slot_stride,
    bias_ptr,
    c_ptr,
    slab,
    tile,
    row,
    column,
    rows,
    N,
    rank,
    NUM_RANKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCATTER: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    REDUCE_ROWS: tl.constexpr,
):
    """What follows the store of a tile: announce it to its owner, or add up an own one."""
    announce_tile(flags_ptr, epoch_ptr, slab, tile, rank, NUM_RANKS, SCATTER)
    if SCATTER != "slab":  # noqa: SIM102  # a constexpr: not to be joined with the runtime condition
        if slab == rank:
            token = await_partials(arrivals_ptr, epoch_ptr, tile, rank, NUM_RANKS)
            add_partials(
                partials_ptr, slot_stride, bias_ptr, c_ptr, row, column, rows, N, token,
                NUM_RANKS, HAS_BIAS, SCATTER, BLOCK_SIZE_M, BLOCK_SIZE_N, REDUCE_ROWS,
            )  # fmt: skip


@jit(do_not_specialize=["rows", "rank"])
def kernel_gemm_scatter_persistent(
    a_ptr,
    b_ptr,
    c_ptr,
    bias_ptr,
    partials_ptr,
    targets_ptr,
    flags_ptr,
    arrivals_ptr,
    epoch_ptr,
    rows,
    N,
    K,
    stride_b,
    slot_stride,
    rank,
    NUM_RANKS: tl.constexpr,
    SCATTER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    B_COLUMN_MAJOR: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    NUM_SMS: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
    EPILOGUE_SUBTILE: tl.constexpr,
    REDUCE_ROWS: tl.constexpr,
):
    """Persistent kernel on tensor descriptors (TMA from sm_90 on); grid (min(NUM_SMS, tiles),).

    A slab's tiles begin with the program after the one that had the last tile of the slab before,
    so no wave is lost between slabs. The descriptor of a target is made once a slab and program.
    """
    tiles_m = tl.cdiv(rows, BLOCK_SIZE_M)
    tiles_n = tl.cdiv(N, BLOCK_SIZE_N)
    tiles_per_slab = tiles_m * tiles_n
    store_n: tl.constexpr = BLOCK_SIZE_N // 2 if EPILOGUE_SUBTILE else BLOCK_SIZE_N

    a_desc = tl.make_tensor_descriptor(
        a_ptr, [rows * NUM_RANKS, K], [K, 1], [BLOCK_SIZE_M, BLOCK_SIZE_K]
    )
    if B_COLUMN_MAJOR:
        b_desc = tl.make_tensor_descriptor(
            b_ptr, [N, K], [stride_b, 1], [BLOCK_SIZE_N, BLOCK_SIZE_K]
        )
    else:
        b_desc = tl.make_tensor_descriptor(
            b_ptr, [K, N], [stride_b, 1], [BLOCK_SIZE_K, BLOCK_SIZE_N]
        )

    for position in range(NUM_RANKS):
        slab = slab_in_scatter_order(position, rank, NUM_RANKS)
        target_ptr = target_at(targets_ptr, slab, partials_ptr)
        if SCATTER != "add":
            target_desc = tl.make_tensor_descriptor(
                target_ptr, [1, rows, N], [rows.to(tl.int64) * N, N, 1], [1, BLOCK_SIZE_M, store_n]
            )
        taken = position * tiles_per_slab % NUM_SMS
        first = (tl.program_id(0) + NUM_SMS - taken) % NUM_SMS
        for tile in range(first, tiles_per_slab, NUM_SMS):
            m, n = tile_in_group(tile, tiles_m, tiles_n, GROUP_SIZE_M)
            row, column = m * BLOCK_SIZE_M, n * BLOCK_SIZE_N
            accumulator = multiply_tile(
                a_desc, b_desc, slab * rows + row, column, K, 0, 1,
                B_COLUMN_MAJOR, INPUT_PRECISION, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K,
            )  # fmt: skip
            if SCATTER == "add":
                store_tile_by_pointers(
                    target_ptr, accumulator, row, column, rows, N,
                    SCATTER, BLOCK_SIZE_M, BLOCK_SIZE_N,
                )  # fmt: skip
                tl.debug_barrier()
            else:
                store_tile(
                    target_desc, accumulator, 0, row, column,
                    EPILOGUE_SUBTILE, BLOCK_SIZE_M, BLOCK_SIZE_N,
                )  # fmt: skip
                dl.publish_tile()
            finish_tile(
                flags_ptr, arrivals_ptr, epoch_ptr, partials_ptr, slot_stride, bias_ptr, c_ptr,
                slab, tile, row, column, rows, N, rank,
                NUM_RANKS, HAS_BIAS, SCATTER, BLOCK_SIZE_M, BLOCK_SIZE_N, REDUCE_ROWS,
            )  # fmt: skip


@jit(do_not_specialize=["rows", "rank"])
def kernel_gemm_scatter_non_persistent(
    a_ptr,
    b_ptr,
    c_ptr,
    bias_ptr,
    partials_ptr,
    targets_ptr,
    flags_ptr,
    arrivals_ptr,
    epoch_ptr,
    rows,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    slot_stride,
    rank,
    NUM_RANKS: tl.constexpr,
    SCATTER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
    REDUCE_ROWS: tl.constexpr,
):
    """One tile a program on pointers, for any strides of A and B; grid (tiles,)."""
    tiles_m = tl.cdiv(rows, BLOCK_SIZE_M)
    tiles_n = tl.cdiv(N, BLOCK_SIZE_N)
    tiles_per_slab = tiles_m * tiles_n
    slab = slab_in_scatter_order(tl.program_id(0) // tiles_per_slab, rank, NUM_RANKS)
    tile = tl.program_id(0) % tiles_per_slab
    m, n = tile_in_group(tile, tiles_m, tiles_n, GROUP_SIZE_M)
    row, column = m * BLOCK_SIZE_M, n * BLOCK_SIZE_N
    a_slab_ptr = a_ptr + slab.to(tl.int64) * rows * stride_am
    accumulator = multiply_tile_by_pointers(
        a_slab_ptr, b_ptr, row, rows - row, column, N, K,
        stride_am, stride_ak, stride_bk, stride_bn,
        INPUT_PRECISION, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K,
    )  # fmt: skip
    target_ptr = target_at(targets_ptr, slab, partials_ptr)
    store_tile_by_pointers(
        target_ptr, accumulator, row, column, rows, N, SCATTER, BLOCK_SIZE_M, BLOCK_SIZE_N
    )
    tl.debug_barrier()  # also before an own tile is read back by other threads
    finish_tile(
        flags_ptr, arrivals_ptr, epoch_ptr, partials_ptr, slot_stride, bias_ptr, c_ptr,
        slab, tile, row, column, rows, N, rank,
        NUM_RANKS, HAS_BIAS, SCATTER, BLOCK_SIZE_M, BLOCK_SIZE_N, REDUCE_ROWS,
    )  # fmt: skip


@jit(do_not_specialize=["rows", "rank"])
def kernel_reduce_slab(
    c_ptr,
    bias_ptr,
    partials_ptr,
    arrivals_ptr,
    epoch_ptr,
    rows,
    N,
    slot_stride,
    rank,
    NUM_RANKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
):
    """Wait for the slab of every peer, then sum; grid (tiles of C,). What it waits for needs no
    SM."""
    tiles_n = tl.cdiv(N, BLOCK_SIZE_N)
    token = await_partials(arrivals_ptr, epoch_ptr, 0, rank, NUM_RANKS)
    add_partials(
        partials_ptr, slot_stride, bias_ptr, c_ptr,
        tl.program_id(0) // tiles_n * BLOCK_SIZE_M, tl.program_id(0) % tiles_n * BLOCK_SIZE_N,
        rows, N, token, NUM_RANKS, HAS_BIAS, "slab", BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_M,
    )  # fmt: skip
