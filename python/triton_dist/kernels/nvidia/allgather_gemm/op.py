"""AllGather-GEMM: ``C = all_gather(A) @ B`` with the transfer hidden behind the product.

Abstraction
    A tensor-parallel layer holds A sharded by rows, [M / W, K] on each of W ranks, and B by
    columns, [K, N / W]. Every rank needs all rows of A. Serial code gathers, then multiplies. Here
    a *producer* gathers shards by copy engine and sets a flag for each chunk of rows, while one
    *consumer* kernel, a GEMM over all tiles, waits for a tile's flags before it reads the tile's
    rows. The consumer begins with the own shard, which needs no transfer, and goes on in the order
    in which shards arrive.
    Small shards are pushed by the first programs of the consumer itself
    (``common/gemm/fused_push.py``). Of few rows, what hides the transfer may take longer than the
    transfer: then one launch gathers, and a library multiplies (``allgather_gemm/serial.py``).

Stream timeline of one call (W = 4, push)
    main stream   ─┬─ GEMM: own shard │ rank+1's │ rank+2's │ rank+3's ─┬─ finish
    copy stream    └─ shard → rank-1, flag │ → rank-2, flag │ → rank-3 ─┘
    ``finish`` is one block: it tells the peers that this rank has consumed their shards, and
    advances the epoch. There is no barrier, no flag reset and no copy of the own shard in a push (a
    pull stages it, then a barrier). In CUDA graphs, and where a call does not simply follow
    another, a block before the GEMM sees that the peers have consumed what the slot held last.

Host
    From the second call on, the launches and copies of a (shape, config, slot) lie ready as calls
    of the driver with all arguments but the addresses of A, B and C: benchmarks/bench_host_cost.py.

Fused
    Copies have a fixed cost, and a tile waits for the last of its rows: with small shards that is
    most of the call. ``FUSED_PUSH`` needs neither copy engines nor whole rows: the first programs
    of the GEMM send the shard in chunks along K, which tiles wait for inside their K loop
    (common/gemm/fused_push.py).

Physics
    limit = max(GEMM alone, all-gather alone) + the time until the first flag. Copy engines use no
    SM, so the GEMM keeps all of them; they share memory bandwidth, which at K >= 4096 the GEMM
    leaves free.

Measured (H200, NVLink, multicast off, torch 2.11, Triton 3.6): docs/explanation/performance.md.

Vocabulary
    shard: the rows of one rank. chunk: the rows that share a flag. slot: one half of the double
    buffer. epoch: how often a slot was used; a flag that has reached it says that the chunk is
    there.

Built this way because
    * tiles that straddle two shards would need two sources: every shard is tiled on its own, and
      stores are clipped at its end;
    * a flattened tile loop loses its pipelining once a wait stands in it: loops are nested;
    * flags that are reset need a barrier between calls: epochs count up instead;
    * whatever a waiting full grid depends on must need no SM: flags are written by copy engine too;
      or it must be on an SM first: in a fused method, programs of the lowest numbers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common import vendor
from triton_dist.kernels.common.exchange.shapes import Shape
from triton_dist.kernels.common.gemm.launch import sharded_gemm
from triton_dist.kernels.common.launch import Launch, dot_precision
from triton_dist.kernels.common.op import tuned
from triton_dist.kernels.common.shards import GatheredShards
from triton_dist.kernels.common.slots.gathered import MAX_CHUNKS, MAX_COMM_SMS, AllGatherMethod
from triton_dist.kernels.common.vendor import VendorMethod
from triton_dist.kernels.nvidia.allgather_gemm import serial
from triton_dist.kernels.nvidia.allgather_gemm.context import (
    AllGatherGEMMTensorParallelContext,
    Operands,
    check_operands,
)
from triton_dist.kernels.nvidia.allgather_gemm.ways import config_space, prune_fn
from triton_dist.runtime.device import current_device

_DEFAULT_COMM_SMS = 16


def key_fn(
    A: torch.Tensor,
    B: torch.Tensor,
    ctx: AllGatherGEMMTensorParallelContext,
    *_: Any,
    **kwargs: Any,
) -> Any:
    """What a tuning is for. Of M the shard's rows count, in buckets: tiles belong to one shard. The
    tuner adds the ranks that tune together, which may be more than those of the context."""
    return (
        *check_operands(A, B, ctx).key,
        ctx.num_ranks,
        kwargs.get("local_copy", True),
    )


def _comm_sms(
    method: AllGatherMethod, asked: int | None, ctx: AllGatherGEMMTensorParallelContext
) -> int:
    """Programs of the consumer that send; 0 where copy engines do.

    Raises:
        InvalidArgument: none would be left to multiply, or there are no flags for so many.
    """
    if not method.is_fused:
        return 0
    most = min(MAX_COMM_SMS, ctx.device.num_sms - 1)
    number = min(_DEFAULT_COMM_SMS, most) if asked is None else asked
    if not 1 <= number <= most:
        raise InvalidArgument("ag_gemm", "num_comm_sms", number, f"1 to {most}")
    return number


def _serial_shape(
    own: torch.Tensor, ctx: AllGatherGEMMTensorParallelContext, asked: int | None, num_chunks: int
) -> Shape:
    """How the all-gather of a serial call is launched.

    Raises:
        InvalidArgument: there are no flags for so many programs, or no room for so many rows.
    """
    shape = serial.shape_for(own.nbytes, asked, num_chunks)
    if own.shape[0] * ctx.num_ranks > ctx.exchanged_rows:
        expected = f"another one for an M of more than {ctx.exchanged_rows}"
        raise InvalidArgument("ag_gemm", "method", AllGatherMethod.SERIAL, expected)
    return shape


def _consumer(
    own: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    ctx: AllGatherGEMMTensorParallelContext,
    gathered: GatheredShards,
    gemm_config: triton.Config,
    persistent: bool,
) -> Launch:
    return sharded_gemm(
        own, B, C, gemm_config,
        num_sms=ctx.device.num_sms, persistent=persistent,
        rank=ctx.rank, num_ranks=ctx.num_ranks, gathered=gathered if ctx.num_ranks > 1 else None,
        split=ctx.split_workspace if gemm_config.kwargs.get("SPLIT_K", 1) > 1 else None,
    )  # fmt: skip


def _run_consumer(
    own: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    ctx: AllGatherGEMMTensorParallelContext,
    gathered: GatheredShards,
    gemm_config: triton.Config,
    persistent: bool,
    operands: Operands,
) -> None:
    """Launch the consumer; a call like one before only with other addresses."""
    precision = dot_precision(operands.dtype)
    ctx.launcher.run(
        (operands, own.stride(), precision, id(gathered), id(gemm_config), persistent),
        lambda: _consumer(own, B, C, ctx, gathered, gemm_config, persistent),
        {"own_ptr": own, "b_ptr": B, "c_ptr": C},
        alive=(gathered, gemm_config),
    )


def _empty_product(A: torch.Tensor, B: torch.Tensor, ctx: Any) -> torch.Tensor:
    return A.new_empty((A.shape[0] * ctx.num_ranks, B.shape[1]))


def _prepare(
    A: torch.Tensor, B: torch.Tensor, ctx: Any, gemm_config: triton.Config | None, **kwargs: Any
) -> None:
    """Compile a candidate's kernels without launching anything; libraries have theirs."""
    method = kwargs.get("method") or ctx.all_gather_method
    own = A if kwargs.get("local_copy", True) else ctx.own_rows(A.shape[0])
    num_comm_sms, num_chunks = kwargs.get("num_comm_sms"), kwargs.get("num_chunks", 1)
    if method is AllGatherMethod.SERIAL:
        shape = _serial_shape(own, ctx, num_comm_sms, num_chunks)
        if ctx.num_ranks > 1:
            rows = serial.gathered_like(own, ctx.exchange)
            serial.gather_launch(own, rows, ctx.exchange, shape).compile()
        return
    if isinstance(method, VendorMethod) or gemm_config is None:
        return
    senders = _comm_sms(method, num_comm_sms, ctx)
    gathered = ctx.buffer.describe(A.shape[0], num_chunks, senders)
    C = _empty_product(A, B, ctx)
    _consumer(own, B, C, ctx, gathered, gemm_config, kwargs.get("persistent", True)).compile()


def _recover(A: torch.Tensor, B: torch.Tensor, ctx: Any, *args: Any, **kwargs: Any) -> None:
    """Bring the context of all ranks back to one state after a candidate failed on some rank."""
    ctx.reset()


@tuned(
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
    gemm_config: triton.Config | None,
    persistent: bool | None = True,
    method: AllGatherMethod | VendorMethod | None = None,
    num_streams: int = 1,
    num_chunks: int = 1,
    local_copy: bool = True,
    straggler_option: tuple[int, int] | None = None,
    num_comm_sms: int | None = None,
) -> torch.Tensor:
    """``all_gather(A) @ B`` over the ranks of ``ctx``; tuned over all ranks. Returns [M,
    N_per_rank].

    All ranks call alike. Calls may follow one another without synchronisation and be captured in a
    CUDA graph, which all ranks then replay equally often. On the device, calls with one context
    follow one another, whatever streams they are made on.

    Args:
        A: [M_per_rank, K], contiguous; not to be overwritten on other streams before the call is
            done.
        B: [K, N_per_rank], any strides; TMA serves unit stride in one dimension and multiples of 16
            bytes in the other, pointers the rest.
        ctx: from ``create_ag_gemm_context``; M_per_rank * num_ranks may be less than its max_M.
        gemm_config, persistent: tiles and kind of the consumer kernel (tuned); ``SERIAL`` and a
            vendor's method have none.
        method, num_streams, num_chunks: how shards travel (tuned); default method: the context's.
            ``SERIAL`` is for an M of up to the context's ``exchanged_rows``.
        local_copy: False: the own rows are in ``ctx.symm_workspace``, A only says how many.
        straggler_option: (rank, cycles): that rank sleeps so long after its copies are queued, for
            tests; before the call of a library's product.
        num_comm_sms: SMs that send in ``FUSED_PUSH`` (tuned), whose chunks are along K and which
            has no streams; default 16. Programs of the all-gather in ``SERIAL``, whose chunks are
            pieces of a program's share; default: by size. No other method takes SMs.

    Raises:
        InvalidArgument, ContextFinalized: before anything is launched.
    """
    operands = check_operands(A, B, ctx)
    if not 1 <= num_chunks <= MAX_CHUNKS:
        raise InvalidArgument("ag_gemm", "num_chunks", num_chunks, f"1 to {MAX_CHUNKS}")
    if num_streams < 1:
        raise InvalidArgument("ag_gemm", "num_streams", num_streams, "at least 1")
    if method is None:
        method = ctx.all_gather_method
    own = A if local_copy else ctx.own_rows(A.shape[0])
    if method is AllGatherMethod.SERIAL:
        shape = _serial_shape(own, ctx, num_comm_sms, num_chunks)
        return _whole(own, B, ctx, shape, straggler_option)
    if isinstance(method, VendorMethod):
        return _whole(own, B, ctx, method, straggler_option)
    if not isinstance(method, AllGatherMethod):
        raise InvalidArgument(
            "ag_gemm", "method", method, "an AllGatherMethod, a VendorMethod, or None"
        )
    if gemm_config is None:
        raise InvalidArgument("ag_gemm", "gemm_config", None, f"a triton.Config for {method}")
    buffer, awaited, senders = ctx.buffer, False, _comm_sms(method, num_comm_sms, ctx)
    if senders:
        gathered = buffer.start_fused(A.shape[0], senders, num_chunks)
    else:
        gathered = buffer.start(own, method, num_streams, num_chunks)
    ctx.sleep(straggler_option)
    try:
        C = _empty_product(A, B, ctx)
        _run_consumer(own, B, C, ctx, gathered, gemm_config, bool(persistent), operands)
        awaited = True  # every peer has a tile that waits for what it sends
    finally:  # also when the consumer failed: peers have this rank's shard and wait for its consent
        buffer.finish(awaited)
    return C


def _whole(
    own: torch.Tensor,
    B: torch.Tensor,
    ctx: AllGatherGEMMTensorParallelContext,
    how: Shape | VendorMethod,
    straggler_option: tuple[int, int] | None,
) -> torch.Tensor:
    """The same with the product by a library; ``how``: that of our all-gather, or the vendor's.
    What is gathered into is no slot of the context's buffer: looking at the peers and telling them
    took 9 of 74 us at 64 rows (4 H200)."""
    ctx.sleep(straggler_option)
    own, B = own.detach(), B.detach()  # like ours, without a history for autograd
    if ctx.num_ranks == 1:
        return torch.matmul(own, B)

    def call() -> torch.Tensor:
        if how is VendorMethod.ASYNC_TP:
            return vendor.fused_all_gather_matmul(own, B, ctx.group)
        if how is VendorMethod.COLLECTIVE:
            rows = ctx.collective_rows[: own.shape[0] * ctx.num_ranks]
            vendor.all_gather_into(rows, own, ctx.group)
        else:
            rows = serial.gather(own, ctx.exchange, how)
        return torch.matmul(rows, B)

    return ctx.buffer.beside(call)


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
