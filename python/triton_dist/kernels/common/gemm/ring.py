"""Shared parts of the warp-specialized GEMM kernels for Hopper, in Gluon.

A producer warp fills the stages of a ring buffer in shared memory. There are two groups of four
consumer warps; each group multiplies one half of a tile's rows. ``gemm/warp_specialized.py``
describes the ring.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from triton_dist.kernels.common.gemm.scales import BLOCK_SCALES


class BlockScales(NamedTuple):
    """Addresses of the scales of one group's half of a tile, at the first step along K.

    Scales are per 128 elements of K. ``a`` is a block with one address per row. The scale of the
    left half of the columns is at ``b``, of the right half at ``b + right_offset``. Strides are in
    elements.
    """

    a: Any
    stride_ak: Any
    b: Any
    right_offset: Any
    stride_bk: Any


@gluon.jit
# The phase bit of the barriers flips each time ``stage`` wraps around to 0.
def next_stage(stage, phase, NUM_STAGES: gl.constexpr):
    wraps = stage == NUM_STAGES - 1
    return gl.where(wraps, 0, stage + 1), phase ^ wraps.to(gl.int32)


@gluon.jit
def multiply_promoted(
    GROUP: gl.constexpr, a_ring, b_ring, full, empty, stage, phase, num_steps, block_scales,
    LAYOUT: gl.constexpr, SCALING: gl.constexpr, A_BY_THREADS: gl.constexpr = False,
):  # fmt: skip
    """Multiply the fp8 tiles of the next ``num_steps`` stages (steps along K). Add the product of
    each step in fp32.

    Return (sum of the left half of the columns, sum of the right half, stage, phase). The halves
    are multiplied one after the other, because the products of both would not fit in registers.
    ``A_BY_THREADS``: threads, not TMA, stored A in the ring.
    """
    NUM_STAGES: gl.constexpr = a_ring.shape[0]
    HALF_M: gl.constexpr = a_ring.shape[1] // 2
    HALF_N: gl.constexpr = b_ring.shape[1] // 2
    # Reuse one variable for all products. Separate variables would take more registers.
    product = gl.zeros((HALF_M, HALF_N), gl.float32, layout=LAYOUT)
    left = gl.zeros((HALF_M, HALF_N), gl.float32, layout=LAYOUT)
    right = gl.zeros((HALF_M, HALF_N), gl.float32, layout=LAYOUT)
    if SCALING == BLOCK_SCALES:
        a_scale_ptr = block_scales.a
        b_scale_ptr = block_scales.b
        a_scale = gl.load(a_scale_ptr, cache_modifier=".cg")
        left_b_scale = gl.load(b_scale_ptr)
        right_b_scale = gl.load(b_scale_ptr + block_scales.right_offset)
    for step in range(num_steps):
        mbarrier.wait(full.index(stage), phase)
        if A_BY_THREADS:
            fence_async_shared()
        a = a_ring.index(stage).slice(GROUP * HALF_M, HALF_M, dim=0)
        b = b_ring.index(stage).slice(0, HALF_N, dim=0).permute((1, 0))
        product = warpgroup_mma(a, b, product, use_acc=False, is_async=True)
        if SCALING == BLOCK_SCALES:
            left_scale = a_scale * left_b_scale
            right_scale = a_scale * right_b_scale
        product = warpgroup_mma_wait(0, deps=(product,))
        if SCALING == BLOCK_SCALES:
            left += product * left_scale[:, None]
        else:
            left += product
        # Finish these additions before the next product, which needs the registers.
        left = warpgroup_mma_wait(0, deps=(left,))
        b = b_ring.index(stage).slice(HALF_N, HALF_N, dim=0).permute((1, 0))
        product = warpgroup_mma(a, b, product, use_acc=False, is_async=True)
        if SCALING == BLOCK_SCALES:
            # Load the scales of the next step now, because a load takes longer than one product.
            a_scale_ptr += gl.where(step + 1 < num_steps, block_scales.stride_ak, 0)
            b_scale_ptr += gl.where(step + 1 < num_steps, block_scales.stride_bk, 0)
            a_scale = gl.load(a_scale_ptr, cache_modifier=".cg")
            left_b_scale = gl.load(b_scale_ptr)
            right_b_scale = gl.load(b_scale_ptr + block_scales.right_offset)
        product = warpgroup_mma_wait(0, deps=(product,))
        mbarrier.arrive(empty.index(stage))
        if SCALING == BLOCK_SCALES:
            right += product * right_scale[:, None]
        else:
            right += product
        right = warpgroup_mma_wait(0, deps=(right,))
        stage, phase = next_stage(stage, phase, NUM_STAGES)
    return left, right, stage, phase
