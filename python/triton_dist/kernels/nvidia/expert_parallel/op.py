"""Expert parallelism on one host: dispatch tokens to the ranks of their experts, and combine.

Rank r of W owns the experts ``r * E / W`` to ``(r + 1) * E / W - 1``. ``ep_dispatch`` sends each
token to the ranks that own one of its experts, and returns the input of a grouped GEMM. A *route*
is one of the ``topk`` choices of a token; its *position* is its index after sorting by expert.
``ep_combine`` sends the products back and sums them on the token's rank.

Timeline of a dispatch, one launch on every rank:
    ids, weights → all ranks │ flags
    wait until each peer has begun │ rows → ranks of the experts │ flags
                    wait for the ids │ positions of the routes   │ wait for rows

Design:
    * A rank receives a token once, even if it owns several of the token's experts. The grouped GEMM
      gathers rows by index. With 8 choices, copying a row for each choice would take longer than
      the transfer.
    * Each source row has a fixed place in the receive buffer, so rows travel without counts. Every
      rank receives the ids of all ranks and computes positions while rows travel.
    * The host reads no counts. Buffers have room for the worst routing or the given capacity.
    * An expert's rank sums the products of a token in fp32 and rounds once. One row per token and
      rank travels back. The source adds them in the order of ranks, so equal calls give equal bits.

Algorithms:
    * ``"push"``: the timeline above. In a combine, also one launch, words mark their own arrival.
    * ``"packets"``: a dispatch in which words mark their own arrival, for few tokens.
    * ``"collective"``: NCCL all-gather and reduce-scatter of all rows.
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
    """Yield calls with ids of each skew, or only of ``routing_skew`` (``input_variants_fn``)."""
    call = DispatchCall(*args, **kwargs)
    ids, experts, skew = call.topk_ids, call.logical_experts, call.routing_skew
    if ids.shape[1] > experts or (skew is None and current_device().interprets):
        return  # times of the interpreter mean nothing
    for each in SKEWS if skew is None else (skew,):
        yield {"topk_ids": skewed_ids(ids, experts, each, call.ctx.rank)}


def combine_variants(
    y: torch.Tensor, received: Received, ctx: EPContext, *_: Any, **__: Any
) -> Iterator[dict[str, Any]]:
    """Yield calls with the routings of ``id_variants`` (``input_variants_fn``)."""
    shape = received.tokens, received.position_of_route.shape[1]
    x, ids = y.new_empty((shape[0], ctx.hidden)), received.destinations.new_empty(shape)
    weights = None if received.weights is None else received.weights.new_ones(shape)
    limit, skew = received.max_tokens, received.routing_skew
    for variant in id_variants(x, ids, ctx, routing_skew=skew):
        call = DispatchCall(
            x, variant["topk_ids"], ctx, weights, max_tokens=limit, routing_skew=skew
        )
        other = call.result()
        call.launch_kernel(other.layout, True, True, copies=0)  # keeps the received rows
        yield {"y": y.new_zeros((other.num_positions(), ctx.hidden)), "received": other}


@op(
    algorithms=DISPATCH,
    call=DispatchCall,
    key_sizes=("M",),
    input_variants_fn=id_variants,
    worst_input=True,
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
    accepted_key: Any = None,
) -> Received:
    """Send tokens to the ranks of their experts; tuned over all ranks.

    The rules for calls are in the docstring of ``triton_dist.kernels.nvidia``. The host does not
    wait, and a captured graph serves any ids.

    Args:
        x: [tokens, hidden], contiguous. Ranks may have different numbers of tokens, also 0.
        topk_ids: [tokens, topk], int32 or int64: experts of each token; -1 is masked.
        ctx: context of ``create_ep_context``.
        topk_weights: [tokens, topk], fp32, bf16 or fp16, for ``ep_combine`` or the grouped GEMM.
        x_scale: fp32 [tokens, hidden / 128], scales of an fp8 x, which travel with it.
        quantise: send x as ``float8_e4m3fn`` with one scale per 128 elements.
        max_tokens: largest number of tokens of any rank, equal on all ranks; default: the
            context's.
        expert_map: int32 [logical experts, replicas], physical experts of each logical id, then -1
            for missing replicas. Tokens alternate between replicas.
        alignment: the positions of each expert begin at a multiple of this power of two, 1 to 256.
        num_sms: largest number of programs, at least 4; equal on all ranks.
        routing_skew: routing for which this op and ``ep_combine`` are tuned: ``"even"``, ``"zipf"``
            or ``"same_experts"``. The default minimises the slowest of the three. Equal on all
            ranks.
        num_ctas, block_bytes: programs that send rows, and bytes that each moves at a time (tuned).
        algorithm: ``"push"`` (default), ``"packets"`` or ``"collective"`` (tuned).
        accepted_key: reserved for the tuner.

    Returns:
        The received rows, and the position of each route to an expert of this rank.

    Raises:
        InvalidArgument: an argument does not fit the context. Invalid ids and NaN weights do not
            raise here: the call masks invalid ids, and the next ``ctx.check()`` raises.
        ContextFinalized: ``ctx`` was finalized.
        RankDisagreement: ranks pass different arguments (``EPContext.check``).
    """
    return DispatchCall(
        x, topk_ids, ctx, topk_weights, x_scale, quantise, max_tokens, expert_map, alignment,
        num_sms, routing_skew, num_ctas, block_bytes, algorithm, accepted_key,
    ).start(receive=True)  # fmt: skip


def ep_send(x: torch.Tensor, topk_ids: torch.Tensor, ctx: EPContext, **options: Any) -> Received:
    """Launch the first half of ``ep_dispatch``; ``wait()`` of the result launches the second.

    Kernels that are launched between the halves overlap with the transfer. The next call with
    ``ctx`` must follow ``wait()``. Not tuned.

    Args:
        x, topk_ids, ctx: see ``ep_dispatch``.
        options: other arguments of ``ep_dispatch``. The algorithm must be ``"push"``.
    """
    call = DispatchCall(x, topk_ids, ctx, **options)
    if call.chosen.name != "push":
        raise InvalidArgument("ep_send", "algorithm", call.chosen.name, "'push'")
    return call.start(receive=False)


@op(
    algorithms=COMBINE,
    call=CombineCall,
    key_sizes=("M",),
    input_variants_fn=combine_variants,
    worst_input=True,
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
    accepted_key: Any = None,
) -> torch.Tensor:
    """Return the weighted sum of each token's products over its experts; tuned over all ranks.

    Each rank weights and sums its products of a token in fp32 and rounds the sum to the dtype of y.
    The token's rank adds these sums in fp32 in the order of ranks, so equal calls give equal bits.
    The result of a token without experts is zero.

    Args:
        y: [at least ``received.num_positions()``, hidden], dtype of the context: the product at
            each position.
        received: result of ``ep_dispatch`` with ``ctx``.
        ctx: context of ``create_ep_context``.
        apply_weights: multiply by the ``topk_weights`` of the dispatch, if it had any.
        num_sms: largest number of programs, at least 4; equal on all ranks.
        num_ctas, block_bytes, num_chunks: programs, bytes that each moves at a time, and chunks of
            its blocks: it adds a chunk after it has sent the next one (tuned).
        algorithm: ``"push"`` (default) or ``"collective"`` (tuned).
        accepted_key: reserved for the tuner.

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
        accepted_key,
    ).run()  # fmt: skip
