"""GEMM-AllReduce: ``sum over ranks of A @ B``, on every rank, the transfer hidden behind the
product.

Abstraction
    A tensor-parallel layer ends with A sharded by columns, [M, K / W] on each of W ranks, and B by
    rows, [K / W, N]. Each rank's product is one addend of the whole, which every rank needs. M is
    anything from 1 on: no rank owns anything that has to be of a size.

Ways, each a candidate
    one shot    each tile goes to all ranks as soon as it is multiplied; then every rank adds what
                has come. One crossing of the link, W - 1 times the bytes: for few rows (decode).
                For very few in packets, words that say by themselves that they have come: twice
                the bytes, but no flag behind them (``kernels/common/scatter/packets.py``).
    two shot    each tile goes to the owner of its rows, who adds it and sends the sum to all. Two
                crossings, 2 (W - 1) / W times the bytes: for many rows. With ``exchange`` in one
                launch, one after the other, by all programs: for rows in between.
    serial      ``torch.matmul``, then our all-reduce.
    collective  ``torch.matmul``, then the group's: what users have now.

Timeline of one call in two shots (W = 4, two chunks), on every rank at once
    GEMM      r+1's │ r+2's │ r+3's │ own │ r+1's │ r+2's │ r+3's │ own │ copy to C
    parts      └ → r+1 └ → r+2 └ → r+3     └ → r+1 └ → r+2 └ → r+3
    sums                               └ → all ─────────────────── └ → all
    Slabs of rows, one a rank, are cut in ``num_chunks`` chunks. With one, all sums travel in the
    last W-th of the GEMM; with more, those of a chunk travel while the next one is multiplied.

Numerics
    A tile is accumulated in fp32 (fp32 operands as ``torch.backends.cuda.matmul.allow_tf32`` says)
    and rounded once to the output's dtype, in which it travels; the own one too. The W parts are
    added in fp32 in the order of ranks, the bias comes last, and the sum is rounded once. One shot
    and two: the same bits on every rank and, for a config, at every call, whoever is late. Serial:
    products are the library's, their sum likewise; the bias is added to the rounded sum. The same
    on one rank, which has a plain product. A collective adds as its library does.

Built this way because (more: docs/explanation/gemm_all_reduce.md)
    * a wait is for tiles that peers have at earlier places of the order: no circle of waits;
    * parts are kept apart and not added on arrival: sums do not depend on who is late;
    * sums are copied to C by a launch of its own: ``copy_to_local=False`` spares it;
    * flags and slots take turns without a barrier: those of two shots as ``slots/epochs.py`` says;
      one shot is an exchange (``exchange/protocol.py``), one launch and nothing else, as few rows
      take few us.

Vocabulary
    slab: the rows that one rank adds. part: one rank's addend. slot: one half of the double buffer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import triton

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.op import tuned
from triton_dist.kernels.common.scatter.calls import ExchangedCall, TwoShotCall
from triton_dist.kernels.common.scatter.launch import slab_rows, tiles_of_slab
from triton_dist.kernels.common.scatter.partials import MAX_CHUNKS
from triton_dist.kernels.nvidia.allreduce import AllReduceMethod, all_reduce
from triton_dist.kernels.nvidia.allreduce import prepare as prepare_all_reduce
from triton_dist.kernels.nvidia.gemm_allreduce.context import (
    GEMMAllReduceMethod,
    GEMMAllReduceTensorParallelContext,
    check_operands,
)
from triton_dist.kernels.nvidia.gemm_allreduce.ways import config_space, prune_fn

# Bytes of the product from which on two shots are the default; which one is faster, tuning finds.
_TWO_SHOT_FROM = 1 << 20


def key_fn(
    A: torch.Tensor,
    B: torch.Tensor,
    ctx: GEMMAllReduceTensorParallelContext,
    *_: Any,
    bias: torch.Tensor | None = None,
    copy_to_local: bool = True,
    **__: Any,
) -> Any:
    """What a tuning is for; M in buckets."""
    return (*check_operands(A, B, bias, ctx), bool(copy_to_local))


def _prepare(
    A: torch.Tensor,
    B: torch.Tensor,
    ctx: Any,
    gemm_config: triton.Config | None,
    persistent: bool | None = True,
    method: GEMMAllReduceMethod | None = None,
    packets: bool | None = False,
    exchange: bool | None = False,
    num_chunks: int = 1,
    reduction: AllReduceMethod | None = None,
    num_ctas: int | None = None,
    block_bytes: int | None = None,
    bias: torch.Tensor | None = None,
    copy_to_local: bool = True,
) -> None:
    """Compile a candidate's kernels without launching anything; libraries have theirs."""
    method = method or _default_method(A, ctx)
    if method is GEMMAllReduceMethod.SERIAL:
        product = A.new_empty((A.shape[0], ctx.N))
        reducing = _reducing(reduction, num_ctas, block_bytes, num_chunks)
        prepare_all_reduce(product, ctx.reducer, **reducing)
    if method.is_whole or gemm_config is None or ctx.num_ranks == 1:
        return
    if method is GEMMAllReduceMethod.ONE_SHOT or exchange:
        call = _exchanged(A, B, bias, ctx, gemm_config, persistent, method, packets)
        call.launch().compile()
        return
    _two_shot(A, B, bias, ctx, gemm_config, persistent, num_chunks, copy_to_local, None).compile()


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
    version="2",  # another one when results that are shipped (records/) should not be used any more
)
def gemm_ar(
    A: torch.Tensor,
    B: torch.Tensor,
    ctx: GEMMAllReduceTensorParallelContext,
    gemm_config: triton.Config | None,
    persistent: bool | None = True,
    method: GEMMAllReduceMethod | None = None,
    packets: bool | None = False,
    exchange: bool | None = False,
    num_chunks: int = 1,
    reduction: AllReduceMethod | None = None,
    num_ctas: int | None = None,
    block_bytes: int | None = None,
    bias: torch.Tensor | None = None,
    copy_to_local: bool = True,
    straggler_option: tuple[int, int] | None = None,
) -> torch.Tensor:
    """``sum over ranks of A @ B``, plus ``bias``, on every rank; tuned over all ranks. Returns
    [M, N], contiguous.

    fp32 accumulation; parts are rounded to the dtype for the way and added in fp32 in the order of
    ranks: in one shot and in two the same bits on every rank and at every call (see the module).

    All ranks call alike. Calls may follow one another without synchronisation and be captured in a
    CUDA graph, which all ranks then replay equally often. On the device, calls with one context
    follow one another, whatever streams they are made on.

    Args:
        A: [M, K_per_rank], any strides; TMA serves contiguous ones, pointers the rest. Any M from 1
            to the context's max_M.
        B: [K_per_rank, N], any strides; TMA serves unit stride in one dimension and multiples of 16
            bytes in the other, pointers the rest.
        ctx: from ``create_gemm_ar_context``.
        gemm_config, persistent: tiles and kind of the GEMM kernel, in one shot and in two (tuned).
        method: ``None``: one shot or two, by size (tuned).
        packets: of one shot: whether tiles go in packets; for an M of up to the context's
            ``packet_rows`` (tuned).
        exchange: of two shots: both in one launch, the first once all is multiplied; for an M of up
            to the context's ``exchanged_rows`` (tuned).
        num_chunks: in which a slab is added and sent, at most, in two shots; of a serial call, the
            pieces of its all-reduce (tuned).
        reduction, num_ctas, block_bytes: of the all-reduce of a serial call (tuned).
        bias: [N], contiguous, the same on all ranks; added once.
        copy_to_local: ``False``: the result may be a view of the context's memory, which is valid
            until the call after the next one with this context begins; a copy is spared.
        straggler_option: (rank, cycles): that rank sleeps so long before its GEMM, for tests.

    Raises:
        InvalidArgument, ContextFinalized: before anything is launched.
    """
    looks = check_operands(A, B, bias, ctx)
    if method is not None and not isinstance(method, GEMMAllReduceMethod):
        raise InvalidArgument("gemm_ar", "method", method, "a GEMMAllReduceMethod, or None")
    if not 1 <= num_chunks <= MAX_CHUNKS:
        raise InvalidArgument("gemm_ar", "num_chunks", num_chunks, f"1 to {MAX_CHUNKS}")
    method = method or _default_method(A, ctx)
    _check_size(A, ctx, method, packets, exchange)
    if method.is_whole or ctx.num_ranks == 1:
        ctx.sleep(straggler_option)
        reducing = _reducing(reduction, num_ctas, block_bytes, num_chunks)
        return _whole(A, B, bias, ctx, method, reducing)
    if gemm_config is None:
        raise InvalidArgument("gemm_ar", "gemm_config", None, f"a triton.Config for {method}")
    if method is GEMMAllReduceMethod.ONE_SHOT or exchange:
        ctx.sleep(straggler_option)
        exchanged = _exchanged(A, B, bias, ctx, gemm_config, persistent, method, packets)
        return ctx.buffer.slots.beside(lambda: exchanged.run(looks))
    buffer, awaited = ctx.buffer, False
    tiles = tiles_of_slab(gemm_config, slab_rows(A.shape[0], ctx.num_ranks), ctx.N)
    buffer.slots.take(A.shape[0])
    ctx.sleep(straggler_option)
    try:
        call = _two_shot(A, B, bias, ctx, gemm_config, persistent, num_chunks, copy_to_local, looks)
        call.run()
        awaited = True  # an own tile waits for each peer
    finally:
        buffer.slots.finish(awaited, lambda: buffer.expected(tiles))
    return call.C


def _check_size(
    A: torch.Tensor,
    ctx: Any,
    method: GEMMAllReduceMethod,
    packets: bool | None,
    exchange: bool | None,
) -> None:
    M = A.shape[0]
    if method is GEMMAllReduceMethod.ONE_SHOT and ctx.one_shot_rows < M:
        most = f"an M of more than {ctx.one_shot_rows}: parts of 4 MB at most go to all"
        raise InvalidArgument("gemm_ar", "method", method, f"another one for {most}")
    if packets and method is not GEMMAllReduceMethod.ONE_SHOT:
        raise InvalidArgument("gemm_ar", "packets", packets, f"False for {method}")
    if packets and ctx.packet_rows < M:
        expected = f"False for an M of more than {ctx.packet_rows}"
        raise InvalidArgument("gemm_ar", "packets", packets, expected)
    if method is GEMMAllReduceMethod.TWO_SHOT and exchange and ctx.exchanged_rows < M:
        expected = f"False for an M of more than {ctx.exchanged_rows}"
        raise InvalidArgument("gemm_ar", "exchange", exchange, expected)


def _two_shot(
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    ctx: Any,
    gemm_config: triton.Config,
    persistent: bool | None,
    num_chunks: int,
    copy_to_local: bool,
    looks: object,
) -> TwoShotCall:
    """The call in the present slot whose tiles go to the owners of their rows."""
    buffer, M = ctx.buffer, A.shape[0]
    sums = buffer.sums(M)
    C = A.new_empty((M, ctx.N)) if copy_to_local else sums
    return TwoShotCall(
        A, B, C, bias, gemm_config, buffer.describe(), buffer.slots.launcher, bool(persistent),
        num_chunks, looks, sums, buffer.slots["sum_arrivals"].local,
    )  # fmt: skip


def _exchanged(
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    ctx: Any,
    gemm_config: triton.Config,
    persistent: bool | None,
    method: GEMMAllReduceMethod,
    packets: bool | None,
) -> ExchangedCall:
    """The call that is one launch."""
    two = method is GEMMAllReduceMethod.TWO_SHOT
    buffer = ctx.reducer.buffer
    return ExchangedCall(
        A, B, bias, buffer, gemm_config, bool(persistent), to_owners=two, pass_on=two,
        in_packets=bool(packets),
    )  # fmt: skip


def _whole(
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    ctx: GEMMAllReduceTensorParallelContext,
    method: GEMMAllReduceMethod,
    reduction: Mapping[str, Any],
) -> torch.Tensor:
    """A product by torch that is summed as a whole; ``reduction``: how, of a serial call."""
    A, B = A.detach(), B.detach()  # like ours, without a history for autograd

    def call() -> torch.Tensor:
        product = torch.matmul(A, B)
        if ctx.num_ranks == 1:
            return product
        if method is GEMMAllReduceMethod.COLLECTIVE:
            dist.all_reduce(product, group=ctx.group)
            return product
        total: torch.Tensor = all_reduce.fn(product, ctx.reducer, **reduction)
        return total

    C = ctx.buffer.slots.beside(call)
    return C if bias is None else C.add_(bias.detach())


def _reducing(
    reduction: AllReduceMethod | None,
    num_ctas: int | None,
    block_bytes: int | None,
    num_chunks: int,
) -> dict[str, Any]:
    """The tunables of a serial call as ``all_reduce`` knows them."""
    return {
        "algorithm": reduction,
        "num_ctas": num_ctas,
        "block_bytes": block_bytes,
        "num_pieces": num_chunks,
    }


def _default_method(A: torch.Tensor, ctx: Any) -> GEMMAllReduceMethod:
    few = A.shape[0] <= ctx.one_shot_rows
    if few and A.shape[0] * ctx.N * A.element_size() < _TWO_SHOT_FROM:
        return GEMMAllReduceMethod.ONE_SHOT
    return GEMMAllReduceMethod.TWO_SHOT
