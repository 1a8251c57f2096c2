"""References for expert-parallel dispatch and combine, under Triton-distributed's names."""

from __future__ import annotations

import torch
import torch.distributed as dist

from triton_dist.kernels.common.gemm.quantise import quantise_launch


def quant_bf16_fp8(tensor: torch.Tensor, gsize: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows [M, K] to ``float8_e4m3fn``; return them and fp32 scales [M, K / 128]."""
    assert gsize == 128, gsize
    out = torch.empty_like(tensor, dtype=torch.float8_e4m3fn)
    scale = tensor.new_empty((-(-tensor.shape[1] // gsize), len(tensor)), dtype=torch.float32).T
    if len(tensor):
        quantise_launch(tensor, out, scale, False).run()
    return out, scale.reshape(-1).view(len(tensor), -1)  # contiguous, even with one column


def dequant_fp8_bf16(q_tensor: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Return fp8 rows multiplied by their scales, in bf16; without scales, return ``q_tensor``."""
    if scales is None:
        return q_tensor
    values: torch.Tensor = q_tensor.float().unflatten(-1, (-1, 128)) * scales[..., None]
    return values.flatten(-2).bfloat16()


class _Exchange:
    """All-to-all of rows, one for each choice of an expert. The receiving rank gets the rows sorted
    by expert, then by source rank."""

    def __init__(self, group: dist.ProcessGroup, ids: torch.Tensor, num_experts: int) -> None:
        self.group, flat = group, ids.flatten()
        order = flat.argsort(stable=True)
        self.order = order[(flat[order] >= 0) & (flat[order] < num_experts)]
        counts = torch.bincount(flat[self.order], minlength=num_experts)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        ranks = dist.get_world_size(group)
        self.sent, self.arrived = torch.stack([counts, arriving]).view(2, ranks, -1).sum(2).tolist()
        own = torch.arange(num_experts // ranks, device=ids.device).repeat(ranks)
        self.permutation = own.repeat_interleave(arriving).argsort(stable=True)

    def send(self, rows: torch.Tensor) -> torch.Tensor:
        out = self._all_to_all(rows, self.arrived, self.sent)
        return out.view(torch.uint8)[self.permutation].view(rows.dtype)

    def send_back(self, rows: torch.Tensor) -> torch.Tensor:
        sorted_by_rank = torch.empty_like(rows)
        sorted_by_rank[self.permutation] = rows
        return self._all_to_all(sorted_by_rank, self.sent, self.arrived)

    def _all_to_all(
        self, rows: torch.Tensor, out_splits: list[int], splits: list[int]
    ) -> torch.Tensor:
        out = rows.new_empty(sum(out_splits), rows.shape[1])
        as_bytes = out.view(torch.uint8), rows.view(torch.uint8)
        dist.all_to_all_single(*as_bytes, out_splits, splits, group=self.group)
        return out


def torch_ll_dispatch(
    EP_GROUP: dist.ProcessGroup,
    input: torch.Tensor,
    exp_indices: torch.Tensor,
    num_experts: int,
    quant_group_size: int = 128,
    online_quant_fp8: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Dispatch by PyTorch's all-to-all. Return the received rows, and their scales or ``None``.
    There is a row for each choice of one of this rank's experts, sorted by expert and source rank.
    Ids outside 0 to ``num_experts - 1`` are masked. Collective; synchronises."""
    exchange = _Exchange(EP_GROUP, exp_indices, num_experts)
    rows, scales = input[exchange.order // exp_indices.shape[1]], None
    if online_quant_fp8:
        rows, scales = quant_bf16_fp8(rows, quant_group_size)
    return exchange.send(rows), None if scales is None else exchange.send(scales)


def torch_ll_combine(
    EP_GROUP: dist.ProcessGroup,
    input: torch.Tensor,
    exp_indices: torch.Tensor,
    weight: torch.Tensor,
    num_experts: int,
) -> torch.Tensor:
    """Combine by PyTorch's all-to-all. Return the weighted sum of the rows of each token.
    Collective; synchronises."""
    exchange = _Exchange(EP_GROUP, exp_indices, num_experts)
    rows = input.new_zeros(exp_indices.numel(), input.shape[1])
    rows[exchange.order] = exchange.send_back(input)
    rows_of_token: torch.Tensor = rows.unflatten(0, exp_indices.shape)
    return (rows_of_token * weight[..., None]).sum(1).to(input.dtype)
