"""Grouped GEMM: the rows of a mixture-of-experts layer, each times the weights of its expert.

Abstraction
    A token goes to ``topk`` experts. Each such *route* is a row of the product: the token's row of
    A times its expert's weights. Serial code sorts routes, copies rows in that order, multiplies
    expert by expert, and puts rows back.

Ways
    ``"tiled"``: three launches. Two make a map of routes to tiles (``common/moe/routing.py``), the
    third multiplies (``common/moe/product.py``): it gathers rows in its load and stores them where
    they belong, so that no row is copied. ``"library"``: ``torch.nn.functional.grouped_mm``
    between two copies of rows, by the same map; tried where it has a kernel of its own, which is
    bf16 on compute capability 9.0. Elsewhere it is a loop that asks the device for counts, and
    cannot be captured.

Routing
    All of it is on the device: nothing here waits for the device, and a captured graph serves any
    routing. Routes whose id names no expert, which pad graphs, give rows of zeros.

Built this way because
    * weights are what is read: all rows of an expert are one range of rows, cut into tiles of a
      height that is tuned, and tiles of an expert run one after another, so that they find its
      weights in the L2 cache;
    * a copy of gathered rows takes 68 to 432 us of 682 to 997 us at 8192 tokens (H200, bf16,
      Mixtral 8x7B and DeepSeek-V3 on 8 ranks): rows are gathered in the load;
    * sorting by torch takes 150 to 290 us, and counting cannot be captured.
"""

from __future__ import annotations

import torch
import triton

from triton_dist.kernels.common.moe.spaces import other_batches
from triton_dist.kernels.common.op import op
from triton_dist.kernels.nvidia.grouped_gemm.algorithms import ALGORITHMS, Call, GroupedKey


@op(
    algorithms=ALGORITHMS,
    call=Call,
    sizes=GroupedKey.of,
    key_fn=GroupedKey.of,
    key_sizes=("M",),
    input_variants_fn=lambda A, B, topk_ids, **_: [
        {"topk_ids": ids} for ids in other_batches(topk_ids, len(B))
    ],
    scope="rank",
    version="1",  # another one when results that are shipped (records/) should not be used any more
)
def grouped_gemm(
    A: torch.Tensor,
    B: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    order: str = "route",
    activation: str | None = None,
    gemm_config: triton.Config | None = None,
    algorithm: str | None = None,
    accepted_key: GroupedKey | None = None,
) -> torch.Tensor:
    """Each row of A times the weights of the expert that its route goes to; tuned by each rank
    alone. Returns [M * topk, N], or [M * topk, N / 2] with an activation; of A's dtype.

    fp32 accumulation; fp32 operands are multiplied as ``torch.backends.cuda.matmul.allow_tf32``
    says. The same ids and operands give the same bits each time, but maybe others in another
    config.

    Args:
        A: [M, K], one row a token, or [M * topk, K], one row a route; unit stride along K; fp16,
            bf16 or fp32.
        B: [E, K, N] of A's dtype, E up to 512, any strides; TMA serves unit stride along K or N
            and multiples of 16 bytes elsewhere, pointers the rest.
        topk_ids: [M, topk], int32 or int64, contiguous, topk up to 10. An id that is not one of 0
            to E - 1 is nobody's: its row is zero.
        order: of the result's rows: ``"route"``: route ``t * topk + j`` is choice j of token t;
            ``"sorted"``: by expert, routes of one in their order, those that are nobody's last.
        activation: ``"silu_mul"``: N is gate and up together, and the result
            ``silu(left half) * right half``, in fp32.
        gemm_config: tiles of ``"tiled"`` (tuned).
        way: ``"tiled"`` (default) or ``"library"`` (tuned).

    Raises:
        InvalidArgument: before anything is launched.
    """
    return Call(A, B, topk_ids, order, activation, gemm_config, algorithm, accepted_key).run()
