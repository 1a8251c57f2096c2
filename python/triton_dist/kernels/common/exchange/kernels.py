"""Reduce-scatter and all-gather, each in one launch: the kernels, and the launches for matrices.
``exchange/protocol.py`` says how kernels work and what they take.

Each begins a call; then it goes through its pieces: it sends one, while it takes what has come of
the one before. Blocks of ``plan.BLOCK`` elements go round the programs. Grid: (up to
``MAX_CTAS``,). x and out:

==============  =========  ==========
kernel          x          out
==============  =========  ==========
reduce-scatter  [total]    [shard]
all-gather      [shard]    [total]
==============  =========  ==========
"""

from __future__ import annotations

import torch
import triton.language as tl

from triton_dist._jit import jit
from triton_dist.kernels.common.exchange.buffer import Exchange, Shape
from triton_dist.kernels.common.exchange.protocol import (
    add_parts,
    await_peers,
    begin,
    copy_shards,
    flag_of_piece,
    pieces_of,
    push_shards,
    send_copies,
    tell_ranks,
)


@jit(do_not_specialize=["size", "rank"])
def kernel_reduce_scatter(x_ptr, out_ptr, slots, peers, lengths, size, rank, plan: tl.constexpr):
    """Every rank adds its shard of x into out."""
    call = begin(slots, peers, size, rank, plan)
    blocks = pieces_of(lengths.shard, plan)
    own = rank.to(tl.int64) * lengths.shard
    for piece in range(plan.NUM_PIECES + 1):
        first = piece * blocks
        if piece < plan.NUM_PIECES:
            push_shards(x_ptr, slots, call, first, first + blocks, lengths, plan)
            tell_ranks(call, 0, flag_of_piece(call, piece), plan)
        if piece >= 1:
            token = await_peers(peers, 0, flag_of_piece(call, piece - 1), plan)
            add_parts(
                x_ptr + own, out_ptr, slots.data, call.offset, own, first - blocks, first, token,
                lengths, rank, plan,
            )  # fmt: skip


@jit(do_not_specialize=["size", "rank"])
def kernel_all_gather(x_ptr, out_ptr, slots, peers, lengths, size, rank, plan: tl.constexpr):
    """Every rank sends x to all and copies what it gets into out."""
    call = begin(slots, peers, size, rank, plan)
    blocks = pieces_of(lengths.shard, plan)
    for piece in range(plan.NUM_PIECES + 1):
        first = piece * blocks
        if piece < plan.NUM_PIECES:
            own_ptr = out_ptr + rank.to(tl.int64) * lengths.shard
            send_copies(x_ptr, own_ptr, slots, call, first, first + blocks, lengths, plan)
            tell_ranks(call, 0, flag_of_piece(call, piece), plan)
        if piece >= 1:
            token = await_peers(peers, 0, flag_of_piece(call, piece - 1), plan)
            copy_shards(
                out_ptr, slots.data, call.offset, first - blocks, first, token, lengths, rank, plan
            )  # fmt: skip


def scattering(addend: torch.Tensor, num_ranks: int, shape: Shape) -> tuple[Exchange, torch.Tensor]:
    """Describe the launch that sums ``addend`` [M, N] over ranks, and where the own rows go, those
    of one rank; M is a multiple of the ranks."""
    M, N = addend.shape
    rows = addend.new_empty((M // num_ranks, N))
    return Exchange(kernel_reduce_scatter, M // num_ranks * N, M * N, shape, M), rows


def gathering(
    shard: torch.Tensor, num_ranks: int, shape: Shape, size: int, rows: torch.Tensor | None = None
) -> tuple[Exchange, torch.Tensor]:
    """Describe the launch that gathers ``shard`` [m, N] of all ranks, and where they go: ``rows``,
    or a new matrix. ``size``: what peers compare."""
    if rows is None:
        rows = shard.new_empty((shard.shape[0] * num_ranks, shard.shape[1]))
    return Exchange(kernel_all_gather, shard.numel(), rows.numel(), shape, size), rows
