"""The tuner over real processes and gloo."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.tuning import group_ranks, ops
from triton_dist._tuning.values import DIFFERS


def test_groups_that_were_destroyed_do_not_stay_in_memory(spawn_ranks):
    for alive, entries, said in spawn_ranks(2, group_ranks.groups_one_after_another):
        assert (alive, entries) == ([False] * 3, [1, 1, 1])
        assert "group is DeviceMesh(" in said
        assert "expected a process group that this rank belongs to" in said


def test_two_groups_tune_at_once(spawn_ranks):
    assert spawn_ranks(4, ops.tune_in_two_groups) == [(1, 1)] * 4


@pytest.mark.parametrize("contextual", [False, True])
def test_a_rank_in_a_collective_names_the_one_that_failed_before_it(spawn_ranks, contextual):
    limits = ("AUTOTUNE_TIMEOUT", "COMPILE_TIMEOUT")
    env = {f"TRITON_DIST_{limit}": "1.5" for limit in limits}
    said, _ = spawn_ranks(2, group_ranks.fails_before_a_collective, contextual, env=env, timeout=60)
    assert "rank(s) 1 did not arrive within 1.5 s: rank 1 failed: " in said
    assert "FileNotFoundError: no shard 1" in said
    assert "rank 0 is stuck in the user's code, where it may wait for the other" in said


def test_values_that_differ_by_rank_refuse_nothing_and_are_tuned_once(spawn_ranks):
    assert spawn_ranks(2, group_ranks.values_that_differ_by_rank) == [[[1, 1, 1], [0, 0, 0]]] * 2


def test_hooks_of_configs_may_bind_the_rank(spawn_ranks):
    counts, bound, uncounted = [1, 0, 1], {"hook.size": "128"}, {"hook.rank": DIFFERS}
    said = spawn_ranks(2, group_ranks.hooks_that_bind_the_rank)
    assert said == [(counts, bound, uncounted)] * 2


def test_partials_as_values_of_configs_are_found_again(spawn_ranks):
    configs = [f"{{'act': functools.partial(_scaled, {by})}}" for by in (2, 3)]
    said = spawn_ranks(2, group_ranks.partials_in_configs)
    assert said == [(15, 0, configs)] * 2


def test_a_literal_that_differs_is_named_with_both_values(spawn_ranks):
    for said in spawn_ranks(2, group_ranks.literals_that_differ):
        assert "rank 1: constant: SIZE was 64, is 65" in said


def test_a_choice_belongs_to_the_group_that_agreed_on_it(spawn_ranks):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = spawn_ranks(2, group_ranks.choices_and_groups, "127.0.0.1", store.port, init=False)
    assert [seen.pop("alone") for seen in ranks] == [1, 2]
    assert [seen.pop("alone again") for seen in ranks] == [1, 2]
    assert ranks[0] == ranks[1]
    seen = ranks[0]
    assert seen["group"] == seen["in a world"] == seen["in the next world"]
    assert (seen["waited"], seen["tuned again"]) == (False, 0)
    assert seen["group first"] == seen["then none"]
