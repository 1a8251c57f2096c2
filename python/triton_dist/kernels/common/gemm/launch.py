"""Launches of the sharded GEMM: picks the kernel that can serve the tensors as they lie."""

from __future__ import annotations

from typing import Any

import torch
import triton

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.gemm.sharded import (
    kernel_gemm_non_persistent,
    kernel_gemm_persistent,
)
from triton_dist.kernels.common.gemm.split_k import SplitWorkspace, split_tiles
from triton_dist.kernels.common.launch import Launch, dot_precision, fits_descriptor
from triton_dist.kernels.common.shards import GatheredShards
from triton_dist.runtime.triton_compat import compiles_for_hopper, has_gluon_for_hopper

_DESCRIPTOR_ONLY = ("EPILOGUE_SUBTILE", "GROUP_SIZE_SHARDS", "SPLIT_K")


def config_for(config: triton.Config, dtype: torch.dtype) -> triton.Config:
    """The config that is launched for operands of ``dtype``.

    Configs are written for 16-bit operands. Of 4-byte ones a tile has half as many elements along K
    and stages its output in two halves, so that it takes as many bytes of shared memory.
    """
    if dtype.itemsize <= 2:
        return config
    tile = dict(config.kwargs)
    tile["BLOCK_SIZE_K"] = tile["BLOCK_SIZE_K"] * 2 // dtype.itemsize
    tile["EPILOGUE_SUBTILE"] = True
    return triton.Config(tile, num_warps=config.num_warps, num_stages=config.num_stages)


def can_specialize_warps(dtype: torch.dtype) -> bool:
    """Tell whether ``kernel_gemm_warp_specialized`` can multiply ``dtype`` on this process's
    device: 16-bit operands on compute capability 9.x, not interpreted."""
    return dtype.itemsize == 2 and compiles_for_hopper() and has_gluon_for_hopper()


def sharded_gemm(
    own: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    config: triton.Config,
    *,
    num_sms: int,
    persistent: bool,
    rank: int = 0,
    num_ranks: int = 1,
    gathered: GatheredShards | None = None,
    split: SplitWorkspace | None = None,
) -> Launch:
    """The launch that computes ``C = concat(shards) @ B``.

    Args:
        own: [M / num_ranks, K], this rank's shard; without ``gathered`` the only one.
        B: [K, N], any strides.
        C: [M, N], contiguous.
        config: BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, GROUP_SIZE_M, optionally EPILOGUE_SUBTILE,
            GROUP_SIZE_SHARDS, SPLIT_K: of the persistent kernel alone.
            WARP_SPECIALIZED: the persistent kernel of that kind, where it can serve the operands
            (``can_specialize_warps``), else the ordinary one; num_warps are those that multiply, 8.
        num_sms: programs of the persistent kernel.
        persistent: use the persistent kernel on descriptors. Three go to the kernel on pointers all
            the same: an ``own`` that is not contiguous, tensors whose strides are not multiples of
            16 bytes, and fp32 products that must not use tf32 (without matrix units, a B that comes
            through a descriptor spills: 12 KB a thread at the default tile, compiled for sm_90).
        split: what a config with SPLIT_K above 1 needs.

    Raises:
        InvalidArgument: SPLIT_K above 1 without a workspace that is large enough.
    """
    M, N = C.shape
    K = own.shape[1]
    block_m, block_n = config.kwargs["BLOCK_SIZE_M"], config.kwargs["BLOCK_SIZE_N"]
    tiles = num_ranks * triton.cdiv(own.shape[0], block_m) * triton.cdiv(N, block_n)
    source = gathered or GatheredShards(own, own, own, 1, 1)
    operands = (own, source.rows, B, C, source.arrivals, source.epoch, M, N, K)
    sharding = (rank, num_ranks, source.chunk_rows)
    precision = dot_precision(own.dtype)
    options = {
        **config_for(config, own.dtype).all_kwargs(),
        "GATHERED": gathered is not None,
        "FLAGS_PER_RANK": source.flags_per_rank,
        "INPUT_PRECISION": precision,
    }
    senders = 0
    if source.push is not None:
        senders = source.push.num_comm_sms
        options |= source.push.options()
    # Only the ordinary kernel sends the shard.
    specialized = options.pop("WARP_SPECIALIZED", False) and source.push is None
    specialized = specialized and can_specialize_warps(own.dtype)
    by_descriptor = persistent and precision != "ieee" and own.is_contiguous()
    if by_descriptor and fits_descriptor(own, source.rows, B, C):
        options.setdefault("EPILOGUE_SUBTILE", False)
        options |= {"B_COLUMN_MAJOR": B.stride(0) == 1, "NUM_SMS": num_sms}
        parts = options.get("SPLIT_K", 1)
        if parts > 1:
            options |= _workspace(config, tiles, num_sms, split)
        kernel: Any = kernel_gemm_persistent
        if specialized:
            kernel, options = _specialized(options)
        grid = (min(num_sms, tiles * parts + senders),)
        return Launch(kernel, grid, (*operands, max(B.stride()), *sharding), options)
    for name in _DESCRIPTOR_ONLY:
        options.pop(name, None)
    return Launch(
        kernel_gemm_non_persistent,
        (tiles + senders,),
        # Not the strides of ``own``: of a single row, any stride counts as contiguous.
        (*operands, *source.rows.stride(), *B.stride(), *sharding),
        options,
    )


def _specialized(options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The kernel with specialised warps, and ``options`` as it takes them."""
    # Not before it is needed: it needs Gluon.
    from triton_dist.kernels.common.gemm.warp_specialized import (
        WARPS_OF_A_GROUP,
        kernel_gemm_warp_specialized,
    )

    others = ("INPUT_PRECISION", "NUM_WARPS")
    kept = {name: value for name, value in options.items() if name not in others}
    more = {"NUM_STAGES": options["num_stages"], "num_warps": WARPS_OF_A_GROUP}
    return kernel_gemm_warp_specialized, kept | more


def _workspace(
    config: triton.Config, tiles: int, num_sms: int, split: SplitWorkspace | None
) -> dict[str, object]:
    """The arguments that the persistent kernel has for ``SPLIT_K`` above 1 alone."""
    needed, counted = split_tiles(config, tiles, num_sms)
    if split is None or needed > split.partials.numel() or counted > split.counters.numel():
        there = split and (split.partials.numel(), split.counters.numel())
        raise InvalidArgument(
            "sharded_gemm", "split", there, f"a workspace of {needed} fp32 and {counted} counters"
        )
    return {
        "NUM_WARPS": config.num_warps,
        "partials_ptr": split.partials,
        "counters_ptr": split.counters,
    }
