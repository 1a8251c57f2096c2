"""Kernels with most of what a kernel can say, for the interpreter as it is and made faster."""

from __future__ import annotations

import hashlib

import torch
import triton
import triton.language as tl

from triton_dist.runtime import interpreter, triton_compat

if triton_compat.is_interpreting():  # else tests on GPUs, collected beside, would have no driver
    interpreter.install()

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
