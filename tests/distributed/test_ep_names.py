"""Names of expert parallelism that Triton-distributed's scripts import, in their calls."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import ep_names_ranks

UNTUNED = {"TRITON_DIST_AUTOTUNE": "0"}


@pytest.mark.parametrize(("dtype", "has_scale"), [(torch.bfloat16, True), (torch.int8, False)])
def test_rows_sorted_by_expert(on_two, dtype, has_scale):
    more = on_two(ep_names_ranks.sorted_rows, dtype, has_scale, env=UNTUNED)
    assert more[0] > 0, "rank 0 returns more than max_m rows"


def test_layer_for_many_tokens(on_ranks):
    on_ranks(3)(ep_names_ranks.layer, True, env=UNTUNED)
    on_ranks(2)(ep_names_ranks.layer, False, env=UNTUNED)


def test_layer_for_few_tokens_is_exact(on_ranks):
    on_ranks(3)(ep_names_ranks.low_latency_layer, True, env=UNTUNED)
    on_ranks(2)(ep_names_ranks.low_latency_layer, False, env=UNTUNED)


def test_splits_in_2d(on_two):
    on_two(ep_names_ranks.splits_in_2d, torch.int8, env=UNTUNED)


def test_own_scripts(on_two):
    on_two(ep_names_ranks.own_script, False, env=UNTUNED)
