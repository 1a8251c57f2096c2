"""Predicted times of our ops: near measured times, and defined for every candidate."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from benchmarks import bench_prior as bench
from tests.example_keys import sample_inputs
from triton_dist._archive import PACKAGE_RECORDS
from triton_dist.kernels.nvidia import ag_gemm
from triton_dist.kernels.nvidia.gemm import matmul
from triton_dist.testing.opinfo import OPINFOS

PREDICTED = [name for name, info in OPINFOS.items() if info.op.prior_fn is not None]


def test_predictions_order_the_configs_of_layers_that_they_were_not_fitted_to():
    scores = list(bench.regrets(bench.DATA / "matmul_4096_14336_sizes.json.gz"))
    assert len(scores) == 25
    assert sum(each.top <= 0.02 for each in scores) == 25
    assert sum(each.choice <= 0.1 for each in scores) == 25
    assert sum(each.choice < each.first for each in scores) >= 24


def test_winners_of_shipped_records_are_among_the_most_promising(monkeypatch):
    files = sorted(PACKAGE_RECORDS.glob("*gemm*.json"))
    ranks = {path.name: list(bench.winner_positions(path, step=25)) for path in files}
    found = [rank for each in ranks.values() for _, rank, _ in each]
    assert {name.partition(".")[0] for name, each in ranks.items() if each} == set(PREDICTED)
    assert sum(rank < bench.TOP for rank in found) >= 0.9 * len(found)
    monkeypatch.setattr(ag_gemm, "prior_fn", lambda *_: 1.0)  # the order of the space
    in_space = [rank for _, rank, _ in bench.winner_positions(files[1], step=25)]
    own = [rank for _, rank, _ in ranks[files[1].name]]
    assert sum(own) < sum(in_space) / 2


@pytest.mark.parametrize("name", PREDICTED)
def test_every_candidate_has_a_prediction(name):
    op, algorithms = OPINFOS[name].op, Counter()
    with bench.on_gpu("NVIDIA H200"):
        for args, kwargs in sample_inputs(name):
            for config in op.config_space.prune(op.prune_fn, args, kwargs)[0]:
                milliseconds = op.prior_fn(config, *args, **kwargs)
                assert 0 < milliseconds < math.inf
                algorithms[config["algorithm"]] += 1
    assert len(algorithms) > 1


@pytest.mark.parametrize(("M", "N", "K"), [(0, 64, 64), (64, 0, 64), (64, 64, 0)])
def test_empty_products_have_predictions(M, N, K):
    with bench.on_gpu("NVIDIA H200"):
        A, B = torch.empty(M, K, device="meta"), torch.empty(K, N, device="meta")
        kept, _ = matmul.config_space.prune(matmul.prune_fn, (A, B), {})
        assert all(0 < matmul.prior_fn(config, A, B) < math.inf for config in kept)
        assert kept
