"""OpInfos of all ops, for tests, scripts, benchmarks and timelines. No op depends on them."""

from __future__ import annotations

from typing import Any

from triton_dist.testing.opinfo.allgather_gemm import AG_GEMM
from triton_dist.testing.opinfo.allgather_group_gemm import AG_GROUP_GEMM
from triton_dist.testing.opinfo.base import OpInfo
from triton_dist.testing.opinfo.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from triton_dist.testing.opinfo.decode_attention import SP_DECODE_ATTN
from triton_dist.testing.opinfo.expert_parallel import (
    EP_COMBINE,
    EP_DISPATCH,
    EP_DISPATCH_GROUP_GEMM,
)
from triton_dist.testing.opinfo.gemm import GEMMOpInfo
from triton_dist.testing.opinfo.grouped_gemm import GROUPED_GEMM
from triton_dist.testing.opinfo.moe_reduce import MOE_REDUCE_AR, MOE_REDUCE_RS
from triton_dist.testing.opinfo.sequence_parallel import (
    SP_AG_ATTENTION,
    ULYSSES_GEMM_PRE_ATTN,
    ULYSSES_POST_ATTN,
    ULYSSES_POST_ATTN_GEMM,
    ULYSSES_PRE_ATTN,
)
from triton_dist.testing.opinfo.summed_gemm import GEMM_AR, GEMM_RS

GEMM_OPINFOS: dict[str, GEMMOpInfo] = {info.name: info for info in (AG_GEMM, GEMM_AR, GEMM_RS)}
"""OpInfos of GEMMs across ranks, by name of the op."""
OPINFOS: dict[str, OpInfo[Any]] = {
    info.name: info
    for info in (
        AG_GEMM, AG_GROUP_GEMM, ALL_GATHER, ALL_REDUCE, EP_COMBINE, EP_DISPATCH,
        EP_DISPATCH_GROUP_GEMM, GEMM_AR, GEMM_RS, GROUPED_GEMM, REDUCE_SCATTER, MOE_REDUCE_AR,
        MOE_REDUCE_RS, SP_AG_ATTENTION, SP_DECODE_ATTN, ULYSSES_GEMM_PRE_ATTN,
        ULYSSES_POST_ATTN, ULYSSES_POST_ATTN_GEMM, ULYSSES_PRE_ATTN,
    )
}  # fmt: skip
"""OpInfos of all ops, by name."""
OVERLAPPED_OPINFOS = {name: info for name, info in OPINFOS.items() if info.overlaps}
"""OpInfos of ops that overlap a collective with compute."""
