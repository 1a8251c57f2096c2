"""Weighted sum over a token's choices (its topk experts), and its exchange between ranks.

The input has one row per route, a pair of token and choice. The output has one row per token, so
ranks exchange fewer rows. Sums are fp32, in the order of choices, and rounded once. Padding (routes
without an expert) adds nothing, even if its rows or weights contain NaN.

``kernel_topk_sum`` stores the sums, and a second launch exchanges them. For few tokens the second
launch takes most of the time. In ``kernel_topk_exchange`` the loop that sends also adds the
choices. It uses equal order and rounding, so the result is bitwise equal. Its flags and slots
(alternating buffers) follow ``exchange/protocol.py``, with a single chunk. A block is a range of
columns of one token.
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
    make_plan,
    padded_shard_numel,
    params_for_device,
)
from triton_dist.kernels.common.exchange.protocol import (
    after_wait,
    await_peers,
    begin_exchange,
    chunk_flag,
    notify_ranks,
)
from triton_dist.kernels.common.peers import target_at
from triton_dist.runtime.launch import Launch

TOPK_EXCHANGE = "topk_exchange"
"""Name of this reduction in configs."""
TOPK_EXCHANGE_BYTES = 4 << 20
"""Maximum bytes of a rank's sums. Beyond it, the time of a second launch is negligible."""
_BLOCK_ELEMENTS, _MAX_BLOCK_N = 2048, 1024


@jit(do_not_specialize=["M", "E", "rows_per_block"])
def kernel_topk_sum(
    products_ptr,
    weights_ptr,
    ids_ptr,
    rows_ptr,
    out_ptr,
    M,
    E,
    rows_per_block,
    first_column,
    num_columns,
    N,
    TOPK: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
):
    """Sum ``num_columns`` columns, from ``first_column`` on, of M tokens. Grid (token blocks,
    column blocks).

    products: [M * TOPK, num_columns]; the row of a route is ``rows[route]``, or its index if
    ``rows`` is ``None``. out: row blocks of ``rows_per_block`` tokens, with rows_per_block * N
    elements each. Inside a row block the columns of this launch are contiguous, [rows_per_block,
    num_columns], and begin at element ``rows_per_block * first_column``.
    """
    token = tl.program_id(0) * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
    column = tl.program_id(1) * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    valid, inside = token < M, column < num_columns
    total = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), tl.float32)
    for choice in tl.static_range(TOPK):
        route = token * TOPK + choice
        # Do not read weight and row of padding, because they may contain NaN.
        expert = tl.load(ids_ptr + route, mask=valid, other=-1)
        has_expert = valid & (expert >= 0) & (expert < E)
        weight = tl.load(weights_ptr + route, mask=has_expert, other=0.0).to(tl.float32)
        row = route
        if rows_ptr is not None:
            row = tl.load(rows_ptr + route, mask=has_expert, other=0)
        products = products_ptr + row.to(tl.int64) * num_columns
        # Triton cannot derive the alignment of a row.
        if ALIGNED:
            products = tl.multiple_of(products, 16)
        product = tl.load(
            products[:, None] + column[None, :],
            mask=has_expert[:, None] & inside[None, :],
            other=0.0,
        )
        total += weight[:, None] * product.to(tl.float32)
    # Address of the token's columns in its row block; see the docstring.
    block = (token // rows_per_block).to(tl.int64)
    in_block = (token % rows_per_block).to(tl.int64)
    block_begin = block * rows_per_block * N + rows_per_block.to(tl.int64) * first_column
    out = out_ptr + block_begin + in_block * num_columns
    if ALIGNED:
        out = tl.multiple_of(out, 16)
    tl.store(
        out[:, None] + column[None, :],
        total.to(out_ptr.dtype.element_ty),
        mask=valid[:, None] & inside[None, :],
    )


def topk_sum(
    products: torch.Tensor,
    expert_weight: torch.Tensor,
    topk_ids: torch.Tensor,
    rows: torch.Tensor | None,
    out: torch.Tensor,
    E: int,
    *,
    rows_per_block: int,
    first_column: int,
    N: int,
) -> Launch:
    """Return the launch that sums the products of some columns over choices.

    Args:
        products: [M * topk, num_columns], contiguous. Column 0 is column ``first_column`` of the N
            columns of ``out``.
        expert_weight: [M, topk], contiguous, of any floating dtype.
        topk_ids: [M, topk]; ids that are not in 0 to E - 1 add nothing.
        rows: row of each route in ``products``; ``None`` if rows are in the order of routes.
        out: row blocks in the layout of ``kernel_topk_sum``. If ``num_columns`` is N and
            ``rows_per_block`` is M, this is [M, N].
        E: number of experts.
        rows_per_block: number of tokens of a row block.
        first_column, N: first column, and total number of columns.
    """
    (M, topk), num_columns = topk_ids.shape, products.shape[1]
    block_n = min(_MAX_BLOCK_N, triton.next_power_of_2(num_columns))
    block_m = max(1, _BLOCK_ELEMENTS // block_n)
    item_bytes = products.element_size()
    aligned = all(size * item_bytes % 16 == 0 for size in (num_columns, N, first_column))
    sizes = M, E, rows_per_block, first_column, num_columns, N
    return Launch(
        kernel_topk_sum,
        (triton.cdiv(M, block_m), triton.cdiv(num_columns, block_n)),
        (products, expert_weight, topk_ids, rows, out, *sizes),
        {
            "TOPK": topk,
            "ALIGNED": aligned and products.data_ptr() % 16 == 0 and out.data_ptr() % 16 == 0,
            "BLOCK_SIZE_M": block_m,
            "BLOCK_SIZE_N": block_n,
            "num_warps": 4,
        },
    )


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
    call = begin_exchange(slots, peers, call_tag, rank, plan)
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
    current = chunk_flag(call, 0)
    notify_ranks(call, 0, current, plan)
    wait_token = await_peers(peers, 0, current, plan)
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
        buffer.timeout_words.end_call()
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
        sizes = rows, N, self.E, padded_shard_numel(rows * N), M, buffer.rank
        plan = make_plan(buffer.num_ranks, params, out)
        return Launch(
            kernel_topk_exchange,
            (params.num_ctas,),
            (*operands, *buffer.regions(out.dtype), *sizes),
            {"TOPK": topk, "ALL_ROWS": all_rows, "plan": plan, "num_warps": params.num_warps},
        )
