"""Scenarios of ranks with bad input, on CPU ranks and on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.every_op_ranks import refusal
from tests.distributed.gemm_calls import AllGatherGEMM
from triton_dist.kernels.nvidia import ag_gemm, create_ag_gemm_context
from triton_dist.runtime.device import current_device

ROWS, COLUMNS, K = 6, 40, 72


def like_a(rows: int = ROWS, k: int = K, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.ones(rows, k, device=current_device().torch_device).to(dtype)


def like_b(k: int = K, columns: int = COLUMNS, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return like_a(k, columns, dtype)


def create(**changes: Any) -> Any:
    """A context like that of ``AllGatherGEMM``, with ``changes``."""
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
    calls, B = AllGatherGEMM(ROWS, columns, K), like_b(columns=columns)
    note(lambda: ag_gemm(like_a(dtype=torch.bfloat16 if is_other else torch.float16), B, calls.ctx))
    note(lambda: ag_gemm(like_a(rows=ROWS - is_other), B, calls.ctx))
    note(lambda: ag_gemm(like_a(), B.T.contiguous().T if is_other else B, calls.ctx))
    note(lambda: ag_gemm(like_a(), B, calls.ctx, local_copy=not is_other))
    calls(ROWS)
    calls.finish()
    return seen


def too_large() -> tuple[str, int, int, str]:
    """More symmetric memory than there is; then a context that fits."""
    error = refusal(lambda: create(max_M=2**40 * dist.get_world_size()))
    calls = AllGatherGEMM(ROWS, COLUMNS, K)
    calls(ROWS)
    calls.finish()
    return type(error).__name__, error.needed, error.available, str(error)
