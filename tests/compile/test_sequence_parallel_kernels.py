"""The kernels of sequence parallelism, for sm_90 without a GPU."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from tests.compile.scattered import (
    ACQUIRE,
    FULL_WAIT,
    RELEASE,
    TMA_LOAD,
    TMA_STORE,
    WGMMA,
    assert_fits,
    compile_launch,
    hardest,
    matrix,
    quick,
    right,
    words,
)
from tests.compile.test_ep_kernels import VECTOR_LOAD, VECTOR_STORE
from triton_dist.kernels.common.exchange.buffer import LaunchParams
from triton_dist.kernels.common.exchange.protocol import Peers, Slots
from triton_dist.kernels.common.exchange.pushed import Pushed
from triton_dist.kernels.common.gemm.spaces import PERSISTENT_TILES
from triton_dist.kernels.nvidia.sp_ag_attention.kernel import kernel_await_shard, kernel_merge
from triton_dist.kernels.nvidia.ulysses import UlyssesContext
from triton_dist.kernels.nvidia.ulysses.algorithms import post_attn_call, pre_attn_call
from triton_dist.kernels.nvidia.ulysses_gemm.algorithms import (
    Receive,
    gemm_pre_attn_call,
    post_attn_gemm_call,
)
from triton_dist.runtime.launch import Launch


def context(num_ranks, q_heads, kv_heads, dim=128, tokens=8000):
    """A context without memory."""
    region = SimpleNamespace(local=matrix(1 << 20, dtype=torch.uint8))
    slots = {"shards": region, "arrivals": SimpleNamespace(local=words())}
    peers = Peers(words(), words(num_ranks), words(), words())
    exchanged = Slots(matrix(1 << 20), words(num_ranks), 1 << 19)
    slots["epoch"] = words()
    ctx = UlyssesContext.__new__(UlyssesContext)
    vars(ctx).update(
        rank=1, num_ranks=num_ranks, max_tokens=tokens, max_local_tokens=tokens, q_heads=q_heads,
        kv_heads=kv_heads, head_dims=(dim, dim), dtype=torch.bfloat16,
        ranks_per_kv_head=max(1, num_ranks // kv_heads),
        lengths=lambda _: matrix(2, 8, dtype=torch.int32),
        device=SimpleNamespace(torch_device=torch.device("meta")),
        pushed=SimpleNamespace(slots=FakeSlots(slots)),
        _buffer=SimpleNamespace(regions=lambda _: (exchanged, peers)),
    )  # fmt: skip
    return ctx


def test_partial_results_are_merged_in_vectors(sm90):
    out, lse = matrix(1, 4096, 32, 128), matrix(1, 32, 4096, dtype=torch.float32)
    arguments = (out, lse, out, lse, 32 * 2048, 4096, 2048, 2048)
    options = {"HEADS": 32, "DIM": 128, "PADDED_DIM": 128, "BLOCK": 32, "num_warps": 4}
    kernel = compile_launch(Launch(kernel_merge, (2048,), arguments, options))
    assert_fits(kernel, stack_bytes=0, programs=4, has=[VECTOR_LOAD, VECTOR_STORE])
    *_, last_load = re.finditer(r"ld\.global", kernel.ptx)
    *_, lse_store = re.finditer(r"st\.global", kernel.ptx)
    # Warps that hold the same rows must have loaded the log-sum-exps before a warp replaces them.
    assert "bar.sync" in kernel.ptx[last_load.end() : lse_store.start()]
    pushed = Pushed(words(), words(), words())
    kernel = compile_launch(Launch(kernel_await_shard, (1,), (pushed, 7, 1), {"num_warps": 1}))
    assert_fits(kernel, has=[ACQUIRE])


class FakeSlots(dict):
    @property
    def epoch(self):
        return self["epoch"]


@pytest.mark.parametrize(
    ("num_ranks", "q_heads", "kv_heads", "lengths", "batch", "block_bytes"),
    quick(
        [(2, 32, 8, False, 1, 16384), (4, 32, 2, True, 2, 16384), (2, 32, 2, True, 2, 4096)],
        (2, 32, 2, True, 2, 4096),
    ),
)
def test_heads_travel_in_vectors(sm90, num_ranks, q_heads, kv_heads, lengths, batch, block_bytes):
    ctx = context(num_ranks, q_heads, kv_heads)
    tokens = 512
    options = {"seq_lens": [tokens] * num_ranks if lengths else None}
    options |= {"num_ctas": 64, "block_bytes": block_bytes, "num_chunks": 4}
    q, k = matrix(batch, tokens, q_heads, 128), matrix(batch, tokens, kv_heads, 128)
    pre = pre_attn_call(q, k, k, ctx, **options)
    whole = batch, num_ranks * tokens
    local = matrix(*whole, max(1, kv_heads // num_ranks), 128)
    o = matrix(*whole, q_heads // num_ranks, 128)
    post = post_attn_call(o, ctx, local, local, **options)
    for call in (pre, post):
        kernel = compile_launch(call.chosen_algorithm.launch(call, call.outputs()))
        assert_fits(
            kernel, stack_bytes=16, has=[VECTOR_LOAD, VECTOR_STORE, RELEASE],
            lacks=["st.global.b16", "ld.global.b16"],
        )  # fmt: skip
    pre.params = LaunchParams(128, 16384)  # as in ulysses_gemm
    kernel = compile_launch(Receive().launch(pre, pre.outputs()))
    assert_fits(kernel, stack_bytes=16, has=[VECTOR_LOAD, VECTOR_STORE, ACQUIRE])


PRODUCTS = [(2, 1024, index) for index in hardest(PERSISTENT_TILES)] + [(4, 1, 0), (2, 1, 0)]


@pytest.mark.parametrize(("num_ranks", "tokens", "index"), quick(PRODUCTS, PRODUCTS[0]))
def test_projections_send_and_await_blocks(sm90, num_ranks, tokens, index):
    ctx = context(num_ranks, 32, 8, tokens=8192)
    ctx.device.num_sms = 132
    ctx.pushed.slots["shards"].pointers = words(num_ranks)
    hidden = 4096
    options = {"gemm_config": PERSISTENT_TILES[index], "num_chunks": 4}
    x, B = matrix(1, tokens, hidden), right(hidden, 48 * 128, "column-major")
    call = gemm_pre_attn_call(x, B, ctx, **options)
    kernel = compile_launch(call.chosen_algorithm.launch(call, call.left_operand(), call.outputs()))
    assert_fits(kernel, has=[TMA_LOAD, TMA_STORE, WGMMA, FULL_WAIT])
    o = matrix(1, num_ranks * tokens, 32 // num_ranks, 128)
    call = post_attn_gemm_call(o, right(4096, hidden, "column-major"), ctx, **options)
    kernel = compile_launch(call.chosen_algorithm.launch(call, call.left_operand(), call.outputs()))
    assert_fits(kernel, has=[TMA_LOAD, TMA_STORE, WGMMA, ACQUIRE])
