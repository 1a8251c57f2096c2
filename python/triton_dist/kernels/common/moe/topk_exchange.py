"""Sum over choices (the topk experts of a token) and over ranks in one launch, for few tokens.

The serial algorithm stores the sums over choices, and a second launch exchanges them. For few
tokens the second launch takes most of the time. Here the loop that sends also adds the choices. It
uses the order and the rounding of ``topk_sum.py``, so the result is bitwise equal to the serial
algorithm. Flags and slots (alternating buffers) follow ``exchange/protocol.py``, with a single
chunk. A block is a range of columns of one token. A *route* is a pair of token and choice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from triton_dist._jit import jit
from triton_dist.kernels.common.exchange.buffer import (
    SMALL_PARAMS,
    ExchangeBuffer,
    LaunchParams,
    params_for_device,
    plan_of,
    shard_elements,
)
from triton_dist.kernels.common.exchange.protocol import (
    after_wait,
    await_peers,
    begin,
    chunk_flag,
    notify_ranks,
)
from triton_dist.kernels.common.peers import target_at
from triton_dist.runtime.launch import Launch

TOPK_EXCHANGE = "topk_exchange"
"""Name of this reduction in configs."""
TOPK_EXCHANGE_BYTES = 4 << 20
"""Maximum bytes of a rank's sums. Beyond it, the time of a second launch is negligible."""


@jit
def token_sum(
    products_ptr, weights_ptr, ids_ptr, rows_ptr, token, column, N, E, dtype, TOPK: tl.constexpr
):
    """Return columns of the sum over a token's choices as ``dtype``.

    The choices are added in fp32 in order.
    """
    total = tl.zeros(column.shape, tl.float32)
    for choice in tl.static_range(TOPK):
        route = token * TOPK + choice
        expert = tl.load(ids_ptr + route)
        has_expert = (expert >= 0) & (expert < E)
        weight = tl.load(weights_ptr + route).to(tl.float32)
        row = route
        if rows_ptr is not None:
            row = tl.load(rows_ptr + route)
        # Select a mask instead of branching, so that the loads of all choices are in flight
        # together.
        product = tl.load(
            products_ptr + row.to(tl.int64) * N + column,
            mask=column < tl.where(has_expert, N, 0),
            other=0.0,
        )
        total += tl.where(has_expert, weight, 0.0) * product.to(tl.float32)
    return total.to(dtype)


@jit(do_not_specialize=["rows", "E", "call_tag", "rank"])
def kernel_topk_exchange(
    products_ptr,
    weights_ptr,
    ids_ptr,
    rows_ptr,
    out_ptr,
    slots,
    peers,
    rows,
    N,
    E,
    shard_stride,
    call_tag,
    rank,
    TOPK: tl.constexpr,
    ALL_ROWS: tl.constexpr,
    plan: tl.constexpr,
):
    """Store the sum over choices and ranks in out [rows, N]. Grid: (up to ``MAX_CTAS``,).

    Without ``ALL_ROWS``, out has the ``rows`` tokens of this rank. With ``ALL_ROWS``, out has all
    tokens, and every rank sends its sums of all tokens to every rank.
    """
    call = begin(slots, peers, call_tag, rank, plan)
    NUM_RANKS: tl.constexpr = plan.NUM_RANKS
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    blocks_per_row = tl.cdiv(N, plan.BLOCK)
    column_in_block = tl.arange(0, plan.BLOCK)
    own_begin = 0 if ALL_ROWS else rank * rows
    for block in range(tl.program_id(0), rows * blocks_per_row, tl.num_programs(0)):
        row = block // blocks_per_row
        column = block % blocks_per_row * plan.BLOCK + column_in_block
        index = row.to(tl.int64) * N + column
        sums = token_sum(
            products_ptr, weights_ptr, ids_ptr, rows_ptr, own_begin + row, column, N, E, dtype, TOPK
        )
        # This rank's addend stays in out until the addends of peers have arrived.
        tl.store(out_ptr + index, sums, mask=column < N)
        for step in tl.static_range(1, NUM_RANKS):
            peer = (rank + step) % NUM_RANKS
            if not ALL_ROWS:
                sums = token_sum(
                    products_ptr, weights_ptr, ids_ptr, rows_ptr, peer * rows + row, column, N, E,
                    dtype, TOPK,
                )  # fmt: skip
            target = target_at(slots.table, peer, slots.data) + call.offset
            tl.store(target + rank.to(tl.int64) * shard_stride + index, sums, mask=column < N)
    value = chunk_flag(call, 0)
    notify_ranks(call, 0, value, plan)
    wait_token = await_peers(peers, 0, value, plan)
    for block in range(tl.program_id(0), rows * blocks_per_row, tl.num_programs(0)):
        column = block % blocks_per_row * plan.BLOCK + column_in_block
        index = (block // blocks_per_row).to(tl.int64) * N + column
        shards = slots.data + after_wait(call.offset, wait_token)
        total = tl.full((plan.BLOCK,), 0.0, tl.float32)
        for source in tl.static_range(NUM_RANKS):
            addend = shards + source * shard_stride.to(tl.int64)
            # Select a pointer instead of branching. The load bypasses L1, which may hold stale
            # data.
            addend = tl.where(rank == source, out_ptr, addend)
            loaded = tl.load(addend + index, mask=column < N, cache_modifier=".cg")
            total += loaded.to(tl.float32)
        # This rank's addend is in out. All threads must have loaded it before it is overwritten.
        tl.debug_barrier()
        tl.store(out_ptr + index, total.to(dtype), mask=column < N)


class RoutedSums(NamedTuple):
    """Products [M * topk, N] that are to be summed over choices and ranks.

    ``rows`` contains, for each route, its row in ``products``. ``None``: route r has row r.
    """

    products: torch.Tensor
    rows: torch.Tensor | None
    expert_weight: torch.Tensor
    topk_ids: torch.Tensor
    E: int

    def run(self, buffer: ExchangeBuffer, all_rows: bool) -> torch.Tensor:
        """Return the sums of this rank's tokens, or of all tokens if ``all_rows`` is true."""
        out = self._out(buffer, all_rows)
        tensors = {
            "products_ptr": self.products, "weights_ptr": self.expert_weight,
            "ids_ptr": self.topk_ids, "out_ptr": out,
        }  # fmt: skip
        if self.rows is not None:
            tensors["rows_ptr"] = self.rows
        key = (self.topk_ids.shape, out.shape[1], self.E, all_rows, self.rows is None)
        dtypes = out.dtype, self.topk_ids.dtype, self.expert_weight.dtype
        buffer.begin(1, self._launch_params(out).num_ctas, 1)
        buffer.launcher.run(
            (kernel_topk_exchange, key, dtypes),
            lambda: self._launch(buffer, out, all_rows),
            tensors,
        )
        buffer.timeout_words.end()
        return out

    def compile(self, buffer: ExchangeBuffer, all_rows: bool) -> None:
        self._launch(buffer, self._out(buffer, all_rows), all_rows).compile()

    def _out(self, buffer: ExchangeBuffer, all_rows: bool) -> torch.Tensor:
        M, N = len(self.topk_ids), self.products.shape[1]
        return self.products.new_empty(M if all_rows else M // buffer.num_ranks, N)

    @staticmethod
    def _launch_params(out: torch.Tensor) -> LaunchParams:
        """Return the first of ``SMALL_PARAMS`` with a program for each block, or else the last."""
        rows, N = out.shape

        def blocks(params: LaunchParams) -> int:
            return rows * int(triton.cdiv(N * out.element_size(), params.block_bytes))

        fits = (each for each in SMALL_PARAMS if each.num_ctas >= blocks(each))
        return params_for_device(next(fits, SMALL_PARAMS[-1]))

    def _launch(self, buffer: ExchangeBuffer, out: torch.Tensor, all_rows: bool) -> Launch:
        (rows, N), (M, topk), params = out.shape, self.topk_ids.shape, self._launch_params(out)
        operands = self.products, self.expert_weight, self.topk_ids, self.rows, out
        sizes = rows, N, self.E, shard_elements(rows * N), M, buffer.rank
        plan = plan_of(buffer.num_ranks, params, out)
        return Launch(
            kernel_topk_exchange,
            (params.num_ctas,),
            (*operands, *buffer.regions(out.dtype), *sizes),
            {"TOPK": topk, "ALL_ROWS": all_rows, "plan": plan, "num_warps": params.num_warps},
        )
