"""Decode attention on one rank, also under the names of Triton-distributed's scripts."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.stress.decode_attn import Sizes, arguments, create, expected, fill_call, run_call
from triton_dist.errors import CandidateFailed, InvalidArgument
from triton_dist.kernels.nvidia import (
    gqa_fwd_batch_decode,
    gqa_fwd_batch_decode_aot,
    gqa_fwd_batch_decode_persistent,
    gqa_fwd_batch_decode_persistent_aot,
    sp_decode_attn,
)
from triton_dist.kernels.nvidia.decode_attention.algorithms import Call, Packets
from triton_dist.layers.nvidia import SpGQAFlashDecodeAttention


def one_rank(heads=6, kv_heads=1, dim=96, page=16, batch=3, **options):
    """A call of one new token per sequence."""
    sizes = Sizes(1, batch, 1, heads, kv_heads, dim, dim, torch.float16, False)
    given = {"interleave": None, "lse_base": "e", **options}
    return fill_call(np.random.default_rng(1), sizes, batch, 1, 40, page, False, False, given)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "page", "soft_cap"), [(6, 1, 1, 0.0), (8, 2, 16, 30)]
)
def test_names_of_scripts(heads, kv_heads, page, soft_cap):
    call = one_rank(heads, kv_heads, page=page, soft_cap=soft_cap, scale=0.1)
    q, k, v, lens, table = arguments(call, 0)
    want, _, bound, _ = expected(call, 0)
    out = torch.empty(3, heads, 96, dtype=torch.float16)
    splits = {"output_split": torch.empty(3, heads, 32, 97), "kv_split": 32}
    for function in (gqa_fwd_batch_decode, gqa_fwd_batch_decode_persistent):
        operands = (q[:, 0], k, v, None, [1] * 3, lens[0], table, 0.1, soft_cap)
        for found in (function(*operands), function(*operands, output_combine=out, **splits)):
            assert bool(((found.double() - want[:, 0]).abs() <= bound[:, 0]).all())
        assert found is out
    with pytest.raises(InvalidArgument, match=r"q_lens is \[1, 2, 1\], expected ones"):
        gqa_fwd_batch_decode(q[:, 0], k, v, None, [1, 2, 1], lens[0], table, 0.1)


@pytest.mark.parametrize(
    "function", [gqa_fwd_batch_decode_aot, gqa_fwd_batch_decode_persistent_aot]
)
def test_names_of_compiled_kernels_are_refused(function):
    with pytest.raises(InvalidArgument, match="kernels are compiled at the first call"):
        function(None, torch.empty(1))


def test_one_rank_needs_no_exchange():
    call = one_rank(window=7, sinks=torch.linspace(-1, 1, 6))
    with create(call.sizes) as ctx:
        assert run_call(call, ctx) == []
        q, k, v, lens, table = arguments(call, 0)
        for algorithm in ("packets", "reduce_scatter", "library"):
            with pytest.raises(InvalidArgument, match="several ranks"):
                sp_decode_attn.fn(q, k, v, lens, ctx, table, algorithm=algorithm)


def test_programs_without_keys_and_sequences_without_tokens():
    call = one_rank(batch=2, block_n=16)
    call.counts[:] = 0
    call.keys[:] = [key[:0] for key in call.keys]
    call.values[:] = [value[:0] for value in call.values]
    call.order[0][:] = [np.zeros(0, np.int64)] * 2
    with create(call.sizes) as ctx:
        q, k, v, lens, table = arguments(call, 0)
        out, lse = sp_decode_attn.fn(q, k, v, lens, ctx, table)
        assert bool((out == 0).all())
        assert bool((lse == -torch.inf).all())


def test_programs_leave_room_for_other_kernels(monkeypatch):
    call = one_rank()
    with create(call.sizes) as ctx:
        q, k, v, lens, table = arguments(call, 0)
        made = Call(q, k, v, lens, ctx, table, ctas_per_sm=2)
        device = SimpleNamespace(interprets=False, num_sms=132, shared_memory_bytes=lambda: 232448)
        monkeypatch.setattr(
            "triton_dist.kernels.nvidia.decode_attention.algorithms.current_device", lambda: device
        )
        assert made.num_programs() == 256


@pytest.mark.parametrize(("shared", "fits"), [(113 * 1024, True), (113 * 1024 + 1, False)])
def test_programs_of_a_grid_barrier_fit_together(monkeypatch, shared, fits):
    """A multiprocessor of an H100 has 228 KiB, of which each program reserves 1 KiB."""
    call = one_rank()
    compiled = SimpleNamespace(metadata=SimpleNamespace(shared=shared))
    launch = SimpleNamespace(
        compile=lambda: None, kernel=SimpleNamespace(warmup=lambda *_, **__: compiled), args=(),
        grid=(1,), options={"spec": None},
    )  # fmt: skip
    with create(call.sizes) as ctx:
        q, k, v, lens, table = arguments(call, 0)
        made = Call(q, k, v, lens, ctx, table, ctas_per_sm=2)
        fp8 = Call(
            q, *(x.nan_to_num().to(torch.float8_e4m3fn) for x in (k, v)), lens, ctx, table,
            ctas_per_sm=2,
        )  # fmt: skip
        device = SimpleNamespace(interprets=False, num_sms=132, shared_memory_bytes=lambda: 232448)
        monkeypatch.setattr(
            "triton_dist.kernels.nvidia.decode_attention.algorithms.current_device", lambda: device
        )
        monkeypatch.setattr(ctx, "device", device)
        # The kernel of another cache was checked; its dtype does not occur in the constants.
        with monkeypatch.context() as patch:
            patch.setattr(compiled.metadata, "shared", 0)
            Packets().check_resident(fp8, launch)
        if fits:
            Packets().check_resident(made, launch)
        else:
            with pytest.raises(CandidateFailed, match="bytes of shared memory"):
                Packets().check_resident(made, launch)
        monkeypatch.undo()


def test_libraries_do_not_compute_scales():
    call = one_rank()
    scale = torch.full((1,), 2.0)
    with create(call.sizes) as ctx:
        q, k, v, lens, table = arguments(call, 0)
        fp8 = [x.nan_to_num().to(torch.float8_e4m3fn) for x in (k, v)]
        for caches, has_mask in (((k, v), True), (fp8, False)):
            made = Call(q, *caches, lens, ctx, table, k_scale=scale, v_scale=scale)
            assert made.key.has_mask is has_mask


def test_a_layer_over_hosts_is_refused():
    with pytest.raises(InvalidArgument, match="num_nodes is 2, expected 1"):
        SpGQAFlashDecodeAttention(0, 0, 2, 2, 8, 2, 64, 64)
