"""Kernels that tests of the runner run from artefacts."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from triton_dist import runner
from triton_dist.runner import language


@runner.jit
def product(a_ptr, b_ptr, c_ptr, M, N, K, stride, BM: tl.constexpr, BK: tl.constexpr):
    rows, columns = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BM)
    ks = tl.arange(0, BK)
    acc = tl.zeros((BM, BM), dtype=tl.float32)
    for k in range(0, K, BK):
        a = tl.load(a_ptr + rows[:, None] * K + (k + ks)[None, :] * stride)
        b = tl.load(b_ptr + (k + ks)[:, None] * N + columns[None, :])
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], acc.to(tl.float16))


@runner.jit
def scale(x_ptr, y_ptr, n, stride, alpha, pair, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i * stride, mask=i < n).to(DTYPE) * alpha
    tl.store(pair[0] + i, x, mask=i < pair[1])
    tl.store(y_ptr + i, x, mask=i < n)


@runner.jit
def renamed(source_ptr, y_ptr, n, stride, alpha, pair, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    pass


@runner.jit
def add_one(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) + 1.0, mask=i < n)


@triton.jit
def twice(x):
    return 2 * x


@runner.jit
def choose(x_ptr, function: tl.constexpr, sizes: tl.constexpr, nothing: tl.constexpr):
    i = tl.arange(0, sizes[0])
    tl.store(x_ptr + i, function(tl.load(x_ptr + i)) + sizes[1])


@runner.jit
def copy_rows(x_ptr, y_ptr, columns):
    x = tl.make_tensor_descriptor(x_ptr, [16, columns], [columns, 1], [16, 16])
    y = tl.make_tensor_descriptor(y_ptr, [16, columns], [columns, 1], [16, 16])
    y.store([0, 0], x.load([0, 0]))


@runner.jit
def copy_tile(source, target):
    target.store([0, 0], source.load([0, 0]))


@triton.jit
def dumps(x):
    language.dump_grids(x)


@runner.jit
def watched(x_ptr, n, BLOCK: tl.constexpr, WHERE: tl.constexpr = 3, HELPED: tl.constexpr = False):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    language.dump(x, 0, WHERE)
    language.dump_boundary(tl.sum(x), offset=BLOCK)
    language.dump_grids(tl.reshape(x, (4, BLOCK // 4)), BLOCK + 1)
    if HELPED:
        dumps(x)
    tl.store(x_ptr + i, x, mask=i < n)


@runner.jit
@gluon.jit
def gluon_copy(x_ptr, y_ptr, n, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    i = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=layout)
    gl.store(y_ptr + i, gl.load(x_ptr + i, mask=i < n), mask=i < n)
