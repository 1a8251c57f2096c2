"""The source of an op, whose change makes its records stale, has the code of its algorithms."""

from __future__ import annotations

from collections import Counter

from triton_dist._tuning.source import source_of
from triton_dist.kernels.nvidia import ag_gemm, all_gather, all_reduce, gemm_rs, reduce_scatter
from triton_dist.kernels.nvidia.allgather_gemm.algorithms import ALGORITHMS as AG_GEMM_ALGORITHMS
from triton_dist.kernels.nvidia.allreduce.algorithms import ALGORITHMS as ALL_REDUCE_ALGORITHMS
from triton_dist.kernels.nvidia.gemm_reduce_scatter.algorithms import (
    ALGORITHMS as GEMM_RS_ALGORITHMS,
)
from triton_dist.kernels.nvidia.shard_collectives.algorithms import AllGatherCall, ReduceScatterCall


def test_the_source_of_the_ops_has_all_of_their_algorithms():
    """Classes, the statement that creates them, and what their methods call or read."""
    ops = {
        ag_gemm: AG_GEMM_ALGORITHMS,
        gemm_rs: GEMM_RS_ALGORITHMS,
        all_reduce: ALL_REDUCE_ALGORITHMS,
        all_gather: AllGatherCall.algorithms,
        reduce_scatter: ReduceScatterCall.algorithms,
    }
    digests = source_of([op.fn for op in ops]).digests
    found = Counter(name.rpartition(":")[2] for name in digests)
    classes = {
        each
        for algorithms in ops.values()
        for algorithm in algorithms.values()
        for each in type(algorithm).__mro__
    }
    own = Counter(each.__name__ for each in classes if ".kernels." in each.__module__)
    assert own <= found
    assert found["ALGORITHMS"] >= 3
    called = {
        "is_serial_worth_trying",
        "serial_params",
        "_VALID_NUM_COMM_SMS",
    }  # in methods of ag_gemm's algorithms
    assert called <= {
        name.rpartition(":")[2]
        for name in source_of([ag_gemm.fn]).digests
        if "allgather_gemm" in name
    }
