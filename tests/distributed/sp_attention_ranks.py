"""What every rank does in the tests of AllGather-attention, on CPU ranks and on GPUs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.nvidia import (
    create_sp_ag_attention_context,
    create_sp_ag_attention_context_intra_node,
    create_ulysses_context,
    fused_sp_ag_attn_intra_node,
    sp_ag_attention,
    ulysses_post_attn,
    ulysses_pre_attn,
)
from triton_dist.kernels.nvidia.sp_ulysess_o_all2all_gemm import SpUlysessOAll2AllGemmKernel
from triton_dist.kernels.nvidia.sp_ulysess_qkv_gemm_all2all import SpUlysessQKVGemmAll2AllKernel
from triton_dist.layers.nvidia import SP_Attn, UlyssesSPAllToAllLayer, sequence_parallel
from triton_dist.layers.nvidia.sequence_parallel import ag_attention
from triton_dist.runtime.device import current_device
from triton_dist.testing import assert_allclose
from triton_dist.testing.assertions import assert_bitwise_equal
from triton_dist.testing.opinfo.sequence_parallel import (
    heads_by_rank,
    local_tokens,
    token_positions,
)
from triton_dist.testing.timing import capture_graph


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
        kv, scale = (8 * kv, 64) if on_gpu else (kv, 1)
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
                mine = token_positions(lengths, rank, size, causal and zigzag)
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


def layer(exchange_ranks: int) -> None:
    """Compare ``SP_Attn`` on a mesh, and its gradients, with one process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // exchange_ranks, exchange_ranks))
    length, heads, kv, dim = 4 * size, 4, 2, 8
    with pytest.raises(InvalidArgument, match=r"mesh\.ndim"):
        SP_Attn(init_device_mesh("cpu", (size,)), 4, 4, 2, 8)
    op = SP_Attn(mesh, length // size, heads, kv, dim, torch.float32)
    mine = op.tokens(length)
    everyone: list[list[int]] = [[] for _ in range(size)]
    dist.all_gather_object(everyone, mine.tolist())
    assert sorted(token for each in everyone for token in each) == list(range(length))
    with pytest.raises(InvalidArgument, match="length is"):
        op.tokens(length + 1)
    torch.manual_seed(0)
    whole = [torch.randn(1, length, n, dim).requires_grad_() for n in (heads, kv, kv)]
    weight = torch.randn(1, length, heads, dim)
    own = [x.detach()[:, mine].requires_grad_() for x in whole]
    out = op(*own)
    (out * weight[:, mine]).sum().backward()
    want = whole_attention(*whole, [length], True)
    (want * weight).sum().backward()
    assert_allclose(out.detach(), want.detach()[:, mine], rtol=1e-4, atol=1e-4)
    for x, reference in zip(own, whole, strict=True):
        assert x.grad is not None
        assert reference.grad is not None
        assert_allclose(x.grad, reference.grad[:, mine], rtol=1e-4, atol=1e-4)
    op.finalize()
    names = UlyssesSPAllToAllLayer(
        None, 1, max_seq=length, q_nheads=heads, kv_nheads=kv, k_head_dim=dim, v_head_dim=dim,
        group_size=2, dtype=torch.float32, local_world_size=size,
    )  # fmt: skip
    parts = [local_tokens(x.detach(), [4] * size, rank) for x in whole]
    for skip in (False, True):
        found = names.pre_attn_qkv_pack_a2a(*parts, skip_q_a2a=skip)
        assert (found[0] is None) is skip
        for result, x in list(zip(found, whole, strict=True))[skip:]:
            assert result is not None
            assert torch.equal(result, heads_by_rank(x.detach(), size)[rank])
    rows = 4 * dim * 4 * (size - 1)
    heads_sent = heads // size + 2 * max(1, kv // size)
    assert names.get_comm_nbytes(*parts) == (0, rows * heads_sent, 0, rows * heads_sent)
    names.finalize()


def script_names() -> None:
    """Make the calls of Triton-distributed's scripts, and compare with one process."""
    rank, size, dim, hidden = dist.get_rank(), dist.get_world_size(), 8, 12
    heads, lengths, dtype = (4, 2, 2), [3, 1], torch.float32
    seq_lens, tokens = torch.tensor(lengths, dtype=torch.int32), slice(3 * rank, 3 + rank)
    torch.manual_seed(0)
    x, weight = torch.randn(2, 4, hidden), torch.randn(sum(heads) * dim, hidden)
    bias, out_weight = torch.randn(len(weight)), torch.randn(10, heads[0] * dim)
    qkv = torch.nn.functional.linear(x, weight, bias).unflatten(2, (-1, dim))
    want = [heads_by_rank(each, size)[rank] for each in qkv.split(heads, 2)]
    for name, nnodes, gqa in (("nnodes", 2, 2), ("gqa", 1, -2)):
        with pytest.raises(InvalidArgument, match=name):
            SpUlysessQKVGemmAll2AllKernel(None, nnodes, size, 2, 8, hidden, dim, 64, gqa=gqa)
    op = SpUlysessQKVGemmAll2AllKernel(
        dist.group.WORLD, 1, size, 2, 8, hidden, hidden, dim, len(weight), input_dtype=dtype, gqa=2
    )
    outputs = [torch.empty_like(each) for each in want]
    local = qkv[:, tokens].contiguous()
    op.get_input_comm_buf(local, 1).copy_(local)
    assert torch.equal(op.get_input_comm_buf(local, 1), local)
    op.sp_group_barrier_all_intra_node()
    for found in (
        op.forward(x[:, tokens], weight, seq_lens, bias, outputs), outputs,
        op.qkv_pack_a2a(local, seq_lens, num_comm_sms=4),
        op.qkv_pack_a2a_no_cpy(torch.empty_like(local), seq_lens, comm_buf_idx=1),
        [op.pre_attn_a2a(each, seq_lens) for each in local.split(heads, 2)],
    ):  # fmt: skip
        for each, expected in zip(found, want, strict=True):
            assert_allclose(each, expected, rtol=1e-5, atol=1e-5)
    op.get_input_comm_buf(local[:, :, :4], 0).copy_(local[:, :, :4])
    other = torch.zeros_like(local[:, :, :4])
    found = op.pre_attn_a2a(other, seq_lens, is_input_in_comm_buf=True, comm_buf_idx=0)
    for each in found, op.pre_attn_a2a_no_cpy(other, seq_lens):
        assert_allclose(each, want[0], rtol=1e-5, atol=1e-5)
    op.finalize()

    with pytest.raises(InvalidArgument, match="a2a_only"):
        SpUlysessOAll2AllGemmKernel(None, 1, size, 2, 4, 8, dim, 1, dtype, a2a_only=False)
    o_op = SpUlysessOAll2AllGemmKernel(None, 1, size, 2, heads[0], 8, dim, 1, dtype)
    o, rows = want[0].contiguous(), qkv[:, tokens, : heads[0]].flatten(2)
    added = torch.randn(rows.shape[0] * rows.shape[1], 10)
    product = rows @ out_weight.T + added.view(2, -1, 10)
    assert_allclose(o_op.post_attn_a2a_no_cpy(o, seq_lens), rows, rtol=1e-5, atol=1e-5)
    (found,) = o_op.forward(o, out_weight, seq_lens, added)
    assert_allclose(found, product, rtol=1e-4, atol=1e-4)
    results = torch.empty_like(product), torch.empty_like(rows)
    o_op.forward(o, out_weight.T, seq_lens, added, *results, transpose_weight=True)
    for each, expected in zip(results, (product, rows), strict=True):
        assert_allclose(each, expected, rtol=1e-4, atol=1e-4)
    o_op.finalize()

    torch.manual_seed(1)
    local = [4, 2]  # tokens of each sequence on a rank
    whole = [torch.randn(1, size * sum(local), n, dim) for n in heads]
    mine = token_positions([size * n for n in local], rank, size, True)
    ctx = create_sp_ag_attention_context_intra_node(
        2, heads[0], heads[1], 4 * size, 4, dim, dtype, dtype, rank, size, "cpu"
    )
    ends, shards = torch.tensor([0, 4, 6], dtype=torch.int32), [x[0, mine] for x in whole]
    out = ctx.attn_output_buffer[: len(mine)]
    sizes = 4, 4 * size, rank, size, True, True
    with pytest.raises(InvalidArgument, match=r"cu_seqlens_k is \[0, 8, 13\], expected"):
        fused_sp_ag_attn_intra_node(ctx, *shards, out, ends, torch.tensor([0, 8, 13]), *sizes)
    fused_sp_ag_attn_intra_node(ctx, *shards, out, ends, size * ends, *sizes)
    expected = whole_attention(*whole, [size * n for n in local], True)[0, mine]
    assert_allclose(out, expected, rtol=1e-4, atol=1e-4)
    ctx.finalize()


def replayed(rounds: int) -> int:
    """Replay graphs of the three ops with new operands; return the number of checked results."""
    rank, size, device = dist.get_rank(), dist.get_world_size(), current_device()
    on_gpu = device.name == "cuda"
    dtype, tokens, dim = (torch.bfloat16, 512, 64) if on_gpu else (torch.float32, 4, 8)
    heads, count = 2 * size, 0
    x = torch.empty(3, 1, tokens, heads, dim, dtype=dtype, device=device.torch_device)
    q, k, v = x
    with (
        create_ulysses_context(
            rank, size, size, size * tokens, heads, heads, dim, dtype
        ) as exchange,
        create_sp_ag_attention_context(rank, size, size, tokens, heads, dim, dtype) as gather,
    ):  # fmt: skip
        results: list[torch.Tensor] = []

        def call(**options: str) -> list[torch.Tensor]:
            whole = ulysses_pre_attn.fn(q, k, v, exchange, **options)
            (back,) = ulysses_post_attn.fn(whole[0], exchange, **options)
            options.pop("algorithm", None)
            return [*whole, back, sp_ag_attention.fn(q, k, v, gather, **options)[0]]

        graphs = []
        for _ in range(2):
            replay = capture_graph(lambda: results.__setitem__(slice(None), call(algorithm="push")))
            graphs.append((replay, list(results)))
        for number in range(rounds):
            x.copy_(
                torch.randn(x.shape, generator=torch.Generator().manual_seed(7 * number + rank))
            )
            for replay, out in graphs:
                replay()
                device.synchronize()
                found = [each.clone() for each in (out if on_gpu else results)]
                dist.barrier()
                assert_bitwise_equal(found[3], q)
                for result, expected in zip(found, call(algorithm="collective"), strict=True):
                    assert_bitwise_equal(result, expected)
                    count += 1
        exchange.check()
        gather.check()
    return count
