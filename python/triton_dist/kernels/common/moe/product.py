"""Grouped GEMM: multiply each row of A by the weights of the expert of its route.

A route is a pair of a token and an expert that was chosen for it. Rows of A are gathered by
pointers while loading. Weights are loaded through a 3-D descriptor, or by pointers if TMA does not
support their layout. Reads of weights beyond an expert's K rows must return zero, because 0 times
NaN is not 0. A 2-D descriptor over all weights would instead read rows of the next expert.

The kernel is persistent and reads the number of tiles from memory (``moe/routing.py``). Padding
(routes without an expert) also has tiles. They skip the K loop and store zeros, so every row of the
output is written.

Shards of A may arrive from peers during the kernel, sent by copy engines (``slots/gathered.py``).
The index of a shard in the order of arrival is its position. This rank's rows are read from its A.
A tile waits for the largest position of its rows, and thus for all smaller positions. Tiles of
padding wait too, so a finished kernel has received data from every peer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.kernels.common.gemm.scales import (
    BLOCK_ELEMENTS,
    BLOCK_SCALES,
    FAST_ACCUM,
    SCALE_BLOCK,
    UNSCALED,
    add_product,
    apply_scales,
)
from triton_dist.kernels.common.gemm.spaces import can_specialize_warps, config_for_dtype
from triton_dist.kernels.common.moe.routing import (
    TILE_RECORD_WORDS,
    BlockMap,
    await_positions,
    row_addresses,
    tile_of_work_item,
)
from triton_dist.kernels.common.moe.scales import OperandScales
from triton_dist.kernels.common.peers import GatheredShards
from triton_dist.runtime.device import current_device
from triton_dist.runtime.launch import Launch, dot_precision

_ALIGNMENT = 16


class BlockMapArgument(NamedTuple):
    routes: Any
    tiles: Any
    num_tiles: Any


class WeightStrides(NamedTuple):
    """Strides in elements: of A along M, and of B along E, K and N."""

    am: Any
    be: Any
    bk: Any
    bn: Any


class Sources(NamedTuple):
    """This rank's shard of A, and the flags and epoch of the slot that receives other shards."""

    local_shard: Any
    arrivals: Any
    epoch: Any


class GroupedPlan(NamedTuple):
    """Constants of a grouped product other than its tile sizes.

    A_ALIGNED, C_ALIGNED: rows of A or C begin at multiples of 16 bytes. SORTED: rows of C are
    sorted by expert, else they are in the order of routes. A_SORTED: rows of A are sorted by
    expert, else they are gathered. SILU_MUL: C is silu(left half) * right half, N / 2 wide; a tile
    has BLOCK_SIZE_N / 2 columns of each half. DESCRIPTORS: read B by TMA. NUM_SOURCES: number of
    shards of A. SCALING: see ``gemm/scales.py``. SINGLE_B_SCALE: all columns of a tile lie in one
    block of scales. NUM_STAGES: only for the warp-specialized kernel.
    """

    A_ALIGNED: Any
    C_ALIGNED: Any
    SORTED: Any
    A_SORTED: Any
    SILU_MUL: Any
    DESCRIPTORS: Any
    B_COLUMN_MAJOR: Any
    PRECISION: Any
    NUM_SOURCES: Any
    FLAGS_PER_RANK: Any
    SCALING: Any
    SINGLE_B_SCALE: Any
    NUM_STAGES: Any = 0


@jit
def load_weights(
    b, expert, k, column, N, K, weight_strides, grouped_plan: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
):  # fmt: skip
    """Return the block [BLOCK_SIZE_K, COLUMNS] at ``k`` and ``column`` of an expert's weights.

    Elements beyond K are zero. ``b`` is a descriptor or the pointer.
    """
    if grouped_plan.DESCRIPTORS:
        if grouped_plan.B_COLUMN_MAJOR:
            return tl.reshape(b.load([expert, column, k]), (COLUMNS, BLOCK_SIZE_K)).T
        else:
            return tl.reshape(b.load([expert, k, column]), (BLOCK_SIZE_K, COLUMNS))
    else:
        row = k + tl.arange(0, BLOCK_SIZE_K)
        n = column + tl.arange(0, COLUMNS)
        base = b + expert.to(tl.int64) * weight_strides.be
        return tl.load(
            base
            + row.to(tl.int64)[:, None] * weight_strides.bk
            + n.to(tl.int64)[None, :] * weight_strides.bn,
            mask=(row < K)[:, None] & (n < N)[None, :],
            other=0.0,
        )


@jit
def make_weights_operand(
    b_ptr, E, N, K, weight_strides, grouped_plan: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
):  # fmt: skip
    """Return the descriptor of B, or the pointer if TMA does not support its layout."""
    b = b_ptr
    if grouped_plan.DESCRIPTORS:
        if grouped_plan.B_COLUMN_MAJOR:
            b = tl.make_tensor_descriptor(
                b_ptr, [E, N, K], [weight_strides.be, weight_strides.bn, 1],
                [1, COLUMNS, BLOCK_SIZE_K],
            )  # fmt: skip
        else:
            b = tl.make_tensor_descriptor(
                b_ptr, [E, K, N], [weight_strides.be, weight_strides.bk, 1],
                [1, BLOCK_SIZE_K, COLUMNS],
            )  # fmt: skip
    return b


@jit
def multiply_tile(
    a_ptr, own_ptr, a_row, b, c_ptr, record, E, N, K, weight_strides, out_columns, route, rank,
    shard_rows, scales, grouped_plan: tl.constexpr, BLOCK_SIZE_M: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_SIZE_K: tl.constexpr,
):  # fmt: skip
    """Store a tile of C. ``record`` is (expert, first row, end row, first column) of the tile.

    ``a_row`` and ``route`` [BLOCK_SIZE_M] are the rows of A and the routes of the tile's rows.
    """
    SCALING: tl.constexpr = grouped_plan.SCALING
    SINGLE_B_SCALE: tl.constexpr = grouped_plan.SINGLE_B_SCALE
    PRECISION: tl.constexpr = grouped_plan.PRECISION
    expert, row, end, column = record
    k = tl.arange(0, BLOCK_SIZE_K)
    rows = row + tl.arange(0, BLOCK_SIZE_M)
    is_row = rows < end
    a_rows = row_addresses(
        a_ptr, own_ptr, a_row, rank, shard_rows, weight_strides.am, grouped_plan.NUM_SOURCES
    )
    if grouped_plan.A_ALIGNED:
        a_rows = tl.multiple_of(a_rows, 16)
    scale_rows = 0
    b_scale_ptr = 0
    if SCALING != UNSCALED:
        scale_rows = row_addresses(
            scales.a, scales.own, a_row, rank, shard_rows, scales.stride_am,
            grouped_plan.NUM_SOURCES,
        )  # fmt: skip
        b_scale_ptr = scales.b + expert.to(tl.int64) * scales.stride_be
    # As in ``gemm.tile.multiply_tile``.
    TRANSPOSED: tl.constexpr = (
        SCALING >= FAST_ACCUM
        and (grouped_plan.DESCRIPTORS and grouped_plan.B_COLUMN_MAJOR)
        and (BLOCK_SIZE_M < 64 and COLUMNS >= 64)
    )
    SHAPE: tl.constexpr = (COLUMNS, BLOCK_SIZE_M) if TRANSPOSED else (BLOCK_SIZE_M, COLUMNS)
    product = tl.zeros(SHAPE, tl.float32)
    if grouped_plan.SILU_MUL:
        up = tl.zeros(SHAPE, tl.float32)
    # Padding routes have no expert: skip the K loop and store zeros.
    steps = tl.where(expert < E, tl.cdiv(K, BLOCK_SIZE_K), 0)
    with dl.mark("mma"):
        for step in range(steps):
            k_begin = step * BLOCK_SIZE_K
            # Load weights first, because they do not depend on the routes.
            weights = load_weights(
                b, expert, k_begin, column, N, K, weight_strides, grouped_plan, COLUMNS,
                BLOCK_SIZE_K,
            )  # fmt: skip
            a = tl.load(
                a_rows[:, None] + (k_begin + k)[None, :],
                mask=is_row[:, None] & (k_begin + k < K)[None, :],
                other=0.0,
            )
            a_scale = 0
            if SCALING == BLOCK_SCALES:
                # The load bypasses L1, which may hold the scales of an earlier call.
                a_scale = tl.load(
                    scale_rows + k_begin // SCALE_BLOCK * scales.stride_ak,
                    mask=is_row, other=0.0, cache_modifier=".cg",
                )  # fmt: skip
            product = add_product(
                product, a, weights, k_begin, column, N, a_scale, b_scale_ptr, scales,
                SINGLE_B_SCALE, PRECISION, SCALING,
            )  # fmt: skip
            if grouped_plan.SILU_MUL:
                weights = load_weights(
                    b, expert, k_begin, out_columns + column, N, K, weight_strides, grouped_plan,
                    COLUMNS, BLOCK_SIZE_K,
                )  # fmt: skip
                up = add_product(
                    up, a, weights, k_begin, out_columns + column, N, a_scale, b_scale_ptr, scales,
                    SINGLE_B_SCALE, PRECISION, SCALING,
                )  # fmt: skip
    if TRANSPOSED:
        product = product.T
        if grouped_plan.SILU_MUL:
            up = up.T
    if SCALING >= FAST_ACCUM and SCALING != BLOCK_SCALES:
        # Padding has no scales.
        scaled_rows = rows < tl.where(expert < E, end, 0)
        scaled_columns = tl.where(expert < E, N, 0)
        a_scale = tl.load(scale_rows, mask=scaled_rows, other=0.0, cache_modifier=".cg")
        product = apply_scales(product, a_scale, b_scale_ptr, scales, column, scaled_columns)
        if grouped_plan.SILU_MUL:
            up = apply_scales(
                up, a_scale, b_scale_ptr, scales, out_columns + column, scaled_columns
            )
    if grouped_plan.SILU_MUL:
        product = product / (1.0 + tl.exp(-product)) * up
    out = rows if grouped_plan.SORTED else route
    c_rows = c_ptr + out.to(tl.int64) * out_columns
    if grouped_plan.C_ALIGNED:
        c_rows = tl.multiple_of(c_rows, 16)
    columns = column + tl.arange(0, COLUMNS)
    with dl.mark("store"):
        tl.store(
            c_rows[:, None] + columns[None, :],
            product.to(c_ptr.dtype.element_ty),
            mask=is_row[:, None] & (columns < out_columns)[None, :],
        )


@jit(do_not_specialize=["E", "routes_per_row", "rank", "shard_rows"])
def kernel_grouped_gemm(
    a_ptr, b_ptr, c_ptr, blocks, E, N, K, weight_strides, out_columns, routes_per_row,
    grouped_plan: tl.constexpr, BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr, GROUP_SIZE_M: tl.constexpr, sources=None, rank=0, shard_rows=1,
    scales=None,
):  # fmt: skip
    """Compute C [R, out_columns] from A and B [E, K, N]. Any grid.

    R is the number of routes; each row of A has ``routes_per_row`` routes. If ``NUM_SOURCES`` is
    above 1, A consists of shards of ``shard_rows`` rows. This rank's shard is at
    ``sources.local_shard``. Another shard is in A as soon as its flag is set
    (``peers.GatheredShards``). ``scales``: ``GroupedScales``, unless UNSCALED.
    """
    COLUMNS: tl.constexpr = BLOCK_SIZE_N // 2 if grouped_plan.SILU_MUL else BLOCK_SIZE_N
    tiles_n = tl.cdiv(out_columns, COLUMNS)
    b = make_weights_operand(b_ptr, E, N, K, weight_strides, grouped_plan, COLUMNS, BLOCK_SIZE_K)
    # The host does not know the number of tiles.
    work_items = tl.load(blocks.num_tiles) * tiles_n
    awaited_position = 0
    own_ptr = a_ptr
    if grouped_plan.NUM_SOURCES > 1:
        own_ptr = sources.local_shard
    for work_item in range(tl.program_id(0), work_items, tl.num_programs(0)):
        expert, row, end, n, tile = tile_of_work_item(
            blocks.tiles, work_item, tiles_n, BLOCK_SIZE_M, GROUP_SIZE_M
        )
        rows = row + tl.arange(0, BLOCK_SIZE_M)
        is_row = rows < end
        route = rows
        if not grouped_plan.A_SORTED:
            route = tl.load(blocks.routes + rows, mask=is_row, other=0)
        a_row = route // routes_per_row
        if grouped_plan.NUM_SOURCES > 1:
            # Word 6 of a tile's record: largest position of the sources of the tile's rows.
            last_position = tl.load(blocks.tiles + tile * TILE_RECORD_WORDS + 6)
            awaited_position, wait_token = await_positions(
                awaited_position, last_position, sources, rank, grouped_plan
            )
            a_row = dl.consume_token(a_row, wait_token)
        multiply_tile(
            a_ptr, own_ptr, a_row, b, c_ptr, (expert, row, end, n * COLUMNS), E, N, K,
            weight_strides, out_columns, route, rank, shard_rows, scales, grouped_plan,
            BLOCK_SIZE_M, COLUMNS, BLOCK_SIZE_K,
        )  # fmt: skip


def fits_weights_descriptor(B: torch.Tensor) -> bool:
    """Return whether TMA can address B [E, K, N].

    TMA requires a unit stride along N or K. The other strides and the address must be multiples of
    16 bytes.
    """
    by_expert, *inner = B.stride()
    strides = (max(inner), by_expert if B.shape[0] > 1 else _ALIGNMENT)
    return (
        min(inner) == 1
        and all(stride and stride * B.element_size() % _ALIGNMENT == 0 for stride in strides)
        and B.data_ptr() % _ALIGNMENT == 0
    )


def weights_layout(B: torch.Tensor) -> str:
    """Return the layout of B [E, K, N]; ``"strided"`` weights are read by pointers."""
    if not fits_weights_descriptor(B):
        return "strided"
    return "column-major" if B.stride(1) == 1 else "row-major"


def grouped_product(
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    blocks: BlockMap,
    config: triton.Config,
    *,
    is_sorted: bool = False,
    silu_mul: bool = False,
    gathered: GatheredShards | None = None,
    rank: int = 0,
    scales: OperandScales | None = None,
    routes_per_row: int | None = None,
) -> Launch:
    """Return the launch that computes C [R, N], or [R, N / 2] with ``silu_mul``.

    Args:
        A: [M, K], one row per token, or [R, K], one row per route; unit stride along K.
        B: [E, K, N], any strides.
        blocks: map whose tiles have the config's BLOCK_SIZE_M rows.
        config: BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K; optionally GROUP_SIZE_M, PROGRAMS (number
            of programs per SM) and WARP_SPECIALIZED. The warp-specialized kernel requires fp8
            operands with BLOCK scales; for other operands WARP_SPECIALIZED is ignored.
        is_sorted: whether rows of C are sorted by expert instead of in the order of routes.
        silu_mul: multiply silu of the left half of the product by the right half.
        gathered: memory that receives the shards of peers. A is then this rank's shard,
            contiguous, and ``blocks`` has one source per rank.
        scales: scales of fp8 operands.
        routes_per_row: routes per row of A; default: R / M. 0 if the rows of A are sorted by
            expert.
    """
    precision = dot_precision(A.dtype)
    options = config_for_dtype(config, A.dtype).all_kwargs()
    options.pop("EPILOGUE_SUBTILE", None)
    options.setdefault("GROUP_SIZE_M", 8)
    max_programs = current_device().num_sms * options.pop("PROGRAMS", 1)
    columns = options["BLOCK_SIZE_N"] // (2 if silu_mul else 1)
    work_items = len(blocks.tiles) * -(-C.shape[1] // columns)
    layout = weights_layout(B)
    item_bytes = A.element_size()
    # A block of a descriptor must begin at a multiple of 16 bytes.
    are_halves_aligned = C.shape[1] * item_bytes % _ALIGNMENT == 0
    halves_fit = not silu_mul or layout != "row-major" or are_halves_aligned
    rows = A if gathered is None else gathered.rows
    memory = BlockMapArgument(blocks.routes, blocks.tiles, blocks.num_tiles)
    strides = WeightStrides(rows.stride(0), *B.stride())
    plan = GroupedPlan(
        A_ALIGNED=all(n % _ALIGNMENT == 0 for n in (rows.stride(0) * item_bytes, A.data_ptr())),
        C_ALIGNED=C.shape[1] * C.element_size() % _ALIGNMENT == 0,
        SORTED=is_sorted,
        A_SORTED=routes_per_row == 0,
        SILU_MUL=silu_mul,
        # If ``tl.dot`` cannot use tensor cores, operands loaded by descriptor spill registers.
        DESCRIPTORS=layout != "strided" and precision != "ieee" and halves_fit,
        B_COLUMN_MAJOR=layout == "column-major",
        PRECISION=precision,
        NUM_SOURCES=1 if gathered is None else rows.shape[0] // A.shape[0],
        FLAGS_PER_RANK=1 if gathered is None else gathered.flags_per_rank,
        SCALING=UNSCALED.value if scales is None else scales.scaling,
        SINGLE_B_SCALE=columns <= BLOCK_ELEMENTS and not (silu_mul and C.shape[1] % columns),
    )
    if scales is not None:
        options["scales"] = scales.kernel_argument()
    if gathered is not None:
        sources = Sources(A, gathered.arrivals, gathered.epoch)
        options |= {"sources": sources, "rank": rank, "shard_rows": A.shape[0]}
    if routes_per_row is None:
        routes_per_row = len(blocks.routes) // rows.shape[0]
    out_columns = C.shape[1]
    E, K, N = B.shape
    kernel: Any = kernel_grouped_gemm
    fits_specialized = (
        can_specialize_warps(A.dtype)
        and (scales is not None and scales.is_block and K % BLOCK_ELEMENTS == 0)
        and (plan.A_ALIGNED and plan.DESCRIPTORS and plan.B_COLUMN_MAJOR)
        and B.stride(0) % B.stride(2) == 0  # experts are stacked along the columns
        and not (silu_mul and out_columns % columns)
    )
    if options.pop("WARP_SPECIALIZED", False) and fits_specialized:
        # Imported late, because not every Triton has Gluon.
        from triton_dist.kernels.common.moe.warp_specialized import (
            kernel_grouped_gemm_warp_specialized as kernel,
        )

        plan = plan._replace(NUM_STAGES=options["num_stages"], PRECISION="", SINGLE_B_SCALE=False)
        options["num_warps"] = 4  # Triton adds the other groups
    return Launch(
        kernel,
        (min(max_programs, work_items),),
        (rows, B, C, memory, E, N, K, strides, out_columns, max(1, routes_per_row)),
        {**options, "grouped_plan": plan},
    )
