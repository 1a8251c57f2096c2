"""Kernels of expert-parallel dispatch; ``op.py`` describes the ops.

Terms:
    * A *route* is a pair (token, choice). The *source* of a token is the rank that owns the token.
    * *Experts* are physical experts, E / W per rank.
    * The *location* of a token on a rank is the token's index on its source. If the capacity is
      limited, it is the index among the tokens that the source sends to the rank.
    * The *row* of a token in the receive buffer is ``source * capacity + location``.
    * The *position* of a route is its index among the routes to a rank, sorted by (expert, source,
      token, choice).

A dispatch is one launch. Its programs are, in this order:

* *routing* programs store ids and weights of this rank's tokens on every rank, then set flags.
  They then also store rows;
* *copy* programs store rows on the ranks of their experts, then set flags. Before they store the
  first row on a peer, they wait until every peer has begun the call;
* *layout* programs wait for the ids of all ranks, and write the positions of local routes;
* one program waits for the last flags of the routing and copy programs.

A launch may contain only the first two kinds of programs, or only the last two. Programs start in
the order of their numbers. A program waits only for flags of programs of an earlier kind or with
smaller numbers. A launch therefore finishes even if each GPU runs only one program at a time.

*One buffer for rows.* A peer stores rows only after this rank has set its begun flag (phase 1). The
kernels that read the rows of earlier calls precede the call on the stream, so they have ended.

*Two slots for ids and weights.* A peer stores them without a wait for this rank's begun flag, so
calls alternate between two slots. When a peer uses a slot again, two calls later, it has waited
for this rank's rows of the call in between. This rank had then finished the first call.

Flags, epochs and slots follow ``common/exchange/protocol.py``. The call tag in a flag is a digest
of the arguments that must be equal on all ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.kernels.common.exchange.protocol import (
    MAX_CTAS,
    Call,
    after_wait,
    await_programs,
    chunk_flag,
    flag_offset,
    notify_ranks,
    slot_offset,
)
from triton_dist.kernels.common.peers import target_at

SCALE_ELEMENTS = tl.constexpr(128)
"""An fp8 row has one scale per this number of elements."""
SCALES_PER_LINE = tl.constexpr(4)
"""fp32 scales in a 16-byte line."""
INVALID_ID = tl.constexpr(-2)
"""Replaces ids that are neither experts nor -1, and ids without an expert in the map."""
# Errors that a kernel reports to the host: an id without expert, a weight that is NaN, and fewer
# rows than positions in use (in y of ``ep_combine``, and in ``out`` of ``Received.expanded``).
FAULT_ID, FAULT_WEIGHT = tl.constexpr(1), tl.constexpr(2)
FAULT_Y_ROWS, FAULT_OUT_ROWS = tl.constexpr(3), tl.constexpr(4)
_FP8_MAXIMUM = tl.constexpr(448.0)
_COUNTS_PER_STEP = tl.constexpr(4096)
"""Number of counts that a layout program loads at once."""
_CALL_STEP = tl.constexpr(4096)
"""What a call adds to the counter of calls. Exceeds the number of programs of a launch."""


class EPMemory(NamedTuple):
    """Symmetric memory of a dispatch. Tables have the address on each rank, int64 [NUM_RANKS].

    * ``rows`` is [NUM_RANKS * capacity, hidden].
    * ``scales`` is fp32 [NUM_RANKS * capacity, hidden / 128], or ``None``.
    * ``routing`` is int32, two slots of ``routing_elements`` elements. A slot has the ids
      [NUM_RANKS, max_tokens, TOPK], the bits of the weights in the same shape, the locations
      [NUM_RANKS, max_tokens], and the numbers of routes [NUM_RANKS, blocks, EXPERTS]. A block has
      BLOCK_TOKENS tokens.
    """

    rows: Any
    rows_table: Any
    scales: Any
    scales_table: Any
    routing: Any
    routing_table: Any
    routing_elements: Any


class EPLayout(NamedTuple):
    """Results of the layout programs. ``Received`` has the shapes.

    ``local_ids`` are the local experts of routes, ``ends`` the ends of the experts' positions, and
    ``counts`` the numbers of routes by expert and source. Bit r of ``destinations`` is set if the
    token was sent to rank r. Kernels report faults in the host word at ``fault_address``.
    """

    row_of_position: Any
    weights: Any
    position_of_route: Any
    local_ids: Any
    ends: Any
    counts: Any
    destinations: Any
    fault_address: Any


class EPPlan(NamedTuple):
    """Constants of a launch.

    EXPERTS is the number of experts per rank. LANES, TOPK_LANES and EXPERT_LANES are NUM_RANKS,
    TOPK and EXPERTS rounded up to powers of two. A program moves BLOCK elements of a row at once,
    and reads the ids of a block of BLOCK_TOKENS tokens at once. A histogram of the experts of all
    ranks has EXPERT_BINS bins. A program polls ROUTING_FLAG_LANES or FLAG_LANES flags together.
    TOKEN_BLOCKS, for packets only, is a power of two, at least the number of token blocks of all
    ranks. REPLICAS is the number of columns of the map of experts. The first position of an expert
    is a multiple of ALIGNMENT. SCALES is "none", "given", or "computed" if sent rows are quantised.
    """

    NUM_RANKS: Any
    LANES: Any
    BLOCK: Any
    TOPK: Any
    TOPK_LANES: Any
    EXPERTS: Any
    EXPERT_LANES: Any
    EXPERT_BINS: Any
    ROUTING_FLAG_LANES: Any
    FLAG_LANES: Any
    TOKEN_BLOCKS: Any
    BLOCK_TOKENS: Any
    REPLICAS: Any
    ALIGNMENT: Any
    SCALES: Any


@jit
def begin_ep_call(peers, call_tag, rank, is_continuation: tl.constexpr, ep_plan: tl.constexpr):
    """Begin a call. Each program calls this once.

    A launch with ``is_continuation`` belongs to the call of the previous launch. ``offset`` of the
    result is an int64 zero, which makes the indices of rows int64.
    """
    peer = tl.arange(0, ep_plan.LANES)
    table = tl.load(peers.table + peer, mask=peer < ep_plan.NUM_RANKS, other=0)
    flags = table.to(peers.arrivals.dtype) + tl.program_id(0) * ep_plan.NUM_RANKS + rank
    if not is_continuation:
        step = tl.where(tl.program_id(0) == 0, _CALL_STEP - tl.num_programs(0) + 1, 1).to(tl.int64)
        counter = tl.atomic_add(peers.calls + 1, step, sem="relaxed", scope="gpu")
        epoch = counter // _CALL_STEP + 1
        # The host uses word 0 to find late flags. Word 2 or 3 counts the work items that programs
        # have claimed in the next call (``send_rows``): reset it.
        if tl.program_id(0) == 0:
            tl.atomic_add(peers.calls, MAX_CTAS, sem="relaxed", scope="gpu")
            tl.store(peers.calls + claim_counter_index(epoch + 1), 0)
    else:
        epoch = tl.load(peers.calls + 1) // _CALL_STEP
    return Call(flags=flags, epoch=epoch, offset=epoch * 0, call_tag=call_tag, rank=rank)


@jit
def claim_counter_index(epoch):
    """Return the index in ``Peers.calls`` of the number of claimed items of a call."""
    return 2 + epoch % 2


@jit
def physical_expert(logical, token, expert_map_ptr, num_experts, rank, ep_plan: tl.constexpr):
    """Return the physical experts of logical ids.

    The result is -1 for an id of -1, and INVALID_ID for ids out of range. Tokens alternate between
    the replicas of an expert.
    """
    valid = (logical >= 0) & (logical < num_experts)
    expert = tl.where(valid, logical, tl.where(logical == -1, -1, INVALID_ID)).to(tl.int32)
    if expert_map_ptr is not None:
        replicas_ptr = expert_map_ptr + tl.where(valid, logical, 0).to(tl.int32) * ep_plan.REPLICAS
        replicas = expert * 0
        REPLICAS: tl.constexpr = ep_plan.REPLICAS
        for replica in tl.static_range(REPLICAS):
            replicas += (tl.load(replicas_ptr + replica) >= 0).to(tl.int32)
        choice = (token + rank) % tl.maximum(replicas, 1)
        mapped = tl.load(replicas_ptr + choice).to(tl.int32)
        # A map is invalid if a row has no expert, or -1 before an expert.
        exists = (replicas > 0) & (mapped >= 0) & (mapped < ep_plan.EXPERTS * ep_plan.NUM_RANKS)
        expert = tl.where(valid, tl.where(exists, mapped, INVALID_ID), expert)
    return expert


@jit
def read_block(
    first, ids_ptr, weights_ptr, locations_ptr, expert_map_ptr, num_experts, ep_layout, rank,
    tokens, max_tokens, ep_plan: tl.constexpr,
):  # fmt: skip
    """Return the experts and the bits of the weights of a block of tokens, and its route counts.

    Route counts are by expert, [EXPERT_BINS]. Experts of tokens from ``tokens`` on are -1. Also
    store the tokens' ``destinations``.
    """
    NUM_RANKS: tl.constexpr = ep_plan.NUM_RANKS
    EXPERT_BINS: tl.constexpr = ep_plan.EXPERT_BINS
    choice = tl.arange(0, ep_plan.TOPK_LANES)[None, :]
    token = first + tl.arange(0, ep_plan.BLOCK_TOKENS)
    valid = (token < tokens)[:, None] & (choice < ep_plan.TOPK)
    route = token[:, None] * ep_plan.TOPK + choice
    logical = tl.load(ids_ptr + route, mask=valid, other=-1)
    bits = tl.zeros(route.shape, tl.int32)
    if weights_ptr is not None:
        weight = tl.load(weights_ptr + route, mask=valid, other=0.0).to(tl.float32)
        bits = weight.to(tl.int32, bitcast=True)
    expert = physical_expert(logical, token[:, None], expert_map_ptr, num_experts, rank, ep_plan)
    owner = tl.where(expert >= 0, expert // ep_plan.EXPERTS, -1)
    is_sent = owner >= 0
    if locations_ptr is not None:
        location_ptr = locations_ptr + owner * max_tokens + token[:, None]
        is_sent = is_sent & (tl.load(location_ptr, mask=is_sent, other=-1) >= 0)
    counted = tl.reshape(tl.where(is_sent, expert, EXPERT_BINS - 1), [route.numel])
    destinations = tl.full((ep_plan.BLOCK_TOKENS,), 0, tl.int32)
    for peer in tl.static_range(NUM_RANKS):
        destinations |= tl.max((is_sent & (owner == peer)).to(tl.int32), 1) << peer
    tl.store(ep_layout.destinations + token, destinations, mask=token < max_tokens)
    return expert, bits, tl.histogram(counted, EXPERT_BINS)


@jit
def send_routing(
    program, ids_ptr, weights_ptr, locations_ptr, expert_map_ptr, num_experts, memory, ep_layout,
    call, tokens, max_tokens, num_routing_programs, ep_plan: tl.constexpr,
):  # fmt: skip
    """Store ids, weights, locations and counts of this rank's tokens on every rank. Set flags."""
    NUM_RANKS: tl.constexpr = ep_plan.NUM_RANKS
    TOPK: tl.constexpr = ep_plan.TOPK
    EXPERTS: tl.constexpr = ep_plan.EXPERTS
    BLOCK_TOKENS: tl.constexpr = ep_plan.BLOCK_TOKENS
    offset = slot_offset(call.epoch, memory.routing_elements)
    num_ids = NUM_RANKS * max_tokens * TOPK
    bin = tl.arange(0, ep_plan.EXPERT_BINS)
    choice = tl.arange(0, ep_plan.TOPK_LANES)[None, :]
    for first in range(program * BLOCK_TOKENS, max_tokens, num_routing_programs * BLOCK_TOKENS):
        expert, bits, count = read_block(
            first, ids_ptr, weights_ptr, locations_ptr, expert_map_ptr, num_experts, ep_layout,
            call.rank, tokens, max_tokens, ep_plan,
        )  # fmt: skip
        token = first + tl.arange(0, BLOCK_TOKENS)
        in_call = token < max_tokens
        stored = in_call[:, None] & (choice < TOPK)
        route = (call.rank * max_tokens + token)[:, None] * TOPK + choice
        item = call.rank * tl.cdiv(max_tokens, BLOCK_TOKENS) + first // BLOCK_TOKENS
        with dl.mark("push"):
            for step in tl.static_range(NUM_RANKS):
                peer = (call.rank + step) % NUM_RANKS
                target = target_at(memory.routing_table, peer, memory.routing) + offset
                tl.store(target + route, expert, mask=stored)
                if weights_ptr is not None:
                    tl.store(target + num_ids + route, bits, mask=stored)
                if locations_ptr is not None:
                    location_ptr = locations_ptr + peer * max_tokens + token
                    location = tl.load(location_ptr, mask=in_call, other=-1)
                    index = call.rank * max_tokens + token
                    tl.store(target + 2 * num_ids + index, location, mask=in_call)
                local = bin - peer * EXPERTS
                tl.store(
                    target + 2 * num_ids + NUM_RANKS * max_tokens + item * EXPERTS + local, count,
                    mask=(local >= 0) & (local < EXPERTS),
                )  # fmt: skip
    notify_ranks(call, 0, chunk_flag(call, 0), ep_plan)


@jit
def quantise(x):
    """Return a block of a row divided by its scales, and one scale per SCALE_ELEMENTS elements."""
    GROUPS: tl.constexpr = x.numel // SCALE_ELEMENTS
    values = tl.reshape(x.to(tl.float32), [GROUPS, SCALE_ELEMENTS])
    # The minimum avoids 0 / 0 for zeros.
    scale = tl.maximum(tl.max(tl.abs(values), 1), 1e-12) / _FP8_MAXIMUM
    return tl.reshape(values / scale[:, None], [x.numel]), scale


@jit
def load_block(x_ptr, ids_ptr, item, items, hidden, ep_plan: tl.constexpr):
    """Return block ``item`` of this rank's rows, and the expert ids of the block's token."""
    blocks = tl.cdiv(hidden, ep_plan.BLOCK)
    token, choice = item // blocks, tl.arange(0, ep_plan.TOPK_LANES)
    column = item % blocks * ep_plan.BLOCK + tl.arange(0, ep_plan.BLOCK)
    in_topk = (choice < ep_plan.TOPK) & (item < items)
    ids = tl.load(ids_ptr + token * ep_plan.TOPK + choice, mask=in_topk, other=-1)
    x_ptr += token.to(tl.int64) * hidden + column
    return tl.load(x_ptr, mask=(column < hidden) & (item < items), other=0.0), ids


@jit
def has_owner(expert, rank, ep_plan: tl.constexpr):
    """Return whether ``rank`` owns one of the experts."""
    owned = (expert >= 0) & (expert // ep_plan.EXPERTS == rank)
    return tl.max(owned.to(tl.int32), 0) != 0


@jit
def store_row(target, values, mask, UNTAGGED: tl.constexpr = True):
    """Store ``values``, or if ``UNTAGGED`` (``packets.py``), the complement of their bits.

    If the complement is 0, which only a NaN has, the complement of another NaN is stored instead.
    """
    if UNTAGGED:
        BITS: tl.constexpr = values.dtype.primitive_bitwidth
        INT: tl.constexpr = tl.int8 if BITS == 8 else tl.int16 if BITS == 16 else tl.int32
        complement = ~values.to(INT, bitcast=True)
        values = tl.where(complement == 0, -(1 << (BITS - 1)), complement).to(INT)
        target = target.to(tl.pointer_type(INT))
    with dl.mark("push"):
        tl.store(target, values, mask=mask)


@jit
def await_begun(begun, phase, peers, call, ep_plan: tl.constexpr):
    """Wait until all ranks have begun the call, unless ``begun`` is 1. Return 1, its new value."""
    if begun == 0:
        await_programs(peers, phase, 0, chunk_flag(call, 0), ep_plan)
    return 1


@jit
def send_rows(
    program, x_ptr, x_scale_ptr, ids_ptr, locations_ptr, expert_map_ptr, num_experts, rows, scales,
    strides, peers, call, tokens, max_tokens, hidden, rank, num_senders, ep_plan: tl.constexpr,
    CLAIMS_BLOCKS: tl.constexpr = False,
):  # fmt: skip
    """Store this program's tokens once on each rank that owns one of their experts.

    If CLAIMS_BLOCKS is true, the ``num_senders`` programs claim the second half of the blocks one
    by one. With fixed shares, a program with many rows for peers would end much later than others.

    ``rows[i]`` and ``scales[i]`` are the addresses of the first token on rank ``rank + i``.
    ``strides`` are the strides of rows and scales on peers. If ``call`` is ``None``, rows are sent
    in untagged lines (``packets.py``).
    """
    NUM_RANKS: tl.constexpr = ep_plan.NUM_RANKS
    UNTAGGED: tl.constexpr = call is None
    BLOCK: tl.constexpr = ep_plan.BLOCK
    blocks, groups = tl.cdiv(hidden, BLOCK), tl.cdiv(hidden, SCALE_ELEMENTS)
    items = tokens * blocks
    next_x, next_ids = load_block(x_ptr, ids_ptr, program, items, hidden, ep_plan)
    begun, item, first_claimed = 0, program, tl.maximum(items // 2, num_senders)
    while item < items:
        x, ids, next_item = next_x, next_ids, item + num_senders
        if CLAIMS_BLOCKS and next_item >= first_claimed:
            claims = peers.calls + claim_counter_index(call.epoch)
            claimed = tl.atomic_add(claims, 1, sem="relaxed", scope="gpu")
            next_item = first_claimed + claimed.to(tl.int32)
        next_x, next_ids = load_block(x_ptr, ids_ptr, next_item, items, hidden, ep_plan)
        token, first = (item // blocks).to(tl.int64), item % blocks * BLOCK
        column = first + tl.arange(0, BLOCK)
        group = first // SCALE_ELEMENTS + tl.arange(0, BLOCK // SCALE_ELEMENTS)
        if ep_plan.SCALES == "computed":
            x, scale = quantise(x)
        elif ep_plan.SCALES == "given":
            scale_ptr = x_scale_ptr + token * groups + group
            scale = tl.load(scale_ptr, mask=group < groups, other=0.0)
        x = x.to(rows[0].dtype.element_ty)
        expert = physical_expert(ids, item // blocks, expert_map_ptr, num_experts, rank, ep_plan)
        # Begin with this rank's rows, because they need not wait for peers.
        for step in tl.static_range(NUM_RANKS):
            peer, location = (rank + step) % NUM_RANKS, token
            is_sent = has_owner(expert, peer, ep_plan)
            if locations_ptr is not None:
                location = tl.load(locations_ptr + peer * max_tokens + token).to(tl.int64)
                is_sent = is_sent & (location >= 0)
            row_stride, scale_stride, stored = hidden, groups, groups
            if step > 0:
                row_stride, scale_stride = strides
                if not UNTAGGED:
                    begun = await_begun(begun, 1, peers, call, ep_plan)
            row_ptr = rows[step] + location * row_stride + column
            store_row(row_ptr, x, (column < hidden) & is_sent, UNTAGGED and step > 0)
            if ep_plan.SCALES != "none":
                if UNTAGGED and step > 0:  # the receiver waits for whole lines
                    stored = tl.cdiv(groups, SCALES_PER_LINE) * SCALES_PER_LINE
                scale_ptr = scales[step] + location * scale_stride + group
                store_row(scale_ptr, scale, (group < stored) & is_sent, UNTAGGED and step > 0)
        item = next_item


@jit
def first_positions(
    total, ep_layout, timeout_words, program, programs, max_positions, ep_plan: tl.constexpr
):  # fmt: skip
    """Return the first position of each expert, and store the ends and the padding.

    ``total`` [EXPERT_LANES] is the number of routes of each expert, ``max_positions`` the length of
    the arrays of positions.
    """
    ALIGNMENT: tl.constexpr = ep_plan.ALIGNMENT
    expert = tl.arange(0, ep_plan.EXPERT_LANES)
    is_expert = expert < ep_plan.EXPERTS
    # If ranks disagree, waits end early and counts may be arbitrary. Keep positions in the arrays.
    aligned = (total + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    begin = tl.minimum(tl.maximum(tl.cumsum(aligned, 0) - aligned, 0), max_positions)
    end = tl.minimum(tl.maximum(begin + aligned, 0), max_positions)
    if program == 0:
        # If a wait gave up, positions are missing. Ends of 0 prevent that kernels read positions.
        gave_up = tl.load(timeout_words + 1, volatile=True) != 0
        tl.store(ep_layout.ends + expert, tl.where(gave_up, 0, end), mask=is_expert)
    for padding in range(program, ALIGNMENT, programs):
        position = begin + total + padding
        is_padding = is_expert & (position >= 0) & (position < end)
        tl.store(ep_layout.row_of_position + position, -1, mask=is_padding)
        if ep_layout.weights is not None:
            tl.store(ep_layout.weights + position, 0.0, mask=is_padding)
    return begin


@jit
def write_positions(ep_layout, begin, ids, local, row, bits, index, valid, max_positions):
    """Write the positions of a block's routes.

    ``begin`` [EXPERT_LANES] is the first free position of each expert. ``local`` is the local
    expert of each route, or -1. ``index`` is the route's index among the routes of all ranks.
    """
    ROUTES: tl.constexpr = local.shape[0]
    COMPARED_ROUTES: tl.constexpr = min(32, ROUTES)
    lane = tl.arange(0, ROUTES)
    earlier_routes = tl.full((ROUTES,), 0, tl.int32)
    for first in tl.static_range(0, ROUTES, COMPARED_ROUTES):
        other = first + tl.arange(0, COMPARED_ROUTES)
        precedes = tl.gather(local, other, 0)[None, :] == local[:, None]
        earlier_routes += tl.sum((precedes & (other[None, :] < lane[:, None])).to(tl.int32), 1)
    position = tl.gather(begin, tl.maximum(local, 0), 0) + earlier_routes
    is_local = (local >= 0) & (position >= 0) & (position < max_positions)
    with dl.mark("store"):
        tl.store(ep_layout.row_of_position + position, row, mask=is_local)
    tl.store(ep_layout.position_of_route + index, tl.where(is_local, position, -1), mask=valid)
    tl.store(ep_layout.local_ids + index, tl.where(is_local, local, -1), mask=valid)
    fault = tl.where(ids <= INVALID_ID, FAULT_ID, 0)
    if ep_layout.weights is not None:
        weight = bits.to(tl.float32, bitcast=True)
        tl.store(ep_layout.weights + position, weight, mask=is_local)
        fault = tl.where((ids >= 0) & (weight != weight), FAULT_WEIGHT, fault)
    max_fault = tl.max(fault, 0)
    if max_fault != 0:
        report_fault(ep_layout.fault_address, max_fault)


@jit
def write_layout(
    program, programs, has_locations: tl.constexpr, memory, peers, ep_layout, call, max_tokens,
    capacity, num_routing_programs, ep_plan: tl.constexpr,
):  # fmt: skip
    """Write the positions, rows, local ids and weights of this program's blocks of routes.

    The sources have sent the number of routes of each block and expert. The first position of an
    expert is the sum of the aligned numbers of routes of the experts before. A route comes
    after the routes of the same expert in earlier blocks and after the earlier ones in its block.
    """
    NUM_RANKS: tl.constexpr = ep_plan.NUM_RANKS
    EXPERTS: tl.constexpr = ep_plan.EXPERTS
    ROUTES: tl.constexpr = ep_plan.BLOCK_TOKENS * ep_plan.TOPK_LANES
    BLOCKS_PER_STEP: tl.constexpr = max(1, _COUNTS_PER_STEP // ep_plan.EXPERT_LANES)
    flags = tl.arange(0, ep_plan.ROUTING_FLAG_LANES)
    value = chunk_flag(call, 0)
    first_flag = peers.arrivals + flag_offset(0, value, NUM_RANKS)
    num_flags = num_routing_programs * NUM_RANKS
    waited = dl.wait(first_flag + flags, num_flags, value, peers.timeout_words, True)
    offset = slot_offset(call.epoch, memory.routing_elements)
    routing_ptr = memory.routing + after_wait(offset, waited)
    routes = max_tokens * ep_plan.TOPK
    num_ids = NUM_RANKS * routes
    location_ptr = routing_ptr + 2 * num_ids
    counts_ptr = location_ptr + NUM_RANKS * max_tokens
    blocks = tl.cdiv(max_tokens, ep_plan.BLOCK_TOKENS)
    blocks_per_program = tl.cdiv(NUM_RANKS * blocks, programs)
    first_item = program * blocks_per_program
    expert = tl.arange(0, ep_plan.EXPERT_LANES)
    is_expert = expert < EXPERTS
    total = tl.full((ep_plan.EXPERT_LANES,), 0, tl.int32)
    earlier = tl.full((ep_plan.EXPERT_LANES,), 0, tl.int32)
    # Loads bypass L1, which may hold the ids of an earlier call.
    for source in range(NUM_RANKS):
        sent = tl.full((ep_plan.EXPERT_LANES,), 0, tl.int32)
        for first in range(0, blocks, BLOCKS_PER_STEP):
            block = first + tl.arange(0, BLOCKS_PER_STEP)
            item = source * blocks + block
            count = tl.load(
                counts_ptr + item[:, None] * EXPERTS + expert[None, :],
                mask=(block < blocks)[:, None] & is_expert[None, :], other=0, cache_modifier=".cg",
            )  # fmt: skip
            sent += tl.sum(count, 0)
            earlier += tl.sum(tl.where((item < first_item)[:, None], count, 0), 0)
        if program == 0:
            tl.store(ep_layout.counts + expert * NUM_RANKS + source, sent, mask=is_expert)
        total += sent
    max_positions = num_ids + EXPERTS * (ep_plan.ALIGNMENT - 1)
    position = earlier + first_positions(
        total, ep_layout, peers.timeout_words, program, programs, max_positions, ep_plan
    )  # fmt: skip
    for item in range(first_item, tl.minimum(first_item + blocks_per_program, NUM_RANKS * blocks)):
        source = item // blocks
        first_route = (item - source * blocks) * ep_plan.BLOCK_TOKENS * ep_plan.TOPK
        end_route = tl.minimum(first_route + ep_plan.BLOCK_TOKENS * ep_plan.TOPK, routes)
        route = first_route + tl.arange(0, ROUTES)
        valid, index = route < end_route, source * routes + route
        ids = tl.load(routing_ptr + index, mask=valid, other=-1, cache_modifier=".cg")
        local = ids - call.rank * EXPERTS
        location = route // ep_plan.TOPK
        if has_locations:
            location = tl.load(
                location_ptr + source * max_tokens + location, mask=valid, other=-1,
                cache_modifier=".cg",
            )  # fmt: skip
        is_local = (local >= 0) & (local < EXPERTS) & (location >= 0)
        bits = tl.full((ROUTES,), 0, tl.int32)
        if ep_layout.weights is not None:
            bits = tl.load(routing_ptr + num_ids + index, mask=valid, other=0, cache_modifier=".cg")
        write_positions(
            ep_layout, position, ids, tl.where(is_local, local, -1), source * capacity + location,
            bits, index, valid, max_positions,
        )  # fmt: skip
        position += tl.load(
            counts_ptr + item * EXPERTS + expert, mask=is_expert, other=0, cache_modifier=".cg"
        )


@jit
def report_fault(fault_address_ptr, fault):
    """Record a fault in host memory. ``EPContext.check`` raises its error."""
    tl.store(tl.load(fault_address_ptr).to(tl.pointer_type(tl.int64)), fault)


@jit(
    do_not_specialize=[
        "tokens", "max_tokens", "capacity", "num_experts", "rank", "num_routing_programs",
        "num_copy_programs", "call_tag",
    ]
)  # fmt: skip
def kernel_dispatch(
    x_ptr, x_scale_ptr, ids_ptr, weights_ptr, locations_ptr, expert_map_ptr, memory, peers,
    ep_layout, tokens, max_tokens, capacity, hidden, num_experts, rank, num_routing_programs,
    num_copy_programs, call_tag, receives_only: tl.constexpr, ep_plan: tl.constexpr,
):  # fmt: skip
    """Run the programs of a dispatch, or with ``receives_only`` only the last two kinds.

    Grid (programs,). ``locations_ptr`` is ``None`` unless the capacity is limited.
    """
    call = begin_ep_call(peers, call_tag, rank, receives_only, ep_plan)
    program, end = tl.program_id(0), tl.num_programs(0)
    num_senders = num_routing_programs + num_copy_programs
    if receives_only:
        program += num_senders
        end += num_senders
    if program == 0:  # notify peers that this rank has begun the call
        notify_ranks(call, 1, chunk_flag(call, 0), ep_plan)
    if program < num_routing_programs:
        send_routing(
            program, ids_ptr, weights_ptr, locations_ptr, expert_map_ptr, num_experts, memory,
            ep_layout, call, tokens, max_tokens, num_routing_programs, ep_plan,
        )  # fmt: skip
    if program < num_senders:
        NUM_RANKS: tl.constexpr = ep_plan.NUM_RANKS
        rows, scales, groups = tl.tuple([]), tl.tuple([]), tl.cdiv(hidden, SCALE_ELEMENTS)
        first_own_row = call.offset + rank * capacity
        for step in tl.static_range(NUM_RANKS):
            peer = (rank + step) % NUM_RANKS
            target = target_at(memory.rows_table, peer, memory.rows)
            rows = rows + (target + first_own_row * hidden,)  # noqa: RUF005
            if ep_plan.SCALES != "none":
                target = target_at(memory.scales_table, peer, memory.scales)
                scales = scales + (target + first_own_row * groups,)  # noqa: RUF005
        # The first blocks belong to the copy programs, which begin before the routing programs.
        send_rows(
            (program + num_copy_programs) % num_senders, x_ptr, x_scale_ptr, ids_ptr, locations_ptr,
            expert_map_ptr, num_experts, rows, scales, (hidden, groups), peers, call,
            tl.where(num_copy_programs > 0, tokens, 0), max_tokens, hidden, rank, num_senders,
            ep_plan, True,
        )  # fmt: skip
        notify_ranks(call, 0, chunk_flag(call, 1), ep_plan)
    elif program < end - 1:
        write_layout(
            program - num_senders, end - 1 - num_senders, locations_ptr is not None, memory, peers,
            ep_layout, call, max_tokens, capacity, num_routing_programs, ep_plan,
        )  # fmt: skip
    else:
        flags = tl.arange(0, ep_plan.FLAG_LANES)
        value = chunk_flag(call, 1)
        first_flag = peers.arrivals + flag_offset(0, value, ep_plan.NUM_RANKS)
        count = num_senders * ep_plan.NUM_RANKS
        dl.wait(first_flag + flags, count, value, peers.timeout_words, True)


@jit(do_not_specialize=["tokens", "max_tokens", "capacity", "num_experts", "rank"])
def kernel_locate(
    ids_ptr, expert_map_ptr, locations_ptr, dropped_ptr, tokens, max_tokens, capacity, num_experts,
    rank, ep_plan: tl.constexpr,
):  # fmt: skip
    """Compute the location of each token on each rank, and count dropped tokens. Grid (ranks,).

    Locations are [ranks, max_tokens]. They are -1 for tokens that are not sent to the rank, and for
    tokens that exceed ``capacity``, which are dropped.
    """
    peer = tl.program_id(0)
    choice = tl.arange(0, ep_plan.TOPK_LANES)[None, :]
    count = 0
    for first in range(0, max_tokens, ep_plan.BLOCK_TOKENS):
        token = first + tl.arange(0, ep_plan.BLOCK_TOKENS)
        valid = (token < tokens)[:, None] & (choice < ep_plan.TOPK)
        logical = tl.load(ids_ptr + token[:, None] * ep_plan.TOPK + choice, mask=valid, other=-1)
        expert = physical_expert(
            logical, token[:, None], expert_map_ptr, num_experts, rank, ep_plan
        )
        is_owned = (expert >= 0) & (expert // ep_plan.EXPERTS == peer)
        is_sent = tl.max(is_owned.to(tl.int32), 1)
        location = count + tl.cumsum(is_sent, 0) - is_sent
        location = tl.where((is_sent != 0) & (location < capacity), location, -1)
        tl.store(locations_ptr + peer * max_tokens + token, location, mask=token < max_tokens)
        count += tl.sum(is_sent, 0)
    tl.atomic_add(dropped_ptr, tl.maximum(count - capacity, 0), sem="relaxed", scope="gpu")
