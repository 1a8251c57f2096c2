"""Differentiable products: gradients, modes of autograd, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.layers import functional_ranks
from tests.layers.conftest import FIRST_CONFIG
from triton_dist.errors import InvalidArgument, TritonDistWarning
from triton_dist.layers.nvidia import (
    TP_MLP,
    Collectives,
    GemmARLayer,
    TensorParallel,
    clip_grad_norm_,
    experts,
    functional,
    parallelize,
)
from triton_dist.models.llama import MLP

IDS = torch.tensor([[0, 2], [2, 1], [-1, 2], [0, 1]])
"""Experts of four tokens, one of which has a route of nobody."""


def test_gradients_of_the_wrappers_in_fp64(on_two_ranks):
    assert on_two_ranks(functional_ranks.gradients_of_wrappers) == [10, 10]


@pytest.mark.parametrize("name", ["ag_group_gemm", "group_gemm"])
def test_gradcheck_of_rows_of_experts(name):
    A, B = (torch.randn(*shape, dtype=torch.float64) for shape in ((4, 3), (3, 3, 2)))
    product, ranks = getattr(experts, name), Collectives()
    leaves = A.requires_grad_(), B.requires_grad_()
    assert torch.autograd.gradcheck(lambda A, B: product(A, B, IDS, ranks), leaves)


@pytest.mark.parametrize("name", ["moe_reduce_rs", "moe_reduce_ar"])
def test_gradcheck_of_sums_over_choices(name):
    shapes = ((8, 2), (3, 2, 3), (4, 2))
    leaves = [torch.randn(*shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    product, ranks = getattr(experts, name), Collectives()
    assert torch.autograd.gradcheck(lambda x, W, s: product(x, W, IDS, s, ranks), leaves)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch's own
def test_torchs_checks_of_custom_ops(monkeypatch):
    """Schemas, shapes of tracing, and graphs with gradients, also of sizes that vary."""
    for variable in FIRST_CONFIG.items():
        monkeypatch.setenv(*variable)
    ranks, ops = Collectives(), torch.ops.triton_dist

    def leaf(*shape):
        return torch.randn(*shape, requires_grad=True)

    A, B, W, topk_weights = leaf(4, 3), leaf(3, 5), leaf(3, 3, 2), leaf(4, 2)
    own_ops = TensorParallel(4)
    name = own_ops.name
    calls = {
        "ag_gemm": (A, B, ranks.name, True),
        "gemm_rs": (A, B, ranks.name),
        "gemm": (A, B, ranks.name),
        "gemm_ar": (A, B, ranks.name),
        "all_gather": (A, ranks.name),
        "reduce_scatter": (A.detach(), ranks.name),
        "all_reduce": (A.detach(), ranks.name),
        "ag_group_gemm": (A, W, IDS, ranks.name),
        "group_gemm": (A, W, IDS, ranks.name),
        "moe_reduce_rs": (leaf(8, 3), W, IDS, topk_weights, ranks.name),
        "moe_reduce_ar": (leaf(8, 3), W, IDS, topk_weights, ranks.name),
        "weight_gradients": (A.detach(), torch.randn(8, 2), IDS, 3),
        "ep_experts": (A, IDS.clamp(min=0), topk_weights, W, leaf(3, 1, 3), name, 4, False, True),
    }
    registrations = ("test_schema", "test_autograd_registration", "test_faketensor")
    for op, arguments in calls.items():
        # All ops register in one way: check the traced graph of one.
        options = {} if op == "ag_gemm" else {"test_utils": registrations}
        found = torch.library.opcheck(getattr(ops, op).default, arguments, **options)
        assert set(found.values()) == {"SUCCESS"}, op
    own_ops.finalize()


def test_gradients_of_the_ops_are_autograds(on_two_ranks):
    assert on_two_ranks(functional_ranks.gradients_of_ops) == [14, 14]


def test_no_grad_inference_mode_and_autocast(on_two_ranks):
    assert on_two_ranks(functional_ranks.without_gradients) == [4, 4]


def test_mistakes_are_said(on_two_ranks):
    dtypes = "torch.float16, torch.bfloat16 or torch.float32"
    starts = (
        "ag_gemm: A.dtype is torch.float32, expected the weight's torch.float16",
        f"ag_gemm: A.dtype is torch.int8, expected {dtypes}",
        f"ag_gemm: A.dtype is torch.float64, expected {dtypes}",
        "ag_gemm: A.shape is (6, 19), expected […, 20] for a weight [K, N] = (20, 18)",
        "ag_gemm: M is 14, expected at most the context's max_M = 12",
        "gemm_rs: M is 5, expected a positive multiple of world_size = 2",
        "trying to differentiate twice",
        "TensorParallel: max_M is 0, expected at least 1",
        "TensorParallel was finalized",
        "TensorParallel 'nobody' was finalized",
    )
    for seen in on_two_ranks(functional_ranks.mistakes):
        for message, start in zip(seen, starts, strict=True):
            assert message.startswith(start)


def test_what_pads_a_batch_leaks_into_no_gradient():
    ids = torch.tensor([[0], [1], [-1]], dtype=torch.int32)
    for padded in ("x", "topk_weights"):
        given = {"x": torch.rand(3, 8), "topk_weights": torch.rand(3, 1)}
        given[padded][-1] = float("nan")
        x, topk_weights = (each.requires_grad_() for each in given.values())
        weights = torch.rand(2, 8, 6, requires_grad=True)
        ranks = Collectives()
        experts.moe_reduce_ar(x, weights, ids, topk_weights, ranks).sum().backward()
        for each in (x, weights, topk_weights):
            assert not each.grad.isnan().any()


def test_experts_follow_autocast():
    ids = torch.tensor([[0], [1], [1]], dtype=torch.int32)
    x, weights = torch.rand(3, 8), torch.rand(2, 8, 6)
    with TensorParallel(4) as ranks, torch.autocast("cpu", torch.bfloat16):
        for given in (x, x.bfloat16()):
            assert experts.group_gemm(given, weights, ids, ranks).dtype == torch.bfloat16


def test_a_copy_of_a_layer_shares_what_is_collective():
    with TensorParallel(4) as ranks:
        layer = TP_MLP(collectives=ranks)
        layer._init_parameters(MLP(16, 24))
        copied = copy.deepcopy(layer)
        x = torch.rand(3, 16)
        assert torch.equal(copied(x), layer(x))
        assert copied.torch_collectives is layer.torch_collectives


def test_clips_fp64_gradients():
    stock = torch.nn.Sequential(MLP(16, 24)).double()
    module = copy.deepcopy(stock)
    parallelize(module, max_M=4, collectives=Collectives())
    norms = []
    for each, clip in ((stock, torch.nn.utils.clip_grad_norm_), (module, clip_grad_norm_)):
        each(torch.ones(3, 16, dtype=torch.float64)).sum().backward()
        norms.append(clip(each.parameters(), 1.0))
    torch.testing.assert_close(*norms, rtol=1e-12, atol=0)


def test_operands_are_matrices():
    A, B, ranks = torch.rand(2, 3, 8), torch.rand(8, 6), Collectives()
    for given in ((A, B), (A[0, 0], B), (A[0], B[0])):
        with pytest.raises(InvalidArgument, match="expected a matrix"):
            functional.gemm(*given, ranks)


def test_a_bias_of_another_shape_is_refused():
    layer = GemmARLayer(None, 4, 6, 8, torch.float32, has_weight=True, has_bias=True)
    with layer, pytest.raises(InvalidArgument, match=r"bias.shape is \(1,\), expected \[N\]"):
        layer.load_weight(torch.rand(6, 8), torch.rand(1))


def test_a_family_of_transformers_that_was_not_tried_is_named():
    kind = type("HeliumMLP", (MLP,), {"__module__": "transformers.models.helium.modeling_helium"})
    with pytest.warns(TritonDistWarning, match="transformers' helium was not tested"):
        parallelize(torch.nn.Sequential(kind(16, 24)), max_M=4).finalize()
