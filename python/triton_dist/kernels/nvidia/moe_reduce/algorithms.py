"""Bind the algorithms of ``common/moe/sum_algorithms.py`` to the two contexts."""

from __future__ import annotations

from triton_dist.kernels.common.moe.sum_algorithms import algorithms_of
from triton_dist.kernels.common.moe.summing import SumCall
from triton_dist.kernels.common.op import Algorithms
from triton_dist.kernels.nvidia.moe_reduce.context import MoEReduceARContext, MoEReduceRSContext


class ReduceScatterCall(SumCall):
    """One call of ``run_moe_reduce_rs``."""

    context_class = MoEReduceRSContext
    algorithms = Algorithms(context_class.function, algorithms_of(context_class))


class AllReduceCall(SumCall):
    """One call of ``run_moe_reduce_ar``."""

    context_class = MoEReduceARContext
    algorithms = Algorithms(context_class.function, algorithms_of(context_class))
