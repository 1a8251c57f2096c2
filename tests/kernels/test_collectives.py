"""The plain collectives in a world of one, and their config spaces."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from tests.distributed.collective_calls import OPS, WAYS, Calls, way
from triton_dist.errors import ContextFinalized, InvalidArgument
from triton_dist.kernels.common.exchange.buffer import shard_elements
from triton_dist.kernels.common.exchange.shapes import (
    LARGE_SHAPES,
    MAX_CTAS,
    MAX_PIECES,
    SMALL_SHAPES,
    Shape,
    shape_of,
)
from triton_dist.kernels.nvidia import (
    AllReduceContext,
    AllReduceMethod,
    GatherMethod,
    ReduceScatterMethod,
    create_allreduce_ctx,
    get_allreduce_methods,
    to_allreduce_method,
)
from triton_dist.kernels.nvidia.allgather import op as all_gather_op
from triton_dist.kernels.nvidia.allreduce import op as allreduce
from triton_dist.kernels.nvidia.reduce_scatter import op as reduce_scatter_op

EACH_OP = pytest.mark.parametrize("op", list(OPS))
# What has the op's ``config_space`` and ``prune_fn``.
TUNINGS = {
    "all_reduce": allreduce,
    "reduce_scatter": reduce_scatter_op.COLLECTIVE,
    "all_gather": all_gather_op.COLLECTIVE,
}
METHODS = {
    "all_reduce": AllReduceMethod,
    "reduce_scatter": ReduceScatterMethod,
    "all_gather": GatherMethod,
}


def chosen(config):
    return config["algorithm"] if "algorithm" in config else config["method"]


@EACH_OP
def test_a_world_of_one_is_a_copy(op):
    calls = Calls(op, 4096)
    for name in (*WAYS[op], "collective"):
        calls(37, **way(op, name))
    calls(100, tuned=True)
    calls(100, tuned=True, autotune=False)
    assert calls.finish() == len(WAYS[op]) + 3


def test_names_of_methods():
    assert get_allreduce_methods() == ["one_shot", "two_shot", "double_tree", "collective"]
    for name in get_allreduce_methods():
        assert to_allreduce_method(name).value == name
    assert AllReduceMethod.OneShot is AllReduceMethod.ONE_SHOT
    assert AllReduceMethod.DoubleTree is AllReduceMethod.DOUBLE_TREE
    with pytest.raises(InvalidArgument, match="name is 'multimem', expected one of one_shot, two_"):
        to_allreduce_method("multimem")


def methods_of(op):
    """Those that are here: some of scripts are not."""
    return {method for method in METHODS[op] if getattr(method, "instead", None) is None}


@EACH_OP
def test_the_space_has_every_method_once_a_shape(op):
    space = TUNINGS[op].config_space()
    assert len({str(config) for config in space}) == len(space)
    assert {chosen(config) for config in space} - {None} >= methods_of(op) - {
        METHODS[op].COLLECTIVE
    }
    assert OPS[op][0].config_space.names == set(space[0])


def test_torch_is_a_candidate_on_gpus(monkeypatch):
    x = torch.empty(64, dtype=torch.float16)
    ctx = SimpleNamespace(num_ranks=2)
    for device, count in (("cpu", 0), ("cuda", 1)):
        for op, tuning in TUNINGS.items():
            module = sys.modules[tuning.config_space.__module__]
            monkeypatch.setattr(module, "current_device", lambda d=device: SimpleNamespace(name=d))
            kept = [each for each in tuning.config_space() if tuning.prune_fn(each, x, ctx)]
            methods = [chosen(config) for config in kept]
            assert methods.count(METHODS[op].COLLECTIVE) == count, (op, device)


@EACH_OP
@pytest.mark.parametrize("nbytes", [2, 1 << 14, 1 << 18, 1 << 28])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_something_is_left_and_it_goes_by_size(op, nbytes, num_ranks):
    tuning, ctx = TUNINGS[op], SimpleNamespace(num_ranks=num_ranks)
    x = torch.empty(nbytes // 2, dtype=torch.float16, device="meta")
    kept = [config for config in tuning.config_space() if tuning.prune_fn(config, x, ctx)]
    assert kept
    methods = {chosen(config) for config in kept}
    if num_ranks > 1 and op == "all_reduce":
        assert (AllReduceMethod.ONE_SHOT in methods) is (nbytes < 1 << 28)
        tree = AllReduceMethod.DOUBLE_TREE in methods
        assert tree is (num_ranks > 2 and nbytes >= 1 << 18)
    if op != "all_reduce":
        whole = nbytes * num_ranks if op == "all_gather" else nbytes
        pushed = METHODS[op].COPY_ENGINE in methods
        assert pushed is (num_ranks > 1 and whole >= 1 << 20)


def test_a_method_that_is_named_is_the_only_one():
    x, ctx = torch.empty(64, dtype=torch.float16), SimpleNamespace(num_ranks=2)
    for method in methods_of("all_reduce"):  # a double tree of two ranks too
        kept = [
            config
            for config in allreduce.config_space()
            if allreduce.prune_fn(config, x, ctx, method=method)
        ]
        assert {config["algorithm"] for config in kept} == {method}


def test_keys_differ_in_what_a_tuning_depends_on():
    x = torch.empty(4096, dtype=torch.float16)
    with create_allreduce_ctx(1 << 14, 0, 1, 1) as ctx:
        keys = [
            allreduce.key_fn(x, ctx),
            allreduce.key_fn(x[:1000], ctx),
            allreduce.key_fn(x[:-1], ctx),
            allreduce.key_fn(x[1:4081], ctx),
            allreduce.key_fn(x.float(), ctx),
            allreduce.key_fn(x, ctx, method=AllReduceMethod.ONE_SHOT),
        ]
        assert len(set(keys)) == len(keys) - 1  # both whose vectors do not fit are alike
        assert keys[0] == allreduce.key_fn(x.view(64, 64), ctx, output=x.clone())
        assert keys[0] != allreduce.key_fn(x, ctx, output=x)


def test_shapes_stay_within_what_a_launch_can_have():
    for shape in (*SMALL_SHAPES, *LARGE_SHAPES):
        assert 1 <= shape.num_ctas <= MAX_CTAS
        assert 1 <= shape.num_pieces <= MAX_PIECES
        assert shape.num_warps * 32 * 16 <= shape.block_bytes
    assert Shape(1, 512).num_warps == 1
    assert shape_of(None, None, None).num_pieces == 1
    assert [shard_elements(n) for n in (1, 128, 129)] == [128, 128, 256]


@pytest.mark.parametrize("num_ranks", range(1, 9))
@pytest.mark.parametrize("workspace_nbytes", [1, 4096, 100_000, (1 << 26) + 2])
def test_a_slot_holds_what_every_way_needs(num_ranks, workspace_nbytes):
    """Of the largest tensor of one launch."""
    slot = AllReduceContext.slot_bytes(workspace_nbytes, num_ranks)
    for item in (2, 4):
        elements = -(-workspace_nbytes // item)
        halves = 4 * shard_elements(-(-elements // 2))
        shards = 2 * num_ranks * shard_elements(-(-elements // num_ranks))
        assert max(halves, shards) * item <= slot


def test_attributes_of_a_context():
    ctx = create_allreduce_ctx(1 << 14, 0, 1, 8)
    assert (ctx.rank, ctx.num_ranks, ctx.world_size, ctx.local_world_size) == (0, 1, 1, 1)
    assert ctx.workspace_nbytes == 1 << 14
    ctx.finalize()
    ctx.finalize()
    with pytest.raises(ContextFinalized, match="AllReduceContext was finalized"):
        ctx.buffer  # noqa: B018


def test_a_method_and_another_algorithm_are_refused():
    with (
        create_allreduce_ctx(1 << 14, 0, 1, 1) as ctx,
        pytest.raises(InvalidArgument, match=r"algorithm is .*TWO_SHOT, expected the method"),
    ):
        allreduce.all_reduce.fn(
            torch.ones(4),
            ctx,
            method=AllReduceMethod.ONE_SHOT,
            algorithm=AllReduceMethod.TWO_SHOT,
        )


def test_methods_of_scripts_that_are_not_here_say_what_to_use():
    absent = [method for method in AllReduceMethod if method.instead is not None]
    assert {method.name for method in absent} == {
        "OneShot_TMA", "OneShot_Multimem", "TwoShot_Multimem", "TwoShot_Multimem_ST",
    }  # fmt: skip
    assert not {method.value for method in absent} & set(get_allreduce_methods())
    with create_allreduce_ctx(1 << 14, 0, 1, 1) as ctx:
        for method in absent:
            instead = AllReduceMethod[method.name[:3].upper() + "_SHOT"]
            for refused in (allreduce.all_reduce, allreduce.all_reduce.fn):
                with pytest.raises(InvalidArgument, match=f"expected {instead}: multicast"):
                    refused(torch.ones(4), ctx, method=method)
            with pytest.raises(InvalidArgument, match=f"expected '{instead.value}': multicast"):
                to_allreduce_method(method.value)
    assert to_allreduce_method("one_shot") is AllReduceMethod.OneShot
    with pytest.raises(InvalidArgument, match="one of one_shot, two_shot"):
        to_allreduce_method("three_shot")
