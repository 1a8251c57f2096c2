"""``Buffer``, and its dispatch and combine of many tokens.

All ranks exchange their numbers of tokens, and the host waits once to read them. A token is sent
once to each rank that has one of its experts. Results have as many rows as were received.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeAlias

import torch
import triton
from torch.nn.functional import pad

from triton_dist.deep_ep.low_latency import LowLatencyCalls, Rows, received_for_combine
from triton_dist.deep_ep.utils import Config, EventHandle, EventOverlap
from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common import libraries
from triton_dist.kernels.nvidia.expert_parallel import Received, ep_combine, ep_dispatch
from triton_dist.kernels.nvidia.expert_parallel.context import MAX_TOPK, SCALE_ELEMENTS
from triton_dist.runtime.ranks import Group

topk_idx_t = torch.int64
Bias: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None
_MIN_SMS = 4
"""Minimum of ``num_sms`` of ``ep_dispatch``."""


class Handle(NamedTuple):
    """Layout of a dispatch. Callers pass it back. Entries 0, 3 and 4 have DeepEP's contents.

    Attributes:
        rank_prefix_matrix: int32 [ranks, ranks]. Rank r receives the rows of source s before row
            [s, r] and after the rows of source s - 1.
        row_of_token: int32 [ranks * max_tokens, 1], index in the received rows of each token of
            each rank, or -1 if the token was not sent to this rank.
        ends: int32 [local experts], each element is the number of received rows.
        recv_src_idx: int32 [received rows], index of each row's token on its source rank.
        is_token_in_rank: bool [tokens, ranks].
        token_of_row: int32 [received rows], ``source * max_tokens + token``; -1 for unused rows.
        destinations: int32 [max_tokens]. Bit r is set if the token was sent to rank r.
        max_tokens: bound of the tokens of a rank in the dispatch.
        num_experts: experts of all ranks.
    """

    rank_prefix_matrix: torch.Tensor
    row_of_token: torch.Tensor
    ends: torch.Tensor
    recv_src_idx: torch.Tensor
    is_token_in_rank: torch.Tensor
    token_of_row: torch.Tensor
    destinations: torch.Tensor
    max_tokens: int
    num_experts: int


class _Sizes(NamedTuple):
    """Sizes of a dispatch, from the counts of all ranks."""

    max_tokens: int
    """Bound of the tokens of a rank, equal on all ranks."""
    num_rows: int
    """Number of result rows on this rank."""
    routes_per_expert: list[int]
    """Number of routes of each local expert; empty if the host does not read it."""
    rank_prefix_matrix: torch.Tensor


def _unsupported_method(expected: str) -> Any:
    def method(*_: Any, **__: Any) -> NoReturn:
        raise InvalidArgument("Buffer", "the call", "not supported", expected)

    method.__doc__ = f"Raise ``InvalidArgument``: expected {expected}."
    return method


class Buffer(LowLatencyCalls):
    """Memory for dispatch and combine over the ranks of one host.

    All ranks must make equal calls in equal order. They tune the calls together. Calls with
    ``async_finish`` run on a second stream. ``allocate_on_comm_stream`` has no effect.

    Args:
        group: process group of one host; default: the world.
        num_nvl_bytes, num_rdma_bytes, low_latency_mode, num_qps_per_rank: no effect.
        allow_mnnvl, use_fabric, explicitly_destroy: no effect. ``destroy`` frees the memory.
        allow_nvlink_for_low_latency_mode: must be ``True``.
        enable_shrink: must be ``False``.
        comm: must be ``None``.

    Raises:
        InvalidArgument: an argument is not supported.
    """

    num_sms: ClassVar[int] = 20

    def __init__(
        self, group: Group, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0,
        low_latency_mode: bool = False, num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True, allow_mnnvl: bool = False,
        use_fabric: bool = False, explicitly_destroy: bool = False, enable_shrink: bool = False,
        comm: Any = None,
    ) -> None:  # fmt: skip
        if comm is not None:
            raise InvalidArgument("Buffer", "comm", comm, "None: pass a process group")
        if enable_shrink:
            raise InvalidArgument("Buffer", "enable_shrink", True, "False: no rank can be masked")
        if not allow_nvlink_for_low_latency_mode:
            name, expected = "allow_nvlink_for_low_latency_mode", "True: RDMA is not supported"
            raise InvalidArgument("Buffer", name, False, expected)
        super().__init__(group)
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy
        self.enable_shrink = enable_shrink

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Return ``True``: fp8 rows are supported."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set ``num_sms`` of the default configs: the largest number of programs of a call."""
        if new_num_sms % 2:
            raise InvalidArgument("set_num_sms", "new_num_sms", new_num_sms, "an even number")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Return an event of the work that is queued on the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Return the approximate bytes that low-latency calls allocate on each rank."""
        # 2 contexts, each with 5 buffers of rows (create_ep_context).
        return 10 * num_ranks * num_max_dispatch_tokens_per_rank * hidden * torch.bfloat16.itemsize

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Return a config with ``Buffer.num_sms``."""
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    get_local_buffer_tensor = _unsupported_method("a tensor of your own: the memory is private")
    internode_dispatch = _unsupported_method("ranks of one host: RDMA is not supported")
    internode_combine = internode_dispatch
    low_latency_update_mask_buffer = _unsupported_method(
        "enable_shrink=False: no rank can be masked"
    )
    low_latency_query_mask_buffer = low_latency_update_mask_buffer
    low_latency_clean_mask_buffer = low_latency_update_mask_buffer

    def get_dispatch_layout(
        self, topk_idx: torch.Tensor, num_experts: int, previous_event: EventOverlap | None = None,
        async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]:  # fmt: skip
        """Return what ``dispatch`` requires. Not collective.

        Args:
            topk_idx: int64 [tokens, topk]; -1 is masked.
            num_experts: experts of all ranks, a multiple of the ranks.
            previous_event, async_finish: see ``dispatch``.

        Returns:
            int32 [ranks], tokens for each rank; ``None``; int32 [num_experts], routes to each
            expert; bool [tokens, ranks], whether a token goes to a rank; the event.
        """
        ranks = self.group_size

        def work() -> tuple[torch.Tensor, ...]:
            is_masked = topk_idx < 0
            # Masked choices count for one extra rank and one extra expert, which are cut off.
            owner = (topk_idx // (num_experts // ranks)).masked_fill(is_masked, ranks)
            in_rank = owner.new_zeros((len(topk_idx), ranks + 1), dtype=torch.bool)
            in_rank = in_rank.scatter_(1, owner, True)[:, :ranks].contiguous()
            experts = topk_idx.masked_fill(is_masked, num_experts).flatten()
            counts = experts.new_zeros(num_experts + 1, dtype=torch.int32)
            counts.scatter_add_(0, experts, torch.ones_like(experts, dtype=torch.int32))
            return in_rank.sum(0, dtype=torch.int32), counts[:num_experts], in_rank

        result, event = self._run("layout", work, previous_event, async_finish, topk_idx)
        return result[0], None, *result[1:], event

    def dispatch(
        self, x: Rows, handle: Handle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None, num_tokens_per_rdma_rank: Any = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None, topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None, expert_alignment: int = 1,
        num_worst_tokens: int = 0, config: Config | None = None,
        previous_event: EventOverlap | None = None, async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Send tokens to ranks. Collective; tuned.

        The host waits once. With ``num_worst_tokens`` or ``handle`` it does not wait, and a CUDA
        graph can capture the call.

        Args:
            x: bf16 [tokens, hidden]; or fp8, and scales [tokens, at most hidden / 128] in fp32 or
                int32.
            handle: send to the ranks of an earlier dispatch. The next arguments, up to
                ``topk_weights``, must then be ``None``.
            num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank: results of
                ``get_dispatch_layout``, for ``topk_idx`` if it is passed.
            num_tokens_per_rdma_rank: no effect.
            topk_idx: int64 [tokens, topk], experts; -1 is masked.
            topk_weights: fp32 [tokens, topk].
            expert_alignment: round the returned numbers up to multiples of this number.
            num_worst_tokens: number of result rows, equal on all ranks; at least the number of
                ranks times the largest number of tokens of a rank.
            config: ``num_sms`` bounds the programs, of which there are at least 4.
            previous_event: run after this event. With ``async_finish``, the call then does not
                wait for other work of the current stream.
            async_finish: run on a second stream.

        Returns:
            Six results: received rows (and scales) like x, sorted by source rank and token; int64
            [rows, topk], local experts or -1; their weights or 0; list of the number of routes of
            each local expert; the handle; the event. Without ``topk_idx``, the second and third
            are ``None``. With ``num_worst_tokens``, the list is empty. With ``handle``, all but
            the first and last are ``None``.

        Raises:
            InvalidArgument: an argument is missing or has a wrong size.
        """
        rows, scales = x if isinstance(x, tuple) else (x, None)
        layout = num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert
        has_layout = all(each is not None for each in layout)
        if has_layout is (handle is not None):
            expected = "either a handle, or the results of get_dispatch_layout"
            raise InvalidArgument("dispatch", "handle", type(handle).__name__, expected)
        num_sms = (config or self.get_dispatch_config(self.group_size)).num_sms

        def send(ids: torch.Tensor, max_tokens: int, num_experts: int) -> Received:
            scales_per_row = -(-rows.shape[1] // SCALE_ELEMENTS)
            ctx, x_scale = self._context("rows", max_tokens, rows.shape[1], num_experts), None
            if scales is not None:
                x_scale = scales.contiguous().view(torch.float32)
                x_scale = pad(x_scale, (0, scales_per_row - scales.shape[1])).contiguous()
            return ep_dispatch(
                rows, ids, ctx, topk_weights, x_scale=x_scale, max_tokens=max_tokens,
                num_sms=max(_MIN_SMS, num_sms),
            )  # fmt: skip

        def result_rows(received: Received, layout: Handle) -> Rows:
            # ``expanded`` writes one row per position. Here a position is a result row.
            one_per_token = replace(received, row_of_position=layout.token_of_row, ends=layout.ends)
            out, out_scales = one_per_token.expanded(
                rows.new_empty(len(layout.token_of_row), rows.shape[1])
            )
            if scales is None or out_scales is None:
                return out
            return out, out_scales[:, : scales.shape[1]].contiguous().view(scales.dtype)

        def work() -> tuple[Any, ...]:
            if handle is not None:
                ids = self._first_experts_of(handle.is_token_in_rank, handle.num_experts)
                received = send(ids, handle.max_tokens, handle.num_experts)
                return result_rows(received, handle), None, None, None, None
            assert num_tokens_per_rank is not None
            assert is_token_in_rank is not None
            assert num_tokens_per_expert is not None
            num_experts = len(num_tokens_per_expert)
            sizes = self._gather_sizes(
                len(rows), num_tokens_per_rank, num_tokens_per_expert, num_worst_tokens,
                expert_alignment,
            )  # fmt: skip
            ids = (
                self._first_experts_of(is_token_in_rank, num_experts)
                if topk_idx is None
                else topk_idx
            )
            received = send(ids, sizes.max_tokens, num_experts)
            new_handle = _make_handle(received, sizes, is_token_in_rank, num_experts)
            choices = (None, None)
            if topk_idx is not None:
                choices = _local_choices(received, new_handle.token_of_row)
            return result_rows(received, new_handle), *choices, sizes.routes_per_expert, new_handle

        inputs = rows, scales, layout, topk_idx, topk_weights, handle
        result, event = self._run("rows", work, previous_event, async_finish, inputs)
        return *result, event

    def _gather_sizes(
        self, tokens: int, per_rank: torch.Tensor, per_expert: torch.Tensor, num_worst_tokens: int,
        alignment: int,
    ) -> _Sizes:  # fmt: skip
        """Exchange the sizes of all ranks. The host waits, unless ``num_worst_tokens`` is given."""
        ranks = self.group_size
        own_counts = torch.cat([per_rank.new_full((1,), tokens), per_rank, per_expert])[None]
        counts = own_counts if ranks == 1 else libraries.all_gather_rows(own_counts, self.group)
        rank_prefix_matrix = counts[:, 1 : 1 + ranks].cumsum(0, dtype=torch.int32)
        if num_worst_tokens:
            return _Sizes(-(-num_worst_tokens // ranks), num_worst_tokens, [], rank_prefix_matrix)
        host_counts = counts.cpu()
        sums, max_tokens = host_counts.sum(0).tolist(), int(host_counts[:, 0].max())
        local_experts = len(per_expert) // ranks
        first = 1 + ranks + self.rank * local_experts
        routes = [-(-each // alignment) * alignment for each in sums[first : first + local_experts]]
        # A power of two, because ops are tuned for each value.
        max_tokens = triton.next_power_of_2(max(1, max_tokens))
        return _Sizes(max_tokens, sums[1 + self.rank], routes, rank_prefix_matrix)

    def _first_experts_of(self, is_token_in_rank: torch.Tensor, num_experts: int) -> torch.Tensor:
        """Return int64 [tokens, ranks]: the first expert of a rank that gets the token, or -1."""
        step, device = num_experts // self.group_size, is_token_in_rank.device
        first_experts = torch.arange(0, num_experts, step, dtype=torch.int64, device=device)
        return torch.where(is_token_in_rank, first_experts, -1)

    def combine(
        self, x: torch.Tensor, handle: Handle, topk_weights: torch.Tensor | None = None,
        bias: Bias = None, config: Config | None = None,
        previous_event: EventOverlap | None = None, async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:  # fmt: skip
        """Return the sum of each token's rows, added in fp32 in rank order. Collective; tuned.

        Args:
            x: bf16 [received rows, hidden].
            handle: result of ``dispatch``.
            topk_weights: fp32 [received rows, topk].
            bias: bf16 [tokens, hidden], or a pair of such tensors, added to the rounded sum.
            config, previous_event, async_finish: see ``dispatch``.

        Returns:
            bf16 [tokens, hidden], zero for tokens without rows; sums of ``topk_weights``, fp32
            [tokens, topk], or ``None``; the event.
        """
        num_sms = (config or self.get_combine_config(self.group_size)).num_sms
        biases = bias if isinstance(bias, tuple) else (bias,)
        tokens = len(handle.is_token_in_rank)

        def combine_rows(rows: torch.Tensor, ctx_name: str) -> torch.Tensor:
            ctx = self._context(ctx_name, handle.max_tokens, rows.shape[1], handle.num_experts)
            received = received_for_combine(
                ctx,
                handle.row_of_token,
                handle.ends,
                handle.destinations,
                tokens,
                handle.max_tokens,
            )
            return ep_combine(
                rows, received, ctx, apply_weights=False, num_sms=max(_MIN_SMS, num_sms)
            )

        def work() -> tuple[torch.Tensor, torch.Tensor | None]:
            out, weights = combine_rows(x, "rows"), None
            for each in biases:
                out = out if each is None else out + each
            if topk_weights is not None:
                topk = topk_weights.shape[1]
                weights = combine_rows(pad(topk_weights, (0, MAX_TOPK - topk)), "weights")
                weights = weights[:, :topk].contiguous()
            return out, weights

        inputs = x, topk_weights, biases, handle
        result, event = self._run("rows", work, previous_event, async_finish, inputs)
        return *result, event


def _make_handle(
    received: Received, sizes: _Sizes, is_token_in_rank: torch.Tensor, num_experts: int
) -> Handle:
    is_received = (received.local_ids >= 0).any(1)
    num_received = is_received.cumsum(0, dtype=torch.int32)
    row = torch.where(is_received, num_received - 1, -1)
    # Tokens without a row write to one extra element, which is cut off.
    token_of_row = row.new_full((sizes.num_rows + 1,), -1)
    token = torch.arange(len(row), dtype=torch.int32, device=row.device)
    token_of_row[torch.where(is_received, row, sizes.num_rows).clamp(max=sizes.num_rows)] = token
    token_of_row = token_of_row[:-1]
    ends = num_received[-1:].expand(len(received.ends)).contiguous()
    return Handle(
        sizes.rank_prefix_matrix, row[:, None], ends,
        token_of_row % sizes.max_tokens, is_token_in_rank, token_of_row, received.destinations,
        sizes.max_tokens, num_experts,
    )  # fmt: skip


def _local_choices(received: Received, token_of_row: torch.Tensor) -> tuple[Any, Any]:
    """Return local experts, and weights if the dispatch had any, of each received row."""
    token = token_of_row.clamp(min=0)
    ids = torch.where((token_of_row >= 0)[:, None], received.local_ids[token], -1)
    if received.weights is None:
        return ids.long(), None
    weights = received.weights[received.position_of_route[token].clamp(min=0)]
    return ids.long(), torch.where(ids >= 0, weights, 0)
