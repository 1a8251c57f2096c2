"""Copy received rows to the result of a low-latency dispatch, which has gaps between experts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_dist._jit import jit
from triton_dist.kernels.nvidia.expert_parallel import Received
from triton_dist.runtime.device import current_device
from triton_dist.runtime.launch import Launch


@jit(do_not_specialize=["max_tokens"])
def kernel_pack(
    rows_ptr, scales_ptr, row_of_position_ptr, ends_ptr, out_ptr, out_scales_ptr, tokens_ptr,
    hidden, num_groups, max_tokens, capacity, EXPERTS: tl.constexpr, EXPERT_LANES: tl.constexpr,
    BLOCK: tl.constexpr, GROUP_LANES: tl.constexpr,
):  # fmt: skip
    """Copy rows, in order of experts, to out [EXPERTS, capacity, hidden]; leave gaps unwritten.

    Grid (programs,). Scales [EXPERTS, groups, capacity] and indices of tokens [EXPERTS, capacity].
    """
    expert = tl.arange(0, EXPERT_LANES)
    ends = tl.load(ends_ptr + expert, mask=expert < EXPERTS, other=2147483647)
    total = tl.load(ends_ptr + EXPERTS - 1)
    position = tl.program_id(0)
    while position < total:
        row = tl.load(row_of_position_ptr + position).to(tl.int64)
        ends_before = ends <= position
        owner_expert = tl.sum(ends_before.to(tl.int32), 0).to(tl.int64)
        row_in_expert = position - tl.max(tl.where(ends_before, ends, 0), 0)
        # A token that lists an expert twice may exceed the capacity.
        if row_in_expert < capacity:
            out_row = owner_expert * capacity + row_in_expert
            tl.store(tokens_ptr + out_row, (row % max_tokens).to(tl.int32))
            for first in range(0, hidden, BLOCK):
                column = first + tl.arange(0, BLOCK)
                x = tl.load(rows_ptr + row * hidden + column, mask=column < hidden)
                tl.store(out_ptr + out_row * hidden + column, x, mask=column < hidden)
            if scales_ptr is not None:
                group = tl.arange(0, GROUP_LANES)
                scale = tl.load(scales_ptr + row * num_groups + group, mask=group < num_groups)
                target = (
                    out_scales_ptr + (owner_expert * num_groups + group) * capacity + row_in_expert
                )
                tl.store(target, scale, mask=group < num_groups)
        position += tl.num_programs(0)


def pack_launch(
    received: Received, out: torch.Tensor, scales: torch.Tensor | None, tokens: torch.Tensor
) -> Launch:
    """Return the launch of ``kernel_pack``, which fills the results of a low-latency dispatch.

    Args:
        out: [local experts, capacity, hidden].
        scales: fp32 [local experts, hidden / 128, capacity], or ``None``.
        tokens: int32 [local experts, capacity], index of each row on its source.
    """
    experts, capacity, hidden = out.shape
    num_groups = 1 if scales is None else scales.shape[1]
    arguments = (
        received.rows, None if scales is None else received.scales, received.row_of_position,
        received.ends, out, scales, tokens, hidden, num_groups, received.max_tokens, capacity,
    )  # fmt: skip
    options = {
        "EXPERTS": experts, "EXPERT_LANES": triton.next_power_of_2(experts),
        "BLOCK": min(4096, triton.next_power_of_2(hidden)),
        "GROUP_LANES": triton.next_power_of_2(num_groups), "num_warps": 8,
    }  # fmt: skip
    return Launch(kernel_pack, (8 * current_device().num_sms,), arguments, options)
