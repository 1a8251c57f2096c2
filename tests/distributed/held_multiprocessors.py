"""Multiprocessors of a GPU that are held by a kernel of another stream, as collectives do."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit

_SIZE = 256
_MOST_POLLS = 10_000_000  # 10 s and more


@jit
def kernel_hold(running_ptr, until_ptr, timeout_ptr, x_ptr, SIZE: tl.constexpr):
    """Hold a multiprocessor until a flag is set. An operand of a product is in 128 KB of shared
    memory, beside which no program of a GEMM with large tiles finds room."""
    place = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    half = tl.arange(0, SIZE // 2)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    product = tl.dot(tl.load(x_ptr + half), tl.load(x_ptr + place))
    tl.atomic_add(running_ptr, 1, sem="release", scope="gpu")
    dl.wait(until_ptr, 1, 1, timeout_ptr)
    tl.store(x_ptr + half + SIZE * SIZE, product.to(x_ptr.dtype.element_ty))


@jit(do_not_specialize=["count"])  # so that it is loaded before
def kernel_await_running(running_ptr, timeout_ptr, count):
    dl.wait(running_ptr, 1, count, timeout_ptr)


@contextmanager
def held_multiprocessors(count: int, what: str) -> Iterator[None]:
    """What is queued on the current stream inside begins when ``count`` multiprocessors are held,
    and has to end before they are free. It must have run before: a kernel that is not loaded yet
    may wait for those that run.

    Raises:
        TimeoutError: ``what`` did not end.
    """
    # Names of this frame until the end: freed memory would be another tensor's while the kernel of
    # the side stream still writes there.
    operands = torch.zeros(2 * _SIZE * _SIZE, dtype=torch.float16, device="cuda")
    warm_up, words = _words(until=1), _words(until=0)
    _hold(1, warm_up, operands)
    _hold(count, words, operands)
    try:
        yield
    finally:
        words[1:2].fill_(1)
        torch.cuda.synchronize()
    if words[3]:
        raise TimeoutError(f"{what} did not end while {count} multiprocessors were held")


@functools.cache
def _side_stream() -> torch.cuda.Stream:
    """Always the same: a GPU has few queues, and each stream more may share one with the op's."""
    return torch.cuda.Stream()


def _words(until: int) -> torch.Tensor:
    """How many run, until when, and the guard of their waits."""
    words = torch.zeros(4, dtype=torch.int32, device="cuda")
    words[1:2].fill_(until)
    words[2:3].fill_(_MOST_POLLS)
    return words


def _hold(count: int, words: torch.Tensor, operands: torch.Tensor) -> None:
    torch.cuda.synchronize()
    with torch.cuda.stream(_side_stream()):
        kernel_hold[(count,)](words, words[1:], words[2:], operands, SIZE=_SIZE, num_warps=8)
    kernel_await_running[(1,)](words, words[2:], count, num_warps=1)
