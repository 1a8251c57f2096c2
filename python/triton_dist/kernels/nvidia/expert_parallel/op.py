"""Expert parallelism on one host: dispatch tokens to the ranks of their experts, and combine.

Rank r of W owns the experts ``r * E / W`` to ``(r + 1) * E / W - 1``. ``ep_dispatch`` sends each
token to the ranks that own one of its experts, and returns the input of a grouped GEMM. A *route*
is one of the ``topk`` choices of a token. The *position* of a route is its index after sorting by
expert. ``ep_combine`` sends the products back to the token's rank, and sums them.

Timeline of a dispatch, one launch on every rank:
    ids, weights → all ranks │ flags
    wait until each peer has begun │ rows → ranks of the experts │ flags
                    wait for the ids │ positions of the routes   │ wait for rows

Design:
    * A rank receives a token once, even if the rank owns several of the token's experts. The
      grouped GEMM gathers rows by index. With 8 choices, copying a row for each choice would take
      longer than the transfer.
    * Each row of a source rank has a fixed place in the receive buffer, so the source can send rows
      without the counts of other ranks. Every rank receives the ids of all ranks, and
      computes positions while rows are sent.
    * The host reads no counts. Buffers have room for the worst routing or for the given capacity.
    * Each rank sums its products of a token in fp32, rounds the sum once and sends the sum as one
      row to the token's rank. The token's rank adds the rows in the order of ranks, so equal calls
      give equal bits.

Algorithms:
    * ``"push"``: a dispatch with the timeline above, or a combine in one launch. A combine polls
      the received words themselves instead of flags.
    * ``"packets"``: a dispatch that polls received words instead of flags, for few tokens.
    * ``"collective"``: all-gather and reduce-scatter of all rows by ``torch.distributed``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.moe.skew import SKEWS, skewed_ids
from triton_dist.kernels.common.op import op
from triton_dist.kernels.nvidia.expert_parallel.algorithms import DISPATCH, DispatchCall
from triton_dist.kernels.nvidia.expert_parallel.combine import COMBINE, CombineCall
from triton_dist.kernels.nvidia.expert_parallel.context import EPContext, Received
from triton_dist.runtime.device import current_device


def id_variants(*args: Any, **kwargs: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Yield replacements of ``topk_ids``, one for each skew or only for ``routing_skew``.

    For the argument ``input_variants_fn`` of the tuner.
    """
    call = DispatchCall(*args, **kwargs)
    ids, experts, skew = call.topk_ids, call.logical_experts, call.routing_skew
    if ids.shape[1] > experts or (skew is None and current_device().interprets):
        return  # times measured in the interpreter have no meaning
    for each in SKEWS if skew is None else (skew,):
        yield {"topk_ids": skewed_ids(ids, experts, each, call.ctx.rank)}


def combine_variants(
    y: torch.Tensor, received: Received, ctx: EPContext, *_: Any, **__: Any
) -> Iterator[dict[str, Any]]:
    """Yield replacements of ``y`` and ``received`` for the routings of ``id_variants``."""
    shape = received.tokens, received.position_of_route.shape[1]
    x, ids = y.new_empty((shape[0], ctx.hidden)), received.destinations.new_empty(shape)
    weights = None if received.weights is None else received.weights.new_ones(shape)
    limit, skew = received.max_tokens, received.routing_skew
    for variant in id_variants(x, ids, ctx, routing_skew=skew):
        call = DispatchCall(
            x, variant["topk_ids"], ctx, weights, max_tokens=limit, routing_skew=skew
        )
        variant_received = call.result()
        # Copy no rows, so that the rows of ``received`` in the context are not overwritten.
        call.launch_kernel(variant_received.layout, num_copy=0)
        rows = variant_received.num_positions()
        yield {"y": y.new_zeros((rows, ctx.hidden)), "received": variant_received}


@op(
    algorithms=DISPATCH,
    call=DispatchCall,
    key_sizes=("M",),
    input_variants_fn=id_variants,
    worst_input=True,  # minimise the time of the slowest variant
    version="1",  # change when the shipped results (records/) must no longer be used
)
def ep_dispatch(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    ctx: EPContext,
    topk_weights: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    quantise: bool = False,
    max_tokens: int | None = None,
    expert_map: torch.Tensor | None = None,
    alignment: int = 1,
    num_sms: int | None = None,
    routing_skew: str | None = None,
    num_ctas: int | None = None,
    block_bytes: int | None = None,
    algorithm: str | None = None,
    validated_key: Any = None,
) -> Received:
    """Send tokens to the ranks of their experts. Tuned over all ranks.

    The rules for calls are in the docstring of ``triton_dist.kernels.nvidia``. The host does not
    wait for the device. A captured graph can be replayed with other ids.

    Args:
        x: [tokens, hidden], contiguous. Ranks may have different numbers of tokens, 0 or more.
        topk_ids: int32 or int64 [tokens, topk], the experts of each token. An id of -1 means no
            expert.
        ctx: context of ``create_ep_context``.
        topk_weights: fp32, bf16 or fp16 [tokens, topk], for ``ep_combine`` or the grouped GEMM.
        x_scale: fp32 [tokens, hidden / 128], scales of an fp8 x, which are sent with x.
        quantise: whether to send x as ``float8_e4m3fn`` with one scale per 128 elements.
        max_tokens: maximum number of tokens of a rank, equal on all ranks; default: the
            ``max_tokens`` of the context.
        expert_map: int32 [logical experts, replicas]. A row has the physical experts of a logical
            id, then -1 for missing replicas. Tokens alternate between replicas.
        alignment: power of two, 1 to 256. The positions of each expert begin at a multiple of it.
        num_sms: maximum number of programs, at least 4, equal on all ranks.
        routing_skew: routing for which this op and ``ep_combine`` are tuned, ``"even"``, ``"zipf"``
            or ``"same_experts"``, equal on all ranks. By default, the time of the slowest of the
            three is minimised.
        num_ctas, block_bytes: number of programs that send rows, and bytes that a program copies at
            once (tuned).
        algorithm: ``"push"``, ``"packets"`` or ``"collective"`` (tuned; ``"push"`` if untuned).
        validated_key: reserved for the tuner, which passes the key that it has computed.

    Returns:
        The received rows, and the position of each route to an expert of this rank.

    Raises:
        InvalidArgument: an argument does not fit the context. For invalid ids and NaN weights, the
            next ``ctx.check()`` raises. The call ignores invalid ids.
        ContextFinalized: ``ctx`` was finalized.
        RankDisagreement: ranks pass different arguments (``EPContext.check``).
    """
    return DispatchCall(
        x, topk_ids, ctx, topk_weights, x_scale, quantise, max_tokens, expert_map, alignment,
        num_sms, routing_skew, num_ctas, block_bytes, algorithm, validated_key,
    ).run()  # type: ignore[return-value]  # fmt: skip


def ep_send(x: torch.Tensor, topk_ids: torch.Tensor, ctx: EPContext, **options: Any) -> Received:
    """Launch the first half of ``ep_dispatch``. Not tuned.

    ``wait()`` of the result launches the second half. Kernels that are launched between the halves
    overlap with the transfer. ``wait()`` must be called before the next call with ``ctx``.

    Args:
        x, topk_ids, ctx: see ``ep_dispatch``.
        options: other arguments of ``ep_dispatch``. The algorithm must be ``"push"``.
    """
    call = DispatchCall(x, topk_ids, ctx, **options)
    if call.chosen_algorithm.name != "push":
        raise InvalidArgument("ep_send", "algorithm", call.chosen_algorithm.name, "'push'")
    received = call.result()
    call.launch_kernel(received.layout, receive=False)
    await_send = ctx.device.record_event()

    def receive(*tensors: torch.Tensor) -> None:
        await_send(*tensors)
        call.launch_kernel(received.layout, send=False)

    ctx.pending, ctx.receive_pending = received, receive
    return received


@op(
    algorithms=COMBINE,
    call=CombineCall,
    key_sizes=("M",),
    input_variants_fn=combine_variants,
    worst_input=True,  # minimise the time of the slowest variant
    version="1",  # change when the shipped results (records/) must no longer be used
)
def ep_combine(
    y: torch.Tensor,
    received: Received,
    ctx: EPContext,
    apply_weights: bool = True,
    num_sms: int | None = None,
    num_ctas: int | None = None,
    block_bytes: int | None = None,
    num_chunks: int | None = None,
    algorithm: str | None = None,
    validated_key: Any = None,
) -> torch.Tensor:
    """Return the weighted sum of each token's products over its experts. Tuned over all ranks.

    Each rank sums its weighted products of a token in fp32 and rounds the sum to the dtype of y.
    The token's rank adds these sums in fp32 in the order of ranks, so equal calls give equal bits.
    The result of a token without experts is zero.

    Args:
        y: [at least ``received.num_positions()``, hidden], dtype of the context: the product at
            each position.
        received: result of ``ep_dispatch`` with ``ctx``.
        ctx: context of ``create_ep_context``.
        apply_weights: whether to multiply products by the ``topk_weights`` of the dispatch, if any.
        num_sms: maximum number of programs, at least 4, equal on all ranks.
        num_ctas, block_bytes: number of programs (at most 512), and bytes of a block, which a
            program copies at once (tuned).
        num_chunks: number of chunks into which the blocks of a program are divided (tuned). A
            program sends the next chunk before it waits for the peers' blocks of a chunk.
        algorithm: ``"push"`` or ``"collective"`` (tuned; ``"push"`` if untuned).
        validated_key: reserved for the tuner, which passes the key that it has computed.

    Returns:
        [tokens, hidden], dtype of the context.

    Raises:
        InvalidArgument: an argument does not fit the context. If y is too short, ``ctx.check()``
            raises.
        ContextFinalized: ``ctx`` was finalized.
        RankDisagreement: ranks pass different arguments (``EPContext.check``).
    """
    return CombineCall(
        y, received, ctx, apply_weights, num_sms, num_ctas, block_bytes, num_chunks, algorithm,
        validated_key,
    ).run()  # fmt: skip
