"""One probe for each mend of Triton's interpreter: is what it mends right?

Run as a program, it prints what is right in Triton as it is, where the mends are not installed; and
then the digests of ``speed_probes``, mended but not made faster.
"""

from __future__ import annotations

import json
import os

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from triton_dist.errors import WaitTimeout
from triton_dist.runtime import interpreter, interpreter_speed
from triton_dist.runtime.cooperative_grid import pause


@triton.jit
def dot(a_ptr, b_ptr, c_ptr):
    row, col = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    c = tl.dot(tl.load(a_ptr + row * 16 + col), tl.load(b_ptr + row * 16 + col))
    tl.store(c_ptr + row * 16 + col, c)


def bfloat16() -> bool:
    a, b, c = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16(), torch.empty(16, 16)
    dot[(1,)](a, b, c)
    return torch.allclose(c, a.float() @ b.float(), atol=1e-4)


@triton.jit
def count_to(out_ptr, n):
    for i in range(n):
        tl.store(out_ptr + i, i)


def runtime_range() -> bool:
    out = torch.full((4,), -1, dtype=torch.int32)
    count_to[(1,)](out, 4)
    return out.tolist() == [0, 1, 2, 3]


@triton.jit
def store_if(out_ptr, condition):
    if condition:
        tl.store(out_ptr, 1)


def bool_argument() -> bool:
    out = torch.zeros(2, dtype=torch.int32)
    store_if[(1,)](out, True)
    store_if[(1,)](out[1:], False)
    return out.tolist() == [1, 0]


@triton.jit
def assert_positive(x_ptr):
    tl.device_assert(tl.load(x_ptr) > 0, "x must be positive")


def device_assert() -> bool:
    assert_positive[(1,)](torch.ones(1))
    try:
        assert_positive[(1,)](-torch.ones(1))
    except (triton.runtime.errors.InterpreterError, AssertionError):  # this under TRITON_DIST_DEBUG
        return True
    return False


@triton.jit
def load_block(descriptor, out_ptr):
    block = descriptor.load([0, 8])
    index = tl.arange(0, 4)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out_ptr + index, block)


def descriptor_copy() -> bool:
    source, out = torch.ones(4, 16).bfloat16(), torch.empty(4, 16).bfloat16()
    load_block[(1,)](TensorDescriptor.from_tensor(source, [4, 16], padding="nan"), out)
    return bool((out[:, :8] == 1).all() and out[:, 8:].isnan().all())


@triton.jit
def add_block(descriptor):
    descriptor.atomic_add([0, 0], tl.full((4, 16), 2, descriptor.dtype))


def descriptor_reduce() -> bool:
    target = torch.ones(4, 16)
    add_block[(3,)](TensorDescriptor.from_tensor(target, [4, 16]))
    return bool((target == 7).all())


@triton.jit
def first_waits_for_last(flag_ptr, out_ptr, rounds):
    program = tl.program_id(0)
    if program == tl.num_programs(0) - 1:
        tl.atomic_xchg(flag_ptr, 1, sem="release", scope="sys")
    seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    n = 0
    while (seen == 0) & (n < rounds):
        pause()
        seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
        n += 1
    tl.store(out_ptr + program, seen)


def cooperative_grid() -> bool:
    flag, out = torch.zeros(1, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    first_waits_for_last[(4,)](flag, out, 100)
    return bool(out.all())


def give_up():
    raise WaitTimeout(
        rank=0, program="program (0, 0, 0)", flag="ready[1]", expected=1, seen=0, seconds=0.5
    )


@triton.jit
def wait_too_long():
    give_up()


@triton.jit
def calls_wait_too_long(x_ptr):
    wait_too_long()


def typed_errors() -> bool:
    try:
        calls_wait_too_long[(1,)](torch.zeros(1))
    except WaitTimeout as error:
        return error.flag == "ready[1]"
    return False


@triton.autotune(configs=[triton.Config({"VALUE": 1}), triton.Config({"VALUE": 2})], key=["n"])
@triton.jit
def store_value(out_ptr, n, VALUE: tl.constexpr):
    tl.store(out_ptr, VALUE)


def autotune_without_gpu() -> bool:
    out = torch.zeros(1)
    store_value[(1,)](out, 1)
    return out.item() in (1, 2)


PROBES = {
    probe.__name__: probe
    for probe in (
        bfloat16, runtime_range, bool_argument, device_assert, descriptor_copy, descriptor_reduce,
        cooperative_grid, typed_errors, autotune_without_gpu,
    )
}  # fmt: skip


def is_right(name: str) -> bool:
    """Whether the probe holds; an exception says no."""
    try:
        return PROBES[name]()
    except Exception:
        return False


if __name__ == "__main__":
    right = {name: is_right(name) for name in PROBES}
    interpreter_speed.install = lambda upstream: None
    interpreter.install()
    from tests.runtime import speed_probes

    slow = {**speed_probes.digests(), "refusal": speed_probes.refusal()}
    print(json.dumps({"right": right, "slow": slow}))
