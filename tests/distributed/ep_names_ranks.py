"""Calls of Triton-distributed's expert-parallel scripts, in their order, on every rank."""

from __future__ import annotations

import argparse
import math
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ep_ranks import gathered
from tests.layers.ep_ranks import of_one_process
from tests.layers.functional_ranks import drawn, same
from triton_dist.errors import ContextFinalized, InvalidArgument
from triton_dist.function.nvidia.common import (
    current_tensor_parallel,
    deinit_triton_dist_ep_op,
    init_triton_dist_ep_op,
)
from triton_dist.function.nvidia.ep_moe_fused import TritonDistFusedEpMoeFunction
from triton_dist.kernels.nvidia import (
    all_to_all_post_process,
    create_all_to_all_context,
    create_ep_context,
    fast_all_to_all,
)
from triton_dist.kernels.nvidia.all_to_all_vdev_2d_offset import (
    all_to_all_v_offset_op,
    all_to_all_v_offset_op_v2,
    all_to_all_vdev_2d,
    all_to_all_vdev_2d_offset,
    create_context,
)
from triton_dist.layers.nvidia import EPAll2AllLayer, EPLowLatencyAllToAllLayer
from triton_dist.runtime.device import current_device
from triton_dist.test.nvidia import test_ep_a2a
from triton_dist.test.nvidia.ep_a2a_utils import (
    dequant_fp8_bf16,
    torch_ll_combine,
    torch_ll_dispatch,
)
from triton_dist.utils import init_nvshmem_by_torch_process_group


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(current_device().torch_device)


def random_ids(rng: random.Random, tokens: int, experts: int, topk: int) -> torch.Tensor:
    rows = [rng.sample(range(experts), topk) for _ in range(tokens)]
    return on_device(torch.tensor(rows, dtype=torch.int32).view(tokens, topk))


def ends_of(splits: torch.Tensor) -> torch.Tensor:
    return torch.cat([splits.new_zeros(1), splits.cumsum(0)]).int()


def arrivals(rows: torch.Tensor, ids: torch.Tensor, by_rank: bool = False) -> torch.Tensor:
    """Return the rows that this rank receives, from the rows and ids of all ranks.

    Sorted by expert, source rank, token and choice; with ``by_rank``, by source rank first.
    """
    rank, size, topk = dist.get_rank(), dist.get_world_size(), ids.shape[1]
    local = EXPERTS // size
    found = []
    for source, (each, chosen) in enumerate(gathered((rows.cpu(), ids.cpu()))):
        for route, expert in enumerate(chosen.flatten().tolist()):
            if 0 <= expert < EXPERTS and expert // local == rank:
                keys = (source, expert) if by_rank else (expert, source)
                found.append((*keys, route, each[route // topk]))
    found.sort(key=lambda entry: entry[:3])
    return torch.stack([entry[3] for entry in found]) if found else rows[:0].cpu()


EXPERTS, HIDDEN, TOPK = 12, 32, 2


def sorted_rows(dtype: torch.dtype, has_scale: bool) -> int:
    """Send rows that are sorted by expert and return them, as test_all_to_all.py does."""
    rank, size, max_m = dist.get_rank(), dist.get_world_size(), 5 * TOPK
    torch.manual_seed(rank)
    rng, received = random.Random(rank), 0
    # First, all ranks choose experts of rank 0, which then returns more than max_m rows.
    ctx = create_all_to_all_context(
        max_m, HIDDEN, rank, EXPERTS, size, EXPERTS // size, dtype, torch.float32
    )
    for tokens in (5, rng.randint(0, 4)):
        ids = random_ids(rng, tokens, EXPERTS // size if tokens == 5 else EXPERTS, TOPK)
        x = on_device(torch.randint(0, 9, (tokens, HIDDEN))).to(dtype)
        scale = on_device(torch.rand(tokens))
        order = ids.flatten().argsort(stable=True)
        rows, scales = x[order // TOPK], scale[order // TOPK]
        splits = torch.bincount(ids.flatten(), minlength=EXPERTS)
        given = scales if has_scale else None
        arrived = fast_all_to_all(ctx, rows, ends_of(splits), given)
        out, out_scale = all_to_all_post_process(ctx, *arrived)
        assert torch.equal(out.cpu(), arrivals(x, ids, by_rank=True))
        if has_scale:
            want = arrivals(scale[:, None], ids, by_rank=True)
            assert torch.equal(out_scale.cpu(), want.flatten())
        else:
            assert out_scale is None
        received = max(received, len(out))
        back = fast_all_to_all(ctx, out, ends_of(arrived[0]), out_scale)
        assert torch.equal(back[0], splits.int())
        again, scale_again = all_to_all_post_process(ctx, *back)
        assert torch.equal(again, rows)
        if has_scale:
            assert torch.equal(scale_again, scales)
    ctx.finalize()
    return received - max_m


def layer(has_weight: bool) -> None:
    """Dispatch and combine many tokens, as test_ep_a2a.py does."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    torch.manual_seed(rank)
    init_nvshmem_by_torch_process_group(group)
    rng, dtype = random.Random(rank), torch.bfloat16
    arguments = (group, 6, HIDDEN, TOPK, rank, EXPERTS, size, size, dtype)
    with pytest.raises(InvalidArgument, match="use_aot is True, expected False: kernels are"):
        EPAll2AllLayer(*arguments, use_aot=True)
    op = EPAll2AllLayer(*arguments, torch.bfloat16, num_sm=4, enable_local_combine=True)
    for tokens in (6, rng.randint(0, 5)):
        ids = random_ids(rng, tokens, EXPERTS, TOPK)
        ids[torch.rand(ids.shape) < 0.3] = EXPERTS  # dropped
        x = on_device(torch.rand(tokens, HIDDEN)).to(dtype)
        weight = on_device(torch.rand(tokens, TOPK)).to(torch.bfloat16) if has_weight else None
        out, out_weight, layout = op.dispatch(x, ids, weight, full_scatter_indices=None)
        assert torch.equal(out.cpu(), arrivals(x, ids))
        rows, scales = torch_ll_dispatch(group, x, ids, EXPERTS, 128, False)
        assert scales is None
        assert torch.equal(rows, out)
        y, ones = out, torch.ones(tokens, TOPK, dtype=dtype, device=x.device)
        if has_weight:
            want = arrivals(weight.float().view(-1, 1), ids.view(-1, 1)).flatten()
            assert out_weight.dtype == torch.bfloat16
            assert torch.equal(out_weight.float().cpu(), want)
            y = (out_weight[:, None] * out).to(dtype)
        else:
            assert out_weight is None
        result = op.combine(y, layout)
        expected = torch_ll_combine(group, y, ids, ones, EXPERTS)
        torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2)
        if not has_weight:
            chosen = (ids < EXPERTS).sum(1, keepdim=True)
            torch.testing.assert_close(result, chosen * x, rtol=1e-2, atol=1e-2)
    op.finalize()


def low_latency_layer(quantise: bool) -> None:
    """Dispatch and combine few tokens, as test_ep_ll_a2a.py does, bit for bit."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    torch.manual_seed(rank)
    rng, hidden, max_m = random.Random(rank), 256, 4
    op = EPLowLatencyAllToAllLayer(
        max_m, hidden, TOPK, online_quant_fp8=quantise, rank=rank, num_experts=EXPERTS,
        local_world_size=size, world_size=size, dtype=torch.bfloat16, enable_profiling=True,
    )  # fmt: skip
    for tokens in (4, rng.randint(1, 4)):
        ids = random_ids(rng, tokens, EXPERTS, TOPK)
        x = on_device(torch.rand(tokens, hidden)).to(torch.bfloat16)
        weight = on_device(torch.rand(tokens, TOPK)).softmax(1)
        rows, scales = torch_ll_dispatch(group, x, ids, EXPERTS, 128, quantise)
        y = dequant_fp8_bf16(rows, scales)
        expected = torch_ll_combine(group, y, ids, weight, EXPERTS)
        out, out_scales, counts, meta = op.dispatch(x, None, ids)
        assert out.shape == (EXPERTS // size, size * max_m, hidden)
        assert out.dtype == (torch.float8_e4m3fn if quantise else torch.bfloat16)
        packed = torch.cat([own[:count] for own, count in zip(out, counts.tolist(), strict=True)])
        assert torch.equal(packed.view(torch.uint8), rows.view(torch.uint8))
        torch.testing.assert_close(y.cpu(), arrivals(x, ids), rtol=0.07, atol=1e-3)
        result = op.combine(dequant_fp8_bf16(out, out_scales), ids, weight, meta)
        assert torch.equal(result, expected)
        want = x * weight.sum(1, keepdim=True)
        torch.testing.assert_close(result.float(), want, rtol=0.08, atol=1e-2)
    op.dump_dispatch_trace()
    op.dump_combine_trace()
    op.finalize()


def expected_exchange(
    rows: torch.Tensor, splits: torch.Tensor, offsets: torch.Tensor, align: int, to_experts: bool
) -> tuple[list[int], list[int], dict[int, torch.Tensor]]:
    """Return splits, offsets and rows at these offsets of this rank's output."""
    rank, sources = dist.get_rank(), gathered((rows.cpu(), splits.cpu(), offsets.cpu()))
    size, ne = len(sources), splits.numel() // len(sources)
    all_splits, all_offsets, chunks, at = [], [], {}, 0
    for row in range(ne if to_experts else size):
        begin = at
        for column in range(size if to_experts else ne):
            expert, source = (row, column) if to_experts else (column, row)
            data, its_splits, its_offsets = sources[source]
            where = (rank, expert) if to_experts else (expert, rank)
            first, number = int(its_offsets[where]), int(its_splits[where])
            all_splits.append(number)
            all_offsets.append(at)
            chunks[at] = data[first : first + number]
            at += number
        if align > 1:
            at = begin + max(align, math.ceil((at - begin) / align) * align)
    return all_splits, all_offsets, chunks


def splits_in_2d(dtype: torch.dtype) -> None:
    """Exchange rows in both directions, as test_all_to_all_vdev_2d_offset.py does."""
    rank, size, ne, k, length = dist.get_rank(), dist.get_world_size(), 3, 4, 6
    torch.manual_seed(rank)
    ctx = create_context(rank, size, ne, k, length, dtype, use_v2_kernel=False)
    output = on_device(torch.empty(ctx.max_num_token, length, dtype=dtype))
    device = output.device
    for to_experts, align, gaps in ((True, 1, 0), (True, 8, 0), (False, 1, 3)):
        shape = (size, ne) if to_experts else (ne, size)
        splits = torch.randint(0, k, shape, dtype=torch.int32, device=device)
        splits[(slice(None), 0) if to_experts else 0] = 0  # alignment reserves rows all the same
        spaces = splits + torch.randint(0, gaps + 1, shape, dtype=torch.int32, device=device)
        offsets = (spaces.flatten().cumsum(0) - spaces.flatten()).view(shape).int()
        rows = torch.randint(-9, 9, (int(spaces.sum()), length), device=device).to(dtype)
        golden = expected_exchange(rows, splits, offsets, align, to_experts)
        result, number = all_to_all_v_offset_op(
            ctx, input=rows, output=output, in_splits=splits, in_offset=offsets,
            copy_to_symm_buffer=True, grid_size=1, major_align=align, rank_in_row=to_experts,
            has_input_offset=gaps > 0,
        )  # fmt: skip
        assert result is output
        found = ctx.combine_splits_offsets if to_experts else ctx.dispatch_splits_offsets
        assert found.view(2, -1).tolist() == [*golden[:2]]
        assert int(number) == golden[1][-1] + golden[0][-1]
        check_chunks(output, golden[2])
        in_place, again = all_to_all_v_offset_op(
            ctx, rank_in_row=to_experts, copy_to_symm_buffer=False, major_align=align,
            has_input_offset=gaps > 0,
        )  # fmt: skip
        assert int(number) == int(again) == len(in_place)
        check_chunks(in_place, golden[2])
        if align == 1:
            arguments: tuple[Any, ...] = (rows, output.zero_(), splits)
            if gaps:
                all_to_all_vdev_2d_offset(ctx, *arguments, offsets)
            elif to_experts:
                all_to_all_vdev_2d(ctx, *arguments)
            check_chunks(output, golden[2])
        if not gaps and align == 1:
            sliced, sent, arrived = all_to_all_v_offset_op_v2(
                ctx, rank_in_row=to_experts, input=rows, output=output.zero_(), in_splits=splits,
                out_splits=found[: ctx.nsplits], return_stat=True, return_tensor_sliced=True,
            )  # fmt: skip
            assert (sent, arrived) == (len(rows), sum(golden[0])) == (len(rows), len(sliced))
            check_chunks(output, golden[2])
    with pytest.raises(InvalidArgument, match="in_splits is None, expected a tensor"):
        all_to_all_v_offset_op(ctx, True, rows, output)
    ctx.dump_profiler_trace(info="")
    ctx.finalize()


def check_chunks(out: torch.Tensor, chunks: dict[int, torch.Tensor]) -> None:
    for first, rows in chunks.items():
        assert torch.equal(out[first : first + len(rows)].cpu(), rows)


def fused_function() -> None:
    """Call the autograd function, as test_ep_moe_fused.py does, with different token counts."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    ffn, hidden, rng = 8, 16, random.Random(0)
    with pytest.raises(ContextFinalized, match="TensorParallel of init_triton_dist_ep_op was"):
        current_tensor_parallel()
    init_triton_dist_ep_op(
        group, 9, hidden, TOPK, rank, EXPERTS, size, dtype=torch.float32,
        weight_dtype=torch.float32, num_sm=64, num_buffers=1, capacity=4.0,
    )  # fmt: skip
    counts = [7, 0, 5][:size]
    ids = random_ids(rng, sum(counts), EXPERTS, TOPK)
    ids[1::3, 0] = EXPERTS  # dropped
    whole = [
        drawn(1, len(ids), TOPK), drawn(2, len(ids), hidden), drawn(3, EXPERTS, ffn, hidden),
        drawn(4, EXPERTS, ffn, hidden), drawn(5, EXPERTS, hidden, ffn),
    ]  # fmt: skip
    tokens = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    own = slice(rank * EXPERTS // size, (rank + 1) * EXPERTS // size)
    parts = [tokens, tokens, own, own, own]
    leaves = [each.clone().requires_grad_() for each in whole]
    both = torch.cat(leaves[2:4], 1)
    golden = of_one_process(
        leaves[1], torch.where(ids < EXPERTS, ids, -1), leaves[0], both.mT, leaves[4].mT
    )
    grad = drawn(6, *golden.shape)
    golden.backward(grad)
    expected = [each.grad[part] for each, part in zip(leaves, parts, strict=True)]
    for concatenates in (False, True):
        local = [each[part].clone() for each, part in zip(whole, parts, strict=True)]
        if concatenates:
            local[2:4] = [torch.cat(local[2:4], 1)]
        local = [each.requires_grad_() for each in local]
        weights, x, *fc1, fc2 = local
        fc1_1, fc1_2 = fc1 if len(fc1) == 2 else (fc1[0], None)
        out = TritonDistFusedEpMoeFunction.apply(
            EXPERTS, weights, ids[tokens], x, fc1_1, fc1_2, fc2, group
        )
        out.backward(grad[tokens])
        found = [each.grad for each in local]
        if concatenates:
            found[2:3] = found[2].chunk(2, 1)
        same([out.detach(), *found], [golden.detach()[tokens], *expected], 1e-3)
    deinit_triton_dist_ep_op()
    deinit_triton_dist_ep_op()


def own_script(quantise: bool) -> None:
    """Run a round of our own scripts."""
    rank, size = dist.get_rank(), dist.get_world_size()
    args = argparse.Namespace(
        autotune=False, case="perf", drop_ratio=0.3, iters=1, warmup=0, profile=False
    )
    with create_ep_context(rank, size, size, 4, 128, 8, 2, torch.bfloat16) as ctx:
        test_ep_a2a.run_round(args, ctx, quantise, 4 - rank, is_first=True)
