"""Context of AllGather-GEMM and the check of its operands."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from triton_dist.kernels.common.context import (
    Check,
    GEMMContext,
    ProductKey,
    agree_to_create,
    cached_after_checks,
    checked_buffer,
    dtype_checks,
    first_error,
    layout_of,
    operand_checks,
    operand_signature,
    tensor_checks,
)
from triton_dist.kernels.common.exchange.buffer import ExchangeBuffer, slot_bytes_for_shards
from triton_dist.kernels.common.gemm.launch import LazySplitWorkspace
from triton_dist.kernels.common.gemm.scales import (
    FP8,
    NO_SCALING,
    Scaling,
    describe_tag,
    num_scale_blocks,
)
from triton_dist.kernels.common.gemm.sharded import SplitWorkspace
from triton_dist.kernels.common.slots.gathered import AllGatherBuffer, AllGatherMethod
from triton_dist.runtime.launch import Launcher
from triton_dist.runtime.ranks import Group, process_group_of

MAX_GATHERED_BYTES = 32 << 20
"""Maximum bytes of the gathered A for an all-gather before the GEMM. On 2 H200, gathering 32 MB
takes 59 us. Longer transfers should overlap with the GEMM."""


class AllGatherGEMMTensorParallelContext(GEMMContext[AllGatherBuffer]):
    """Symmetric buffers and streams for ``ag_gemm`` with up to ``max_M`` rows. A context manager.

    Attributes:
        symm_workspace: symmetric tensor [max_M, K], which the caller may write. A call with
            ``local_copy=False`` reads this rank's rows of A from it. No other call uses it.
        all_gather_method: algorithm of calls with neither ``algorithm`` nor ``method``.
        exchange: memory of the all-gather in one launch.
        max_exchange_M: maximum M (sum of the rows of all ranks) that ``exchange`` can gather.
    """

    op_name = "AllGather-GEMM"

    def __init__(
        self,
        max_M: int,
        N: int,
        K: int,
        dtype: torch.dtype,
        num_local_ranks: int,
        group: dist.ProcessGroup | None,
        all_gather_method: AllGatherMethod,
    ) -> None:
        super().__init__(group)
        self.max_M, self.N, self.K, self.dtype = max_M, N, K, dtype
        self.all_gather_method = all_gather_method
        self.num_local_ranks = self.local_num_ranks = min(num_local_ranks, self.num_ranks)
        self.max_exchange_M = max_exchange_M(max_M, K, dtype, self.num_ranks)
        rows, scales_of_row = self.max_exchange_M // self.num_ranks, 0
        nbytes = slot_bytes_for_shards(rows * K, dtype, self.num_ranks)
        if dtype in FP8:  # the exchange gathers the scales after A
            scales_of_row = num_scale_blocks(K)
            nbytes = max(
                nbytes, slot_bytes_for_shards(rows * scales_of_row, torch.float32, self.num_ranks)
            )
        self.launcher = Launcher()
        with self.allocating() as add:
            describe = describe_tag if dtype in FP8 else int
            num_scales = max_M * scales_of_row
            buffer = AllGatherBuffer(max_M, K, dtype, group, "ag_gemm", num_scales, describe)
            self.buffer = add(buffer)
            disagreements, name = self.buffer.disagreements, "the exchange of ag_gemm"
            self.exchange = add(ExchangeBuffer(nbytes, group, name, disagreements=disagreements))
            self._lazy_split_workspace = add(LazySplitWorkspace())

    @property
    def symm_workspace(self) -> torch.Tensor:
        return self.buffer.workspace

    @property
    def split_workspace(self) -> SplitWorkspace:
        """Workspace for split-K, allocated at the first use."""
        return self._lazy_split_workspace.workspace

    def own_rows(self, rows: int) -> torch.Tensor:
        """Return this rank's rows of ``symm_workspace`` for shards of ``rows`` rows."""
        return self.symm_workspace[self.rank * rows : (self.rank + 1) * rows]


def create_ag_gemm_context(
    max_M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    rank: int,
    num_ranks: int,
    num_local_ranks: int = 8,
    *,
    group: Group = None,
    all_gather_method: AllGatherMethod = AllGatherMethod.FULL_MESH_PUSH,
) -> AllGatherGEMMTensorParallelContext:
    """Create the context of ``ag_gemm``. Collective over ``group``.

    Allocates 3 * ``max_M`` * K elements per rank, plus twice the rows that one launch gathers
    (at most 2 * 32 MB).

    Args:
        max_M: maximum M, the sum of the rows of A over all ranks; a multiple of ``num_ranks``.
        N: number of columns of B over all ranks, a multiple of ``num_ranks``.
        K: number of columns of A.
        dtype: dtype of A: fp16, bf16, fp32, or fp8 e4m3 or e5m2.
        rank: this rank in the group.
        num_ranks: number of ranks in the group.
        num_local_ranks: ranks on one host, clamped to ``num_ranks``.
        group: process group; default: the world, or this process alone.
        all_gather_method: algorithm of calls that pass neither ``algorithm`` nor ``method``.

    Returns:
        The context. Call ``finalize()`` or use ``with`` to free it.

    Raises:
        InvalidArgument: a value is out of range; raised on every rank.
        RankDisagreement: ranks pass different sizes or dtypes.
        SymmetricMemoryFull: a rank has too little memory; raised on every rank.
        DeviceUnavailable: CPU ranks whose kernels were not decorated for the interpreter.
    """
    group = process_group_of(group)

    def checks() -> Iterator[Check]:
        expected = f"a positive multiple of num_ranks = {num_ranks}"
        for name, size in (("max_M", max_M), ("N", N)):
            yield name, size, size >= num_ranks and size % num_ranks == 0, expected
        if dtype not in FP8:
            yield from dtype_checks("dtype", dtype)
        good = isinstance(all_gather_method, AllGatherMethod)
        yield "all_gather_method", all_gather_method, good, "an AllGatherMethod"

    agree_to_create(
        "create_ag_gemm_context", "an AllGather-GEMM", group, rank,
        {"num_ranks": num_ranks, "num_local_ranks": num_local_ranks},
        {"max_M": max_M, "N": N, "K": K}, checks(), dtype=dtype,
    )  # fmt: skip
    return AllGatherGEMMTensorParallelContext(
        max_M, N, K, dtype, num_local_ranks, group, all_gather_method
    )


def check_operands(
    A: torch.Tensor,
    B: torch.Tensor,
    ctx: AllGatherGEMMTensorParallelContext,
    local_copy: bool,
    gathered: torch.Tensor | None,
    scaling: Scaling = NO_SCALING,
) -> ProductKey:
    """Check the operands and return their tuning key. Equal calls get the same object."""
    buffer = checked_buffer(
        ctx, AllGatherGEMMTensorParallelContext, "ag_gemm", "create_ag_gemm_context"
    )

    def checks() -> Iterator[Check]:
        yield from tensor_checks(A=A, B=B)
        is_shard = A.ndim == 2 and A.shape[1] == ctx.K
        yield "A.shape", tuple(A.shape), is_shard, f"[M_per_rank, K = {ctx.K}]"
        expected = f"[M_per_rank, K = {ctx.K}] with at least one row"
        yield "A.shape", tuple(A.shape), A.shape[0] >= 1, expected
        M = A.shape[0] * buffer.num_ranks
        yield "M", M, ctx.max_M >= M, f"at most the context's max_M = {ctx.max_M}"
        shape = (ctx.K, ctx.N // buffer.num_ranks)
        expected = f"[K, N_per_rank] = {shape}"
        yield "B.shape", tuple(B.shape), tuple(B.shape) == shape, expected
        is_fp8, device = ctx.dtype in FP8, ctx.symm_workspace.device
        yield from operand_checks(ctx.dtype, device, A=A)
        yield from operand_checks(B.dtype if is_fp8 else ctx.dtype, device, B=B)
        expected = "a contiguous A; call A.contiguous()"
        yield "A.stride()", A.stride(), A.is_contiguous(), expected
        yield from scaling.checks(A, B)

    def make_key() -> ProductKey:
        M, N, num_ranks = A.shape[0] * buffer.num_ranks, B.shape[1], buffer.num_ranks
        key = ProductKey(M, N, ctx.K, A.dtype, layout_of(B), contiguous=True, num_ranks=num_ranks)
        return scaling.extend_key(key, A, B)

    signature = (*operand_signature(B, A, B), *scaling.signature(B))
    key = cached_after_checks(ctx.checked_keys, signature, "ag_gemm", checks, make_key)
    if gathered is not None:
        _check_gathered(gathered, A if local_copy else ctx.own_rows(A.shape[0]), ctx)
    return key


def _check_gathered(
    gathered: torch.Tensor, own: torch.Tensor, ctx: AllGatherGEMMTensorParallelContext
) -> None:
    """Check the output ``gathered``, which must not overlap this rank's shard ``own``."""

    def checks() -> Iterator[Check]:
        shape = (own.shape[0] * ctx.num_ranks, ctx.K)
        good = tuple(gathered.shape) == shape and gathered.is_contiguous()
        yield "gathered.shape", tuple(gathered.shape), good, f"[M, K] = {shape}, contiguous"
        yield from operand_checks(ctx.dtype, ctx.symm_workspace.device, gathered=gathered)
        begin, end = gathered.data_ptr(), gathered.data_ptr() + gathered.nbytes
        is_separate = own.data_ptr() + own.nbytes <= begin or end <= own.data_ptr()
        yield "gathered", "memory that overlaps the local rows", is_separate, "separate memory"

    try:
        error = first_error("ag_gemm", checks())
    except AttributeError:
        error = first_error("ag_gemm", tensor_checks(gathered=gathered))
    if error is not None:
        raise error


def max_exchange_M(max_M: int, K: int, dtype: torch.dtype, num_ranks: int) -> int:
    """Return the maximum M that one exchange launch gathers in a context for ``max_M`` rows."""
    if num_ranks == 1:  # nothing is gathered
        return max_M
    return min(max_M, MAX_GATHERED_BYTES // (K * dtype.itemsize)) // num_ranks * num_ranks
