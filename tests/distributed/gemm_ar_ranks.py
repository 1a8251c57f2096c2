"""What every rank does in the tests of GEMM-AllReduce, on CPU ranks and on GPUs alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.ag_gemm_calls import LAYOUTS, NAN, default_tiles, uniform
from tests.distributed.gemm_ar_calls import TILED, WAYS, Calls
from tests.distributed.gemm_rs_calls import TOLERANCE
from triton_dist.errors import ContextFinalized, InvalidArgument, TritonDistError, WaitTimeout
from triton_dist.kernels.common.launch import Launcher
from triton_dist.kernels.nvidia import (
    GEMMAllReduceMethod,
    create_gemm_ar_context,
    epochs,
    gemm_allreduce_tiles,
    gemm_ar,
)
from triton_dist.kernels.nvidia.gemm_allreduce_space import config_space
from triton_dist.kernels.nvidia.partials import MAX_CHUNKS
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for
from triton_dist.runtime.waits import bounded_waits
from triton_dist.testing.assertions import assert_allclose, assert_bitwise_equal
from triton_dist.testing.timing import captured

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
COLLECTIVE = {"method": GEMMAllReduceMethod.COLLECTIVE, "gemm_config": None}


def every_way() -> int:
    """Ways x kernels x bias, M changing from call to call: no multiples of anything, slabs that are
    short or empty, tiles that are clipped."""
    calls = Calls(max_rows=137, columns=72, K=72)
    rows = [137, 5, 1, 64, 3, 129, 63, 17]
    number = 0
    for way in WAYS:
        for persistent in (True, False):
            for has_bias in (True, False):
                calls(rows[number % 8], persistent=persistent, has_bias=has_bias, **way)
                number += 1
    return calls.finish()


def every_size(world: int) -> int:
    """Every way at sizes round multiples of the ranks and of slabs."""
    calls = Calls(max_rows=16 * world + 1, columns=40, K=24)
    sizes = (1, 3, 5, world, world + 1, 16 * world - 1, 16 * world, 16 * world + 1)
    for rows in sizes:
        for way in TILED:
            calls(rows, **way)
    return calls.finish()


def every_operand(dtypes: Sequence[torch.dtype] = DTYPES) -> int:
    """Dtypes x sizes x layouts of B x kernels, and layouts of A."""
    count = 0
    for dtype in dtypes:
        # An odd K, or an odd N, cannot be read or written through descriptors.
        for rows, columns, K in ((77, 72, 72), (1, 24, 16), (67, 65, 33), (5, 1, 1)):
            calls = Calls(rows, columns, K, dtype)
            for number, layout in enumerate(LAYOUTS):
                calls(rows, layout, **TILED[number % 5])
            calls(rows, "column-major", persistent=False)
            for number, a_layout in enumerate(("column-major", "misaligned slice", "every second")):
                calls(rows, a_layout=a_layout, **TILED[number])
            count += calls.finish()
    return count


def back_to_back(rounds: int) -> int:
    """Different calls one after another on two contexts; nothing lines the ranks up in between."""
    first = Calls(max_rows=77, columns=72, K=72)
    second = Calls(max_rows=8, columns=65, K=33, dtype=torch.float32)
    for number in range(rounds):
        first(1 + 13 * number % 77, **WAYS[number % 6], persistent=number % 4 > 0)
        if number % 3 == 0:
            second(1 + number % 8, **TILED[number % 5])
    return first.finish() + second.finish()


def stragglers() -> int:
    """Each rank in turn is late: on its stream within a call, and on the host before one."""
    cycles = 50_000_000  # 30 ms on a GPU, and on CPU ranks
    calls = Calls(max_rows=70, columns=72, K=72)
    for late in range(dist.get_world_size()):
        for way in WAYS:
            calls(70, straggler_option=(late, cycles), **way)
        if dist.get_rank() == late:
            time.sleep(0.05)
        calls(11, **WAYS[late % 6])
    return calls.finish()


def same_bits(rounds: int) -> int:
    """The same operands again and again, another rank late each time: the same bits on every rank,
    which are those of the rounded parts added in fp32 in the order of ranks, then the bias."""
    rank, size = dist.get_rank(), dist.get_world_size()
    calls = Calls(max_rows=67, columns=72, K=72)
    device, count = current_device(), 0
    B = torch.eye(72, dtype=torch.float16).to(device.torch_device)
    for turn in range(rounds):
        parts = [uniform(10 * turn + peer, (67, 72), torch.float16) for peer in range(size)]
        bias = uniform(10 * turn + 9, (1, 72), torch.float16)[0] if turn % 2 else None
        # A @ 1 is A: what is added is known to the bit.
        total = torch.zeros(67, 72, device=device.torch_device)
        for part in parts:
            total += part.float()
        if bias is not None:
            total += bias.float()
        for number, way in enumerate(TILED):
            late = (turn + number) % size
            C = gemm_ar.fn(
                parts[rank], B, calls.ctx, default_tiles(), bias=bias,
                straggler_option=(late, 20_000_000), **way,
            )  # fmt: skip
            device.synchronize()
            assert_bitwise_equal(C, total.half())
            count += 1
    calls.finish()
    return count


def same_bits_on_all_ranks() -> int:
    """Random operands: every rank has the bits of the first."""
    calls = Calls(max_rows=67, columns=72, K=72)
    for way in WAYS:
        calls(67, **way, persistent=True)
        calls(5, **way, persistent=False)
    calls.check()
    for number, (what, C, _) in enumerate(calls.results):
        seen = group_for().gather(
            f"bits of call {number}", C.cpu().view(torch.int16).sum(dtype=torch.int64).item()
        )
        assert len(set(seen)) == 1, what
    return calls.finish()


def borrowed_results() -> int:
    """Without a copy, a result is memory of the context, which keeps it over the next call."""
    calls = Calls(max_rows=67, columns=72, K=72)
    memory = calls.ctx.buffer.slots
    for way in (WAYS[3], WAYS[4]):
        for rows in (67, 3, 20):
            calls(rows, **way)
            assert calls.borrowed().data_ptr() == memory["sums"].local.data_ptr()
    calls(67, **WAYS[1])
    inside = memory["sums"].local.data_ptr()
    assert calls.borrowed().data_ptr() != inside
    return calls.finish()


def every_config() -> int:
    """Every candidate of the tuner, and the defaults of those that are not given."""
    calls = Calls(max_rows=77, columns=136, K=96)
    for config in config_space():
        calls(77, **config)
    calls(77)
    calls(77, op=gemm_ar, autotune=False)
    return calls.finish()


def tuned() -> tuple[int, int]:
    """Tuned calls, each layout on its own; (tunings, checked calls)."""
    calls = Calls(max_rows=11, columns=72, K=72)
    for _ in range(3):
        calls(11, "column-major", op=gemm_ar)
        calls(5, op=gemm_ar, has_bias=True)
        calls(12 - 1, op=gemm_ar, copy_to_local=False)
    return gemm_ar.tuning_count, calls.finish()


def whole_in_turn(rounds: int) -> int:
    """Products that are summed as a whole, between calls by tiles, the number of rows changing."""
    calls = Calls(max_rows=64, columns=64, K=64)
    for number in range(rounds):
        calls(16 + 8 * (number % 3), **COLLECTIVE, has_bias=number % 2 == 0)
        calls(64 - 8 * (number % 2), **WAYS[number % 6])
        calls(33, method=GEMMAllReduceMethod.SERIAL, num_chunks=1 + number % 3, num_ctas=3)
    return calls.finish()


def chunked(rounds: int) -> int:
    """Slabs in any number of chunks, some of them clipped, and in fewer than asked for."""
    calls = Calls(max_rows=300, columns=72, K=40)
    for number in range(rounds):
        for rows in (300, 65, 1):
            calls(
                rows, method=GEMMAllReduceMethod.TWO_SHOT, num_chunks=1 + number % MAX_CHUNKS,
                persistent=number % 3 > 0,
            )  # fmt: skip
    return calls.finish()


def a_kernel_that_raises() -> int:
    """A GEMM that fails to be launched on all ranks leaves the context as it was."""
    calls = Calls(max_rows=37, columns=72, K=72)
    launch = gemm_allreduce_tiles.scattered_gemm
    for number in range(3):
        gemm_allreduce_tiles.scattered_gemm = lambda *_, **__: 1 / 0
        try:
            calls(30 + number, **WAYS[1])
        except ZeroDivisionError:
            calls.skip()
        finally:
            gemm_allreduce_tiles.scattered_gemm = launch
        calls(30 + number, **WAYS[number])
    return calls.finish()


def many_tiles(rounds: int) -> int:
    """Shapes that keep a whole GPU busy while tiles travel; too much for the interpreter."""
    calls = Calls(max_rows=4091, columns=1536, K=1024, dtype=torch.bfloat16)
    for number in range(rounds):
        for way in WAYS:
            is_small = way["method"] is GEMMAllReduceMethod.ONE_SHOT
            calls(
                (1021 if is_small else 4091) - 97 * (number % 5),
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
        calls(1 + number, **WAYS[number])
    return calls.finish()


def epochs_wrap_around() -> int:
    """Flags and epochs that pass the largest int32."""
    calls = Calls(max_rows=40, columns=72, K=72)
    slots, nearly = calls.ctx.buffer.slots, 2**31 - 3
    for flags in ("arrivals", "sum_arrivals", "consumed"):
        for slot in range(2):
            slots.of_slot(slot, flags).local.fill_(nearly)
    counts = slots.memory["epoch"].local[:, 0].fill_(nearly + 1)  # the present use, after `nearly`
    current_device().synchronize()
    dist.barrier()
    for _ in range(3):
        for way in TILED:
            calls(40, **way)
    count = calls.check()
    assert counts.max() < 0
    calls.ctx.finalize()
    return count


def replayed(rounds: int) -> int:
    """Calls captured in CUDA graphs and replayed, beside calls that are not; fresh data each time.
    CPU ranks capture nothing: they call again."""
    rank, size = dist.get_rank(), dist.get_world_size()
    eager, calls = (Calls(max_rows=40, columns=72, K=72) for _ in range(2))
    A = uniform(1, (40, 72), torch.float16)
    B = uniform(100 + rank, (72, 72), torch.float16)
    everyone = [uniform(100 + peer, (72, 72), torch.float16).double() for peer in range(size)]
    outputs: dict[int, torch.Tensor] = {}

    def captured_call(number: int) -> Callable[[], object]:
        def call() -> None:
            outputs[number] = gemm_ar.fn(A, B, calls.ctx, default_tiles(), **WAYS[number])

        return captured(call, warmup=1)  # so that one of the two slots is new in the capture

    replays = [captured_call(number) for number in range(len(WAYS))]
    results = []
    for turn in range(rounds):
        for number, replay in enumerate(replays):
            addends = [
                uniform(1000 * turn + 10 * number + peer, (40, 72), A.dtype) for peer in range(size)
            ]
            A.copy_(addends[rank])
            replay()
            A.fill_(NAN)
            expected = sum(a.double() @ b for a, b in zip(addends, everyone, strict=True))
            results.append((outputs[number].clone(), expected.half()))
            eager(11, **WAYS[(turn + number) % 6])
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

    for way in (*WAYS, COLLECTIVE):  # the first of a context looks
        call(**way)
    with bounded_waits(20.0):  # trials, whatever the way, and the first call after them
        call(**WAYS[0])
        call(**WAYS[1])
    call(**WAYS[1])
    call(**WAYS[1])
    calls.finish()
    return looks


def give_up_and_start_again() -> list[str]:
    """Rank 0 calls alone, with a limit on its waits; after a reset all ranks call again."""
    overdue = []
    calls = Calls(max_rows=40, columns=72, K=72)
    calls(40)
    calls.check()
    for way in WAYS:
        for persistent in (True, False):
            if dist.get_rank() == 0:
                try:
                    with bounded_waits(0.2):
                        calls(40, persistent=persistent, **way)
                except WaitTimeout as error:
                    overdue.append(error.flag.split("[")[0])
            else:
                calls.skip()
            dist.barrier()
            calls.ctx.reset()
            for rows in (5, 40, 11):
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
        lambda: gemm_ar(A, B, ctx),
        lambda: gemm_ar(A, B, ctx, autotune=False),
        lambda: gemm_ar.fn(A, B, ctx, default_tiles()),
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
    A = uniform(1, (5, 72), torch.float16).requires_grad_()
    B = uniform(100, (72, 40), torch.float16).requires_grad_()
    for way in (*WAYS, COLLECTIVE):
        C = gemm_ar.fn(A, B, calls.ctx, **{"gemm_config": default_tiles(), **way})
        current_device().synchronize()
        assert not C.requires_grad
        for region in calls.ctx.buffer.slots.memory._regions.values():
            assert not any(peer.requires_grad for peer in region.peers), region.name
        dist.barrier()
    calls.finish()


def in_inference_mode() -> int:
    """A context made and used under ``torch.inference_mode``."""
    with torch.inference_mode():
        calls = Calls(max_rows=5, columns=40, K=72)
        for way in WAYS:
            calls(5, **way)
        return calls.finish()


# What a caller can get wrong. All ranks make the same mistakes.

ROWS, COLUMNS, K = 6, 40, 24


def _matrix(rows: int, columns: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.ones(rows, columns, device=current_device().torch_device).to(dtype)


def bad_calls() -> dict[str, dict[str, Any]]:
    return {
        "A.dtype": {"A": _matrix(ROWS, K, torch.bfloat16)},
        "A.dtype (integers)": {"A": _matrix(ROWS, K, torch.int32)},
        "B.dtype": {"B": _matrix(K, COLUMNS, torch.float32)},
        "bias.dtype": {"bias": _matrix(1, COLUMNS, torch.float32)[0]},
        "A.device": {"A": _matrix(ROWS, K).to("meta")},
        "B.device": {"B": _matrix(K, COLUMNS).to("meta")},
        "bias.device": {"bias": _matrix(1, COLUMNS)[0].to("meta")},
        "A.shape": {"A": _matrix(ROWS, K)[0]},
        "A.shape (3-D)": {"A": _matrix(ROWS, K)[None]},
        "M (none)": {"A": _matrix(0, K)},
        "M (too many)": {"A": _matrix(ROWS + 1, K)},
        "B.shape": {"B": _matrix(K, COLUMNS + 1)},
        "B.shape (K)": {"B": _matrix(K - 1, COLUMNS)},
        "B.shape (transposed)": {"B": _matrix(COLUMNS, K)},
        "bias.shape": {"bias": _matrix(1, COLUMNS + 1)[0]},
        "bias.shape (2-D)": {"bias": _matrix(1, COLUMNS)},
        "bias.stride()": {"bias": _matrix(COLUMNS, 2)[:, 0]},
        "num_chunks": {"num_chunks": MAX_CHUNKS + 1},
        "num_chunks (none)": {"num_chunks": 0},
        "method": {"method": "two_shot"},
        "gemm_config": {"gemm_config": None, "method": GEMMAllReduceMethod.TWO_SHOT},
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
    calls = Calls(ROWS, COLUMNS, K)
    calls(ROWS)
    launched = [0]
    run = Launcher.run

    def counted(*args: Any, **options: Any) -> None:
        launched[0] += 1
        run(*args, **options)

    Launcher.run = counted  # type: ignore[method-assign]
    for name, changes in bad_calls().items():
        good = {
            "A": _matrix(ROWS, K), "B": _matrix(K, COLUMNS), "ctx": calls.ctx,
            "gemm_config": default_tiles(),
        }  # fmt: skip
        arguments = good | changes
        error = _refusal(lambda a=arguments: gemm_ar.fn(**a))
        assert isinstance(error, InvalidArgument), name
        if not {"method", "num_chunks", "gemm_config"} & set(changes):  # those are tuned
            arguments.pop("gemm_config")
            assert str(_refusal(lambda a=arguments: gemm_ar(**a))) == str(error)
        seen[name] = (error.argument, str(error), launched[0])
    calls(ROWS)
    calls(ROWS - 1, method=GEMMAllReduceMethod.TWO_SHOT)
    # One launch; then, as this is the first in two shots, a look, the GEMM, the copy, and the end.
    assert launched[0] == 5
    calls.finish()
    return seen


def too_large_for_one_shot() -> str:
    """A product of which not every rank can have all parts."""
    columns = 1 << 20
    calls = Calls(max_rows=3, columns=columns, K=1)
    A, B = _matrix(3, 1), _matrix(1, columns)
    error = _refusal(
        lambda: gemm_ar.fn(A, B, calls.ctx, default_tiles(), method=GEMMAllReduceMethod.ONE_SHOT)
    )
    kept = gemm_ar.config_space.prune(gemm_ar.prune_fn, (A, B, calls.ctx), {})[0]
    assert all(config["method"] is not GEMMAllReduceMethod.ONE_SHOT for config in kept)
    calls.ctx.finalize()
    return str(error)


def every_bad_context() -> dict[str, tuple[str, str]]:
    """Per bad context, on all ranks: argument and message of its error."""
    size, rank = dist.get_world_size(), dist.get_rank()
    good = {
        "max_M": ROWS, "N": COLUMNS, "rank": rank, "world_size": size,
        "local_world_size": size, "output_dtype": torch.float16,
    }  # fmt: skip
    seen = {}
    for argument, value in (
        ("world_size", size + 1),
        ("rank", rank + 1),
        ("local_world_size", 0),
        ("max_M", 0),
        ("N", 0),
        ("output_dtype", torch.float64),
    ):
        error = _refusal(lambda c={argument: value}: create_gemm_ar_context(**(good | c)))
        assert isinstance(error, InvalidArgument), argument
        seen[argument] = (error.argument, str(error))
    differing = good | {"N": COLUMNS + (rank == 1)}
    error = _refusal(lambda: create_gemm_ar_context(**differing))
    seen["one rank differs"] = (type(error).__name__, str(error))
    return seen
