"""The words of kernels that talk to peers, for sm_90 without a GPU: with and without what is
optional."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl
from triton.compiler.errors import CompilationError

from tests.compile.scattered import ACQUIRE, RELEASE
from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.testing.compile_only import compile_kernel


@jit
def kernel_wait(
    flags_ptr, timeout_ptr, out_ptr, count, HAS_TIMEOUT: tl.constexpr, BLOCK: tl.constexpr
):
    flags = flags_ptr
    if BLOCK:
        flags = flags_ptr + tl.arange(0, 4)
    if HAS_TIMEOUT:
        token = dl.wait(flags, count, 7, timeout_ptr)
    else:
        token = dl.wait(flags, count, 7)
    tl.store(out_ptr, tl.load(flags_ptr + dl.consume_token(9, token)))


@jit
def kernel_tell(flags_ptr, table_ptr, OP: tl.constexpr, MASKED: tl.constexpr):
    peers = tl.arange(0, 4)
    dl.give_turn()
    if MASKED:
        dl.notify(flags_ptr + peers, 1, OP, mask=peers < 3)
    else:
        dl.notify(dl.symm_at(flags_ptr, table_ptr, 1), 1, OP)


@jit
def kernel_dump(flags_ptr):
    dl.dump("flag", tl.load(flags_ptr))


@jit
def kernel_wait_with_a_scope(flags_ptr):
    dl.wait(flags_ptr, 1, "gpu", "acquire")


def causes(error):
    """Texts of ``error`` and of what led to it: the innermost has the assertion's."""
    texts = []
    while error is not None:
        texts.append(str(error))
        error = error.__cause__ or error.__context__
    return "\n".join(texts)


def words(dtype=torch.int32):
    return torch.empty(16, dtype=dtype, device="meta")


@pytest.mark.parametrize("has_timeout", [False, True])
@pytest.mark.parametrize("block", [False, True])
def test_a_wait_acquires_before_what_consumes_its_token(sm90, has_timeout, block):
    arguments = (words(), words(), words(), 3)
    ptx = compile_kernel(
        kernel_wait, *arguments, grid=(1,), HAS_TIMEOUT=has_timeout, BLOCK=block
    ).ptx
    acquired = ptx.rindex(ACQUIRE if not block else ".acquire")
    assert acquired < ptx.index("fence.proxy.async.global") < ptx.rindex("ld.global.b32")
    assert ("relaxed.max" in ptx) == has_timeout  # who gives up says so


@pytest.mark.parametrize("op", ["set", "add"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_flag_is_released_behind_a_barrier(sm90, op, masked):
    arguments = (words(), words(torch.int64))
    ptx = compile_kernel(kernel_tell, *arguments, grid=(1,), OP=op, MASKED=masked).ptx
    assert ptx.index("bar.sync") < RELEASE.search(ptx).start()


def test_a_dump_is_a_print_of_the_device(sm90):
    assert "vprintf" in compile_kernel(kernel_dump, words(), grid=(1,)).ptx


def test_a_scope_in_place_of_the_value_is_refused(sm90):
    with pytest.raises(CompilationError) as failed:
        compile_kernel(kernel_wait_with_a_scope, words(), grid=(1,))
    assert "wait(ptr, count, value, timeout_words=None): value is the int32" in causes(failed.value)
