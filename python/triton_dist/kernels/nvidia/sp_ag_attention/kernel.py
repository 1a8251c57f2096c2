"""Kernels of AllGather-attention, which wait for a shard and merge partial results."""

from __future__ import annotations

import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.kernels.common.peers import current_flag, timeout_words_at


@jit(do_not_specialize=["call_tag", "source"])
def kernel_await_shard(pushed, call_tag, source):
    """Wait until the shard of rank ``source`` has arrived. Grid (1,).

    Kernels that follow on the stream can read the shard.
    """
    value = current_flag(pushed.epoch, call_tag)
    dl.wait(pushed.arrivals + source, 1, value, timeout_words_at(pushed.epoch), True)


@jit(do_not_specialize=["rows", "tokens", "part_tokens", "first"])
def kernel_merge(
    out_ptr, lse_ptr, part_ptr, part_lse_ptr, rows, tokens, part_tokens, first, HEADS: tl.constexpr,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge attention over more keys (``part``) into ``out``, in place. Grid (blocks of rows,).

    ``out`` is [batch, tokens, HEADS, DIM], ``part`` [batch, part_tokens, HEADS, DIM]. ``part`` has
    ``rows`` rows of DIM elements and begins at token ``first`` of ``out``. ``lse`` and ``part_lse``
    are their log-sum-exps, fp32 [batch, HEADS, tokens] and [batch, HEADS, part_tokens],
    to base e. PADDED_DIM is DIM
    rounded up to a power of two, BLOCK the number of rows of a program.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, PADDED_DIM)[None, :]
    head = row % HEADS
    batch = row // HEADS // part_tokens
    token = row // HEADS - batch * part_tokens
    exists = row < rows
    mask = exists[:, None] & (column < DIM)
    part_index = (batch * HEADS + head) * part_tokens + token
    index = (batch * HEADS + head) * tokens + first + token
    lse = tl.load(lse_ptr + index, mask=exists, other=0.0)
    part_lse = tl.load(part_lse_ptr + part_index, mask=exists, other=0.0)
    max_lse = tl.maximum(lse, part_lse)
    weight, part_weight = tl.exp(lse - max_lse), tl.exp(part_lse - max_lse)
    total = weight + part_weight
    out = out_ptr + (((batch * tokens + first + token) * HEADS + head) * DIM)[:, None] + column
    part = tl.load(part_ptr + (row * DIM)[:, None] + column, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(out, mask=mask, other=0.0).to(tl.float32)
    value = value * (weight / total)[:, None] + part * (part_weight / total)[:, None]
    tl.store(out, value.to(out_ptr.dtype.element_ty), mask=mask)
    # Several warps load the same LSE. Without the barrier, some would load a merged LSE.
    tl.debug_barrier()
    tl.store(lse_ptr + index, max_lse + tl.log(total), mask=exists)
