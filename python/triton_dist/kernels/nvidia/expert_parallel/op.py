"""Expert parallelism on one host: dispatch tokens to the ranks of their experts, and combine.

Rank r of W owns the experts ``r * E / W`` to ``(r + 1) * E / W - 1``. ``ep_dispatch`` sends each
token to the ranks that own one of its experts, and describes what arrives as the input of a grouped
GEMM. ``ep_combine`` returns the weighted sum of the products to the token's rank.

Timeline of a dispatch, one launch on every rank:
    ids, weights → all ranks │ flags
    wait until each peer has begun │ rows → ranks of the experts │ flags
                    wait for the ids │ positions of the routes   │ wait for rows

Design:
    * A token is stored once per rank, whatever the number of its experts there. The grouped GEMM
      gathers rows by index. With 8 choices, an expanded layout would cost more memory time than the
      link needs.
    * A row has a fixed place in the receive buffer, so no counts precede the transfer. Every rank
      gets the ids of all ranks, which are few bytes, and computes positions while rows travel.
    * The host reads no counts. Buffers have the size for the worst routing or the given capacity.
    * Products are summed in fp32 on the expert's rank, rounded once, and added in the order of
      ranks: one row per (token, rank) travels back, and equal calls give equal bits.

Algorithms:
    * ``"push"``: the timeline above. Combine is also one launch.
    * ``"packets"``: words that mark their own arrival instead of flags, for few tokens.
    * ``"collective"``: NCCL all-gather and reduce-scatter of all rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.moe.skew import SKEWS, skewed_ids
from triton_dist.kernels.common.op import op
from triton_dist.kernels.nvidia.expert_parallel.algorithms import (
    DISPATCH,
    DispatchCall,
    dispatch_key,
)
from triton_dist.kernels.nvidia.expert_parallel.combine import COMBINE, CombineCall, combine_key
from triton_dist.kernels.nvidia.expert_parallel.context import EPContext, Received
from triton_dist.runtime.device import current_device


def id_variants(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    ctx: EPContext,
    *_: Any,
    expert_map: torch.Tensor | None = None,
    routing_skew: str | None = None,
    **__: Any,
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield calls with other ids (``input_variants_fn``): even, Zipf, and equal for all tokens.

    ``routing_skew`` selects one of them.
    """
    experts = ctx.num_experts if expert_map is None else len(expert_map)
    skews = SKEWS if routing_skew is None else (routing_skew,)
    if topk_ids.shape[1] > experts or (routing_skew is None and current_device().interprets):
        return  # times of the interpreter mean nothing
    for skew in skews:
        yield {"topk_ids": skewed_ids(topk_ids, experts, skew, ctx.rank)}


def combine_variants(
    y: torch.Tensor, received: Received, ctx: EPContext, *_: Any, **__: Any
) -> Iterator[dict[str, Any]]:
    """Yield calls with the routings of ``id_variants`` (``input_variants_fn``)."""
    shape = received.tokens, received.position_of_route.shape[1]
    x, ids = y.new_empty((shape[0], ctx.hidden)), received.destinations.new_empty(shape)
    weights = None if received.weights is None else received.weights.new_ones(shape)
    options: dict[str, Any] = {
        "max_tokens": received.max_tokens, "routing_skew": received.routing_skew
    }  # fmt: skip
    for variant in id_variants(x, ids, ctx, routing_skew=received.routing_skew):
        call = DispatchCall(x, variant["topk_ids"], ctx, weights, **options)
        other = call.result()
        call.launch_kernel(other.layout, True, True, copies=0)  # rows stay as they are
        yield {"y": y.new_zeros((other.num_positions(), ctx.hidden)), "received": other}


@op(
    algorithms=DISPATCH,
    call=DispatchCall,
    sizes=dispatch_key,
    key_fn=dispatch_key,
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
        max_tokens: bound of every rank's tokens, equal on all ranks; default: the context's.
        expert_map: int32 [logical experts, replicas], physical experts of logical ids, with -1
            after the last. Tokens alternate between replicas.
        alignment: positions of an expert begin at multiples, a power of two up to 256.
        num_sms: largest number of programs that send rows.
        routing_skew: hint for the tuner of this op and of ``ep_combine``: ``"even"``, ``"zipf"`` or
            ``"same_experts"`` for all tokens. The default minimises the slowest of the three.
            Equal on all ranks.
        num_ctas, block_bytes: programs that send rows, and bytes that each moves at a time (tuned).
        algorithm: ``"push"`` (default), ``"packets"`` or ``"collective"`` (tuned).
        accepted_key: reserved for the tuner.

    Returns:
        The received rows and their layout.

    Raises:
        InvalidArgument: an argument does not fit the context; on every rank, an id is not an
            expert, or a weight is NaN. If a kernel finds the latter, ``ctx.check()`` raises it.
            Invalid ids are masked.
        ContextFinalized: ``ctx`` was finalized.
        RankDisagreement: ranks pass different ``max_tokens``.
    """
    received: Received = DispatchCall(
        x, topk_ids, ctx, topk_weights, x_scale, quantise, max_tokens, expert_map, alignment,
        num_sms, routing_skew, num_ctas, block_bytes, algorithm, accepted_key,
    ).run()  # fmt: skip
    return received


def ep_send(x: torch.Tensor, topk_ids: torch.Tensor, ctx: EPContext, **options: Any) -> Received:
    """Launch the first half of ``ep_dispatch``; ``wait()`` of the result launches the second.

    Kernels between the halves overlap with the transfer. No other call with ``ctx`` may come
    between. Not tuned.

    Args:
        x, topk_ids, ctx: see ``ep_dispatch``.
        options: other arguments of ``ep_dispatch``, except an algorithm other than ``"push"``.
    """
    call = DispatchCall(x, topk_ids, ctx, **options)
    if call.chosen.name != "push":
        raise InvalidArgument("ep_send", "algorithm", call.chosen.name, "'push'")
    return call.start(receive=False)


@op(
    algorithms=COMBINE,
    call=CombineCall,
    sizes=combine_key,
    key_fn=combine_key,
    key_sizes=("M",),
    input_variants_fn=combine_variants,
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

    Products are weighted and summed in fp32 on the expert's rank, rounded to the dtype of y, and
    added in fp32 in the order of ranks, so equal calls give equal bits. A token without experts
    becomes zero.

    Args:
        y: [at least the positions in use, hidden], dtype of the context: a product for each
            position of ``received``.
        received: result of ``ep_dispatch`` with ``ctx``.
        ctx: context of ``create_ep_context``.
        apply_weights: multiply by the ``topk_weights`` of the dispatch, if it had any.
        num_sms: largest number of programs.
        num_ctas, block_bytes, num_chunks: programs, bytes that each moves at a time, and chunks of
            its tokens (tuned).
        algorithm: see ``ep_dispatch``.
        accepted_key: reserved for the tuner.

    Returns:
        [tokens, hidden], dtype of the context.

    Raises:
        InvalidArgument: an argument does not fit the context.
        ContextFinalized: ``ctx`` was finalized.
        RankDisagreement: ranks pass results with different ``max_tokens``.
    """
    return CombineCall(
        y, received, ctx, apply_weights, num_sms, num_ctas, block_bytes, num_chunks, algorithm,
        accepted_key,
    ).run()  # fmt: skip
