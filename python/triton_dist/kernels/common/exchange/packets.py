"""All-reduce of few bytes by packets: words that carry data and mark their own arrival.

A separate flag may be sent only after the data has crossed the link and was acknowledged. In a
packet, every 8 bytes hold 4 bytes of data and a 4-byte tag that identifies the call. The receiver
polls the data itself. Twice the bytes cross the link, but nothing waits for an acknowledgement.

    word      int64     tag << 32 | payload: four 8-bit, two 16-bit elements or one 32-bit element
    line      2 words   sent and polled by one thread at a time; 8, 4 or 2 elements
    packets   [2, NUM_RANKS, shard] int64    written by peers: slot, source rank, word

*No fence.* An aligned 8-byte access is atomic, also in a vector of two. A receiver that sees the
tag of a word therefore also sees the payload of the word.

*Tags.* The lowest 20 bits of a tag are the call tag (``common/peers.py``), by which ranks detect
calls of different sizes. Then follow the lowest 11 bits of the call's number, its epoch. The
highest bit is set. A tag is therefore never 0, the initial value of the memory. A nonzero word with
another tag was sent by a peer whose call has another call tag.

*No stale words.* A receiver clears each word after reading it. Without clearing, a word that
smaller calls do not use would look new after 2**11 calls. The receiver never clears a new word,
because a peer writes to the slot again only two calls later. By then every rank has begun the call
in between (``exchange/protocol.py``), so the clearing kernel has ended. A call must therefore read
all words sent to it. If a wait of a call gave up, ``reset()`` of the context clears all packets.

*Waiting.* A program that has blocks waits for words of every peer; a program without blocks does
not wait. A call has at least one element, so it waits for every peer, as ``exchange/protocol.py``
requires. As in that protocol, a program sends before it waits.

*Polling.* Each thread polls its own words of all peers together. All loads are then in flight, and
no thread waits for another. The polling loop is PTX, because in Triton 3.6 ``tl`` cannot keep a
block of ``ld.relaxed.sys`` in registers over a loop. If a block has fewer lines than the program
has threads, two threads may have the same words. Words are therefore cleared after a barrier, and
sent by ``tl.store``, which handles duplicates.

======================  =====  =================================  ===========================
argument                dtype  shape                              written by
======================  =====  =================================  ===========================
packets.words           int64  [2, NUM_RANKS, shard_words]         kernels of the source ranks
packets.table           int64  [NUM_RANKS], addresses of words    host, once
packets.calls           int64  see ``exchange/protocol.py``       kernels of this rank
packets.timeout_words   int64  see ``language.wait``              this rank and its host
packets.shard_words     int    words per source rank              host
======================  =====  =================================  ===========================
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.kernels.common.exchange.protocol import (
    LINE_BYTES,
    LINE_WORDS,
    PACKET_ALIGNMENT,
    begin_call,
    block_begin,
)
from triton_dist.kernels.common.peers import target_at
from triton_dist.language._marks import FLAG_AWAITED, FLAG_SET, flag_clock, note_flags
from triton_dist.language._spin import INTERPRETED, spin, wait_deadline
from triton_dist.language.signals import DISAGREED, note_disagreement, tagged

_TAG_SIGN_BIT = tl.constexpr(-(2**31))
# Indices of the timeout words (``language.wait``).
_GAVE_UP, _SEEN, _AWAITED, _FLAG, _HOST_WORD, _NEXT_WORDS = 1, 2, 3, 4, 5, 6


@jit
def packet_tag(epoch, call_tag):
    """Return the int32 tag of packets of call number ``epoch``."""
    return tagged(epoch, call_tag).to(tl.int32) | _TAG_SIGN_BIT


@jit
def packet_offset(epoch, source, shard_words, NUM_RANKS: tl.constexpr, SLOTS: tl.constexpr = 2):
    """Return the index of the first word of rank ``source``'s packets in call ``epoch``."""
    index = (epoch % SLOTS) * NUM_RANKS + source
    return tl.multiple_of(index * shard_words.to(tl.int64), PACKET_ALIGNMENT)


@jit
def payload_of(values):
    """Return a block of 8-, 16- or 32-bit elements, flattened, as int32 [lines, 2]."""
    if values.dtype.primitive_bitwidth == 32:
        payload = tl.reshape(values, [values.numel // 2, 2]).to(tl.int32, bitcast=True)
    elif values.dtype.primitive_bitwidth == 8:
        quads = tl.reshape(values, [values.numel // 8, 2, 2, 2]).to(tl.uint8, bitcast=True)
        # Widen each byte separately: ptxas 12.8 crashes if pairs are widened before the last split.
        even, odd = tl.split(quads)
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        payload = first.to(tl.int32) | (second.to(tl.int32) << 8)
        payload |= (third.to(tl.int32) << 16) | (fourth.to(tl.int32) << 24)
    else:
        pairs = tl.reshape(values, [values.numel // 4, 2, 2]).to(tl.int16, bitcast=True)
        low, high = tl.split(pairs)
        payload = (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    return payload


@jit
def values_of(payload, DTYPE: tl.constexpr):
    """Return the elements of a ``payload_of`` result as a 1-D block of DTYPE."""
    if DTYPE.primitive_bitwidth == 32:
        values = tl.reshape(payload.to(DTYPE, bitcast=True), [payload.numel])
    elif DTYPE.primitive_bitwidth == 8:
        even, odd = tl.join(payload, payload >> 16), tl.join(payload >> 8, payload >> 24)
        quads = tl.join(even, odd).to(tl.uint8).to(DTYPE, bitcast=True)
        values = tl.reshape(quads, [4 * payload.numel])
    else:
        low = payload.to(tl.int16).to(DTYPE, bitcast=True)
        high = (payload >> 16).to(tl.int16).to(DTYPE, bitcast=True)
        values = tl.reshape(tl.join(low, high), [2 * payload.numel])
    return values


@jit
def packet_targets(packets, rank, NUM_RANKS: tl.constexpr):
    """Return pointers to the packet memory on each of the NUM_RANKS - 1 peers.

    Call this function before the data to send is ready, to overlap its loads with loads of data.
    """
    targets = tl.tuple([])
    for step in tl.static_range(1, NUM_RANKS):
        target = target_at(packets.table, (rank + step) % NUM_RANKS, packets.words)
        targets = targets + (target,)  # noqa: RUF005  # Triton has no starred expressions.
    return targets


@jit
def send_lines(targets, offset, payload, line, mask, tag):
    """Send ``payload``, int32 [lines, 2], to every peer.

    Args:
        targets: result of ``packet_targets``.
        offset: index of the first word of this rank's packets (``packet_offset``).
        line: [lines], index of the target line of each row of ``payload``. The receiver must await
            the same indices.
        mask: [lines], which lines to send.
    """
    low = payload.to(tl.uint32, bitcast=True).to(tl.int64)
    words = low | (tag.to(tl.int64) << 32)
    word = line[:, None] * LINE_WORDS + tl.arange(0, LINE_WORDS)[None, :]
    with dl.mark("push"):
        flag_time = flag_clock()
        for peer in tl.static_range(len(targets)):
            tl.store(targets[peer] + offset + word, words, mask=mask[:, None])
            if flag_time is not None:  # record only the first line
                first_ptr = targets[peer] + offset + tl.min(line) * LINE_WORDS
                note_flags(FLAG_SET, flag_time, first_ptr, tag, None)


@jit
def await_lines(packets, epoch, tag, line, mask, rank, NUM_RANKS: tl.constexpr):
    """Wait for the lines with indices ``line`` [lines] of every peer; return their payloads.

    The result is NUM_RANKS - 1 blocks of int32 [lines, 2], in the order of ranks. If a wait gives
    up or sees another call tag, it ends as in ``language.wait``. The result is then invalid, and
    timeout word ``_FLAG`` holds the address of a late or mismatching line.
    """
    lines = tl.tuple([])
    for peer in tl.static_range(NUM_RANKS - 1):
        source = peer + (peer >= rank).to(tl.int32)
        shard_ptr = packets.words + packet_offset(epoch, source, packets.shard_words, NUM_RANKS)
        lines = lines + (shard_ptr + line * LINE_WORDS,)  # noqa: RUF005
    return poll_lines(lines, tag, mask, packets.timeout_words)


@jit
def poll_lines(lines, tag, mask, timeout_ptr):
    """Wait for the lines at each block of pointers in the tuple ``lines``, a block per peer.

    Return the payload of each block, int32 [lines, 2].
    """
    with dl.mark("wait"):
        if INTERPRETED:
            payloads = _poll_interpreted(lines, tag, mask, timeout_ptr)
        else:
            payloads = _poll_together(lines, tag, mask, timeout_ptr)
        flag_time = flag_clock()
        if flag_time is not None:
            for peer in tl.static_range(len(lines)):
                first_ptr = tl.min(lines[peer].to(tl.int64)).to(tl.pointer_type(tl.int64))
                note_flags(FLAG_AWAITED, flag_time, first_ptr, tag, None)
    return payloads


@jit
def _poll_together(lines, tag, mask, timeout_ptr):
    """Wait for ``lines`` of all peers together: each thread polls its own words."""
    PEERS: tl.constexpr = len(lines)
    max_polls = tl.load(timeout_ptr.to(tl.pointer_type(tl.int32)))  # lower half of an int64
    # Operands of the assembly must have one pointer type.
    timeout_ptr = timeout_ptr.to(lines[0].dtype.scalar)
    halves = tl.inline_asm_elementwise(
        _polling_ptx(PEERS),
        _constraints(PEERS),
        lines + (tag, mask.to(tl.int32), max_polls, timeout_ptr),  # noqa: RUF005
        dtype=_payload_types(PEERS),
        is_pure=False,
        pack=1,
    )
    payloads = tl.tuple([])
    for peer in tl.static_range(PEERS):
        payload = tl.join(halves[2 * peer], halves[2 * peer + 1])
        payloads = payloads + (payload,)  # noqa: RUF005
    return payloads


@jit
def _poll_interpreted(lines, tag, mask, timeout_ptr):
    """Wait for ``lines`` of one peer after another, and let other programs run between polls."""
    # Compare unsigned numbers: the tag of a missing word is 0, smaller than any valid tag.
    expected_tag = tag.to(tl.uint32, bitcast=True).to(tl.int64)
    valid = mask[:, None]
    payloads = tl.tuple([])
    for peer in tl.static_range(len(lines)):
        word_ptr = lines[peer][:, None] + tl.arange(0, LINE_WORDS)[None, :]
        deadline = wait_deadline()
        polls = 0
        words = tl.load(word_ptr, mask=valid, other=expected_tag << 32, volatile=True)
        seen = (words >> 32) & 0xFFFFFFFF
        while (tl.max(tl.where(seen == expected_tag, 0, 1)) != 0) & (polls >= 0):
            mismatching = (seen != expected_tag) & (seen > 0x7FFFFFFF)
            if tl.max(mismatching.to(tl.int32)) != 0:
                words_at = word_ptr.to(tl.int64)
                flag = tl.max(tl.where(mismatching, words_at, 0))
                other = tl.max(tl.where(words_at == flag, seen, 0))
                note_disagreement(timeout_ptr, flag, other, expected_tag)
            polls = spin(word_ptr, seen, expected_tag, deadline, 0, timeout_ptr, False)
            words = tl.load(word_ptr, mask=valid, other=expected_tag << 32, volatile=True)
            seen = (words >> 32) & 0xFFFFFFFF
        payloads = payloads + (words.to(tl.int32),)  # noqa: RUF005
    return payloads


@jit
def add_lines(payload, payloads, rank, NUM_RANKS: tl.constexpr, DTYPE: tl.constexpr):
    """Return the fp32 sum, 1-D, of this rank's ``payload`` and the peers' ``payloads``.

    The addends are added in the order of ranks.
    """
    values = values_of(payload, DTYPE)
    sums = tl.zeros(values.shape, dtype=tl.float32)
    for source in tl.static_range(NUM_RANKS):
        addend = payload  # Select instead of branching: ``rank`` is not a constant.
        if source < NUM_RANKS - 1:
            addend = tl.where(source < rank, payloads[source], addend)
        if source > 0:
            addend = tl.where(source > rank, payloads[source - 1], addend)
        sums += values_of(addend, DTYPE).to(tl.float32)
    return sums


@jit
def clear_lines(packets, epoch, line, mask, rank, NUM_RANKS: tl.constexpr):
    """Set the received lines with indices ``line`` to 0, after all threads have read them."""
    tl.debug_barrier()
    word = line[:, None] * LINE_WORDS + tl.arange(0, LINE_WORDS)[None, :]
    for peer in tl.static_range(NUM_RANKS - 1):
        source = peer + (peer >= rank).to(tl.int32)
        shard_ptr = packets.words + packet_offset(epoch, source, packets.shard_words, NUM_RANKS)
        tl.store(shard_ptr + word, tl.zeros(word.shape, tl.int64), mask=mask[:, None])


@triton.constexpr_function
def _payload_types(peers: int) -> tuple[Any, ...]:
    return (tl.int32,) * (2 * peers)


@triton.constexpr_function
def _constraints(peers: int) -> str:
    """Return the constraints of the polling PTX.

    Outputs: two payloads per peer. Inputs: a line per peer, tag, mask, max_polls, timeout words.
    """
    return ",".join(["=&r"] * (2 * peers) + ["l"] * peers + ["r", "r", "r", "l"])


@triton.constexpr_function
def _polling_ptx(peers: int) -> str:
    """Return PTX that polls a line of each peer until all words have the tag.

    It gives up if another thread has given up, if a word has another tag, or after ``max_polls``
    polls if ``max_polls`` > 0. ``t`` is the exclusive or of a word's upper half with the expected
    tag: 0 if the word has arrived, negative if it is missing, positive if it has another tag.
    """
    lines = [f"${2 * peers + peer}" for peer in range(peers)]
    tag, mask, max_polls, timeout_words = (f"${3 * peers + operand}" for operand in range(4))
    out = [f"${operand}" for operand in range(2 * peers)]
    poll, compare, mismatching = [], [], []
    for peer, line in enumerate(lines):
        first, second = 2 * peer, 2 * peer + 1
        poll += [f"ld.relaxed.sys.global.v2.b64 {{w{first}, w{second}}}, [{line}];"]
        compare += [
            f"mov.b64 {{{out[first]}, t{first}}}, w{first};",
            f"mov.b64 {{{out[second]}, t{second}}}, w{second};",
            f"xor.b32 t{first}, t{first}, {tag};",
            f"xor.b32 t{second}, t{second}, {tag};",
            f"or.b32 missing{peer}, t{first}, t{second};",
            f"or.b32 missing, missing, missing{peer};",
        ]
        for word in (first, second):
            mismatching += [
                f"setp.gt.s32 some, t{word}, 0;",
                f"@some mov.b64 late, {line};",
                f"@some xor.b32 others, t{word}, {tag};",
                "or.pred differs, differs, some;",
            ]
    find_late = [f"mov.b64 late, {lines[-1]};"]
    for peer in reversed(range(peers - 1)):
        find_late += [
            f"setp.ne.b32 some, missing{peer}, 0;",
            f"selp.b64 late, {lines[peer]}, late, some;",
        ]
    instructions = [
        ".reg .pred some, differs;",
        ".reg .b32 polls, missing, others;",
        ".reg .b64 late, value;",
        f".reg .b64 w<{2 * peers}>;",
        f".reg .b32 t<{2 * peers}>, missing<{peers}>;",
        *(f"mov.b32 {each}, 0;" for each in out),
        "mov.b32 polls, 0;",
        f"setp.eq.b32 some, {mask}, 0;",
        "@some bra done;",
        "poll:",
        *poll,
        f"ld.relaxed.gpu.global.b32 others, [{timeout_words} + {8 * _GAVE_UP}];",
        "mov.b32 missing, 0;",
        *compare,
        "setp.eq.b32 some, missing, 0;",
        "@some bra done;",
        "setp.ne.b32 some, others, 0;",
        "@some bra done;",
        "setp.ne.b32 differs, 0, 0;",
        *mismatching,
        "@differs bra disagree;",
        f"setp.eq.b32 some, {max_polls}, 0;",
        "@some bra poll;",
        "add.u32 polls, polls, 1;",
        f"setp.lt.u32 some, polls, {max_polls};",
        "@some bra poll;",
        *find_late,
        f"st.relaxed.gpu.global.b64 [{timeout_words} + {8 * _FLAG}], late;",
        f"cvt.u64.u32 value, {tag};",
        f"st.relaxed.gpu.global.b64 [{timeout_words} + {8 * _AWAITED}], value;",
        f"st.relaxed.gpu.global.b64 [{timeout_words} + {8 * _GAVE_UP}], 1;",
        "bra done;",
        "disagree:",
        f"st.relaxed.gpu.global.b64 [{timeout_words} + {8 * _FLAG}], late;",
        "cvt.u64.u32 value, others;",
        f"st.relaxed.gpu.global.b64 [{timeout_words} + {8 * _SEEN}], value;",
        f"cvt.u64.u32 value, {tag};",
        f"st.relaxed.gpu.global.b64 [{timeout_words} + {8 * _AWAITED}], value;",
        f"st.relaxed.gpu.global.b64 [{timeout_words} + {8 * _GAVE_UP}], {DISAGREED.value};",
        f"ld.relaxed.gpu.global.b64 late, [{timeout_words} + {8 * _NEXT_WORDS}];",
        "notify:",  # same as ``note_disagreement``
        "setp.eq.b64 some, late, 0;",
        "@some bra notified;",
        f"setp.eq.b64 some, late, {timeout_words};",
        "@some bra notified;",
        f"red.relaxed.gpu.global.max.s64 [late + {8 * _GAVE_UP}], 1;",
        f"ld.relaxed.gpu.global.b64 late, [late + {8 * _NEXT_WORDS}];",
        "bra notify;",
        "notified:",
        f"ld.relaxed.gpu.global.b64 late, [{timeout_words} + {8 * _HOST_WORD}];",
        "st.relaxed.sys.global.b64 [late], 1;",
        "done:",
    ]
    return "{\n" + "\n".join(instructions) + "\n}"


@jit(do_not_specialize=["call_tag", "rank"])
def kernel_all_reduce_packets(
    x_ptr, out_ptr, packets, lengths, call_tag, rank, plan: tl.constexpr
):  # fmt: skip
    """Send all of x [total] to all ranks, and store the sum over ranks in out [total].

    Blocks of ``BLOCK`` elements are distributed over the programs. Grid: (up to ``MAX_CTAS``,).
    """
    elements = lengths.total
    BLOCK: tl.constexpr = plan.BLOCK
    LINES: tl.constexpr = BLOCK * x_ptr.dtype.element_ty.primitive_bitwidth // 8 // LINE_BYTES
    ELEMENTS_PER_LINE: tl.constexpr = BLOCK // LINES
    # Operations that do not need the epoch come first, to overlap with the atomic of
    # ``begin_call``.
    targets = packet_targets(packets, rank, plan.NUM_RANKS)
    index = block_begin(0, BLOCK) + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + index, mask=index < elements, other=0.0)
    epoch = begin_call(packets.calls)
    tag = packet_tag(epoch, call_tag)
    offset = packet_offset(epoch, rank, packets.shard_words, plan.NUM_RANKS)
    # Loop only over blocks that exist. With flags, a program would also announce empty blocks.
    blocks = tl.cdiv(tl.cdiv(elements, BLOCK) - tl.program_id(0), tl.num_programs(0))
    for block in range(blocks):
        if block > 0:
            index = block_begin(block, BLOCK) + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + index, mask=index < elements, other=0.0)
        line = block_begin(block, LINES) + tl.arange(0, LINES)
        send_lines(targets, offset, payload_of(x), line, line * ELEMENTS_PER_LINE < elements, tag)
    for block in range(blocks):
        line = block_begin(block, LINES) + tl.arange(0, LINES)
        valid = line * ELEMENTS_PER_LINE < elements
        index = block_begin(block, BLOCK) + tl.arange(0, BLOCK)
        mask = index < elements
        own = payload_of(tl.load(x_ptr + index, mask=mask, other=0.0))
        payloads = await_lines(packets, epoch, tag, line, valid, rank, plan.NUM_RANKS)
        sums = add_lines(own, payloads, rank, plan.NUM_RANKS, x_ptr.dtype.element_ty)
        tl.store(out_ptr + index, sums.to(out_ptr.dtype.element_ty), mask=mask)
        clear_lines(packets, epoch, line, valid, rank, plan.NUM_RANKS)


@jit(do_not_specialize=["call_tag", "rank"])
def kernel_all_reduce_two_shot_packets(
    x_ptr, out_ptr, packets, lengths, call_tag, rank, plan: tl.constexpr
):  # fmt: skip
    """Send each shard of x [total] to its owner, which adds the shards and sends the sum to all.

    The packets of a source rank hold the addend [stride] that it sends to this owner, then the sums
    [stride] of its own shard. All ranks send full shards, with zeros after the end of x, so that
    every rank waits for every peer. x and out may be the same tensor, because each program writes
    only elements that it has read itself.
    """
    NUM_RANKS: tl.constexpr = plan.NUM_RANKS
    BLOCK: tl.constexpr = plan.BLOCK
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    LINES: tl.constexpr = BLOCK * DTYPE.primitive_bitwidth // 8 // LINE_BYTES
    ELEMENTS_PER_LINE: tl.constexpr = BLOCK // LINES
    targets = packet_targets(packets, rank, NUM_RANKS)
    epoch = begin_call(packets.calls)
    tag = packet_tag(epoch, call_tag)
    offset = packet_offset(epoch, rank, packets.shard_words, NUM_RANKS)
    stride, total = lengths.stride, lengths.total
    shard_lines = stride // ELEMENTS_PER_LINE
    blocks = tl.cdiv(tl.cdiv(stride, BLOCK) - tl.program_id(0), tl.num_programs(0))
    for block in range(blocks):
        line = block_begin(block, LINES) + tl.arange(0, LINES)
        index = block_begin(block, BLOCK) + tl.arange(0, BLOCK)
        for step in tl.static_range(1, NUM_RANKS):
            source = ((rank + step) % NUM_RANKS).to(tl.int64) * stride + index
            x = tl.load(x_ptr + source, mask=(index < stride) & (source < total), other=0.0)
            owner = (targets[step - 1],)
            send_lines(owner, offset, payload_of(x), line, line < shard_lines, tag)
    for block in range(blocks):
        line = block_begin(block, LINES) + tl.arange(0, LINES)
        valid = line < shard_lines
        index = block_begin(block, BLOCK) + tl.arange(0, BLOCK)
        full_index = rank.to(tl.int64) * stride + index
        mask = (index < stride) & (full_index < total)
        own = payload_of(tl.load(x_ptr + full_index, mask=mask, other=0.0))
        payloads = await_lines(packets, epoch, tag, line, valid, rank, NUM_RANKS)
        sums = add_lines(own, payloads, rank, NUM_RANKS, DTYPE).to(DTYPE)
        send_lines(targets, offset, payload_of(sums), shard_lines + line, valid, tag)
        tl.store(out_ptr + full_index, sums, mask=mask)
        clear_lines(packets, epoch, line, valid, rank, NUM_RANKS)
    for block in range(blocks):
        line = block_begin(block, LINES) + tl.arange(0, LINES)
        valid = line < shard_lines
        index = block_begin(block, BLOCK) + tl.arange(0, BLOCK)
        sums_line = shard_lines + line
        payloads = await_lines(packets, epoch, tag, sums_line, valid, rank, NUM_RANKS)
        for peer in tl.static_range(NUM_RANKS - 1):
            owner = peer + (peer >= rank).to(tl.int64)
            full_index = owner * stride + index
            mask = (index < stride) & (full_index < total)
            tl.store(out_ptr + full_index, values_of(payloads[peer], DTYPE), mask=mask)
        clear_lines(packets, epoch, sums_line, valid, rank, NUM_RANKS)
