"""GEMM-ReduceScatter calls with fresh data, checked after the last: the same on CPU ranks and on
GPUs."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from tests.distributed.summed_gemm_calls import Algorithm, SummedCalls
from triton_dist.kernels.nvidia import create_gemm_rs_context, gemm_rs
from triton_dist.kernels.nvidia.gemm_reduce_scatter.algorithms import ALGORITHMS as ALL_ALGORITHMS
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for

# How the tiles of a call travel.
ALGORITHMS: tuple[Algorithm, ...] = (
    {"algorithm": "fused", "reduce_st": False},
    {"algorithm": "copy_engine", "reduce_st": False, "num_chunks": 3},
    {"algorithm": "one_launch", "reduce_st": False},
    {"algorithm": "fused", "reduce_st": True},
    {"algorithm": "serial", "reduce_st": False},
)
FUSED: Algorithm = {"algorithm": "fused"}
ROW_BLOCKS: Algorithm = {"algorithm": "copy_engine"}
EXCHANGED: Algorithm = {"algorithm": "one_launch"}


class Calls(SummedCalls):
    """``rows`` are those of a rank."""

    name, op, create = "gemm_rs", gemm_rs, staticmethod(create_gemm_rs_context)
    config_space = staticmethod(ALL_ALGORITHMS.config_space)
    poisoned, flags = ("partials",), ("arrivals", "consumed")

    options = MappingProxyType({"reduce_st": True})
    algorithms, tiled, row_blocks = ALGORITHMS, (FUSED, ROW_BLOCKS, EXCHANGED), ROW_BLOCKS
    epoch_algorithms, layout_algorithms = ALGORITHMS, (FUSED, EXCHANGED)
    # In trials an exchange looks too, although it need not: what it is compared with does.
    in_turn, in_trials = (FUSED, FUSED, EXCHANGED, ROW_BLOCKS), (EXCHANGED, FUSED)
    looks = (1, 0, 0, 0, 1, 1, 1, 0)
    overdue = (
        *("gemm_rs.arrivals",) * 4,
        *("the exchange of gemm_rs.arrivals",) * 2,
        *("gemm_rs.arrivals",) * 2,
        *("the exchange of gemm_rs.arrivals",) * 2,
    )

    fewest_configs = 20
    every_rows, many, few = (37, 5, 1, 20, 33), 37, 20
    operand_algorithms = (
        (37, (FUSED, EXCHANGED)), (1, (FUSED,)), (33, (EXCHANGED, FUSED)),
        (3, (ROW_BLOCKS, EXCHANGED)),
    )  # fmt: skip
    chunked_rows = (150, 33, 1)
    tuned_calls = (
        {"rows": 11, "layout": "column-major", "reduce_st": False},
        {"rows": 5, "has_bias": True},
    )

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        assert self.ctx.buffer.with_sums is options.get("reduce_st", False)
        # Bytes of ones are NaN in every dtype.
        self.ctx.exchange.memory["slots"].local.fill_(255)
        current_device().synchronize()
        group_for(self.ctx.group).barrier("the exchange is poisoned")

    @staticmethod
    def rows_of_a(rows: int, num_ranks: int) -> int:
        return rows * num_ranks

    @staticmethod
    def own_rows(rows: int, rank: int) -> slice:
        return slice(rank * rows, (rank + 1) * rows)

    @staticmethod
    def bias_seed(rank: int) -> int:
        return rank

    @staticmethod
    def multiplies_by_torch(algorithm: Algorithm) -> bool:
        return algorithm["algorithm"] == "serial"

    @staticmethod
    def full_rows(algorithm: Algorithm) -> int:
        return 1021
