"""What every rank does in the tests of the Ulysses ops, on CPU ranks and on GPUs."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from triton_dist.errors import RankDisagreement
from triton_dist.kernels.nvidia import (
    UlyssesContext,
    create_ulysses_context,
    ulysses_post_attn,
    ulysses_pre_attn,
)
from triton_dist.layers.nvidia import sequence_parallel
from triton_dist.layers.nvidia.sequence_parallel import post_attn, pre_attn
from triton_dist.runtime.device import current_device
from triton_dist.testing import assert_allclose
from triton_dist.testing.assertions import assert_bitwise_equal
from triton_dist.testing.opinfo.sequence_parallel import heads_by_rank, local_tokens

ALGORITHMS = ("push", "push", "collective")


def draw(shared: random.Random, *sizes: int, dtype: torch.dtype) -> torch.Tensor:
    """Return small integers, equal on all ranks: sums of them are exact in 16 bits."""
    generator = torch.Generator().manual_seed(shared.randrange(1 << 30))
    values = torch.randint(-8, 9, sizes, generator=generator)
    return values.to(dtype).to(current_device().torch_device)


def random_calls(seed: int, rounds: int) -> int:
    """Compare both ops, both directions, with tensors of the whole sequence; return the calls.

    All ranks draw the same whole tensors.
    """
    rank, size, count = dist.get_rank(), dist.get_world_size(), 0
    shared = random.Random(seed)
    for number in range(rounds):
        dtype = shared.choice([torch.float32, torch.bfloat16, torch.float16])
        kv = shared.choice([n for n in range(1, 2 * size + 1) if n % size == 0 or size % n == 0])
        heads = shared.choice([n for n in range(1, 4 * size + 1) if n % size == 0 and n % kv == 0])
        dim, v_dim = shared.choice([(8, 8), (24, 8), (16, 32)])
        most = shared.choice([1, 5, 40])
        with create_ulysses_context(
            rank, size, size, 2 * most * size, heads, kv, dim, dtype, v_head_dim=v_dim,
            max_local_tokens=2 * most * size,
        ) as ctx:  # fmt: skip
            for which in range(3):
                batch = shared.choice([1, 1, 2])
                lengths: list[int] | None = None
                if shared.random() < 0.6:
                    lengths = [shared.randint(0, most) for _ in range(size)]
                    lengths[shared.randrange(size)] = most
                every = [most] * size if lengths is None else lengths
                algorithm = ALGORITHMS[(number + which) % 3]
                options: dict[str, Any] = {"seq_lens": lengths, "algorithm": algorithm}
                if algorithm != "collective":
                    options |= {"block_bytes": 512, "num_ctas": shared.choice([1, 3])}
                    options["num_chunks"] = shared.choice([1, 3])
                q, k, v = (
                    draw(shared, batch, sum(every), n, d, dtype=dtype)
                    for n, d in ((heads, dim), (kv, dim), (kv, v_dim))
                )
                parts = [local_tokens(x, every, rank) for x in (q, k, v)]
                if shared.random() < 0.5:  # views of a packed projection
                    packed = torch.cat([x.flatten(2) for x in parts], 2)
                    widths = [x.shape[2] * x.shape[3] for x in parts]
                    parts = [
                        view.unflatten(2, x.shape[2:])
                        for view, x in zip(packed.split(widths, 2), parts, strict=True)
                    ]
                given = shared.choice([parts, parts, [parts[0], None, None]])
                out = ulysses_pre_attn.fn(*given, ctx, **options)
                whole = [heads_by_rank(x, size)[rank] for x in (q, k, v)][: len(out)]
                for result, expected in zip(out, whole, strict=True):
                    assert_bitwise_equal(result, expected.contiguous())
                o = draw(shared, batch, sum(every), heads, v_dim, dtype=dtype)
                (back,) = ulysses_post_attn.fn(
                    heads_by_rank(o, size)[rank].contiguous(), ctx, **options
                )
                assert_bitwise_equal(back, local_tokens(o, every, rank))
                # The transpose of the first call.
                dq, *dkv = (
                    [draw(shared, *x.shape, dtype=dtype) for _ in range(size)] for x in whole
                )
                if dkv:
                    gradients = [dq[rank], ctx, dkv[0][rank], dkv[1][rank]]
                    _, *sums = ulysses_post_attn.fn(*gradients, **options)
                    for total, each in zip(sums, dkv, strict=True):
                        shards = [
                            sum(x.float() for x in each[first : first + ctx.ranks_per_kv_head])
                            for first in range(0, size, ctx.ranks_per_kv_head)
                        ]
                        expected = torch.cat(shards, 2).to(dtype)
                        assert_bitwise_equal(total, local_tokens(expected, every, rank))
                count += 1
            ctx.check()
    return count


def gradients(lengths: list[int], heads: int, kv_heads: int) -> int:
    """Compare gradients of attention with Ulysses with one process's; return the tensors."""
    rank, size, dim = dist.get_rank(), dist.get_world_size(), 8
    shared = random.Random(0)
    whole = [
        draw(shared, 1, sum(lengths), n, dim, dtype=torch.float32) / 8
        for n in (heads, kv_heads, kv_heads)
    ]
    weight = draw(shared, 1, sum(lengths), heads, dim, dtype=torch.float32)
    parts = [local_tokens(x, lengths, rank).requires_grad_() for x in whole]
    whole = [x.requires_grad_() for x in whole]

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    with (
        mock.patch.object(sequence_parallel, "ulysses_pre_attn", ulysses_pre_attn.fn),
        mock.patch.object(sequence_parallel, "ulysses_post_attn", ulysses_post_attn.fn),
        create_ulysses_context(
            rank, size, size, sum(lengths), heads, kv_heads, dim, torch.float32,
            max_local_tokens=sum(lengths),
        ) as ctx,
    ):  # fmt: skip
        out = post_attn(attention(*pre_attn(*parts, ctx, lengths)), ctx, lengths)
        (out * local_tokens(weight, lengths, rank)).sum().backward()
    (attention(*whole) * weight).sum().backward()
    for part, x in zip(parts, whole, strict=True):
        assert x.grad is not None
        assert_allclose(part.grad, local_tokens(x.grad, lengths, rank), rtol=1e-4, atol=1e-4)
    return len(parts)


def disagree(x: torch.Tensor, ctx: UlyssesContext) -> None:
    """Make a call in which every rank passes other lengths of its peers."""
    lengths = [4 + ctx.rank * (peer != ctx.rank) for peer in range(ctx.num_ranks)]
    ulysses_pre_attn.fn(x, x, x, ctx, lengths)
    ctx.check()


def different_lengths() -> None:
    """Raise on every rank if ranks pass other lengths; a reset context works again."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.ones(1, 4, size, 8, device=current_device().torch_device)
    with create_ulysses_context(
        rank, size, size, 12 * size, size, size, 8, torch.float32, max_local_tokens=12
    ) as ctx:
        with pytest.raises(RankDisagreement, match="seq_lens"):
            disagree(x, ctx)
        dist.barrier()
        ctx.reset()
        ulysses_pre_attn.fn(x, x, x, ctx)
        ctx.check()
