"""Kernels of expert-parallel dispatch + grouped GEMM; ``op.py`` describes the op.

The rows of a call are sent and multiplied by one launch. Its programs are, in this order:

* *copy* programs store rows on the ranks of their experts, then set flags;
* *GEMM* programs take tiles from a counter. Before the first tile with rows of peers, a program
  waits for the flags of all copy programs of all ranks. This rank's rows are read from x.

Programs start in the order of their numbers, and only GEMM programs wait for copy programs. A
launch therefore finishes even if each GPU runs only one program at a time. A multiprocessor that
has finished its copy program runs a GEMM program, which finds the remaining tiles by the counter.

The launch is a call of the protocol in ``expert_parallel/kernel.py`` after the call that computed
the layout. GEMM programs end after the rows of all peers have arrived, as every dispatch does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.kernels.common.exchange.protocol import chunk_flag, flag_offset, notify_ranks
from triton_dist.kernels.common.moe.product import make_weights_operand, multiply_tile
from triton_dist.kernels.common.moe.routing import (
    TILE_RECORD_WORDS,
    store_records,
    tile_of_work_item,
)
from triton_dist.kernels.common.moe.sorted_rows import rows_of_experts
from triton_dist.kernels.common.peers import target_at
from triton_dist.kernels.nvidia.expert_parallel import begin_ep_call, send_rows


class DispatchTensors(NamedTuple):
    """Tokens and experts of this rank, and the receive buffer with its addresses on each rank."""

    x: Any
    ids: Any
    expert_map: Any
    rows: Any
    rows_table: Any


@jit(do_not_specialize=["rank", "block_m", "num_local_first"])
def kernel_order_tiles(
    ends_ptr, counts_ptr, tiles_ptr, num_tiles_ptr, rank, block_m, num_local_first,
    EXPERTS: tl.constexpr, EXPERT_LANES: tl.constexpr, NUM_RANKS: tl.constexpr, LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the records of each expert's tiles (``TILE_RECORD_WORDS``). Grid (EXPERTS,).

    For the first ``num_local_first`` experts, tiles that have only rows of this rank precede all
    other tiles. Word 6 of a record is 0 for these tiles, and 1 for tiles that wait. Store two
    numbers at ``num_tiles_ptr``: of all tiles, and of the tiles that programs have taken, 0.
    """
    expert = tl.program_id(0)
    source = tl.arange(0, LANES)
    lane, begin, end, num_tiles = rows_of_experts(ends_ptr, block_m, EXPERTS, EXPERT_LANES)
    is_expert = lane < EXPERTS
    routes = tl.load(
        counts_ptr + lane[:, None] * NUM_RANKS + source[None, :],
        mask=is_expert[:, None] & (source < NUM_RANKS)[None, :], other=0,
    )  # fmt: skip
    # Rows of an expert are sorted by source rank.
    first_own_row = tl.sum(tl.where((source < rank)[None, :], routes, 0), 1)
    end_own_row = tl.sum(tl.where((source <= rank)[None, :], routes, 0), 1)
    # After a wait that gave up, ends are 0 and counts are arbitrary. Bounded, they select no tiles.
    first = tl.minimum(tl.maximum(tl.cdiv(first_own_row, block_m), 0), num_tiles)
    end_own_tile = tl.where(end_own_row == end - begin, num_tiles, end_own_row // block_m)
    num_own_tiles = tl.maximum(tl.minimum(end_own_tile, num_tiles) - first, 0)
    num_own_tiles = tl.where(lane < num_local_first, num_own_tiles, 0)
    tiles_before_own = tl.where(num_own_tiles > 0, first, num_tiles)
    total_own = tl.sum(num_own_tiles, 0)
    is_earlier = lane < expert
    first_own_tile = tl.sum(tl.where(is_earlier, num_own_tiles, 0), 0)
    first_other_tile = total_own + tl.sum(tl.where(is_earlier, num_tiles - num_own_tiles, 0), 0)
    num_own_tiles = tl.sum(tl.where(lane == expert, num_own_tiles, 0), 0)
    tiles_before_own = tl.sum(tl.where(lane == expert, tiles_before_own, 0), 0)
    tiles = tl.sum(tl.where(lane == expert, num_tiles, 0), 0)
    begin_row = tl.sum(tl.where(lane == expert, begin, 0), 0)
    end_row = tl.sum(tl.where(lane == expert, end, 0), 0)
    for run in tl.static_range(3):
        # Runs of consecutive tiles: this rank's, those before, and those after.
        first_of_run, tiles_of_run = first_own_tile, num_own_tiles
        tiles_before_run = tiles_before_own
        if run == 1:
            first_of_run, tiles_of_run, tiles_before_run = first_other_tile, tiles_before_own, 0
        if run == 2:
            first_of_run = first_other_tile + tiles_before_own
            tiles_of_run = tiles - num_own_tiles - tiles_before_own
            tiles_before_run = tiles_before_own + num_own_tiles
        row = begin_row + tiles_before_run * block_m
        for first_tile in range(0, tiles_of_run, BLOCK):
            tile = first_tile + tl.arange(0, BLOCK)
            record, mask = store_records(
                tiles_ptr, first_of_run, tile, tiles_of_run, expert, row,
                tl.minimum(row + tiles_of_run * block_m, end_row),
            )  # fmt: skip
            tl.store(record + 6, 0 if run == 0 else 1, mask=mask)
    if expert == 0:
        tl.store(num_tiles_ptr, tl.sum(num_tiles, 0))
        tl.store(num_tiles_ptr + 1, 0)


@jit
def await_rows(have_arrived, must_wait, num_copy_programs, peers, call, ep_plan: tl.constexpr):
    """Wait for the rows of all ranks if ``must_wait`` is 1 and ``have_arrived`` is 0.

    Return (new value of ``have_arrived``, wait token).
    """
    wait_token = 0
    if have_arrived < must_wait:
        current = chunk_flag(call, 0)
        first_flag = peers.arrivals + flag_offset(0, current, ep_plan.NUM_RANKS)
        flags = first_flag + tl.arange(0, ep_plan.FLAG_LANES)
        count = num_copy_programs * ep_plan.NUM_RANKS
        wait_token += dl.wait(flags, count, current, peers.timeout_words, True)
        have_arrived = must_wait
    return have_arrived, wait_token


@jit(
    do_not_specialize=[
        "tokens", "max_tokens", "num_experts", "rank", "num_copy_programs", "call_tag"
    ]
)  # fmt: skip
def kernel_dispatch_grouped_gemm(
    tensors, peers, b_ptr, c_ptr, blocks, tokens, max_tokens, num_experts, rank, num_copy_programs,
    call_tag, K, weight_strides, out_columns, ep_plan: tl.constexpr, grouped_plan: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
):  # fmt: skip
    """Send the rows of this rank, and compute C [positions, out_columns]. Grid (programs,).

    The first ``num_copy_programs`` programs send. ``blocks`` is the result of
    ``kernel_order_tiles``.
    """
    NUM_RANKS: tl.constexpr = ep_plan.NUM_RANKS
    COLUMNS: tl.constexpr = BLOCK_SIZE_N // 2 if grouped_plan.SILU_MUL else BLOCK_SIZE_N
    call = begin_ep_call(peers, call_tag, rank, False, ep_plan)
    program = tl.program_id(0)
    if program == 0:  # notify peers that this rank has begun the call
        notify_ranks(call, 1, chunk_flag(call, 0), ep_plan)
    if program < num_copy_programs:
        rows = tl.tuple([])
        for step in tl.static_range(NUM_RANKS):
            target = target_at(tensors.rows_table, (rank + step) % NUM_RANKS, tensors.rows)
            rows = rows + (target + (call.offset + rank * max_tokens) * K,)  # noqa: RUF005
        send_rows(
            program, tensors.x, None, tensors.ids, None, tensors.expert_map, num_experts, rows,
            tl.tuple([]), (K, 0), peers, call, tokens, max_tokens, K, rank, num_copy_programs,
            ep_plan,
        )  # fmt: skip
        notify_ranks(call, 0, chunk_flag(call, 0), ep_plan)
    else:
        N = out_columns * 2 if grouped_plan.SILU_MUL else out_columns
        E: tl.constexpr = ep_plan.EXPERTS
        tiles_n = tl.cdiv(out_columns, COLUMNS)
        b = make_weights_operand(
            b_ptr, E, N, K, weight_strides, grouped_plan, COLUMNS, BLOCK_SIZE_K
        )
        a_ptr = tensors.x if NUM_RANKS == 1 else tensors.rows
        counter = blocks.num_tiles + 1
        work_items = tl.load(blocks.num_tiles) * tiles_n
        have_arrived = 0
        work_item = tl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
        while work_item < work_items:
            # The next item is taken early, because the counter answers after about 1 us.
            next_item = tl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
            expert, row, end, n, tile = tile_of_work_item(
                blocks.tiles, work_item, tiles_n, BLOCK_SIZE_M, GROUP_SIZE_M
            )
            position = row + tl.arange(0, BLOCK_SIZE_M)
            a_row = tl.load(blocks.routes + position, mask=position < end, other=0)
            must_wait = tl.load(blocks.tiles + tile * TILE_RECORD_WORDS + 6)
            have_arrived, wait_token = await_rows(
                have_arrived, must_wait, num_copy_programs, peers, call, ep_plan
            )
            a_row = dl.consume_token(a_row, wait_token)
            multiply_tile(
                a_ptr, tensors.x, a_row, b, c_ptr, (expert, row, end, n * COLUMNS), E, N, K,
                weight_strides, out_columns, position, rank, max_tokens, None, grouped_plan,
                BLOCK_SIZE_M, COLUMNS, BLOCK_SIZE_K,
            )  # fmt: skip
            work_item = next_item
        # The next call requires that all rows of this call have arrived.
        if program == num_copy_programs:
            await_rows(have_arrived, 1, num_copy_programs, peers, call, ep_plan)
