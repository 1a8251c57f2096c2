"""Expert-parallel dispatch and combine under the names of Triton-distributed's layers.

New programs call ``ep_dispatch`` and ``ep_combine``, which these layers wrap. A token chooses
``topk`` experts by ids. An id below 0, or not below the number of experts, masks the choice.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.distributed as dist

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.nvidia import create_ep_context, ep_combine, ep_dispatch
from triton_dist.kernels.nvidia.expert_parallel import EPContext, Received
from triton_dist.kernels.nvidia.low_latency_all_to_all import chunk_of_rows


def masked_ids(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Replace each id that is not an expert by -1."""
    return torch.where((ids >= 0) & (ids < num_experts), ids, -1)


class EPAll2AllLayer(torch.nn.Module):
    """Dispatch and combine for many tokens. Tuned. Creation is collective over ``ep_group``.

    Args:
        ep_group: process group; ``None``: the world.
        max_tokens: largest number of tokens of a rank in any call.
        hidden: elements of a token.
        topk: number of experts that a token chooses.
        rank, world_size: this rank in the group, and the number of ranks.
        local_world_size: number of ranks on this host; must equal ``world_size``.
        num_tot_experts: number of experts over all ranks, a multiple of ``world_size``.
        dtype, weight_dtype: dtypes of tokens and of weights.
        num_sm: see ``num_sms`` of ``ep_dispatch``.
        enable_local_combine: ignored; each rank sums its own experts' results before it sends them.
        use_aot: must be ``False``.

    Raises:
        InvalidArgument, RankDisagreement, SymmetricMemoryFull: see ``create_ep_context``.
    """

    def __init__(
        self, ep_group: dist.ProcessGroup | None, max_tokens: int, hidden: int, topk: int,
        rank: int, num_tot_experts: int, local_world_size: int, world_size: int,
        dtype: torch.dtype = torch.bfloat16, weight_dtype: torch.dtype = torch.float32,
        num_sm: int = 20, enable_local_combine: bool = False, use_aot: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        if use_aot:
            expected = "False: kernels are compiled at the first call, or come from a pack"
            raise InvalidArgument("EPAll2AllLayer", "use_aot", use_aot, expected)
        self.weight_dtype, self.num_sm = weight_dtype, num_sm
        self.ctx: EPContext = create_ep_context(
            rank, world_size, local_world_size, max_tokens, hidden, num_tot_experts, topk, dtype,
            group=ep_group,
        )  # fmt: skip

    def dispatch(
        self,
        input: torch.Tensor,
        exp_indices: torch.Tensor,
        weight: torch.Tensor | None = None,
        full_scatter_indices: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, Received]:
        """Send tokens to the ranks of their experts. The host waits for the number of rows.

        Args:
            input: [tokens, hidden].
            exp_indices: [tokens, topk], expert ids.
            weight: [tokens, topk], weights of the choices, or ``None``.
            full_scatter_indices: ignored; received rows are always sorted by expert.

        Returns:
            Received rows, one for each choice of an expert on this rank, sorted by expert, source
            rank and token; weights of these choices, or ``None``; and the layout for ``combine``.
        """
        ids = masked_ids(exp_indices, self.ctx.num_experts)
        received = ep_dispatch(input, ids, self.ctx, weight, num_sms=self.num_sm)
        number = received.num_positions()
        rows, _ = received.expanded(input.new_empty(number, self.ctx.hidden))
        if received.weights is not None:
            weight = received.weights[:number].to(self.weight_dtype)
        return rows, weight, received

    def combine(self, input: torch.Tensor, ep_a2a_layout_desc: Received) -> torch.Tensor:
        """Return [tokens, hidden]: for each token of this rank, the unweighted sum of its rows.

        ``input`` has an expert's result for each row of ``dispatch``, in the order of these rows.
        ``ep_a2a_layout_desc`` is the layout that ``dispatch`` returned.
        """
        return ep_combine(
            input, ep_a2a_layout_desc, self.ctx, apply_weights=False, num_sms=self.num_sm
        )

    def finalize(self) -> None:
        """Free the memory; idempotent. Collective."""
        self.ctx.finalize()


Layout: TypeAlias = tuple[Received, torch.Tensor]
"""The received rows, and for each received row its index in the padded result."""


class EPLowLatencyAllToAllLayer:
    """Dispatch and combine for few tokens, with padded results. Tuned; does not synchronise.

    Each choice of an expert is sent as a separate row. PyTorch computes the weighted sum of the
    returned rows in fp32, so that results equal a PyTorch reference bit for bit. The algorithm
    ``"packets"`` of ``ep_dispatch`` is used if ``max_m * topk`` is at most 128. Creation is
    collective over the world.

    Args:
        max_m: largest number of tokens of a rank in any call.
        hidden: elements of a token.
        topk: number of different experts that a token chooses.
        online_quant_fp8: send tokens as ``float8_e4m3fn``.
        rank, world_size: this rank, and the number of ranks.
        local_world_size: number of ranks on this host; must equal ``world_size``.
        num_experts: number of experts over all ranks, a multiple of ``world_size``.
        fp8_gsize: number of elements per fp8 scale; must be 128.
        dtype: dtype of tokens and results.
        enable_profiling: ignored; ``group_profile`` writes traces.
    """

    def __init__(
        self, max_m: int, hidden: int, topk: int, online_quant_fp8: bool, rank: int,
        num_experts: int, local_world_size: int, world_size: int, fp8_gsize: int = 128,
        dtype: torch.dtype = torch.bfloat16, enable_profiling: bool = False,
    ) -> None:  # fmt: skip
        if fp8_gsize != 128:
            raise InvalidArgument("EPLowLatencyAllToAllLayer", "fp8_gsize", fp8_gsize, "128")
        self.online_quant_fp8, self.rows_per_expert = online_quant_fp8, world_size * max_m
        self.ctx: EPContext = create_ep_context(
            rank, world_size, local_world_size, max_m * topk, hidden, num_experts, 1, dtype
        )

    def dispatch(
        self,
        send_tokens: torch.Tensor,
        send_scales: torch.Tensor | None,
        topk_indices: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, Layout]:
        """Send tokens to the ranks of their experts.

        Args:
            send_tokens: [tokens, hidden], in ``dtype``, or fp8 with scales.
            send_scales: fp32 [tokens, hidden / 128], scales of fp8 tokens; or ``None``.
            topk_indices: [tokens, topk], expert ids.

        Returns:
            Received rows [local experts, world_size * max_m, hidden], sorted by source rank; their
            fp32 scales [local experts, world_size * max_m, hidden / 128], or ``None``; int32
            [local experts], the number of rows of each expert; the layout for ``combine``. Rows of
            an expert after this number are undefined.
        """

        def per_choice(rows: torch.Tensor) -> torch.Tensor:
            return rows[:, None].expand(-1, topk_indices.shape[1], -1).flatten(0, 1).contiguous()

        received = ep_dispatch(
            per_choice(send_tokens), masked_ids(topk_indices, self.ctx.num_experts).view(-1, 1),
            self.ctx, x_scale=None if send_scales is None else per_choice(send_scales),
            quantise=self.online_quant_fp8 and send_scales is None,
        )  # fmt: skip
        counts = received.counts.sum(1, dtype=torch.int32)
        _, expert, row_in_expert, is_used = chunk_of_rows(counts, len(received.row_of_position))
        num_rows = len(counts) * self.rows_per_expert
        padded_index = expert * self.rows_per_expert + row_in_expert
        # Unused positions, and rows beyond ``rows_per_expert``, write to one extra row, which is
        # cut off below.
        is_used &= row_in_expert < self.rows_per_expert
        padded_index = torch.where(is_used, padded_index, num_rows)

        def padded(rows: torch.Tensor) -> torch.Tensor:
            out = rows.new_empty(num_rows + 1, rows.shape[1])
            # fp8 rows cannot be indexed on all devices.
            out.view(torch.uint8)[padded_index] = rows.view(torch.uint8)
            return out[:-1].view(len(counts), self.rows_per_expert, -1)

        rows, scales = received.expanded()
        scales = None if scales is None else padded(scales)
        return padded(rows), scales, counts, (received, padded_index)

    def combine(
        self,
        send_tokens: torch.Tensor,
        topk_indices: torch.Tensor,
        topk_weights: torch.Tensor,
        dispatch_meta: Layout,
        zero_copy: bool = False,
    ) -> torch.Tensor:
        """Return [tokens, hidden]: for each token of this rank, the weighted sum of its rows.

        Args:
            send_tokens: results of the experts, [local experts, world_size * max_m, hidden], in
                ``dtype``.
            topk_indices: [tokens, topk], expert ids passed to ``dispatch``.
            topk_weights: fp32 [tokens, topk].
            dispatch_meta: layout that ``dispatch`` returned.
            zero_copy: ignored; accepted for existing scripts.
        """
        rows = send_tokens.flatten(0, 1)
        received, padded_index = dispatch_meta
        y = rows[padded_index.clamp(max=len(rows) - 1)]
        products = ep_combine(y, received, self.ctx, apply_weights=False)
        rows_of_token: torch.Tensor = products.unflatten(0, topk_indices.shape)
        return (rows_of_token * topk_weights[..., None]).sum(1).to(send_tokens.dtype)

    def dump_dispatch_trace(self) -> None:
        """Do nothing; accepted for existing scripts. ``group_profile`` writes traces."""

    dump_combine_trace = dump_dispatch_trace

    def finalize(self) -> None:
        """Free the memory; idempotent. Collective."""
        self.ctx.finalize()
