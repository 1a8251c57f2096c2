"""Dispatch and combine of few tokens, with result rows for the worst routing.

The host does not wait. Two contexts alternate, so two micro-batches can be in flight. A combine
sends its weights to the ranks of the experts. Each of them returns one weighted sum per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn.functional import pad

from triton_dist.deep_ep.calls import Calls, Rows, received_at
from triton_dist.deep_ep.pack import launch_of
from triton_dist.deep_ep.utils import EventOverlap
from triton_dist.errors import InvalidArgument
from triton_dist.kernels.nvidia.expert_parallel import Received, ep_combine, ep_dispatch, ep_send
from triton_dist.kernels.nvidia.expert_parallel.algorithms import DispatchCall
from triton_dist.kernels.nvidia.expert_parallel.context import SCALE_ELEMENTS

Hook: TypeAlias = Callable[[], None] | None
_FP8_MAXIMUM, _MIN_AMAX, _MANTISSA_BITS = 448.0, 1e-4, 23
_SCALES_OF_INT = 4


class LowLatencyHandle(NamedTuple):
    """Layout of a low-latency dispatch. The first five entries are equal to DeepEP's.

    Attributes:
        src_info: int32 [local experts, places], index of each row on its source. Places are the
            ``ranks * max tokens`` result rows of an expert.
        layout_range: int64 [local experts, ranks], first place in the upper 32 bits, number of
            rows in the lower 32 bits.
        place_of_route: int32 [ranks * max tokens, topk], index in ``[local experts * places]``, or
            -1.
        slot: which of the two contexts the call used.
    """

    src_info: torch.Tensor
    layout_range: torch.Tensor
    num_max_dispatch_tokens_per_rank: int
    hidden: int
    num_experts: int
    place_of_route: torch.Tensor
    slot: int


class LowLatencyCalls(Calls):
    """The part of ``Buffer`` for few tokens."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._slot, self._products = 0, dict[int, torch.Tensor]()

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Do nothing: calls for few and for many tokens use different memory."""

    def low_latency_dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, num_max_dispatch_tokens_per_rank: int,
        num_experts: int, cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None, use_fp8: bool = True,
        round_scale: bool = False, use_ue8m0: bool = False, async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Rows, torch.Tensor, LowLatencyHandle, EventOverlap, Hook]:  # fmt: skip
        """Send tokens to experts. Collective. A CUDA graph can capture the call.

        Args:
            x: bf16 [tokens, hidden].
            topk_idx: int64 [tokens, topk]; -1 is masked.
            num_max_dispatch_tokens_per_rank: largest number of tokens of any rank.
            num_experts: experts of all ranks.
            cumulative_local_expert_recv_stats: int32 [local experts]; numbers of received rows are
                added.
            dispatch_wait_recv_cost_stats: no effect.
            use_fp8: send fp8 with a scale per 128 elements.
            round_scale: round scales up to powers of two.
            use_ue8m0: return exponents of scales, four in an int32.
            async_finish: run on a second stream.
            return_recv_hook: only send; the returned function receives. Not tuned.

        Returns:
            Rows [local experts, ranks * max tokens, hidden], sorted by source rank and token; with
            ``use_fp8`` also their scales [local experts, ranks * max tokens, hidden / 128] with
            adjacent rows in memory. Rows after the received rows are undefined. Then int32 [local
            experts], numbers of received rows; the handle; the event; and the function, or
            ``None``.

        Raises:
            InvalidArgument: options exclude each other, or two earlier sends are not yet received.
        """
        limit, hidden = num_max_dispatch_tokens_per_rank, x.shape[1]
        groups = -(-hidden // SCALE_ELEMENTS)
        _check_hook("low_latency_dispatch", async_finish, return_recv_hook)
        if use_ue8m0 and not (round_scale and groups % _SCALES_OF_INT == 0):
            expected = "False, or round_scale=True and a hidden that is a multiple of 512"
            raise InvalidArgument("low_latency_dispatch", "use_ue8m0", use_ue8m0, expected)
        for _ in range(2):
            self._slot ^= 1
            ctx = self._context(f"slot {self._slot}", limit, hidden, num_experts)
            if ctx.pending is None:
                break
        else:
            expected = "at most two: call the function of an earlier dispatch first"
            raise InvalidArgument("low_latency_dispatch", "the number of sends", 3, expected)
        experts, places = ctx.local_experts, self.group_size * limit

        def new(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return x.new_empty(shape, dtype=dtype)

        out = new(experts, places, hidden, dtype=torch.float8_e4m3fn if use_fp8 else x.dtype)
        scales = new(experts, groups, places, dtype=torch.float32) if use_fp8 else None
        exponents = new(experts, groups // _SCALES_OF_INT, places) if use_ue8m0 else None
        counts, ranges = new(experts), new(experts, self.group_size, dtype=torch.int64)
        handle = LowLatencyHandle(
            new(experts, places), ranges, limit, hidden, num_experts,
            new(places, topk_idx.shape[1]), self._slot,
        )  # fmt: skip

        def send(function: Callable[..., Received]) -> Received:
            rows, scale = _rounded_fp8(x) if use_fp8 and round_scale else (x, None)
            quantise = use_fp8 and scale is None
            return function(rows, topk_idx, ctx, x_scale=scale, quantise=quantise, max_tokens=limit)

        def receive(received: Received) -> None:
            ctx.buffer.launcher.repeat(launch_of(received, out, scales, handle.src_info))
            ends_by_rank = received.counts.cumsum(1)
            torch.add((ends_by_rank - received.counts) << 32, received.counts, out=ranges)
            counts.copy_(ends_by_rank[:, -1])
            if cumulative_local_expert_recv_stats is not None:
                cumulative_local_expert_recv_stats.add_(counts)
            first = torch.arange(0, experts * places, places, device=x.device, dtype=torch.int32)
            shift = (first + counts - received.ends)[received.local_ids.clamp(min=0)]
            position = received.position_of_route
            handle.place_of_route.copy_(torch.where(position >= 0, position + shift, -1))
            if scales is not None and exponents is not None:
                each = (scales.view(torch.int32) >> _MANTISSA_BITS).to(torch.uint8)
                exponents.copy_(each.mT.contiguous().view(torch.int32).mT)

        def work() -> tuple[Any, ...]:
            receive(send(ep_dispatch))
            return out, scales, exponents, counts, handle

        kind, packed = f"slot {self._slot}", scales if exponents is None else exponents
        result: Rows = out if packed is None else (out, packed.mT)
        inputs = x, topk_idx, cumulative_local_expert_recv_stats
        if return_recv_hook:
            sent, event = self._run(kind, lambda: send(ep_send), None, False)

            def hook() -> None:
                self._run(kind, lambda: receive(sent.wait()), None, False)

            return result, counts, handle, event, hook
        # The second stream also writes the results, which are allocated on this stream.
        written = out, scales, exponents, counts, handle
        _, event = self._run(kind, work, None, async_finish, inputs, written)
        return result, counts, handle, event, None

    def low_latency_combine(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor,
        handle: LowLatencyHandle, use_logfmt: bool = False, zero_copy: bool = False,
        async_finish: bool = False, return_recv_hook: bool = False,
        out: torch.Tensor | None = None, combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Hook]:  # fmt: skip
        """Return the weighted sum of the rows of each token. Collective; tuned; can be captured.

        Args:
            x: bf16 [local experts, ranks * max tokens, hidden].
            topk_idx: ids of the dispatch.
            topk_weights: fp32 [tokens, topk].
            handle: result of ``low_latency_dispatch``.
            use_logfmt, combine_wait_recv_cost_stats: no effect; sums travel as bf16.
            zero_copy: read the tensor of ``get_next_low_latency_combine_buffer`` instead of x.
            async_finish: run on a second stream.
            return_recv_hook: run on a second stream; the returned function waits for the call.
            out: bf16 [tokens, hidden], the result.

        Returns:
            bf16 [tokens, hidden]; the event; and the function, or ``None``.

        Raises:
            InvalidArgument: the function of the dispatch has not been called, or ``zero_copy``
                without ``get_next_low_latency_combine_buffer``.
        """
        _check_hook("low_latency_combine", async_finish, return_recv_hook)
        limit, kind = handle.num_max_dispatch_tokens_per_rank, f"slot {handle.slot}"
        ctx = self._context(kind, limit, handle.hidden, handle.num_experts)
        if ctx.pending is not None:
            expected = "a handle whose dispatch has been received: call its function first"
            raise InvalidArgument("low_latency_combine", "handle", "a pending send", expected)
        products = self._products.get(handle.slot) if zero_copy else x
        if products is None:
            expected = "False unless get_next_low_latency_combine_buffer(handle) has been called"
            raise InvalidArgument("low_latency_combine", "zero_copy", True, expected)
        y = products.flatten(0, 1)

        def work() -> torch.Tensor:
            # Send ids and weights, but no rows.
            rows, tokens = y.new_empty((len(topk_idx), handle.hidden)), len(topk_idx)
            call = DispatchCall(rows, topk_idx, ctx, topk_weights, max_tokens=limit)
            sent = call.result()
            call.launch_kernel(sent.layout, True, True, copies=0)
            assert sent.weights is not None
            weights = sent.weights.new_empty(len(y) + 1)
            # Routes to other ranks write to one more element, which belongs to no row of y.
            place = torch.where(handle.place_of_route >= 0, handle.place_of_route, len(y))
            weights[place] = sent.weights[sent.position_of_route.clamp(min=0)]
            received = received_at(
                ctx, handle.place_of_route, sent.ends, sent.destinations, tokens, limit, weights
            )
            sums: torch.Tensor = ep_combine(y, received, ctx)
            return sums if out is None else out.copy_(sums)

        inputs = y, topk_idx, topk_weights, handle, out
        is_async = async_finish or return_recv_hook
        result, event = self._run(kind, work, None, is_async, inputs)
        return result, event, event.current_stream_wait if return_recv_hook else None

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """Return the bf16 [local experts, ranks * max tokens, hidden] that the next
        ``low_latency_combine`` with ``handle`` and ``zero_copy`` reads.
        """
        shape, products = (*handle.src_info.shape, handle.hidden), self._products.get(handle.slot)
        if products is None or products.shape != shape:
            products = handle.src_info.new_empty(shape, dtype=torch.bfloat16)
            self._products[handle.slot] = products
        return products


def _check_hook(function: str, async_finish: bool, return_recv_hook: bool) -> None:
    if async_finish and return_recv_hook:
        raise InvalidArgument(function, "async_finish", True, "False with return_recv_hook")


def _rounded_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x in fp8 and its scales [tokens, hidden / 128], rounded up to powers of two."""
    groups = pad(x, (0, -x.shape[1] % SCALE_ELEMENTS)).float().unflatten(1, (-1, SCALE_ELEMENTS))
    scale = groups.abs().amax(2).clamp(min=_MIN_AMAX) / _FP8_MAXIMUM
    bits = scale.view(torch.int32) + (1 << _MANTISSA_BITS) - 1
    scale = (bits >> _MANTISSA_BITS << _MANTISSA_BITS).view(torch.float32)
    rows = (groups / scale[..., None]).to(torch.float8_e4m3fn).flatten(1)
    return rows[:, : x.shape[1]].contiguous(), scale
