"""The ops that the harness knows."""

from __future__ import annotations

from dataclasses import dataclass

from .ag_gemm import open_ag_gemm
from .gemm_ar import open_gemm_ar
from .gemm_rs import open_gemm_rs
from .workload import OpenWorkload


@dataclass(frozen=True)
class Op:
    open: OpenWorkload
    sums_over_ranks: bool
    """Whether K is what ranks share: the op ends a layer. Else N is: the op begins one."""
    any_rows: bool = False
    """Whether M need not be a multiple of the ranks."""


OPS = {
    "ag_gemm": Op(open_ag_gemm, sums_over_ranks=False),
    "gemm_ar": Op(open_gemm_ar, sums_over_ranks=True, any_rows=True),
    "gemm_rs": Op(open_gemm_rs, sums_over_ranks=True),
}
