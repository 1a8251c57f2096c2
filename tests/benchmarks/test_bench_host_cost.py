"""The host's time is taken apart; on CPU ranks only that it can be."""

from __future__ import annotations

from benchmarks import bench_host_cost


def test_every_part_of_a_call_is_timed(spawn_ranks):
    first, second = spawn_ranks(2, bench_host_cost.measure, 40, 64, 64, 2)
    assert first == second  # the slowest rank's
    assert {"tuned call", "call", "key_fn", "  transfer", "  consumer", "  finish"} <= set(first)
    assert all(value > 0 for value in first.values())
    assert first["key_fn"] < first["call"]
