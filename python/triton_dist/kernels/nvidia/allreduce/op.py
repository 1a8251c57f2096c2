"""All-reduce: the sum of a tensor over all ranks, on every rank.

Ways
    one shot    every rank sends all of x to all, and adds: one crossing of the link. For few bytes.
                For very few in packets, words that say by themselves that they have come: twice
                the bytes, but no flag behind them (``kernels/common/exchange/packets.py``).
    two shot    every rank gets the parts of its shard, adds, and sends the sum to all: two
                crossings, but 2 (W - 1) / W of the bytes instead of W - 1. For many.
    double tree each half of x is added up a binary tree and sent down it: every rank talks to at
                most four others, but in 2 floor(log2(W)) crossings, and sends up to twice x.
    collective  the group's own: NCCL, gloo on CPU ranks.
    Ours are one launch, without a barrier, and store to peers instead of reading from them: a store
    needs no answer. ``kernels/common/exchange/protocol.py`` says why that is right, of the trees
    ``kernels/common/exchange/tree_kernel.py``.

Numerics
    In one shot and two, parts travel as they are and are added in fp32 in the order of ranks; the
    sum is rounded once. So every rank has the same bits, and the same inputs give the same bits,
    whoever is late and whichever of the two is taken.
    In a double tree a rank adds its own part and those of its children in fp32 and rounds the sum,
    which travels on: floor(log2(W)) roundings on the way to the root. Every rank has the same bits,
    at every call, but of three ranks and more others than above.
    A collective adds as its library does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from triton_dist import tune
from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.collective import context as collective_context
from triton_dist.kernels.common.context import buffer_of
from triton_dist.kernels.common.exchange.buffer import Exchange, fits_vectors, shard_elements
from triton_dist.kernels.common.exchange.kernels import (
    kernel_all_reduce_one_shot,
    kernel_all_reduce_two_shot,
)
from triton_dist.kernels.common.exchange.packet_kernels import kernel_all_reduce_packets
from triton_dist.kernels.common.exchange.shapes import (
    DEFAULT_SHAPE,
    LARGE_SHAPES,
    PACKET_SHAPES,
    SMALL_SHAPES,
    Shape,
    is_worth_trying,
    shape_in,
    shape_of,
    tunables_of,
)
from triton_dist.kernels.common.exchange.tree_kernel import kernel_all_reduce_double_tree
from triton_dist.kernels.common.exchange.trees import role_of
from triton_dist.kernels.common.flags import folded
from triton_dist.kernels.common.op import tuned
from triton_dist.kernels.nvidia.allreduce.context import (
    ONE_SHOT_BYTES,
    PACKET_BYTES,
    TWO_SHOT_FROM,
    AllReduceContext,
    AllReduceMethod,
)
from triton_dist.runtime import waits
from triton_dist.runtime.device import current_device

_TREE_SHAPES = (
    SMALL_SHAPES[0],
    *(Shape(ctas, 8192) for ctas in (16, 64)),
    *(Shape(ctas, 16384, pieces) for ctas in (64, 128) for pieces in (4, 8)),
)
# Up to what size packets are the default of one shot, and how they are then laid out.
_PACKETS_UP_TO = 64 << 10
_PACKET_SHAPE = Shape(32, 2048)


def _check(
    x: torch.Tensor, ctx: AllReduceContext, output: torch.Tensor | None, method: object
) -> None:
    device = buffer_of(ctx, "all_reduce", "create_allreduce_ctx").device.torch_device
    collective_context.check_tensor("all_reduce", "x", x, device)
    if output is not None:
        collective_context.check_output("all_reduce", output, x, x.numel(), device)
    if method is not None and not isinstance(method, AllReduceMethod):
        raise InvalidArgument("all_reduce", "method", method, "an AllReduceMethod, or None")
    if method is not None and method.instead is not None:
        expected = f"{method.instead}: multicast and TMA reductions are not used"
        raise InvalidArgument("all_reduce", "method", method, expected)


def key_fn(
    x: torch.Tensor,
    ctx: AllReduceContext,
    output: torch.Tensor | None = None,
    method: AllReduceMethod | None = None,
    *_: Any,
    **__: Any,
) -> Any:
    """What a tuning is for. Elements count in buckets, whether vectors fit, and whether the sum
    replaces x, of which a library need not make a copy then."""
    _check(x, ctx, output, method)
    vectors = fits_vectors(x, x.numel())
    in_place = output is not None and output.data_ptr() == x.data_ptr()
    return tune.bucket(x.numel()), x.dtype, vectors, ctx.num_ranks, method, in_place


def prune_fn(
    config: Mapping[str, Any],
    x: torch.Tensor,
    ctx: AllReduceContext,
    output: torch.Tensor | None = None,
    method: AllReduceMethod | None = None,
    *_: Any,
    **__: Any,
) -> bool:
    algorithm = config["algorithm"]
    if ctx.num_ranks == 1:
        return algorithm is AllReduceMethod.ONE_SHOT and not config["packets"]
    if algorithm is None or (method is not None and algorithm is not method):
        return False
    if algorithm is AllReduceMethod.COLLECTIVE:
        # CPU ranks are there to run our kernels.
        return method is algorithm or current_device().has_libraries
    nbytes = x.nbytes
    if config["packets"] and nbytes > PACKET_BYTES:
        return False
    if method is None and not _may_win(algorithm, nbytes, ctx.num_ranks):
        return False
    return is_worth_trying(shape_in(config), -(-nbytes // _num_shards(algorithm, ctx.num_ranks)))


def _may_win(algorithm: AllReduceMethod, nbytes: int, num_ranks: int) -> bool:
    """Whether one of our ways may be faster than the others. Of two ranks, a double tree sends what
    two shots send; of more, few bytes take one crossing in one shot, and at least two in it."""
    if algorithm is AllReduceMethod.ONE_SHOT:
        return nbytes <= ONE_SHOT_BYTES
    return algorithm is not AllReduceMethod.DOUBLE_TREE or (
        num_ranks > 2 and nbytes >= TWO_SHOT_FROM
    )


def _num_shards(algorithm: AllReduceMethod, num_ranks: int) -> int:
    """Into how many shards, or halves, x is divided."""
    return {AllReduceMethod.ONE_SHOT: 1, AllReduceMethod.DOUBLE_TREE: 2}.get(algorithm, num_ranks)


def config_space() -> list[dict[str, Any]]:
    """The default, which goes by size; then every way with its shapes, then what torch brings."""
    space = [_config(None, DEFAULT_SHAPE)]
    space += [_config(AllReduceMethod.ONE_SHOT, shape, True) for shape in PACKET_SHAPES]
    space += [_config(AllReduceMethod.ONE_SHOT, shape, False) for shape in SMALL_SHAPES]
    space += [_config(AllReduceMethod.TWO_SHOT, shape) for shape in SMALL_SHAPES + LARGE_SHAPES]
    space += [_config(AllReduceMethod.DOUBLE_TREE, shape) for shape in _TREE_SHAPES]
    return [*space, _config(AllReduceMethod.COLLECTIVE, None)]


def _config(
    algorithm: AllReduceMethod | None, shape: Shape | None, packets: bool | None = None
) -> dict[str, Any]:
    return {"algorithm": algorithm, **tunables_of(shape), "packets": packets}


def prepare(
    x: torch.Tensor,
    ctx: AllReduceContext,
    output: torch.Tensor | None = None,
    method: AllReduceMethod | None = None,
    straggler_option: tuple[int, int] | None = None,
    algorithm: AllReduceMethod | None = None,
    num_ctas: int | None = None,
    block_bytes: int | None = None,
    num_pieces: int | None = None,
    packets: bool | None = None,
) -> None:
    """Compile a candidate's kernel without launching anything; of several launches, the first."""
    chosen = algorithm or method or _default_method(x.nbytes)
    if chosen is AllReduceMethod.COLLECTIVE or ctx.num_ranks == 1:
        return
    in_packets = _goes_in_packets(chosen, packets, x.nbytes)
    shape = _shape_of(chosen, num_ctas, block_bytes, num_pieces, in_packets)
    total = min(x.numel(), ctx.piece_elements(chosen, x.element_size(), in_packets))
    out = torch.empty_like(x) if output is None else output
    exchange = _exchange(chosen, total, x.numel(), ctx, shape, in_packets)
    ctx.buffer.launch(exchange, x, out).compile()


@tuned(
    config_space=config_space,
    key_fn=key_fn,
    prune_fn=prune_fn,
    prepare_fn=prepare,
    recover_fn=collective_context.recover,
    agree_fn=collective_context.exact_size,
    version="1",  # another one when results that are shipped (records/) should not be used any more
)
def all_reduce(
    x: torch.Tensor,
    ctx: AllReduceContext,
    output: torch.Tensor | None = None,
    method: AllReduceMethod | None = None,
    straggler_option: tuple[int, int] | None = None,
    algorithm: AllReduceMethod | None = None,
    num_ctas: int | None = None,
    block_bytes: int | None = None,
    num_pieces: int | None = None,
    packets: bool | None = None,
) -> torch.Tensor:
    """The sum of x over all ranks; tuned over all ranks. Returns ``output``, or a new tensor of x's
    shape.

    fp32 accumulation in the order of ranks, rounded once; in a double tree in the order of the
    tree, rounded at each node. The same bits on every rank and at every call (see the module).

    All ranks call alike. Calls may follow one another without synchronisation and be captured in a
    CUDA graph, which all ranks then replay equally often. On the device, calls with one context
    follow one another, whatever streams they are made on.

    Args:
        x: fp16, bf16 or fp32, contiguous, of any shape. 16 bytes move at a time where it begins on
            16 bytes and has a multiple of 16 elements.
        ctx: from ``create_allreduce_ctx``.
        output: where the sum goes, contiguous; may be x itself.
        method: the one to use; default: the tuned one, or without tuning one by size.
        straggler_option: (rank, cycles): that rank sleeps so long before it, for tests.
        algorithm: the method (tuned).
        num_ctas, block_bytes: programs, and bytes that one moves at a time, a power of two (tuned).
        num_pieces: in how many pieces a program's share travels, not in one shot (tuned).
        packets: whether one shot goes in packets, of up to 256 KB a launch; ``None``: by size
            (tuned).

    Raises:
        InvalidArgument, ContextFinalized: before anything is launched.
    """
    _check(x, ctx, output, method)
    if method is not None and algorithm is not None and method is not algorithm:
        raise InvalidArgument("all_reduce", "algorithm", algorithm, f"the method, {method}")
    chosen = algorithm or method or _default_method(x.nbytes)
    in_packets = _goes_in_packets(chosen, packets, x.nbytes)
    x = x.detach()
    in_place = output is not None and output.data_ptr() == x.data_ptr()
    # A candidate that is tried must leave x as it is, for the next one and for the call itself.
    spares_x = in_place and waits.limit_seconds() is not None
    sums = torch.empty_like(x) if output is None or spares_x else output
    ctx.sleep(straggler_option)
    if ctx.num_ranks == 1 or chosen is AllReduceMethod.COLLECTIVE:
        target = sums.detach()
        if not in_place:
            target.view(-1).copy_(x.view(-1))
        if ctx.num_ranks > 1:
            dist.all_reduce(target, group=ctx.group)
        return sums
    shape = _shape_of(chosen, num_ctas, block_bytes, num_pieces, in_packets)
    flat, flat_sums = x.view(-1), sums.detach().view(-1)
    step = ctx.piece_elements(chosen, x.element_size(), in_packets)
    for first in range(0, x.numel(), step):
        piece, piece_sums = flat[first : first + step], flat_sums[first : first + step]
        exchange = _exchange(chosen, piece.numel(), x.numel(), ctx, shape, in_packets)
        ctx.buffer.run(exchange, piece, piece_sums)
    return sums


def _default_method(nbytes: int) -> AllReduceMethod:
    return AllReduceMethod.ONE_SHOT if nbytes < TWO_SHOT_FROM else AllReduceMethod.TWO_SHOT


def _goes_in_packets(method: AllReduceMethod, packets: bool | None, nbytes: int) -> bool:
    if method is AllReduceMethod.ONE_SHOT:
        return nbytes <= _PACKETS_UP_TO if packets is None else packets
    if packets:
        raise InvalidArgument("all_reduce", "packets", packets, f"None or False for {method}")
    return False


def _shape_of(
    method: AllReduceMethod,
    num_ctas: int | None,
    block_bytes: int | None,
    num_pieces: int | None,
    in_packets: bool,
) -> Shape:
    pieces = 1 if method is AllReduceMethod.ONE_SHOT else num_pieces
    default = _PACKET_SHAPE if in_packets else DEFAULT_SHAPE
    return shape_of(num_ctas, block_bytes, pieces, default)


def _exchange(
    method: AllReduceMethod,
    total: int,
    of: int,
    ctx: AllReduceContext,
    shape: Shape,
    in_packets: bool,
) -> Exchange:
    """One launch, for ``total`` elements of a sum of ``of``."""
    size = folded(of // ctx.row_elements)
    if in_packets:
        return Exchange(kernel_all_reduce_packets, total, total, shape, size, 0, in_packets=True)
    if method is AllReduceMethod.ONE_SHOT:
        return Exchange(kernel_all_reduce_one_shot, total, total, shape, size)
    elements = shard_elements(-(-total // _num_shards(method, ctx.num_ranks)))
    if method is AllReduceMethod.TWO_SHOT:
        return Exchange(kernel_all_reduce_two_shot, elements, total, shape, size, phases=2)
    role = role_of(ctx.rank, ctx.num_ranks)
    return Exchange(
        kernel_all_reduce_double_tree, elements, total, shape, size, phases=2,
        sources=role.sources, arguments=role.arguments,
    )  # fmt: skip
