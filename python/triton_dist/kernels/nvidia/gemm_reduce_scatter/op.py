"""GEMM-ReduceScatter: each rank's rows of ``sum over ranks of A @ B``, the transfer hidden behind
the product.

Abstraction
    A tensor-parallel layer ends with A sharded by columns, [M, K / W] on each of W ranks, and B by
    rows, [K / W, N]. Each rank's product is one addend of the whole, and each rank owns M / W rows
    of the sum. Serial code multiplies, then reduces and scatters. Here each finished tile travels
    to the rank that owns its rows while the next ones are computed.

Timeline of one call (W = 4), on every rank at once
    GEMM         rank+1's rows │ rank+2's │ rank+3's │ own rows, each tile + the peers' ─ finish
    fused         └ each tile → rank+1     └ → rank+2  └ → rank+3
    copy engine              └ chunks → rank+1 └ → rank+2 └ → rank+3
    ``fuse_scatter=True``: the program that computed a tile stores it into its owner's memory.
    ``False``: tiles stay here, and a copy engine pushes each slab, in ``num_chunks`` chunks, as
    their tiles are complete. Either way the program that computes an own tile waits until the peers
    have sent theirs, and adds them.
    ``exchange=True``, for few rows: the same launch as ``fuse_scatter=True`` would be short of work
    for most programs in the end. So all of them add, once all is multiplied; a tile has rows of
    several ranks, so that B is read once; and nothing comes before the kernel or behind it.
    ``serial=True``: ``torch.matmul``, then our reduce-scatter, where no tiles of ours fit well.

Numerics
    A tile is accumulated in fp32 (fp32 operands as ``torch.backends.cuda.matmul.allow_tf32`` says)
    and rounded once to the output's dtype, in which it travels; the own tile too. The W parts are
    added in fp32 in the order of ranks, the bias comes last, and the result is rounded once. Same
    operands and config: same bits, whoever is late. With ``reduce_st=True`` unrounded fp32 tiles
    are added in the order of their arrival: not deterministic. Serial: products are the library's,
    and the bias is added to the rounded sum. Vendor methods add as the vendor does.

Built this way because (more, with measurements: docs/explanation/gemm_reduce_scatter.md)
    * whoever waits has announced all its tiles for others before: no circle of waits;
    * a TMA store is not complete when the next instruction runs: ``publish_tile`` waits in full
      before the flag is set (Triton 3.6 does not), and comes when the next tile is computed;
    * parts are kept apart and not added on arrival: sums do not depend on who is late;
    * flags and slots take turns without a barrier, as those of the all-gather
      (``slots/epochs.py``).

Vocabulary
    slab: the rows that one rank owns. chunk: whole rows of tiles of a slab. part: one rank's
    addend of a slab. slot: one half of the double buffer of parts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.exchange.shapes import shape_of
from triton_dist.kernels.common.op import op
from triton_dist.kernels.common.scatter.calls import ExchangedCall, ScatteredCall
from triton_dist.kernels.common.scatter.launch import Scatter, tiles_of_slab
from triton_dist.kernels.common.scatter.partials import MAX_CHUNKS
from triton_dist.kernels.common.vendor import VendorMethod
from triton_dist.kernels.nvidia.gemm_reduce_scatter.context import (
    GEMMReduceScatterTensorParallelContext,
    check_operands,
)
from triton_dist.kernels.nvidia.gemm_reduce_scatter.ways import config_space, prune_fn
from triton_dist.kernels.nvidia.gemm_reduce_scatter.whole import (
    multiply_then_scatter,
    scatter_launch,
)


def key_fn(
    A: torch.Tensor,
    B: torch.Tensor,
    ctx: GEMMReduceScatterTensorParallelContext,
    *_: Any,
    bias: torch.Tensor | None = None,
    reduce_st: bool | None = None,
    **kwargs: Any,
) -> Any:
    """What a tuning is for. Of M the slab's rows count, in buckets: tiles belong to one slab."""
    return (*check_operands(A, B, bias, ctx), _adds(ctx, reduce_st))


def _adds(ctx: GEMMReduceScatterTensorParallelContext, reduce_st: bool | None) -> bool:
    if reduce_st and not ctx.reduce_st:
        raise InvalidArgument(
            "gemm_rs", "reduce_st", reduce_st, "a context that was created with reduce_st=True"
        )
    return ctx.reduce_st if reduce_st is None else bool(reduce_st)


def _scatter(fuse_scatter: bool, adds: bool) -> Scatter:
    if adds and not fuse_scatter:
        raise InvalidArgument("gemm_rs", "fuse_scatter", fuse_scatter, "True with reduce_st=True")
    return "add" if adds else "tile" if fuse_scatter else "slab"


def _prepare(
    A: torch.Tensor,
    B: torch.Tensor,
    ctx: Any,
    gemm_config: triton.Config | None,
    persistent: bool | None = True,
    fuse_scatter: bool | None = True,
    exchange: bool | None = False,
    num_chunks: int | None = 1,
    method: VendorMethod | None = None,
    bias: torch.Tensor | None = None,
    reduce_st: bool | None = None,
    serial: bool | None = False,
    num_ctas: int | None = None,
    block_bytes: int | None = None,
) -> None:
    """Compile a candidate's kernel without launching anything."""
    if serial:
        scatter_launch(A, B, ctx, shape_of(num_ctas, block_bytes, num_chunks)).compile()
    if method is not None or gemm_config is None:
        return
    if exchange:
        _exchanged(A, B, bias, ctx, gemm_config, persistent).launch().compile()
        return
    scatter = _scatter(bool(fuse_scatter), _adds(ctx, reduce_st))
    _scattered(A, B, bias, ctx, gemm_config, scatter, persistent, num_chunks or 1, None).compile()


def _recover(A: torch.Tensor, B: torch.Tensor, ctx: Any, *args: Any, **kwargs: Any) -> None:
    """Bring the context of all ranks back to one state after a candidate failed on some rank."""
    ctx.reset()


@op(
    config_space=config_space,
    key_fn=key_fn,
    prune_fn=prune_fn,
    prepare_fn=_prepare,
    recover_fn=_recover,
    agree_fn=lambda A, *_, **__: f"A of {A.shape[0]} rows",
    version="2",  # another one when results that are shipped (records/) should not be used any more
)
def gemm_rs(
    A: torch.Tensor,
    B: torch.Tensor,
    ctx: GEMMReduceScatterTensorParallelContext,
    gemm_config: triton.Config | None,
    persistent: bool | None = True,
    fuse_scatter: bool | None = True,
    exchange: bool | None = False,
    num_chunks: int | None = 1,
    method: VendorMethod | None = None,
    bias: torch.Tensor | None = None,
    reduce_st: bool | None = None,
    straggler_option: tuple[int, int] | None = None,
    serial: bool | None = False,
    num_ctas: int | None = None,
    block_bytes: int | None = None,
) -> torch.Tensor:
    """This rank's rows of ``sum over ranks of A @ B``, plus ``bias``; tuned over all ranks. Returns
    [M_per_rank, N], contiguous: rank r's are rows ``[r * M_per_rank, (r + 1) * M_per_rank)``.

    fp32 accumulation; parts are rounded to the dtype for the way and added in fp32 in the order of
    ranks, so the result is the same at every call, unless ``reduce_st`` or a vendor's method says
    otherwise (see the module).

    All ranks call alike. Calls may follow one another without synchronisation and be captured in a
    CUDA graph, which all ranks then replay equally often. On the device, calls with one context
    follow one another, whatever streams they are made on.

    Args:
        A: [M, K_per_rank], any strides; TMA serves contiguous ones, pointers the rest. M is a
            multiple of the number of ranks, at most the context's max_M.
        B: [K_per_rank, N], any strides; TMA serves unit stride in one dimension and multiples of 16
            bytes in the other, pointers the rest.
        ctx: from ``create_gemm_rs_context``.
        gemm_config, persistent: tiles and kind of the GEMM kernel (tuned); a vendor's method has
            none.
        fuse_scatter: the GEMM stores tiles to their owners; else a copy engine pushes slabs
            (tuned).
        exchange: with ``fuse_scatter``: one launch in which all programs add, once all is
            multiplied; for an M of up to the context's ``exchanged_rows`` (tuned).
        num_chunks: in which a slab is pushed, at most, with ``fuse_scatter=False``; of ``serial``,
            the pieces of the reduce-scatter (tuned).
        method: ``None``: as ``fuse_scatter`` says; else by torch (tuned).
        bias: [N], contiguous; this rank's is added once to each of its rows.
        reduce_st: tiles are added to one fp32 sum on their owner; default: the context's.
        straggler_option: (rank, cycles): that rank sleeps so long before its GEMM, for tests.
        serial: ``torch.matmul``, then our reduce-scatter, for an M of up to the context's
            ``exchanged_rows``; has no tiles (tuned).
        num_ctas, block_bytes: of that reduce-scatter (tuned).

    Raises:
        InvalidArgument, ContextFinalized: before anything is launched.
    """
    looks = check_operands(A, B, bias, ctx)
    adds = _adds(ctx, reduce_st)
    if isinstance(method, VendorMethod):
        ctx.sleep(straggler_option)
        return multiply_then_scatter(A, B, ctx, bias, method)
    if method is not None:
        raise InvalidArgument("gemm_rs", "method", method, "a VendorMethod, or None")
    num_chunks = 1 if num_chunks is None else num_chunks
    if not 1 <= num_chunks <= MAX_CHUNKS:
        raise InvalidArgument("gemm_rs", "num_chunks", num_chunks, f"1 to {MAX_CHUNKS}")
    if serial:
        _check_exchange("serial", A, ctx, fuse_scatter, adds)
        shape = shape_of(num_ctas, block_bytes, num_chunks)
        ctx.sleep(straggler_option)
        return multiply_then_scatter(A, B, ctx, bias, shape)
    if gemm_config is None:
        raise InvalidArgument("gemm_rs", "gemm_config", None, "a triton.Config without a method")
    if exchange and ctx.num_ranks > 1:
        _check_exchange("exchange", A, ctx, fuse_scatter, adds)
        ctx.sleep(straggler_option)
        exchanged = _exchanged(A, B, bias, ctx, gemm_config, persistent)
        return ctx.buffer.slots.beside(lambda: exchanged.run(looks))
    scatter = _scatter(bool(fuse_scatter), adds)
    buffer, rows = ctx.buffer, A.shape[0] // ctx.num_ranks
    tiles = tiles_of_slab(gemm_config, rows, ctx.N)
    pushes, awaited = None, False
    buffer.slots.take(A.shape[0], copied=scatter == "slab")
    ctx.sleep(straggler_option)
    try:
        call = _scattered(A, B, bias, ctx, gemm_config, scatter, persistent, num_chunks, looks)
        stream = ctx.device.current_stream()
        if scatter == "slab" and ctx.num_ranks > 1:
            pushes = buffer.pushes(rows, gemm_config, num_chunks)
            pushes.fork(stream)
        call.multiply()
        if pushes is not None:
            pushes.queue()  # before any other launch: a launch may wait for the GEMM to end
        call.add_left()
        awaited = True  # an own tile waits for each peer
    finally:
        if pushes is not None:  # what they wait for comes even if a wait in the kernel gave up
            pushes.join(stream)
        buffer.slots.finish(
            awaited, lambda: buffer.expected(num_chunks if scatter == "slab" else tiles)
        )
    return call.C


def _check_exchange(
    argument: str, A: torch.Tensor, ctx: Any, fuse_scatter: bool | None, adds: bool
) -> None:
    if adds or not fuse_scatter:
        expected = "False with reduce_st=True or fuse_scatter=False"
        raise InvalidArgument("gemm_rs", argument, True, expected)
    if A.shape[0] > ctx.exchanged_rows and ctx.num_ranks > 1:
        expected = f"False for an M of more than {ctx.exchanged_rows}"
        raise InvalidArgument("gemm_rs", argument, True, expected)


def _exchanged(
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    ctx: Any,
    gemm_config: triton.Config,
    persistent: bool | None,
) -> ExchangedCall:
    return ExchangedCall(A, B, bias, ctx.exchange, gemm_config, bool(persistent), to_owners=True)


def _scattered(
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    ctx: GEMMReduceScatterTensorParallelContext,
    gemm_config: triton.Config,
    scatter: Scatter,
    persistent: bool | None,
    num_chunks: int,
    looks: object,
) -> ScatteredCall:
    """The call in the present slot that is not one launch."""
    buffer = ctx.buffer
    return ScatteredCall(
        A, B, A.new_empty((A.shape[0] // ctx.num_ranks, ctx.N)), bias, gemm_config,
        buffer.describe(scatter), buffer.slots.launcher, bool(persistent), num_chunks, looks,
    )  # fmt: skip
