"""Calls of expert parallelism on one rank: bounds, faults, keys, programs and routings."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.fp8 import quantised_experts
from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.gemm.scales import Scaling
from triton_dist.kernels.common.moe.skew import SKEWS
from triton_dist.kernels.nvidia import (
    create_ep_context,
    ep_combine,
    ep_dispatch,
    ep_send,
    grouped_gemm,
)
from triton_dist.kernels.nvidia.expert_parallel import algorithms
from triton_dist.kernels.nvidia.expert_parallel.algorithms import DispatchCall, max_programs
from triton_dist.kernels.nvidia.expert_parallel.op import combine_variants, id_variants
from triton_dist.runtime import waits

TOKENS, HIDDEN, EXPERTS, TOPK = 5, 16, 4, 2
X = torch.arange(1.0, TOKENS * HIDDEN + 1).view(TOKENS, HIDDEN)
IDS = torch.tensor([[0, 3], [1, 2], [3, -1], [2, 1], [0, 1]], dtype=torch.int32)


@pytest.fixture
def ctx():
    with create_ep_context(0, 1, 1, TOKENS, HIDDEN, EXPERTS, TOPK, torch.float32) as ctx:
        yield ctx


@pytest.mark.parametrize("algorithm", ["push", "collective"])
def test_short_y_is_reported_and_not_read_out_of_bounds(ctx, algorithm):
    received = ep_dispatch.fn(X, IDS, ctx, alignment=4)
    y = torch.ones(received.num_positions(), HIDDEN)
    enough = ep_combine.fn(y, received, ctx, algorithm=algorithm)
    assert torch.equal(enough[:, 0], (IDS >= 0).sum(1).float())
    ctx.check()
    # The memory after y would change the sums.
    out = ep_combine.fn(y[:7], received, ctx, algorithm=algorithm)
    position = received.position_of_route
    assert torch.equal(out[:, 0], ((position >= 0) & (position < 7)).sum(1).float())
    with pytest.raises(InvalidArgument, match=r"y.shape"):
        ctx.check()
    ctx.check()


def test_short_out_of_an_expansion(ctx):
    received = ep_dispatch.fn(X, IDS, ctx)
    memory = torch.full((20, HIDDEN), -1.0)
    received.expanded(memory[:7])
    assert torch.equal(memory[:7], received.rows[received.row_of_position[:7].long()])
    assert bool((memory[7:] == -1).all())
    with pytest.raises(InvalidArgument, match=r"out.shape"):
        ctx.check()
    for out in (
        torch.empty(20, HIDDEN + 1),
        torch.empty(20, HIDDEN, dtype=torch.float16),
        torch.empty(20, 2 * HIDDEN)[:, ::2],
        torch.empty(20, HIDDEN, device="meta"),
    ):
        with pytest.raises(InvalidArgument, match="out"):
            received.expanded(out)


def test_dropped_tokens_of_the_tuner_do_not_count():
    with create_ep_context(
        0, 1, 1, TOKENS, HIDDEN, EXPERTS, TOPK, torch.float32, capacity=3
    ) as ctx:
        with waits.bounded_waits(10.0):
            ep_dispatch.fn(X, IDS, ctx)
        assert int(ctx.dropped) == 0
        received = ep_dispatch.fn(X, IDS, ctx)
        assert int(ctx.dropped) == 2
        list(combine_variants(X, replace(received, routing_skew="even"), ctx))
        assert int(ctx.dropped) == 2


def test_the_stream_of_wait_follows_the_stream_of_the_send(ctx, monkeypatch):
    order = []

    def record_event():
        order.append("recorded")
        return lambda *tensors: order.append([tensor.data_ptr() for tensor in tensors])

    launched = DispatchCall.launch_kernel
    monkeypatch.setattr(ctx.device, "record_event", record_event, raising=False)
    monkeypatch.setattr(
        DispatchCall,
        "launch_kernel",
        lambda *args, **halves: (order.append("launched"), launched(*args, **halves)),
    )
    received = ep_send(X, IDS, ctx, topk_weights=torch.ones(TOKENS, TOPK))
    for function in (received.num_positions, received.expanded):
        with pytest.raises(InvalidArgument, match=r"wait\(\)"):
            function()
    received.wait()
    # The allocator must not give this memory away while the stream of wait() uses it.
    used = [received.row_of_position, received.weights]
    assert order == ["launched", "recorded", [each.data_ptr() for each in used], "launched"]
    for each in (received.ends, received.counts, received.position_of_route, received.local_ids):
        assert each.untyped_storage().data_ptr() == used[0].data_ptr()
    assert received.num_positions() == 9


@pytest.mark.parametrize("table", [[[-1, 1], [0, -1]], [[0], [-1]]])
def test_gaps_and_empty_rows_of_a_map_are_faults(ctx, table):
    expert_map = torch.tensor(table, dtype=torch.int32)
    ep_dispatch.fn(X, IDS.clamp(-1, 1), ctx, expert_map=expert_map)
    with pytest.raises(InvalidArgument, match="expert_map"):
        ctx.check()


def test_nan_weights_of_masked_ids_have_no_effect(ctx):
    weights = torch.ones(TOKENS, TOPK).masked_fill(IDS < 0, torch.nan)
    received = ep_dispatch.fn(X, IDS, ctx, weights, alignment=4)
    number = received.num_positions()
    assert bool((received.weights[:number] == (received.row_of_position[:number] >= 0)).all())
    y = received.rows[received.row_of_position[:number].clamp(min=0).long()]
    for algorithm in ("push", "collective"):
        out = ep_combine.fn(y, received, ctx, algorithm=algorithm)
        assert torch.equal(out, X * (IDS >= 0).sum(1, keepdim=True))
    ctx.check()


def test_programs_leave_room_for_a_second_context(ctx, monkeypatch):
    gpu = SimpleNamespace(interprets=False, num_sms=132)
    call = DispatchCall(X, IDS, ctx, num_ctas=128)
    call.key, call.token_limit = call.key._replace(topk=16), 8192
    monkeypatch.setattr(algorithms, "current_device", lambda: gpu)
    assert max_programs(None, 1) == 128
    for experts in (1, 4, 128, 512):
        for num_sms in (None, 4, 5, 20, 132):
            call.num_sms, call.ctx.local_experts = num_sms, experts
            programs = call.programs()
            assert min(programs) >= 1
            assert sum(programs) + 1 <= (num_sms or 256)
    assert call.programs(0)[1] == 0


def test_programs_of_packets_wait_for_smaller_numbers(ctx):
    call = DispatchCall(X, IDS, ctx, num_ctas=7, block_bytes=512)
    layout = call.result().layout
    ctx.hidden = 600
    launch = algorithms.DISPATCH["packets"].launch(call, layout)
    assert launch.args[-2] == 6  # two programs for each of the three blocks of a row


def test_a_context_that_cannot_combine_has_no_memory_for_sums():
    sizes = (0, 1, 1, TOKENS, HIDDEN, EXPERTS, TOPK, torch.float32)
    with create_ep_context(*sizes, can_combine=False) as ctx:
        assert ctx.combine_buffer.shard_words == 16
        received = ep_dispatch.fn(X, IDS, ctx)
        for algorithm in ("push", "collective"):
            with pytest.raises(InvalidArgument, match="can_combine=True"):
                ep_combine.fn(torch.ones(9, HIDDEN), received, ctx, algorithm=algorithm)


def test_late_flags_are_searched_in_all_programs_that_set_them(ctx):
    call = DispatchCall(X, IDS, ctx, num_ctas=3)
    call.run()
    num_routing_programs, num_copy_programs, _ = call.programs()
    assert ctx.buffer._last_call == (
        1,
        num_routing_programs + num_copy_programs,
        2,
    )  # chunk 0: ids, chunk 1: rows
    ep_combine.fn(torch.ones(9, HIDDEN), call.run(), ctx, num_ctas=5, num_chunks=2)
    assert ctx.combine_buffer._last_call == (1, 1, 1)


def test_keys_tell_replicas_and_dtypes_of_ids_apart(ctx):
    def key(*args, **kwargs):
        return DispatchCall(*args, **kwargs).key

    maps = [torch.zeros(EXPERTS, replicas, dtype=torch.int32) for replicas in (1, 2)]
    keys = {
        key(X, ids, ctx, expert_map=each) for ids in (IDS, IDS.long()) for each in (None, *maps)
    }
    assert len(keys) == 6
    with pytest.raises(InvalidArgument, match="num_sms"):
        key(X, IDS, ctx, num_sms=3)


def test_combine_is_tuned_with_the_routings_of_the_dispatch(ctx):
    x, ids, weights = X[:3], IDS[:3], torch.ones(3, TOPK)
    for skew in SKEWS:
        received = ep_dispatch.fn(x, ids, ctx, weights, max_tokens=4, routing_skew=skew)
        (variant,) = combine_variants(x, received, ctx)
        other = variant["received"]
        assert len(variant["y"]) == other.num_positions() == 3 * TOPK
        assert (other.max_tokens, other.weights is None) == (4, False)
        assert torch.equal(received.rows[:3], x)
    assert other.counts.flatten().tolist() == [3, 3, 0, 0]


def test_ids_for_tuning_are_logical_experts(ctx):
    expert_map = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)
    arguments = (X, IDS, ctx, None, None, False, None, expert_map, 1, None, "even")
    (even,) = id_variants(*arguments)
    assert set(even["topk_ids"].flatten().tolist()) == {0, 1}


def test_grouped_gemm_accepts_the_scales_of_a_dispatch():
    torch.manual_seed(0)
    hidden, n = 256, 128
    experts = torch.randn(EXPERTS, n, hidden)
    _, weights, scales = quantised_experts(experts[0], experts, "block")
    with create_ep_context(0, 1, 1, TOKENS, hidden, EXPERTS, TOPK, torch.bfloat16) as ctx:
        x = torch.randn(TOKENS, hidden, dtype=torch.bfloat16)
        received = ep_dispatch.fn(x, IDS, ctx, quantise=True)
        scales["A_scale"] = received.scales
        options = {"order": "sorted", "autotune": False, "out_dtype": torch.float32, **scales}
        y = grouped_gemm(received.rows, weights, received.local_ids, **options)
        a, b = Scaling(**scales).dequantised(received.rows, weights, torch.float64)
    for token, choices in enumerate(received.position_of_route.tolist()):
        for choice, position in enumerate(choices):
            if position >= 0:
                want = a[token] @ b[int(IDS[token, choice])]
                torch.testing.assert_close(y[position].double(), want, rtol=1e-3, atol=1e-3)
