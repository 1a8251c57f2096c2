"""What GEMM-ReduceScatter keeps between calls, and what it refuses."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from triton_dist.errors import ContextFinalized, InvalidArgument, RankDisagreement
from triton_dist.kernels.common.launch import fits_descriptor
from triton_dist.kernels.common.row_bucket import row_bucket
from triton_dist.kernels.nvidia.partials import PartialsBuffer
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for
from triton_dist.runtime.triton_compat import is_interpreting

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MOST_FORMS = 4096


class GEMMReduceScatterTensorParallelContext:
    """Symmetric memory for GEMM-ReduceScatters of up to ``max_M`` rows of ``N`` columns. A context
    manager.

    Attributes:
        output_dtype: of A, B, the parts that travel, and the output.
        reduce_st: whether a call that does not say adds its tiles to the owner's sum.
    """

    def __init__(
        self,
        max_M: int,
        N: int,
        output_dtype: torch.dtype,
        local_world_size: int,
        rs_stream: Any,
        reduce_st: bool,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.max_M, self.N, self.output_dtype = max_M, N, output_dtype
        self.reduce_st, self.group = reduce_st, group
        size = dist.get_world_size(group) if dist.is_initialized() else 1
        self._buffer: PartialsBuffer | None = PartialsBuffer(
            max_M // size, N, output_dtype, reduce_st, rs_stream, group, "gemm_rs"
        )
        self.rank, self.num_ranks = self._buffer.rank, self._buffer.num_ranks
        self.world_size = self.num_ranks
        self.local_world_size = min(local_world_size, self.num_ranks)
        self.device = current_device()
        # What was found to be good: checking takes several us, looking here less than one.
        self.accepted: dict[Any, tuple[Any, ...]] = {}

    @property
    def buffer(self) -> PartialsBuffer:
        if self._buffer is None:
            raise ContextFinalized(type(self).__name__)
        return self._buffer

    def barrier_all(self) -> None:
        """Line up all ranks on their current streams."""
        group_for(self.group).align()

    def finalize(self) -> None:
        """Free the symmetric memory; idempotent. Collective: it waits until every rank has
        come here."""
        if self._buffer is None:
            return
        buffer, self._buffer = self._buffer, None
        self.device.synchronize()
        group_for(self.group).barrier("finalize of the GEMM-ReduceScatter context")
        buffer.free()

    def __enter__(self) -> GEMMReduceScatterTensorParallelContext:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if failure is None:
            self.finalize()
        elif self._buffer is not None:  # peers may never come: free without them
            self._buffer.free()
            self._buffer = None


def create_gemm_rs_context(
    max_M: int,
    N: int,
    rank: int,
    world_size: int,
    local_world_size: int,
    output_dtype: torch.dtype,
    rs_stream: torch.cuda.Stream | None = None,
    reduce_st: bool = False,
    *,
    tp_group: dist.ProcessGroup | None = None,
) -> GEMMReduceScatterTensorParallelContext:
    """Allocate what ``gemm_rs`` needs. Collective over ``tp_group`` (default: the world, else this
    process).

    Takes about twice ``max_M * N`` elements on each rank, and as many again once slabs are pushed.

    Args:
        max_M: largest number of rows of A, a multiple of ``world_size``.
        N: columns of B.
        rank, world_size: this rank in the group, and the group's size.
        local_world_size: ranks on one host; clamped to ``world_size``, which must lie on one host.
        output_dtype: of A, B and the output: fp16, bf16 or fp32.
        rs_stream: where slabs are pushed from with ``fuse_scatter=False``; default: a stream of the
            context's own, of high priority.
        reduce_st: calls add tiles to an fp32 sum on the owner instead of keeping one part for each
            rank: less memory traffic in the end, twice as much between GPUs for 16-bit dtypes, and
            not deterministic. Allocates the sums; needed for ``gemm_rs(…, reduce_st=True)``.

    Raises:
        InvalidArgument: on every rank, for a value that cannot work.
        RankDisagreement: ranks ask for different contexts.
        SymmetricMemoryFull: on every rank, if some rank has too little memory.
    """
    ranks = group_for(tp_group)
    refusal = _refuse_context(
        max_M, N, rank, world_size, local_world_size, output_dtype, ranks.rank, ranks.size
    )
    asked = ranks.gather(
        "creation of a GEMM-ReduceScatter context",
        (max_M, N, str(output_dtype), bool(reduce_st), str(refusal or "")),
    )
    if refusal is not None:
        raise refusal
    if len(set(asked)) > 1:
        raise RankDisagreement(
            "max_M, N, output_dtype, reduce_st or validity of a GEMM-ReduceScatter context",
            dict(enumerate(asked)),
        )
    return GEMMReduceScatterTensorParallelContext(
        max_M, N, output_dtype, local_world_size, rs_stream, bool(reduce_st), tp_group
    )


def _refuse_context(
    max_M: int,
    N: int,
    rank: int,
    world_size: int,
    local_world_size: int,
    output_dtype: torch.dtype,
    own_rank: int,
    size: int,
) -> InvalidArgument | None:
    def refuse(argument: str, value: object, expected: str) -> InvalidArgument:
        return InvalidArgument("create_gemm_rs_context", argument, value, expected)

    if world_size != size:
        return refuse("world_size", world_size, f"{size}, the size of the group")
    if rank != own_rank:
        return refuse("rank", rank, f"{own_rank}, this process's rank in the group")
    if local_world_size < 1:
        return refuse("local_world_size", local_world_size, "at least 1")
    if max_M < size or max_M % size:
        return refuse("max_M", max_M, f"a positive multiple of world_size = {size}")
    if N < 1:
        return refuse("N", N, "at least 1")
    if output_dtype not in _DTYPES:
        expected = "torch.float16, torch.bfloat16 or torch.float32"
        return refuse("output_dtype", output_dtype, expected)
    if current_device().name == "cpu" and not is_interpreting():
        return refuse(
            "TRITON_INTERPRET", "unset", "1, set before kernels are imported, to run on CPU ranks"
        )
    return None


def check_operands(
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    ctx: GEMMReduceScatterTensorParallelContext,
) -> tuple[Any, ...]:
    """What a tuning depends on; one object for operands of the same looks.

    Raises:
        InvalidArgument, ContextFinalized: the call cannot work.
    """
    buffer = ctx.buffer
    looks = (
        A.shape, A.stride(), A.dtype, A.device, B.shape, B.stride(), B.dtype, B.device,
        B.data_ptr() % 16,
        bias is not None and (bias.shape, bias.stride(), bias.dtype, bias.device),
    )  # fmt: skip
    known = ctx.accepted.get(looks)
    if known is None:
        _refuse_operands(A, B, bias, ctx, buffer.slots.epoch.device)
        if len(ctx.accepted) >= _MOST_FORMS:
            ctx.accepted.clear()
        rows = row_bucket(A.shape[0] // ctx.num_ranks)
        known = ctx.accepted[looks] = (
            rows, ctx.N, A.shape[1], A.dtype, _layout(B), A.is_contiguous(), ctx.num_ranks,
        )  # fmt: skip
    return known


def _layout(B: torch.Tensor) -> str:
    """What decides which kernel can serve B, and how."""
    if not fits_descriptor(B):
        return "strided"
    return "column-major" if B.stride(0) == 1 else "row-major"


def _refuse_operands(
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    ctx: GEMMReduceScatterTensorParallelContext,
    device: torch.device,
) -> None:
    def refuse(argument: str, value: object, expected: str) -> InvalidArgument:
        return InvalidArgument("gemm_rs", argument, value, expected)

    if A.ndim != 2 or A.shape[1] < 1:
        raise refuse("A.shape", tuple(A.shape), "[M, K_per_rank]")
    if A.shape[0] < ctx.num_ranks or A.shape[0] % ctx.num_ranks:
        raise refuse("M", A.shape[0], f"a positive multiple of world_size = {ctx.num_ranks}")
    if A.shape[0] > ctx.max_M:
        raise refuse("M", A.shape[0], f"at most the context's max_M = {ctx.max_M}")
    if B.ndim != 2 or tuple(B.shape) != (A.shape[1], ctx.N):
        raise refuse("B.shape", tuple(B.shape), f"[K_per_rank, N] = {(A.shape[1], ctx.N)}")
    if bias is not None and tuple(bias.shape) != (ctx.N,):
        raise refuse("bias.shape", tuple(bias.shape), f"[N] = {(ctx.N,)}")
    if bias is not None and not bias.is_contiguous():
        raise refuse("bias.stride()", bias.stride(), "a contiguous bias; call bias.contiguous()")
    for name, tensor in (("A", A), ("B", B), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.dtype != ctx.output_dtype:
            raise refuse(f"{name}.dtype", tensor.dtype, f"the context's {ctx.output_dtype}")
        if tensor.device != device:
            raise refuse(f"{name}.device", tensor.device, f"the context's {device}")
