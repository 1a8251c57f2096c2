"""Launches of the scattered GEMM: picks the kernel that can serve the tensors as they lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton

from triton_dist.kernels.common.gemm_launch import config_for
from triton_dist.kernels.common.launch import Launch, dot_precision, fits_descriptor
from triton_dist.kernels.common.scattered_gemm import (
    kernel_gemm_scatter_non_persistent,
    kernel_gemm_scatter_persistent,
    kernel_reduce_slab,
)

Scatter = Literal["tile", "slab", "add"]
# Elements of a tile that are summed at a time: at 8 warps 32 a thread, of each rank.
_REDUCED_AT_ONCE = 8192
# Rows and columns of a program of the reduction after the GEMM.
_SLAB_TILE = (16, 256)


@dataclass(frozen=True)
class Scattering:
    """Where tiles go, and what is summed in the end (see ``scattered_gemm``).

    partials: what is read for the own rows: [num_ranks, slot_stride] of the output's dtype, or
        fp32 [max_rows * N] for ``"add"``. targets, flags: int64 [num_ranks], addresses.
        arrivals: int32, flags of the own slab. epoch: int32, the epoch and the guard of waits.
    """

    scatter: Scatter
    rank: int
    num_ranks: int
    partials: torch.Tensor
    slot_stride: int
    targets: torch.Tensor
    flags: torch.Tensor
    arrivals: torch.Tensor
    epoch: torch.Tensor


def tiles_of_slab(config: triton.Config, rows: int, N: int) -> int:
    """Tiles of [rows, N]."""
    block_m, block_n = config.kwargs["BLOCK_SIZE_M"], config.kwargs["BLOCK_SIZE_N"]
    return int(triton.cdiv(rows, block_m) * triton.cdiv(N, block_n))


def scattered_gemm(
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    bias: torch.Tensor | None,
    config: triton.Config,
    to: Scattering,
    *,
    num_sms: int,
    persistent: bool,
) -> Launch:
    """The launch that computes ``A @ B``, scatters its tiles and, unless a slab at a time is sent,
    sums the own rows into C.

    Args:
        A: [num_ranks * rows, K]. B: [K, N], any strides, both. C: [rows, N], contiguous.
        bias: [N], added to the sum; contiguous.
        config, num_sms, persistent: as for ``sharded_gemm``; an A that is not contiguous goes to
            the kernel on pointers too.
    """
    rows, N = C.shape
    K = A.shape[1]
    precision = dot_precision(A.dtype)
    tiles = to.num_ranks * tiles_of_slab(config, rows, N)
    launched = config_for(config, A.dtype).all_kwargs()
    operands = (
        A, B, C, C if bias is None else bias, to.partials, to.targets, to.flags, to.arrivals,
        to.epoch, rows, N, K,
    )  # fmt: skip
    block_m, block_n = config.kwargs["BLOCK_SIZE_M"], config.kwargs["BLOCK_SIZE_N"]
    options = {
        **launched,
        "NUM_RANKS": to.num_ranks,
        "SCATTER": to.scatter,
        "HAS_BIAS": bias is not None,
        "INPUT_PRECISION": precision,
        "REDUCE_ROWS": max(1, min(block_m, _REDUCED_AT_ONCE // block_n)),
    }
    # A slab of partials is a matrix like C: what TMA can do with one, it can do with the other.
    by_descriptor = persistent and precision != "ieee" and A.is_contiguous()
    if by_descriptor and fits_descriptor(A, B, C):
        options.setdefault("EPILOGUE_SUBTILE", False)
        options |= {"B_COLUMN_MAJOR": B.stride(0) == 1, "NUM_SMS": num_sms}
        return Launch(
            kernel_gemm_scatter_persistent,
            (min(num_sms, tiles),),
            (*operands, max(B.stride()), to.slot_stride, to.rank),
            options,
        )
    options.pop("EPILOGUE_SUBTILE", None)
    return Launch(
        kernel_gemm_scatter_non_persistent,
        (tiles,),
        (*operands, *A.stride(), *B.stride(), to.slot_stride, to.rank),
        options,
    )


def reduced_slab(C: torch.Tensor, bias: torch.Tensor | None, to: Scattering) -> Launch:
    """The launch that sums the own rows once every peer's slab is there: C [rows, N]."""
    rows, N = C.shape
    block_m, block_n = _SLAB_TILE
    return Launch(
        kernel_reduce_slab,
        (int(triton.cdiv(rows, block_m) * triton.cdiv(N, block_n)),),
        (
            C, C if bias is None else bias, to.partials, to.arrivals, to.epoch, rows, N,
            to.slot_stride, to.rank,
        ),
        {
            "NUM_RANKS": to.num_ranks,
            "HAS_BIAS": bias is not None,
            "BLOCK_SIZE_M": block_m,
            "BLOCK_SIZE_N": block_n,
        },
    )  # fmt: skip
