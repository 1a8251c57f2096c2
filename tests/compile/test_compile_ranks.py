"""A tuning by two processes whose candidates are compiled ahead, by neither of them."""

from __future__ import annotations

import dataclasses
import os

import torch

from tests.compile import kernels
from tests.tuning.ops import counted, spend
from triton_dist.runtime.compiling import CompilePool
from triton_dist.testing import spawn_ranks
from triton_dist.testing.compile_only import install
from triton_dist.tune import autotune

CANDIDATES = 6


def prepare(x, n):
    if n == 3:
        kernels.difficult.warmup(x, "does not compile", grid=(1,))
    kernels.counted.warmup(x, n, grid=(1,))


@autotune([{"n": n} for n in range(CANDIDATES)], lambda x: 1, prepare_fn=prepare)
def launched(x, n):
    spend(4e-3 * (CANDIDATES - n))
    return n


def tune() -> tuple[int, list[str], int]:
    """In a rank: what was chosen, failures, this process."""
    install(90)
    composed = launched._components_for
    launched._components_for = lambda group, verbose: dataclasses.replace(
        composed(group, verbose), compiler=CompilePool
    )
    x = torch.empty(1)
    with counted():
        chosen = launched(x)
    failures = [
        trial.outcome.message
        for trial in launched.tune(x).trials
        if hasattr(trial.outcome, "message")
    ]
    return chosen, failures, os.getpid()


def test_each_kernel_is_compiled_once_and_by_no_rank(tmp_path):
    log = tmp_path / "compiled_by"
    results = spawn_ranks(
        2,
        tune,
        timeout=200,
        env={
            "TRITON_INTERPRET": "0",
            "TRITON_CACHE_DIR": str(tmp_path / "triton"),
            "TRITON_DIST_CACHE_DIR": str(tmp_path / "records"),
            "COMPILED_BY": str(log),
        },
    )
    chosen, failures, processes = zip(*results, strict=True)
    assert chosen == (CANDIDATES - 1,) * 2
    assert failures[0] == failures[1]
    assert len(failures[0]) == 1
    assert "it does not compile" in failures[0][0]
    compiled_by = log.read_text().split()
    assert len(compiled_by) == CANDIDATES
    assert not set(compiled_by) & {str(process) for process in processes}
