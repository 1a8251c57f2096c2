"""Training with data parallelism on GPUs, compared with one process."""

from __future__ import annotations

import pytest

from tests.layers import training_ranks

pytestmark = [pytest.mark.timeout(600), pytest.mark.gpu]


@pytest.mark.parametrize("wrapper", ["fsdp2", "ddp"])
@pytest.mark.parametrize("experts", [0, 4], ids=["dense", "experts"])
def test_a_mesh_of_four_trains_like_one_process(on_ranks, wrapper, experts):
    run = on_ranks(4)
    differences = run(
        training_ranks.trained_like_one_process, wrapper, 2, experts, wrapper == "fsdp2"
    )
    assert max(map(max, differences)) < 1e-3, differences
