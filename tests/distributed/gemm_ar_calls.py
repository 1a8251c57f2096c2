"""GEMM-AllReduce calls with fresh data, checked after the last: the same on CPU ranks and on
GPUs."""

from __future__ import annotations

from typing import Any

import torch

from tests.distributed.summed_gemm_calls import Algorithm, SummedCalls
from triton_dist.kernels.nvidia import (
    create_gemm_ar_context,
    gemm_ar,
)
from triton_dist.kernels.nvidia.gemm_allreduce.algorithms import ALGORITHMS as ALL_ALGORITHMS
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for

PACKETS: Algorithm = {"algorithm": "one_shot_in_packets"}
# How a product is summed.
ALGORITHMS: tuple[Algorithm, ...] = (
    {"algorithm": "one_shot"},
    {"algorithm": "two_shot"},
    {"algorithm": "two_shot", "num_chunks": 3},
    {"algorithm": "two_shot", "copy_to_local": False},
    {"algorithm": "two_shot", "num_chunks": 2, "copy_to_local": False},
    {"algorithm": "two_shot_in_one_launch"},
    PACKETS,
    {"algorithm": "serial"},
)
TILED = ALGORITHMS[:7]
COLLECTIVE: Algorithm = {"algorithm": "collective", "gemm_config": None}
SYMMETRIC: Algorithm = {"algorithm": "symmetric_collective", "gemm_config": None}


class Calls(SummedCalls):
    """``rows`` are all. A result in the context's memory is looked at when the next call has been
    made, as late as it is valid."""

    name, op, create = "gemm_ar", gemm_ar, staticmethod(create_gemm_ar_context)
    poisoned, flags = ("partials", "sums"), ("arrivals", "sum_arrivals", "consumed")

    algorithms, tiled, row_blocks = ALGORITHMS, TILED, ALGORITHMS[1]
    epoch_algorithms, layout_algorithms = TILED, TILED
    in_turn, in_trials = (*ALGORITHMS, COLLECTIVE), ALGORITHMS[:2]
    looks = (0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0)
    overdue = (
        *("the exchange of gemm_ar.arrivals",) * 2,
        *("gemm_ar.arrivals",) * 8,
        *("the exchange of gemm_ar.arrivals",) * 2,
        *("the exchange of gemm_ar.packets",) * 4,
    )

    fewest_configs = 60
    every_rows, many, few = (137, 5, 1, 64, 3, 129, 63, 17), 77, 40
    operand_algorithms = ((77, TILED), (1, TILED), (67, TILED), (5, TILED))
    chunked_rows = (300, 65, 1)
    tuned_calls = (
        {"rows": 11, "layout": "column-major"},
        {"rows": 5, "has_bias": True, "copy_to_local": False},
    )

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Bytes of ones are NaN in every dtype.
        self.ctx.exchange.memory["slots"].local.fill_(255)
        current_device().synchronize()
        group_for(self.ctx.group).barrier("the exchange is poisoned")
        self._borrowed: int | None = None  # which of the results

    @staticmethod
    def config_space() -> list[dict[str, Any]]:
        """All for the dtype of these calls, fp16, which torch's sum in symmetric memory, tested
        apart, does not take."""
        symmetric = SYMMETRIC["algorithm"]
        return [
            config for config in ALL_ALGORITHMS.config_space() if config["algorithm"] != symmetric
        ]

    @staticmethod
    def rows_of_a(rows: int, num_ranks: int) -> int:
        return rows

    @staticmethod
    def own_rows(rows: int, rank: int) -> slice:
        return slice(0, rows)

    @staticmethod
    def bias_seed(rank: int) -> int:
        return 0

    @staticmethod
    def multiplies_by_torch(algorithm: Algorithm) -> bool:
        return algorithm["algorithm"] == "serial"

    @staticmethod
    def full_rows(algorithm: Algorithm) -> int:
        return {"one_shot_in_packets": 83, "one_shot": 1021}.get(algorithm["algorithm"], 4091)

    def __call__(self, *args: Any, **options: Any) -> None:
        try:
            super().__call__(*args, **options)
        finally:
            self._keep_borrowed()
        if options.get("copy_to_local") is False and self.results:
            self._borrowed = len(self.results) - 1

    def skip(self) -> None:
        super().skip()
        self._keep_borrowed()

    def _keep_borrowed(self) -> None:
        if self._borrowed is not None:
            what, C, expected = self.results[self._borrowed]
            self.results[self._borrowed] = what, C.clone(), expected
            self._borrowed = None

    def borrowed(self) -> torch.Tensor:
        """The result of the last call."""
        return self.results[-1][1]
