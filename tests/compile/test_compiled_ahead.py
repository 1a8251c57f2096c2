"""Kernels of a test's ranks, compiled by none of them, before the test makes its calls."""

from __future__ import annotations

import os
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from tests.compile import kernels
from tests.distributed import compiled_ahead
from triton_dist.testing import spawn_ranks
from triton_dist.testing.compile_only import install

made: list[int] = []


@compiled_ahead.compiled_ahead
def calls(number: int) -> int:
    """Kernels that all ranks have, and one of each rank's own."""
    x = torch.empty(1)
    for n in (*range(number), 100 + dist.get_rank()):

        def prepare(n: int = n) -> None:
            kernels.counted.warmup(x, n, grid=(1,))

        if compiled_ahead.is_rehearsal():
            compiled_ahead.note(prepare)
        else:
            made.append(n)
    assert made, "nothing is made of a rehearsal"
    return len(made)


def rehearsed() -> tuple[int, int]:
    """In a rank: how many calls were made, this process."""
    install(90)
    gpu = SimpleNamespace(name="cuda")
    with mock.patch.object(compiled_ahead, "current_device", return_value=gpu):
        return calls(3), os.getpid()


def test_each_kernel_is_compiled_once_and_by_no_rank(tmp_path):
    log = tmp_path / "compiled_by"
    environment = {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "COMPILED_BY": str(log),
    }
    results = spawn_ranks(2, rehearsed, timeout=100, env=environment)
    assert [count for count, _ in results] == [4, 4]
    compiled_by = log.read_text().split()
    assert len(compiled_by) == 5
    assert not {str(process) for _, process in results} & set(compiled_by)


def test_nothing_is_rehearsed_where_nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(compiled_ahead, "current_device", lambda: SimpleNamespace(name="cpu"))
    seen = []
    compiled_ahead.compiled_ahead(lambda: seen.append(compiled_ahead.is_rehearsal()))()
    assert seen == [False]
