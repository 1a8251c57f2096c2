"""The kernels of decode attention, for sm_90 without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.compile.scattered import RELEASE, assert_fits, compile_launch, matrix, quick, words
from tests.compile.test_packets import POLL, SEND
from triton_dist.kernels.common.exchange.protocol import Packets
from triton_dist.kernels.nvidia.decode_attention import SpDecodeContext
from triton_dist.kernels.nvidia.decode_attention.algorithms import ALGORITHMS, Call

FP8 = torch.float8_e4m3fn


def decode_call(
    heads=96, kv_heads=12, dim=128, v_dim=128, num_ranks=2, batch=8, q_len=1, page=0,
    dtype=torch.bfloat16, kv_dtype=None, **options,
):  # fmt: skip
    """A call without memory."""
    packets = Packets(words(64), words(num_ranks), words(64), words(32), 1 << 16)
    ctx = SpDecodeContext.__new__(SpDecodeContext)
    vars(ctx).update(
        rank=1, num_ranks=num_ranks, max_batch=batch, max_q_len=q_len, num_q_heads=heads,
        head_dim=dim, v_head_dim=v_dim, dtype=dtype, shard_queries=False,
        epochs=words(256), barrier_counter=words(256),
        _buffer=SimpleNamespace(packet_regions=lambda: packets), resident=set(),
        device=SimpleNamespace(torch_device=torch.device("meta"), interprets=False),
    )  # fmt: skip
    kv = kv_dtype or dtype
    blocks = (batch, 8192) if page == 0 else (9000, page)
    k = matrix(*blocks, kv_heads, dim, dtype=kv)
    v = None if v_dim < dim else matrix(*blocks, kv_heads, v_dim, dtype=kv)
    table = matrix(batch, 8192 // page, dtype=torch.int32) if page else None
    cyclic = options.get("interleave") is not None
    lens = matrix(*((batch,) if cyclic else (num_ranks, batch)), dtype=torch.int32)
    scales = {}
    if kv == FP8:
        one = matrix(1, dtype=torch.float32)
        scales = {"k_scale": one, "v_scale": one}
    q = matrix(batch, q_len, heads, dim, dtype=dtype)
    return Call(q, k, v, lens, ctx, table, **scales, **options)


@pytest.fixture
def gpu(sm90, monkeypatch):
    from triton_dist.kernels.nvidia.decode_attention import algorithms

    device = SimpleNamespace(
        interprets=False, num_sms=132, name="cuda", shared_memory_bytes=lambda: 232448
    )
    monkeypatch.setattr(algorithms, "current_device", lambda: device)


CASES = {
    "heads": {},
    "paged, masked": {
        "page": 16,
        "q_len": 4,
        "window": 1000,
        "soft_cap": 30.0,
        "heads": 32,
        "kv_heads": 8,
    },
    "cyclic": {"interleave": 1, "num_ranks": 4, "batch": 64, "heads": 32, "kv_heads": 8},
    "192": {"dim": 192, "v_dim": 128, "dtype": torch.float16, "shard_output": True},
    "256": {"dim": 256, "v_dim": 256, "heads": 16, "kv_heads": 4},
    "mla": {"dim": 576, "v_dim": 512, "heads": 16, "kv_heads": 1, "page": 64},
    "fp8": {"kv_dtype": FP8, "page": 1},
}


@pytest.mark.parametrize("name", quick([(name,) for name in CASES], ("paged, masked",)))
def test_programs_are_resident(gpu, name):
    call = decode_call(**CASES[name])
    per_sm, q = call.params()[0], call.queries(False)
    kernel = compile_launch(ALGORITHMS["packets"].launch(call, call.new_target(), q))
    sends = [SEND] if name == "paged, masked" else []  # rows of few lines are sent in single words
    assert_fits(kernel, stack_bytes=128, programs=per_sm, has=[RELEASE, POLL, *sends])
    if name == "paged, masked":
        return
    target = call.packed_target(call.new_packed())
    for launch in ALGORITHMS["all_to_all"].launches(call, q, target):
        kernel = compile_launch(launch)
        assert_fits(kernel, stack_bytes=64, programs=1)
