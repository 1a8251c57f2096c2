"""Kernel of an expert-parallel dispatch of few tokens: one launch without flags.

Receivers poll the words of the data itself: packets (``common/exchange/packets.py``) or untagged
lines. A peer may therefore store data before this rank has begun the call. In memory, a source rank
has 16-byte lines in this order:

* *routes*: for each route (a token and one of its experts), a packet with the expert and the bits
  of the weight;
* *counts*: for each block of tokens, the number of routes to each expert of the receiver, in
  untagged lines;
* *rows*: for each token, its row and the scales of the row, in untagged lines.

The first programs send routes and counts. The copy programs send rows, then receive the rows of the
same tokens from all peers. The last programs lay out the routes. They read the counts of all blocks
of tokens, so they need no results of other programs of their rank.

*Untagged lines.* The tags of packets double the bytes that are sent, which is too slow for rows.
The sender of an untagged line stores the complement of the words, and the receiver waits until no
word of the line is 0. Only a NaN whose bits are all ones would be stored as 0, so it is replaced by
another NaN. Untagged lines have no call tag. The receiver therefore also waits for a packet or flag
of the call, to detect that a peer called with other arguments.

*Three slots.* Several programs read a line of routes or counts, so they cannot clear it after
reading. Call n + 1 clears these lines of call n, and call n + 3 uses the same slot again. A peer
begins call n + 3 after its call n + 2, which waits for routes that this rank sends after its call
n + 1. Lines of rows have only one reader, which clears them.
"""

from __future__ import annotations

import triton
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
    poll_lines,
    send_lines,
)
from triton_dist.kernels.common.exchange.protocol import LINE_WORDS
from triton_dist.kernels.common.peers import AWAITED, FLAG, GAVE_UP
from triton_dist.kernels.nvidia.expert_parallel.kernel import (
    SCALE_ELEMENTS,
    SCALES_PER_LINE,
    first_positions,
    has_owner,
    read_block,
    send_rows,
    store_row,
    write_positions,
)
from triton_dist.language._spin import INTERPRETED, spin, wait_deadline

LINE_BITS = tl.constexpr(128)
NUM_SLOTS = tl.constexpr(3)
BLOCK_ROUTES = tl.constexpr(128)
"""Routes of a block of tokens. A token counts as topk routes, rounded up to a power of two."""
_COUNTS_PER_LINE = tl.constexpr(4)
"""Counts in a line. Each is one word, because halves of a word may arrive at different times."""
_ELEMENTS_PER_SCALE_LINE = tl.constexpr(SCALES_PER_LINE.value * SCALE_ELEMENTS.value)
"""Elements whose four scales are in one line."""
_CLEARED_LINES = tl.constexpr(512)
"""Number of lines that a layout program clears at once."""


@jit
def poll_untagged(lines, is_sent, timeout_ptr):
    """Wait until the four words of each 16-byte line are not 0, and return the decoded words.

    ``lines`` is a tuple of blocks of int32 pointers. For each block, the result has four blocks of
    int32, one per word of a line. ``is_sent`` is a tuple of masks. Lines whose mask is false are
    not awaited, and their results are arbitrary.
    """
    with dl.mark("wait"):
        payloads = tl.tuple([])
        if INTERPRETED:
            for peer in tl.static_range(len(lines)):
                word_ptr = lines[peer][:, None] + tl.arange(0, 4)[None, :]
                deadline, polls = wait_deadline(), 0
                words = tl.load(word_ptr, mask=is_sent[peer][:, None], other=1, volatile=True)
                while (tl.min((words != 0).to(tl.int32)) == 0) & (polls >= 0):
                    arrived = (words != 0).to(tl.int32)
                    polls = spin(word_ptr, arrived, 1, deadline, 0, timeout_ptr, False)
                    words = tl.load(word_ptr, mask=is_sent[peer][:, None], other=1, volatile=True)
                for index in tl.static_range(4):
                    word = tl.sum(tl.where(tl.arange(0, 4)[None, :] == index, ~words, 0), 1)
                    payloads = payloads + (word,)  # noqa: RUF005
        else:
            max_polls = tl.load(timeout_ptr.to(tl.pointer_type(tl.int32)))
            timeout_words = timeout_ptr.to(lines[0].dtype.scalar)
            masks = tl.tuple([])
            for peer in tl.static_range(len(lines)):
                masks = masks + (is_sent[peer].to(tl.int32),)  # noqa: RUF005
            words = tl.inline_asm_elementwise(
                _polling_ptx(len(lines)),
                _constraints(len(lines)),
                lines + masks + (max_polls, timeout_words),
                dtype=(tl.int32,) * (4 * len(lines)),
                is_pure=False,
                pack=1,
            )
            for index in tl.static_range(4 * len(lines)):
                payloads = payloads + (~words[index],)  # noqa: RUF005
    return payloads


@jit
def line_words(words, index):
    """Return line ``index`` of the result of ``poll_untagged``, int32 [lines, 4]."""
    even, odd = tl.join(words[4 * index], words[4 * index + 2]), words[4 * index + 1]
    line = tl.join(even, tl.join(odd, words[4 * index + 3]))
    return tl.reshape(line, [odd.shape[0], 4])


@triton.constexpr_function
def _constraints(peers: int) -> str:
    """Return the constraints of the PTX. The outputs are four words per line. The inputs are the
    lines, their masks, the limit of polls, and the timeout words."""
    return ",".join(["=&r"] * (4 * peers) + ["l"] * peers + ["r"] * (peers + 1) + ["l"])


@triton.constexpr_function
def _polling_ptx(peers: int) -> str:
    """Return PTX that polls the line of each peer whose mask is set.

    Polling ends if no word is 0, after the limit of polls, or if another wait gave up. FLAG,
    AWAITED and GAVE_UP are indices of timeout words.
    """
    lines = [f"${4 * peers + peer}" for peer in range(peers)]
    masks = [f"${5 * peers + peer}" for peer in range(peers)]
    max_polls, timeout_words = f"${6 * peers}", f"${6 * peers + 1}"
    poll, find_minimum = [], []
    for peer, line in enumerate(lines):
        words = [f"${4 * peer + index}" for index in range(4)]
        poll.append(f"@sent{peer} ld.relaxed.sys.global.v4.b32 {{{', '.join(words)}}}, [{line}];")
        find_minimum += [f"min.u32 missing{peer}, {words[0]}, {words[1]};"]
        find_minimum += [f"min.u32 missing{peer}, missing{peer}, {word};" for word in words[2:]]
        find_minimum += [f"min.u32 missing, missing, missing{peer};"]
    instructions = [
        f".reg .pred some, sent<{peers}>;",
        f".reg .b32 polls, missing, others, missing<{peers}>;",
        ".reg .b64 late, value;",
        *(f"mov.b32 ${index}, -1;" for index in range(4 * peers)),
        *(f"setp.ne.b32 sent{peer}, {mask}, 0;" for peer, mask in enumerate(masks)),
        "mov.b32 polls, 0;",
        "poll:",
        *poll,
        f"ld.relaxed.gpu.global.b32 others, [{timeout_words} + {8 * GAVE_UP}];",
        "mov.b32 missing, -1;",
        *find_minimum,
        "setp.ne.b32 some, missing, 0;",
        "@some bra done;",
        "setp.ne.b32 some, others, 0;",
        "@some bra done;",
        f"setp.eq.b32 some, {max_polls}, 0;",
        "@some bra poll;",
        "add.u32 polls, polls, 1;",
        f"setp.lt.u32 some, polls, {max_polls};",
        "@some bra poll;",
        *(f"setp.eq.b32 some, missing{n}, 0;@some mov.b64 late, {x};" for n, x in enumerate(lines)),
        f"st.relaxed.gpu.global.b64 [{timeout_words} + {8 * FLAG}], late;",
        "mov.b64 value, 1;",
        f"st.relaxed.gpu.global.b64 [{timeout_words} + {8 * AWAITED}], value;",
        f"st.relaxed.gpu.global.b64 [{timeout_words} + {8 * GAVE_UP}], 1;",
        "done:",
    ]
    return "{\n" + "\n".join(instructions) + "\n}"


@jit
def send_routes(
    program, programs, ids_ptr, weights_ptr, expert_map_ptr, packets, ep_layout, tokens, max_tokens,
    num_experts, rank, call_tag, ep_plan: tl.constexpr,
):  # fmt: skip
    """Send ids, weights and counts of every ``programs``-th block of tokens to all ranks."""
    NUM_RANKS: tl.constexpr = ep_plan.NUM_RANKS
    EXPERTS: tl.constexpr = ep_plan.EXPERTS
    BLOCK_TOKENS: tl.constexpr = ep_plan.BLOCK_TOKENS
    COUNT_LINES: tl.constexpr = triton.cdiv(EXPERTS, _COUNTS_PER_LINE)
    all_targets = packet_targets(packets, rank, NUM_RANKS) + (packets.words,)  # noqa: RUF005
    bin = tl.arange(0, ep_plan.EXPERT_BINS)
    for first in range(program * BLOCK_TOKENS, max_tokens, programs * BLOCK_TOKENS):
        expert, bits, count = read_block(
            first, ids_ptr, weights_ptr, None, expert_map_ptr, num_experts, ep_layout, rank, tokens,
            max_tokens, ep_plan,
        )  # fmt: skip
        epoch = next_epoch(packets.calls)
        tag = packet_tag(epoch, call_tag)
        offset = packet_offset(epoch, rank, packets.shard_words, NUM_RANKS, NUM_SLOTS)
        token = first + tl.arange(0, BLOCK_TOKENS)
        choice = tl.arange(0, ep_plan.TOPK_LANES)[None, :]
        in_topk = (token < max_tokens)[:, None] & (choice < ep_plan.TOPK)
        route = token[:, None] * ep_plan.TOPK + choice
        payload = tl.reshape(tl.join(expert, bits), [route.numel, 2])
        route, in_topk = tl.reshape(route, [route.numel]), tl.reshape(in_topk, [route.numel])
        send_lines(all_targets, offset, payload, route, in_topk, tag)
        line = max_tokens * ep_plan.TOPK + first // BLOCK_TOKENS * COUNT_LINES
        for step in tl.static_range(NUM_RANKS):
            # ``all_targets`` ends with this rank, so entry ``step`` is rank ``rank + step + 1``.
            local = bin - (rank + step + 1) % NUM_RANKS * EXPERTS
            in_lines = (local >= 0) & (local < COUNT_LINES * _COUNTS_PER_LINE)
            counts = tl.where(local < EXPERTS, count, 0)
            target = (all_targets[step] + offset + line * LINE_WORDS).to(tl.pointer_type(tl.int32))
            store_row(target + local, counts, in_lines)


@jit
def receive_tokens(
    program, rows_ptr, scales_ptr, packets, epoch, tag, max_tokens, hidden, rank, routing_lines,
    token_lines, num_copy_programs, ep_plan: tl.constexpr,
):  # fmt: skip
    """Wait for the rows that peers send, store them, and clear their lines."""
    NUM_RANKS: tl.constexpr = ep_plan.NUM_RANKS
    BLOCK: tl.constexpr = ep_plan.BLOCK
    DTYPE: tl.constexpr = rows_ptr.dtype.element_ty
    ELEMENTS_PER_LINE: tl.constexpr = LINE_BITS // DTYPE.primitive_bitwidth
    other_ranks = peer_ranks(rank, NUM_RANKS)
    shards = received_shards(packets, epoch, other_ranks, NUM_RANKS, NUM_SLOTS)
    blocks, groups = tl.cdiv(hidden, BLOCK), tl.cdiv(hidden, SCALE_ELEMENTS)
    choice = tl.arange(0, ep_plan.TOPK_LANES)
    in_topk = choice < ep_plan.TOPK
    for item in range(program, max_tokens * blocks, num_copy_programs):
        token = item // blocks
        first = item % blocks * BLOCK
        begin = routing_lines + token * token_lines
        index = first // ELEMENTS_PER_LINE + tl.arange(0, BLOCK // ELEMENTS_PER_LINE)
        in_row, line = index * ELEMENTS_PER_LINE < hidden, begin + index
        # Each thread also polls the line with the scales of its elements.
        LINES_PER_SCALE_LINE: tl.constexpr = _ELEMENTS_PER_SCALE_LINE // ELEMENTS_PER_LINE
        scale_line_index = index // LINES_PER_SCALE_LINE
        scale_line = begin + hidden // ELEMENTS_PER_LINE + scale_line_index
        id_lines, lines, scale_lines = tl.tuple([]), tl.tuple([]), tl.tuple([])
        for peer in tl.static_range(NUM_RANKS - 1):
            id_lines = id_lines + (shards[peer] + (token * ep_plan.TOPK + choice) * LINE_WORDS,)  # noqa: RUF005
            shard = shards[peer].to(tl.pointer_type(tl.int32))
            lines = lines + (shard + line * 4,)  # noqa: RUF005
            scale_lines = scale_lines + (shard + scale_line * 4,)  # noqa: RUF005
        id_lines = poll_lines(id_lines, tag, in_topk, packets.timeout_words)
        is_sent = tl.tuple([])
        for peer in tl.static_range(NUM_RANKS - 1):
            expert, _ = tl.split(id_lines[peer])
            is_owner = has_owner(tl.where(in_topk, expert, -1), rank, ep_plan)
            is_sent = is_sent + (in_row & is_owner,)  # noqa: RUF005
        if ep_plan.SCALES != "none":
            lines, is_sent = lines + scale_lines, is_sent + is_sent
        words = poll_untagged(lines, is_sent, packets.timeout_words)
        tl.debug_barrier()
        for peer in tl.static_range(NUM_RANKS - 1):
            row = epoch * 0 + other_ranks[peer] * max_tokens + token
            target = (rows_ptr + row * hidden).to(tl.pointer_type(tl.int32)) + index[:, None] * 4
            target += tl.arange(0, 4)[None, :]
            with dl.mark("store"):
                tl.store(target, line_words(words, peer), mask=is_sent[peer][:, None])
            if ep_plan.SCALES != "none":
                is_first = is_sent[peer] & (index % LINES_PER_SCALE_LINE == 0)
                for word in tl.static_range(4):
                    group = scale_line_index * 4 + word
                    scale = words[4 * (NUM_RANKS - 1 + peer) + word].to(tl.float32, bitcast=True)
                    valid = is_first & (group < groups)
                    tl.store(scales_ptr + row * groups + group, scale, mask=valid)
                clear_packets(shards[peer], scale_line, is_first)
            clear_packets(shards[peer], line, is_sent[peer])


@jit
def write_layout_of_packets(
    program, programs, packets, ep_layout, epoch, tag, max_tokens, rank, routing_lines,
    ep_plan: tl.constexpr,
):  # fmt: skip
    """Lay out every ``programs``-th block of routes, and clear routing lines of the last call."""
    NUM_RANKS: tl.constexpr = ep_plan.NUM_RANKS
    EXPERTS: tl.constexpr = ep_plan.EXPERTS
    TOKEN_BLOCKS: tl.constexpr = ep_plan.TOKEN_BLOCKS
    LINES: tl.constexpr = ep_plan.EXPERT_LANES // _COUNTS_PER_LINE
    COUNT_LINES: tl.constexpr = triton.cdiv(EXPERTS, _COUNTS_PER_LINE)
    slot = packets.words + packet_offset(epoch, 0, packets.shard_words, NUM_RANKS, NUM_SLOTS)
    words_ptr, shard_lines = slot.to(tl.pointer_type(tl.int32)), packets.shard_words // LINE_WORDS
    routes, blocks = max_tokens * ep_plan.TOPK, tl.cdiv(max_tokens, ep_plan.BLOCK_TOKENS)
    items = NUM_RANKS * blocks
    index = tl.arange(0, TOKEN_BLOCKS * LINES)
    item, count_line = index // LINES, index % LINES
    line = item // blocks * shard_lines + routes + item % blocks * COUNT_LINES + count_line
    is_sent = (item < items) & (count_line < COUNT_LINES)
    counts = poll_untagged((words_ptr + line * 4,), (is_sent,), packets.timeout_words)
    counts = tl.where(is_sent[:, None], line_words(counts, 0), 0)
    counts = tl.reshape(counts, [TOKEN_BLOCKS, LINES * 4])
    max_positions = NUM_RANKS * routes + EXPERTS * (ep_plan.ALIGNMENT - 1)
    begin = first_positions(
        tl.sum(counts, 0), ep_layout, packets.timeout_words, program, programs, max_positions,
        ep_plan,
    )  # fmt: skip
    expert = tl.arange(0, ep_plan.EXPERT_LANES)
    item = tl.arange(0, TOKEN_BLOCKS)[:, None]
    for block in range(program, items, programs):
        source = block // blocks
        first_route = (block - source * blocks) * ep_plan.BLOCK_TOKENS * ep_plan.TOPK
        route = first_route + tl.arange(0, ep_plan.BLOCK_TOKENS * ep_plan.TOPK_LANES)
        end = tl.minimum(first_route + ep_plan.BLOCK_TOKENS * ep_plan.TOPK, routes)
        first_line = slot + source * packets.shard_words
        (payload,) = poll_lines(
            (first_line + route * LINE_WORDS,), tag, route < end, packets.timeout_words
        )
        ids, bits = tl.split(payload)
        ids = tl.where(route < end, ids, -1)
        local = ids - rank * EXPERTS
        local = tl.where((local >= 0) & (local < EXPERTS), local, -1)
        position = begin + tl.sum(tl.where(item < block, counts, 0), 0)
        route_index = source * routes + route
        write_positions(
            ep_layout, position, ids, local, route_index // ep_plan.TOPK, bits, route_index,
            route < end, max_positions,
        )  # fmt: skip
    # If ranks disagree, counts arrive but routes do not, so positions of rows are not written. The
    # ends of the experts' rows must then be 0. Every program stores zeros if a wait gave up,
    # because program 0 may have stored other ends before.
    tl.debug_barrier()
    gave_up = tl.load(packets.timeout_words + 1, volatile=True) != 0
    tl.store(ep_layout.ends + expert, 0, mask=(expert < EXPERTS) & gave_up)
    for shard in range(program, NUM_RANKS, programs):
        sent = tl.sum(tl.where(item // blocks == shard, counts, 0), 0)
        tl.store(ep_layout.counts + expert * NUM_RANKS + shard, sent, mask=expert < EXPERTS)
    for shard in tl.static_range(NUM_RANKS):
        last_offset = packet_offset(epoch - 1, shard, packets.shard_words, NUM_RANKS, NUM_SLOTS)
        for first in range(program * _CLEARED_LINES, routing_lines, programs * _CLEARED_LINES):
            cleared = first + tl.arange(0, _CLEARED_LINES)
            clear_packets(packets.words + last_offset, cleared, cleared < routing_lines)


@jit(
    do_not_specialize=[
        "tokens", "max_tokens", "num_experts", "rank", "num_routing_programs", "num_copy_programs",
        "call_tag",
    ]
)  # fmt: skip
def kernel_dispatch_packets(
    x_ptr, x_scale_ptr, ids_ptr, weights_ptr, expert_map_ptr, rows_ptr, scales_ptr, packets,
    ep_layout, tokens, max_tokens, hidden, num_experts, rank, routing_lines, num_routing_programs,
    num_copy_programs, call_tag, ep_plan: tl.constexpr,
):  # fmt: skip
    """Run the programs of a dispatch. Grid (programs,).

    Routing programs send ids. Copy programs, which follow, send and receive rows. The others write
    the layout. ``routing_lines`` is the number of lines of routes and counts of a source rank.
    """
    NUM_RANKS: tl.constexpr = ep_plan.NUM_RANKS
    ELEMENTS_PER_LINE: tl.constexpr = LINE_BITS // rows_ptr.dtype.element_ty.primitive_bitwidth
    program, num_senders = tl.program_id(0), num_routing_programs + num_copy_programs
    epoch = next_epoch(packets.calls)
    row_lines, groups = hidden // ELEMENTS_PER_LINE, tl.cdiv(hidden, SCALE_ELEMENTS)
    token_lines = row_lines
    if ep_plan.SCALES != "none":
        token_lines += tl.cdiv(groups, SCALES_PER_LINE)
    if program < num_routing_programs:
        send_routes(
            program, num_routing_programs, ids_ptr, weights_ptr, expert_map_ptr, packets, ep_layout,
            tokens, max_tokens, num_experts, rank, call_tag, ep_plan,
        )  # fmt: skip
    elif program < num_senders:
        first_own_row = epoch * 0 + rank * max_tokens
        targets = packet_targets(packets, rank, NUM_RANKS)
        offset = packet_offset(epoch, rank, packets.shard_words, NUM_RANKS, NUM_SLOTS)
        offset += routing_lines * LINE_WORDS
        rows, scales = tl.tuple([rows_ptr + first_own_row * hidden]), tl.tuple([])
        if ep_plan.SCALES != "none":
            scales = tl.tuple([scales_ptr + first_own_row * groups])
        for target in tl.static_range(NUM_RANKS - 1):
            begin = targets[target] + offset
            rows = rows + (begin.to(rows_ptr.dtype),)  # noqa: RUF005
            if ep_plan.SCALES != "none":
                begin += row_lines * LINE_WORDS
                scales = scales + (begin.to(scales_ptr.dtype),)  # noqa: RUF005
        send_rows(
            program - num_routing_programs, x_ptr, x_scale_ptr, ids_ptr, None, expert_map_ptr,
            num_experts, rows, scales,
            (token_lines * ELEMENTS_PER_LINE, token_lines * SCALES_PER_LINE), None, None, tokens,
            max_tokens, hidden, rank, num_copy_programs, ep_plan,
        )  # fmt: skip
    tag = packet_tag(epoch, call_tag)
    if program >= num_senders:
        write_layout_of_packets(
            program - num_senders, tl.num_programs(0) - num_senders, packets,
            ep_layout, epoch, tag, max_tokens, rank, routing_lines, ep_plan,
        )  # fmt: skip
    elif program >= num_routing_programs:
        receive_tokens(
            program - num_routing_programs, rows_ptr, scales_ptr, packets, epoch, tag, max_tokens,
            hidden, rank, routing_lines, token_lines, num_copy_programs, ep_plan,
        )  # fmt: skip
    end_call(packets.calls, epoch)
