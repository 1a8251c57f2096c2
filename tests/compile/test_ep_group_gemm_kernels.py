"""The kernels of dispatch + grouped GEMM, for sm_90 without a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.compile.scattered import RELEASE, WGMMA, assert_fits, compile_launch, matrix, quick
from tests.compile.test_ep_kernels import VECTOR_LOAD, VECTOR_STORE, context
from triton_dist.kernels.common.moe.spaces import GROUPED_TILES
from triton_dist.kernels.nvidia.ep_group_gemm.algorithms import ALGORITHMS, Call

ACQUIRE = "atom.global.sys.acquire.add"
HIGH = [index for index, tile in enumerate(GROUPED_TILES) if tile.kwargs["BLOCK_SIZE_M"] >= 64]
EVERY = [
    (index, size, layout, activation)
    for index in HIGH
    for size, layout in ((2, "row-major"), (4, "column-major"))
    for activation in (None, "silu_mul")
]


@pytest.mark.parametrize(
    ("index", "size", "layout", "activation"), quick(EVERY, (0, 2, "row-major", "silu_mul"))
)
def test_one_launch_sends_waits_and_multiplies(sm90, index, size, layout, activation):
    ctx = context(size, 32 * size, 8, hidden=2048)
    is_column_major = layout == "column-major"
    B = matrix(32, 1536, 2048).transpose(1, 2) if is_column_major else matrix(32, 2048, 1536)
    call = Call(
        matrix(4096, 2048), matrix(4096, 8, dtype=torch.int32), B, ctx, activation=activation,
        gemm_config=GROUPED_TILES[index], algorithm="fused",
    )  # fmt: skip
    _, (order, product) = ALGORITHMS["fused"].launches(call, call.dispatch.result())
    assert_fits(compile_launch(order))
    has = [ACQUIRE, RELEASE, VECTOR_STORE, VECTOR_LOAD, WGMMA]
    assert_fits(compile_launch(product), has=has)
