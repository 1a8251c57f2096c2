"""What every rank does in the tests of decode attention, on CPU ranks and on GPUs."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.distributed.calls import some_configs
from tests.stress.decode_attn import (
    Sizes,
    arguments,
    create,
    expected,
    fill_call,
    run_call,
)
from triton_dist.errors import InvalidArgument, RankDisagreement, WaitTimeout
from triton_dist.kernels.nvidia import create_sp_decode_context, sp_decode_attn
from triton_dist.kernels.nvidia.decode_attention import SpDecodeContext, backends
from triton_dist.layers.nvidia import SpGQAFlashDecodeAttention
from triton_dist.runtime.device import current_device
from triton_dist.runtime.waits import bounded_waits
from triton_dist.testing import assert_allclose

BF16, FP16 = torch.bfloat16, torch.float16
EVERY: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    # batch, new tokens, heads, KV heads, dim, v_dim, dtype; page, shares_v, is_fp8 and options
    "heads": ((3, 1, 8, 2, 128, 128, BF16), {}),
    "paged": ((3, 1, 8, 1, 64, 64, FP16), {"page": 16, "interleave": 1}),
    "masked": ((2, 4, 12, 2, 128, 128, BF16), {"page": 1, "window": 100, "soft_cap": 30.0}),
    "sinks": ((3, 1, 12, 2, 192, 192, BF16), {"sinks": True, "shard_output": True}),
    "cyclic": ((5, 8, 8, 1, 96, 96, FP16), {"interleave": 16, "lse_base": "2"}),
    "wide": ((2, 2, 4, 2, 256, 256, BF16), {"window": 40, "interleave": 3}),
    "mla": ((3, 1, 16, 1, 576, 512, BF16), {"page": 64, "shares_v": True}),
    "mla, cyclic": ((3, 2, 16, 1, 576, 512, BF16), {"interleave": 1, "shares_v": True}),
    "fp8": ((3, 1, 8, 2, 128, 128, BF16), {"page": 16, "is_fp8": True}),
    "fp8 mla": ((2, 1, 16, 1, 576, 512, FP16), {"shares_v": True, "is_fp8": True}),
    "shards": ((3, 2, 12, 2, 128, 128, BF16), {"shard_queries": True, "shard_output": True}),
}


def every_kind(
    names: tuple[str, ...], algorithms: tuple[str, ...], calls: int, longest: int, **tunables: Any
) -> list[str]:
    """Run random lengths of kinds of calls; return the wrong results."""
    num_ranks, wrong = dist.get_world_size(), []
    for name in names:
        (*numbers, dtype), given = EVERY[name]
        given = dict(given)
        batch, q_len, *_ = numbers
        rng = np.random.default_rng([num_ranks, len(name)])
        sizes = Sizes(num_ranks, *numbers, dtype, given.pop("shard_queries", False))
        page, shares_v = given.pop("page", 0), given.pop("shares_v", False)
        is_fp8 = given.pop("is_fp8", False)
        options = {"interleave": None, "lse_base": "e", **given}
        if options.pop("sinks", False):
            options["sinks"] = torch.linspace(-2, 3, sizes.heads)
        if is_fp8:
            options |= {"k_scale": torch.full((1,), 0.7), "v_scale": torch.full((1,), 1.3)}
        with create(sizes) as ctx:
            for _ in range(calls):
                for algorithm in algorithms:
                    call = fill_call(
                        rng, sizes, batch, q_len, longest, page, shares_v, is_fp8,
                        {**options, "algorithm": algorithm, **tunables},
                    )  # fmt: skip
                    wrong += [f"{name}, {each}" for each in run_call(call, ctx)]
            ctx.check()
    return wrong


def natural_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: Any, lens: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention of q [batch, heads, dim] and its LSE in base e [batch, heads], in fp64.

    Both are NaN for sequences without keys.
    """
    outs, lses = [], []
    for b, length in enumerate(lens.tolist()):
        keys, values = (
            (x[b] if table is None else x[table[b].long()].flatten(0, 1))[:length]
            .double().repeat_interleave(q.shape[1] // x.shape[2], 1)
            for x in (k, v)
        )  # fmt: skip
        scores = torch.einsum("hd,nhd->hn", q[b].double(), keys) * scale
        lse = scores.logsumexp(-1) if length else torch.full((q.shape[1],), torch.nan)
        outs.append(torch.einsum("hn,nhd->hd", (scores - lse[:, None]).exp(), values))
        outs[-1] += 0 if length else torch.nan
        lses.append(lse)
    return torch.stack(outs).to(q.dtype), torch.stack(lses).float()


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
    cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None,
    cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
    q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    """Substitute for the function of FlashAttention 3.0.0, with its parameters."""
    assert q.ndim == 4
    assert q.shape[1] == 1
    assert cache_seqlens.dtype == torch.int32
    assert cache_seqlens.is_contiguous()
    assert return_softmax_lse
    if qv is not None:
        assert (q.shape[-1], qv.shape[-1], v_cache.shape[-1]) == (64, 512, 512)
        q, k_cache = torch.cat([q, qv], -1), torch.cat([k_cache, v_cache], -1)
    out, lse = natural_attention(
        q[:, 0], k_cache, v_cache, page_table, cache_seqlens, softmax_scale
    )
    return out[:, None], lse[..., None], None, None


def trtllm_batch_decode_with_kv_cache(
    query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0,
    bmm2_scale=1.0, window_left=-1, out=None, out_dtype=None, o_sf_scale=None, o_sf_vec_size=None,
    sinks=None, kv_layout="HND", enable_pdl=None, backend="auto", q_len_per_req=1, o_scale=1.0,
    mask=None, max_q_len=None, cum_seq_lens_q=None, skip_softmax_threshold_scale_factor=None,
    kv_cache_sf=None, uses_shared_paged_kv_idx=True, lse=None, return_lse=False,
):  # fmt: skip
    """Substitute for the function of FlashInfer 0.6.18, with its parameters."""
    assert kv_layout == "NHD"
    assert backend == "trtllm-gen"
    assert return_lse
    assert max_seq_len == block_tables.shape[1] * kv_cache[0].shape[1]
    assert workspace_buffer.count_nonzero() == 0
    out, lse = natural_attention(query, *kv_cache, block_tables, seq_lens, bmm1_scale)
    return out, lse / np.log(2)


def libraries() -> list[str]:
    """Call the library algorithms with substitutes for the libraries; return the wrong results."""
    substitutes = {
        "flash_attn_interface": flash_attn_with_kvcache,
        "flashinfer.decode": trtllm_batch_decode_with_kv_cache,
    }
    q, k, v, lens = plain(20, dist.get_world_size())
    with context(dist.get_world_size()) as ctx:
        for backend, reason in (("flash_attn_3", "an installed library"), ("torch", "GPUs")):
            with pytest.raises(InvalidArgument, match=reason):
                sp_decode_attn.fn(q, k, v, lens, ctx, algorithm="library", backend=backend)
    for name, function in substitutes.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        setattr(module, function.__name__, function)
        sys.modules[name] = module
    backends.is_installed.cache_clear()
    both, wrong = ("library", "library_reduce_scatter"), []
    try:
        names = ("heads", "paged", "mla", "sinks")
        wrong += every_kind(names, both, 2, 40, backend="flash_attn_3")
        wrong += every_kind(("paged",), both, 2, 40, backend="flashinfer")
        for names, backend in ((("masked", "fp8"), "flash_attn_3"), (("heads",), "flashinfer")):
            for name in names:
                with pytest.raises(InvalidArgument, match=f"{backend}' requires several ranks"):
                    every_kind((name,), both, 1, 40, backend=backend)
    finally:
        for name in substitutes:
            del sys.modules[name]
        backends.is_installed.cache_clear()
    return wrong


def plain(tokens: int, num_ranks: int, batch: int = 2) -> tuple[torch.Tensor, ...]:
    """Return q, keys, values and lengths of a small call; q is equal on all ranks."""
    device = current_device().torch_device
    generator = torch.Generator().manual_seed(tokens)
    q = torch.randn(batch, 4, 32, generator=generator)
    k, v = torch.randn(2, batch, tokens, 2, 32)
    lens = torch.full((num_ranks, batch), tokens, dtype=torch.int32)
    return tuple(each.to(device) for each in (q, k, v, lens))


def context(num_ranks: int, **options: Any) -> SpDecodeContext:
    rank = dist.get_rank()
    return create_sp_decode_context(rank, num_ranks, num_ranks, 2, 4, 32, torch.float32, **options)


def expected_plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: torch.Tensor) -> Any:
    """Return output and LSE of a small call in fp64."""
    shards: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shards, (k.cpu(), v.cpu()))
    out, lse = [], []
    for b in range(len(q)):
        keys, values = (
            torch.cat([each[b, : int(n)] for each, n in zip(parts, lens[:, b], strict=True)])
            .double().repeat_interleave(2, 1)
            for parts in zip(*shards, strict=True)
        )  # fmt: skip
        scores = torch.einsum("hd,nhd->hn", q[b].double().cpu(), keys) * 32**-0.5
        lse.append(scores.logsumexp(-1))
        out.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), values))
    return torch.stack(out), torch.stack(lse)


def replayed(rounds: int) -> int:
    """Replay captured calls with new lengths, keys and queries, one rank late in each replay.

    All ranks return equal bits.
    """
    rank, size, device = dist.get_rank(), dist.get_world_size(), current_device()
    with context(size) as ctx:
        operands = plain(40, size)
        outs: list[Any] = []

        def call() -> None:
            outs.clear()
            for _ in range(3):
                outs.append(sp_decode_attn.fn(*operands, ctx, algorithm="packets"))

        call()
        replay = device.capture(call, 60.0)
        for number in range(rounds):
            for target, source in zip(operands, plain(40, size), strict=True):
                target.copy_(source)
            generator = torch.Generator().manual_seed(number)
            q = torch.randn(2, 4, 32, generator=generator)
            lens = torch.randint(0, 41, (size, 2), generator=generator)
            lens[:, 1] *= torch.arange(size) == number % size  # keys on one rank only
            lens[number % size] += lens[number % size] == 0
            operands[0].copy_(q)
            operands[3].copy_(lens)
            if number % size == rank:
                device.sleep(2_000_000)
            replay()
            device.synchronize()
            want = expected_plain(*operands)
            for out, lse in outs:
                assert_allclose(out.double().cpu(), want[0], rtol=1e-5, atol=1e-5)
                assert_allclose(lse.double().cpu(), want[1], rtol=1e-5, atol=1e-5)
            everyones: list[Any] = [None] * size
            dist.all_gather_object(everyones, outs[-1][0].cpu())
            assert all(torch.equal(each, everyones[0]) for each in everyones)
        ctx.check()
    return rounds


def give_up_and_start_again() -> list[str]:
    """Let rank 0 call alone; after a reset, all ranks call again. Return the late flags."""
    rank, size, late = dist.get_rank(), dist.get_world_size(), []
    with context(size) as ctx:
        operands = plain(20, size)
        sp_decode_attn.fn(*operands, ctx)
        ctx.check()
        if rank == 0:
            call = lambda: (sp_decode_attn.fn(*operands, ctx), ctx.check())  # noqa: E731
            with pytest.raises(WaitTimeout) as raised, bounded_waits(0.2):
                call()
            late.append(raised.value.flag.split("[")[0])
        dist.barrier()
        ctx.reset()
        want, _ = expected_plain(*operands)
        for _ in range(3):
            out, _ = sp_decode_attn.fn(*operands, ctx)
            assert_allclose(out.double().cpu(), want, rtol=1e-5, atol=1e-5)
        ctx.check()
    return late


def different_arguments() -> None:
    """Raise on every rank if ranks pass different arguments; a reset context works again."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with context(size) as ctx:
        q, k, v, lens = plain(20, size)
        differences: list[dict[str, Any]] = [{"window": 4}, {"soft_cap": 1.0}]
        if q.shape[-2] % size == 0:  # else no rank may shard the output
            differences.append({"shard_output": True})
        for options in differences:
            given = options if rank else {}

            def call(given: dict[str, Any] = given) -> None:
                sp_decode_attn.fn(q, k, v, lens, ctx, **given)
                ctx.check()

            with pytest.raises(RankDisagreement):
                call()
            dist.barrier()
            ctx.reset()
        want, _ = expected_plain(q, k, v, lens)
        out, _ = sp_decode_attn.fn(q, k, v, lens, ctx)
        assert_allclose(out.double().cpu(), want, rtol=1e-5, atol=1e-5)


def tuned() -> int:
    """Tune the op; the next calls use the result. Return the number of tunings."""
    size, before = dist.get_world_size(), sp_decode_attn.num_tunings
    with some_configs(sp_decode_attn), context(size) as ctx:
        for tokens in (20, 20, 19):
            operands = plain(tokens, size)
            out, lse = sp_decode_attn(*operands, ctx)
            want = expected_plain(*operands)
            assert_allclose(out.double().cpu(), want[0], rtol=1e-5, atol=1e-5)
            assert_allclose(lse.double().cpu(), want[1], rtol=1e-5, atol=1e-5)
    return sp_decode_attn.num_tunings - before


def checked() -> int:
    """Make few calls for ``under_checks``; return their number."""
    size, count = dist.get_world_size(), 0
    with context(size) as ctx:
        for tokens in (20, 33, 3):
            sp_decode_attn.fn(*plain(tokens, size), ctx, shard_output=tokens == 33, block_n=16)
            count += 1
        ctx.check()
    return count


def layer() -> None:
    """Call the layer as test_sp_decode_attn.py does, then with more sequences."""
    rank, size = dist.get_rank(), dist.get_world_size()
    op = SpGQAFlashDecodeAttention(
        rank, 0, size, 1, 8, 2, 32, 32, page_size=1, scale=0.2, soft_cap=0, max_allowed_batch=1,
        thrink_buffer_threshold=500, stages=20,
    )  # fmt: skip
    with some_configs(sp_decode_attn):
        for batch in (1, 2):
            sizes = Sizes(size, batch, 1, 8, 2, 32, 32, FP16, False)
            options = {"interleave": None, "lse_base": "e", "scale": 0.2}
            rng = np.random.default_rng(batch)
            call = fill_call(rng, sizes, batch, 1, 30, 1, False, False, options)
            q, k, v, lens, table = arguments(call, rank, 40)
            out = op(q[:, 0], k, v, lens, table)
            want, _, bound, _ = expected(call, rank)
            assert bool(((out.double().cpu() - want[:, 0]).abs() <= bound[:, 0]).all())
        with pytest.raises(InvalidArgument, match=r"k_cache\.shape\[1:3\] is \(1, 1\)"):
            op(q[:, 0], k[:, :, :1], v, lens, table)
    op.finalize()
    op.finalize()
