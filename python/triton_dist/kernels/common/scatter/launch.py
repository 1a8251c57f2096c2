"""Launches of the scattered GEMM: picks the kernel that can serve the tensors as they lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton

from triton_dist.kernels.common.gemm.launch import config_for
from triton_dist.kernels.common.launch import Launch, as_rows, dot_precision, fits_descriptor
from triton_dist.kernels.common.scatter.copy_sums import kernel_copy_sums
from triton_dist.kernels.common.scatter.deferred import kernel_add_left
from triton_dist.kernels.common.scatter.kernel import (
    kernel_gemm_scatter_non_persistent,
    kernel_gemm_scatter_persistent,
)

Scatter = Literal["tile", "slab", "add", "all"]
# Elements of all parts that are read at a time: at 8 warps and 2 bytes each, 64 registers a thread.
_READ_AT_ONCE = 32768
# Elements that a program copies at a time: 64 bytes of 2-byte ones for each thread of 8 warps.
_COPIED_AT_ONCE = 8192
# Rows of which the slabs of an all-reduce are multiples: those of the smallest tile.
_SLAB_ROWS = 16
# Waves of tiles of a slab from which on a chunk is worth more waiting than each of its tiles.
_MANY_WAVES = 2


@dataclass(frozen=True)
class Scattering:
    """Addresses where tiles go, and what is summed in the end (see ``scattered_gemm``).

    partials: what is read for the own rows: [num_ranks, slot_stride] of the output's dtype, or
        fp32 [max_rows * N] for ``"add"``. targets, flags: int64 [num_ranks], addresses.
        arrivals: int32, flags of the own slab. epoch: int32, the line of the slot
        (``slots/epochs.py``). left: int32, a word for each program of a launch
        (``scatter/deferred.py``). sums, sum_flags: of ``"all"``, int64 [num_ranks], addresses;
        else anything.
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
    left: torch.Tensor
    sums: torch.Tensor
    sum_flags: torch.Tensor


@dataclass(frozen=True)
class Chunks:
    """A slab of ``rows`` rows of tiles in chunks of ``tiles_m`` each, the last maybe less.

    group_size_m: GROUP_SIZE_M with which chunks are complete one after another.
    """

    tiles_m: int
    group_size_m: int
    rows: tuple[int, ...]
    """Rows of each chunk."""
    tiles: tuple[int, ...]
    """Tiles of each chunk."""


def chunks_of_slab(config: triton.Config, rows: int, N: int, num_chunks: int) -> Chunks:
    """[rows, N] in at most ``num_chunks`` chunks: whole groups of GROUP_SIZE_M rows of tiles, or
    one smaller group each, because the tiles of a group are complete at the same time."""
    tile = config.kwargs
    tiles_m = int(triton.cdiv(rows, tile["BLOCK_SIZE_M"]))
    tiles_n = int(triton.cdiv(N, tile["BLOCK_SIZE_N"]))
    each = int(triton.cdiv(tiles_m, num_chunks))
    group = min(tile["GROUP_SIZE_M"], each)
    each = int(triton.cdiv(each, group)) * group
    firsts = range(0, tiles_m, each)
    ends = [min(first + each, tiles_m) for first in firsts]
    block = tile["BLOCK_SIZE_M"]
    return Chunks(
        each,
        group,
        tuple(
            min(end * block, rows) - first * block for first, end in zip(firsts, ends, strict=True)
        ),
        tuple((end - first) * tiles_n for first, end in zip(firsts, ends, strict=True)),
    )


def slab_rows(M: int, num_ranks: int) -> int:
    """Rows of each slab of an all-reduce of M rows, but for the last ones, which may be short or
    empty."""
    return int(triton.cdiv(M, num_ranks * _SLAB_ROWS)) * _SLAB_ROWS


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
    num_chunks: int = 1,
) -> Launch:
    """The launch that computes ``A @ B``, scatters its tiles, and sums the own rows into C.

    Args:
        A: [M, K]. B: [K, N], any strides, both. C: [M / num_ranks, N], the own rows of the sum;
            of ``"all"`` [M, N], of which the own ones are written. Contiguous.
        bias: [N], added to the sum; contiguous.
        config, num_sms, persistent: as for ``sharded_gemm``; an A that is not contiguous goes to
            the kernel on pointers too.
        num_chunks: of a slab: each pushed for itself, or of ``"all"`` in turn with those of the
            other slabs.
    """
    A = as_rows(A)
    M, K = A.shape
    rows, N = slab_rows(M, to.num_ranks) if to.scatter == "all" else C.shape[0], C.shape[1]
    precision = dot_precision(A.dtype)
    tiles_per_slab = tiles_of_slab(config, rows, N)
    tiles = to.num_ranks * tiles_per_slab
    slots = (A, B, C, C if bias is None else bias, to.partials, to.targets, to.flags, to.arrivals)
    sums = (to.sums, to.sum_flags, M, rows, N, K)
    chunk_tiles_m, summing = _summing(C, bias, config, to, rows, num_chunks)
    options: dict[str, Any] = {
        **config_for(config, A.dtype).all_kwargs(),
        "INPUT_PRECISION": precision,
        **summing,
    }
    where = (to.slot_stride, chunk_tiles_m, to.rank)
    # A slab of partials is a matrix like C: what TMA can do with one, it can do with the other.
    by_descriptor = persistent and precision != "ieee" and A.is_contiguous()
    if by_descriptor and fits_descriptor(A, B, C):
        options.setdefault("EPILOGUE_SUBTILE", False)
        # A chunk is pushed after its last tile, which is to be announced at once where the next one
        # is a large part of all.
        later = to.scatter in ("tile", "all") or tiles_per_slab >= _MANY_WAVES * num_sms
        options |= {
            "B_COLUMN_MAJOR": B.stride(0) == 1,
            "NUM_SMS": num_sms,
            "ANNOUNCE_LATER": later and to.scatter != "add",
        }
        return Launch(
            kernel_gemm_scatter_persistent,
            (min(num_sms, tiles),),
            (*slots, to.epoch, to.left, *sums, max(B.stride()), *where),
            options,
        )
    options.pop("EPILOGUE_SUBTILE", None)
    return Launch(
        kernel_gemm_scatter_non_persistent,
        (tiles,),
        (*slots, to.epoch, *sums, *A.stride(), *B.stride(), *where),
        options,
    )


def _summing(
    C: torch.Tensor,
    bias: torch.Tensor | None,
    config: triton.Config,
    to: Scattering,
    rows: int,
    num_chunks: int,
) -> tuple[int, dict[str, Any]]:
    """Rows of tiles of a chunk, and how kernels are told to add slabs of ``rows`` rows."""
    tile = config.kwargs
    chunk_tiles_m, group_size_m = 1, tile["GROUP_SIZE_M"]
    if to.scatter in ("slab", "all"):
        chunks = chunks_of_slab(config, rows, C.shape[1], num_chunks)
        chunk_tiles_m, group_size_m = chunks.tiles_m, chunks.group_size_m
    part_bytes = to.num_ranks * C.element_size()
    return chunk_tiles_m, {
        "NUM_RANKS": to.num_ranks,
        "SCATTER": to.scatter,
        "HAS_BIAS": bias is not None,
        "GROUP_SIZE_M": group_size_m,
        "REDUCE_ROWS": rows_at_once(tile["BLOCK_SIZE_M"], tile["BLOCK_SIZE_N"], part_bytes),
    }


def add_left(
    C: torch.Tensor,
    bias: torch.Tensor | None,
    config: triton.Config,
    to: Scattering,
    *,
    M: int,
    num_sms: int,
    num_chunks: int = 1,
) -> Launch:
    """The launch that adds what the GEMM ``scattered_gemm(A, B, C, bias, config, to, …)`` on
    descriptors, with an A of M rows, has left (``scatter/deferred.py``)."""
    rows, N = slab_rows(M, to.num_ranks) if to.scatter == "all" else C.shape[0], C.shape[1]
    chunk_tiles_m, summing = _summing(C, bias, config, to, rows, num_chunks)
    block_m, block_n = config.kwargs["BLOCK_SIZE_M"], config.kwargs["BLOCK_SIZE_N"]
    tiles = to.num_ranks * tiles_of_slab(config, rows, N)
    arguments = (
        C, C if bias is None else bias, to.partials, to.arrivals, to.epoch, to.left, to.sums,
        to.sum_flags, M, rows, N, to.slot_stride, chunk_tiles_m, to.rank,
    )  # fmt: skip
    options = {
        **summing,
        "NUM_SMS": num_sms,
        "BLOCK_SIZE_M": block_m,
        "BLOCK_SIZE_N": block_n,
        "num_warps": 8,
    }
    return Launch(kernel_add_left, (min(num_sms, tiles),), arguments, options)


def rows_at_once(block_m: int, block_n: int, bytes_of_parts: int) -> int:
    """Rows of a tile that are summed at a time; a power of two."""
    most = 2 * _READ_AT_ONCE // bytes_of_parts // block_n
    return max(1, min(block_m, 1 << most.bit_length() - 1 if most else 1))


def copy_sums(
    C: torch.Tensor,
    sums: torch.Tensor,
    arrivals: torch.Tensor,
    config: triton.Config,
    to: Scattering,
    *,
    num_chunks: int,
    copy: bool,
) -> Launch:
    """The launch that brings to C [M, N] what the GEMM ``scattered_gemm(…, to)`` on each peer adds,
    as it arrives in ``sums``, a matrix like C; its flags are ``arrivals``, int32 [tile, rank].

    Without ``copy`` it only waits until all is there; then C is ``sums``.
    """
    M, N = C.shape
    rows = slab_rows(M, to.num_ranks)
    chunks = chunks_of_slab(config, rows, N, num_chunks)
    block_m, block_n = config.kwargs["BLOCK_SIZE_M"], config.kwargs["BLOCK_SIZE_N"]
    options = {
        "NUM_RANKS": to.num_ranks,
        "COPY": copy,
        "BLOCK_SIZE_M": block_m,
        "BLOCK_SIZE_N": block_n,
        "GROUP_SIZE_M": chunks.group_size_m,
        "COPY_ROWS": max(1, min(block_m, _COPIED_AT_ONCE // block_n)),
        "num_warps": 8,
    }
    return Launch(
        kernel_copy_sums,
        (to.num_ranks * tiles_of_slab(config, rows, N),),
        (C, sums, arrivals, to.epoch, M, rows, N, chunks.tiles_m, to.rank),
        options,
    )
