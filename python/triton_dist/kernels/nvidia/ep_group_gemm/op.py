"""Expert-parallel dispatch + grouped GEMM: the first GEMM of a mixture of experts whose experts are
distributed over ranks, overlapped with the transfer of the tokens.

Rank r of W owns E / W experts. The op sends tokens as ``ep_dispatch`` does, and multiplies each
received route by the weights of its expert as ``grouped_gemm`` does.

Timeline of a ``"fused"`` call (W = 2), three launches on one stream:
    ids → all ranks, layout │ order of tiles │ copy programs: rows → peers, flags ─┐ GEMM programs
                                             │ GEMM programs: tiles of own rows ── │ wait │ others

Algorithms:
    * ``"fused"``: the timeline above. Some programs send rows, the others multiply.
    * ``"serial"``: ``ep_dispatch``, then our grouped GEMM.
    * ``"library"``: ``ep_dispatch``, then torch's grouped GEMM. Tried if torch has a native kernel.

Design:
    * One launch sends and multiplies, so programs that send always run before programs that wait
      for peers, and no multiprocessor is reserved for communication.
    * Programs take tiles from a counter. Multiprocessors that have sent rows first then take fewer
      tiles, whatever the transfer takes.
    * Tiles keep their place among the rows of their expert, so the results of all orders are equal.
      A tile with rows of several ranks waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton

from triton_dist.kernels.common.op import op
from triton_dist.kernels.nvidia.ep_group_gemm.algorithms import ALGORITHMS, Call
from triton_dist.kernels.nvidia.expert_parallel import EPContext, Received, id_variants


def _variants(*args: Any, **kwargs: Any) -> Iterator[dict[str, torch.Tensor]]:
    call = Call(*args, **kwargs)
    return id_variants(
        call.x, call.topk_ids, call.ctx, call.topk_weights, max_tokens=call.max_tokens,
        expert_map=call.expert_map, routing_skew=call.routing_skew,
    )  # fmt: skip


@op(
    algorithms=ALGORITHMS,
    call=Call,
    key_sizes=("M",),
    input_variants_fn=_variants,
    worst_input=True,  # minimise the time of the slowest variant
    version="1",  # change when the shipped results (records/) must no longer be used
)
def ep_dispatch_group_gemm(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    B: torch.Tensor,
    ctx: EPContext,
    topk_weights: torch.Tensor | None = None,
    activation: str | None = None,
    max_tokens: int | None = None,
    expert_map: torch.Tensor | None = None,
    routing_skew: str | None = None,
    gemm_config: triton.Config | None = None,
    num_ctas: int | None = None,
    local_first_fraction: float | None = None,
    algorithm: str | None = None,
    validated_key: Any = None,
) -> tuple[torch.Tensor, Received]:
    """Send tokens to the ranks of their experts, and multiply them by the experts' weights.

    Tuned over all ranks. The rules for calls are in the docstring of
    ``triton_dist.kernels.nvidia``. The host does not wait for the device. A captured graph can be
    replayed with other ids. Products are accumulated in fp32. A waiting GEMM occupies the GPU, so
    calls of different contexts must execute in the same order on all ranks: order their streams by
    events.

    Args:
        x, topk_ids, topk_weights, max_tokens, expert_map, routing_skew: see ``ep_dispatch``; x in
            the dtype of the context.
        B: [E / W, hidden, N], weights of this rank's experts, dtype of the context, any strides.
        ctx: context of ``create_ep_context``.
        activation: ``None``, or ``"silu_mul"``: return silu of the left half of the product's
            columns, multiplied by the right half.
        gemm_config: tile sizes of ``"fused"`` and ``"serial"`` (tuned).
        num_ctas: number of programs that send rows in ``"fused"``, equal on all ranks (tuned).
        local_first_fraction: fraction of the experts, 0 to 1, whose tiles with only rows of this
            rank precede all other tiles in ``"fused"`` (tuned).
        algorithm: ``"fused"``, ``"serial"`` or ``"library"`` (tuned; ``"serial"`` if untuned).
            ``"fused"`` requires a capacity of ``max_tokens``.
        validated_key: reserved for the tuner, which passes the key that it has computed.

    Returns:
        The products [positions, N], or [positions, N / 2] with an activation, and the result of the
        dispatch. Rows from ``received.num_positions()`` on are undefined.

    Raises:
        InvalidArgument: an argument does not fit the context or the algorithm.
        ContextFinalized: ``ctx`` was finalized.
        RankDisagreement: ranks pass different arguments (``EPContext.check``).
    """
    return Call(
        x, topk_ids, B, ctx, topk_weights, activation, max_tokens, expert_map, routing_skew,
        gemm_config, num_ctas, local_first_fraction, algorithm, validated_key,
    ).run()  # type: ignore[return-value]  # fmt: skip
