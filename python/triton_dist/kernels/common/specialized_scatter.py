"""Launches of the scattered GEMM with specialised warps, for slabs that a copy engine pushes: the
product into memory of this rank (``warp_specialized_scatter.py``), then the sum of the own rows
(``sum_parts.py``)."""

from __future__ import annotations

import torch
import triton

from triton_dist.kernels.common.gemm_launch import can_specialize_warps, workspace_options
from triton_dist.kernels.common.launch import Launch, as_rows, fits_descriptor
from triton_dist.kernels.common.scattered_gemm_launch import (
    Scatter,
    Scattering,
    chunks_of_slab,
    counts_later,
    tiles_of_slab,
)
from triton_dist.kernels.common.split_k import SplitWorkspace
from triton_dist.kernels.common.sum_parts import kernel_sum_parts

HALVES = 2
"""What a tile counts: the halves of its rows are stored, and counted, by a group of warps each."""
# Of each part, what a thread loads at a time; and of all parts, at least.
_VECTOR_BYTES, _BYTES_AT_ONCE = 16, 64
_WARPS_THAT_SUM = 8
# Programs for each multiprocessor: with 64 bytes a thread, 64 KB are on their way to each.
_PROGRAMS_OF_AN_SM = 4


def specializes_warps(
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    config: triton.Config,
    scatter: Scatter,
    persistent: bool,
) -> bool:
    """Whether ``specialized_scatter`` and ``sum_parts`` serve a call with this config; else
    ``scattered_gemm`` does."""
    return bool(
        config.kwargs.get("WARP_SPECIALIZED")
        and scatter == "slab"
        and persistent
        and A.is_contiguous()
        and can_specialize_warps(A.dtype)
        and fits_descriptor(as_rows(A), B, as_rows(C))
    )


def specialized_scatter(
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    config: triton.Config,
    to: Scattering,
    *,
    num_sms: int,
    num_chunks: int,
    split: SplitWorkspace | None = None,
) -> Launch:
    """The launch that computes ``A @ B`` into ``to.staged`` and counts the tiles of each chunk.

    Args:
        A: [M, K]. B: [K, N]. C: [M / num_ranks, N], of which the shape counts alone.
        config: of which ``specializes_warps``; SPLIT_K as for ``sharded_gemm``.
        num_chunks: of a slab.
        split: what a config with SPLIT_K above 1 needs.

    Raises:
        InvalidArgument: SPLIT_K above 1 without a workspace that is large enough.
    """
    A = as_rows(A)
    (M, K), (rows, N) = A.shape, C.shape
    tile = config.kwargs
    tiles_per_slab = tiles_of_slab(config, rows, N)
    tiles, parts = to.num_ranks * tiles_per_slab, tile.get("SPLIT_K", 1)
    chunks = chunks_of_slab(config, rows, N, num_chunks)
    # Not before it is needed: it needs Gluon.
    from triton_dist.kernels.common.warp_specialized_scatter import (
        kernel_gemm_scatter_warp_specialized,
    )
    from triton_dist.kernels.common.warp_specialized_tile import WARPS_OF_A_GROUP

    options = {
        "NUM_RANKS": to.num_ranks,
        "ANNOUNCE_LATER": counts_later(tiles_per_slab, num_sms),
        "B_COLUMN_MAJOR": B.stride(0) == 1,
        "NUM_SMS": num_sms,
        "NUM_STAGES": config.num_stages,
        **{f"BLOCK_SIZE_{axis}": tile[f"BLOCK_SIZE_{axis}"] for axis in "MNK"},
        "GROUP_SIZE_M": chunks.group_size_m,
        "EPILOGUE_SUBTILE": bool(tile.get("EPILOGUE_SUBTILE")),
        "SPLIT_K": parts,
        "num_warps": WARPS_OF_A_GROUP,
    }
    if parts > 1:
        options |= workspace_options("specialized_scatter", config, tiles, num_sms, split)
    return Launch(
        kernel_gemm_scatter_warp_specialized,
        (min(num_sms, tiles * parts),),
        (
            A, B, to.staged, to.flags, to.epoch, M, rows, N, K, max(B.stride()), to.slot_stride,
            chunks.tiles_m, to.rank,
        ),
        options,
    )  # fmt: skip


def sum_parts(
    C: torch.Tensor,
    bias: torch.Tensor | None,
    config: triton.Config,
    to: Scattering,
    *,
    num_sms: int,
    num_chunks: int,
) -> Launch:
    """The launch that sums the own rows [rows, N] over all ranks into C.

    Args:
        C: contiguous, its rows multiples of 16 bytes.
        bias: [N], added to the sum; contiguous.
        config, num_chunks: of the GEMM: the chunks in which the peers' parts arrive.
    """
    assert to.staged is not None
    rows, N = C.shape
    chunks = chunks_of_slab(config, rows, N, num_chunks)
    elements = _VECTOR_BYTES // C.element_size()
    at_once = _BYTES_AT_ONCE // (_VECTOR_BYTES * triton.next_power_of_2(to.num_ranks))
    vectors = 32 * _WARPS_THAT_SUM * max(1, at_once)
    blocks = int(triton.cdiv(C.numel(), vectors * elements))
    chunk_size = chunks.tiles_m * config.kwargs["BLOCK_SIZE_M"] * N
    return Launch(
        kernel_sum_parts,
        (min(blocks, _PROGRAMS_OF_AN_SM * num_sms),),
        (
            to.staged[to.rank], to.partials, C if bias is None else bias, C, to.arrivals, to.epoch,
            C.numel(), N, to.slot_stride, chunk_size, to.rank,
        ),
        {
            "NUM_RANKS": to.num_ranks,
            "HAS_BIAS": bias is not None,
            "VECTORS": vectors,
            "VECTOR_SIZE": elements,
            "num_warps": _WARPS_THAT_SUM,
        },
    )  # fmt: skip
