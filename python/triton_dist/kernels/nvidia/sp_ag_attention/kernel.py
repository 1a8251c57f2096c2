"""Kernels of AllGather-attention: wait for a shard, and merge partial results."""

from __future__ import annotations

import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.kernels.common.peers import flag_of, timeout_word_of


@jit(do_not_specialize=["size", "source"])
def kernel_await_shard(pushed, size, source):
    """Wait until the shard of rank ``source`` has arrived. Grid (1,).

    Kernels that follow on the stream see the shard.
    """
    value = flag_of(pushed.epoch, size)
    dl.wait(pushed.arrivals + source, 1, value, timeout_word_of(pushed.epoch), True)


@jit(do_not_specialize=["rows", "tokens", "part_tokens", "first"])
def kernel_merge(
    out_ptr, lse_ptr, part_ptr, part_lse_ptr, rows, tokens, part_tokens, first, HEADS: tl.constexpr,
    DIM: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge attention over more keys into out, in place. Grid (blocks of rows,).

    out: [batch, tokens, HEADS, DIM]; part: [batch, part_tokens, HEADS, DIM], which has ``rows``
    heads and concerns the tokens from ``first`` on. lse and part_lse: fp32 [batch, HEADS, tokens],
    natural logarithms of the sums of exponentials.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, LANES)[None, :]
    head = row % HEADS
    batch = row // HEADS // part_tokens
    token = row // HEADS - batch * part_tokens
    exists = row < rows
    mask = exists[:, None] & (column < DIM)
    part_at = (batch * HEADS + head) * part_tokens + token
    at = (batch * HEADS + head) * tokens + first + token
    own = tl.load(lse_ptr + at, mask=exists, other=0.0)
    other = tl.load(part_lse_ptr + part_at, mask=exists, other=0.0)
    largest = tl.maximum(own, other)
    own_sum, other_sum = tl.exp(own - largest), tl.exp(other - largest)
    total = own_sum + other_sum
    out = out_ptr + (((batch * tokens + first + token) * HEADS + head) * DIM)[:, None] + column
    part = tl.load(part_ptr + (row * DIM)[:, None] + column, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(out, mask=mask, other=0.0).to(tl.float32)
    value = value * (own_sum / total)[:, None] + part * (other_sum / total)[:, None]
    tl.store(out, value.to(out_ptr.dtype.element_ty), mask=mask)
    # All warps must have loaded lse: without the barrier, some read merged values.
    tl.debug_barrier()
    tl.store(lse_ptr + at, largest + tl.log(total), mask=exists)
