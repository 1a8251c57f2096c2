"""The kernel of the template ``examples/own_op`` compiles for sm_90."""

import torch

from own_op.op import Slot, kernel_rms_norm
from triton_dist.testing.compile_only import compile_kernel, compile_only


def test_the_kernel_of_the_template_compiles() -> None:
    x, words = torch.empty((64, 1024), device="meta"), torch.empty(4, dtype=torch.int64).to("meta")
    slot = Slot(x, words, words, words, words)
    constants = {"COLUMNS": 1024, "NUM_RANKS": 4, "BLOCK_M": 1, "BLOCK_N": 1024}
    with compile_only(arch=90):
        compiled = compile_kernel(
            kernel_rms_norm, x, x, x, slot, 64, 1, 1e-6, **constants, SEND=True, NORMALISE=True
        )
    assert compiled.stack_bytes == 0
    assert compiled.ptx.count("sys.release") == 4, "a flag for each rank"
    assert "sys.acquire" in compiled.ptx
