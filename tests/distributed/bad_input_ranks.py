"""What every rank does in the tests of bad input, on CPU ranks and on GPUs alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.distributed.ag_gemm_calls import Calls, default_tiles
from triton_dist.errors import InvalidArgument, TritonDistError
from triton_dist.kernels.common.launch import Launcher
from triton_dist.kernels.common.slots.gathered import AllGatherBuffer
from triton_dist.kernels.nvidia import ag_gemm, create_ag_gemm_context
from triton_dist.kernels.nvidia.allgather_gemm import context as allgather_gemm_context
from triton_dist.runtime.device import current_device
from triton_dist.runtime.symmetric import host
from triton_dist.testing.opinfo.allgather_gemm import AG_GEMM

ROWS, COLUMNS, K = 6, 40, 72


def like_a(rows: int = ROWS, k: int = K, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.ones(rows, k, device=current_device().torch_device).to(dtype)


def like_b(k: int = K, columns: int = COLUMNS, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return like_a(k, columns, dtype)


def bad_calls(num_ranks: int) -> dict[str, dict[str, Any]]:
    """The case's; and rows that this test's context has no room for in one launch."""
    many = {"way (many rows)": {"way": "serial"}}
    return AG_GEMM.error_inputs({"A": like_a(), "B": like_b()}, num_ranks) | many


def bad_contexts(num_ranks: int, rank: int) -> dict[str, dict[str, Any]]:
    return {
        "num_ranks": {"num_ranks": num_ranks + 1},
        "num_ranks (none)": {"num_ranks": 0},
        "rank": {"rank": rank + 1},
        "max_M": {"max_M": ROWS * num_ranks + 1},
        "max_M (none)": {"max_M": 0},
        "max_M (negative)": {"max_M": -num_ranks},
        "N": {"N": COLUMNS * num_ranks + 1},
        "N (none)": {"N": 0},
        "K": {"K": 0},
        "dtype": {"dtype": torch.float64},
        "dtype (integers)": {"dtype": torch.int8},
        "K (half of an odd number)": {"K": K / 2},
        "max_M (a list)": {"max_M": [ROWS]},
        "num_local_ranks": {"num_local_ranks": None},
        "all_gather_method": {"all_gather_method": "ring_push_1d"},
    }


def create(**changes: Any) -> Any:
    """A context like that of ``Calls``, with ``changes``."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    arguments = {
        "max_M": ROWS * num_ranks,
        "N": COLUMNS * num_ranks,
        "K": K,
        "dtype": torch.float16,
        "rank": rank,
        "num_ranks": num_ranks,
    }
    return create_ag_gemm_context(**(arguments | changes))


def refusal(call: Callable[[], object]) -> TritonDistError | None:
    try:
        call()
    except TritonDistError as error:
        return error
    return None


class Launches:
    """Counts what a rank launches or queues from here on."""

    def __init__(self) -> None:
        self.count = 0
        for owner, name in ((Launcher, "run"), (AllGatherBuffer, "start")):
            setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return function(*args, **kwargs)

        return counted


def every_bad_call() -> dict[str, tuple[str, str, int]]:
    """Per bad call, on all ranks: argument and message of its error, and what was launched."""
    seen = {}
    room = (ROWS - 1) * dist.get_world_size() * K * torch.float16.itemsize
    with mock.patch.object(allgather_gemm_context, "GATHERED_BYTES", room):
        calls = Calls(ROWS, COLUMNS, K)
    calls(ROWS)
    launches = Launches()
    for name, changes in bad_calls(dist.get_world_size()).items():
        arguments = {"A": like_a(), "B": like_b(), "ctx": calls.ctx} | changes
        schedule = set(arguments) - {"A", "B", "ctx"}
        untuned = refusal(lambda a=arguments: ag_gemm.fn(**{"gemm_config": default_tiles()} | a))
        options = {"autotune_allow_arg_overwrite": True, "autotune": False} if schedule else {}
        tuned = untuned if schedule else refusal(lambda a=arguments, o=options: ag_gemm(**a, **o))
        assert isinstance(untuned, InvalidArgument), name
        assert isinstance(tuned, InvalidArgument), name
        assert str(tuned) == str(untuned)
        seen[name] = (untuned.argument, str(untuned), launches.count)
    calls(ROWS)
    calls(ROWS - 1)
    # Of each: a look at the peers, since its slot had other rows, transfer, consumer, end.
    assert launches.count == 8
    calls(ROWS - 1, way="serial")
    assert launches.count == 9
    calls.finish()
    return seen


def every_bad_context() -> dict[str, tuple[str, str]]:
    """Per bad context, on all ranks: argument and message of its error."""
    seen = {}
    for name, changes in bad_contexts(dist.get_world_size(), dist.get_rank()).items():
        error = refusal(lambda c=changes: create(**c))
        assert isinstance(error, InvalidArgument), name
        seen[name] = (error.argument, str(error))
    calls = Calls(ROWS, COLUMNS, K)
    calls(ROWS)
    calls.finish()
    return seen


def one_rank_differs() -> list[tuple[str, str]]:
    """What this rank gets when rank 1 alone comes with something else, each time anew.

    Of a number of columns that no other test has, since ranks stay from test to test: a rank that
    came with what was tuned before would make its call, and wait in vain for the others, who tune.
    """
    columns = COLUMNS + 8
    is_other = dist.get_rank() == 1
    seen = []

    def note(call: Callable[[], object]) -> None:
        error = refusal(call)
        seen.append((type(error).__name__, str(error)))

    note(lambda: create(max_M=ROWS * dist.get_world_size() + is_other))
    note(lambda: create(K=K + is_other))
    note(lambda: create(dtype=torch.bfloat16 if is_other else torch.float16))
    calls, B = Calls(ROWS, columns, K), like_b(columns=columns)
    note(lambda: ag_gemm(like_a(dtype=torch.bfloat16 if is_other else torch.float16), B, calls.ctx))
    note(lambda: ag_gemm(like_a(rows=ROWS - is_other), B, calls.ctx))
    note(lambda: ag_gemm(like_a(), B.T.contiguous().T if is_other else B, calls.ctx))
    note(lambda: ag_gemm(like_a(), B, calls.ctx, local_copy=not is_other))
    calls(ROWS)
    calls.finish()
    return seen


def one_rank_does_not_come() -> float:
    """Seconds until this rank gave up on a first call that rank 1 never makes."""
    calls = Calls(ROWS, COLUMNS, K)
    if dist.get_rank() == 1:
        dist.barrier()  # until rank 0 gave up
        return 0.0
    begin = time.monotonic()
    error = refusal(lambda: ag_gemm(like_a(), like_b(), calls.ctx))
    seconds = time.monotonic() - begin
    assert type(error).__name__ == "TuningTimeout", error
    assert "rank(s) 1 did not arrive" in str(error)
    dist.barrier()
    return seconds


def too_large() -> tuple[str, int, int, str]:
    """More symmetric memory than there is; then a context that fits."""
    error = refusal(lambda: create(max_M=2**40 * dist.get_world_size()))
    calls = Calls(ROWS, COLUMNS, K)
    calls(ROWS)
    calls.finish()
    return type(error).__name__, error.needed, error.available, str(error)


def full_on_one_rank() -> str:
    """CPU ranks: /dev/shm is too small for rank 1 only; then it fits."""
    reserve = host._reserve
    if dist.get_rank() == 1:
        host._reserve = lambda fd, nbytes: 123
    error = refusal(create)
    host._reserve = reserve
    create().finalize()
    return f"{type(error).__name__}: {error}"
