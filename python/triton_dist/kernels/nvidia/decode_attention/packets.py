"""Decode attention over ranks in one launch, which exchanges partial outputs in packets.

    attend │ grid barrier │ combine own parts → peers │ poll peers' rows, merge

The programs store the parts of this rank and increment a counter in device memory. After all of
them did, each program combines its items, sends the rows, and merges them with the rows of all
peers. Rows are sent in packets (``common/exchange/packets.py``), so the receiver needs no flags.
All programs must be resident at the same time.

A sent row has, for each chunk of columns, one line with the base-2 LSE, then lines with the
elements in the dtype of the output. A rank also rounds its own rows to this dtype and adds in the
order of ranks, so all ranks get equal bits. If the output is sharded by heads, a row is sent only
to the owner of its head.
"""

from __future__ import annotations

import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.kernels.common.exchange.packet_calls import (
    clear_packets,
    end_call,
    next_epoch,
    peer_ranks,
    received_shards,
)
from triton_dist.kernels.common.exchange.packets import (
    packet_offset,
    packet_tag,
    packet_targets,
    payload_of,
    poll_lines,
    send_lines,
    values_of,
)
from triton_dist.kernels.common.exchange.protocol import LINE_WORDS, MAX_CTAS
from triton_dist.kernels.nvidia.decode_attention.kernel import (
    attend,
    combine_item,
    lse_of,
    with_sink,
)
from triton_dist.language.signals import CALL_TAG_BITS


@jit
def owners(head, rank, spec: tl.constexpr):
    """Return the rank that stores each head, or ``rank`` if all ranks store it."""
    return head // spec.OUT_HEADS if spec.OUT_HEADS < spec.HEADS else head * 0 + rank


@jit
def lines_of(row, chunk, spec: tl.constexpr, ELEMENTS_PER_LINE: tl.constexpr):
    """Return three 1-D tensors: the lines of an item's elements, the line of each row's LSE, and
    the first column of each line of elements."""
    LINES: tl.constexpr = spec.COLUMNS // ELEMENTS_PER_LINE
    SIZE: tl.constexpr = row.shape[0] * LINES
    lse_line = row * (spec.DV // ELEMENTS_PER_LINE + spec.CHUNKS) + chunk * (LINES + 1)
    within = tl.arange(0, LINES)[None, :] + row[:, None] * 0
    line = lse_line[:, None] + 1 + within
    column = chunk * spec.COLUMNS + within * ELEMENTS_PER_LINE
    return tl.reshape(line, [SIZE]), lse_line, tl.reshape(column, [SIZE])


@jit
def repeat_per_line(values, spec: tl.constexpr, ELEMENTS_PER_LINE: tl.constexpr):
    """Repeat ``values`` [rows] for each line of a row. Return a 1-D tensor."""
    LINES: tl.constexpr = spec.COLUMNS // ELEMENTS_PER_LINE
    repeated = tl.broadcast_to(values[:, None], [values.shape[0], LINES])
    return tl.reshape(repeated, [values.shape[0] * LINES])


@jit
def merge_item(
    target, packets, shards, tag, payload, lse, line, lse_line, column, index, head, valid, rank,
    spec: tl.constexpr,
):  # fmt: skip
    """Wait for the rows of an item from all peers, and store the merged rows.

    ``payload`` [lines, 2] and ``lse`` [rows] are data of this rank. ``index`` [rows] contains the
    output's row for each row of the item.
    """
    NUM_RANKS: tl.constexpr = spec.NUM_RANKS
    DTYPE: tl.constexpr = target.out.dtype.element_ty
    ELEMENTS_PER_LINE: tl.constexpr = 64 // DTYPE.primitive_bitwidth
    PEERS: tl.constexpr = NUM_RANKS - 1
    in_row = repeat_per_line(valid.to(tl.int32), spec, ELEMENTS_PER_LINE) != 0
    in_row = in_row & (column < spec.DV)
    own_lse = repeat_per_line(lse, spec, ELEMENTS_PER_LINE)
    all_lse_lines = repeat_per_line(lse_line, spec, ELEMENTS_PER_LINE)
    lines, lse_lines = tl.tuple([]), tl.tuple([])
    for peer in tl.static_range(PEERS):
        lines = lines + (shards[peer] + line * LINE_WORDS,)  # noqa: RUF005
        lse_lines = lse_lines + (shards[peer] + all_lse_lines * LINE_WORDS,)  # noqa: RUF005
    payloads = poll_lines(lines + lse_lines, tag, in_row, packets.timeout_words)
    tl.debug_barrier()
    max_lse, lses = own_lse, tl.tuple([])
    for peer in tl.static_range(PEERS):
        clear_packets(shards[peer], line, in_row)
        clear_packets(shards[peer], lse_line, valid)
        bits, _ = tl.split(payloads[PEERS + peer])
        peer_lse = bits.to(tl.float32, bitcast=True)
        lses = lses + (peer_lse,)  # noqa: RUF005
        max_lse = tl.maximum(max_lse, peer_lse)
    line_head = repeat_per_line(head, spec, ELEMENTS_PER_LINE)
    base, total = with_sink(max_lse, target.sinks, line_head, in_row)
    acc = tl.zeros([payload.shape[0], ELEMENTS_PER_LINE], tl.float32)
    for source in tl.static_range(NUM_RANKS):
        # Select with ``tl.where``, because ``rank`` is not a constant.
        addend, source_lse = payload, own_lse
        if source < PEERS:
            addend = tl.where(source < rank, payloads[source], addend)
            source_lse = tl.where(source < rank, lses[source], source_lse)
        if source > 0:
            addend = tl.where(source > rank, payloads[source - 1], addend)
            source_lse = tl.where(source > rank, lses[source - 1], source_lse)
        weight = tl.exp2(source_lse - base)
        values = tl.reshape(values_of(addend, DTYPE), acc.shape)
        acc += values.to(tl.float32) * weight[:, None]
        total += weight
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    index = repeat_per_line(index, spec, ELEMENTS_PER_LINE).to(tl.int64)
    element = (index * target.row_stride + column)[:, None] + tl.arange(0, ELEMENTS_PER_LINE)[
        None, :
    ]
    tl.store(target.out + element, out.to(DTYPE), mask=in_row[:, None])
    lse = lse_of(base, total, spec)
    tl.store(target.lse + index * target.lse_stride, lse, mask=in_row & (column == 0))


@jit(do_not_specialize=["batch", "rank", "call_tag"])
def kernel_decode_packets(
    query, kv, parts, target, packets, counter_ptr, scale, soft_cap, batch, rank, call_tag,
    spec: tl.constexpr,
):  # fmt: skip
    """Run a call over all ranks. Grid (programs,); all programs must be resident."""
    NUM_RANKS: tl.constexpr = spec.NUM_RANKS
    DTYPE: tl.constexpr = target.out.dtype.element_ty
    ELEMENTS_PER_LINE: tl.constexpr = 64 // DTYPE.primitive_bitwidth
    epoch = next_epoch(packets.calls)
    units = attend(query, kv, parts, scale, soft_cap, batch, rank, spec)
    # Count this program. All programs together add MAX_CTAS per call to the counter, which is a
    # flag with the call tag 0.
    added = tl.where(tl.program_id(0) == 0, MAX_CTAS - tl.num_programs(0) + 1, 1)
    dl.notify(counter_ptr, added.to(tl.int64) << CALL_TAG_BITS, op="add")
    tag = packet_tag(epoch, call_tag)
    targets = packet_targets(packets, rank, NUM_RANKS)
    offset = packet_offset(epoch, rank, packets.shard_words, NUM_RANKS)
    shards = received_shards(packets, epoch, peer_ranks(rank, NUM_RANKS), NUM_RANKS, 2)
    program, programs = tl.program_id(0), tl.num_programs(0)
    items = batch * spec.TILES * spec.ITEMS * spec.CHUNKS
    rounds = tl.cdiv(items - program, programs)
    if rounds > 0:
        arrived = (epoch * MAX_CTAS) << CALL_TAG_BITS
        dl.wait(counter_ptr, 1, arrived, packets.timeout_words, TAGGED=True)
    for index in range(rounds):
        item = program + index * programs
        out, lse, row, head, valid, chunk = combine_item(parts, units, programs, item, spec)
        # Round this rank's rows like the rows of peers.
        payload = payload_of(tl.reshape(out.to(DTYPE), [out.numel]))
        line, lse_line, column = lines_of(row * spec.HEADS + head, chunk, spec, ELEMENTS_PER_LINE)
        lse_payload = tl.join(lse.to(tl.int32, bitcast=True), tl.zeros(lse.shape, tl.int32))
        owner = owners(head, rank, spec)
        for step in tl.static_range(1, NUM_RANKS):
            is_sent = valid
            if spec.OUT_HEADS < spec.HEADS:
                is_sent = valid & (owner == (rank + step) % NUM_RANKS)
            peer = (targets[step - 1],)
            in_row = repeat_per_line(is_sent.to(tl.int32), spec, ELEMENTS_PER_LINE) != 0
            send_lines(peer, offset, payload, line, in_row & (column < spec.DV), tag)
            send_lines(peer, offset, lse_payload, lse_line, is_sent, tag)
        valid = valid & (owner == rank)
        merge_item(
            target, packets, shards, tag, payload, lse, line, lse_line, column,
            row * spec.OUT_HEADS + head % spec.OUT_HEADS, head, valid, rank, spec,
        )  # fmt: skip
    end_call(packets.calls, epoch)
