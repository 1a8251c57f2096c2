"""Launches of the sharded GEMM: configs for split-K and fused push, and the choice of the kernel.

The sharded GEMM multiplies shards of A, gathered from all ranks, by B. ``gemm/sharded.py``
describes split-K and fused push. With split-K, two programs share a tile of the last wave if this
wave does not fill the GPU: each program multiplies one half of K. With fused push, programs of the
GEMM kernel send this rank's shard to the other ranks.

For 2048 gathered rows, 7168 columns and K = 8192 on four H200, split-K takes 349 us instead of
380 us. More splits, splits in all waves, and smaller tiles were slower for all measured shapes. A
split is expensive: writing and reading two partials takes 16 us.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.gemm.scales import NO_SCALES, Scales
from triton_dist.kernels.common.gemm.sharded import (
    GEMMPlan,
    Shards,
    SplitWorkspace,
    kernel_gemm_non_persistent,
    kernel_gemm_persistent,
    workspace_size,
)
from triton_dist.kernels.common.gemm.spaces import (
    can_specialize_warps,
    config_for_dtype,
    max_rows_of_key,
    tile_configs,
)
from triton_dist.kernels.common.gemm.tile import Strides
from triton_dist.kernels.common.peers import GatheredShards
from triton_dist.runtime.device import current_device
from triton_dist.runtime.launch import Launch, dot_precision, fits_descriptor

# Value of GROUP_SIZE_SHARDS (shards whose tiles are traversed together) that groups all shards of
# up to 8 ranks.
GROUP_ALL_SHARDS = 8
# A GEMM with at least this number of waves does not need small tiles.
_MANY_WAVES = 16
# Minimum saving of waves by a split, because writing and reading partials takes time.
_MIN_WAVE_SAVING = 0.03
# Limits per shard for fused push. For larger shards, copy engines leave all SMs to the GEMM.
_MAX_FUSED_ROWS = 1024
_MAX_FUSED_BYTES = 16 << 20
_DESCRIPTOR_KERNEL_CONSTANTS = ("EPILOGUE_SUBTILE", "GROUP_SIZE_SHARDS", "SPLIT_K")


_SPLIT_K_CONSTANTS = ("GROUP_SIZE_M", "SPLIT_K", "GROUP_SIZE_SHARDS", "EPILOGUE_SUBTILE")
SPLIT_K_TILES = tile_configs(
    (128, 256, 64, 8, 3, 8, 2, 1), (128, 256, 64, 8, 3, 16, 2, 1), names=_SPLIT_K_CONSTANTS
)
WARP_SPECIALIZED_SPLIT_K_TILES = tile_configs(
    (128, 256, 64, 8, 3, 8, 2, 1, False),
    (128, 256, 64, 8, 3, 16, 2, 1, False),
    (128, 256, 64, 8, 4, 8, 2, 1, True),
    names=_SPLIT_K_CONSTANTS,
    WARP_SPECIALIZED=True,
)
# For tests in the interpreter: SPLIT_K equal to and above the number of blocks along K, and groups
# of one, two and all shards.
INTERPRETED_SPLIT_K_TILES = tile_configs(
    (32, 64, 64, 4, 2, 2, 2, 1),
    (16, 32, 64, 4, 2, 4, 5, GROUP_ALL_SHARDS),
    (16, 32, 32, 8, 2, 4, 3, 2),
    names=_SPLIT_K_CONSTANTS,
)
# Fused push: (config, number of sending programs, number of chunks).
_TILES_OF_128_ROWS, _TILES_OF_64_ROWS, *_INTERPRETED_TILES = tile_configs(
    (128, 256, 64, 8, 3, 8, GROUP_ALL_SHARDS), (64, 256, 64, 4, 4, 8, GROUP_ALL_SHARDS),
    (32, 64, 64, 4, 2, 2, GROUP_ALL_SHARDS), (16, 32, 32, 4, 2, 4, 1),
    names=("GROUP_SIZE_M", "GROUP_SIZE_SHARDS"),
)  # fmt: skip
FUSED_PUSH_CANDIDATES = (
    *((_TILES_OF_128_ROWS, *counts) for counts in ((16, 4), (16, 2), (16, 8), (8, 4), (20, 4))),
    (_TILES_OF_64_ROWS, 16, 4),
)
INTERPRETED_FUSED_PUSH_CANDIDATES = ((_INTERPRETED_TILES[0], 1, 2), (_INTERPRETED_TILES[1], 2, 3))


def split_k_tiles() -> list[triton.Config]:
    """Return the configs of the persistent kernel that split tiles of the last wave along K."""
    if current_device().interprets:
        return list(INTERPRETED_SPLIT_K_TILES)
    specialized = WARP_SPECIALIZED_SPLIT_K_TILES if can_specialize_warps(torch.bfloat16) else ()
    return [*SPLIT_K_TILES, *specialized]


def max_split_workspace_size(num_sms: int) -> tuple[int, int]:
    """Return the workspace size for all ``split_k_tiles`` as (fp32 elements, counters).

    For 132 programs, the workspace takes 33 MiB.
    """
    return max(workspace_size(config, num_sms - 1, num_sms) for config in split_k_tiles())


class LazySplitWorkspace:
    """This rank's workspace for split-K.

    The counters are allocated immediately. The partials, which are larger, are allocated when
    ``workspace`` is first read.
    """

    def __init__(self) -> None:
        self._device = current_device()
        self._partials, counters = max_split_workspace_size(self._device.num_sms)
        # Zero the counters now. If a graph capture recorded this, it would run only in replays.
        self._counters = self._allocate(torch.int32, counters)
        self.reset()  # also waits for the device, because calls may use any stream

    @functools.cached_property
    def workspace(self) -> SplitWorkspace:
        return SplitWorkspace(self._allocate(torch.float32, self._partials), self._counters)

    def _allocate(self, dtype: torch.dtype, elements: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(elements, dtype=dtype, device=self._device.torch_device)

    def reset(self) -> None:
        """Zero the counters, which a failed launch may have left at any value."""
        self._counters.zero_()
        self._device.synchronize()

    def free(self) -> None:
        self.__dict__.pop("workspace", None)


def fused_push_candidates() -> list[tuple[triton.Config, int, int]]:
    """Return the tuples (config, ``num_comm_sms``, ``num_chunks``) to try for a fused push."""
    return list(
        INTERPRETED_FUSED_PUSH_CANDIDATES if current_device().interprets else FUSED_PUSH_CANDIDATES
    )


def fits_fused_push(A: torch.Tensor, B: torch.Tensor, num_ranks: int) -> bool:
    """Return whether the GEMM kernel may send A [M_per_rank, K] itself (fused push).

    Fused push requires other ranks, a small shard, and operands that TMA supports.
    """
    rows, K = max_rows_of_key(A.shape[0], num_ranks), A.shape[1]
    return (
        num_ranks > 1
        and rows <= _MAX_FUSED_ROWS
        and rows * K * A.element_size() <= _MAX_FUSED_BYTES
        and dot_precision(A.dtype) != "ieee"
        and K * A.element_size() % 16 == 0
        and fits_descriptor(B)
    )


def is_worth_trying(config: triton.Config, rows: int, columns: int, num_ranks: int) -> bool:
    """Return whether ``config`` is worth trying for shards of ``rows`` rows.

    The number of rows is first rounded up, because one tuning key covers a range of row counts.
    All of these conditions must be true:

    * A split along K saves at least the fraction ``_MIN_WAVE_SAVING`` of the waves.
    * Shards are grouped only if one shard has fewer tiles than the GPU has SMs.
    * Tiles of 64 rows need fewer than ``_MANY_WAVES`` waves.
    """
    tile, sms = config.kwargs, current_device().num_sms
    rows = max_rows_of_key(rows, num_ranks)
    tiles_m = triton.cdiv(rows, tile["BLOCK_SIZE_M"])
    tiles_n = triton.cdiv(columns, tile["BLOCK_SIZE_N"])
    full_waves, last_wave_tiles = divmod(tiles_m * tiles_n * num_ranks, sms)
    waves = full_waves + (last_wave_tiles > 0)
    if waves >= _MANY_WAVES and tile["BLOCK_SIZE_M"] == 64:
        return False
    if tile.get("GROUP_SIZE_SHARDS", 1) > 1 and tiles_m * tiles_n >= sms:
        return False
    splits = tile.get("SPLIT_K", 1)
    waves_of_splits = full_waves + triton.cdiv(last_wave_tiles * splits, sms) / splits
    return bool(splits == 1 or waves_of_splits <= (1 - _MIN_WAVE_SAVING) * waves)


def sharded_gemm(
    local_shard: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    config: triton.Config,
    *,
    num_sms: int,
    persistent: bool,
    rank: int = 0,
    num_ranks: int = 1,
    gathered: GatheredShards | None = None,
    split_workspace: SplitWorkspace | None = None,
    scales: tuple[Scales, int] = (NO_SCALES, 0),
) -> Launch:
    """Return the launch that computes ``C = concat(shards) @ B``.

    Args:
        local_shard: [M / num_ranks, K], this rank's shard of A; all of A if ``gathered`` is
            ``None``.
        B: [K, N], any strides.
        C: [M, N], contiguous.
        config: BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, GROUP_SIZE_M. Optional, for the persistent
            kernel: EPILOGUE_SUBTILE, GROUP_SIZE_SHARDS, SPLIT_K, WARP_SPECIALIZED.
            WARP_SPECIALIZED selects the warp-specialized kernel if ``can_specialize_warps``. For
            this kernel, num_warps is the number of warps that multiply: 8.
        num_sms: number of programs of the persistent kernel.
        persistent: use the persistent kernel, which loads by tensor descriptors. If TMA does not
            support the operands, the pointer kernel is used instead. The pointer kernel is also
            used for fp32 without tf32: loads of B by descriptor then spill registers (12 KB per
            thread at the default tile, sm_90).
        rank, num_ranks: this rank and the number of shards.
        gathered: memory with the gathered shards of all ranks; ``None`` on a single rank.
        split_workspace: workspace, required for SPLIT_K above 1.
        scales: result of ``Scaling.kernel_argument``.

    Raises:
        InvalidArgument: SPLIT_K is above 1 and the workspace is missing or too small.
    """
    M, N = C.shape
    K = local_shard.shape[1]
    block_m, block_n = config.kwargs["BLOCK_SIZE_M"], config.kwargs["BLOCK_SIZE_N"]
    num_tiles = num_ranks * triton.cdiv(local_shard.shape[0], block_m) * triton.cdiv(N, block_n)
    source = gathered or GatheredShards(local_shard, local_shard, local_shard, 1, 1)
    push = source.push
    num_comm_sms = 0 if push is None else push.num_comm_sms
    shards = Shards(source.rows, source.arrivals, source.epoch, None, None, None, *scales[0])
    if push is not None:
        shards = shards._replace(
            rows_table=push.shards, arrivals_table=push.arrivals, consumed=push.consumed
        )
    operands, sharding = (local_shard, shards, B, C, M, N, K), (rank, num_ranks, source.chunk_rows)
    plan = GEMMPlan(
        GATHERED=gathered is not None, B_COLUMN_MAJOR=B.stride(0) == 1,
        PRECISION=dot_precision(local_shard.dtype), FLAGS_PER_RANK=source.flags_per_rank,
        NUM_SMS=num_sms, NUM_COMM_SMS=num_comm_sms,
        NUM_CHUNKS=1 if push is None else push.num_chunks,
        NUM_WARPS=config.num_warps, NUM_STAGES=0, INT64_OFFSETS=False, SCALING=scales[1],
    )  # fmt: skip
    options = config_for_dtype(config, local_shard.dtype, C.dtype).all_kwargs()
    # Only the ordinary kernel can send the shard.
    is_specialized = options.pop("WARP_SPECIALIZED", False) and push is None
    is_specialized = is_specialized and can_specialize_warps(local_shard.dtype) and C.itemsize == 2
    by_descriptor = persistent and plan.PRECISION != "ieee" and local_shard.is_contiguous()
    if by_descriptor and fits_descriptor(local_shard, source.rows, B, C):
        options.setdefault("EPILOGUE_SUBTILE", False)
        splits = options.get("SPLIT_K", 1)
        if splits > 1:
            needed = workspace_size(config, num_tiles, num_sms)
            sizes = split_workspace and tuple(each.numel() for each in split_workspace)
            if sizes is None or needed[0] > sizes[0] or needed[1] > sizes[1]:
                expected = f"a workspace of {needed[0]} fp32 and {needed[1]} counters"
                raise InvalidArgument("sharded_gemm", "split_workspace", sizes, expected)
            options["workspace"] = split_workspace
        kernel: Any = kernel_gemm_persistent
        if is_specialized:
            # Imported late, because not every Triton has Gluon.
            from triton_dist.kernels.common.gemm.warp_specialized import (
                WARPS_PER_GROUP,
            )
            from triton_dist.kernels.common.gemm.warp_specialized import (
                kernel_gemm_warp_specialized as kernel,
            )

            plan = plan._replace(NUM_STAGES=options["num_stages"], NUM_WARPS=0)
            options["num_warps"] = WARPS_PER_GROUP
        grid = (min(num_sms, num_tiles * splits + num_comm_sms),)
        return Launch(
            kernel, grid, (*operands, max(B.stride()), *sharding), {**options, "gemm_plan": plan}
        )
    for name in _DESCRIPTOR_KERNEL_CONSTANTS:
        options.pop(name, None)
    max_k_offset = config.kwargs["BLOCK_SIZE_K"] * max(source.rows.stride(1), B.stride(0))
    # Reset constants that the pointer kernel does not read, to avoid needless compilations.
    plan = plan._replace(
        B_COLUMN_MAJOR=False, NUM_SMS=0, NUM_WARPS=0, INT64_OFFSETS=max_k_offset >= 2**31
    )
    return Launch(
        kernel_gemm_non_persistent,
        (num_tiles + num_comm_sms,),
        # Use the strides of the gathered rows, because a one-row ``local_shard`` may have any.
        (*operands, Strides(*source.rows.stride(), *B.stride()), *sharding),
        {**options, "gemm_plan": plan},
    )
