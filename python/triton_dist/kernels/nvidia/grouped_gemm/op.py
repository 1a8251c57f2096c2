"""Grouped GEMM: MoE grouped GEMM on one GPU, including routing.

A token goes to ``topk`` experts. Each pair of token and expert is a *route* and one row of the
output: the token's row of A times its expert's weights.

Algorithms:
    * ``"tiled"``: three launches. Two launches map routes to tiles (``common/moe/routing.py``); the
      third multiplies (``common/moe/product.py``). The third launch gathers the rows of A while it
      loads them and stores each result row at its final place, so no launch copies rows.
    * ``"library"``: copy the rows sorted by expert, call ``torch.nn.functional.grouped_mm``, and
      copy the results to the order of routes. It is tried only if torch has a native kernel: for
      bf16 and fp8 on compute capability 9.0. Otherwise torch loops on the host over the experts'
      row counts, which a CUDA graph cannot capture.

Routing runs on the device: nothing waits for the device, and a captured graph serves any ids.
Dropped choices (ids outside 0 to E - 1) give rows of zeros.

Design:
    * The time to read the weights limits the kernel. BLOCK_SIZE_M is therefore tuned, and tiles of
      one expert run one after another, so that the expert's weights stay in the L2 cache.
    * The GEMM gathers rows while it loads. A separate copy took 68 to 432 us of 682 to 997 us (8192
      tokens, H200, bf16, sizes per rank of Mixtral 8x7B and DeepSeek-V3 on 8 ranks).
    * Sorting with torch takes 150 to 290 us, and torch's counting cannot be captured in a graph.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from triton_dist.kernels.common.moe.positions import Positions
from triton_dist.kernels.common.moe.skew import SkewedKey
from triton_dist.kernels.common.moe.spaces import other_batches
from triton_dist.kernels.common.op import op
from triton_dist.kernels.nvidia.grouped_gemm.algorithms import (
    ALGORITHMS,
    Call,
    GroupedKey,
    predict_ms,
)


def key_fn(*operands: Any, routing_skew: str | None = None, **options: Any) -> Any:
    return SkewedKey.of("grouped_gemm", GroupedKey.of(*operands, **options), routing_skew)


@op(
    algorithms=ALGORITHMS,
    call=Call,
    key_fn=key_fn,
    key_sizes=("M",),
    predict_ms=predict_ms,
    input_variants_fn=lambda A, B, topk_ids, *, routing_skew=None, **_: [
        {"topk_ids": ids}
        for ids in (
            [] if isinstance(topk_ids, Positions) else other_batches(topk_ids, len(B), routing_skew)
        )
    ],
    scope="rank",
    version="1",  # change when the shipped results (records/) must no longer be used
)
def grouped_gemm(
    A: torch.Tensor,
    B: torch.Tensor,
    topk_ids: torch.Tensor | Positions,
    *,
    order: str = "route",
    activation: str | None = None,
    gemm_config: triton.Config | None = None,
    algorithm: str | None = None,
    A_scale: torch.Tensor | None = None,
    B_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    routing_skew: str | None = None,
    validated_key: Any = None,
) -> torch.Tensor:
    """Multiply, for each route, its row of A by the weights of its expert. Each rank tunes alone.

    Products are accumulated in fp32. ``torch.backends.cuda.matmul.allow_tf32`` applies to fp32
    operands. Equal ids, operands and configs give bitwise equal results. fp8 operands are
    multiplied by their scales.

    Args:
        A: [M, K], one row per token, or [M * topk, K], one row per route; unit stride along K;
            fp16, bf16, fp32, fp8 e4m3 or e5m2.
        B: [E, K, N], E <= 512. If A is fp8: e4m3 with unit stride along K; otherwise the dtype of
            A, any strides. If the stride along K or N is 1 and the other strides are multiples of
            16 bytes, the kernel may use TMA; otherwise it reads through pointers.
        topk_ids: [M, topk], int32 or int64, contiguous, topk <= 10. A choice with an id outside 0
            to E - 1 is dropped: its row is zero. Instead of ids, ``topk_ids`` may be the
            ``positions`` of a result of ``ep_dispatch``. The output then has a row per position,
            and rows of unused positions are undefined.
        order: order of the output rows. ``"route"``: row ``t * topk + j`` is choice j of token t.
            ``"sorted"``: by expert, then by route; dropped choices last.
        activation: ``"silu_mul"``: the columns are gate and up projections, and the result is
            ``silu(left half) * right half``, computed in fp32.
        gemm_config: tile sizes of ``"tiled"`` (tuned).
        algorithm: ``"tiled"`` or ``"library"`` (tuned; ``"tiled"`` if untuned).
        A_scale, B_scale: fp32 scales of fp8 operands: one per tensor, one per row of A and column
            of B, or one per block of 128. ``triton_dist.kernels.common.gemm.scales`` lists the
            layouts.
        out_dtype: bf16 (default), fp16 or fp32 for fp8 operands; otherwise A's dtype.
        use_fast_accum: see ``matmul``.
        routing_skew: how unevenly tokens choose experts, for the tuner; part of the tuning key. In
            addition to the call's ids, the tuner measures other ids: random with equal
            probabilities (``"even"``), random by Zipf's law with exponent 1.2 (``"zipf"``), or
            equal for all tokens (``"same_experts"``). By default, these ids are drawn from the
            call's tokens with replacement.
        validated_key: reserved for the tuner, which passes the key that it has computed.

    Returns:
        [M * topk, N], or one row per position; N / 2 columns with an activation; ``out_dtype``.

    Raises:
        InvalidArgument: an argument is out of range, or shapes, dtypes or devices do not match.
    """
    return Call(
        gemm_config, algorithm, A_scale, B_scale, use_fast_accum, validated_key, A, B, topk_ids,
        order, activation, out_dtype, routing_skew,
    ).run()  # fmt: skip
