"""GEMM kernels that send tiles to the ranks of their heads, or wait for the heads of other ranks.

``ulysses/kernel.py`` describes blocks and lengths, ``exchange/pushed.py`` the argument ``pushed``.
"""

from __future__ import annotations

import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.kernels.common.exchange.protocol import after_wait
from triton_dist.kernels.common.exchange.pushed import await_pushed
from triton_dist.kernels.common.gemm.scales import add_bias_at
from triton_dist.kernels.common.gemm.tile import (
    multiply_steps,
    multiply_tile_by_pointers,
    store_tile,
    tile_in_group,
)
from triton_dist.kernels.common.peers import current_flag, target_at, timeout_words_at
from triton_dist.kernels.common.scatter.tiles import (
    make_operands,
    multiply_operands,
    store_tile_by_pointers,
)
from triton_dist.kernels.nvidia.ulysses.kernel import (
    TokenCounts,
    begin_of_blocks,
    receive,
    tokens_of,
)


@jit
def describe_rows(ptr, rows, N, tile: tl.constexpr):
    """Return a descriptor for ``store_tile`` of a matrix [rows, N]."""
    STORE_N: tl.constexpr = tile.N // 2 if tile.SUBTILE else tile.N
    return tl.make_tensor_descriptor(
        ptr, [1, rows, N], [tl.cast(rows, tl.int64) * N, N, 1], [1, tile.M, STORE_N]
    )


@jit
def describe_blocks(
    results, targets, begin, first_token, M, rank, plan: tl.constexpr, tile: tl.constexpr
):
    """Return descriptors of this rank's blocks of q, k and v on each rank.

    Blocks for other ranks are in their slots, from element ``begin`` on. Blocks for this rank are
    in ``results``. Descriptors are created before the loop over tiles, because a descriptor that
    is created inside the loop could be overwritten while a store still reads it.
    """
    NUM_RANKS: tl.constexpr = plan.NUM_RANKS
    rows = tl.cast(M, tl.int64)
    descs = tl.tuple([])
    for owner in tl.static_range(NUM_RANKS):
        slot_ptr = target_at(targets, owner, results.q) + begin
        for i in tl.static_range(3):
            own_ptr = results[i] + first_token * plan.WIDTHS[i]
            ptr = tl.where(rank == owner, own_ptr, slot_ptr + rows * plan.COLUMN_BEGINS[i])
            desc = describe_rows(tl.multiple_of(ptr, 16), M, plan.WIDTHS[i], tile)
            descs = descs + (desc,)  # noqa: RUF005
    return descs


@jit(do_not_specialize=["M", "length", "total", "batch", "rank"])
def kernel_gemm_send(
    x_ptr, b_ptr, bias_ptr, strides, results, lengths_ptr, targets, M, N, K, length, total, batch,
    rank, plan: tl.constexpr, tile: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Store each tile of ``x @ B`` on the rank of its heads: in its slot, or in ``results``.

    x [M, K] has this rank's tokens. B [K, N] has the columns of q, k and v. Any grid.
    ``targets`` has the address of the slot of each rank. Tiles for rank + 1 come first, tiles for
    this rank last, so every rank receives from one rank at a time.
    """
    NUM_RANKS: tl.constexpr = plan.NUM_RANKS
    Q_WIDTH: tl.constexpr = plan.WIDTHS[0]
    K_WIDTH: tl.constexpr = plan.WIDTHS[1]
    V_WIDTH: tl.constexpr = plan.WIDTHS[2]
    RANKS_PER_HEAD: tl.constexpr = plan.RANKS_PER_HEAD[1]
    counts = TokenCounts(lengths_ptr=lengths_ptr, length=length, total=total, batch=batch)
    tokens, first_token = tokens_of(counts, rank, plan)
    rows = tl.cast(M, tl.int64)
    first_token = tl.cast(first_token, tl.int64)
    begin = begin_of_blocks(rank, tokens, first_token, batch, plan)
    tiles_m = tl.cdiv(M, tile.M)
    tiles_q, tiles_k = tl.cdiv(Q_WIDTH, tile.N), tl.cdiv(K_WIDTH, tile.N)
    tiles_n = tiles_q + tiles_k + tl.cdiv(V_WIDTH, tile.N)
    a, b = make_operands(x_ptr, b_ptr, M, N, K, strides.bk, strides.bn, DESCRIPTORS, tile)
    if DESCRIPTORS:
        descs = describe_blocks(results, targets, begin, first_token, M, rank, plan, tile)
    for index in range(tl.program_id(0), NUM_RANKS * tiles_m * tiles_n, tl.num_programs(0)):
        owner = (rank + 1 + index // (tiles_m * tiles_n)) % NUM_RANKS
        m, n = tile_in_group(index % (tiles_m * tiles_n), tiles_m, tiles_n, tile.GROUP_M)
        head_shard, row = owner // RANKS_PER_HEAD, m * tile.M
        # ``column``: first column of the tile in its block. ``b_column``: first column of the block
        # in B. ``columns_before``: columns of the blocks before it in the slot.
        tensor, column, width, columns_before = 0, n * tile.N, Q_WIDTH, 0
        b_column = owner * Q_WIDTH
        if n >= tiles_q:
            tensor, column, width, columns_before = 1, (n - tiles_q) * tile.N, K_WIDTH, Q_WIDTH
            b_column = NUM_RANKS * Q_WIDTH + head_shard * K_WIDTH
        if n >= tiles_q + tiles_k:
            tensor, column, width = 2, (n - tiles_q - tiles_k) * tile.N, V_WIDTH
            columns_before = Q_WIDTH + K_WIDTH
            b_column = (
                NUM_RANKS * Q_WIDTH + NUM_RANKS // RANKS_PER_HEAD * K_WIDTH + head_shard * V_WIDTH
            )
        product = multiply_operands(
            a, b, row, b_column + column, M, N, K, strides, None, DESCRIPTORS, tile
        )
        product = add_bias_at(product, bias_ptr, b_column + column, b_column + width)
        if DESCRIPTORS:
            desc = descs[0]
            for i in tl.static_range(1, 3 * NUM_RANKS):
                if owner * 3 + tensor == i:
                    desc = descs[i]
            store_tile(desc, product, 0, row, column, tile.SUBTILE, tile.M, tile.N)
        else:
            local_row = row + tl.arange(0, tile.M)
            local_column = column + tl.arange(0, tile.N)
            mask = (local_row < M)[:, None] & (local_column < width)[None, :]
            target = target_at(targets, owner, results.q) + begin + rows * columns_before
            target_row = local_row.to(tl.int64)
            if owner == rank:
                target = tl.where(
                    tensor == 0, results.q, tl.where(tensor == 1, results.k, results.v)
                )
                target_row += first_token
                if plan.IS_BATCHED:
                    target_row += local_row // tokens * (total - tokens)
            block = target + target_row[:, None] * width + local_column[None, :]
            tl.store(block, product.to(results.q.dtype.element_ty), mask=mask)
    if DESCRIPTORS:
        dl.publish_tile()  # The flags of other ranks are set after this kernel.


@jit(do_not_specialize=["length", "total", "batch", "call_tag", "rank"])
def kernel_receive_heads(
    x, row_strides, results, lengths_ptr, pushed, length, total, batch, call_tag, rank,
    plan: tl.constexpr,
):  # fmt: skip
    """Copy the blocks of other ranks to ``results``, when all have arrived. Grid (WORKERS,).

    Each peer sets one flag. The blocks that the rank sends to itself are already in ``results``.
    """
    token = await_pushed(pushed, current_flag(pushed.epoch, call_tag), 0, rank, plan.NUM_RANKS)
    slots_ptr = pushed.shards + after_wait(tl.zeros((), tl.int64), token)
    counts = TokenCounts(lengths_ptr=lengths_ptr, length=length, total=total, batch=batch)
    worker = tl.program_id(0)
    for chunk in range(plan.NUM_CHUNKS):
        receive(x, row_strides, results, slots_ptr, worker, chunk, counts, rank, False, plan)


@jit
def wait_for_chunks(pushed, value, source, first_row, last_row, chunk_rows, NUM_RANKS):
    """Wait for rows ``first_row`` to ``last_row`` of the block of ``source``. Return a token."""
    token = 0
    for chunk in range(first_row // chunk_rows, last_row // chunk_rows + 1):
        flag = pushed.arrivals + chunk * NUM_RANKS + source
        token += dl.wait(flag, 1, value, timeout_words_at(pushed.epoch), True)
    return token


@jit(do_not_specialize=["rows", "chunk_rows", "call_tag", "rank"])
def kernel_gemm_received(
    x_ptr, pushed, b_ptr, bias_ptr, c_ptr, strides, rows, N, chunk_rows, call_tag, rank,
    NUM_RANKS: tl.constexpr, WIDTH: tl.constexpr, tile: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Store ``A @ B`` in c [rows, N]; A [rows, NUM_RANKS * WIDTH] has a block of each rank.

    A block [rows, WIDTH] is read from ``x_ptr`` if it is from this rank, else from the slot. A
    tile multiplies this rank's block first, and waits for its rows of each other block. Any grid.
    """
    PRECISION: tl.constexpr = tile.PRECISION
    STEPS: tl.constexpr = WIDTH // tile.K
    BLOCK_M: tl.constexpr = tile.M
    BLOCK_N: tl.constexpr = tile.N
    value = current_flag(pushed.epoch, call_tag)
    # Without rows, one row of tiles still waits for all ranks, as the protocol of slots requires.
    tiles_m, tiles_n = tl.cdiv(max(rows, 1), tile.M), tl.cdiv(N, tile.N)
    if DESCRIPTORS:
        own = tl.make_tensor_descriptor(x_ptr, [rows, WIDTH], [WIDTH, 1], [tile.M, tile.K])
        blocks = tl.make_tensor_descriptor(
            pushed.shards, [NUM_RANKS * rows, WIDTH], [WIDTH, 1], [tile.M, tile.K]
        )
        _, b = make_operands(
            b_ptr, b_ptr, tile.M, N, NUM_RANKS * WIDTH, strides.bk, strides.bn, True, tile
        )
        out = describe_rows(c_ptr, rows, N, tile)
    for index in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        m, n = tile_in_group(index, tiles_m, tiles_n, tile.GROUP_M)
        row, column = m * tile.M, n * tile.N
        last_row = max(min(row + tile.M, rows) - 1, 0)
        if DESCRIPTORS:
            product = multiply_steps(
                tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32), own, b, row, column, 0, STEPS,
                tile.B_COLUMN_MAJOR, PRECISION, tile.K, b_row=rank * WIDTH,
            )  # fmt: skip
        else:
            product = multiply_tile_by_pointers(
                x_ptr, b_ptr + rank.to(tl.int64) * WIDTH * strides.bk, row, rows - row, column, N,
                WIDTH, strides.am, 1, strides.bk, strides.bn, PRECISION, tile.M, tile.N, tile.K,
                tile.INT64_OFFSETS,
            )  # fmt: skip
        for step in range(1, NUM_RANKS):
            source = (rank + step) % NUM_RANKS
            token = wait_for_chunks(pushed, value, source, row, last_row, chunk_rows, NUM_RANKS)
            if DESCRIPTORS:
                first = source * rows
                product = multiply_steps(
                    product, dl.only_rows(blocks, first, first + last_row + 1), b,
                    dl.consume_token(first + row, token), column, 0, STEPS,
                    tile.B_COLUMN_MAJOR, PRECISION, tile.K, b_row=source * WIDTH,
                )  # fmt: skip
            else:
                product += multiply_tile_by_pointers(
                    pushed.shards + source.to(tl.int64) * rows * WIDTH,
                    b_ptr + source.to(tl.int64) * WIDTH * strides.bk,
                    dl.consume_token(row, token), rows - row, column, N, WIDTH, WIDTH, 1,
                    strides.bk, strides.bn, PRECISION, tile.M, tile.N, tile.K, tile.INT64_OFFSETS,
                )  # fmt: skip
        product = add_bias_at(product, bias_ptr, column, N)
        if DESCRIPTORS:
            store_tile(out, product, 0, row, column, tile.SUBTILE, tile.M, tile.N)
        else:
            store_tile_by_pointers(
                c_ptr, product, row, column, rows, N, False, tile.M, tile.N, tile.INT64_OFFSETS
            )
