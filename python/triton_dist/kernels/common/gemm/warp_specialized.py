"""Warp-specialized version of ``kernel_gemm_persistent`` for Hopper, in Gluon.

It has the arguments of ``kernel_gemm_persistent`` and processes tiles in the same order. One
producer warp loads A and B by TMA into a ring buffer in shared memory. Only this warp waits for the
flags of gathered rows. There are two groups of four consumer warps. Each group multiplies one half
of a tile's rows and stores the result by TMA. Benefits:

* A wait does not delay the multiplication of data that has already arrived.
* The producer loads ahead, also for the next tile, so no tile starts with an empty pipeline.
* The groups synchronise only through the ring: one multiplies while the other converts and stores.

Each stage s of the ring has two barriers. ``full[s]`` completes when the stage has been loaded,
``empty[s]`` when both groups have read it. Stage and phase continue from tile to tile.

fp8 with partial sums in fp32 (``gemm/scales.py``): a group multiplies 128 elements of K for one
half of its columns at a time. It adds the product in fp32 while the other group multiplies.

Registers: 12 warps (the producer warp takes the slots of four) start with 168 registers per thread.
The producer reduces this to 24, so a consumer gets 240. An accumulator of 64 x 256 takes 128 of
them. Gluon cannot be interpreted; CPU ranks run ``kernel_gemm_persistent``.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from triton_dist import language as dl
from triton_dist.kernels.common.gemm.ring import BlockScales, multiply_promoted, next_stage
from triton_dist.kernels.common.gemm.scales import (
    BLOCK_SCALES,
    FAST_ACCUM,
    PROMOTED_ACCUM,
    UNSCALED,
    scales_of_shard,
)
from triton_dist.kernels.common.gemm.sharded import (
    gathered_tile,
    split_of_work_item,
    wait_for_rows,
    work_items_of_tiles,
)
from triton_dist.kernels.common.gemm.tile import shard_in_arrival_order, tile_in_group
from triton_dist.runtime.triton_compat import gluon_tma_copies

WARPS_PER_GROUP = 4
"""``num_warps`` of the launch; Triton adds the second group and the producer."""
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)

tma_load, tma_store = gluon_tma_copies()


@gluon.jit
def _stage_before(stage, NUM_STAGES: gl.constexpr):
    """Return the previous stage of the ring.

    A loop variable for it would not work: Triton 3.6 treats a variable as constant in a loop if it
    equals ``stage`` before the loop and is assigned only from ``stage``.
    """
    return gl.where(stage == 0, NUM_STAGES - 1, stage - 1)


@gluon.jit
def _shard_and_tile(
    tile, tiles_m, tiles_n, rank, num_ranks, GATHERED: gl.constexpr, GROUP_SIZE_M: gl.constexpr,
    GROUP_SIZE_SHARDS: gl.constexpr,
):  # fmt: skip
    """Return (shard, m, n) of a tile. Tiles of this rank's shard have the lowest numbers."""
    position = tile * 0
    if not GATHERED or tile < tiles_m * tiles_n:
        m, n = tile_in_group(tile, tiles_m, tiles_n, GROUP_SIZE_M)
    else:
        position, m, n = gathered_tile(
            tile - tiles_m * tiles_n, num_ranks, tiles_m, tiles_n, GROUP_SIZE_SHARDS, GROUP_SIZE_M
        )
    return shard_in_arrival_order(position, rank, num_ranks), m, n


@gluon.jit
def _steps_of_split(K, split, num_splits, BLOCK_SIZE_K: gl.constexpr):
    steps = gl.cdiv(K, BLOCK_SIZE_K)
    return steps * split // num_splits, steps * (split + 1) // num_splits


@gluon.jit
def _load_tile(
    a_desc, b_desc, a_ring, b_ring, full, empty, stage, phase, row, column, first_step, end_step,
    B_COLUMN_MAJOR: gl.constexpr,
):  # fmt: skip
    """Queue the loads of a tile, each as soon as its stage is free. Return next stage and phase."""
    NUM_STAGES: gl.constexpr = a_ring.shape[0]
    BLOCK_SIZE_K: gl.constexpr = a_ring.shape[2]
    for step in range(first_step, end_step):
        k = step * BLOCK_SIZE_K
        mbarrier.wait(empty.index(stage), phase ^ 1)
        mbarrier.expect(full.index(stage), a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        tma_load(a_desc, [row, k], full.index(stage), a_ring.index(stage))
        if B_COLUMN_MAJOR:
            tma_load(b_desc, [column, k], full.index(stage), b_ring.index(stage))
        else:
            tma_load(b_desc, [k, column], full.index(stage), b_ring.index(stage))
        stage, phase = next_stage(stage, phase, NUM_STAGES)
    return stage, phase


@gluon.jit
def _produce(
    local_ptr, shards, b_ptr, a_ring, b_ring, full, empty, M, N, K, stride_b, rank, num_ranks,
    chunk_rows, gemm_plan: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, GROUP_SIZE_M: gl.constexpr,
    GROUP_SIZE_SHARDS: gl.constexpr, SPLIT_K: gl.constexpr,
):  # fmt: skip
    """Run the producer warp.

    There are separate loops for this rank's shard and for the gathered shards. The descriptor of
    the gathered shards is thus created while the consumers are busy.
    """
    BLOCK_SIZE_M: gl.constexpr = a_ring.shape[1]
    BLOCK_SIZE_K: gl.constexpr = a_ring.shape[2]
    NUM_SMS: gl.constexpr = gemm_plan.NUM_SMS
    B_COLUMN_MAJOR: gl.constexpr = gemm_plan.B_COLUMN_MAJOR
    rows = M // num_ranks
    tiles_m = gl.cdiv(rows, BLOCK_SIZE_M)
    tiles_n = gl.cdiv(N, BLOCK_SIZE_N)
    tiles_per_shard = tiles_m * tiles_n
    tiles = tiles_per_shard * num_ranks
    unsplit_tiles = tiles // NUM_SMS * NUM_SMS  # tiles of full waves
    local_work_items = work_items_of_tiles(tiles_per_shard, unsplit_tiles, SPLIT_K)

    local_desc = tma.make_tensor_descriptor(
        local_ptr, [rows, K], [K, 1], [BLOCK_SIZE_M, BLOCK_SIZE_K], a_ring.layout
    )
    if B_COLUMN_MAJOR:
        b_desc = tma.make_tensor_descriptor(
            b_ptr, [N, K], [stride_b, 1], [BLOCK_SIZE_N, BLOCK_SIZE_K], b_ring.layout
        )
    else:
        b_desc = tma.make_tensor_descriptor(
            b_ptr, [K, N], [stride_b, 1], [BLOCK_SIZE_K, BLOCK_SIZE_N], b_ring.layout
        )
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for work_item in range(gl.program_id(0), local_work_items, NUM_SMS):
        tile, split, num_splits = split_of_work_item(work_item, unsplit_tiles, SPLIT_K)
        m, n = tile_in_group(tile, tiles_m, tiles_n, GROUP_SIZE_M)
        first_step, end_step = _steps_of_split(K, split, num_splits, BLOCK_SIZE_K)
        with dl.mark("load"):
            stage, phase = _load_tile(
                local_desc, b_desc, a_ring, b_ring, full, empty, stage, phase,
                m * BLOCK_SIZE_M, n * BLOCK_SIZE_N, first_step, end_step, B_COLUMN_MAJOR,
            )  # fmt: skip

    if gemm_plan.GATHERED:
        gathered_desc = tma.make_tensor_descriptor(
            shards.rows, [M, K], [K, 1], [BLOCK_SIZE_M, BLOCK_SIZE_K], a_ring.layout
        )
        local_waves_end = gl.cdiv(local_work_items, NUM_SMS) * NUM_SMS
        # Programs without a work item in the last wave of this rank's shard take the next ones.
        idle_programs = local_waves_end - local_work_items
        first = local_work_items + (gl.program_id(0) + idle_programs) % NUM_SMS
        for work_item in range(first, work_items_of_tiles(tiles, unsplit_tiles, SPLIT_K), NUM_SMS):
            tile, split, num_splits = split_of_work_item(work_item, unsplit_tiles, SPLIT_K)
            position, m, n = gathered_tile(
                tile - tiles_per_shard, num_ranks, tiles_m, tiles_n, GROUP_SIZE_SHARDS, GROUP_SIZE_M
            )
            shard = shard_in_arrival_order(position, rank, num_ranks)
            row = m * BLOCK_SIZE_M
            last_row = min(row + BLOCK_SIZE_M, rows) - 1
            token = wait_for_rows(
                shards, shard, row, last_row, chunk_rows, gemm_plan.FLAGS_PER_RANK
            )
            first_step, end_step = _steps_of_split(K, split, num_splits, BLOCK_SIZE_K)
            with dl.mark("load"):
                stage, phase = _load_tile(
                    gathered_desc, b_desc, a_ring, b_ring, full, empty, stage, phase,
                    dl.consume_token(shard * rows + row, token), n * BLOCK_SIZE_N, first_step,
                    end_step, B_COLUMN_MAJOR,
                )  # fmt: skip


@gluon.jit
def _multiply_half(
    GROUP: gl.constexpr, a_ring, b_ring, full, empty, stage, phase, num_steps,
    B_COLUMN_MAJOR: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return (product, next stage, next phase) for the next ``num_steps`` stages.

    The product is fp32 [BLOCK_SIZE_M / 2, BLOCK_SIZE_N]. ``GROUP`` selects the half of the rows.
    """
    NUM_STAGES: gl.constexpr = a_ring.shape[0]
    HALF_M: gl.constexpr = a_ring.shape[1] // 2
    BLOCK_SIZE_N: gl.constexpr = b_ring.shape[1] if B_COLUMN_MAJOR else b_ring.shape[2]
    accumulator = gl.zeros((HALF_M, BLOCK_SIZE_N), gl.float32, layout=LAYOUT)
    for step in range(num_steps):
        mbarrier.wait(full.index(stage), phase)
        a = a_ring.index(stage).slice(GROUP * HALF_M, HALF_M, dim=0)
        b = b_ring.index(stage)
        if B_COLUMN_MAJOR:
            b = b.permute((1, 0))
        accumulator = warpgroup_mma(a, b, accumulator, is_async=True)
        # One product stays in flight. The previous product is complete, so its stage is free.
        accumulator = warpgroup_mma_wait(1, deps=(accumulator,))
        mbarrier.arrive(empty.index(_stage_before(stage, NUM_STAGES)), pred=step > 0)
        stage, phase = next_stage(stage, phase, NUM_STAGES)
    accumulator = warpgroup_mma_wait(0, deps=(accumulator,))
    mbarrier.arrive(empty.index(_stage_before(stage, NUM_STAGES)), pred=num_steps > 0)
    return accumulator, stage, phase


@gluon.jit
def _apply_scales_and_bias(
    accumulator, scales, a_scale_ptr, row, rows, column, N, SCALING: gl.constexpr
):
    """Apply TENSOR and ROW scales and the bias, like ``scales.apply_epilogue_scales`` and
    ``add_bias``."""
    LAYOUT: gl.constexpr = accumulator.type.layout
    columns = column + gl.arange(0, accumulator.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    if SCALING >= FAST_ACCUM and SCALING != BLOCK_SCALES:
        row_index = row + gl.arange(0, accumulator.shape[0], layout=gl.SliceLayout(1, LAYOUT))
        a_scale = gl.load(
            a_scale_ptr + row_index * scales.stride_am,
            mask=row_index < rows, other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        b_scale = gl.load(scales.b_scale + columns * scales.stride_bn, mask=columns < N, other=0.0)
        accumulator = accumulator * a_scale[:, None] * b_scale[None, :]
    if SCALING != UNSCALED:  # noqa: SIM102  # constexpr conditions stay apart
        if scales.bias is not None:
            bias = gl.load(scales.bias + columns, mask=columns < N, other=0.0)
            accumulator += bias.to(gl.float32)[None, :]
    return accumulator


@gluon.jit
def _finish_split(GROUP: gl.constexpr, accumulator, workspace, tile, split, SPLIT_K: gl.constexpr):
    """Publish this group's half of a partial product, like ``sharded.publish_partial``.

    Return (whether this split is the last, sum). The sum of all splits is valid only if this split
    is the last. The two groups count in separate 16-bit halves of the tile's counter.
    """
    LAYOUT: gl.constexpr = accumulator.type.layout
    HALF_M: gl.constexpr = accumulator.shape[0]
    BLOCK_SIZE_N: gl.constexpr = accumulator.shape[1]
    SIZE: gl.constexpr = HALF_M * BLOCK_SIZE_N
    ONE: gl.constexpr = 1 << (16 * GROUP)
    rows = gl.arange(0, HALF_M, layout=gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, BLOCK_SIZE_N, layout=gl.SliceLayout(0, LAYOUT))
    offsets = rows[:, None] * BLOCK_SIZE_N + columns[None, :]
    first_ptr = workspace.partials + (tile.to(gl.int64) * (2 * SPLIT_K) + GROUP) * SIZE
    gl.store(first_ptr + split * (2 * SIZE) + offsets, accumulator)
    # Synchronise the group, because one thread issues the release for the stores of all threads.
    tl.debug_barrier()
    previous_count = gl.atomic_add(workspace.counters + tile, ONE, sem="acq_rel", scope="gpu")
    is_last = (previous_count >> (16 * GROUP)) & 0xFFFF == SPLIT_K - 1
    if is_last:
        gl.atomic_add(workspace.counters + tile, -SPLIT_K * ONE, sem="relaxed", scope="gpu")
        # Also load this program's partial, because keeping it in registers spills with Triton 3.9.
        accumulator = gl.load(first_ptr + offsets, cache_modifier=".cg")
        for _ in range(1, SPLIT_K):
            first_ptr += 2 * SIZE
            accumulator += gl.load(first_ptr + offsets, cache_modifier=".cg")
    return is_last, accumulator


@gluon.jit
def _store_block(c_desc, block, staging, shard, row, column):
    """Store ``block`` by TMA through ``staging``, after the previous store has read ``staging``."""
    tma.store_wait(0)
    staging.reshape([block.shape[0], block.shape[1]]).store(block)
    fence_async_shared()
    tma_store(c_desc, [shard, row, column], staging)


@gluon.jit
def _store_half(c_desc, accumulator, staging, shard, row, column, EPILOGUE_SUBTILE: gl.constexpr):
    output = accumulator.to(c_desc.dtype)
    if EPILOGUE_SUBTILE:
        HALF_N: gl.constexpr = output.shape[1] // 2
        left, right = output.reshape((output.shape[0], 2, HALF_N)).permute((0, 2, 1)).split()
        _store_block(c_desc, left, staging, shard, row, column)
        _store_block(c_desc, right, staging, shard, row, column + HALF_N)
    else:
        _store_block(c_desc, output, staging, shard, row, column)


@gluon.jit
def _consume(
    GROUP: gl.constexpr, c_ptr, workspace, scales, a_ring, b_ring, staging, full, empty, M, N, K,
    rank, num_ranks, gemm_plan: gl.constexpr, BLOCK_SIZE_N: gl.constexpr,
    GROUP_SIZE_M: gl.constexpr, EPILOGUE_SUBTILE: gl.constexpr, GROUP_SIZE_SHARDS: gl.constexpr,
    SPLIT_K: gl.constexpr,
):  # fmt: skip
    """Run consumer group ``GROUP``, on the producer's work items in the producer's order.

    ``scales`` is the argument ``shards``, whose members include the members of ``Scales``.
    """
    BLOCK_SIZE_M: gl.constexpr = a_ring.shape[1]
    BLOCK_SIZE_K: gl.constexpr = a_ring.shape[2]
    HALF_M: gl.constexpr = BLOCK_SIZE_M // 2
    SCALING: gl.constexpr = gemm_plan.SCALING
    IS_PROMOTED: gl.constexpr = SCALING >= PROMOTED_ACCUM
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[4, 1],
        instr_shape=[
            16, BLOCK_SIZE_N // 2 if IS_PROMOTED else BLOCK_SIZE_N,
            256 // a_ring.dtype.primitive_bitwidth,
        ],
    )  # fmt: skip
    NUM_SMS: gl.constexpr = gemm_plan.NUM_SMS
    rows = M // num_ranks
    tiles_m = gl.cdiv(rows, BLOCK_SIZE_M)
    tiles_n = gl.cdiv(N, BLOCK_SIZE_N)
    tiles_per_shard = tiles_m * tiles_n
    tiles = tiles_per_shard * num_ranks
    unsplit_tiles = tiles // NUM_SMS * NUM_SMS  # tiles of full waves
    c_desc = tma.make_tensor_descriptor(
        c_ptr,
        [num_ranks, rows, N],
        [rows.to(gl.int64) * N, N, 1],
        [1, HALF_M, staging.shape[3]],
        staging.layout,
    )
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for work_item in range(
        gl.program_id(0), work_items_of_tiles(tiles, unsplit_tiles, SPLIT_K), NUM_SMS
    ):
        tile, split, num_splits = split_of_work_item(work_item, unsplit_tiles, SPLIT_K)
        shard, m, n = _shard_and_tile(
            tile,
            tiles_m,
            tiles_n,
            rank,
            num_ranks,
            gemm_plan.GATHERED,
            GROUP_SIZE_M,
            GROUP_SIZE_SHARDS,
        )
        first_step, end_step = _steps_of_split(K, split, num_splits, BLOCK_SIZE_K)
        row, column = m * BLOCK_SIZE_M + GROUP * HALF_M, n * BLOCK_SIZE_N
        a_scale_ptr = scales_of_shard(scales, None, SCALING)
        if gemm_plan.GATHERED:  # noqa: SIM102  # constexpr and runtime conditions stay apart
            if shard != rank:
                a_scale_ptr = scales_of_shard(scales, shard, SCALING)
        if IS_PROMOTED:
            with dl.mark("mma"):
                block_scales = None
                if SCALING == BLOCK_SCALES:
                    # Clamp indices instead of masking the loads, because registers are scarce.
                    row_index = row + gl.arange(0, HALF_M, layout=gl.SliceLayout(1, LAYOUT))
                    has_right_block = (BLOCK_SIZE_N > 128) & (column + 128 < N)
                    block_scales = BlockScales(
                        a=a_scale_ptr + gl.minimum(row_index, rows - 1), stride_ak=rows,
                        b=scales.b_scale + column // 128 * scales.stride_bn,
                        right_offset=gl.where(has_right_block, scales.stride_bn, 0), stride_bk=1,
                    )  # fmt: skip
                    # Scales of a gathered shard arrive before its rows. Only the producer waits for
                    # rows, so wait here until it has loaded the first stage.
                    mbarrier.wait(full.index(stage), phase)
                left, right, stage, phase = multiply_promoted(
                    GROUP, a_ring, b_ring, full, empty, stage, phase, end_step, block_scales,
                    LAYOUT, SCALING,
                )  # fmt: skip
            with dl.mark("store"):
                left = _apply_scales_and_bias(
                    left, scales, a_scale_ptr, row, rows, column, N, SCALING
                )
                left = left.to(c_desc.dtype)
                _store_block(c_desc, left, staging.index(GROUP), shard, row, column)
                column += BLOCK_SIZE_N // 2
                right = _apply_scales_and_bias(
                    right, scales, a_scale_ptr, row, rows, column, N, SCALING
                )
                right = right.to(c_desc.dtype)
                _store_block(c_desc, right, staging.index(GROUP), shard, row, column)
        else:
            with dl.mark("mma"):
                accumulator, stage, phase = _multiply_half(
                    GROUP, a_ring, b_ring, full, empty, stage, phase, end_step - first_step,
                    gemm_plan.B_COLUMN_MAJOR, LAYOUT,
                )  # fmt: skip
            is_complete = True
            if SPLIT_K > 1:  # noqa: SIM102  # constexpr and runtime conditions stay apart
                if num_splits > 1:
                    is_complete, accumulator = _finish_split(
                        GROUP, accumulator, workspace, tile - unsplit_tiles, split, SPLIT_K
                    )
            if is_complete:
                with dl.mark("store"):
                    accumulator = _apply_scales_and_bias(
                        accumulator, scales, a_scale_ptr, row, rows, column, N, SCALING
                    )
                    _store_half(
                        c_desc, accumulator, staging.index(GROUP), shard, row, column,
                        EPILOGUE_SUBTILE,
                    )  # fmt: skip
    tma.store_wait(0)  # Shared memory must stay valid until TMA has read it.


@gluon.jit(do_not_specialize=["rank", "num_ranks", "chunk_rows"])
def kernel_gemm_warp_specialized(
    local_ptr,
    shards,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    stride_b,
    rank,
    num_ranks,
    chunk_rows,
    gemm_plan: gl.constexpr,
    BLOCK_SIZE_M: gl.constexpr,
    BLOCK_SIZE_N: gl.constexpr,
    BLOCK_SIZE_K: gl.constexpr,
    GROUP_SIZE_M: gl.constexpr,
    EPILOGUE_SUBTILE: gl.constexpr,
    GROUP_SIZE_SHARDS: gl.constexpr = 1,
    SPLIT_K: gl.constexpr = 1,
    workspace=None,
):
    """Compute C like ``kernel_gemm_persistent``. Launch with 4 warps.

    The output has 16 bits. Operands have 16 bits, or are fp8 with a column-major B. BLOCK_SIZE_M is
    128 or 256, because each group needs at least 64 rows. Rows of a tile in shared memory must be
    multiples of 128 bytes.
    """
    NUM_STAGES: gl.constexpr = gemm_plan.NUM_STAGES
    dtype: gl.constexpr = c_ptr.dtype.element_ty
    a_dtype: gl.constexpr = local_ptr.dtype.element_ty
    b_dtype: gl.constexpr = b_ptr.dtype.element_ty
    SCALING: gl.constexpr = gemm_plan.SCALING
    IS_PROMOTED: gl.constexpr = SCALING >= PROMOTED_ACCUM
    STORE_N: gl.constexpr = BLOCK_SIZE_N // 2 if EPILOGUE_SUBTILE or IS_PROMOTED else BLOCK_SIZE_N
    operand_layout: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=a_dtype.primitive_bitwidth
    )
    output_layout: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=16, rank=3
    )
    a_ring = gl.allocate_shared_memory(
        a_dtype, [NUM_STAGES, BLOCK_SIZE_M, BLOCK_SIZE_K], operand_layout
    )
    if gemm_plan.B_COLUMN_MAJOR:
        b_ring = gl.allocate_shared_memory(
            b_dtype, [NUM_STAGES, BLOCK_SIZE_N, BLOCK_SIZE_K], operand_layout
        )
    else:
        b_ring = gl.allocate_shared_memory(
            b_dtype, [NUM_STAGES, BLOCK_SIZE_K, BLOCK_SIZE_N], operand_layout
        )
    staging = gl.allocate_shared_memory(dtype, [2, 1, BLOCK_SIZE_M // 2, STORE_N], output_layout)
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    # A stage is full after one TMA arrival, and empty after both consumer groups have read it.
    for stage in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    gl.warp_specialize(
        [
            (_consume, (
                0, c_ptr, workspace, shards, a_ring, b_ring, staging, full, empty, M, N, K, rank,
                num_ranks, gemm_plan, BLOCK_SIZE_N, GROUP_SIZE_M, EPILOGUE_SUBTILE,
                GROUP_SIZE_SHARDS, SPLIT_K,
            )),
            (_consume, (
                1, c_ptr, workspace, shards, a_ring, b_ring, staging, full, empty, M, N, K, rank,
                num_ranks, gemm_plan, BLOCK_SIZE_N, GROUP_SIZE_M, EPILOGUE_SUBTILE,
                GROUP_SIZE_SHARDS, SPLIT_K,
            )),
            (_produce, (
                local_ptr, shards, b_ptr, a_ring, b_ring, full, empty, M, N, K, stride_b, rank,
                num_ranks, chunk_rows, gemm_plan, BLOCK_SIZE_N, GROUP_SIZE_M, GROUP_SIZE_SHARDS,
                SPLIT_K,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
