"""Bind the algorithms of ``common/moe/sum_algorithms.py`` to the two contexts."""

from __future__ import annotations

from triton_dist.kernels.common.moe.sum_algorithms import algorithms_of
from triton_dist.kernels.common.moe.summing import SumCall
from triton_dist.kernels.common.op import Algorithms
from triton_dist.kernels.nvidia.moe_reduce.context import MoEReduceARContext, MoEReduceRSContext


class ReduceScatterCall(SumCall):
    """One call of ``run_moe_reduce_rs``."""

    ctx_type = MoEReduceRSContext
    algorithms = Algorithms(ctx_type.function, algorithms_of(ctx_type))


class AllReduceCall(SumCall):
    """One call of ``run_moe_reduce_ar``."""

    ctx_type = MoEReduceARContext
    algorithms = Algorithms(ctx_type.function, algorithms_of(ctx_type))
