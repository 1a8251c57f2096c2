"""Contexts of the ops that end a mixture-of-experts layer."""

from __future__ import annotations

import torch
import triton

from triton_dist.kernels.common import libraries
from triton_dist.kernels.common.context import Check
from triton_dist.kernels.common.exchange.buffer import (
    Exchange,
    ExchangeBuffer,
    Shape,
    bytes_of_parts,
    gathering,
    scattering,
    untuned,
)
from triton_dist.kernels.common.exchange.sums import (
    ONE_SHOT,
    ONE_SHOT_BYTES,
    TWO_SHOT,
    SumBuffer,
)
from triton_dist.kernels.common.moe.columns import PushedColumns
from triton_dist.kernels.common.moe.summing import COLLECTIVE, MoESumContext, RoutedProducts, create
from triton_dist.kernels.common.moe.topk_exchange import TOPK_EXCHANGE
from triton_dist.runtime.ranks import Group

PUSH = "push"
EXCHANGED_BYTES = 64 << 20
"""Size of the largest sum over choices that one launch scatters; above it copy engines are
faster."""
_LARGE_FROM = 1 << 20
"""Bytes of a shard from which on the number of bytes in flight decides."""
_LARGE_SCATTER, _LARGE_GATHER = Shape(128, 16384), Shape(64, 16384)


class MoEReduceRSContext(MoESumContext):
    """Symmetric memory for ``run_moe_reduce_rs`` with up to ``max_routes`` routes. A context
    manager."""

    title, function = "grouped GEMM + ReduceScatter", "run_moe_reduce_rs"
    creator, reductions = "create_moe_rs_context", (PUSH, TOPK_EXCHANGE)
    has_all_rows = False

    def __init__(self, products: RoutedProducts) -> None:
        super().__init__(products)
        N, dtype, n_chunks_max, group = self.N, self.dtype, self.n_chunks_max, products.group
        rows = self.block_rows(self.max_tokens)
        held = min(rows, EXCHANGED_BYTES // (self.num_ranks * N * dtype.itemsize))
        nbytes = bytes_of_parts(max(1, held) * N, dtype, self.num_ranks)
        with self._allocating() as own:
            self._buffer = own(PushedColumns(rows, N, dtype, n_chunks_max, group, self.function))
            found, name = self.buffer.disagreements, f"the exchange of {self.function}"
            self.exchange = own(ExchangeBuffer(nbytes, group, name, disagreements=found))

    @staticmethod
    def tokens_check(argument: str, tokens: int, num_ranks: int) -> Check:
        fits = num_ranks <= tokens and tokens % num_ranks == 0
        return argument, tokens, fits, f"a positive multiple of world_size = {num_ranks}"

    @classmethod
    def fits(cls, reduction: str, nbytes: int) -> bool:
        return nbytes <= EXCHANGED_BYTES

    def sum_over_ranks(self, total: torch.Tensor, reduction: str) -> torch.Tensor:
        if reduction == COLLECTIVE:
            return libraries.reduce_scatter(total, self.group)
        exchange, rows = self._exchange(total)
        self.exchange.run(exchange, total, rows)
        return rows

    def prepare_sum(self, total: torch.Tensor, reduction: str) -> None:
        exchange, rows = self._exchange(total)
        self.exchange.launch(exchange, total, rows).compile()

    def _exchange(self, total: torch.Tensor) -> tuple[Exchange, torch.Tensor]:
        is_large = total.nbytes // self.num_ranks >= _LARGE_FROM
        return scattering(total, self.num_ranks, _LARGE_SCATTER if is_large else untuned())


class MoEReduceARContext(MoESumContext):
    """Symmetric memory for ``run_moe_reduce_ar`` with up to ``max_routes`` routes. A context
    manager."""

    title, function = "grouped GEMM + AllReduce", "run_moe_reduce_ar"
    creator, reductions = "create_moe_ar_context", (TWO_SHOT, ONE_SHOT, TOPK_EXCHANGE)
    has_all_rows = True
    exchange: SumBuffer

    def __init__(self, products: RoutedProducts) -> None:
        super().__init__(products)
        N, dtype, n_chunks_max, group = self.N, self.dtype, self.n_chunks_max, products.group
        rows = self.block_rows(self.max_tokens)
        nbytes = self.num_ranks * rows * N * dtype.itemsize if self.num_ranks > 1 else 1
        with self._allocating() as own:
            self._buffer = own(PushedColumns(rows, N, dtype, n_chunks_max, group, self.function))
            found = self.buffer.disagreements
            self.exchange = own(SumBuffer(nbytes, group, f"the sums of {self.function}", found))

    @staticmethod
    def tokens_check(argument: str, tokens: int, num_ranks: int) -> Check:
        return argument, tokens, tokens >= 1, "at least 1"

    @classmethod
    def fits(cls, reduction: str, nbytes: int) -> bool:
        return reduction == TWO_SHOT or nbytes <= ONE_SHOT_BYTES

    def sum_over_ranks(self, total: torch.Tensor, reduction: str) -> torch.Tensor:
        if reduction == COLLECTIVE:
            return libraries.all_reduce(total, self.group)
        return self.exchange.sum(total, reduction)

    def prepare_sum(self, total: torch.Tensor, reduction: str) -> None:
        self.exchange.compile_sum(total, reduction)

    def finish_chunks(self, rows: torch.Tensor, M: int) -> torch.Tensor:
        """All M rows: what each rank has added goes to all."""
        exchange, gathered = self._gathering(rows, M)
        self.exchange.run(exchange, rows, gathered)
        return gathered[:M]

    def prepare_finish(self, rows: torch.Tensor, M: int) -> None:
        exchange, gathered = self._gathering(rows, M)
        self.exchange.launch(exchange, rows, gathered).compile()

    def _gathering(self, rows: torch.Tensor, M: int) -> tuple[Exchange, torch.Tensor]:
        """Describe the launch that gathers what ranks have added, and where it goes: whole shares,
        of which the last may end behind M."""
        most = triton.next_power_of_2(M)  # the same of ranks with other rows of one range
        is_large = most * rows.shape[1] * rows.element_size() >= _LARGE_FROM * self.num_ranks
        shape = _LARGE_GATHER if is_large else untuned()
        return gathering(rows, self.num_ranks, shape, M)


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
    """Allocate what ``run_moe_reduce_rs`` needs. Collective over ``tp_group`` (default: the world,
    else this process).

    Takes about twice M * ``hidden_dim`` elements on each rank, where M is the most tokens, and as
    much again, of that 128 MB at most, for sums that one launch scatters.

    Args:
        rank, world_size: this rank in the group, and the group's size.
        local_world_size: ranks on one host; clamped to ``world_size``, which must lie on one host.
        max_token_num: the most *routes*, tokens times ``topk``; tokens are a multiple of
            ``world_size``.
        hidden_dim: columns of the result. num_experts: 1 to 512. topk: choices of a token, 1 to 10.
        input_dtype: of x, weights and the result: fp16, bf16 or fp32.
        n_chunks_max: the most chunks of columns in a call.

    Raises:
        InvalidArgument: on every rank, for a value that cannot work.
        RankDisagreement: ranks ask for different contexts.
        SymmetricMemoryFull: on every rank, if some rank has too little memory.
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
    """Allocate what ``run_moe_reduce_ar`` needs. Collective over ``tp_group`` (default: the world,
    else this process).

    Takes about six times M * ``hidden_dim`` elements on each rank, where M is the most tokens; or
    two, and twice ``world_size`` times up to 4 MB, whichever is more; and four times ``world_size``
    times up to 256 KB.

    Args:
        max_token_num: the most *routes*, tokens times ``topk``; any number of tokens.
        rank, world_size, local_world_size, hidden_dim, num_experts, topk, input_dtype,
            n_chunks_max: as of ``create_moe_rs_context``.

    Raises:
        InvalidArgument: on every rank, for a value that cannot work.
        RankDisagreement: ranks ask for different contexts.
        SymmetricMemoryFull: on every rank, if some rank has too little memory.
    """
    return create(
        MoEReduceARContext, rank, world_size, local_world_size, max_token_num, hidden_dim,
        num_experts, topk, input_dtype, n_chunks_max, tp_group,
    )  # fmt: skip
