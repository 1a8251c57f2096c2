"""Compiled kernels with one mistake each, for the modes of GPUs: a bug a process, since most end
the CUDA context. `gpu_matrix.py` runs them all.

python tests/debugging/gpu_bugs.py load
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import triton
import triton.language as tl

from triton_dist import jit

# Neighbours in shared memory, of another warp each, without a barrier in between.
_RACE = tl.constexpr("""{
.shared .align 4 .b32 planted[128];
.reg .b32 base, thread, place, other;
mov.u32 base, planted;
mov.u32 thread, %tid.x;
shl.b32 place, thread, 2;
add.u32 place, place, base;
st.shared.b32 [place], thread;
xor.b32 other, thread, 64;
shl.b32 other, other, 2;
add.u32 other, other, base;
ld.shared.b32 $0, [other];
}""")
_DIVERGENT = tl.constexpr("""{
.reg .b32 thread;
.reg .pred even;
mov.u32 thread, %tid.x;
and.b32 thread, thread, 1;
setp.eq.u32 even, thread, 0;
@even bar.sync 1, 128;
mov.u32 $0, thread;
}""")


@jit
def kernel_none(x, y):
    tl.store(y + tl.arange(0, 16), tl.load(x + tl.arange(0, 16)))


@jit
def kernel_load(x, y, n):
    offsets = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(y + offsets, tl.load(x + offsets, mask=offsets < n))


@jit
def kernel_store(x):
    tl.store(x + tl.arange(0, 16) - 1, 1.0)


@jit
def kernel_block(x, n):
    rows = tl.make_tensor_descriptor(x, [n, 128], [128, 1], [64, 128])
    rows.store([0, 0], tl.zeros([64, 128], tl.float32))


@jit
def kernel_unwritten(x, y):
    tl.store(y, tl.sum(tl.load(x + tl.arange(0, 128)), 0))


@jit
def kernel_assertion(n):
    tl.device_assert(n < 16, "n is too large")


@jit
def kernel_overflow(x, n):
    tl.store(x, n + n)


@jit
def kernel_misaligned(x, address):
    tl.store((address.to(tl.int64) + 2).to(tl.pointer_type(tl.float32)), 1.0)


@jit
def kernel_inline(x, ASM: tl.constexpr):
    i = tl.arange(0, 128)
    tl.store(x + i, tl.inline_asm_elementwise(ASM, "=r,r", [i], tl.int32, is_pure=False, pack=1))


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device="cuda")


def in_one_allocation() -> None:
    """What lies behind is in the same allocation, as regions of symmetric memory do."""
    kernel_store[(1,)](zeros(64)[16:])


def block(rows: int) -> None:
    triton.set_allocator(lambda size, _, __: torch.empty(size, dtype=torch.int8, device="cuda"))
    kernel_block[(1,)](zeros(rows, 128), 64)


BUGS = {
    "none": lambda: kernel_none[(1,)](zeros(16), zeros(16)),
    "load": lambda: kernel_load[(1,)](zeros(128), zeros(1024), 1024),
    "store": lambda: kernel_store[(1,)](zeros(16)),
    "neighbour": in_one_allocation,
    "no bug, with a descriptor": lambda: block(64),
    "block": lambda: block(32),
    "unwritten": lambda: kernel_unwritten[(1,)](torch.empty(128, device="cuda"), zeros(1)),
    "assertion": lambda: kernel_assertion[(1,)](16),
    "overflow": lambda: kernel_overflow[(1,)](zeros(1, dtype=torch.int32), 2**31 - 2),
    "misaligned": lambda: kernel_misaligned[(1,)](x := zeros(16), x.data_ptr()),
    "shared race": lambda: kernel_inline[(1,)](zeros(128, dtype=torch.int32), _RACE),
    "barrier": lambda: kernel_inline[(1,)](zeros(128, dtype=torch.int32), _DIVERGENT),
}


if __name__ == "__main__":
    BUGS[sys.argv[1]]()
    torch.cuda.synchronize()
    print("done")
