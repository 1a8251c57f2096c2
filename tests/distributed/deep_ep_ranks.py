"""Calls of DeepEP's ``Buffer`` on every rank, compared with numpy.

Every rank draws the arguments of all ranks from one generator, so it knows what it must receive.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from triton_dist.deep_ep import Buffer, Config, EventOverlap
from triton_dist.errors import ContextFinalized, InvalidArgument
from triton_dist.runtime.device import current_device

HIDDEN, EXPERTS, TOPK = 128, 6, 3


def tensor(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(array).to(current_device().torch_device, dtype)


def draw(rng: np.random.Generator, tokens: list[int]) -> tuple[list[Any], ...]:
    """Return rows, ids and weights of each rank: small integers, which bf16 and fp8 represent."""
    rows = [rng.integers(-8, 9, (number, HIDDEN)).astype(np.float32) for number in tokens]
    ids = [
        np.array([rng.permutation(EXPERTS)[:TOPK] for _ in range(number)]).reshape(number, TOPK)
        for number in tokens
    ]
    for each in ids:
        each[rng.random(each.shape) < 0.4] = -1
    weights = [rng.integers(1, 5, each.shape).astype(np.float32) / 4 for each in ids]
    return rows, ids, weights


def own_of(ids: np.ndarray, rank: int, size: int) -> np.ndarray:
    """Return local experts on ``rank``, or -1."""
    local = EXPERTS // size
    return np.where((ids >= 0) & (ids // local == rank), ids - rank * local, -1)


def many_tokens() -> None:
    """Dispatch and combine exact numbers of rows."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rng, buffer = np.random.default_rng(7), Buffer(dist.group.WORLD, 1 << 20, num_rdma_bytes=9)
    for tokens in ([3, 0], [6, 5]):  # the second call needs larger contexts
        rows, ids, weights = draw(rng, tokens)
        goes = [np.stack([own_of(each, r, size).max(1, initial=-1) >= 0 for r in range(size)], 1)
                for each in ids]  # fmt: skip
        x, topk_idx = tensor(rows[rank], torch.bfloat16), tensor(ids[rank], torch.int64)
        per_rank, none, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, EXPERTS)
        assert none is None
        assert np.array_equal(in_rank.numpy(force=True), goes[rank])
        assert per_rank.tolist() == goes[rank].sum(0).tolist()
        counts = [[int((each == e).sum()) for e in range(EXPERTS)] for each in ids]
        assert per_expert.tolist() == counts[rank]
        layout = {
            "num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank,
            "num_tokens_per_expert": per_expert, "config": Config(24, 8, 256),
        }  # fmt: skip
        own_weights = tensor(weights[rank], torch.float32)
        event = buffer.capture()
        out, idx, weight, numbers, handle, event = buffer.dispatch(
            x, **layout, topk_idx=topk_idx, topk_weights=own_weights, expert_alignment=4,
            previous_event=event, async_finish=True,
        )  # fmt: skip
        with event:
            pass
        mine = [each[:, rank] for each in goes]
        want = np.concatenate([each[here] for each, here in zip(rows, mine, strict=True)])
        own_ids = [own_of(each, rank, size) for each in ids]
        want_idx = np.concatenate([e[here] for e, here in zip(own_ids, mine, strict=True)])
        want_weight = np.concatenate([e[here] for e, here in zip(weights, mine, strict=True)])
        assert np.array_equal(out.float().numpy(force=True), want)
        assert idx.dtype == torch.int64
        assert np.array_equal(idx.numpy(force=True), want_idx)
        want_weight = np.where(want_idx >= 0, want_weight, 0)
        assert np.array_equal(weight.numpy(force=True), want_weight)
        local = slice(rank * EXPERTS // size, (rank + 1) * EXPERTS // size)
        assert numbers == [-(-each // 4) * 4 for each in np.sum(counts, 0)[local]]
        assert handle[0].tolist() == np.cumsum([each.sum(0) for each in goes], 0).tolist()
        assert handle[3].tolist() == np.concatenate([np.flatnonzero(e) for e in mine]).tolist()

        worst = size * max(tokens)
        padded, idx_of_worst, _, no_numbers, _, _ = buffer.dispatch(
            x, **layout, topk_idx=topk_idx, topk_weights=own_weights, num_worst_tokens=worst
        )
        assert no_numbers == []
        assert len(padded) == worst
        assert torch.equal(padded[: len(out)], out)
        assert torch.equal(idx_of_worst[: len(out)], idx)
        assert (idx_of_worst[len(out) :] == -1).all()
        # The same ranks again, in fp8 with scales whose columns are contiguous, then without ids.
        fp8 = tensor(rows[rank], torch.float8_e4m3fn)
        scales = tensor(np.arange(len(x), dtype=np.float32)[:, None], torch.float32)
        (rows8, scales8), *nothing, _ = buffer.dispatch((fp8, scales.mT.contiguous().mT), handle)
        assert nothing == [None] * 4
        assert np.array_equal(rows8.float().numpy(force=True), want)
        assert scales8.flatten().tolist() == handle[3].tolist()
        again, no_idx, no_weight, same_numbers, plain, _ = buffer.dispatch(x, **layout)
        assert torch.equal(again, out)
        assert no_idx is no_weight is None
        assert same_numbers == np.sum(counts, 0)[local].tolist()

        bias = torch.ones_like(x)
        for each, extra in ((handle, {"topk_weights": weight}), (plain, {"bias": (bias, bias)})):
            sums, sums_of_weights, event = buffer.combine(2 * out, each, async_finish=True, **extra)
            event.current_stream_wait()
            shift = 2 if "bias" in extra else 0
            result = 2 * rows[rank] * goes[rank].sum(1, keepdims=True) + shift
            assert np.array_equal(sums.float().numpy(force=True), result)
            if sums_of_weights is not None:
                expected = np.where(ids[rank] >= 0, weights[rank], 0)
                assert np.array_equal(sums_of_weights.numpy(force=True), expected)
    with pytest.raises(InvalidArgument, match="expected either a handle, or the results of"):
        buffer.dispatch(x)
    # A larger context replaces a context that a CUDA graph uses, but does not free it.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(buffer._device), "is_capturing", lambda _: True)
        captured = buffer._context("rows", 1, HIDDEN, EXPERTS)
    larger = buffer._context("rows", 2 * captured.max_tokens, HIDDEN, EXPERTS)
    assert captured.buffer is not larger.buffer
    buffer.destroy()
    with pytest.raises(ContextFinalized):
        assert captured.buffer


def few_tokens() -> None:
    """Dispatch and combine with fixed places, two micro-batches in flight."""
    rank, size, most = dist.get_rank(), dist.get_world_size(), 4
    rng, local, hidden = np.random.default_rng(3), EXPERTS // size, 4 * HIDDEN
    buffer = Buffer(dist.group.WORLD, low_latency_mode=True, num_qps_per_rank=local)
    batches = []
    for tokens, use_ue8m0 in (([4, 3], False), ([0, 2], True)):
        rows, ids, weights = draw(rng, tokens)
        rows = [np.tile(each, (1, 4)) for each in rows]
        x, topk_idx = tensor(rows[rank], torch.bfloat16), tensor(ids[rank], torch.int64)
        stats = torch.ones(local, dtype=torch.int32, device=x.device)
        options = {"use_ue8m0": use_ue8m0, "round_scale": use_ue8m0}
        call = buffer.low_latency_dispatch(
            x, topk_idx, most, EXPERTS, stats, return_recv_hook=True, **options
        )
        batches.append((rows, ids, weights, x, topk_idx, stats, call))
    for limit in (most, 2 * most):  # larger contexts may not replace contexts with pending sends
        with pytest.raises(InvalidArgument, match="call the function of an earlier dispatch"):
            buffer.low_latency_dispatch(x, topk_idx, limit, EXPERTS)
    with pytest.raises(
        InvalidArgument, match="handle is 'a pending send', expected a handle whose"
    ):
        buffer.low_latency_combine(call[0][0], topk_idx, topk_idx.float(), call[2])
    for rows, ids, weights, x, topk_idx, stats, call in batches[::-1]:
        (out, scales), counts, handle, _, hook = call
        hook()
        with pytest.raises(InvalidArgument, match="zero_copy is True, expected False unless"):
            buffer.low_latency_combine(x, topk_idx, weights[rank], handle, zero_copy=True)
        assert out.shape == (local, size * most, hidden)
        assert scales.stride(1) == 1
        if scales.dtype == torch.int32:
            exponents = scales.flatten().view(torch.uint8).unflatten(0, (local, -1, 4))
            scales = (exponents.int() << 23).view(torch.float32)
        y = (out.float().unflatten(2, (4, HIDDEN)) * scales[..., None]).flatten(2)
        for expert in range(local):
            here = [np.flatnonzero((each == rank * local + expert).any(1)) for each in ids]
            number = sum(map(len, here))
            assert int(counts[expert]) == int(stats[expert]) - 1 == number
            assert handle[0][expert, :number].tolist() == np.concatenate(here).tolist()
            ends = np.cumsum([len(each) for each in here])
            ranges = [(end - len(e) << 32) + len(e) for e, end in zip(here, ends, strict=True)]
            assert handle[1][expert].tolist() == ranges
            want = np.concatenate([each[at] for each, at in zip(rows, here, strict=True)])
            found = y[expert, :number].numpy(force=True)
            np.testing.assert_allclose(found, want, rtol=0.07)
            y[expert] *= rank * local + expert + 1
            y[expert, number:] = float("nan")  # never read
        y = y.to(torch.bfloat16)
        products = buffer.get_next_low_latency_combine_buffer(handle)
        products.copy_(y)
        given = tensor(weights[rank], torch.float32)
        result = torch.empty(len(topk_idx), hidden, dtype=torch.bfloat16, device=y.device)
        other, event, hook = buffer.low_latency_combine(
            torch.zeros_like(y), topk_idx, given, handle, zero_copy=True, out=result,
            return_recv_hook=True,
        )  # fmt: skip
        hook()
        assert other is result
        factor = np.where(ids[rank] >= 0, (ids[rank] + 1) * weights[rank], 0).sum(1)[:, None]
        np.testing.assert_allclose(
            result.float().numpy(force=True), rows[rank] * factor, rtol=0.08, atol=0.1
        )
        assert isinstance(event, EventOverlap)
        plain, event, hook = buffer.low_latency_combine(
            y, topk_idx, given, handle, async_finish=True
        )
        event.current_stream_wait()
        assert hook is None
        assert torch.equal(plain, result)
    out, _, handle, event, hook = buffer.low_latency_dispatch(
        x, topk_idx, most, EXPERTS, use_fp8=False, async_finish=True
    )
    event.current_stream_wait()
    assert hook is None
    ends = np.cumsum([[int((each == e).sum()) for each in ids] for e in range(EXPERTS)], 1)
    for expert, end in enumerate(ends[rank * local : (rank + 1) * local]):
        number, source = int(end[-1]), handle[0][expert]
        owner = np.searchsorted(end, np.arange(number), side="right")
        want = [rows[r][int(t)] for r, t in zip(owner, source[:number], strict=True)]
        assert np.array_equal(out[expert, :number].float().numpy(force=True), want or out[0, :0])
    buffer.destroy()
