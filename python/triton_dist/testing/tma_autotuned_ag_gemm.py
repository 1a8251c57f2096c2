"""AllGather-GEMM whose GEMM kernel has ``triton.autotune``, tuned by calling the whole op."""

from __future__ import annotations

from typing import Any

import torch
import triton

from triton_dist.autotuner import contextual_autotune
from triton_dist.kernels.common.gemm.sharded import GEMMPlan, Shards
from triton_dist.kernels.common.slots.gathered import AllGatherBuffer, AllGatherMethod
from triton_dist.kernels.nvidia.allgather_gemm import kernel_consumer_gemm_persistent
from triton_dist.kernels.nvidia.gemm import get_config_space
from triton_dist.runtime.device import current_device
from triton_dist.runtime.launch import Launch, dot_precision


def all_tile_configs() -> list[triton.Config]:
    """Return all configs of the persistent kernel, with EPILOGUE_SUBTILE off by default."""
    return [
        triton.Config(
            {"EPILOGUE_SUBTILE": False, **config.kwargs},
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        for config in get_config_space(persistent=True)
    ]


class TmaAutotunedAgGemm:
    """AllGather-GEMM whose kernel cannot be timed alone.

    The kernel waits for rows that other ranks send in the same call. It compares flags with the
    epoch, a counter of calls.

    Args:
        buffer: symmetric buffer for the gathered rows.
        configs: configs of the kernel; default: ``all_tile_configs()``.
        race: see ``contextual_autotune``.
    """

    def __init__(
        self,
        buffer: AllGatherBuffer,
        configs: list[triton.Config] | None = None,
        race: bool = False,
    ) -> None:
        self._buffer = buffer
        self._kernel = triton.autotune(configs=configs or all_tile_configs(), key=["M", "N", "K"])(
            kernel_consumer_gemm_persistent
        )
        self._call = contextual_autotune(is_dist=True, race=race)(self._all_gather_and_multiply)

    def __call__(self, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        """Return ``all_gather(A) @ B`` for a contiguous A [M_per_rank, K] and B [K, N_per_rank]. B
        is row-major or column-major."""
        C: torch.Tensor = self._call(A, B)
        return C

    @property
    def num_tuning_calls(self) -> int:
        return self._call.num_tuning_calls

    def choices(self) -> dict[str, Any]:
        return self._call.choices()

    def _all_gather_and_multiply(self, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        buffer, (rows, K), N = self._buffer, A.shape, B.shape[1]
        num_ranks = buffer.num_ranks
        num_sms = current_device().num_sms
        C = torch.empty(rows * num_ranks, N, dtype=A.dtype, device=A.device)
        gathered = buffer.start(A, AllGatherMethod.FULL_MESH_PUSH, num_streams=1, num_chunks=1)

        def grid(META: dict[str, Any]) -> tuple[int, ...]:
            tiles_m = triton.cdiv(rows, META["BLOCK_SIZE_M"])
            tiles_n = triton.cdiv(N, META["BLOCK_SIZE_N"])
            return (min(num_sms, num_ranks * tiles_m * tiles_n),)

        shards = Shards(
            gathered.rows, gathered.arrivals, gathered.epoch, *(None,) * (len(Shards._fields) - 3)
        )
        plan = GEMMPlan(
            GATHERED=num_ranks > 1, B_COLUMN_MAJOR=B.stride(0) == 1,
            PRECISION=dot_precision(A.dtype), FLAGS_PER_RANK=gathered.flags_per_rank,
            NUM_SMS=num_sms, NUM_COMM_SMS=0, NUM_CHUNKS=1, NUM_WARPS=0, NUM_STAGES=0,
            INT64_OFFSETS=False, SCALING=0,
        )  # fmt: skip
        sizes = (rows * num_ranks, N, K, max(B.stride()))
        arguments = (A, shards, B, C, *sizes, buffer.rank, num_ranks, gathered.chunk_rows)
        Launch(self._kernel, grid, arguments, {"gemm_plan": plan}).run()
        buffer.finish()
        return C
