"""Words that carry data and say by themselves that it has come: an exchange of few bytes without
flags; and the all-reduce by them, in one launch.

A flag is set behind the data: the stores have to cross the link and be acknowledged before it may
follow them. Here each 8 bytes are 4 of data and 4 that tell which call they are of, and a receiver
polls the data itself. Twice the bytes cross the link, but once, and nothing waits for an
acknowledgement.

    word      int64     tag << 32 | payload: two 16-bit elements, or one of 32 bits
    line      2 words   what a thread sends, and polls, at once; 4 or 2 elements
    packets   [2, NUM_RANKS, part] int64    what peers write to: slot, source rank, word

*Why no fence.* An aligned access of 8 bytes happens as a whole, also within a vector of two. Who
sees the tag of a word has its payload too, whatever became of other words.

*Tags.* The lowest 11 bits of the number of the call above the size of the call
(``common/peers.py``), and the highest bit set: never 0, which is what memory is allocated and reset
with. A word with a tag that is another one is of a peer that came with another size.

*Why no word is old.* A word is set to 0 when it has been read, so a word that is not 0 is of a call
that has not read it yet. Tags alone would not do: a word that later, smaller calls leave alone
would soon count as new. Nor does setting it to 0 hit a new
word: a peer writes to the same slot two calls later, and begins that call after every rank has
begun the call in between (``exchange/protocol.py``, *why a slot is free*), so after the kernel
that cleared has ended. For this a call has to read all words that are sent to it. A call that gave
up has not: then the context is reset, and all packets with it.

*Who waits.* Programs that have a share wait for words of every peer; those without wait for none.
A call has at least one element, so as a whole it waits for something of every peer, as
``exchange/protocol.py`` asks for. Here, too, a program sends before it waits.

*Polling.* Each thread polls its own words, of all peers at once, so that all looks are in flight
together, and no thread waits for another one. These are ``ld.relaxed.sys``, for which ``tl`` has no
word that keeps a block in registers over a loop (Triton 3.6), hence the assembly. Two threads may
have the same words, of blocks smaller than the program; so they are cleared after a barrier, and
sent by ``tl.store``, which knows such threads.

===================  ======  ======================================  ==================
argument             dtype   shape                                   who writes
===================  ======  ======================================  ==================
packets.words        int64   [2, NUM_RANKS, part_words]              the sources' kernels
packets.table        int64   [NUM_RANKS], addresses of ``words``     the host, once
packets.calls        int64   a word, as of ``exchange/protocol.py``  this rank's kernels
packets.guard        int64   as of ``language.wait``                 this rank, and its host
packets.part_words   int     words of a part                         the host
===================  ======  ======================================  ==================
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
    PART_ALIGNMENT,
    begin_call,
    first_of,
)
from triton_dist.kernels.common.peers import target_at
from triton_dist.language._spin import INTERPRETED, spin, wait_deadline
from triton_dist.language.signals import DISAGREED, note_disagreement, sized

_NEVER_ZERO = tl.constexpr(-(2**31))
# Words of the guard (``language.wait``), by number.
_GAVE_UP, _SEEN, _AWAITED, _FLAG, _REPORT, _NEXT = 1, 2, 3, 4, 5, 6


@jit
def tag_of(epoch, size):
    """int32, of call number ``epoch``, of ``size``."""
    return sized(epoch, size).to(tl.int32) | _NEVER_ZERO


@jit
def part_offset(epoch, source, part_words, NUM_RANKS: tl.constexpr):
    """Begin of the part of rank ``source`` in the slot of call ``epoch``; in words."""
    part = (epoch % 2) * NUM_RANKS + source
    return tl.multiple_of(part * part_words.to(tl.int64), PART_ALIGNMENT)


@jit
def payload_of(values):
    """A block of elements of 16 or 32 bits, in the order of its flat index, as int32 [lines, 2]."""
    if values.dtype.primitive_bitwidth == 32:
        payload = tl.reshape(values, [values.numel // 2, 2]).to(tl.int32, bitcast=True)
    else:
        pairs = tl.reshape(values, [values.numel // 4, 2, 2]).to(tl.int16, bitcast=True)
        low, high = tl.split(pairs)
        payload = (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    return payload


@jit
def values_of(payload, DTYPE: tl.constexpr):
    """Values that ``payload_of`` was given, flat: of 4 elements a line, or of 2."""
    if DTYPE.primitive_bitwidth == 32:
        values = tl.reshape(payload.to(DTYPE, bitcast=True), [payload.numel])
    else:
        low = payload.to(tl.int16).to(DTYPE, bitcast=True)
        high = (payload >> 16).to(tl.int16).to(DTYPE, bitcast=True)
        values = tl.reshape(tl.join(low, high), [2 * payload.numel])
    return values


@jit
def peers_at(packets, rank, NUM_RANKS: tl.constexpr):
    """The packets of each peer, NUM_RANKS - 1 pointers. Looked up before there is anything to send:
    a look-up takes as long as a load."""
    targets = tl.tuple([])
    for step in tl.static_range(1, NUM_RANKS):
        target = target_at(packets.table, (rank + step) % NUM_RANKS, packets.words)
        targets = targets + (target,)  # noqa: RUF005  # a star is no Triton
    return targets


@jit
def send_lines(targets, offset, payload, line, mask, tag):
    """Send ``payload``, int32 [lines, 2], to every peer, as the lines ``line`` [lines] of the part
    at ``offset`` [words].

    targets: from ``peers_at``. line: which goes where is up to the caller, if receivers agree.
    mask: [lines], of those that are there. tag: of the call.
    """
    low = payload.to(tl.uint32, bitcast=True).to(tl.int64)
    words = low | (tag.to(tl.int64) << 32)
    word = line[:, None] * LINE_WORDS + tl.arange(0, LINE_WORDS)[None, :]
    with dl.mark("push"):
        for peer in tl.static_range(len(targets)):
            tl.store(targets[peer] + offset + word, words, mask=mask[:, None])


@jit
def await_lines(packets, epoch, tag, line, mask, rank, NUM_RANKS: tl.constexpr):
    """Wait until the lines ``line`` [lines] of every peer's part are there; gives their payloads,
    NUM_RANKS - 1 of int32 [lines, 2], in the order of ranks.

    Waits no longer than ``language.wait`` with the same guard, to whose end a word with another
    size's tag leads too. When it gives up, guard[4] is the address of a line that had not come, or
    whose first word came so, and what it gives is of no use.
    """
    lines = tl.tuple([])
    for peer in tl.static_range(NUM_RANKS - 1):
        source = peer + (peer >= rank).to(tl.int32)
        part_ptr = packets.words + part_offset(epoch, source, packets.part_words, NUM_RANKS)
        lines = lines + (part_ptr + line * LINE_WORDS,)  # noqa: RUF005
    with dl.mark("wait"):
        if INTERPRETED:
            payloads = _poll_in_turn(lines, tag, mask, packets.timeout_words)
        else:
            payloads = _poll_together(lines, tag, mask, packets.timeout_words)
    return payloads


@jit
def _poll_together(lines, tag, mask, timeout_ptr):
    """Each thread its words."""
    PEERS: tl.constexpr = len(lines)
    most = tl.load(timeout_ptr.to(tl.pointer_type(tl.int32)))  # of int64, the lower half
    # All pointers have to be of one type.
    timeout_ptr = timeout_ptr.to(lines[0].dtype.scalar)
    halves = tl.inline_asm_elementwise(
        _polling(PEERS),
        _constraints(PEERS),
        lines + (tag, mask.to(tl.int32), most, timeout_ptr),  # noqa: RUF005
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
def _poll_in_turn(lines, tag, mask, timeout_ptr):
    """Peer after peer, giving others a turn."""
    # As unsigned numbers, of which a word that has not come has a smaller one than any tag.
    wanted = tag.to(tl.uint32, bitcast=True).to(tl.int64)
    there = mask[:, None]
    payloads = tl.tuple([])
    for peer in tl.static_range(len(lines)):
        word_ptr = lines[peer][:, None] + tl.arange(0, LINE_WORDS)[None, :]
        deadline = wait_deadline()
        polls = 0
        words = tl.load(word_ptr, mask=there, other=wanted << 32, volatile=True)
        seen = (words >> 32) & 0xFFFFFFFF
        while (tl.max(tl.where(seen == wanted, 0, 1)) != 0) & (polls >= 0):
            foreign = (seen != wanted) & (seen > 0x7FFFFFFF)
            if tl.max(foreign.to(tl.int32)) != 0:
                words_at = word_ptr.to(tl.int64)
                flag = tl.max(tl.where(foreign, words_at, 0))
                other = tl.max(tl.where(words_at == flag, seen, 0))
                note_disagreement(timeout_ptr, flag, other, wanted)
            polls = spin(word_ptr, seen, wanted, deadline, 0, timeout_ptr, False)
            words = tl.load(word_ptr, mask=there, other=wanted << 32, volatile=True)
            seen = (words >> 32) & 0xFFFFFFFF
        payloads = payloads + (words.to(tl.int32),)  # noqa: RUF005
    return payloads


@jit
def add_lines(payload, payloads, rank, NUM_RANKS: tl.constexpr, DTYPE: tl.constexpr):
    """The fp32 sum, flat, over all ranks in their order: of this rank's ``payload`` and those that
    ``await_lines`` gave, of elements of ``DTYPE``."""
    values = values_of(payload, DTYPE)
    sums = tl.zeros(values.shape, dtype=tl.float32)
    for source in tl.static_range(NUM_RANKS):
        part = payload  # chosen, not branched to
        if source < NUM_RANKS - 1:
            part = tl.where(source < rank, payloads[source], part)
        if source > 0:
            part = tl.where(source > rank, payloads[source - 1], part)
        sums += values_of(part, DTYPE).to(tl.float32)
    return sums


@jit
def clear_lines(packets, epoch, line, mask, rank, NUM_RANKS: tl.constexpr):
    """Set what ``await_lines`` was given to 0, once all threads have it."""
    tl.debug_barrier()
    word = line[:, None] * LINE_WORDS + tl.arange(0, LINE_WORDS)[None, :]
    for peer in tl.static_range(NUM_RANKS - 1):
        source = peer + (peer >= rank).to(tl.int32)
        part_ptr = packets.words + part_offset(epoch, source, packets.part_words, NUM_RANKS)
        tl.store(part_ptr + word, tl.zeros(word.shape, tl.int64), mask=mask[:, None])


@triton.constexpr_function
def _payload_types(peers: int) -> tuple[Any, ...]:
    return (tl.int32,) * (2 * peers)


@triton.constexpr_function
def _constraints(peers: int) -> str:
    """Two payloads out for each peer; in: a line of each, tag, mask, most polls, guard."""
    return ",".join(["=&r"] * (2 * peers) + ["l"] * peers + ["r", "r", "r", "l"])


@triton.constexpr_function
def _polling(peers: int) -> str:
    """PTX: look at a line of each peer until all words have the tag. Give up when another thread
    has (guard[1]), which is looked at together with the lines; or when a word has come with a tag
    that is another size's; or with a limit, ``most`` > 0, after as many looks.

    ``t``, tags' exclusive or, is 0 for a word that has come, and negative for one that has not.
    """
    lines = [f"${2 * peers + peer}" for peer in range(peers)]
    tag, mask, most, timeout_words = (f"${3 * peers + place}" for place in range(4))
    out = [f"${place}" for place in range(2 * peers)]
    look, compare, foreign = [], [], []
    for peer, line in enumerate(lines):
        first, second = 2 * peer, 2 * peer + 1
        look += [f"ld.relaxed.sys.global.v2.b64 {{w{first}, w{second}}}, [{line}];"]
        compare += [
            f"mov.b64 {{{out[first]}, t{first}}}, w{first};",
            f"mov.b64 {{{out[second]}, t{second}}}, w{second};",
            f"xor.b32 t{first}, t{first}, {tag};",
            f"xor.b32 t{second}, t{second}, {tag};",
            f"or.b32 missing{peer}, t{first}, t{second};",
            f"or.b32 missing, missing, missing{peer};",
        ]
        for word in (first, second):
            foreign += [
                f"setp.gt.s32 some, t{word}, 0;",
                f"@some mov.b64 late, {line};",
                f"@some xor.b32 others, t{word}, {tag};",
                "or.pred differs, differs, some;",
            ]
    name_late = [f"mov.b64 late, {lines[-1]};"]
    for peer in reversed(range(peers - 1)):
        name_late += [
            f"setp.ne.b32 some, missing{peer}, 0;",
            f"selp.b64 late, {lines[peer]}, late, some;",
        ]
    instructions = [
        ".reg .pred some, differs;",
        ".reg .b32 looks, missing, others;",
        ".reg .b64 late, value;",
        f".reg .b64 w<{2 * peers}>;",
        f".reg .b32 t<{2 * peers}>, missing<{peers}>;",
        *(f"mov.b32 {each}, 0;" for each in out),
        "mov.b32 looks, 0;",
        f"setp.eq.b32 some, {mask}, 0;",
        "@some bra done;",
        "look:",
        *look,
        f"ld.relaxed.gpu.global.b32 others, [{timeout_words} + {8 * _GAVE_UP}];",
        "mov.b32 missing, 0;",
        *compare,
        "setp.eq.b32 some, missing, 0;",
        "@some bra done;",
        "setp.ne.b32 some, others, 0;",
        "@some bra done;",
        "setp.ne.b32 differs, 0, 0;",
        *foreign,
        "@differs bra disagree;",
        f"setp.eq.b32 some, {most}, 0;",
        "@some bra look;",
        "add.u32 looks, looks, 1;",
        f"setp.lt.u32 some, looks, {most};",
        "@some bra look;",
        *name_late,
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
        f"ld.relaxed.gpu.global.b64 late, [{timeout_words} + {8 * _NEXT}];",
        "tell:",  # as ``note_disagreement``
        "setp.eq.b64 some, late, 0;",
        "@some bra told;",
        f"setp.eq.b64 some, late, {timeout_words};",
        "@some bra told;",
        f"red.relaxed.gpu.global.max.s64 [late + {8 * _GAVE_UP}], 1;",
        f"ld.relaxed.gpu.global.b64 late, [late + {8 * _NEXT}];",
        "bra tell;",
        "told:",
        f"ld.relaxed.gpu.global.b64 late, [{timeout_words} + {8 * _REPORT}];",
        "st.relaxed.sys.global.b64 [late], 1;",
        "done:",
    ]
    return "{\n" + "\n".join(instructions) + "\n}"


@jit(do_not_specialize=["size", "rank"])
def kernel_all_reduce_packets(
    x_ptr, out_ptr, packets, elements, size, rank, plan: tl.constexpr
):  # fmt: skip
    """Every rank sends all of x [elements] to all, and adds what it gets into out [elements];
    ``size`` is what ranks have to agree on.

    Blocks of ``BLOCK`` elements go round the programs. Grid: (up to ``MAX_CTAS``,).
    """
    BLOCK: tl.constexpr = plan.BLOCK
    LINES: tl.constexpr = BLOCK * x_ptr.dtype.element_ty.primitive_bitwidth // 8 // LINE_BYTES
    PER_LINE: tl.constexpr = BLOCK // LINES
    # What needs no number of the call comes first, so that it is under way while that is counted.
    targets = peers_at(packets, rank, plan.NUM_RANKS)
    index = first_of(0, BLOCK) + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + index, mask=index < elements, other=0.0)
    epoch = begin_call(packets.calls)
    tag = tag_of(epoch, size)
    offset = part_offset(epoch, rank, packets.part_words, plan.NUM_RANKS)
    # Of this program's share, not of the largest: no flag has to say that there was none.
    blocks = tl.cdiv(tl.cdiv(elements, BLOCK) - tl.program_id(0), tl.num_programs(0))
    for block in range(blocks):
        if block > 0:
            index = first_of(block, BLOCK) + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + index, mask=index < elements, other=0.0)
        line = first_of(block, LINES) + tl.arange(0, LINES)
        send_lines(targets, offset, payload_of(x), line, line * PER_LINE < elements, tag)
    for block in range(blocks):
        line = first_of(block, LINES) + tl.arange(0, LINES)
        there = line * PER_LINE < elements
        index = first_of(block, BLOCK) + tl.arange(0, BLOCK)
        mask = index < elements
        own = payload_of(tl.load(x_ptr + index, mask=mask, other=0.0))
        payloads = await_lines(packets, epoch, tag, line, there, rank, plan.NUM_RANKS)
        sums = add_lines(own, payloads, rank, plan.NUM_RANKS, x_ptr.dtype.element_ty)
        tl.store(out_ptr + index, sums.to(out_ptr.dtype.element_ty), mask=mask)
        clear_lines(packets, epoch, line, there, rank, plan.NUM_RANKS)
