"""Scenarios of ranks for ops that sum products over ranks, on CPU ranks and on GPUs; ``kind`` is
the op's subclass of ``Calls``."""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias
from unittest import mock

import torch
import torch.distributed as dist
import triton.language as tl

from tests import garbage
from tests.distributed.calls import DTYPES, Options
from tests.distributed.compiled_ahead import compiled_ahead
from tests.distributed.every_op_ranks import refusal
from tests.distributed.gemm_calls import (
    LAYOUTS,
    GEMMAllReduce,
    GEMMReduceScatter,
    SummedGEMM,
    default_tiles,
    uniform,
)
from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.kernels.common.scatter import algorithms as scatter_algorithms
from triton_dist.kernels.common.scatter.partials import MAX_CHUNKS
from triton_dist.kernels.common.slots import epochs
from triton_dist.kernels.nvidia import gemm_ar
from triton_dist.kernels.nvidia.gemm_allreduce.algorithms import supports_symmetric_all_reduce
from triton_dist.runtime.device import current_device
from triton_dist.runtime.device.cpu import CpuTransfer
from triton_dist.runtime.launch import Launch
from triton_dist.runtime.ranks import group_for
from triton_dist.runtime.waits import bounded_waits
from triton_dist.testing.assertions import assert_allclose, assert_bitwise_equal

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
    """How many run, until when, and the timeout words of their waits."""
    words = torch.zeros(4, dtype=torch.int32, device="cuda")
    words[1:2].fill_(until)
    words[2:3].fill_(_MOST_POLLS)
    return words


def _hold(count: int, words: torch.Tensor, operands: torch.Tensor) -> None:
    torch.cuda.synchronize()
    with torch.cuda.stream(_side_stream()):
        kernel_hold[(count,)](words, words[1:], words[2:], operands, SIZE=_SIZE, num_warps=8)
    kernel_await_running[(1,)](words, words[2:], count, num_warps=1)


Kind: TypeAlias = type[SummedGEMM]


@compiled_ahead
def every_algorithm(kind: Kind, turns: int) -> int:
    """Ways x kernels, every other call with a bias and the next turn's without, M changing from
    call to call: no multiples of anything, row blocks that are short or empty, tiles that are
    clipped."""
    calls = kind(max_rows=kind.every_rows[0], columns=72, K=72, **kind.context_options)
    rows = itertools.cycle(kind.every_rows)
    for turn in range(turns):
        for number, algorithm in enumerate(kind.algorithms, turn):
            for persistent in (True, False):
                has_bias = persistent is (number % 2 == 0)
                calls(next(rows), persistent=persistent, has_bias=has_bias, **algorithm)
    return calls.finish()


@compiled_ahead
def every_operand(kind: Kind, dtypes: Sequence[torch.dtype] = DTYPES) -> int:
    """Call with dtypes x sizes x layouts of B x kernels, and with layouts of A."""
    count = 0
    # An odd K, or an odd N, cannot be read or written through descriptors.
    shapes = ((72, 72), (24, 16), (65, 33), (1, 1))
    for dtype in dtypes:
        for (rows, algorithms), (columns, K) in zip(kind.operand_algorithms, shapes, strict=True):
            calls = kind(rows, columns, K, dtype)
            layouts = [*LAYOUTS][: None if columns > 24 else 2]  # all for the larger shapes
            for layout, algorithm in zip(layouts, itertools.cycle(kind.layout_algorithms)):
                calls(rows, layout, **algorithm)
            calls(rows, "column-major", persistent=False)
            for number, a_layout in enumerate(("column-major", "misaligned slice", "every second")):
                calls(rows, a_layout=a_layout, **algorithms[number % len(algorithms)])
            count += calls.finish()
    return count


def same_bits(kind: Kind, rounds: int) -> int:
    """The same operands again and again, another rank late each time: the same bits, which are
    those of the rounded parts added in fp32 in the order of ranks, then the bias."""
    rank, size = dist.get_rank(), dist.get_world_size()
    calls = kind(max_rows=kind.many, columns=72, K=72)
    device, count = current_device(), 0
    B = torch.eye(72, dtype=torch.float16).to(device.torch_device)
    shape, mine = (kind.rows_of_a(kind.many, size), 72), kind.own_rows(kind.many, rank)
    for turn in range(rounds):
        parts = [uniform(10 * turn + peer, shape, torch.float16) for peer in range(size)]
        bias = None
        if turn % 2 == 0:
            bias = uniform(10 * turn + 9 + kind.bias_seed(rank), (1, 72), torch.float16)[0]
        # A @ 1 is A: what is added is known to the bit.
        total = torch.zeros(kind.many, 72, device=device.torch_device)
        for part in parts:
            total += part[mine].float()
        if bias is not None:
            total += bias.float()
        for number, algorithm in enumerate(kind.tiled):
            late = (turn + number) % size
            C = kind.op.fn(
                parts[rank], B, calls.ctx, default_tiles(), bias=bias,
                straggler_option=(late, 20_000_000), **algorithm,
            )  # fmt: skip
            device.synchronize()
            assert_bitwise_equal(C, total.half())
            count += 1
    calls.finish()
    return count


@compiled_ahead
def chunked(kind: Kind, rounds: int) -> int:
    """Row blocks in any number of chunks, some of them clipped, and in fewer than asked for."""
    calls = kind(max_rows=kind.chunked_rows[0], columns=72, K=40)
    for number in range(rounds):
        for rows in kind.chunked_rows:
            num_chunks = 1 + number % MAX_CHUNKS
            calls(rows, **kind.row_blocks, num_chunks=num_chunks, persistent=number % 3 > 0)
    return calls.finish()


def a_kernel_that_raises(kind: Kind) -> int:
    """A GEMM of row blocks that fails to be launched on all ranks leaves the context as it was."""
    calls = kind(max_rows=37, columns=72, K=72)
    for number in range(3):
        with mock.patch.object(scatter_algorithms, "scattered_gemm", side_effect=ZeroDivisionError):
            try:
                calls(30 + number, **kind.row_blocks)
            except ZeroDivisionError:
                calls.skip()
        calls(30 + number, **kind.row_blocks, num_chunks=2)
        calls(30 + number, **kind.tiled[number % len(kind.tiled)])
    return calls.finish()


@compiled_ahead
def many_tiles(kind: Kind, rounds: int) -> int:
    """Shapes that keep a whole GPU busy while tiles travel; too much for the interpreter."""
    most = max(kind.full_rows(algorithm) for algorithm in kind.algorithms)
    calls = kind(most, columns=1536, K=1024, dtype=torch.bfloat16, **kind.context_options)
    for number in range(rounds):
        for algorithm in kind.algorithms:
            calls(
                kind.full_rows(algorithm) * (11 - number % 5) // 11,
                layout=("row-major", "column-major")[number % 2],
                persistent=number % 3 < 2,
                straggler_option=(number % dist.get_world_size(), 1_000_000),
                **algorithm,
            )
    return calls.finish()


def looks_at_peers(kind: Kind) -> list[int]:
    """How often a call looked whether its peers are done with a slot, after each kind of call."""
    calls = kind(max_rows=20, columns=72, K=72)
    launcher, looks = calls.ctx.buffer.slots.launcher, []
    run = launcher.run

    def counted(key: Any, *rest: Any, **options: Any) -> None:
        looks[-1] += key[0] is epochs.kernel_await_consumption
        run(key, *rest, **options)

    launcher.run = counted  # type: ignore[method-assign]

    def call(algorithm: Options) -> None:
        looks.append(0)
        calls(20, **algorithm)

    for algorithm in kind.in_turn:
        call(algorithm)
    with bounded_waits(20.0):  # trials, whatever the way, and the first call after them
        for algorithm in kind.in_trials:
            call(algorithm)
    call(algorithm)
    call(algorithm)
    calls.finish()
    return looks


def on_few_multiprocessors(kind: Kind, free: int, num_holding: int) -> int:
    """Calls on GPUs of which the first ``num_holding`` have ``free`` multiprocessors, and the
    others all: programs that have yet to begin are waited for by some that run.

    More are free for torch.matmul: its clusters, of programs that begin side by side, did not begin
    at all on 1 or 2, and on 4 in 3 of 4 times (H200)."""
    rank, size, dtype = dist.get_rank(), dist.get_world_size(), torch.bfloat16
    most = max(kind.full_rows(algorithm) for algorithm in kind.algorithms)
    calls = kind(most, columns=1536, K=1024, dtype=dtype, **kind.context_options)
    count = 0
    for algorithm in kind.algorithms:
        left = max(free, 40) if kind.multiplies_by_torch(algorithm) else free
        held = current_device().num_sms - left if rank < num_holding else 1
        rows = kind.rows_of_a(kind.full_rows(algorithm), size)
        A, B = uniform(rank, (rows, 1024), dtype), uniform(100 + rank, (1024, 1536), dtype)
        for persistent in (True, False):
            options = {"persistent": persistent, **algorithm}

            def call(A: torch.Tensor = A, B: torch.Tensor = B, options: Options = options) -> Any:
                C = kind.op.fn(A, B, calls.ctx, default_tiles(dtype), **options)
                return C.clone()  # one in the context's memory is soon another one's

            expected, _ = call(), call()  # compiled, and loaded, for both slots
            with held_multiprocessors(held, str(options)):
                results = [call() for _ in range(4)]
            for C in results:
                try:
                    assert_allclose(C, expected, rtol=6e-2, atol=6e-2 * 3)
                except AssertionError as error:
                    raise AssertionError(f"{options}: {error}") from None
            count += len(results)
    calls.ctx.finalize()
    return count


def ones(rows: int, columns: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.ones(rows, columns, dtype=dtype, device=current_device().torch_device)


def same_bits_on_all_ranks() -> int:
    """Random operands: every rank has the bits of the first."""
    calls = GEMMAllReduce(max_rows=67, columns=72, K=72)
    for algorithm in GEMMAllReduce.algorithms:
        calls(67, **algorithm, persistent=True)
        calls(5, **algorithm, persistent=False)
    calls.check()
    for number, (what, C, _) in enumerate(calls.results):
        seen = group_for().all_gather(
            f"bits of call {number}", C.cpu().view(torch.int16).sum(dtype=torch.int64).item()
        )
        assert len(set(seen)) == 1, what
    return calls.finish()


def borrowed_results() -> int:
    """Without a copy, a result is memory of the context, which keeps it over the next call."""
    calls = GEMMAllReduce(max_rows=67, columns=72, K=72)
    memory = calls.ctx.buffer.slots
    for algorithm in (GEMMAllReduce.algorithms[3], GEMMAllReduce.algorithms[4]):
        for rows in (67, 3, 20):
            calls(rows, **algorithm)
            assert calls.results[-1][1].data_ptr() == memory["sums"].local.data_ptr()
    calls(67, **GEMMAllReduce.algorithms[1])
    inside = memory["sums"].local.data_ptr()
    assert calls.results[-1][1].data_ptr() != inside
    return calls.finish()


def whole_alternating(rounds: int) -> int:
    """Products that are summed as a whole, by libraries too, between calls by tiles, the number of
    rows changing; and what torch's sum in symmetric memory refuses."""
    calls = GEMMAllReduce(max_rows=64, columns=64, K=64, dtype=torch.bfloat16)
    has_symmetric = supports_symmetric_all_reduce(torch.bfloat16, 64 * 2, dist.get_world_size())
    libraries = (
        (GEMMAllReduce.COLLECTIVE, GEMMAllReduce.SYMMETRIC)
        if has_symmetric
        else (GEMMAllReduce.COLLECTIVE,)
    )
    for number in range(rounds):
        library = libraries[number % len(libraries)]
        options = {"has_bias": number % 3 == 0, "copy_to_local": number % 4 < 2}
        calls(16 + 8 * (number % 3), **library, **options)
        calls(
            64 - 8 * (number % 2),
            **GEMMAllReduce.algorithms[number % len(GEMMAllReduce.algorithms)],
        )
        calls(33, algorithm="serial", num_chunks=1 + number % 3, num_ctas=3)
    A, B = (ones(rows, 64, torch.bfloat16) for rows in (4, 64))
    if not has_symmetric:
        error = str(refusal(lambda: gemm_ar.fn(A, B, calls.ctx, **GEMMAllReduce.SYMMETRIC)))
        assert "symmetric_collective" in error
        assert "2, 4 or 8 ranks on a GPU each" in error
    return calls.finish()


def too_large_for_one_shot() -> str:
    """A product of which not every rank can have all parts."""
    columns = 1 << 20
    calls = GEMMAllReduce(max_rows=3, columns=columns, K=1)
    A, B = ones(3, 1), ones(1, columns)
    error = refusal(lambda: gemm_ar.fn(A, B, calls.ctx, default_tiles(), algorithm="one_shot"))
    kept = gemm_ar.config_space.prune(gemm_ar.prune_fn, (A, B, calls.ctx), {})[0]
    assert all(config["algorithm"] != "one_shot" for config in kept)
    calls.ctx.finalize()
    return str(error)


def too_large_for_packets() -> str:
    """A product of which packets hold all but one row: those travel, one more is refused, and is
    not tried."""
    columns = 1 << 10
    calls = GEMMAllReduce(max_rows=129, columns=columns, K=1)
    calls(128, **GEMMAllReduce.PACKETS)
    A, B = ones(129, 1), ones(1, columns)
    error = refusal(lambda: gemm_ar.fn(A, B, calls.ctx, default_tiles(), **GEMMAllReduce.PACKETS))
    for rows, tried in ((128, True), (129, False)):
        kept = gemm_ar.config_space.prune(gemm_ar.prune_fn, (A[:rows], B, calls.ctx), {})[0]
        assert (
            any(config["algorithm"] == GEMMAllReduce.PACKETS["algorithm"] for config in kept)
            is tried
        )
    calls.finish()
    return str(error)


def order_of_row_blocks() -> list[str]:
    """What a call loads, launches and queues whose row blocks are pushed by copy engine, in
    order, and where no garbage is collected."""
    order: list[str] = []

    def noted(owner: Any, name: str) -> Any:
        method = getattr(owner, name)

        def noting(self: Any, *args: Any) -> Any:
            what = f"{name} {self.kernel.__name__}" if owner is Launch else name
            order.append(what if gc.isenabled() else f"{what}, uncollected")
            return method(self, *args)

        return mock.patch.object(owner, name, noting)

    calls = GEMMReduceScatter(max_rows=20, columns=72, K=72)
    calls(20, **GEMMReduceScatter.ROW_BLOCKS)
    calls(20, **GEMMReduceScatter.ROW_BLOCKS)
    with noted(Launch, "compile"), noted(Launch, "run"), noted(CpuTransfer, "queue"):
        calls(20, **GEMMReduceScatter.ROW_BLOCKS)
    calls.finish()
    return order


def garbage_between_launches(rounds: int) -> int:
    """Row blocks that are pushed while, after each new GEMM's launch, garbage lies about whose end
    waits for the GPU."""
    kind = type(current_device())
    lay_out = kind.repeated_launch

    def leaving(self: Any, *args: Any) -> Any:
        garbage.leave()
        return lay_out(self, *args)

    calls = GEMMReduceScatter(max_rows=150, columns=72, K=40)
    with mock.patch.object(kind, "repeated_launch", leaving):
        for number in range(rounds):
            calls(150 - 16 * number, **GEMMReduceScatter.ROW_BLOCKS, num_chunks=1 + number % 2)
    return calls.finish()
