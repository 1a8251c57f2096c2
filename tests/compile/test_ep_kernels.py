"""The kernels of expert parallelism, for sm_90 without a GPU."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from tests.compile.scattered import RELEASE, assert_fits, compile_launch, matrix, quick, words
from tests.compile.test_packets import POLL
from triton_dist.deep_ep.pack import pack_launch
from triton_dist.kernels.common.exchange.protocol import Packets, Peers
from triton_dist.kernels.nvidia.expert_parallel import EPContext
from triton_dist.kernels.nvidia.expert_parallel.algorithms import DispatchCall
from triton_dist.kernels.nvidia.expert_parallel.combine import CombineCall

VECTOR_STORE = re.compile(r"st\.global\.v4\.b32|st\.global\.v2\.b64")
POLL_LINE = "ld.relaxed.sys.global.v4.b32"
VECTOR_LOAD = re.compile(r"ld\.global(\.cg)?\.v4\.b32|ld\.global(\.cg)?\.v2\.b64")


def context(num_ranks, experts, topk, hidden=7168, tokens=4096, capacity=None):
    """A context without memory."""
    rows = matrix(2 * num_ranks * tokens * hidden, dtype=torch.uint8)
    region = SimpleNamespace(local=rows, pointers=words(num_ranks))
    memory = {"rows": region}
    memory["routing"] = SimpleNamespace(
        local=matrix(8, dtype=torch.int32), pointers=words(num_ranks)
    )
    scales = matrix(num_ranks * tokens * hidden, dtype=torch.float32)
    memory["scales"] = SimpleNamespace(local=scales, pointers=words(8))
    peers = Peers(words(), words(num_ranks), words(), words())
    packets = Packets(words(64), words(num_ranks), words(64), words(32), 1 << 16)
    buffer = SimpleNamespace(
        memory=memory, regions=lambda dtype: (None, peers), packet_regions=lambda: packets
    )
    ctx = EPContext.__new__(EPContext)
    vars(ctx).update(
        rank=1, num_ranks=num_ranks, max_tokens=tokens, hidden=hidden, topk=topk,
        dtype=torch.bfloat16, capacity=capacity or tokens, num_experts=experts,
        local_experts=experts // num_ranks, routing_elements=1024, routing_lines=1024,
        epochs=words(2), slot_tokens=128, first_slot_token=tokens, fault_address=words(2),
        dropped=matrix(1, dtype=torch.int32),
        pending=None, can_combine=True, combine_buffer=buffer, _buffer=buffer,
        device=SimpleNamespace(torch_device=torch.device("meta"), num_sms=132),
    )  # fmt: skip
    return ctx


def dispatch_call(ctx, topk, **options):
    tokens = options.get("max_tokens", ctx.max_tokens)
    x, ids = matrix(tokens, ctx.hidden), matrix(tokens, topk, dtype=torch.int32)
    return DispatchCall(x, ids, ctx, matrix(tokens, topk, dtype=torch.float32), **options)


def dispatch(ctx, topk, **options):
    """The launch of a dispatch."""
    call = dispatch_call(ctx, topk, **options)
    return call.chosen_algorithm.launch(call, call.result().layout)


def combine(ctx, topk, **options):
    """The launch of a combine."""
    received = dispatch_call(ctx, topk).result()
    call = CombineCall(matrix(64, ctx.hidden), received, ctx, **options)
    return call.chosen_algorithm.launch(call)[1]


EVERY = [
    (num_ranks, experts, topk, block_bytes, quantise)
    for num_ranks, experts, topk in ((2, 8, 1), (2, 256, 8), (8, 256, 8), (4, 64, 6))
    for block_bytes in (4096, 8192, 16384)
    for quantise in (False, True)
]


@pytest.mark.parametrize(
    ("num_ranks", "experts", "topk", "block_bytes", "quantise"),
    quick(EVERY, (2, 256, 8, 8192, True)),
)
def test_rows_travel_in_vectors(sm90, num_ranks, experts, topk, block_bytes, quantise):
    options = {"block_bytes": block_bytes, "num_ctas": 128}
    ctx = context(num_ranks, experts, topk)
    kernel = compile_launch(dispatch(ctx, topk, quantise=quantise, **options))
    wide = [] if quantise else [VECTOR_STORE]
    # Programs that compute the layout spill some registers; two programs fit.
    assert_fits(kernel, stack_bytes=128, programs=2, has=[RELEASE, VECTOR_LOAD, *wide])
    kernel = compile_launch(combine(ctx, topk, **options))
    programs = 2 if block_bytes <= 8192 and num_ranks == 2 else 1
    vectors = [VECTOR_LOAD, VECTOR_STORE, POLL_LINE]
    assert_fits(kernel, stack_bytes=40, programs=programs, has=[RELEASE, *vectors])


@pytest.mark.parametrize(
    ("num_ranks", "experts", "quantise", "block_bytes"),
    quick(
        [(n, e, q, b) for n, e in ((2, 256), (4, 60)) for q in (False, True) for b in (4096, 8192)],
        (2, 256, True, 4096),
    ),
)
def test_packets_travel_and_are_polled_in_lines(sm90, num_ranks, experts, quantise, block_bytes):
    ctx = context(num_ranks, experts, 8, tokens=128)
    options = {"algorithm": "packets", "block_bytes": block_bytes, "num_ctas": 128}
    programs = 2 if num_ranks == 2 else 1
    kernel = compile_launch(dispatch(ctx, 8, quantise=quantise, **options))
    has = [VECTOR_STORE, POLL, POLL_LINE]
    # Receivers poll whole words, so none is stored in halves.
    lacks = [RELEASE, "st.global.b16"]
    assert_fits(kernel, stack_bytes=16, programs=programs, has=has, lacks=lacks)


@pytest.mark.stress
def test_limited_capacity_and_replicas_compile(sm90):
    ctx = context(2, 8, 2, tokens=512, capacity=100)
    expert_map = matrix(6, 3, dtype=torch.int32)
    kernel = compile_launch(dispatch(ctx, 2, expert_map=expert_map, alignment=128))
    assert_fits(kernel, stack_bytes=128, programs=2)


def test_rows_are_packed_in_vectors(sm90):
    ctx = context(8, 256, 8, tokens=128)
    received = dispatch_call(ctx, 8, quantise=True).result()
    out = matrix(32, 1024, 7168, dtype=torch.float8_e4m3fn)
    scales = matrix(32, 56, 1024, dtype=torch.float32)
    launch = pack_launch(received, out, scales, matrix(32, 1024, dtype=torch.int32))
    assert_fits(compile_launch(launch), programs=2, has=[VECTOR_LOAD, VECTOR_STORE])
