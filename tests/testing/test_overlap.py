"""What overlapped ops are measured beside: peers, the limit, and how configs are told apart."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from triton_dist.kernels.nvidia import AllGatherMethod, create_ag_gemm_context
from triton_dist.kernels.nvidia.allgather_gemm.ways import WAYS
from triton_dist.runtime.device import current_device
from triton_dist.testing.ag_gemm_peers import ag_gemm_peers, gather_alone, is_own_algorithm
from triton_dist.testing.assertions import count_mismatches
from triton_dist.testing.overlap import Candidate, overlap_limit
from triton_dist.testing.timing import Samples


def everything_there_is():
    """Kinds by name; each peer's output is what it says, for other operands than at the start."""
    device = current_device().torch_device
    A, B = torch.rand(3, 16, device=device), torch.rand(16, 8, device=device)
    with create_ag_gemm_context(6, 16, 16, A.dtype, dist.get_rank(), 2) as ctx:
        peers = ag_gemm_peers(A, B, ctx)
        A.mul_(-2)
        for each in peers.values():
            if each.expected is not None:
                torch.testing.assert_close(each.call(), each.expected())
        rows = gather_alone(A, ctx)
        shards = [torch.empty_like(A) for _ in range(2)]
        dist.all_gather(shards, A)
        peer = 1 - dist.get_rank()
        torch.testing.assert_close(rows[3 * peer : 3 * peer + 3], shards[peer])
    return {name: each.kind for name, each in peers.items()}


def test_peers_do_what_they_say(spawn_ranks):
    expected = {
        "GEMM alone": "gemm",
        "all-gather alone": "transfer",
        "copy-engine all-gather alone": "transfer",
        "all-gather + matmul": "peer",
    }
    assert spawn_ranks(2, everything_there_is) == [expected, expected]


@pytest.mark.gpu(count=2)
def test_torch_has_a_peer_on_gpus(spawn_ranks):
    for kinds in spawn_ranks(2, everything_there_is, device="cuda", timeout=110):
        assert kinds["torch async-TP"] == "peer"


@pytest.mark.parametrize(
    ("gemm", "transfers", "limit"), [(5.0, (7.0, 3.0), 5.0), (2.0, (7.0, 3.0), 3.0)]
)
def test_the_limit_is_the_slower_part_at_its_fastest(gemm, transfers, limit):
    times = {"g": gemm, "t0": transfers[0], "t1": transfers[1], "o": 1.0}
    kinds = {"g": "gemm", "t0": "transfer", "t1": "transfer", "o": "own"}
    candidates = {name: Candidate(kind, torch.Tensor) for name, kind in kinds.items()}
    samples = {name: Samples((time,) * 3) for name, time in times.items()}
    assert overlap_limit(candidates, samples) == limit


def test_own_algorithms_are_told_from_vendors():
    own = {way for way in WAYS if is_own_algorithm({"way": way})}
    assert own == {method.value for method in AllGatherMethod}
    assert is_own_algorithm({"persistent": True})


def test_mismatches_are_counted():
    expected = torch.tensor([0.0, 1.0, 100.0, float("nan"), 1.0], dtype=torch.bfloat16)
    actual = torch.tensor([0.0, 1.5, 101.0, 1.0, float("nan")], dtype=torch.bfloat16)
    assert int(count_mismatches(actual, expected, rtol=0.02, atol=0.0)) == 3
    assert int(count_mismatches(actual, expected, rtol=0.0, atol=0.5)) == 3
    assert int(count_mismatches(expected[:3], expected[:3], rtol=0.0, atol=0.0)) == 0


def test_quantiles_of_samples():
    samples = Samples(tuple(float(value) for value in range(11)))
    assert samples.quantile(0.1) == pytest.approx(1.0)
    assert samples.quantile(0.5) == samples.median
    assert samples.quantile(0.9) == pytest.approx(9.0)
