"""What AllGather-GEMM keeps between calls, and what it refuses."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from triton_dist.errors import ContextFinalized, InvalidArgument, RankDisagreement
from triton_dist.kernels.common.launch import Launcher, fits_descriptor
from triton_dist.kernels.common.row_bucket import row_bucket
from triton_dist.kernels.common.split_k import SplitWorkspace
from triton_dist.kernels.nvidia.allgather import AllGatherBuffer, AllGatherMethod
from triton_dist.kernels.nvidia.allgather_gemm_tiles import room_for_parts
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for
from triton_dist.runtime.triton_compat import is_interpreting

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MOST_FORMS = 4096


@dataclass(frozen=True, eq=False)
class Operands:
    """What a call's A and B look like to a context that accepts them; one object for the same
    looks."""

    key: tuple[Any, ...]
    """What a tuning depends on."""
    dtype: torch.dtype


class AllGatherGEMMTensorParallelContext:
    """Symmetric buffers and streams for AllGather-GEMMs of up to ``max_M`` rows. A context manager.

    Attributes:
        symm_workspace: symmetric [max_M, K]. Callers may write to it at any time; a call with
            ``local_copy=False`` reads the own rows of A from it, and nothing else ever uses it.
        all_gather_method: method of a call that names none.
    """

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
        self.max_M, self.N, self.K, self.dtype = max_M, N, K, dtype
        self.all_gather_method = all_gather_method
        self._group = group
        self._buffer: AllGatherBuffer | None = AllGatherBuffer(max_M, K, dtype, group, "ag_gemm")
        self.rank, self.num_ranks = self._buffer.rank, self._buffer.num_ranks
        self.num_local_ranks = self.local_num_ranks = min(num_local_ranks, self.num_ranks)
        self.device = current_device()
        self.launcher = Launcher()
        # What was found to be good: checking takes several us, looking here less than one.
        self.accepted: dict[Any, Operands] = {}
        with torch.inference_mode(False):
            # Now: zeros that are written in a capture would be there from its first replay on.
            _, counters = room_for_parts(self.device.num_sms)
            self._split_counters = torch.zeros(
                counters, dtype=torch.int32, device=self.device.torch_device
            )
        self.device.synchronize()  # calls may come on any stream

    @property
    def buffer(self) -> AllGatherBuffer:
        if self._buffer is None:
            raise ContextFinalized(type(self).__name__)
        return self._buffer

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self._group

    @property
    def symm_workspace(self) -> torch.Tensor:
        return self.buffer.workspace

    @functools.cached_property
    def collective_rows(self) -> torch.Tensor:
        """[max_M, K], what a collective gathers into; allocated at the first use, once."""
        with torch.inference_mode(False):
            return torch.empty(
                self.max_M, self.K, dtype=self.dtype, device=self.device.torch_device
            )

    @functools.cached_property
    def split_workspace(self) -> SplitWorkspace:
        """What tiles that are cut along K are added up in; allocated at the first use, once."""
        with torch.inference_mode(False):
            elements, _ = room_for_parts(self.device.num_sms)
            partials = torch.empty(elements, dtype=torch.float32, device=self.device.torch_device)
        return SplitWorkspace(partials, self._split_counters)

    def own_rows(self, rows: int) -> torch.Tensor:
        """The part of ``symm_workspace`` that holds this rank's shard of ``rows`` rows."""
        return self.symm_workspace[self.rank * rows : (self.rank + 1) * rows]

    def barrier_all(self) -> None:
        """Line up all ranks on their current streams."""
        group_for(self._group).align()

    def reset(self) -> None:
        """Bring all ranks back to the same state after a call that failed on some rank.
        Collective."""
        self.buffer.reset()
        self._split_counters.zero_()
        self.device.synchronize()

    def finalize(self) -> None:
        """Free the symmetric memory; idempotent. Collective: it waits until every rank has
        come here."""
        if self._buffer is None:
            return
        buffer, self._buffer = self._buffer, None
        self._forget_memory()
        current_device().synchronize()
        group_for(self._group).barrier("finalize of the AllGather-GEMM context")
        buffer.free()

    def _forget_memory(self) -> None:
        for name in ("split_workspace", "collective_rows"):
            self.__dict__.pop(name, None)

    def __enter__(self) -> AllGatherGEMMTensorParallelContext:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if failure is None:
            self.finalize()
        elif self._buffer is not None:  # peers may never come: free without them
            self._buffer.free()
            self._buffer = None
            self._forget_memory()


def create_ag_gemm_context(
    max_M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    rank: int,
    num_ranks: int,
    num_local_ranks: int = 8,
    *,
    group: dist.ProcessGroup | None = None,
    all_gather_method: AllGatherMethod = AllGatherMethod.FULL_MESH_PUSH,
) -> AllGatherGEMMTensorParallelContext:
    """Allocate what ``ag_gemm`` needs. Collective over ``group`` (default: the world, else this
    process).

    Args:
        max_M: largest number of gathered rows, a multiple of ``num_ranks``.
        N: global number of columns of B, a multiple of ``num_ranks``.
        K: columns of A.
        dtype: of A, B and C: fp16, bf16 or fp32.
        rank, num_ranks: this rank in the group, and the group's size.
        num_local_ranks: ranks on one host; clamped to ``num_ranks``, which must lie on one host.

    Raises:
        InvalidArgument: on every rank, for a value that cannot work.
        RankDisagreement: ranks ask for different contexts.
        SymmetricMemoryFull: on every rank, if some rank has too little memory.
        DeviceUnavailable: CPU ranks whose kernels were not decorated for the interpreter.
    """
    ranks = group_for(group)
    refusal = _refuse_context(max_M, N, K, dtype, rank, num_ranks, ranks.rank, ranks.size)
    asked = ranks.gather(
        "creation of an AllGather-GEMM context", (max_M, N, K, str(dtype), str(refusal or ""))
    )
    if refusal is not None:
        raise refusal
    if len(set(asked)) > 1:
        raise RankDisagreement(
            "max_M, N, K, dtype or validity of an AllGather-GEMM context", dict(enumerate(asked))
        )
    return AllGatherGEMMTensorParallelContext(
        max_M, N, K, dtype, num_local_ranks, group, all_gather_method
    )


def _refuse_context(
    max_M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    rank: int,
    num_ranks: int,
    own_rank: int,
    size: int,
) -> InvalidArgument | None:
    def refuse(argument: str, value: object, expected: str) -> InvalidArgument:
        return InvalidArgument("create_ag_gemm_context", argument, value, expected)

    if num_ranks != size:
        return refuse("num_ranks", num_ranks, f"{size}, the size of the group")
    if rank != own_rank:
        return refuse("rank", rank, f"{own_rank}, this process's rank in the group")
    if max_M < num_ranks or max_M % num_ranks:
        return refuse("max_M", max_M, f"a positive multiple of num_ranks = {num_ranks}")
    if num_ranks > N or N % num_ranks:
        return refuse("N", N, f"a positive multiple of num_ranks = {num_ranks}")
    if K < 1:
        return refuse("K", K, "at least 1")
    if dtype not in _DTYPES:
        return refuse("dtype", dtype, "torch.float16, torch.bfloat16 or torch.float32")
    if current_device().name == "cpu" and not is_interpreting():
        return refuse(
            "TRITON_INTERPRET", "unset", "1, set before kernels are imported, to run on CPU ranks"
        )
    return None


def check_operands(
    A: torch.Tensor, B: torch.Tensor, ctx: AllGatherGEMMTensorParallelContext
) -> Operands:
    """Raise ``InvalidArgument`` (or ``ContextFinalized``) unless the call can work."""
    buffer = ctx.buffer
    looks = (
        A.shape, A.stride(), A.dtype, A.device, B.shape, B.stride(), B.dtype, B.device,
        B.data_ptr() % 16,
    )  # fmt: skip
    known = ctx.accepted.get(looks)
    if known is None:
        _refuse_operands(A, B, ctx, buffer)
        if len(ctx.accepted) >= _MOST_FORMS:
            ctx.accepted.clear()
        key = (row_bucket(A.shape[0]), B.shape[1], ctx.K, A.dtype, _layout(B))
        known = ctx.accepted[looks] = Operands(key, A.dtype)
    return known


def _layout(B: torch.Tensor) -> str:
    """What decides which kernel can serve B, and how."""
    if not fits_descriptor(B):
        return "strided"
    return "column-major" if B.stride(0) == 1 else "row-major"


def _refuse_operands(
    A: torch.Tensor,
    B: torch.Tensor,
    ctx: AllGatherGEMMTensorParallelContext,
    buffer: AllGatherBuffer,
) -> None:
    def refuse(argument: str, value: object, expected: str) -> InvalidArgument:
        return InvalidArgument("ag_gemm", argument, value, expected)

    if A.ndim != 2 or A.shape[1] != ctx.K or A.shape[0] < 1:
        raise refuse("A.shape", tuple(A.shape), f"[M_per_rank, K = {ctx.K}]")
    if A.shape[0] * buffer.num_ranks > ctx.max_M:
        raise refuse(
            "M", A.shape[0] * buffer.num_ranks, f"at most the context's max_M = {ctx.max_M}"
        )
    if B.ndim != 2 or tuple(B.shape) != (ctx.K, ctx.N // buffer.num_ranks):
        raise refuse(
            "B.shape", tuple(B.shape), f"[K, N_per_rank] = {(ctx.K, ctx.N // buffer.num_ranks)}"
        )
    for name, matrix in (("A", A), ("B", B)):
        if matrix.dtype != ctx.dtype:
            raise refuse(f"{name}.dtype", matrix.dtype, f"the context's {ctx.dtype}")
        if matrix.device != ctx.symm_workspace.device:
            raise refuse(
                f"{name}.device", matrix.device, f"the context's {ctx.symm_workspace.device}"
            )
    if not A.is_contiguous():
        raise refuse("A.stride()", A.stride(), "a contiguous A; call A.contiguous()")
