"""What every rank does in the tests of AllGather-attention, on CPU ranks and on GPUs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from triton_dist import knobs
from triton_dist.debugging.checks import checking
from triton_dist.debugging.modes import checks_of
from triton_dist.kernels.nvidia import create_sp_ag_attention_context, sp_ag_attention
from triton_dist.layers.nvidia import sequence_parallel
from triton_dist.layers.nvidia.sequence_parallel import ag_attention
from triton_dist.runtime.device import current_device
from triton_dist.testing import assert_allclose
from triton_dist.testing.opinfo.sp_ag_attention import tokens_of_rank


def whole_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], causal: bool
) -> torch.Tensor:
    """Return attention of packed sequences in one process."""
    out, first = [], 0
    for length in filter(None, lengths):
        part = slice(first, first + length)
        heads = (x[:, part].transpose(1, 2) for x in (q, k, v))
        each = scaled_dot_product_attention(*heads, is_causal=causal, enable_gqa=True)
        out.append(each.transpose(1, 2))
        first += length
    return torch.cat(out, 1)


def random_calls(seed: int, rounds: int) -> int:
    """Compare forward and backward with one process; return the calls."""
    rank, size, count = dist.get_rank(), dist.get_world_size(), 0
    device, on_gpu = current_device().torch_device, current_device().name == "cuda"
    shared = random.Random(seed)
    dtype, limit = (torch.bfloat16, 0.03) if on_gpu else (torch.float32, 1e-4)
    for number in range(rounds):
        kv, groups, dim = shared.choice([1, 2]), shared.choice([1, 2, 4]), 64 if on_gpu else 8
        scale = 16 if on_gpu else 1
        with create_sp_ag_attention_context(rank, size, size, 32 * scale, kv, dim, dtype) as ctx:
            for algorithm in ("copy_engine", "collective", "copy_engine"):
                causal, zigzag = shared.random() < 0.7, shared.random() < 0.7
                batch = shared.choice([1, 2])
                local = [2 * scale * shared.randint(1, 4)]
                packed = batch == 1 and shared.random() < 0.5
                if packed:
                    local = [*local, 0, 2 * scale * shared.randint(1, 3)]
                lengths = [size * n for n in local]
                torch.manual_seed(shared.randrange(1 << 30))
                whole = [
                    (torch.randn(batch, sum(lengths), n, dim).to(dtype).to(device))
                    for n in (kv * groups, kv, kv, kv * groups)
                ]
                mine = tokens_of_rank(lengths, rank, size, causal and zigzag)
                q, k, v, grad = (x[:, mine] for x in whole)
                if number % 2:  # views of packed rows
                    k, v = torch.cat([k, v], 2).split(kv, 2)
                options = {
                    "is_causal": causal, "zigzag": zigzag, "algorithm": algorithm,
                    "seq_lens": local if packed else None,
                    "backend": shared.choice(["cudnn", "flash"]) if on_gpu else None,
                }  # fmt: skip
                leaves = [x.detach().requires_grad_() for x in (q, k, v)]
                with mock.patch.object(sequence_parallel, "sp_ag_attention", sp_ag_attention.fn):
                    out = ag_attention(*leaves, ctx, **options)
                    out.backward(grad)
                reference = [x.float().requires_grad_() for x in whole[:3]]
                want = whole_attention(*reference, lengths, causal)
                (want * whole[3].float()).sum().backward()
                assert_allclose(
                    out.detach().float(), want[:, mine].detach(), rtol=limit, atol=limit
                )
                for leaf, x in zip(leaves, reference, strict=True):
                    assert leaf.grad is not None
                    assert x.grad is not None
                    gradient, expected = leaf.grad.float(), x.grad[:, mine]
                    assert_allclose(gradient, expected, rtol=3 * limit, atol=3 * limit)
                count += 1
            ctx.check()
    return count


def checked() -> int:
    """Call the op under the checks for races and bounds."""
    active = checks_of(knobs.debug.get())
    with checking(*(check for check in ("race", "bounds") if check not in active)):
        return random_calls(5, 1)
