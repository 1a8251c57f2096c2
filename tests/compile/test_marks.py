"""Marks inside kernels, for sm_90 without a GPU: what they compile to, and that it is nothing."""

from __future__ import annotations

import re

import pytest
import torch
import triton
import triton.language as tl
from triton.compiler.errors import CompilationError

from tests.compile.scattered import TMA_LOAD, compile_launch
from tests.compile.test_gemm_kernels import prepared
from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.kernels.common.gemm import sharded, tile
from triton_dist.language import signals
from triton_dist.runtime import marking
from triton_dist.testing.compile_only import compile_kernel

MARK = re.compile(r"with (dl\.)?mark\(.*\):")
TILE = triton.Config(
    {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 8},
    num_warps=4,
    num_stages=3,
)
SELF_DESCRIBING = (tile, sharded, signals)


@pytest.fixture
def marks():
    """Whose memory is never written, as nothing is launched."""
    return marking.Marks(torch.device("cpu"))


def kernel():
    return compile_launch(prepared(True, TILE))


def functions():
    found = {id(each): each for module in SELF_DESCRIBING for each in vars(module).values()}
    return [each for each in found.values() if hasattr(each, "_unsafe_update_src")]


def take_marks_away():
    """``if True`` in the place of each: lines stay where they are, which the line table says."""
    count = 0
    for each in functions():
        source, taken = MARK.subn("if True:", each.src)
        each._unsafe_update_src(source)
        count += taken
    return count


def forget_compiled():
    for each in functions():
        each.hash = None
        if hasattr(each, "device_caches"):
            each.device_caches.clear()


@pytest.fixture
def sources():
    """Sources of kernels that may be changed."""
    before = [(each, each.src) for each in functions()]
    yield
    for each, source in before:
        each._unsafe_update_src(source)
    forget_compiled()


def test_a_kernel_that_makes_no_marks_is_the_one_without_them(sm90, marks, sources):
    plain = kernel()
    with marks.on():
        marked = kernel()
        with marking.off():
            assert kernel().kernel is plain.kernel
    assert kernel().kernel is plain.kernel
    assert take_marks_away() >= 6
    forget_compiled()
    without = kernel()
    assert without.kernel is not plain.kernel
    assert without.kernel.asm["cubin"] == plain.kernel.asm["cubin"]
    assert "globaltimer" not in plain.ptx

    # A wait, and of own and of gathered tiles the product and the store, each with begin and end;
    # and the flag that is awaited.
    assert marked.ptx.count("%globaltimer") == 2 * 6
    assert marked.ptx.count(f"mov.u64 record, {marks.address};") == 6
    assert marked.stack_bytes == 0
    assert marked.shared_memory_bytes == plain.shared_memory_bytes
    assert len(TMA_LOAD.findall(marked.ptx)) == len(TMA_LOAD.findall(plain.ptx))


@jit
def kernel_set_and_await_flags(flags_ptr):
    peers = tl.arange(0, 4)
    dl.notify(flags_ptr + peers, 1, mask=peers < 3)
    dl.notify(flags_ptr, 1, "add")
    dl.wait(flags_ptr + peers, 3, 2)


def test_each_flag_of_a_block_is_recorded_next_to_the_mark(sm90, marks):
    flags = torch.empty(4, dtype=torch.int32, device="meta")
    plain = compile_kernel(kernel_set_and_await_flags, flags).ptx
    with marks.on():
        marked = compile_kernel(kernel_set_and_await_flags, flags).ptx
    assert marked.count(f"mov.u64 record, {marks.address};") == (1 + 4) + (1 + 1) + (1 + 4)
    assert "globaltimer" not in plain


@jit
def kernel_in_an_unknown_state(out_ptr):
    with dl.mark("nap"):
        dl.notify(out_ptr, 1)


def test_a_mark_says_one_of_a_few_words(sm90):
    words = torch.empty(4, dtype=torch.int32, device="meta")
    with pytest.raises(CompilationError, match=r"name is '?nap"):
        compile_kernel(kernel_in_an_unknown_state, words)
