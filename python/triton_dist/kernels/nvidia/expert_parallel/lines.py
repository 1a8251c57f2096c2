"""Unmarked lines: 16 bytes that mark their own arrival by not being 0.

The tags of packets (``common/exchange/packets.py``) double the bytes that cross the link, which is
too slow for long rows. Here the sender stores the complement of its words, and the receiver waits
until no word is 0. Only a NaN whose bits are all ones would become 0; it becomes another NaN.

Each reader clears a line after reading it, before the sender may write it again. The words cannot
show that a peer called with another size. A flag or packet of the same call must be awaited too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.kernels.common.peers import AWAITED, FLAG, GAVE_UP
from triton_dist.language._spin import INTERPRETED, spin, wait_deadline

LINE_BITS = tl.constexpr(128)


@jit
def unmarked_of(values):
    """Return the complement of the bits of ``values``: integers whose words are never 0.

    A NaN of only ones becomes another NaN.
    """
    BITS: tl.constexpr = values.dtype.primitive_bitwidth
    INT: tl.constexpr = tl.int8 if BITS == 8 else tl.int16 if BITS == 16 else tl.int32
    wire = ~values.to(INT, bitcast=True)
    return tl.where(wire == 0, -(1 << (BITS - 1)), wire).to(INT)


@jit
def send_unmarked(lines_ptr, line, values, index, mask):
    """Store ``values`` at elements ``index`` of the lines that begin at ``line``."""
    wire = unmarked_of(values)
    PER_LINE: tl.constexpr = LINE_BITS // values.dtype.primitive_bitwidth
    target = lines_ptr.to(tl.pointer_type(wire.dtype)) + line * PER_LINE + index
    with dl.mark("push"):
        tl.store(target, wire, mask=mask)


@jit
def poll_unmarked(lines, is_sent, timeout_ptr):
    """Wait until the four words of 16-byte lines at int32 pointers are not 0.

    Return the bits that ``unmarked_of`` has complemented: four blocks of int32 [lines] for each
    block of pointers; arbitrary where ``is_sent``, a tuple of masks, is false.
    """
    with dl.mark("wait"):
        payloads = tl.tuple([])
        if INTERPRETED:
            for peer in tl.static_range(len(lines)):
                word_ptr = lines[peer][:, None] + tl.arange(0, 4)[None, :]
                deadline = wait_deadline()
                polls = 0
                words = tl.load(word_ptr, mask=is_sent[peer][:, None], other=1, volatile=True)
                while (tl.min((words != 0).to(tl.int32)) == 0) & (polls >= 0):
                    arrived = (words != 0).to(tl.int32)
                    polls = spin(word_ptr, arrived, 1, deadline, 0, timeout_ptr, False)
                    words = tl.load(word_ptr, mask=is_sent[peer][:, None], other=1, volatile=True)
                for place in tl.static_range(4):
                    word = tl.sum(tl.where(tl.arange(0, 4)[None, :] == place, ~words, 0), 1)
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
            for place in tl.static_range(4 * len(lines)):
                payloads = payloads + (~words[place],)  # noqa: RUF005
    return payloads


@jit
def line_of(words, index):
    """Return line ``index`` of the result of ``poll_unmarked``, int32 [lines, 4]."""
    even, odd = tl.join(words[4 * index], words[4 * index + 2]), words[4 * index + 1]
    line = tl.join(even, tl.join(odd, words[4 * index + 3]))
    return tl.reshape(line, [odd.shape[0], 4])


@triton.constexpr_function
def _constraints(peers: int) -> str:
    """Return the constraints. Out: four words per line; in: lines, masks, limit, timeout words."""
    return ",".join(["=&r"] * (4 * peers) + ["l"] * peers + ["r"] * (peers + 1) + ["l"])


@triton.constexpr_function
def _polling_ptx(peers: int) -> str:
    """Return PTX that polls a line of each peer, if sent, until no word is 0, or a wait gave up."""
    lines = [f"${4 * peers + peer}" for peer in range(peers)]
    masks = [f"${5 * peers + peer}" for peer in range(peers)]
    max_polls, timeout_words = f"${6 * peers}", f"${6 * peers + 1}"
    poll, least = [], []
    for peer, line in enumerate(lines):
        words = [f"${4 * peer + place}" for place in range(4)]
        poll.append(f"@sent{peer} ld.relaxed.sys.global.v4.b32 {{{', '.join(words)}}}, [{line}];")
        least += [f"min.u32 missing{peer}, {words[0]}, {words[1]};"]
        least += [f"min.u32 missing{peer}, missing{peer}, {word};" for word in words[2:]]
        least += [f"min.u32 missing, missing, missing{peer};"]
    find_late = [f"mov.b64 late, {lines[-1]};"]
    for peer in reversed(range(peers - 1)):
        find_late += [
            f"setp.eq.b32 some, missing{peer}, 0;",
            f"selp.b64 late, {lines[peer]}, late, some;",
        ]
    instructions = [
        f".reg .pred some, sent<{peers}>;",
        f".reg .b32 polls, missing, others, missing<{peers}>;",
        ".reg .b64 late, value;",
        *(f"mov.b32 ${place}, -1;" for place in range(4 * peers)),
        *(f"setp.ne.b32 sent{peer}, {mask}, 0;" for peer, mask in enumerate(masks)),
        "mov.b32 polls, 0;",
        "poll:",
        *poll,
        f"ld.relaxed.gpu.global.b32 others, [{timeout_words} + {8 * GAVE_UP}];",
        "mov.b32 missing, -1;",
        *least,
        "setp.ne.b32 some, missing, 0;",
        "@some bra done;",
        "setp.ne.b32 some, others, 0;",
        "@some bra done;",
        f"setp.eq.b32 some, {max_polls}, 0;",
        "@some bra poll;",
        "add.u32 polls, polls, 1;",
        f"setp.lt.u32 some, polls, {max_polls};",
        "@some bra poll;",
        *find_late,
        f"st.relaxed.gpu.global.b64 [{timeout_words} + {8 * FLAG}], late;",
        "mov.b64 value, 1;",
        f"st.relaxed.gpu.global.b64 [{timeout_words} + {8 * AWAITED}], value;",
        f"st.relaxed.gpu.global.b64 [{timeout_words} + {8 * GAVE_UP}], 1;",
        "done:",
    ]
    return "{\n" + "\n".join(instructions) + "\n}"
