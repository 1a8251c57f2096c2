"""AllGather-GEMM: ``C = all_gather(A) @ B`` with the transfer hidden behind the product.

Abstraction
    A tensor-parallel layer holds A sharded by rows, [M / W, K] on each of W ranks, and B by
    columns, [K, N / W]. Every rank needs all rows of A. Serial code gathers, then multiplies. Here
    a
    *producer* gathers shards by copy engine and sets a flag for each chunk of rows, while one
    *consumer* kernel, a GEMM over all tiles, waits for a tile's flags before it reads the tile's
    rows. The consumer begins with the own shard, which needs no transfer, and goes on in the order
    in which shards arrive.

Stream timeline of one call (W = 4, push)
    main stream   begin ─┬─ GEMM: own shard │ rank+1's │ rank+2's │ rank+3's ─┬─ finish
    copy stream          └─ shard → rank-1, flag │ → rank-2, flag │ → rank-3 ─┘
    ``begin`` is one block: it advances the epoch and sees that the peers have consumed the slot's
    last shards, two calls ago. ``finish`` is one block: it tells the peers that this rank has
    consumed. There is no barrier, no flag reset and no copy of the own shard in a push (a pull
    stages it, then a barrier).

Physics
    limit = max(GEMM alone, all-gather alone) + the time until the first flag. Copy engines use no
    SM, so the GEMM keeps all of them; they share memory bandwidth, which at K >= 4096 the GEMM
    leaves free.

Measured (H200, NVLink, multicast off, torch 2.11, Triton 3.6): docs/explanation/performance.md.

Vocabulary
    shard: the rows of one rank. chunk: the rows that share a flag. slot: one half of the double
    buffer.
    epoch: how often a slot was used; a flag that has reached it says that the chunk is there.

Built this way because
    * tiles that straddle two shards would need two sources: every shard is tiled on its own, and
    stores
      are clipped at its end;
    * a flattened tile loop loses its pipelining once a wait stands in it: loops are nested;
    * flags that are reset need a barrier between calls: epochs count up instead;
    * whatever a waiting full grid depends on must need no SM: flags are written by copy engine too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import triton

from triton_dist import tune
from triton_dist.errors import ContextFinalized, InvalidArgument, RankDisagreement
from triton_dist.kernels.common.gemm_launch import GatheredShards, sharded_gemm
from triton_dist.kernels.common.launch import Launch, fits_descriptor
from triton_dist.kernels.common.sharded_gemm import (
    kernel_gemm_persistent as kernel_consumer_gemm_persistent,
)
from triton_dist.kernels.nvidia import gemm
from triton_dist.kernels.nvidia.allgather import MAX_CHUNKS, AllGatherBuffer, AllGatherMethod
from triton_dist.kernels.nvidia.gemm import (
    gemm_non_persistent,
    gemm_persistent,
    get_config_space,
)
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for
from triton_dist.runtime.triton_compat import is_interpreting

__all__ = [
    "AllGatherGEMMTensorParallelContext",
    "ag_gemm",
    "ag_gemm_persistent",
    "create_ag_gemm_context",
    "gemm_non_persistent",
    "gemm_persistent",
    "kernel_consumer_gemm_persistent",
    "local_copy_and_barrier_all",
]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


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

    @property
    def buffer(self) -> AllGatherBuffer:
        if self._buffer is None:
            raise ContextFinalized(type(self).__name__)
        return self._buffer

    @property
    def symm_workspace(self) -> torch.Tensor:
        return self.buffer.workspace

    def own_rows(self, rows: int) -> torch.Tensor:
        """The part of ``symm_workspace`` that holds this rank's shard of ``rows`` rows."""
        return self.symm_workspace[self.rank * rows : (self.rank + 1) * rows]

    def barrier_all(self) -> None:
        """Line up all ranks on their current streams."""
        group_for(self._group).align()

    def finalize(self) -> None:
        """Free the symmetric memory; idempotent. Collective: it waits until every rank has
        come here."""
        if self._buffer is None:
            return
        buffer, self._buffer = self._buffer, None
        current_device().synchronize()
        group_for(self._group).barrier("finalize of the AllGather-GEMM context")
        buffer.free()

    def __enter__(self) -> AllGatherGEMMTensorParallelContext:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if failure is None:
            self.finalize()
        elif self._buffer is not None:  # peers may never come: free without them
            self._buffer.free()
            self._buffer = None


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


def _check(A: torch.Tensor, B: torch.Tensor, ctx: AllGatherGEMMTensorParallelContext) -> None:
    """Raise ``InvalidArgument`` (or ``ContextFinalized``) unless the call can work."""

    def refuse(argument: str, value: object, expected: str) -> InvalidArgument:
        return InvalidArgument("ag_gemm", argument, value, expected)

    buffer = ctx.buffer
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


def key_fn(
    A: torch.Tensor,
    B: torch.Tensor,
    ctx: AllGatherGEMMTensorParallelContext,
    *_: Any,
    **kwargs: Any,
) -> Any:
    """What a tuning is for. Of M the shard's rows count, in buckets: tiles belong to one shard. The
    tuner adds the ranks that tune together, which may be more than those of the context."""
    _check(A, B, ctx)
    return (
        tune.bucket(A.shape[0]),
        B.shape[1],
        ctx.K,
        A.dtype,
        _layout(B),
        ctx.num_ranks,
        kwargs.get("local_copy", True),
    )


def _layout(B: torch.Tensor) -> str:
    """What decides which kernel can serve B, and how."""
    if not fits_descriptor(B):
        return "strided"
    return "column-major" if B.stride(0) == 1 else "row-major"


def prune_fn(
    config: Mapping[str, Any], A: torch.Tensor, B: torch.Tensor, ctx: Any, *args: Any, **kwargs: Any
) -> bool:
    if ctx.num_ranks <= 2 and config.get("method") is AllGatherMethod.RING_PUSH_1D:
        return False  # with two ranks a ring is a full mesh
    return gemm.prune_fn(config, A, B, ctx)


def config_space() -> list[dict[str, Any]]:
    """Tiles and communication together; the first is the default.

    Every tile shape with the schedule that was best nearly everywhere on 4 H200 (push, one stream,
    one chunk), then every other schedule with the default tiles.
    """
    descriptors = current_device().prefers_descriptors
    tiles = [
        (config, persistent)
        for persistent in (descriptors, not descriptors)
        for config in get_config_space(persistent)
    ]
    schedules = [
        (AllGatherMethod.FULL_MESH_PUSH, 1, 2),
        (AllGatherMethod.FULL_MESH_PUSH, 2, 2),
        (AllGatherMethod.FULL_MESH_PUSH, 1, 4),
        (AllGatherMethod.FULL_MESH_PULL, 1, 1),
        (AllGatherMethod.FULL_MESH_PULL, 2, 2),
        (AllGatherMethod.RING_PUSH_1D, 1, 1),
        (AllGatherMethod.RING_PUSH_1D, 1, 4),
    ]
    default, persistent = tiles[0]
    return [_config(config, p, AllGatherMethod.FULL_MESH_PUSH, 1, 1) for config, p in tiles] + [
        _config(default, persistent, *schedule) for schedule in schedules
    ]


def _config(
    gemm_config: triton.Config,
    persistent: bool,
    method: AllGatherMethod,
    num_streams: int,
    num_chunks: int,
) -> dict[str, Any]:
    return {
        "gemm_config": gemm_config,
        "persistent": persistent,
        "method": method,
        "num_streams": num_streams,
        "num_chunks": num_chunks,
    }


def _consumer(
    own: torch.Tensor,
    B: torch.Tensor,
    ctx: AllGatherGEMMTensorParallelContext,
    gathered: GatheredShards,
    gemm_config: triton.Config,
    persistent: bool,
) -> tuple[torch.Tensor, Launch]:
    C = torch.empty(own.shape[0] * ctx.num_ranks, B.shape[1], dtype=own.dtype, device=own.device)
    launch = sharded_gemm(
        own, B, C, gemm_config,
        num_sms=current_device().num_sms, persistent=persistent,
        rank=ctx.rank, num_ranks=ctx.num_ranks, gathered=gathered if ctx.num_ranks > 1 else None,
    )  # fmt: skip
    return C, launch


def _prepare(
    A: torch.Tensor, B: torch.Tensor, ctx: Any, gemm_config: triton.Config, **kwargs: Any
) -> None:
    """Compile a candidate's consumer without launching anything."""
    own = A if kwargs.get("local_copy", True) else ctx.own_rows(A.shape[0])
    gathered = ctx.buffer.describe(A.shape[0], kwargs.get("num_chunks", 1))
    _consumer(own, B, ctx, gathered, gemm_config, kwargs.get("persistent", True))[1].compile()


def _recover(A: torch.Tensor, B: torch.Tensor, ctx: Any, *args: Any, **kwargs: Any) -> None:
    """Bring the context of all ranks back to one state after a candidate failed on some rank."""
    ctx.buffer.reset()


@tune.autotune(
    config_space=config_space,
    key_fn=key_fn,
    prune_fn=prune_fn,
    prepare_fn=_prepare,
    recover_fn=_recover,
    agree_fn=lambda A, *_, **__: f"A of {A.shape[0]} rows",
    version="1",  # another one when results that are shipped (records/) should not be used any more
)
def ag_gemm(
    A: torch.Tensor,
    B: torch.Tensor,
    ctx: AllGatherGEMMTensorParallelContext,
    gemm_config: triton.Config,
    persistent: bool = True,
    method: AllGatherMethod | None = None,
    num_streams: int = 1,
    num_chunks: int = 1,
    local_copy: bool = True,
    straggler_option: tuple[int, int] | None = None,
) -> torch.Tensor:
    """``all_gather(A) @ B`` over the ranks of ``ctx``; tuned over all ranks. Returns [M,
    N_per_rank].

    All ranks call alike. Calls may follow one another without synchronisation and be captured in a
    CUDA graph, which all ranks then replay equally often.

    Args:
        A: [M_per_rank, K], contiguous; not to be overwritten on other streams before the call is
        done.
        B: [K, N_per_rank], any strides; TMA serves unit stride in one dimension and multiples of 16
        bytes
            in the other, pointers the rest.
        ctx: from ``create_ag_gemm_context``; M_per_rank * num_ranks may be less than its max_M.
        gemm_config, persistent: tiles and kind of the consumer kernel (tuned).
        method, num_streams, num_chunks: how shards travel (tuned); default method: the context's.
        local_copy: False: the own rows are in ``ctx.symm_workspace``, A only says how many.
        straggler_option: (rank, cycles): that rank sleeps so long after its copies are queued, for
        tests.

    Raises:
        InvalidArgument, ContextFinalized: before anything is launched.
    """
    _check(A, B, ctx)
    if not 1 <= num_chunks <= MAX_CHUNKS:
        raise InvalidArgument("ag_gemm", "num_chunks", num_chunks, f"1 to {MAX_CHUNKS}")
    if num_streams < 1:
        raise InvalidArgument("ag_gemm", "num_streams", num_streams, "at least 1")
    if method is not None and not isinstance(method, AllGatherMethod):
        raise InvalidArgument("ag_gemm", "method", method, "an AllGatherMethod, or None")
    own = A if local_copy else ctx.own_rows(A.shape[0])
    gathered = ctx.buffer.start(own, method or ctx.all_gather_method, num_streams, num_chunks)
    if straggler_option is not None and straggler_option[0] == ctx.rank:
        current_device().sleep(straggler_option[1])
    try:
        C, consumer = _consumer(own, B, ctx, gathered, gemm_config, persistent)
        consumer.run()
    finally:  # also when the consumer failed: peers have this rank's shard and wait for its consent
        ctx.buffer.finish()
    return C


def ag_gemm_persistent(
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    rank: int,
    num_ranks: int,
    gathered: GatheredShards,
    gemm_config: triton.Config,
) -> torch.Tensor:
    """Launch the persistent consumer alone: ``C = concat(shards) @ B`` into C [M, N_per_rank].

    A: [M_per_rank, K], this rank's shard; ``gathered``: the others' rows and their flags.
    """
    launch = sharded_gemm(
        A, B, C, gemm_config, num_sms=current_device().num_sms, persistent=True,
        rank=rank, num_ranks=num_ranks, gathered=gathered,
    )  # fmt: skip
    launch.run()
    return C


def local_copy_and_barrier_all(A: torch.Tensor, ctx: AllGatherGEMMTensorParallelContext) -> None:
    """Copy A [M_per_rank, K] to the own rows of ``ctx.symm_workspace``, then line up all ranks."""
    ctx.own_rows(A.shape[0]).copy_(A.detach())
    ctx.barrier_all()
