"""Decode attention over ranks in one launch: partial outputs travel in packets.

    attend │ grid barrier │ combine own parts → peers │ poll peers' rows, merge

The programs store the parts of this rank and count themselves in device memory. After all of them,
each program combines its items, sends the rows, and merges them with the rows of all peers. Rows
travel in words that mark their own arrival (``common/exchange/packets.py``), so nothing else is
awaited. All programs must be resident at the same time.

In memory, a row of a source rank is ``DV`` elements in the dtype of the output, then a line with
the base-2 LSE. A rank rounds its own rows, too, and adds in the order of ranks, so all ranks get
equal bits. If the output is sharded by heads, a row goes only to the owner of its head.
"""

from __future__ import annotations

import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.kernels.common.exchange.packet_calls import (
    clear,
    end_call,
    next_epoch,
    peers_of,
    shards_of,
)
from triton_dist.kernels.common.exchange.packets import (
    packet_offset,
    payload_of,
    peers_at,
    poll_lines,
    send_lines,
    tag_of,
    values_of,
)
from triton_dist.kernels.common.exchange.protocol import LINE_WORDS, MAX_CTAS
from triton_dist.kernels.nvidia.decode_attention.kernel import (
    attend,
    combine_item,
    item_exists,
    lse_of,
    rows_of,
    rows_of_item,
    units_of,
    with_sink,
)
from triton_dist.language.signals import SIZE_BITS


@jit
def arrive(counter_ptr):
    """Count this program after its parts are stored. All programs add MAX_CTAS in a call."""
    programs = tl.num_programs(0)
    added = tl.where(tl.program_id(0) == 0, MAX_CTAS - programs + 1, 1)
    dl.notify(counter_ptr, added.to(tl.int64) << SIZE_BITS, op="add")  # a size of 0


@jit
def owners(head, rank, spec: tl.constexpr):
    """Return the rank that stores each head, or ``rank`` if all ranks store it."""
    return head // spec.OUT_HEADS if spec.OUT_HEADS < spec.HEADS else head * 0 + rank


@jit
def lines_of(row, spec: tl.constexpr, COLUMNS: tl.constexpr, PER_LINE: tl.constexpr):
    """Return the lines of rows, the line of their LSE, and the first column of each line; flat."""
    SIZE: tl.constexpr = row.shape[0] * (COLUMNS // PER_LINE)
    row_lines = spec.DV // PER_LINE + 1
    column = tl.arange(0, COLUMNS // PER_LINE)[None, :] + row[:, None] * 0
    line = row[:, None] * row_lines + column
    lse_line = row[:, None] * row_lines + spec.DV // PER_LINE + column * 0
    return (
        tl.reshape(line, [SIZE]),
        tl.reshape(lse_line, [SIZE]),
        tl.reshape(column * PER_LINE, [SIZE]),
    )


@jit
def per_line(values, COLUMNS: tl.constexpr, PER_LINE: tl.constexpr):
    """Repeat values [rows] for each line of a row, flat."""
    LINES: tl.constexpr = COLUMNS // PER_LINE
    repeated = tl.broadcast_to(values[:, None], [values.shape[0], LINES])
    return tl.reshape(repeated, [values.shape[0] * LINES])


@jit
def send_item(
    targets, offset, tag, out, lse, row, head, valid, rank, spec: tl.constexpr,
    COLUMNS: tl.constexpr, PER_LINE: tl.constexpr,
):  # fmt: skip
    """Send the rows of an item to all peers, or to the owners of their heads."""
    NUM_RANKS: tl.constexpr = spec.NUM_RANKS
    line, _, column = lines_of(row, spec, COLUMNS, PER_LINE)
    payload = payload_of(tl.reshape(out, [out.numel]))
    lse_payload = tl.join(lse.to(tl.int32, bitcast=True), tl.zeros(lse.shape, tl.int32))
    lse_line = row * (spec.DV // PER_LINE + 1) + spec.DV // PER_LINE
    owner = owners(head, rank, spec)
    for step in tl.static_range(1, NUM_RANKS):
        goes = valid
        if spec.OUT_HEADS < spec.HEADS:
            goes = valid & (owner == (rank + step) % spec.NUM_RANKS)
        target = (targets[step - 1],)
        send_lines(target, offset, lse_payload, lse_line, goes, tag)
        in_row = per_line(goes.to(tl.int32), COLUMNS, PER_LINE) != 0
        send_lines(target, offset, payload, line, in_row & (column < spec.DV), tag)


@jit
def merge_item(
    parts, target, packets, shards, tag, item, batch, rank, spec: tl.constexpr,
    COLUMNS: tl.constexpr, PER_LINE: tl.constexpr,
):  # fmt: skip
    """Wait for the rows of an item of all peers, and store the result."""
    NUM_RANKS: tl.constexpr = spec.NUM_RANKS
    DTYPE: tl.constexpr = target.out.dtype.element_ty
    PEERS: tl.constexpr = NUM_RANKS - 1
    WIDTH: tl.constexpr = spec.V0 + spec.V1
    tile, tile_row = rows_of_item(item, spec)
    sequence, _, token, head, valid = rows_of(tile, tile_row, spec)
    valid = valid & (owners(head, rank, spec) == rank)
    row = (sequence * spec.Q_LEN + token) * spec.HEADS + head
    line, lse_line, column = lines_of(row, spec, COLUMNS, PER_LINE)
    in_row = (per_line(valid.to(tl.int32), COLUMNS, PER_LINE) != 0) & (column < spec.DV)
    # The program itself stored its combined rows in place of the first parts.
    at = per_line(tile.to(tl.int64) * spec.BLOCK_M + tile_row, COLUMNS, PER_LINE)
    element = tl.arange(0, PER_LINE)[None, :]
    own_ptr = parts.first + (at * WIDTH + column)[:, None] + element
    own = tl.load(own_ptr, mask=in_row[:, None], other=0.0, cache_modifier=".cg")
    own_lse = tl.load(parts.first_lse + at, mask=in_row, other=0.0, cache_modifier=".cg")
    lines, lse_lines = tl.tuple([]), tl.tuple([])
    for peer in tl.static_range(PEERS):
        lines = lines + (shards[peer] + line * LINE_WORDS,)  # noqa: RUF005
        lse_lines = lse_lines + (shards[peer] + lse_line * LINE_WORDS,)  # noqa: RUF005
    payloads = poll_lines(lines + lse_lines, tag, in_row, packets.timeout_words)
    tl.debug_barrier()
    largest, lses = own_lse, tl.tuple([])
    for peer in tl.static_range(PEERS):
        clear(shards[peer], line, in_row)
        clear(shards[peer], lse_line, in_row & (column == 0))
        bits, _ = tl.split(payloads[PEERS + peer])
        lse = bits.to(tl.float32, bitcast=True)
        lses = lses + (lse,)  # noqa: RUF005
        largest = tl.maximum(largest, lse)
    heads = per_line(head, COLUMNS, PER_LINE)
    base, total = with_sink(largest, target.sinks, heads, in_row)
    sums = tl.zeros(own.shape, tl.float32)
    for source in tl.static_range(NUM_RANKS):
        addend, lse = own, own_lse  # Select instead of branching: ``rank`` is not a constant.
        if source < PEERS:
            values = tl.reshape(values_of(payloads[source], DTYPE), own.shape).to(tl.float32)
            addend = tl.where(source < rank, values, addend)
            lse = tl.where(source < rank, lses[source], lse)
        if source > 0:
            values = tl.reshape(values_of(payloads[source - 1], DTYPE), own.shape).to(tl.float32)
            addend = tl.where(source > rank, values, addend)
            lse = tl.where(source > rank, lses[source - 1], lse)
        weight = tl.exp2(lse - base)
        sums += addend * weight[:, None]
        total += weight
    out = sums / tl.where(total > 0, total, 1.0)[:, None]
    index = (sequence * spec.Q_LEN + token) * spec.OUT_HEADS + head % spec.OUT_HEADS
    index = per_line(index, COLUMNS, PER_LINE).to(tl.int64)
    out_ptr = target.out + (index * target.row + column)[:, None] + element
    tl.store(out_ptr, out.to(DTYPE), mask=in_row[:, None])
    lse = lse_of(base, total, spec)
    tl.store(target.lse + index * target.lse_row, lse, mask=in_row & (column == 0))


@jit(do_not_specialize=["batch", "rank", "size"])
def kernel_decode_packets(
    query, kv, parts, target, packets, counter_ptr, scale, soft_cap, batch, rank, size,
    COLUMNS: tl.constexpr, spec: tl.constexpr,
):  # fmt: skip
    """Run a call over all ranks. Grid (programs,), all of them resident."""
    DTYPE: tl.constexpr = target.out.dtype.element_ty
    PER_LINE: tl.constexpr = 64 // DTYPE.primitive_bitwidth
    WIDTH: tl.constexpr = spec.V0 + spec.V1
    epoch = next_epoch(packets.calls)
    tag = tag_of(epoch, size)
    attend(query, kv, parts, scale, soft_cap, batch, rank, spec)
    targets = peers_at(packets, rank, spec.NUM_RANKS)
    offset = packet_offset(epoch, rank, packets.shard_words, spec.NUM_RANKS)
    shards = shards_of(packets, epoch, peers_of(rank, spec.NUM_RANKS), spec.NUM_RANKS, 2)
    units = units_of(kv.lens, batch, rank, spec)
    items = batch * spec.TILES * spec.ITEMS
    program, programs = tl.program_id(0), tl.num_programs(0)
    arrive(counter_ptr)
    column = tl.arange(0, COLUMNS)
    rounds = tl.cdiv(items - program, programs)
    if rounds > 0:
        arrived = (epoch * MAX_CTAS) << SIZE_BITS
        dl.wait(counter_ptr, 1, arrived, packets.timeout_words, SIZED=True)
    for index in range(rounds):
        item = program + index * programs
        if item_exists(item, spec):
            out, lse = combine_item(parts, units, programs, item, spec, COLUMNS)
            out = out.to(DTYPE)
            tile, tile_row = rows_of_item(item, spec)
            sequence, _, token, head, valid = rows_of(tile, tile_row, spec)
            row = (sequence * spec.Q_LEN + token) * spec.HEADS + head
            send_item(
                targets,
                offset,
                tag,
                out,
                lse,
                row,
                head,
                valid,
                rank,
                spec,
                COLUMNS,
                PER_LINE,
            )
            tl.debug_barrier()  # all threads have read the first parts
            at = tile.to(tl.int64) * spec.BLOCK_M + tile_row
            mask = valid[:, None] & (column < spec.DV)[None, :]
            first_ptr = parts.first + at[:, None] * WIDTH + column[None, :]
            tl.store(first_ptr, out.to(tl.float32), mask=mask)
            tl.store(parts.first_lse + at, lse, mask=valid)
    tl.debug_barrier()
    for index in range(rounds):
        item = program + index * programs
        if item_exists(item, spec):
            merge_item(
                parts,
                target,
                packets,
                shards,
                tag,
                item,
                batch,
                rank,
                spec,
                COLUMNS,
                PER_LINE,
            )
    end_call(packets.calls, epoch)
