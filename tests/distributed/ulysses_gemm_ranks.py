"""What every rank does in the tests of the Ulysses ops with projections."""

from __future__ import annotations

import random
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from tests.distributed.ulysses_ranks import draw
from triton_dist.kernels import nvidia
from triton_dist.kernels.common.gemm.spaces import get_config_space
from triton_dist.kernels.nvidia import (
    create_ulysses_context,
    ulysses_gemm_pre_attn,
    ulysses_post_attn_gemm,
)
from triton_dist.layers.nvidia import sequence_parallel
from triton_dist.layers.nvidia.sequence_parallel import gemm_pre_attn, post_attn_gemm
from triton_dist.testing import assert_allclose
from triton_dist.testing.assertions import assert_bitwise_equal
from triton_dist.testing.opinfo.sequence_parallel import heads_by_rank, local_tokens

ALGORITHMS = ("fused", "fused", "serial", "fused", "serial", "collective")


def ternary(shared: random.Random, *sizes: int, dtype: torch.dtype) -> torch.Tensor:
    """Return values -1, 0 and 1, equal on all ranks: sums of their products are exact."""
    return draw(shared, *sizes, dtype=dtype).sign()


def random_calls(seed: int, rounds: int) -> int:
    """Compare both ops with products of whole tensors; return the number of calls."""
    rank, size, count = dist.get_rank(), dist.get_world_size(), 0
    shared = random.Random(seed)
    for number in range(rounds):
        dtype = shared.choice([torch.float32, torch.bfloat16, torch.float16])
        kv = shared.choice([n for n in range(1, 2 * size + 1) if n % size == 0 or size % n == 0])
        heads = shared.choice([n for n in range(1, 4 * size + 1) if n % size == 0 and n % kv == 0])
        dim, v_dim, most = *shared.choice([(8, 8), (24, 8), (64, 64)]), shared.choice([1, 5, 20])
        with create_ulysses_context(
            rank, size, size, 2 * most * size, heads, kv, dim, dtype, v_head_dim=v_dim,
            max_local_tokens=2 * most * size,
        ) as ctx:  # fmt: skip
            for which in range(4):
                batch, lengths = shared.choice([1, 1, 2]), None
                if shared.random() < 0.6:
                    lengths = [shared.choice([0, 1, shared.randint(0, most)]) for _ in range(size)]
                    lengths[shared.randrange(size)] = most
                every = [most] * size if lengths is None else lengths
                algorithm = ALGORITHMS[(number + which) % len(ALGORITHMS)]
                options: dict[str, Any] = {"seq_lens": lengths, "algorithm": algorithm}
                if algorithm == "fused":
                    options["gemm_config"] = shared.choice(get_config_space())
                    options["persistent"] = shared.random() < 0.7  # descriptors if they fit
                hidden = shared.choice([24, 33, 40])
                shapes = (heads, dim), (kv, dim), (kv, v_dim)
                columns = sum(n * d for n, d in shapes)
                x = ternary(shared, batch, sum(every), hidden, dtype=dtype)
                B = ternary(shared, hidden, columns, dtype=dtype)
                bias = ternary(shared, columns, dtype=dtype) if shared.random() < 0.5 else None
                if shared.random() < 0.5:
                    B = B.T.contiguous().T
                out = ulysses_gemm_pre_attn.fn(
                    local_tokens(x, every, rank), B, ctx, bias, **options
                )  # fmt: skip
                product = (x.float() @ B.float() + (0 if bias is None else bias)).to(dtype)
                parts = product.split([n * d for n, d in shapes], 2)
                for result, part, shape in zip(out, parts, shapes, strict=True):
                    whole = heads_by_rank(part.unflatten(2, shape), size)[rank]
                    assert_bitwise_equal(result, whole.contiguous())

                o = ternary(shared, batch, sum(every), heads, v_dim, dtype=dtype)
                B = ternary(shared, heads * v_dim, hidden, dtype=dtype)
                bias = ternary(shared, hidden, dtype=dtype) if shared.random() < 0.5 else None
                if shared.random() < 0.5:
                    B = B.T.contiguous().T
                if algorithm != "collective":
                    options["num_chunks"] = shared.choice([1, 3])
                rows = ulysses_post_attn_gemm.fn(
                    heads_by_rank(o, size)[rank].contiguous(), B, ctx, bias, **options
                )
                product = o.flatten(2).float() @ B.float() + (0 if bias is None else bias)
                assert_bitwise_equal(rows, local_tokens(product.to(dtype), every, rank))
                count += 1
            ctx.check()
    return count


def gradients(lengths: list[int], heads: int, kv_heads: int) -> int:
    """Compare gradients of attention with projections with one process's; return the tensors."""
    rank, size, dim, hidden = dist.get_rank(), dist.get_world_size(), 8, 24
    shared, total = random.Random(0), sum(lengths)
    shapes = (heads, dim), (kv_heads, dim), (kv_heads, dim)
    columns = sum(n * d for n, d in shapes)
    sizes = (1, total, hidden), (hidden, columns), (columns,), (heads * dim, hidden), (hidden,)
    whole = [draw(shared, *each, dtype=torch.float32) / 16 for each in sizes]
    weight = draw(shared, 1, total, hidden, dtype=torch.float32)
    parts = [x.clone().requires_grad_() for x in whole]
    parts[0] = local_tokens(whole[0], lengths, rank).requires_grad_()
    whole = [x.requires_grad_() for x in whole]

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    fused = {"algorithm": "fused", "gemm_config": get_config_space()[0]}
    fns = {name: getattr(nvidia, name).fn for name in ("ulysses_pre_attn", "ulysses_post_attn")}
    for op in (ulysses_gemm_pre_attn, ulysses_post_attn_gemm):
        fns[op.fn.__name__] = partial(op.fn, **fused)
    with (
        mock.patch.multiple(sequence_parallel, **fns),
        create_ulysses_context(
            rank, size, size, total, heads, kv_heads, dim, torch.float32, max_local_tokens=total
        ) as ctx,
    ):
        x, B, bias, C, out_bias = parts
        o = attention(*gemm_pre_attn(x, B, ctx, bias, lengths))
        out = post_attn_gemm(o, C, ctx, out_bias, lengths)
        (out * local_tokens(weight, lengths, rank)).sum().backward()
    x, B, bias, C, out_bias = whole
    projected = (x @ B + bias).split([n * d for n, d in shapes], 2)
    q, k, v = (part.unflatten(2, shape) for part, shape in zip(projected, shapes, strict=True))
    ((attention(q, k, v).flatten(2) @ C + out_bias) * weight).sum().backward()
    for number, (part, each) in enumerate(zip(parts, whole, strict=True)):
        assert part.grad is not None
        assert each.grad is not None
        if number:
            dist.all_reduce(part.grad)
        expected = each.grad if number else local_tokens(each.grad, lengths, rank)
        assert_allclose(part.grad, expected, rtol=1e-4, atol=1e-4)
    return len(parts)
