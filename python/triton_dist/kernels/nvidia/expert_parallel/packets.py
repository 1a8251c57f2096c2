"""Kernels of expert-parallel dispatch and combine for few tokens: one launch each, no flags.

All data travels in packets (``common/exchange/packets.py``), whose words mark their own arrival. A
peer may store before this rank has begun the call, and no flag follows the data. In memory, the
lines of one source rank are, in this order:

* *meta* (dispatch): for each route of its tokens, the physical expert and the bits of the weight;
* *rows* (dispatch): the row of each token, then the scales of the row;
* *sums* (combine): line 0, which only marks that the rank has begun, then the sums of each token.

*Dispatch.* The first programs send ids and rows, then receive the rows of the same tokens from all
peers. Each other program lays out some of the local experts. It reads the meta lines of all ranks,
so it needs no result of another program.

*Epochs.* Each program has its own word with the number of the last call, and reads only this word.

*Three slots.* Several programs read a meta line, so none may clear it after reading. Call n + 1
clears the meta lines of call n, and call n + 3 uses their slot again. A peer begins call n + 3
after its call n + 2, which waits for meta lines that this rank sends after its call n + 1. Other
lines are cleared by their only reader.
"""

from __future__ import annotations

import triton.language as tl

from triton_dist._jit import jit
from triton_dist.kernels.common.exchange.packet_calls import (
    clear,
    end_call,
    next_epoch,
    peers_of,
    shards_of,
)
from triton_dist.kernels.common.exchange.packets import (
    add_lines,
    packet_offset,
    payload_of,
    peers_at,
    poll_lines,
    send_lines,
    tag_of,
    values_of,
)
from triton_dist.kernels.common.exchange.protocol import LINE_WORDS
from triton_dist.kernels.common.peers import target_at
from triton_dist.kernels.nvidia.expert_parallel.kernel import (
    FAULT_ID,
    FAULT_WEIGHT,
    INVALID,
    SCALE_ELEMENTS,
    check_rows,
    physical_expert,
    quantise,
    report_fault,
    sum_of_choices,
)

SLOTS = tl.constexpr(3)
_PAIR = tl.constexpr(2 * SCALE_ELEMENTS.value)
"""Elements whose two scales are in one line."""
_CLEARED = tl.constexpr(512)
"""Lines that a layout program clears at a time."""


@jit
def await_sent(lines, is_sent, tag, mask, timeout_ptr):
    """Wait for the ``lines`` that are sent. Return a payload per line, arbitrary if not sent."""
    some, present = is_sent[0], lines[0]
    for index in tl.static_range(1, len(lines)):
        some = some | is_sent[index]
        present = tl.where(is_sent[index], lines[index], present)
    # All pointers are polled with one mask: poll a line that is sent instead of one that is not.
    polled = tl.tuple([])
    for index in tl.static_range(len(lines)):
        polled = polled + (tl.where(is_sent[index], lines[index], present),)  # noqa: RUF005
    return poll_lines(polled, tag, mask & some, timeout_ptr)


@jit
def has_owner(expert, rank, ep_plan: tl.constexpr):
    """Return whether ``rank`` owns one of the experts."""
    owned = (expert >= 0) & (expert // ep_plan.EXPERTS == rank)
    return tl.max(owned.to(tl.int32), 0) != 0


@jit
def first_line_of(token, hidden, meta_lines, PER_LINE: tl.constexpr, ep_plan: tl.constexpr):
    """Return the first line of a token's row."""
    lines = tl.cdiv(hidden, PER_LINE)
    if ep_plan.SCALES != "none":
        lines += tl.cdiv(hidden, _PAIR)
    return meta_lines + token * lines


@jit
def send_tokens(
    x_ptr, x_scale_ptr, ids_ptr, weights_ptr, map_ptr, rows_ptr, scales_ptr, packets, ep_layout,
    epoch, tag, tokens, max_tokens, hidden, num_experts, rank, meta_lines, copies,
    ep_plan: tl.constexpr,
):  # fmt: skip
    """Send ids and weights to all ranks, and each row once to each rank that owns an expert."""
    NUM_RANKS: tl.constexpr = ep_plan.NUM_RANKS
    BLOCK: tl.constexpr = ep_plan.BLOCK
    PER_LINE: tl.constexpr = 64 // rows_ptr.dtype.element_ty.primitive_bitwidth
    targets = peers_at(packets, rank, NUM_RANKS)
    offset = packet_offset(epoch, rank, packets.shard_words, NUM_RANKS, SLOTS)
    blocks, groups = tl.cdiv(hidden, BLOCK), tl.cdiv(hidden, SCALE_ELEMENTS)
    choice = tl.arange(0, ep_plan.TOPK_LANES)
    in_topk = choice < ep_plan.TOPK
    for item in range(tl.program_id(0), max_tokens * blocks, copies):
        token = item // blocks
        first = item % blocks * BLOCK
        column = first + tl.arange(0, BLOCK)
        in_row = column < hidden
        exists = token < tokens
        source_row = epoch * 0 + token  # int64
        x = tl.load(x_ptr + source_row * hidden + column, mask=in_row & exists, other=0.0)
        route = token * ep_plan.TOPK + choice
        logical = tl.load(ids_ptr + route, mask=in_topk & exists, other=-1)
        expert = physical_expert(logical, token, map_ptr, num_experts, rank, ep_plan)
        if first == 0:
            bits = tl.zeros(expert.shape, tl.int32)
            if weights_ptr is not None:
                weight = tl.load(weights_ptr + route, mask=in_topk & exists, other=0.0)
                bits = weight.to(tl.float32).to(tl.int32, bitcast=True)
            everyone = targets + (packets.words,)  # noqa: RUF005
            send_lines(everyone, offset, tl.join(expert, bits), route, in_topk, tag)
            ranks = 0
            for peer in tl.static_range(NUM_RANKS):
                ranks |= has_owner(expert, peer, ep_plan).to(tl.int32) << peer
            tl.store(ep_layout.destinations + token, ranks)
        group = first // SCALE_ELEMENTS + tl.arange(0, BLOCK // SCALE_ELEMENTS)
        if ep_plan.SCALES == "computed":
            x, scale = quantise(x)
        elif ep_plan.SCALES == "given":
            scale_ptr = x_scale_ptr + source_row * groups + group
            scale = tl.load(scale_ptr, mask=(group < groups) & exists, other=0.0)
        x = x.to(rows_ptr.dtype.element_ty)
        begin = first_line_of(token, hidden, meta_lines, PER_LINE, ep_plan)
        line = first // PER_LINE + tl.arange(0, BLOCK // PER_LINE)
        for step in tl.static_range(1, NUM_RANKS):
            goes = has_owner(expert, (rank + step) % NUM_RANKS, ep_plan)
            target = (targets[step - 1],)
            valid = (line * PER_LINE < hidden) & goes
            send_lines(target, offset, payload_of(x), begin + line, valid, tag)
            if ep_plan.SCALES != "none":
                pair = first // _PAIR + tl.arange(0, BLOCK // _PAIR)
                scale_line = begin + tl.cdiv(hidden, PER_LINE) + pair
                valid = (pair * _PAIR < hidden) & goes
                send_lines(target, offset, payload_of(scale), scale_line, valid, tag)
        row = source_row + rank * max_tokens
        stays = has_owner(expert, rank, ep_plan)
        tl.store(rows_ptr + row * hidden + column, x, mask=in_row & stays)
        if ep_plan.SCALES != "none":
            tl.store(scales_ptr + row * groups + group, scale, mask=(group < groups) & stays)


@jit
def receive_tokens(
    rows_ptr, scales_ptr, packets, epoch, tag, max_tokens, hidden, rank, meta_lines, copies,
    ep_plan: tl.constexpr,
):  # fmt: skip
    """Store the rows that peers send, and clear their lines."""
    NUM_RANKS: tl.constexpr = ep_plan.NUM_RANKS
    BLOCK: tl.constexpr = ep_plan.BLOCK
    DTYPE: tl.constexpr = rows_ptr.dtype.element_ty
    PER_LINE: tl.constexpr = 64 // DTYPE.primitive_bitwidth
    peers = peers_of(rank, NUM_RANKS)
    shards = shards_of(packets, epoch, peers, NUM_RANKS, SLOTS)
    blocks, groups = tl.cdiv(hidden, BLOCK), tl.cdiv(hidden, SCALE_ELEMENTS)
    choice = tl.arange(0, ep_plan.TOPK_LANES)
    in_topk = choice < ep_plan.TOPK
    for item in range(tl.program_id(0), max_tokens * blocks, copies):
        token = item // blocks
        first = item % blocks * BLOCK
        begin = first_line_of(token, hidden, meta_lines, PER_LINE, ep_plan)
        index = first // PER_LINE + tl.arange(0, BLOCK // PER_LINE)
        in_row, line = index * PER_LINE < hidden, begin + index
        # Each thread polls the line with the scales of its elements.
        scale_line = begin + tl.cdiv(hidden, PER_LINE) + index * PER_LINE // _PAIR
        metas, lines, scale_lines = tl.tuple([]), tl.tuple([]), tl.tuple([])
        for peer in tl.static_range(NUM_RANKS - 1):
            route = token * ep_plan.TOPK + choice
            metas = metas + (shards[peer] + route * LINE_WORDS,)  # noqa: RUF005
            lines = lines + (shards[peer] + line * LINE_WORDS,)  # noqa: RUF005
            scale_at = shards[peer] + scale_line * LINE_WORDS
            scale_lines = scale_lines + (scale_at,)  # noqa: RUF005
        metas = poll_lines(metas, tag, in_topk, packets.timeout_words)
        is_sent = tl.tuple([])
        for peer in tl.static_range(NUM_RANKS - 1):
            expert, _ = tl.split(metas[peer])
            here = has_owner(tl.where(in_topk, expert, -1), rank, ep_plan)
            is_sent = is_sent + (here,)  # noqa: RUF005
        if ep_plan.SCALES != "none":
            payloads = await_sent(
                lines + scale_lines, is_sent + is_sent, tag, in_row, packets.timeout_words
            )
        else:
            payloads = await_sent(lines, is_sent, tag, in_row, packets.timeout_words)
        tl.debug_barrier()
        for peer in tl.static_range(NUM_RANKS - 1):
            row = epoch * 0 + peers[peer] * max_tokens + token
            column = first + tl.arange(0, BLOCK)
            valid = (column < hidden) & is_sent[peer]
            tl.store(rows_ptr + row * hidden + column, values_of(payloads[peer], DTYPE), mask=valid)
            clear(shards[peer], line, in_row & is_sent[peer])
            if ep_plan.SCALES != "none":
                scale = values_of(payloads[NUM_RANKS - 1 + peer], tl.float32)
                at = tl.arange(0, 2 * BLOCK // PER_LINE)
                in_pair = at % (2 * _PAIR // PER_LINE)
                group = at * PER_LINE // (2 * _PAIR) * 2 + in_pair + first // SCALE_ELEMENTS
                valid = (in_pair < 2) & (group < groups) & is_sent[peer]
                tl.store(scales_ptr + row * groups + group, scale, mask=valid)
                clear(shards[peer], scale_line, in_row & is_sent[peer])


@jit
def lay_out_experts(
    program, programs, packets, ep_layout, epoch, tag, max_tokens, rank, meta_lines,
    ep_plan: tl.constexpr,
):  # fmt: skip
    """Lay out every ``programs``-th local expert, and clear the meta lines of the last call."""
    NUM_RANKS: tl.constexpr = ep_plan.NUM_RANKS
    EXPERTS: tl.constexpr = ep_plan.EXPERTS
    ALIGNMENT: tl.constexpr = ep_plan.ALIGNMENT
    ROUTES: tl.constexpr = ep_plan.ROUTES
    for shard in tl.static_range(NUM_RANKS):
        earlier = packet_offset(epoch - 1, shard, packets.shard_words, NUM_RANKS, SLOTS)
        for first in range(program * _CLEARED, meta_lines, programs * _CLEARED):
            line = first + tl.arange(0, _CLEARED)
            clear(packets.words + earlier, line, line < meta_lines)
    # Each thread polls the lines of four consecutive routes at the same time.
    routes = max_tokens * ep_plan.TOPK
    total = NUM_RANKS * routes
    slot = packets.words + packet_offset(epoch, 0, packets.shard_words, NUM_RANKS, SLOTS)
    quarter = tl.arange(0, ROUTES // 4) * 4
    lines, expert, bits = tl.tuple([]), tl.tuple([]), tl.tuple([])
    for part in tl.static_range(4):
        route = tl.minimum(quarter + part, total - 1)
        source = route // routes
        line = source * packets.shard_words + (route - source * routes) * LINE_WORDS
        lines = lines + (slot + line,)  # noqa: RUF005
    payloads = poll_lines(lines, tag, quarter < total, packets.timeout_words)
    for part in tl.static_range(4):
        expert_of_part, bits_of_part = tl.split(payloads[part])
        expert = expert + (expert_of_part,)  # noqa: RUF005
        bits = bits + (bits_of_part,)  # noqa: RUF005
    expert = tl.interleave(tl.interleave(expert[0], expert[2]), tl.interleave(expert[1], expert[3]))
    bits = tl.interleave(tl.interleave(bits[0], bits[2]), tl.interleave(bits[1], bits[3]))
    weight = bits.to(tl.float32, bitcast=True)
    route = tl.arange(0, ROUTES)
    local = expert - rank * EXPERTS
    is_local = (route < total) & (expert >= 0) & (local >= 0) & (local < EXPERTS)
    local = tl.where(is_local, local, EXPERTS)
    absent = (route < total) & (is_local == 0) & (route % programs == program)
    tl.store(ep_layout.position_of_route + route, -1, mask=absent)
    tl.store(ep_layout.local_ids + route, -1, mask=absent)
    if program == 0:
        fault = tl.where((expert >= 0) & (weight != weight), FAULT_WEIGHT, 0)
        fault = tl.where(expert <= INVALID, FAULT_ID, fault)
        worst = tl.max(tl.where(route < total, fault, 0), 0)
        if worst != 0:
            report_fault(ep_layout.control, worst)
    lane = tl.arange(0, 2 * ep_plan.EXPERT_LANES)
    if ALIGNMENT > 1:
        sizes = tl.histogram(local, 2 * ep_plan.EXPERT_LANES)
        sizes = (sizes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    for local_expert in range(program, EXPERTS, programs):
        mine = local == local_expert
        found = mine.to(tl.int32)
        if ALIGNMENT > 1:
            begin = tl.sum(tl.where(lane < local_expert, sizes, 0), 0)
        else:
            begin = tl.sum((local < local_expert).to(tl.int32), 0)
        at = begin + tl.cumsum(found, 0) - found
        tl.store(ep_layout.row_of_position + at, route // ep_plan.TOPK, mask=mine)
        tl.store(ep_layout.position_of_route + route, at, mask=mine)
        tl.store(ep_layout.local_ids + route, local_expert, mask=mine)
        if ep_layout.weights is not None:
            tl.store(ep_layout.weights + at, weight, mask=mine)
        position = begin
        for shard in tl.static_range(NUM_RANKS):
            count = tl.sum(tl.where(route // routes == shard, found, 0), 0)
            tl.store(ep_layout.counts + local_expert * NUM_RANKS + shard, count)
            position += count
        end = begin + (position - begin + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        # A wait that gave up leaves positions unwritten. Readers stop at the ends.
        gave_up = tl.load(packets.timeout_words + 1, volatile=True) != 0
        tl.store(ep_layout.ends + local_expert, tl.where(gave_up, 0, end))
        padding = position + tl.arange(0, ALIGNMENT)
        tl.store(ep_layout.row_of_position + padding, -1, mask=padding < end)
        if ep_layout.weights is not None:
            tl.store(ep_layout.weights + padding, 0.0, mask=padding < end)


@jit(do_not_specialize=["tokens", "max_tokens", "num_experts", "rank", "copies", "digest"])
def kernel_dispatch_packets(
    x_ptr, x_scale_ptr, ids_ptr, weights_ptr, map_ptr, rows_ptr, scales_ptr, packets, ep_layout,
    tokens, max_tokens, hidden, num_experts, rank, meta_lines, copies, digest,
    ep_plan: tl.constexpr,
):  # fmt: skip
    """Run the programs of a dispatch: ``copies`` that move rows, then the layout programs.

    Grid (programs,). ``meta_lines`` is the number of meta lines of a source rank.
    """
    epoch = next_epoch(packets.calls)
    tag = tag_of(epoch, digest)
    if tl.program_id(0) < copies:
        send_tokens(
            x_ptr, x_scale_ptr, ids_ptr, weights_ptr, map_ptr, rows_ptr, scales_ptr, packets,
            ep_layout, epoch, tag, tokens, max_tokens, hidden, num_experts, rank, meta_lines,
            copies, ep_plan,
        )  # fmt: skip
        receive_tokens(
            rows_ptr, scales_ptr, packets, epoch, tag, max_tokens, hidden, rank, meta_lines, copies,
            ep_plan,
        )  # fmt: skip
    else:
        lay_out_experts(
            tl.program_id(0) - copies, tl.num_programs(0) - copies, packets, ep_layout, epoch, tag,
            max_tokens, rank, meta_lines, ep_plan,
        )  # fmt: skip
    end_call(packets.calls, epoch)


@jit(do_not_specialize=["y_rows", "tokens", "max_tokens", "rank", "digest"])
def kernel_combine_packets(
    y_ptr, y_rows, out_ptr, packets, ep_layout, tokens, max_tokens, hidden, rank, digest,
    ep_plan: tl.constexpr,
):  # fmt: skip
    """Sum the products of each token over experts and ranks into out [tokens, hidden]."""
    NUM_RANKS: tl.constexpr = ep_plan.NUM_RANKS
    BLOCK: tl.constexpr = ep_plan.BLOCK
    TOPK: tl.constexpr = ep_plan.TOPK
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    PER_LINE: tl.constexpr = 64 // DTYPE.primitive_bitwidth
    epoch = next_epoch(packets.calls)
    tag = tag_of(epoch, digest)
    check_rows(y_rows, ep_layout, ep_plan)
    offset = packet_offset(epoch, rank, packets.shard_words, NUM_RANKS)
    peers = peers_of(rank, NUM_RANKS)
    shards = shards_of(packets, epoch, peers, NUM_RANKS, 2)
    blocks, row_lines = tl.cdiv(hidden, BLOCK), tl.cdiv(hidden, PER_LINE)
    program, programs = tl.program_id(0), tl.num_programs(0)
    begun = tl.arange(0, 1)
    for item in range(program, max_tokens * blocks, programs):
        token = item // blocks
        first = item % blocks * BLOCK
        column = first + tl.arange(0, BLOCK)
        line = first // PER_LINE + tl.arange(0, BLOCK // PER_LINE)
        for step in range(1, NUM_RANKS):
            source = (rank + step) % NUM_RANKS
            target = (target_at(packets.table, source, packets.words),)
            first_route = (source * max_tokens + token) * TOPK
            latest = -1
            for choice in tl.static_range(TOPK):
                position = tl.load(ep_layout.position_of_route + first_route + choice)
                latest = tl.maximum(latest, position)
            if latest >= 0:
                total = sum_of_choices(
                    y_ptr, y_rows, ep_layout, first_route, column, hidden, ep_plan
                )
                payload, valid = payload_of(total.to(DTYPE)), line * PER_LINE < hidden
                send_lines(target, offset, payload, 1 + token * row_lines + line, valid, tag)
    # Every call waits for every peer, also if a peer has no products of this rank's tokens.
    if program == 0:
        targets = peers_at(packets, rank, NUM_RANKS)
        send_lines(targets, offset, tl.zeros([1, 2], tl.int32), begun, begun == 0, tag)
    for item in range(program, tokens * blocks, programs):
        token = item // blocks
        first = item % blocks * BLOCK
        column = first + tl.arange(0, BLOCK)
        index = first // PER_LINE + tl.arange(0, BLOCK // PER_LINE)
        in_row, line = index * PER_LINE < hidden, 1 + token * row_lines + index
        ranks = tl.load(ep_layout.destinations + token)
        first_route = (rank * max_tokens + token) * TOPK
        own = sum_of_choices(y_ptr, y_rows, ep_layout, first_route, column, hidden, ep_plan)
        lines, is_sent, payloads = tl.tuple([]), tl.tuple([]), tl.tuple([])
        for peer in tl.static_range(NUM_RANKS - 1):
            lines = lines + (shards[peer] + line * LINE_WORDS,)  # noqa: RUF005
            is_sent = is_sent + ((ranks >> peers[peer]) & 1 != 0,)  # noqa: RUF005
        arrived = await_sent(lines, is_sent, tag, in_row, packets.timeout_words)
        tl.debug_barrier()
        for peer in tl.static_range(NUM_RANKS - 1):
            payloads = payloads + (tl.where(is_sent[peer], arrived[peer], 0),)  # noqa: RUF005
            clear(shards[peer], line, in_row & is_sent[peer])
        sums = add_lines(payload_of(own.to(DTYPE)), payloads, rank, NUM_RANKS, DTYPE)
        out = out_ptr + (epoch * 0 + token) * hidden + column
        tl.store(out, sums.to(out_ptr.dtype.element_ty), mask=column < hidden)
    if program == 0:
        lines = tl.tuple([])
        for peer in tl.static_range(NUM_RANKS - 1):
            lines = lines + (shards[peer] + begun * LINE_WORDS,)  # noqa: RUF005
        poll_lines(lines, tag, begun == 0, packets.timeout_words)
        tl.debug_barrier()
        for peer in tl.static_range(NUM_RANKS - 1):
            clear(shards[peer], begun, begun == 0)
    end_call(packets.calls, epoch)
