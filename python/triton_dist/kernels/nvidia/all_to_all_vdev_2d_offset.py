"""All-to-all with 2D splits on the device, under the names of Triton-distributed's scripts.

A split is the number of rows of a chunk: the rows that one rank sends to one expert of one rank.
Splits are on the device. ``ep_dispatch`` sends the rows, with one expert per row, and a copy then
sorts them. A dispatch (``rank_in_row=True``) has splits [ranks, experts per rank] and sorts
received rows by expert. A combine (``rank_in_row=False``) has splits [experts per rank, ranks] and
sorts received rows by rank.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.nvidia.low_latency_all_to_all import RowContext, chunk_of_rows


class AllToAllContext(RowContext):
    """Context of the functions of this module. Creation is collective over the world.

    Args:
        rank, world_size: this rank, and the number of ranks, all on one host.
        ne: experts per rank.
        k: maximum of a split.
        token_len_elem, token_dtype: elements and dtype of a row, which must have an even number of
            bytes.
        overflow_factor: a rank receives at most ``overflow_factor``, rounded up, times
            ``max_token_num_per_rank`` rows; default: ``world_size``.
        max_token_num_per_rank: maximum number of rows that a rank dispatches in a call; default: k
            times the number of splits.
        use_v2_kernel: ignored; a context can be used with both functions.

    Attributes:
        max_num_token: maximum number of rows of inputs and outputs.
        nsplits: number of splits, world_size * ne.
        dispatch_splits_offsets, combine_splits_offsets: int32 [2 * nsplits], splits, then offsets.
            A dispatch reads ``dispatch_splits_offsets`` and writes ``combine_splits_offsets``; a
            combine does the opposite.
        dispatch_data, combine_data: [max_num_token * token_len_elem], the rows of these splits.
    """

    def __init__(
        self, rank: int, world_size: int, ne: int, k: int, token_len_elem: int,
        token_dtype: torch.dtype, overflow_factor: float | None = None,
        max_token_num_per_rank: int | None = None, use_v2_kernel: bool = False,
    ) -> None:  # fmt: skip
        self.world_size, self.ne, self.nsplits = world_size, ne, world_size * ne
        sent = max_token_num_per_rank or k * self.nsplits
        self.max_num_token = size = sent * math.ceil(overflow_factor or world_size)
        super().__init__(rank, world_size, size, sent, token_len_elem, self.nsplits, token_dtype)
        self.token_len_elem, device = token_len_elem, self.ep.device.torch_device
        splits = torch.zeros(2, 2 * self.nsplits, dtype=torch.int32, device=device)
        self.dispatch_splits_offsets, self.combine_splits_offsets = splits
        data = torch.empty(2, size * token_len_elem, dtype=token_dtype, device=device)
        self.dispatch_data, self.combine_data = data

    def dump_profiler_trace(self, info: str | None = None) -> None:
        """Do nothing; accepted for existing scripts. ``group_profile`` writes traces."""

    def exchange(
        self, rank_in_row: bool, rows: torch.Tensor, splits: torch.Tensor,
        offsets: torch.Tensor | None, align: int, out: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Fill ``out`` with the rows that arrive; return their splits and offsets, both 2D.

        Args:
            rows, out: [rows, token_len_elem].
            splits: [nsplits], number of rows of each chunk.
            offsets: [nsplits], first row of each chunk in ``rows``; ``None``: chunks have no gaps.
            align: in ``out``, the chunks of each row of the 2D splits begin at a multiple of this
                number of tensor rows. Gaps are filled with zeros.
        """
        expert = torch.arange(self.nsplits, device=rows.device)
        if not rank_in_row:
            expert = expert % self.world_size * self.ne + expert // self.world_size
        row, chunk, within, is_used = chunk_of_rows(splits, len(rows))
        if offsets is not None:
            row = torch.where(is_used, offsets[chunk] + within, 0)
            rows = rows.view(self.wire_dtype)[row]
        received = self.send(rows, torch.where(is_used, expert[chunk], -1).int())

        splits_out = received.counts if rank_in_row else received.counts.t()
        sizes = ((splits_out.sum(1) + align - 1) // align).clamp(min=int(align > 1)) * align
        offsets_out = (sizes.cumsum(0) - sizes)[:, None] + splits_out.cumsum(1) - splits_out
        # Positions of received rows are sorted by expert, then by rank.
        rows_in = received.row_of_position
        _, chunk, within, is_used = chunk_of_rows(received.counts.flatten(), len(rows_in))
        first = (offsets_out if rank_in_row else offsets_out.t()).flatten()[chunk]
        # Unused positions write to one additional element, which is removed below.
        target = torch.where(is_used, first + within, len(out)).clamp(max=len(out))
        rows_out = rows_in.new_full((len(out) + 1,), -1)
        rows_out[target] = rows_in
        total = (offsets_out[-1, -1:] + splits_out[-1, -1:]).int()
        received_in_out = replace(received, row_of_position=rows_out[:-1], ends=total)
        received_in_out.expanded(out.view(self.wire_dtype))
        return splits_out, offsets_out


create_context = AllToAllContext


def all_to_all_v_offset_op(
    ctx: AllToAllContext,
    rank_in_row: bool,
    input: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    in_splits: torch.Tensor | None = None,
    in_offset: torch.Tensor | None = None,
    copy_to_symm_buffer: bool = True,
    return_tensor: bool = True,
    major_align: int = 1,
    grid_size: int | None = None,
    has_input_offset: bool = False,
    profiling: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Exchange rows, and write the splits and offsets of the result to ``ctx``. Tuned.

    The call waits for the device, unless ``copy_to_symm_buffer`` and ``return_tensor`` are both
    ``False``.

    Args:
        ctx: context of ``create_context``.
        rank_in_row: ``True``: a dispatch with splits [ranks, experts]. ``False``: a combine with
            splits [experts, ranks].
        input, output: [at most max_num_token, token_len_elem].
        in_splits, in_offset: int32, number of rows and first row of each chunk of ``input``.
            ``in_offset`` is read if ``has_input_offset``; otherwise ``input`` has no gaps.
        copy_to_symm_buffer: ``False``: rows, splits and offsets are already in ``ctx``, and the
            result stays there.
        return_tensor: return the result.
        major_align: in the result, the chunks of each row of the 2D splits begin at a multiple of
            this number of tensor rows. If it is above 1, they occupy at least this number.
        grid_size, profiling: ignored; accepted for existing scripts.

    Returns:
        (result, its number of rows including gaps, as a tensor on the device). Without
        ``return_tensor``: ``(None, None)``.

    Raises:
        InvalidArgument: a tensor is missing or has another size.
    """
    sides = [
        (ctx.dispatch_splits_offsets, ctx.dispatch_data),
        (ctx.combine_splits_offsets, ctx.combine_data),
    ]
    (sent, data), (arrived, result) = sides if rank_in_row else sides[::-1]
    function = "all_to_all_v_offset_op"
    if copy_to_symm_buffer:
        for name, each in (("input", input), ("output", output)):
            if each is None or len(each) > ctx.max_num_token:
                given = None if each is None else tuple(each.shape)
                expected = f"a tensor of at most max_num_token = {ctx.max_num_token} rows"
                raise InvalidArgument(function, name, given, expected)
        needed = [("in_splits", in_splits), *[("in_offset", in_offset)] * has_input_offset]
        for name, each in needed:
            if each is None or each.numel() != ctx.nsplits:
                given = None if each is None else tuple(each.shape)
                expected = f"a tensor of nsplits = {ctx.nsplits} elements"
                raise InvalidArgument(function, name, given, expected)
        assert input is not None
        assert in_splits is not None
        data[: input.numel()] = input.flatten()
        sent[: ctx.nsplits] = in_splits.flatten()
        if has_input_offset and in_offset is not None:
            sent[ctx.nsplits :] = in_offset.flatten()
    splits, offsets = sent.split(ctx.nsplits)
    rows, out = (each.view(-1, ctx.token_len_elem) for each in (data, result))
    result_layout = ctx.exchange(
        rank_in_row, rows, splits, offsets if has_input_offset else None, major_align, out
    )
    arrived.copy_(torch.cat([each.flatten() for each in result_layout]))
    number = arrived[ctx.nsplits - 1] + arrived[-1]
    if copy_to_symm_buffer and output is not None:
        size = int(number)
        if size > len(output):
            expected = f"at least {size} rows, the number that arrived"
            raise InvalidArgument(function, "output.shape", tuple(output.shape), expected)
        output[:size] = out[:size]
        out = output
    elif return_tensor:
        out = out[: int(number)]
    return (out, number) if return_tensor else (None, None)


def all_to_all_v_offset_op_v2(
    ctx: AllToAllContext,
    rank_in_row: bool,
    input: torch.Tensor,
    output: torch.Tensor,
    in_splits: torch.Tensor,
    out_splits: torch.Tensor,
    copy_to_symm_buffer: bool = True,
    return_tensor_sliced: bool = True,
    return_stat: bool = False,
    grid_size: int | None = None,
    profiling: bool = False,
) -> tuple[torch.Tensor | None, int | None, int | None]:
    """Exchange rows and store the received rows without gaps in ``output``. Tuned.

    The call waits for the device only if it returns something. If ``output`` is too short,
    ``ctx.ep.check()`` raises.

    Args:
        out_splits: ignored; splits are sent with the rows.
        copy_to_symm_buffer: ``False``: send rows of ``ctx.dispatch_data`` instead of ``input``.
        return_tensor_sliced: return the part of ``output`` that has received rows.
        return_stat: return the numbers of sent and received rows.
    """
    if not copy_to_symm_buffer:
        input = ctx.dispatch_data.view(-1, ctx.token_len_elem)[: len(input)]
    splits, _ = ctx.exchange(rank_in_row, input, in_splits.flatten(), None, 1, output)
    arrived = int(splits.sum()) if return_stat or return_tensor_sliced else None
    stat = (int(in_splits.sum()), arrived) if return_stat else (None, None)
    return (output[:arrived] if return_tensor_sliced else None, *stat)


def all_to_all_vdev_2d(ctx: AllToAllContext, *tensors: Any, **options: Any) -> Any:
    """Dispatch rows to experts: ``all_to_all_v_offset_op`` with ``rank_in_row=True``."""
    return all_to_all_v_offset_op(ctx, True, *tensors, **options)


def all_to_all_vdev_2d_offset(ctx: AllToAllContext, *tensors: Any, **options: Any) -> Any:
    """Return rows to their ranks: ``all_to_all_v_offset_op`` with offsets."""
    options["has_input_offset"] = True
    return all_to_all_v_offset_op(ctx, False, *tensors, **options)
