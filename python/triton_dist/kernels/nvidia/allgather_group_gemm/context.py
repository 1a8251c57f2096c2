"""Context of AllGather + grouped GEMM and the check of its operands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import triton

from triton_dist.kernels.common.agreement import must_compare_calls
from triton_dist.kernels.common.context import (
    DTYPE_NAMES,
    DTYPES,
    Check,
    GEMMContext,
    agree_to_create,
    cached_after_checks,
    checked_buffer,
    int_checks,
    operand_checks,
    operand_signature,
    range_check,
    tensor_checks,
)
from triton_dist.kernels.common.exchange.buffer import ExchangeBuffer, slot_bytes_for_shards
from triton_dist.kernels.common.gemm.scales import FP8, NO_SCALING, Scaling, describe_tag
from triton_dist.kernels.common.moe.product import weights_layout
from triton_dist.kernels.common.moe.routing import MAX_EXPERTS, MAX_TOPK, check_ids
from triton_dist.kernels.common.moe.scales import packed_format
from triton_dist.kernels.common.slots.gathered import AllGatherBuffer
from triton_dist.runtime.ranks import Group, process_group_of

MAX_GATHERED_BYTES = 16 << 20
"""Maximum bytes of the gathered tensor for our all-gather in one launch. For larger tensors, an
all-gather that overlaps with the GEMM, or a library's, is faster."""
_TILE = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M")


class RoutedKey(NamedTuple):
    """Tuning key. The expert ids are not part of it."""

    M: int
    """Number of tokens of all ranks. One tuning serves a range of M."""
    N: int
    """Columns of this rank's weights."""
    K: int
    E: int
    topk: int
    dtype: torch.dtype
    layout: str
    """Memory layout of the weights."""
    num_ranks: int


class MoEAllGatherGroupGEMMTensorParallelContext(GEMMContext[AllGatherBuffer]):
    """Symmetric buffers and streams for ``ag_group_gemm`` with up to ``max_ntokens`` tokens.

    A context manager.

    Attributes:
        gemm_config: default tile sizes.
        exchange: memory of the all-gather in one launch.
        max_exchange_M: maximum M (sum of the tokens of all ranks) that ``exchange`` can gather.
    """

    op_name = "AllGather + grouped GEMM"

    def __init__(
        self,
        max_ntokens: int,
        N_per_rank: int,
        K: int,
        num_experts: int,
        topk: int,
        dtype: torch.dtype,
        num_local_ranks: int,
        gemm_config: triton.Config,
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(group)
        self.max_ntokens, self.N_per_rank, self.K = max_ntokens, N_per_rank, K
        self.num_experts, self.topk, self.dtype = num_experts, topk, dtype
        self.num_local_ranks, num_ranks = min(num_local_ranks, self.num_ranks), self.num_ranks
        self.gemm_config, self.compares_ids = gemm_config, must_compare_calls()
        packed_columns, packed_dtype = packed_format(K, dtype)
        max_rows = MAX_GATHERED_BYTES // (packed_columns * packed_dtype.itemsize)
        rows_per_rank = min(max_ntokens, max_rows) // num_ranks
        self.max_exchange_M = rows_per_rank * num_ranks if num_ranks > 1 else 0
        nbytes = slot_bytes_for_shards(rows_per_rank * packed_columns, packed_dtype, num_ranks)
        with self.allocating() as add:
            rows = AllGatherBuffer(
                max_ntokens, packed_columns, packed_dtype, group, "ag_group_gemm",
                describe_tag=describe_tag if dtype in FP8 else int,
            )  # fmt: skip
            self.buffer = add(rows)
            disagreements, name = self.buffer.disagreements, "the exchange of ag_group_gemm"
            self.exchange = add(ExchangeBuffer(nbytes, group, name, disagreements=disagreements))


def create_ag_group_gemm_context(
    max_ntokens: int,
    N_per_rank: int,
    K: int,
    num_experts: int,
    topk: int,
    dtype: torch.dtype,
    rank: int,
    num_ranks: int,
    num_local_ranks: int = 8,
    ag_intranode_stream: Any = None,
    ag_internode_stream: Any = None,
    BLOCK_SIZE_M: int = 128,
    BLOCK_SIZE_N: int = 256,
    BLOCK_SIZE_K: int = 64,
    GROUP_SIZE_M: int = 8,
    stages: int = 3,
    num_warps: int = 8,
    *,
    group: Group = None,
) -> MoEAllGatherGroupGEMMTensorParallelContext:
    """Create the context of ``ag_group_gemm``. Collective over ``group``.

    Allocates 3 * ``max_ntokens`` * K elements per rank, plus twice the rows that one launch gathers
    (at most 2 * 16 MB).

    Args:
        max_ntokens: maximum M, the sum of the tokens of all ranks; a multiple of ``num_ranks``.
        N_per_rank: number of columns of this rank's weights.
        K: number of columns of a token.
        num_experts: number of experts, 1 to 512.
        topk: experts per token, 1 to 10.
        dtype: dtype of tokens and weights: fp16, bf16, fp32 or ``torch.float8_e4m3fn``.
        rank, num_ranks, num_local_ranks: this rank in the group, and the numbers of ranks of the
            group and of one host.
        ag_intranode_stream, ag_internode_stream: ignored; the context creates its streams.
        BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, GROUP_SIZE_M, stages, num_warps: tile sizes of
            calls without ``gemm_config`` that are not tuned.
        group: process group; default: the world, or this process alone.

    Returns:
        The context. Call ``finalize()`` or use ``with`` to free it.

    Raises:
        InvalidArgument, RankDisagreement, SymmetricMemoryFull: see ``create_ag_gemm_context``.
    """
    group = process_group_of(group)
    tile = dict(zip(_TILE, (BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, GROUP_SIZE_M), strict=True))

    def checks() -> Iterator[Check]:
        yield from int_checks(**tile, stages=stages, num_warps=num_warps)
        expected = f"a positive multiple of num_ranks = {num_ranks}"
        fits = max_ntokens >= num_ranks and max_ntokens % num_ranks == 0
        yield "max_ntokens", max_ntokens, fits, expected
        yield "GROUP_SIZE_M", GROUP_SIZE_M, GROUP_SIZE_M >= 1, "at least 1"
        yield range_check(MAX_EXPERTS, "num_experts", num_experts)
        yield range_check(MAX_TOPK, "topk", topk)
        has_kernel = dtype in (*DTYPES, torch.float8_e4m3fn)
        yield "dtype", dtype, has_kernel, f"{DTYPE_NAMES}, or torch.float8_e4m3fn"
        for name in _TILE[:3]:
            size = tile[name]
            is_power = 16 <= size <= 256 and size & (size - 1) == 0
            yield name, size, is_power, "a power of two from 16 to 256"
        yield range_check(8, "stages", stages)
        yield "num_warps", num_warps, num_warps in (1, 2, 4, 8, 16), "1, 2, 4, 8 or 16"

    sizes = {
        "max_ntokens": max_ntokens, "N_per_rank": N_per_rank, "K": K, "num_experts": num_experts,
        "topk": topk,
    }  # fmt: skip
    agree_to_create(
        "create_ag_group_gemm_context", "an AllGather + grouped GEMM", group, rank,
        {"num_ranks": num_ranks, "num_local_ranks": num_local_ranks}, sizes, checks(), dtype=dtype,
        **{"comparison of ids": must_compare_calls()},
    )  # fmt: skip
    gemm_config = triton.Config(tile, num_warps=num_warps, num_stages=stages)
    return MoEAllGatherGroupGEMMTensorParallelContext(
        max_ntokens, N_per_rank, K, num_experts, topk, dtype, num_local_ranks, gemm_config, group
    )


def check_operands(
    a: torch.Tensor,
    b: torch.Tensor,
    ctx: MoEAllGatherGroupGEMMTensorParallelContext,
    full_topk_ids: torch.Tensor,
    scaling: Scaling = NO_SCALING,
) -> RoutedKey:
    """Check the operands and return their key, which is a ``ScaledKey`` for fp8 operands."""
    buffer = checked_buffer(
        ctx,
        MoEAllGatherGroupGEMMTensorParallelContext,
        "ag_group_gemm",
        "create_ag_group_gemm_context",
    )

    def checks() -> Iterator[Check]:
        yield from tensor_checks(a=a, b=b, full_topk_ids=full_topk_ids)
        expected = f"[M_per_rank, K = {ctx.K}] with at least one row"
        good = a.ndim == 2 and a.shape[1] == ctx.K and a.shape[0] >= 1
        yield "a.shape", tuple(a.shape), good, expected
        M = a.shape[0] * buffer.num_ranks
        expected = f"at most the context's max_ntokens = {ctx.max_ntokens}"
        yield "M", M, ctx.max_ntokens >= M, expected
        shape = (ctx.num_experts, ctx.K, ctx.N_per_rank)
        yield "b.shape", tuple(b.shape), tuple(b.shape) == shape, f"[E, K, N_per_rank] = {shape}"
        is_fp8 = ctx.dtype in FP8 and a.dtype in FP8  # a may also be e5m2
        yield from operand_checks(a.dtype if is_fp8 else ctx.dtype, buffer.workspace.device, a=a)
        yield from operand_checks(ctx.dtype, buffer.workspace.device, b=b)
        expected = "a contiguous a; call a.contiguous()"
        yield "a.stride()", a.stride(), a.is_contiguous(), expected
        ids, wanted = tuple(full_topk_ids.shape), (M, ctx.topk)
        yield "full_topk_ids.shape", ids, ids == wanted, f"[M, topk] = {wanted}, M over all ranks"
        device = full_topk_ids.device
        yield "full_topk_ids.device", device, device == a.device, f"the device of a, {a.device}"
        yield from scaling.checks(a, b, "a", "b")

    def make_key() -> RoutedKey:
        check_ids("ag_group_gemm", full_topk_ids, ctx.num_experts, "full_topk_ids")
        M, (E, K, N) = full_topk_ids.shape[0], b.shape
        unscaled_key = RoutedKey(M, N, K, E, ctx.topk, a.dtype, weights_layout(b), buffer.num_ranks)
        return scaling.extend_key(unscaled_key, a, b)

    signature = (*operand_signature(b, a, b, full_topk_ids), *scaling.signature(b))
    return cached_after_checks(ctx.checked_keys, signature, "ag_group_gemm", checks, make_key)
