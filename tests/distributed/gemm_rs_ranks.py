"""What every rank does in the tests of GEMM-ReduceScatter, on CPU ranks and on GPUs alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.ag_gemm_calls import LAYOUTS, NAN, default_tiles, uniform
from tests.distributed.gemm_rs_calls import TOLERANCE, Calls
from triton_dist.errors import ContextFinalized, InvalidArgument, TritonDistError, WaitTimeout
from triton_dist.kernels.common.launch import Launcher
from triton_dist.kernels.nvidia import (
    create_gemm_rs_context,
    epochs,
    gemm_reduce_scatter_tiles,
    gemm_rs,
)
from triton_dist.kernels.nvidia import vendor_reduce_scatter as vendor
from triton_dist.kernels.nvidia.allgather_gemm_tiles import WARP_SPECIALIZED_SPLIT_K_TILES
from triton_dist.kernels.nvidia.gemm import warp_specialized_tiles
from triton_dist.kernels.nvidia.gemm_reduce_scatter import config_space
from triton_dist.kernels.nvidia.partials import MAX_CHUNKS
from triton_dist.runtime.device import current_device
from triton_dist.runtime.waits import bounded_waits
from triton_dist.testing.assertions import assert_allclose, assert_bitwise_equal
from triton_dist.testing.timing import captured

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# How the tiles of a call travel.
WAYS: tuple[dict[str, Any], ...] = (
    {"fuse_scatter": True, "reduce_st": False},
    {"fuse_scatter": False, "reduce_st": False, "num_chunks": 3},
    {"fuse_scatter": True, "reduce_st": True},
)


def every_way() -> int:
    """Ways x kernels x bias, M changing from call to call; every size clips a tile."""
    calls = Calls(max_rows=37, columns=72, K=72, reduce_st=True)
    rows = [37, 5, 1, 20, 33]
    for number, way in enumerate(WAYS * 2):
        for persistent in (True, False):
            for has_bias in (True, False):
                calls(
                    rows[(number + has_bias) % 5], persistent=persistent, has_bias=has_bias, **way
                )
    return calls.finish()


def every_operand(dtypes: Sequence[torch.dtype] = DTYPES) -> int:
    """Dtypes x sizes x layouts of B x kernels, and layouts of A."""
    count = 0
    for dtype in dtypes:
        # An odd K, or an odd N, cannot be read or written through descriptors.
        for rows, columns, K in ((37, 72, 72), (1, 24, 16), (33, 65, 33), (3, 1, 1)):
            calls = Calls(rows, columns, K, dtype)
            for layout in LAYOUTS:
                calls(rows, layout)
            calls(rows, "column-major", persistent=False)
            for a_layout in ("column-major", "misaligned slice", "every second"):
                calls(rows, a_layout=a_layout, fuse_scatter=rows != 3)
            count += calls.finish()
    return count


def back_to_back(rounds: int) -> int:
    """Different calls one after another on two contexts; nothing lines the ranks up in between."""
    first = Calls(max_rows=37, columns=72, K=72, reduce_st=True)
    second = Calls(max_rows=8, columns=65, K=33, dtype=torch.float32)
    for number in range(rounds):
        first(1 + 7 * number % 37, **WAYS[number % 3], persistent=number % 4 > 0)
        if number % 3 == 0:
            second(1 + number % 8, fuse_scatter=number % 2 == 0)
    return first.finish() + second.finish()


def stragglers() -> int:
    """Each rank in turn is late: on its stream within a call, and on the host before one."""
    cycles = 50_000_000  # 30 ms on a GPU, and on CPU ranks
    calls = Calls(max_rows=20, columns=72, K=72, reduce_st=True)
    for late in range(dist.get_world_size()):
        for way in WAYS:
            calls(20, straggler_option=(late, cycles), **way)
        if dist.get_rank() == late:
            time.sleep(0.05)
        calls(11, **WAYS[late % 3])
    return calls.finish()


def same_bits(rounds: int) -> int:
    """The same operands again and again, another rank late each time: the same bits, which are
    those of the rounded parts added in fp32 in the order of ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    calls = Calls(max_rows=33, columns=72, K=72)
    device = current_device()
    for dtype_seed in range(rounds):
        parts = [
            uniform(10 * dtype_seed + peer, (33 * size, 72), torch.float16) for peer in range(size)
        ]
        B = torch.eye(72, dtype=torch.float16).to(device.torch_device)
        mine = slice(33 * rank, 33 * (rank + 1))
        # A @ 1 is A: what is added is known to the bit.
        total = torch.zeros(33, 72, device=device.torch_device)
        for part in parts:
            total += part[mine].float()
        for fuse_scatter in (True, False):
            late = (dtype_seed + fuse_scatter) % size
            C = gemm_rs.fn(
                parts[rank], B, calls.ctx, default_tiles(), fuse_scatter=fuse_scatter,
                straggler_option=(late, 20_000_000),
            )  # fmt: skip
            device.synchronize()
            assert_bitwise_equal(C, total.half())
    calls.finish()
    return 2 * rounds


def every_config() -> int:
    """Every candidate of the tuner, and the defaults of those that are not given."""
    calls = Calls(max_rows=37, columns=136, K=96)
    for config in config_space():
        calls(37, **config)
    calls(37)
    calls(37, op=gemm_rs, autotune=False)
    return calls.finish()


def tuned() -> tuple[int, int]:
    """Tuned calls, each layout on its own; (tunings, checked calls)."""
    calls = Calls(max_rows=11, columns=72, K=72, reduce_st=True)
    for _ in range(3):
        calls(11, "column-major", op=gemm_rs, reduce_st=False)
        calls(5, op=gemm_rs, has_bias=True)
    assert calls.ctx.buffer.with_sums
    return gemm_rs.tuning_count, calls.finish()


def vendor_in_turn(rounds: int) -> int:
    """What torch brings, between calls of our own, the number of rows changing."""
    calls = Calls(max_rows=32, columns=64, K=64)
    for number in range(rounds):
        for method in vendor.methods_here():
            calls(16 + 8 * (number % 3), method=method, gemm_config=None, has_bias=number % 2 == 0)
            calls(32 - 8 * (number % 2), fuse_scatter=number % 2 == 0)
    return calls.finish()


def chunked(rounds: int) -> int:
    """Slabs in any number of chunks, some of them clipped, and in fewer than asked for."""
    calls = Calls(max_rows=150, columns=72, K=40)
    for number in range(rounds):
        for rows in (150, 33, 1):
            calls(rows, fuse_scatter=False, num_chunks=1 + number % MAX_CHUNKS)
    return calls.finish()


def specialized_warps() -> list[int]:
    """Every tile for specialised warps, whole and cut along K, in 1, 2 and 4 chunks, with clipped
    tiles; and operands that the ordinary kernel serves with such a config."""
    counts = []
    for most, columns, K in ((300, 520, 200), (1021, 2000, 520), (129, 2048, 4096)):
        calls = Calls(most, columns, K, torch.bfloat16)
        calls.ctx.split_workspace.partials.fill_(NAN)
        tiles = [*warp_specialized_tiles(), *WARP_SPECIALIZED_SPLIT_K_TILES]
        for number, config in enumerate(tiles):
            for rows, num_chunks in ((most, 1), (1, 2), (most // 2 + 1, 2), (most, 4)):
                calls(
                    rows, ("row-major", "column-major")[number % 2], gemm_config=config,
                    fuse_scatter=False, num_chunks=num_chunks, has_bias=num_chunks == 2,
                    straggler_option=(number % dist.get_world_size(), 2_000_000),
                )  # fmt: skip
            # A slice that TMA cannot read goes to the ordinary kernel, with the same config.
            calls(5, a_layout="every second", gemm_config=config, fuse_scatter=False)
        counts.append(calls.check())
        assert not calls.ctx.split_workspace.counters.any()
        calls.ctx.finalize()
    return counts


def specialized_warps_give_up() -> list[str]:
    """Rank 0 calls alone, with a limit on its waits, which are those of the sum; after a reset all
    ranks call again."""
    overdue = []
    calls = Calls(300, 520, 200, torch.bfloat16)
    options = {"gemm_config": warp_specialized_tiles()[0], "fuse_scatter": False}
    for num_chunks in (1, 2):
        calls(300, num_chunks=num_chunks, **options)
        calls.check()
        if dist.get_rank() == 0:
            try:
                with bounded_waits(0.2):
                    calls(300, num_chunks=num_chunks, **options)
            except WaitTimeout as error:
                overdue.append(error.flag.split("[")[0])
        else:
            calls.skip()
        dist.barrier()
        calls.ctx.reset()
    calls(300, **options)
    calls.finish()
    return overdue


def a_kernel_that_raises() -> int:
    """A GEMM of slabs that fails to be launched on all ranks leaves the context as it was."""
    calls = Calls(max_rows=37, columns=72, K=72)
    launch = gemm_reduce_scatter_tiles.scattered_gemm
    for number in range(3):
        gemm_reduce_scatter_tiles.scattered_gemm = lambda *_, **__: 1 / 0
        try:
            calls(30 + number, fuse_scatter=False)
        except ZeroDivisionError:
            calls.skip()
        finally:
            gemm_reduce_scatter_tiles.scattered_gemm = launch
        calls(30 + number, fuse_scatter=False, num_chunks=2)
    return calls.finish()


def many_tiles(rounds: int) -> int:
    """Shapes that keep a whole GPU busy while tiles travel; too much for the interpreter."""
    calls = Calls(max_rows=1021, columns=1536, K=1024, dtype=torch.bfloat16, reduce_st=True)
    for number in range(rounds):
        for way in WAYS:
            calls(
                1021 - 97 * (number % 5),
                layout=("row-major", "column-major")[number % 2],
                persistent=number % 3 < 2,
                straggler_option=(number % dist.get_world_size(), 1_000_000),
                **way,
            )
    return calls.finish()


def in_groups(members: Sequence[Sequence[int]]) -> int:
    """Disjoint groups at once, each with a context of its own, of different sizes."""
    groups = [dist.new_group(list(ranks)) for ranks in members]
    mine = next(i for i, ranks in enumerate(members) if dist.get_rank() in ranks)
    calls = Calls(max_rows=5 + mine, columns=40, K=72 - 8 * mine, group=groups[mine])
    for number in range(4):
        calls(1 + number, fuse_scatter=number % 2 == 0)
    return calls.finish()


def epochs_wrap_around() -> int:
    """Flags and epochs that pass the largest int32."""
    calls = Calls(max_rows=20, columns=72, K=72, reduce_st=True)
    memory, nearly = calls.ctx.buffer.slots.memory, 2**31 - 3
    for flags in ("arrivals0", "arrivals1", "consumed0", "consumed1"):
        memory[flags].local.fill_(nearly)
    counts = memory["epoch"].local[:, 0].fill_(nearly + 1)  # the present use, after `nearly`
    current_device().synchronize()
    dist.barrier()
    for _ in range(4):
        for way in WAYS:
            calls(20, **way)
    count = calls.check()
    assert counts.max() < 0
    calls.ctx.finalize()
    return count


def replayed(rounds: int) -> int:
    """Calls captured in CUDA graphs and replayed, beside calls that are not; fresh data each time.
    CPU ranks capture nothing: they call again."""
    rank, size = dist.get_rank(), dist.get_world_size()
    eager = Calls(max_rows=20, columns=72, K=72)
    calls = Calls(max_rows=20, columns=72, K=72, reduce_st=True)
    A = uniform(1, (20 * size, 72), torch.float16)
    B = uniform(100 + rank, (72, 72), torch.float16)
    everyone = [uniform(100 + peer, (72, 72), torch.float16).double() for peer in range(size)]
    outputs: dict[int, torch.Tensor] = {}

    def captured_call(number: int) -> Callable[[], object]:
        def call() -> None:
            outputs[number] = gemm_rs.fn(A, B, calls.ctx, default_tiles(), **WAYS[number])

        return captured(call, warmup=1)  # so that one of the two slots is new in the capture

    replays = [captured_call(number) for number in range(len(WAYS))]
    results = []
    for turn in range(rounds):
        for number, replay in enumerate(replays):
            addends = [
                uniform(1000 * turn + 10 * number + peer, (20 * size, 72), A.dtype)
                for peer in range(size)
            ]
            A.copy_(addends[rank])
            replay()
            A.fill_(NAN)
            mine = slice(20 * rank, 20 * (rank + 1))
            expected = sum(a.double()[mine] @ b for a, b in zip(addends, everyone, strict=True))
            results.append((outputs[number].clone(), expected.half()))
            eager(11, **WAYS[turn % 2])
    current_device().synchronize()
    tolerance = TOLERANCE[torch.float16]
    for C, expected in results:
        assert_allclose(C, expected, rtol=tolerance, atol=tolerance)
    calls.ctx.finalize()
    return len(results) + eager.finish()


def looks_at_peers() -> list[int]:
    """How often a call looked whether its peers are done with a slot, after each kind of call."""
    calls = Calls(max_rows=20, columns=72, K=72)
    launcher, looks = calls.ctx.buffer.slots.launcher, []
    run = launcher.run

    def counted(key: Any, *rest: Any, **options: Any) -> None:
        looks[-1] += key[0] is epochs.kernel_await_consumption
        run(key, *rest, **options)

    launcher.run = counted  # type: ignore[method-assign]

    def call(**options: Any) -> None:
        looks.append(0)
        calls(20, **options)

    for fuse_scatter in (True, True, False):  # the first of a context looks
        call(fuse_scatter=fuse_scatter)
    with bounded_waits(20.0):  # trials, and the first call after them
        call()
    call()
    call()
    calls.finish()
    return looks


def give_up_and_start_again() -> list[str]:
    """Rank 0 calls alone, with a limit on its waits; after a reset all ranks call again."""
    overdue = []
    calls = Calls(max_rows=20, columns=72, K=72, reduce_st=True)
    calls(20)
    calls.check()
    for way in WAYS:
        for persistent in (True, False):
            if dist.get_rank() == 0:
                try:
                    with bounded_waits(0.2):
                        calls(20, persistent=persistent, **way)
                except WaitTimeout as error:
                    overdue.append(error.flag.split("[")[0])
            else:
                calls.skip()
            dist.barrier()
            calls.ctx.buffer.slots.reset()
            for rows in (5, 20, 11):
                calls(rows, persistent=persistent, **way)
    calls.finish()
    return overdue


def context_ends() -> list[str]:
    """A context manager frees once; after that, and after an error inside, nothing works."""
    seen = []
    calls = Calls(max_rows=5, columns=40, K=72)
    with calls.ctx as ctx:
        calls(5)
        calls.check()
    ctx.finalize()
    A = B = torch.empty(0)
    for use in (
        lambda: gemm_rs(A, B, ctx),
        lambda: gemm_rs(A, B, ctx, autotune=False),
        lambda: gemm_rs.fn(A, B, ctx, default_tiles()),
    ):
        try:
            use()
        except ContextFinalized as error:
            seen.append(str(error))
    failing = Calls(max_rows=5, columns=40, K=72)
    try:
        with failing.ctx as ctx:
            raise KeyError("inside")
    except KeyError:
        seen.append("raised through")
    ctx.finalize()
    return seen


def trainable_operands() -> None:
    """Operands that require grad leave no history in the context's memory."""
    calls = Calls(max_rows=5, columns=40, K=72)
    A = uniform(1, (5 * calls.ctx.num_ranks, 72), torch.float16).requires_grad_()
    B = uniform(100, (72, 40), torch.float16).requires_grad_()
    for fuse_scatter in (True, False):
        C = gemm_rs.fn(A, B, calls.ctx, default_tiles(), fuse_scatter=fuse_scatter)
        current_device().synchronize()
        assert not C.requires_grad
        for region in calls.ctx.buffer.slots.memory._regions.values():
            assert not any(peer.requires_grad for peer in region.peers), region.name
        dist.barrier()
    calls.finish()


def in_inference_mode() -> int:
    """A context made and used under ``torch.inference_mode``."""
    with torch.inference_mode():
        calls = Calls(max_rows=5, columns=40, K=72, reduce_st=True)
        for way in WAYS:
            calls(5, **way)
        return calls.finish()


# Bad input: what is good where it is not named, and per refused argument what is bad.

ROWS, COLUMNS, K = 6, 40, 72


def _matrix(rows: int, columns: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.ones(rows, columns, device=current_device().torch_device).to(dtype)


def bad_calls(size: int) -> dict[str, dict[str, Any]]:
    M = ROWS * size
    return {
        "A.dtype": {"A": _matrix(M, K, torch.bfloat16)},
        "A.dtype (integers)": {"A": _matrix(M, K, torch.int32)},
        "B.dtype": {"B": _matrix(K, COLUMNS, torch.float32)},
        "bias.dtype": {"bias": _matrix(1, COLUMNS, torch.float32)[0]},
        "A.device": {"A": _matrix(M, K).to("meta")},
        "B.device": {"B": _matrix(K, COLUMNS).to("meta")},
        "bias.device": {"bias": _matrix(1, COLUMNS)[0].to("meta")},
        "A.shape": {"A": _matrix(M, K)[0]},
        "A.shape (3-D)": {"A": _matrix(M, K)[None]},
        "M": {"A": _matrix(M + 1, K)},
        "M (none)": {"A": _matrix(0, K)},
        "M (too many)": {"A": _matrix(M + size, K)},
        "B.shape": {"B": _matrix(K, COLUMNS + 1)},
        "B.shape (K)": {"B": _matrix(K - 1, COLUMNS)},
        "B.shape (transposed)": {"B": _matrix(COLUMNS, K)},
        "bias.shape": {"bias": _matrix(1, COLUMNS + 1)[0]},
        "bias.shape (2-D)": {"bias": _matrix(1, COLUMNS)},
        "bias.stride()": {"bias": _matrix(COLUMNS, 2)[:, 0]},
        "reduce_st": {"reduce_st": True},
        "num_chunks": {"num_chunks": MAX_CHUNKS + 1},
        "num_chunks (none)": {"num_chunks": 0},
        "method": {"method": "collective"},
    }


def _refusal(call: Callable[[], object]) -> TritonDistError | None:
    try:
        call()
    except TritonDistError as error:
        return error
    return None


def every_bad_call() -> dict[str, tuple[str, str, int]]:
    """Per bad call, on all ranks: argument and message of its error, and what was launched."""
    seen = {}
    size = dist.get_world_size()
    calls = Calls(ROWS, COLUMNS, K)
    calls(ROWS)
    launched = [0]
    run = Launcher.run

    def counted(*args: Any, **options: Any) -> None:
        launched[0] += 1
        run(*args, **options)

    Launcher.run = counted  # type: ignore[method-assign]
    for name, changes in bad_calls(size).items():
        good = {"A": _matrix(ROWS * size, K), "B": _matrix(K, COLUMNS), "ctx": calls.ctx}
        arguments = good | changes
        error = _refusal(lambda a=arguments: gemm_rs.fn(gemm_config=default_tiles(), **a))
        assert isinstance(error, InvalidArgument), name
        if not {"method", "num_chunks"} & set(changes):  # those are tuned
            assert str(_refusal(lambda a=arguments: gemm_rs(**a))) == str(error)
        seen[name] = (error.argument, str(error), launched[0])
    calls(ROWS)
    calls(ROWS - 1)
    assert launched[0] == 4  # of each: the GEMM and the end
    calls.finish()
    return seen


def every_bad_context() -> dict[str, tuple[str, str]]:
    """Per bad context, on all ranks: argument and message of its error."""
    size, rank = dist.get_world_size(), dist.get_rank()
    good = {
        "max_M": ROWS * size, "N": COLUMNS, "rank": rank, "world_size": size,
        "local_world_size": size, "output_dtype": torch.float16,
    }  # fmt: skip
    seen = {}
    for argument, value in (
        ("world_size", size + 1),
        ("rank", rank + 1),
        ("local_world_size", 0),
        ("max_M", ROWS * size + 1),
        ("N", 0),
        ("output_dtype", torch.float64),
    ):
        error = _refusal(lambda c={argument: value}: create_gemm_rs_context(**(good | c)))
        assert isinstance(error, InvalidArgument), argument
        seen[argument] = (error.argument, str(error))
    differing = good | {"N": COLUMNS + (rank == 1)}
    error = _refusal(lambda: create_gemm_rs_context(**differing))
    seen["one rank differs"] = (type(error).__name__, str(error))
    return seen
