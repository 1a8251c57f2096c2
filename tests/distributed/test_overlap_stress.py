"""The stress of overlapped ops on CPU ranks: few calls; tests/gpu makes a thousand."""

from __future__ import annotations

import torch

from tests.distributed import overlap_stress
from tests.distributed.overlap_stress import Load, summarise

LOAD = Load(
    calls=12, max_rows=37, columns=40, K=72, dtype=torch.float16, configs=8, batch=5,
    most_cycles=10_000_000,
)  # fmt: skip


def test_random_calls(on_any):
    assert summarise(on_any(overlap_stress.random_calls, LOAD), LOAD.calls) == ""


def wrong_in_one_place() -> list[str]:
    """A result of which one value is off on rank 1."""
    stress = overlap_stress._Stress(LOAD)
    for number in range(LOAD.batch + 1):
        operands = stress.operands(3)
        C = stress.info.reference(operands)
        if number == 2 and stress.ctx.rank == 1:
            C[4, 7] += 0.5
        stress.check_later(f"call {number}", operands, C)
    return stress.finish()[1]


def test_one_wrong_value_is_seen_and_named(spawn_ranks):
    first, second = spawn_ranks(2, wrong_in_one_place)
    assert first == []
    assert second == ["call 2: 1 of 240 values"]
    assert "rank 1: 20 calls, 1 wrong: call 2" in summarise([(20, first), (20, second)], 20)
    assert "rank 0: 19 calls" in summarise([(19, [])], 20)
