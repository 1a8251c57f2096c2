"""One probe for each workaround of Triton's interpreter, and kernels with most operations.

As a program, with TRITON_INTERPRET=1, it prints which probes hold without the workarounds, and the
digests of results with workarounds but without what makes the interpreter faster.
"""

from __future__ import annotations

import hashlib
import json

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


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.uint8, torch.int64)


@triton.jit
def kernel_arithmetic(a_ptr, b_ptr, c_ptr, n, scale, SIZE: tl.constexpr):
    rows, columns = tl.arange(0, SIZE), tl.arange(0, 2 * SIZE)
    inside = (rows[:, None] < n) & (columns[None, :] < n + 3)
    offsets = rows[:, None] * (2 * SIZE) + columns[None, :]
    a = tl.load(a_ptr + offsets, mask=inside, other=1)
    b = tl.load(b_ptr + columns, mask=columns < n, other=2)[None, :]
    total = a * b + scale - a
    total = tl.where(total > b, total, b * 2) + (rows.to(tl.int64) << 1)[:, None]
    for k in range(n):
        total += (k % 3) * a
    total = total.to(tl.float32) / (1.5 + tl.abs(a).to(tl.float32))
    total = tl.maximum(total, 0.25) - tl.sum(total, axis=1)[:, None] * 0.125
    tl.store(c_ptr + offsets, total.to(c_ptr.dtype.element_ty), mask=inside)


@triton.jit
def kernel_product(a_ptr, b_ptr, c_ptr, n, SIZE: tl.constexpr):
    rows = tl.arange(0, SIZE)
    offsets = rows[:, None] * SIZE + rows[None, :]
    a = tl.make_tensor_descriptor(a_ptr, [n, SIZE], [SIZE, 1], [SIZE, SIZE])
    product = tl.dot(a.load([0, 0]), tl.load(b_ptr + offsets).T, tl.zeros((SIZE, SIZE), tl.float32))
    tl.atomic_add(c_ptr + rows, tl.max(product, axis=1) + tl.program_id(0) * 2)
    tl.store(c_ptr + SIZE + offsets, product.reshape(SIZE * SIZE).reshape(SIZE, SIZE))


@triton.jit
def kernel_operators(a_ptr, b_ptr, c_ptr, n, SIZE: tl.constexpr, INTEGERS: tl.constexpr):
    """All that stands between two values, of which each is a block, a number or a constant."""
    rows, columns = tl.arange(0, SIZE), tl.arange(0, SIZE)
    block = tl.load(a_ptr + rows)[:, None]
    other = tl.load(b_ptr + columns)[None, :]
    number = tl.load(a_ptr + 1 + n - n)
    offsets = n + rows[:, None] * SIZE + columns[None, :] - n
    step, pair = SIZE * SIZE, 0
    for left, right in (
        (block, other), (block, block), (block, number), (number, other), (number, n), (block, n),
        (n, block), (block, 3), (3, other), (number, -3), (SIZE, block), (rows[:, None], block),
        (block.to(tl.int64), other), (block, other.to(tl.float32)), (block, 2.5), (0.75, number),
        (number.to(tl.float32), -0.0), (block.to(tl.float32), 1e30),
    ):  # fmt: skip
        total = (left + right) * 2 - (left - right) + (left * right)
        more = (left < right) + 2 * (left <= right) + 4 * (left > right) + 8 * (left >= right)
        more += 16 * (left == right) + 32 * (left != right)
        both = ((left > right) & (right != left)) | (left == right)
        c = c_ptr + pair * step
        tl.store(c + offsets, (total + more + tl.where(both, 1, 0)).to(tl.float32))
        pair += 1
    if INTEGERS:
        for left, right in ((block, other), (block, 3), (17, other), (number, block), (number, 5)):
            total = (left // right) + (left % right) * 2 + (left & right) * 3 + (left | right) * 5
            c = c_ptr + pair * step
            tl.store(c + offsets, total.to(tl.float32))
            pair += 1
        total = (
            (block << 2) + (-block >> 1) + (block << n) + (number << 1) + (block.to(tl.int64) << 3)
        )
        tl.store(c_ptr + pair * step + offsets, total.to(tl.float32))
    else:
        total = block / other + block / 3.0 + 2.0 / other + number / block
        tl.store(c_ptr + pair * step + offsets, total.to(tl.float32))


def digest(*tensors: torch.Tensor) -> str:
    data = b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(data).hexdigest()


def digests() -> dict[str, str]:
    """The bits of results, by kernel and type."""
    found = {}
    for dtype in DTYPES:
        numbers = torch.Generator().manual_seed(1)
        a = torch.randint(0, 90, (16, 32), generator=numbers).to(dtype)
        b = torch.randint(0, 90, (32,), generator=numbers).to(dtype)
        for n, scale in ((13, 3), (16, 2), (0, 1)):
            c = torch.zeros(16, 32, dtype=dtype)
            kernel_arithmetic[(1,)](a, b, c, n, scale, SIZE=16)
            found[f"arithmetic {dtype} {n}"] = digest(c)
        if dtype != torch.uint8:  # a negative constant is refused
            own = torch.Generator().manual_seed(len(found))
            a, b = (torch.randint(1, 50, (16,), generator=own).to(dtype) for _ in "ab")
            blocks = torch.full((25, 16, 16), torch.nan)
            integers = not dtype.is_floating_point
            kernel_operators[(1,)](a, b, blocks, 3, SIZE=16, INTEGERS=integers)
            written = [block for block in blocks if block.isfinite().all()]
            assert len(written) == (24 if integers else 19)
            found |= {f"operators {dtype} {i}": digest(block) for i, block in enumerate(written)}
        if dtype.is_floating_point:
            a, b = (torch.randn(16, 16, generator=numbers).to(dtype) for _ in "ab")
            c = torch.zeros(17, 16)
            kernel_product[(3,)](a, b, c, 11, SIZE=16)
            found[f"product {dtype}"] = digest(c)
    return found


def refusal() -> str:
    """What is said of types that do not go together."""
    try:
        kernel_arithmetic[(1,)](torch.zeros(512), torch.zeros(32), 3, 1, 1, SIZE=16)
    except triton.runtime.errors.InterpreterError as error:
        return str(error)
    return "none"


if __name__ == "__main__":
    right = {name: is_right(name) for name in PROBES}
    interpreter_speed.install = lambda upstream: None
    interpreter.install()
    slow = {**digests(), "refusal": refusal()}
    print(json.dumps({"right": right, "slow": slow}))
