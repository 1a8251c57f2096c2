"""Ways of both ops: those of ``common/moe/sum_ways.py``, each with its contexts."""

from __future__ import annotations

from triton_dist.kernels.common.moe.sum_ways import ways_of
from triton_dist.kernels.common.moe.summing import SumCall
from triton_dist.kernels.common.op import Ways
from triton_dist.kernels.nvidia.moe_reduce.context import MoEReduceARContext, MoEReduceRSContext


class ReduceScatterCall(SumCall):
    """One call of ``run_moe_reduce_rs``."""

    kind = MoEReduceRSContext
    ways = Ways(kind.function, ways_of(kind))


class AllReduceCall(SumCall):
    """One call of ``run_moe_reduce_ar``."""

    kind = MoEReduceARContext
    ways = Ways(kind.function, ways_of(kind))
