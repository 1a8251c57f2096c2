"""Warp-specialized version of ``kernel_grouped_gemm`` for Hopper, in Gluon.

It has the arguments of ``kernel_grouped_gemm`` and processes tiles in the same order.
``gemm/warp_specialized.py`` describes the ring buffer and the consumer warps. Here the producer has
four warps. They gather the rows of A by ``cp.async``, so no separate launch copies rows. One of
them loads the weights by TMA. CPU ranks run ``kernel_grouped_gemm``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from triton_dist import language as dl
from triton_dist.kernels.common.gemm.ring import BlockScales, multiply_promoted, next_stage
from triton_dist.kernels.common.moe.routing import (
    TILE_RECORD_WORDS,
    await_positions,
    row_addresses,
    tile_of_work_item,
)
from triton_dist.runtime.triton_compat import gluon_tma_copies

tma_load, _ = gluon_tma_copies()

CONSUMER_REGISTERS = gl.constexpr(232)
PRODUCER_REGISTERS = gl.constexpr(40)


@gluon.jit
def _gather(
    a_ptr, b_ptr, blocks, sources, a_ring, b_ring, full, empty, E, N, K, weight_strides,
    out_columns, routes_per_row, rank, shard_rows, grouped_plan: gl.constexpr,
    GROUP_SIZE_M: gl.constexpr,
):  # fmt: skip
    """Run the producer warps."""
    NUM_STAGES: gl.constexpr = a_ring.shape[0]
    BLOCK_SIZE_M: gl.constexpr = a_ring.shape[1]
    BLOCK_SIZE_K: gl.constexpr = a_ring.shape[2]
    HALF_N: gl.constexpr = b_ring.shape[1] // 2
    COLUMNS: gl.constexpr = HALF_N if grouped_plan.SILU_MUL else 2 * HALF_N
    # Each thread copies 16 bytes at a time.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    ROW_INDEX_LAYOUT: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    # The experts' columns are stacked in one descriptor. A tile may thus load columns of the next
    # expert, but their products are not stored.
    columns_of_expert = (weight_strides.be // weight_strides.bn).to(gl.int32)
    b_desc = tma.make_tensor_descriptor(
        b_ptr, [(E - 1) * columns_of_expert + N, K], [weight_strides.bn, 1],
        [HALF_N, BLOCK_SIZE_K], b_ring.layout,
    )  # fmt: skip
    k = gl.arange(0, BLOCK_SIZE_K, layout=gl.SliceLayout(0, LAYOUT))
    right_half = out_columns if grouped_plan.SILU_MUL else HALF_N
    own_ptr = a_ptr
    if grouped_plan.NUM_SOURCES > 1:
        own_ptr = sources.local_shard
    tiles_n = gl.cdiv(out_columns, COLUMNS)
    work_items = gl.load(blocks.num_tiles) * tiles_n
    awaited_position = gl.to_tensor(0)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for work_item in range(gl.program_id(0), work_items, gl.num_programs(0)):
        expert, row, end, n, tile = tile_of_work_item(
            blocks.tiles, work_item, tiles_n, BLOCK_SIZE_M, GROUP_SIZE_M
        )
        rows = gl.minimum(row + gl.arange(0, BLOCK_SIZE_M, layout=ROW_INDEX_LAYOUT), end - 1)
        a_row = rows
        if not grouped_plan.A_SORTED:
            a_row = gl.load(blocks.routes + rows) // routes_per_row
        if grouped_plan.NUM_SOURCES > 1:
            last_position = gl.load(blocks.tiles + tile * TILE_RECORD_WORDS + 6)
            awaited_position, wait_token = await_positions(
                awaited_position, last_position, sources, rank, grouped_plan
            )
            a_row = dl.consume_token(a_row, wait_token)
        a_rows = row_addresses(
            a_ptr, own_ptr, a_row, rank, shard_rows, weight_strides.am, grouped_plan.NUM_SOURCES
        )
        a_block = gl.multiple_of(a_rows, 16)[:, None] + k[None, :]
        b_row = expert * columns_of_expert + n * COLUMNS
        steps = gl.where(expert < E, K // BLOCK_SIZE_K, 0)
        with dl.mark("load"):
            for step in range(steps):
                mbarrier.wait(empty.index(stage), phase ^ 1)
                mbarrier.expect(full.index(stage), 2 * b_desc.block_type.nbytes)
                k_begin = step * BLOCK_SIZE_K
                b = b_ring.index(stage)
                tma_load(b_desc, [b_row, k_begin], full.index(stage), b.slice(0, HALF_N))
                tma_load(
                    b_desc,
                    [b_row + right_half, k_begin],
                    full.index(stage),
                    b.slice(HALF_N, HALF_N),
                )
                async_copy.async_copy_global_to_shared(a_ring.index(stage), a_block + k_begin)
                async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
                stage, phase = next_stage(stage, phase, NUM_STAGES)


@gluon.jit
def _store_block(c_rows, is_row, block, column, out_columns):
    """Store the columns of ``block`` at ``column`` of the rows at the addresses ``c_rows``."""
    LAYOUT: gl.constexpr = c_rows.type.layout.parent
    columns = column + gl.arange(0, block.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    block = gl.convert_layout(block.to(c_rows.dtype.element_ty), LAYOUT)
    is_row = is_row[:, None] & (columns < out_columns)[None, :]
    gl.store(c_rows[:, None] + columns[None, :], block, mask=is_row)


@gluon.jit
def _tile_and_scales(
    GROUP: gl.constexpr, work_item, work_items, blocks, scales, tiles_n, routes_per_row, rank,
    shard_rows, grouped_plan: gl.constexpr, BLOCK_SIZE_M: gl.constexpr, GROUP_SIZE_M: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return (expert, first row, end row of the run, column tile, addresses of the scales of A) of
    a consumer group's half of a work item.

    A number beyond the last work item is treated as the last number. Without work items, the
    record is uninitialised; addresses are then limited to row 0.
    """
    HALF_M: gl.constexpr = BLOCK_SIZE_M // 2
    work_item = gl.maximum(gl.minimum(work_item, work_items - 1), 0)
    expert, row, end, n, _ = tile_of_work_item(
        blocks.tiles, work_item, tiles_n, BLOCK_SIZE_M, GROUP_SIZE_M
    )
    row += GROUP * HALF_M
    rows = row + gl.arange(0, HALF_M, layout=gl.SliceLayout(1, LAYOUT))
    a_row = gl.where(work_items > 0, gl.minimum(rows, end - 1), 0)
    if not grouped_plan.A_SORTED:
        a_row = gl.load(blocks.routes + a_row) // routes_per_row
    a_scale_ptr = row_addresses(
        scales.a, scales.own, a_row, rank, shard_rows, scales.stride_am, grouped_plan.NUM_SOURCES
    )
    return expert, row, end, n, a_scale_ptr


@gluon.jit
def _consume(
    GROUP: gl.constexpr, c_ptr, blocks, scales, a_ring, b_ring, full, empty, E, N, K, out_columns,
    routes_per_row, rank, shard_rows, grouped_plan: gl.constexpr, GROUP_SIZE_M: gl.constexpr,
):  # fmt: skip
    """Run consumer group ``GROUP``."""
    BLOCK_SIZE_M: gl.constexpr = a_ring.shape[1]
    BLOCK_SIZE_K: gl.constexpr = a_ring.shape[2]
    HALF_M: gl.constexpr = BLOCK_SIZE_M // 2
    HALF_N: gl.constexpr = b_ring.shape[1] // 2
    COLUMNS: gl.constexpr = HALF_N if grouped_plan.SILU_MUL else 2 * HALF_N
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF_N, 32]
    )
    # Each thread stores 16 bytes. If C is fp32, the layout of the product already fills sectors of
    # 32 bytes.
    ROW_LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // HALF_N, HALF_N // 8], [4, 1], [1, 0]
    )
    STORE_LAYOUT: gl.constexpr = LAYOUT if c_ptr.dtype.element_ty == gl.float32 else ROW_LAYOUT
    right_half = out_columns if grouped_plan.SILU_MUL else HALF_N
    tiles_n = gl.cdiv(out_columns, COLUMNS)
    work_items = gl.load(blocks.num_tiles) * tiles_n
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    expert, row, end, n, a_scale_ptr = _tile_and_scales(
        GROUP, gl.program_id(0), work_items, blocks, scales, tiles_n, routes_per_row, rank,
        shard_rows, grouped_plan, BLOCK_SIZE_M, GROUP_SIZE_M, LAYOUT,
    )  # fmt: skip
    for work_item in range(gl.program_id(0), work_items, gl.num_programs(0)):
        column = n * COLUMNS
        steps = gl.where(expert < E, K // BLOCK_SIZE_K, 0)
        b_scale_ptr = scales.b + gl.minimum(expert, E - 1).to(gl.int64) * scales.stride_be
        b_scale_ptr += column // 128 * scales.stride_bn
        right_block = gl.minimum(column + right_half, N - 1) // 128 - column // 128
        block_scales = BlockScales(
            a=a_scale_ptr, stride_ak=scales.stride_ak, b=b_scale_ptr,
            right_offset=right_block * scales.stride_bn, stride_bk=scales.stride_bk,
        )  # fmt: skip
        if grouped_plan.NUM_SOURCES > 1:  # noqa: SIM102  # constexpr conditions stay apart
            if steps > 0:
                # Scales of a gathered row arrive before the row. Only the producer waits for rows,
                # so wait here until it has loaded the first stage.
                mbarrier.wait(full.index(stage), phase)
        with dl.mark("mma"):
            # If this group's half has no rows, the group only frees the stages.
            own_steps = gl.where(row < end, steps, 0)
            left, up, stage, phase = multiply_promoted(
                GROUP, a_ring, b_ring, full, empty, stage, phase, own_steps, block_scales, LAYOUT,
                grouped_plan.SCALING, A_BY_THREADS=True,
            )  # fmt: skip
            for _ in range(steps - own_steps):
                mbarrier.wait(full.index(stage), phase)
                mbarrier.arrive(empty.index(stage))
                stage, phase = next_stage(stage, phase, full.shape[0])
        rows = row + gl.arange(0, HALF_M, layout=gl.SliceLayout(1, STORE_LAYOUT))
        is_row = rows < end
        if not (grouped_plan.SORTED or grouped_plan.A_SORTED):
            rows = gl.load(blocks.routes + rows, mask=is_row, other=0)
        c_rows = c_ptr + rows.to(gl.int64) * out_columns
        if grouped_plan.C_ALIGNED:
            c_rows = gl.multiple_of(c_rows, 16)
        # Load the next tile's record and scales before the store, which hides their latency.
        expert, row, end, n, a_scale_ptr = _tile_and_scales(
            GROUP, work_item + gl.num_programs(0), work_items, blocks, scales, tiles_n,
            routes_per_row, rank, shard_rows, grouped_plan, BLOCK_SIZE_M, GROUP_SIZE_M, LAYOUT,
        )  # fmt: skip
        with dl.mark("store"):
            if grouped_plan.SILU_MUL:
                left = left / (1.0 + gl.exp(-left)) * up
            _store_block(c_rows, is_row, left, column, out_columns)
            if not grouped_plan.SILU_MUL:
                _store_block(c_rows, is_row, up, column + HALF_N, out_columns)


@gluon.jit(do_not_specialize=["E", "routes_per_row", "rank", "shard_rows"])
def kernel_grouped_gemm_warp_specialized(
    a_ptr, b_ptr, c_ptr, blocks, E, N, K, weight_strides, out_columns, routes_per_row,
    grouped_plan: gl.constexpr, BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr,
    BLOCK_SIZE_K: gl.constexpr, GROUP_SIZE_M: gl.constexpr, sources=None, rank=0, shard_rows=1,
    scales=None,
):  # fmt: skip
    """Compute C like ``kernel_grouped_gemm``, for fp8 operands with BLOCK scales.

    ``grouped_product`` checks the other requirements. Launch with 4 warps.
    """
    NUM_STAGES: gl.constexpr = grouped_plan.NUM_STAGES
    operand_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8)
    a_ring = gl.allocate_shared_memory(
        a_ptr.dtype.element_ty, [NUM_STAGES, BLOCK_SIZE_M, BLOCK_SIZE_K], operand_layout
    )
    b_ring = gl.allocate_shared_memory(
        b_ptr.dtype.element_ty, [NUM_STAGES, BLOCK_SIZE_N, BLOCK_SIZE_K], operand_layout
    )
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    # A stage is full after the arrivals of TMA and of the 128 threads that gather rows.
    for stage in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(stage), count=1 + 128)
        mbarrier.init(empty.index(stage), count=2)
    gl.warp_specialize(
        [
            (_consume, (
                0, c_ptr, blocks, scales, a_ring, b_ring, full, empty, E, N, K, out_columns,
                routes_per_row, rank, shard_rows, grouped_plan, GROUP_SIZE_M,
            )),
            (_consume, (
                1, c_ptr, blocks, scales, a_ring, b_ring, full, empty, E, N, K, out_columns,
                routes_per_row, rank, shard_rows, grouped_plan, GROUP_SIZE_M,
            )),
            (_gather, (
                a_ptr, b_ptr, blocks, sources, a_ring, b_ring, full, empty, E, N, K,
                weight_strides, out_columns, routes_per_row, rank, shard_rows, grouped_plan,
                GROUP_SIZE_M,
            )),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
