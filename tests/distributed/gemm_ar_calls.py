"""GEMM-AllReduce calls with fresh data, checked after the last: the same on CPU ranks and on
GPUs."""

from __future__ import annotations

from typing import Any

import torch

from tests.distributed.gemm_rs_calls import SummedCalls
from triton_dist.kernels.nvidia import GEMMAllReduceMethod, create_gemm_ar_context, gemm_ar
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for

# How a product is summed.
WAYS: tuple[dict[str, Any], ...] = (
    {"method": GEMMAllReduceMethod.ONE_SHOT},
    {"method": GEMMAllReduceMethod.TWO_SHOT},
    {"method": GEMMAllReduceMethod.TWO_SHOT, "num_chunks": 3},
    {"method": GEMMAllReduceMethod.TWO_SHOT, "copy_to_local": False},
    {"method": GEMMAllReduceMethod.TWO_SHOT, "num_chunks": 2, "copy_to_local": False},
    {"method": GEMMAllReduceMethod.SERIAL},
)
TILED = WAYS[:5]


class Calls(SummedCalls):
    """``rows`` are all. A result in the context's memory is looked at when the next call has been
    made, as late as it is valid."""

    op, poisoned = gemm_ar, ("partials", "sums")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Bytes of ones are NaN in every dtype.
        self.ctx.reducer.buffer.memory["slots"].local.fill_(255)
        current_device().synchronize()
        group_for(self.ctx.group).barrier("the exchange is poisoned")
        self._borrowed: int | None = None  # which of the results

    def create(self, *args: Any, **options: Any) -> Any:
        return create_gemm_ar_context(*args, **options)

    def rows_of_a(self, rows: int) -> int:
        return rows

    def own_rows(self, rows: int) -> slice:
        return slice(0, rows)

    def bias_seed(self) -> int:
        return 0

    def __call__(self, *args: Any, **options: Any) -> None:
        try:
            super().__call__(*args, **options)
        finally:
            self._keep_borrowed()
        if options.get("copy_to_local") is False:
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
