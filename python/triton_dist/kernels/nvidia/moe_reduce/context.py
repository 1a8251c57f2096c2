"""Contexts of the ops that end an MoE layer: grouped GEMM, and sums over choices and ranks.

"Choices" are the topk experts of a token.
"""

from __future__ import annotations

import torch
import triton

from triton_dist.kernels.common import libraries
from triton_dist.kernels.common.context import Check
from triton_dist.kernels.common.exchange.buffer import (
    Exchange,
    ExchangeBuffer,
    LaunchParams,
    all_gather_exchange,
    params_for_device,
    reduce_scatter_exchange,
    slot_bytes_for_shards,
)
from triton_dist.kernels.common.exchange.sums import (
    MAX_ONE_SHOT_BYTES,
    ONE_SHOT,
    TWO_SHOT,
    SumBuffer,
)
from triton_dist.kernels.common.moe.columns import PushedColumns
from triton_dist.kernels.common.moe.summing import (
    COLLECTIVE,
    MoEContextLimits,
    MoESumContext,
    create,
)
from triton_dist.kernels.common.moe.topk_sum import TOPK_EXCHANGE
from triton_dist.runtime.ranks import Group

PUSH = "push"
MAX_EXCHANGED_BYTES = 64 << 20
"""Maximum bytes of the sums of a rank for our reduce-scatter in one launch. For more bytes, copy
engines are faster."""
_MIN_LARGE_BYTES = 1 << 20
"""Minimum bytes of a shard for ``_LARGE_…_PARAMS``, which keep more bytes in flight."""
_LARGE_SCATTER_PARAMS, _LARGE_GATHER_PARAMS = LaunchParams(128, 16384), LaunchParams(64, 16384)


class MoEReduceRSContext(MoESumContext):
    """Symmetric memory for ``run_moe_reduce_rs`` with up to ``max_routes`` routes.

    A context manager.
    """

    op_name, function = "grouped GEMM + ReduceScatter", "run_moe_reduce_rs"
    creator, reductions = "create_moe_rs_context", (PUSH, TOPK_EXCHANGE)
    returns_all_rows = False

    def __init__(self, limits: MoEContextLimits) -> None:
        super().__init__(limits)
        N, dtype, n_chunks_max, group = self.N, self.dtype, self.n_chunks_max, limits.group
        rows = self.rows_per_rank(self.max_tokens)
        max_exchange_M = min(rows, MAX_EXCHANGED_BYTES // (self.num_ranks * N * dtype.itemsize))
        nbytes = slot_bytes_for_shards(max(1, max_exchange_M) * N, dtype, self.num_ranks)
        with self.allocating() as add:
            self.buffer = add(PushedColumns(rows, N, dtype, n_chunks_max, group, self.function))
            disagreements, name = self.buffer.disagreements, f"the exchange of {self.function}"
            self.exchange = add(ExchangeBuffer(nbytes, group, name, disagreements=disagreements))

    @staticmethod
    def tokens_check(argument: str, tokens: int, num_ranks: int) -> Check:
        fits = num_ranks <= tokens and tokens % num_ranks == 0
        return argument, tokens, fits, f"a positive multiple of world_size = {num_ranks}"

    @classmethod
    def fits(cls, reduction: str, nbytes: int) -> bool:
        return nbytes <= MAX_EXCHANGED_BYTES

    def sum_over_ranks(self, total: torch.Tensor, reduction: str) -> torch.Tensor:
        if reduction == COLLECTIVE:
            return libraries.reduce_scatter(total, self.group)
        exchange, rows = self._scatter_exchange(total)
        self.exchange.run(exchange, total, rows)
        return rows

    def compile_sum_over_ranks(self, total: torch.Tensor, reduction: str) -> None:
        exchange, rows = self._scatter_exchange(total)
        self.exchange.launch(exchange, total, rows).compile()

    def _scatter_exchange(self, total: torch.Tensor) -> tuple[Exchange, torch.Tensor]:
        is_large = total.nbytes // self.num_ranks >= _MIN_LARGE_BYTES
        return reduce_scatter_exchange(
            total, self.num_ranks, _LARGE_SCATTER_PARAMS if is_large else params_for_device()
        )


class MoEReduceARContext(MoESumContext):
    """Symmetric memory for ``run_moe_reduce_ar`` with up to ``max_routes`` routes.

    A context manager.
    """

    op_name, function = "grouped GEMM + AllReduce", "run_moe_reduce_ar"
    creator, reductions = "create_moe_ar_context", (TWO_SHOT, ONE_SHOT, TOPK_EXCHANGE)
    returns_all_rows = True
    exchange: SumBuffer

    def __init__(self, limits: MoEContextLimits) -> None:
        super().__init__(limits)
        N, dtype, n_chunks_max, group = self.N, self.dtype, self.n_chunks_max, limits.group
        rows = self.rows_per_rank(self.max_tokens)
        nbytes = self.num_ranks * rows * N * dtype.itemsize if self.num_ranks > 1 else 1
        with self.allocating() as add:
            self.buffer = add(PushedColumns(rows, N, dtype, n_chunks_max, group, self.function))
            disagreements, name = self.buffer.disagreements, f"the sums of {self.function}"
            self.exchange = add(SumBuffer(nbytes, group, name, disagreements))

    @staticmethod
    def tokens_check(argument: str, tokens: int, num_ranks: int) -> Check:
        return argument, tokens, tokens >= 1, "at least 1"

    @classmethod
    def fits(cls, reduction: str, nbytes: int) -> bool:
        return reduction == TWO_SHOT or nbytes <= MAX_ONE_SHOT_BYTES

    def sum_over_ranks(self, total: torch.Tensor, reduction: str) -> torch.Tensor:
        if reduction == COLLECTIVE:
            return libraries.all_reduce(total, self.group)
        return self.exchange.sum(total, reduction)

    def compile_sum_over_ranks(self, total: torch.Tensor, reduction: str) -> None:
        self.exchange.compile_sum(total, reduction)

    def finish_chunks(self, rows: torch.Tensor, M: int) -> torch.Tensor:
        """Gather the sums of all ranks and return all M rows."""
        exchange, gathered = self._gather_exchange(rows, M)
        self.exchange.run(exchange, rows, gathered)
        return gathered[:M]

    def compile_finish(self, rows: torch.Tensor, M: int) -> None:
        exchange, gathered = self._gather_exchange(rows, M)
        self.exchange.launch(exchange, rows, gathered).compile()

    def _gather_exchange(self, rows: torch.Tensor, M: int) -> tuple[Exchange, torch.Tensor]:
        """Return the launch that gathers the sums, and its output.

        The output has whole shards, so the last shard may end after row M.
        """
        # Round M up, so that ranks with different M usually launch the same kernel. The kernel
        # detects that M differs.
        max_M = triton.next_power_of_2(M)
        is_large = max_M * rows.shape[1] * rows.element_size() >= _MIN_LARGE_BYTES * self.num_ranks
        params = _LARGE_GATHER_PARAMS if is_large else params_for_device()
        return all_gather_exchange(rows, self.num_ranks, params, M)


def create_moe_rs_context(
    rank: int,
    world_size: int,
    local_world_size: int,
    max_token_num: int,
    hidden_dim: int,
    num_experts: int,
    topk: int,
    input_dtype: torch.dtype,
    n_chunks_max: int = 8,
    *,
    tp_group: Group = None,
) -> MoEReduceRSContext:
    """Create the context of ``run_moe_reduce_rs``. Collective over ``tp_group``.

    Allocates per rank about 2 * M * ``hidden_dim`` elements, where M is the maximum number of
    tokens, and as many again (at most 128 MB) for sums that one launch scatters.

    Args:
        rank, world_size, local_world_size: this rank in the group, and the numbers of ranks of the
            group and of one host.
        max_token_num: maximum number of *routes* (tokens times ``topk``), not of tokens. The number
            of tokens must be a multiple of ``world_size``.
        hidden_dim: number of columns of the result.
        num_experts: number of experts, 1 to 512.
        topk: experts per token, 1 to 10.
        input_dtype: dtype of x, the weights and the result: fp16, bf16 or fp32.
        n_chunks_max: maximum number of chunks of columns of a call.
        tp_group: process group; default: the world, or this process alone.

    Returns:
        The context. Call ``finalize()`` or use ``with`` to free it.

    Raises:
        InvalidArgument, RankDisagreement, SymmetricMemoryFull: see ``create_ag_gemm_context``.
    """
    return create(
        MoEReduceRSContext, rank, world_size, local_world_size, max_token_num, hidden_dim,
        num_experts, topk, input_dtype, n_chunks_max, tp_group,
    )  # fmt: skip


def create_moe_ar_context(
    rank: int,
    world_size: int,
    local_world_size: int,
    max_token_num: int,
    hidden_dim: int,
    num_experts: int,
    topk: int,
    input_dtype: torch.dtype,
    n_chunks_max: int = 8,
    *,
    tp_group: Group = None,
) -> MoEReduceARContext:
    """Create the context of ``run_moe_reduce_ar``. Collective over ``tp_group``.

    Allocates per rank about 2 * P + max(4 * P, 2 * ``world_size`` * min(P, 4 MB)) bytes. P is the
    number of bytes of the result for the maximum number of tokens. Packets need another
    4 * ``world_size`` * min(P, 256 KB) bytes; with three or more ranks at least 8 * min(P, 2 MB).

    Args:
        max_token_num: maximum number of *routes* (tokens times ``topk``), not of tokens. The number
            of tokens need not be a multiple of ``world_size``.
        rank, world_size, local_world_size: see ``create_moe_rs_context``.
        hidden_dim, num_experts, topk, input_dtype: see ``create_moe_rs_context``.
        n_chunks_max, tp_group: see ``create_moe_rs_context``.

    Returns:
        The context. Call ``finalize()`` or use ``with`` to free it.

    Raises:
        InvalidArgument, RankDisagreement, SymmetricMemoryFull: see ``create_ag_gemm_context``.
    """
    return create(
        MoEReduceARContext, rank, world_size, local_world_size, max_token_num, hidden_dim,
        num_experts, topk, input_dtype, n_chunks_max, tp_group,
    )  # fmt: skip
