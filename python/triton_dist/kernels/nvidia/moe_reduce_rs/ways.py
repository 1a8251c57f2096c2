"""Ways of grouped GEMM, top-k sum and ReduceScatter: those of ``common/moe/sum_ways.py``, with its
context."""

from __future__ import annotations

from triton_dist.kernels.common.moe.sum_ways import ways_of
from triton_dist.kernels.common.moe.summing import SumCall
from triton_dist.kernels.common.op import Ways
from triton_dist.kernels.nvidia.moe_reduce_rs.context import MoEReduceRSContext

WAYS = Ways(MoEReduceRSContext.function, ways_of(MoEReduceRSContext))


class Call(SumCall):
    """One call of ``run_moe_reduce_rs``."""

    kind, ways = MoEReduceRSContext, WAYS
