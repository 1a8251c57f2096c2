"""All-to-all of rows that are sorted by expert, under the names of Triton-distributed's scripts.

``ep_dispatch`` sends the rows, with one expert per row. New programs should call ``ep_dispatch``.
"""

from __future__ import annotations

import torch

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.context import DTYPES
from triton_dist.kernels.nvidia.expert_parallel import Received, create_ep_context, ep_dispatch


class RowContext:
    """Context that sends each row to one expert. Creation is collective over the world.

    Rows of a dtype that ``ep_dispatch`` does not support are sent as float16, without converting
    their bits.

    Args:
        max_rows: maximum number of rows that a rank sends in a call.
        capacity: maximum number of rows that a rank sends to one rank in a call.
        hidden: elements of a row.
    """

    def __init__(
        self, rank: int, world_size: int, max_rows: int, capacity: int, hidden: int,
        num_experts: int, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.wire_dtype = dtype if dtype in DTYPES else torch.float16
        wire_hidden, rest = divmod(hidden * dtype.itemsize, self.wire_dtype.itemsize)
        if rest:
            raise InvalidArgument("all-to-all", "hidden", hidden, f"an even number for {dtype}")
        self.ep = create_ep_context(
            rank, world_size, world_size, max_rows, wire_hidden, num_experts, 1, self.wire_dtype,
            capacity=capacity, can_combine=False,
        )  # fmt: skip

    def send(
        self, rows: torch.Tensor, experts: torch.Tensor, scales: torch.Tensor | None = None
    ) -> Received:
        """Send each row, and its scale if passed, to the rank of its expert.

        Rows with expert -1 are not sent.
        """
        weights = None if scales is None else scales[:, None]
        return ep_dispatch(rows.view(self.wire_dtype), experts[:, None], self.ep, weights)

    def finalize(self) -> None:
        """Free the memory; idempotent. Collective."""
        self.ep.finalize()


def chunk_of_rows(splits: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    """Return, for rows 0 to ``size`` - 1: (row, its chunk, index in the chunk, is in a chunk).

    Chunk i has ``splits[i]`` consecutive rows.
    """
    ends = splits.cumsum(0)
    row = torch.arange(size, device=splits.device)
    chunk = torch.bucketize(row, ends, right=True).clamp(max=len(splits) - 1)
    return row, chunk, row - (ends - splits)[chunk], row < ends[-1]


class AllToAllContext(RowContext):
    """Context of ``fast_all_to_all``. Creation is collective over the world.

    Args:
        max_m: maximum number of rows that a rank sends to one rank.
        hidden: elements of a row, which must have an even number of bytes.
        rank, WORLD_SIZE: this rank, and the number of ranks, all on one host.
        num_tot_experts: experts of all ranks, a multiple of ``WORLD_SIZE``.
        experts_per_rank: ``num_tot_experts / WORLD_SIZE``.
        dtype, scale_dtype: dtypes of rows and of scales; scales are fp32, bf16 or fp16.
    """

    def __init__(
        self, max_m: int, hidden: int, rank: int, num_tot_experts: int, WORLD_SIZE: int,
        experts_per_rank: int, dtype: torch.dtype = torch.bfloat16,
        scale_dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        # A rank may receive max_m rows from every rank, and must be able to send them back.
        rows = WORLD_SIZE * max_m
        super().__init__(rank, WORLD_SIZE, rows, max_m, hidden, num_tot_experts, dtype)
        self.max_m, self.num_slots, self.num_tot_experts = max_m, rows, num_tot_experts
        self.dtype, self.scale_dtype = dtype, scale_dtype


create_all_to_all_context = AllToAllContext


def fast_all_to_all(
    ctx: AllToAllContext,
    send_tensor: torch.Tensor,
    send_split_cumsum: torch.Tensor,
    send_scale: torch.Tensor | None,
) -> list[torch.Tensor | None]:
    """Send rows that are sorted by expert to the ranks of the experts. Tuned.

    The call does not wait for the device.

    Args:
        ctx: context of ``create_all_to_all_context``.
        send_tensor: [rows, hidden].
        send_split_cumsum: [num_tot_experts + 1], 0 and the end of the rows of each expert.
        send_scale: [rows], a scale of each row, or ``None``.

    Returns:
        Three values. int32 [num_tot_experts]: number of received rows for each (source rank, local
        expert). [WORLD_SIZE * max_m, hidden]: received rows; rows of rank r begin at row r * max_m;
        valid until the next call. [WORLD_SIZE * max_m]: scales of these rows, or ``None``.
    """
    _, expert, _, is_used = chunk_of_rows(send_split_cumsum.diff(), len(send_tensor))
    expert = torch.where(is_used, expert, -1).int()
    received = ctx.send(send_tensor, expert, send_scale)
    scales = None
    if received.weights is not None:
        rows = received.row_of_position
        is_used = torch.arange(len(rows), device=rows.device) < received.ends[-1]
        # Unused positions write to one additional element, which is removed below.
        scales = received.weights.new_zeros(ctx.num_slots + 1)
        scales[torch.where(is_used, rows, ctx.num_slots)] = received.weights
        scales = scales[:-1].to(ctx.scale_dtype)
    return [received.counts.t().flatten(), received.rows.view(ctx.dtype), scales]


def all_to_all_post_process(
    ctx: AllToAllContext,
    input_splits: torch.Tensor,
    recv_buffer: torch.Tensor,
    scale_buffer: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the rows and scales of ``fast_all_to_all`` without gaps. Waits for the device."""
    numbers = input_splits.view(ctx.ep.num_ranks, -1).sum(1).tolist()

    def packed(buffer: torch.Tensor) -> torch.Tensor:
        parts = zip(buffer.split(ctx.max_m), numbers, strict=True)
        return torch.cat([part[:number] for part, number in parts])

    return packed(recv_buffer), None if scale_buffer is None else packed(scale_buffer)
