"""What adds the tiles that a scattered GEMM leaves, for sm_90 without a GPU."""

from __future__ import annotations

import re

import pytest
import torch

from tests.compile.scattered import ACQUIRE, RELEASE, compile_launch
from triton_dist.kernels.common.gemm.spaces import PERSISTENT_TILES, tile_shapes
from triton_dist.kernels.common.scatter.partials import Scattering, Slot
from triton_dist.kernels.common.scatter.tiles import add_deferred


def deferred(scatter, config, num_ranks):
    """The launch for row blocks of 1000 rows, 8192 columns; no memory."""

    def matrix(*shape, of=torch.bfloat16):
        return torch.empty(*shape, dtype=of, device="meta")

    M = 1000 * num_ranks
    flags, table = matrix(4096, of=torch.int64), matrix(num_ranks, of=torch.int64)
    left = matrix(4096, of=torch.int32)
    partials = matrix(1, of=torch.float32 if scatter == "add" else torch.bfloat16)
    slot = Slot(partials, 1 << 23, table, table, flags, flags, left)
    sums = (table, table) if scatter == "all" else ()
    to = Scattering(scatter, 1, num_ranks, slot, *sums)
    C = matrix(M if scatter == "all" else 1000, 8192)
    return add_deferred(C, matrix(8192), config, to, M=M, num_sms=132, num_chunks=2)


@pytest.mark.parametrize(  # of 2 ranks what does most
    ("scatter", "num_ranks"), [("tile", 8), ("row_block", 8), ("add", 8), ("all", 8), ("all", 2)]
)
def test_deferred_tiles_are_awaited_then_added_in_whole_vectors(sm90, scatter, num_ranks):
    config = tile_shapes(PERSISTENT_TILES)[num_ranks == 8]
    kernel = compile_launch(deferred(scatter, config, num_ranks))
    assert kernel.stack_bytes == 0
    # All threads have looked whether anything is left, before one says that no more is.
    look = re.search(r"ld\.global\.b32 \S+ \S+ \S+ \[ (%rd\d+)", kernel.ptx)
    taken = re.search(rf"st\.global\.b32 \[ {look.group(1)} ", kernel.ptx)
    assert "bar.sync" in kernel.ptx[look.end() : taken.start()]
    loads = [*re.finditer(r"ld\.global\.cg\S*", kernel.ptx)]
    assert {load.group() for load in loads} == {"ld.global.cg.v4.b32"}
    assert kernel.ptx.rindex(ACQUIRE, 0, loads[0].start()) > 0
    released = [*RELEASE.finditer(kernel.ptx)]
    assert bool(released) == (scatter == "all")
    if released:  # behind a barrier that is behind the last store of a sum
        sums = [*re.finditer(r"st\.global\.v4\.b32", kernel.ptx)]
        assert len(sums) >= num_ranks
        assert "bar.sync" in kernel.ptx[sums[-1].end() : released[-1].start()]
