"""Kernels that another process can import."""

from __future__ import annotations

import os
import signal
import time

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq


def misbehave(specialization):
    """Called while ``difficult`` is compiled: wait, or end the process."""
    how = specialization.constants["how"]
    if how == "hangs":
        time.sleep(60)
    if how == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    return "difficult"


@triton.jit
def scale(x_ptr, factor: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(x_ptr + offsets, tl.load(x_ptr + offsets) * factor)


@triton.jit
def targeted(x_ptr):
    """Another kernel if the compiler does not know what it compiles for."""
    if cuda_capability_geq(9, 0):
        tl.store(x_ptr, 90.0)
    else:
        tl.store(x_ptr, 10.0)


@triton.jit(repr=misbehave)
def difficult(x_ptr, how: tl.constexpr):
    tl.static_assert(how != "does not compile", "it does not compile")
    tl.store(x_ptr, 0.0)


@triton.jit
def twice(x):
    return 2 * x


@triton.jit
def apply(x_ptr, function: tl.constexpr):
    tl.store(x_ptr, function(tl.load(x_ptr)))


def note(specialization):
    """Called while ``counted`` is compiled: add the process to a file."""
    with open(os.environ["COMPILED_BY"], "a") as file:
        file.write(f"{os.getpid()}\n")
    return "counted"


@triton.jit(repr=note)
def counted(x_ptr, n: tl.constexpr):
    tl.store(x_ptr, n)
