"""The plain collectives in a world of one, and their config spaces."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from tests.distributed.collective_calls import COLLECTIVES
from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.exchange import sums
from triton_dist.kernels.common.exchange.buffer import (
    LARGE_PARAMS,
    MAX_CHUNKS,
    MAX_CTAS,
    SMALL_PARAMS,
    LaunchParams,
    checked_params,
    padded_shard_numel,
)
from triton_dist.kernels.nvidia import (
    AllReduceContext,
    AllReduceMethod,
    GatherMethod,
    ReduceScatterMethod,
    all_reduce,
    create_allreduce_ctx,
    get_allreduce_methods,
    to_allreduce_method,
)
from triton_dist.kernels.nvidia.allreduce.algorithms import ALGORITHMS as ALL_REDUCE_ALGORITHMS
from triton_dist.kernels.nvidia.shard_collectives.algorithms import AllGatherCall, ReduceScatterCall

EACH_OP = pytest.mark.parametrize("op", list(COLLECTIVES))
OP_ALGORITHMS = {
    "all_reduce": ALL_REDUCE_ALGORITHMS,
    "reduce_scatter": ReduceScatterCall.algorithms,
    "all_gather": AllGatherCall.algorithms,
}
METHODS = {
    "all_reduce": AllReduceMethod,
    "reduce_scatter": ReduceScatterMethod,
    "all_gather": GatherMethod,
}


def kept_of(op, x, num_ranks, **options):
    """Configs that a tuning tries."""
    ctx, prune_fn = SimpleNamespace(num_ranks=num_ranks), COLLECTIVES[op].op.prune_fn
    return [each for each in OP_ALGORITHMS[op].config_space() if prune_fn(each, x, ctx, **options)]


@EACH_OP
def test_a_world_of_one_is_a_copy(op):
    calls = COLLECTIVES[op](4096)
    for algorithm in (*calls.algorithms, {"algorithm": "collective"}):
        calls(37, **algorithm)
    calls(100, op=COLLECTIVES[op].op)
    calls(100, op=COLLECTIVES[op].op, autotune=False)
    assert calls.finish() == len(calls.algorithms) + 3


def test_names_of_methods():
    names = ["one_shot", "two_shot", "collective", "double_tree"]
    assert get_allreduce_methods() == names
    assert [to_allreduce_method(name).value for name in names] == [*names[:3], "two_shot"]
    assert AllReduceMethod.OneShot is AllReduceMethod.ONE_SHOT
    assert AllReduceMethod.DoubleTree is AllReduceMethod.TWO_SHOT
    with pytest.raises(InvalidArgument, match="name is 'multimem', expected one of one_shot, two_"):
        to_allreduce_method("multimem")


def methods_of(op):
    """Values of those that are here: some of scripts are not."""
    return {each.value for each in METHODS[op] if getattr(each, "replacement", None) is None}


@EACH_OP
def test_the_space_has_every_way_once_a_shape(op):
    space = OP_ALGORITHMS[op].config_space()
    assert len({str(config) for config in space}) == len(space)
    assert {config["algorithm"] for config in space} >= methods_of(op) - {"collective"}
    assert set(OP_ALGORITHMS[op]) - {"by_size", "two_shot_in_packets"} == methods_of(op)
    assert COLLECTIVES[op].op.config_space.names == set().union(*space)
    # As many programs as CPU ranks are said to run at a time; on GPUs 32.
    first = {"algorithm": "push", "num_ctas": 3, "block_bytes": 8192, "num_chunks": 1}
    assert space[0] == ({"algorithm": "by_size"} if op == "all_reduce" else first)


def test_torch_is_a_candidate_on_gpus(monkeypatch):
    x = torch.empty(64, dtype=torch.float16)
    for is_gpu in (False, True):
        device = SimpleNamespace(interprets=not is_gpu, has_nccl=is_gpu, has_async_tp=is_gpu)
        for op, algorithms in OP_ALGORITHMS.items():
            module = sys.modules[type(algorithms["collective"]).__module__]
            monkeypatch.setattr(module, "current_device", lambda d=device: d)
            kept = [config["algorithm"] for config in kept_of(op, x, 2)]
            assert kept.count("collective") == int(is_gpu), op


@EACH_OP
@pytest.mark.parametrize("nbytes", [2, 1 << 14, 1 << 18, 1 << 28])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_something_is_left_and_it_goes_by_size(op, nbytes, num_ranks):
    x = torch.empty(nbytes // 2, dtype=torch.float16, device="meta")
    algorithms = {config["algorithm"] for config in kept_of(op, x, num_ranks)}
    assert algorithms
    if num_ranks > 1 and op == "all_reduce":
        assert ("one_shot" in algorithms) is (nbytes < 1 << 28)
        assert "two_shot" in algorithms
    if op != "all_reduce":
        whole = nbytes * num_ranks if op == "all_gather" else nbytes
        pushed = "copy_engine" in algorithms
        assert pushed is (num_ranks > 1 and whole >= 1 << 20)


@EACH_OP
def test_a_method_that_is_named_is_the_only_one(op):
    x = torch.empty(1 << 20, dtype=torch.float16, device="meta")
    for name in methods_of(op) - ({"collective"} if op != "all_reduce" else set()):
        kept = kept_of(op, x, 2, method=METHODS[op](name))
        assert {config["algorithm"] for config in kept} == {name}
    kept = kept_of("all_reduce", x, 2, method=AllReduceMethod.DoubleTree)
    assert {config["algorithm"] for config in kept} == {"two_shot"}


def test_keys_differ_in_what_a_tuning_depends_on():
    x = torch.empty(4096, dtype=torch.float16)
    with create_allreduce_ctx(1 << 14, 0, 1, 1) as ctx:
        keys = [
            all_reduce.key_fn(x, ctx),
            all_reduce.key_fn(x[:1000], ctx),
            all_reduce.key_fn(x[:-1], ctx),
            all_reduce.key_fn(x[1:4081], ctx),
            all_reduce.key_fn(x.float(), ctx),
            all_reduce.key_fn(x, ctx, method=AllReduceMethod.ONE_SHOT),
            all_reduce.key_fn(x, ctx, method=AllReduceMethod.TWO_SHOT),
        ]
        assert len(set(keys)) == len(keys) - 1  # both whose vectors do not fit are alike
        assert keys[0] == all_reduce.key_fn(x.view(64, 64), ctx, output=x.clone())
        assert keys[0] != all_reduce.key_fn(x, ctx, output=x)


def test_shapes_stay_within_what_a_launch_can_have():
    for shape in (*SMALL_PARAMS, *LARGE_PARAMS):
        assert 1 <= shape.num_ctas <= MAX_CTAS
        assert 1 <= shape.num_chunks <= MAX_CHUNKS
        assert shape.num_warps * 32 * 16 <= shape.block_bytes
    assert LaunchParams(1, 512).num_warps == 1
    assert checked_params("all_reduce", None, None, None).num_chunks == 1
    assert [padded_shard_numel(n) for n in (1, 128, 129)] == [128, 128, 256]


@pytest.mark.parametrize("num_ranks", range(1, 9))
@pytest.mark.parametrize("workspace_nbytes", [1, 4096, 100_000, (1 << 26) + 2])
def test_a_slot_holds_what_every_way_needs(num_ranks, workspace_nbytes):
    """Of the largest tensor of one launch."""
    slot = AllReduceContext.slot_bytes(workspace_nbytes, num_ranks)
    for item in (2, 4):
        elements = -(-workspace_nbytes // item)
        shards = 2 * num_ranks * padded_shard_numel(-(-elements // num_ranks))
        one_shot_exchange = sums.max_elements(workspace_nbytes, item, num_ranks, one_shot=True)
        addends = num_ranks * padded_shard_numel(one_shot_exchange)
        assert max(shards, addends) * item <= slot
        assert max(shards, addends) * item <= sums.slot_bytes(workspace_nbytes, num_ranks)


@EACH_OP
def test_an_output_that_shares_memory_with_x_is_refused(op):
    memory, run = torch.rand(64), COLLECTIVES[op].op.fn
    with COLLECTIVES[op].create(1 << 14, 0, 1, 1) as ctx:
        for output in (memory[16:48], memory[:32]):
            with pytest.raises(InvalidArgument, match=r"output is .* expected memory apart"):
                run(memory[8:40], ctx, output=output)
        run(memory[:32], ctx, output=memory[32:])
        if op == "reduce_scatter":
            with pytest.raises(InvalidArgument, match=r"expected memory apart from x$"):
                run(memory, ctx, output=memory)
        else:
            run(memory, ctx, output=memory)


def test_a_method_that_no_tuning_tries_here_says_how_to_run_it():
    with (
        COLLECTIVES["all_gather"].create(1 << 14, 0, 1, 1) as ctx,
        pytest.raises(
            InvalidArgument, match=r"method is .*COLLECTIVE, expected an algorithm that fits"
        ),
    ):
        COLLECTIVES["all_gather"].op(torch.ones(4), ctx, method=GatherMethod.COLLECTIVE)


def test_methods_of_scripts_that_are_not_here_say_what_to_use():
    absent = [method for method in AllReduceMethod if method.replacement is not None]
    assert {method.name for method in absent} == {
        "OneShot_TMA", "OneShot_Multimem", "TwoShot_Multimem", "TwoShot_Multimem_ST",
    }  # fmt: skip
    assert not {method.value for method in absent} & set(get_allreduce_methods())
    with create_allreduce_ctx(1 << 14, 0, 1, 1) as ctx:
        for method in absent:
            instead = AllReduceMethod[method.name[:3].upper() + "_SHOT"]
            for refused in (all_reduce, all_reduce.fn):
                with pytest.raises(InvalidArgument, match=f"expected {instead}: multicast"):
                    refused(torch.ones(4), ctx, method=method)
            with pytest.raises(InvalidArgument, match=f"expected '{instead.value}': multicast"):
                to_allreduce_method(method.value)
    assert to_allreduce_method("one_shot") is AllReduceMethod.OneShot
    with pytest.raises(InvalidArgument, match="one of one_shot, two_shot"):
        to_allreduce_method("three_shot")
