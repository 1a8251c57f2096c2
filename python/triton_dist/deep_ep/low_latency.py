"""Base of ``Buffer``: contexts, streams and events of all calls, and the calls of few tokens.

Dispatch of few tokens allocates result rows for the worst routing, so the host does not wait. Two
contexts alternate, so two micro-batches can be in flight. Combine sends the weights to the ranks of
the experts. Each of these ranks returns one weighted sum per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn.functional import pad

from triton_dist.deep_ep.pack import pack_launch
from triton_dist.deep_ep.utils import EventHandle, EventOverlap
from triton_dist.errors import InvalidArgument
from triton_dist.kernels.nvidia.expert_parallel import (
    EPContext,
    Received,
    create_ep_context,
    ep_combine,
    ep_dispatch,
    ep_send,
)
from triton_dist.kernels.nvidia.expert_parallel.algorithms import DispatchCall
from triton_dist.kernels.nvidia.expert_parallel.context import MAX_TOPK, SCALE_ELEMENTS
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import Group, group_for, process_group_of

Rows: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""Rows, or fp8 rows and their scales."""
Hook: TypeAlias = Callable[[], None] | None
_FP8_MAXIMUM, _MANTISSA_BITS = 448.0, 23
_MIN_AMAX = 1e-4
"""Lower bound of the largest absolute value of a group, so that no scale is 0."""
_EXPONENTS_PER_INT = 4


class LowLatencyHandle(NamedTuple):
    """Layout of a low-latency dispatch. The first five entries have DeepEP's contents.

    Attributes:
        src_info: int32 [local experts, capacity], index of each row's token on its source rank.
            The capacity, ``ranks * max tokens``, is the number of result rows of an expert.
        layout_range: int64 [local experts, ranks], rows from each source rank: index of the first
            row in the upper 32 bits, number of rows in the lower 32 bits.
        row_of_route: int32 [ranks * max tokens, topk], index of the route's row among all ``local
            experts * capacity`` result rows; -1 if the expert is on another rank.
        slot: which of the two contexts the call used.
    """

    src_info: torch.Tensor
    layout_range: torch.Tensor
    num_max_dispatch_tokens_per_rank: int
    hidden: int
    num_experts: int
    row_of_route: torch.Tensor
    slot: int


class LowLatencyCalls:
    """The part of ``Buffer`` that all calls share, and the calls of few tokens.

    The first calls create contexts; calls of more tokens replace them.
    """

    def __init__(self, group: Group) -> None:
        self.group, ranks = process_group_of(group), group_for(group)
        self.rank, self.group_size = ranks.rank, ranks.size
        self._device = current_device()
        self._contexts: dict[tuple[Any, ...], EPContext] = {}
        # CUDA graphs use the memory of these contexts, also after larger contexts replaced them.
        self._captured_contexts: dict[EPContext, None] = {}
        self._last_events: dict[str, EventHandle] = {}
        self._slot, self._combine_inputs = 0, dict[int, torch.Tensor]()

    def destroy(self) -> None:
        """Free the memory; idempotent. Collective."""
        contexts = dict.fromkeys([*self._contexts.values(), *self._captured_contexts])
        self._contexts, self._captured_contexts = {}, {}
        for ctx in contexts:
            ctx.finalize()

    def get_comm_stream(self) -> Any:
        """Return the stream of calls with ``async_finish``; ``None`` on CPU ranks."""
        return self._device.second_stream

    def _context(self, ctx_name: str, max_tokens: int, hidden: int, num_experts: int) -> EPContext:
        """Return the context for at least ``max_tokens``, equal on all ranks. Collective.

        A context with a pending send cannot be replaced, so the result may be too small.
        """
        key = ctx_name, hidden, num_experts
        ctx = self._contexts.get(key)
        if ctx is None or (ctx.max_tokens < max_tokens and ctx.pending is None):
            if ctx is not None and ctx not in self._captured_contexts:
                ctx.finalize()
            ranks = self.group_size
            dtype = torch.float32 if ctx_name == "weights" else torch.bfloat16
            ctx = self._contexts[key] = create_ep_context(
                self.rank, ranks, ranks, max_tokens, hidden, num_experts, MAX_TOPK, dtype,
                group=self.group,
            )  # fmt: skip
        if self._device.is_capturing():
            self._captured_contexts[ctx] = None
        return ctx

    def _run(
        self,
        ctx_name: str,
        work: Callable[[], Any],
        previous: EventOverlap | None,
        is_async: bool,
        *inputs: Any,
    ) -> tuple[Any, EventOverlap]:
        """Return the result of ``work`` and an event.

        Args:
            ctx_name: calls that share a context run in order, even on different streams.
            previous: event to wait for. An asynchronous call with an event does not wait for
                earlier work of the current stream.
            is_async: run on a second stream.
            inputs: tensors that ``work`` uses, also in tuples.
        """
        last_event, results = self._last_events.get(ctx_name), []
        previous = previous or EventOverlap()

        def run() -> None:
            if last_event is not None and last_event.must_be_awaited():
                last_event.current_stream_wait()
            previous.current_stream_wait()
            results.append(work())
            self._last_events[ctx_name] = EventHandle(*(tensors_in(results) if is_async else ()))

        if not is_async:
            run()
            self._last_events[ctx_name].is_awaited = True  # by its own stream
            return results[0], EventOverlap()
        self._device.fork(run, *tensors_in(inputs), after_current=previous.event is None)
        return results[0], EventOverlap(self._last_events[ctx_name])

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
            Five results: rows [local experts, ranks * max tokens, hidden], sorted by source rank
            and token; with ``use_fp8``, a pair of these rows and their scales [local experts, ranks
            * max tokens, hidden / 128], whose second dimension has stride 1. Rows of an expert
            after its received rows are undefined. Then int32 [local experts], numbers of received
            rows; the handle; the event; and the function, or ``None``.

        Raises:
            InvalidArgument: options exclude each other, or two earlier sends are not yet received.
        """
        max_tokens, hidden = num_max_dispatch_tokens_per_rank, x.shape[1]
        num_groups = -(-hidden // SCALE_ELEMENTS)
        _check_async_options("low_latency_dispatch", async_finish, return_recv_hook)
        if use_ue8m0 and not (round_scale and num_groups % _EXPONENTS_PER_INT == 0):
            expected = "False, or round_scale=True and a hidden that is a multiple of 512"
            raise InvalidArgument("low_latency_dispatch", "use_ue8m0", use_ue8m0, expected)
        for _ in range(2):
            self._slot ^= 1
            ctx = self._context(f"slot {self._slot}", max_tokens, hidden, num_experts)
            if ctx.pending is None:
                break
        else:
            expected = "at most two: call the function of an earlier dispatch first"
            raise InvalidArgument(
                "low_latency_dispatch", "the number of pending sends", 3, expected
            )
        experts, capacity = ctx.local_experts, self.group_size * max_tokens

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return x.new_empty(shape, dtype=dtype)

        out = empty(experts, capacity, hidden, dtype=torch.float8_e4m3fn if use_fp8 else x.dtype)
        scales = empty(experts, num_groups, capacity, dtype=torch.float32) if use_fp8 else None
        exponents = (
            empty(experts, num_groups // _EXPONENTS_PER_INT, capacity) if use_ue8m0 else None
        )
        counts, layout_range = empty(experts), empty(experts, self.group_size, dtype=torch.int64)
        handle = LowLatencyHandle(
            empty(experts, capacity), layout_range, max_tokens, hidden, num_experts,
            empty(capacity, topk_idx.shape[1]), self._slot,
        )  # fmt: skip

        def send(function: Callable[..., Received]) -> Received:
            rows, scale = _fp8_with_rounded_scales(x) if use_fp8 and round_scale else (x, None)
            quantise = use_fp8 and scale is None
            return function(
                rows, topk_idx, ctx, x_scale=scale, quantise=quantise, max_tokens=max_tokens
            )

        def receive(received: Received) -> None:
            ctx.buffer.launcher.repeat(pack_launch(received, out, scales, handle.src_info))
            ends_by_rank = received.counts.cumsum(1)
            torch.add((ends_by_rank - received.counts) << 32, received.counts, out=layout_range)
            counts.copy_(ends_by_rank[:, -1])
            if cumulative_local_expert_recv_stats is not None:
                cumulative_local_expert_recv_stats.add_(counts)
            # Positions are sorted by expert without gaps; result rows have gaps up to the capacity.
            first_row = torch.arange(
                0, experts * capacity, capacity, device=x.device, dtype=torch.int32
            )
            first_position = received.ends - counts
            shift = (first_row - first_position)[received.local_ids.clamp(min=0)]
            position = received.position_of_route
            handle.row_of_route.copy_(torch.where(position >= 0, position + shift, -1))
            if scales is not None and exponents is not None:
                exponent_bytes = (scales.view(torch.int32) >> _MANTISSA_BITS).to(torch.uint8)
                exponents.copy_(exponent_bytes.mT.contiguous().view(torch.int32).mT)

        def work() -> tuple[Any, ...]:
            receive(send(ep_dispatch))
            return out, scales, exponents, counts, handle

        ctx_name = f"slot {self._slot}"
        returned_scales = scales if exponents is None else exponents
        result: Rows = out if returned_scales is None else (out, returned_scales.mT)
        inputs = x, topk_idx, cumulative_local_expert_recv_stats
        if return_recv_hook:
            pending, event = self._run(ctx_name, lambda: send(ep_send), None, False)

            def hook() -> None:
                self._run(ctx_name, lambda: receive(pending.wait()), None, False)

            return result, counts, handle, event, hook
        # The second stream also writes the results, which are allocated on this stream.
        outputs = out, scales, exponents, counts, handle
        _, event = self._run(ctx_name, work, None, async_finish, inputs, outputs)
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
        _check_async_options("low_latency_combine", async_finish, return_recv_hook)
        max_tokens, ctx_name = handle.num_max_dispatch_tokens_per_rank, f"slot {handle.slot}"
        ctx = self._context(ctx_name, max_tokens, handle.hidden, handle.num_experts)
        if ctx.pending is not None:
            expected = "a handle whose dispatch has been received: call its function first"
            raise InvalidArgument("low_latency_combine", "handle", "a pending send", expected)
        products = self._combine_inputs.get(handle.slot) if zero_copy else x
        if products is None:
            expected = "False unless get_next_low_latency_combine_buffer(handle) has been called"
            raise InvalidArgument("low_latency_combine", "zero_copy", True, expected)
        y = products.flatten(0, 1)

        def work() -> torch.Tensor:
            # The ranks of the experts need this rank's weights: dispatch ids and weights, no rows.
            rows, tokens = y.new_empty((len(topk_idx), handle.hidden)), len(topk_idx)
            call = DispatchCall(rows, topk_idx, ctx, topk_weights, max_tokens=max_tokens)
            routes = call.result()
            call.launch_kernel(routes.layout, num_copy=0)
            assert routes.weights is not None
            weights = routes.weights.new_empty(len(y) + 1)
            # Routes to other ranks write to one extra element, which belongs to no row of y.
            row = torch.where(handle.row_of_route >= 0, handle.row_of_route, len(y))
            weights[row] = routes.weights[routes.position_of_route.clamp(min=0)]
            received = received_for_combine(
                ctx, handle.row_of_route, routes.ends, routes.destinations, tokens, max_tokens,
                weights,
            )  # fmt: skip
            sums: torch.Tensor = ep_combine(y, received, ctx)
            return sums if out is None else out.copy_(sums)

        inputs = y, topk_idx, topk_weights, handle, out
        is_async = async_finish or return_recv_hook
        result, event = self._run(ctx_name, work, None, is_async, inputs)
        return result, event, event.current_stream_wait if return_recv_hook else None

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """Return the bf16 [local experts, ranks * max tokens, hidden] that the next
        ``low_latency_combine`` with ``handle`` and ``zero_copy`` reads.
        """
        shape = (*handle.src_info.shape, handle.hidden)
        products = self._combine_inputs.get(handle.slot)
        if products is None or products.shape != shape:
            products = handle.src_info.new_empty(shape, dtype=torch.bfloat16)
            self._combine_inputs[handle.slot] = products
        return products


def _check_async_options(function: str, async_finish: bool, return_recv_hook: bool) -> None:
    if async_finish and return_recv_hook:
        raise InvalidArgument(function, "async_finish", True, "False with return_recv_hook")


def _fp8_with_rounded_scales(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x in fp8 and its scales [tokens, hidden / 128], rounded up to powers of two.

    Adding all mantissa bits and clearing them rounds a positive float up to a power of two.
    """
    groups = pad(x, (0, -x.shape[1] % SCALE_ELEMENTS)).float().unflatten(1, (-1, SCALE_ELEMENTS))
    scale = groups.abs().amax(2).clamp(min=_MIN_AMAX) / _FP8_MAXIMUM
    bits = scale.view(torch.int32) + (1 << _MANTISSA_BITS) - 1
    scale = (bits >> _MANTISSA_BITS << _MANTISSA_BITS).view(torch.float32)
    rows = (groups / scale[..., None]).to(torch.float8_e4m3fn).flatten(1)
    return rows[:, : x.shape[1]].contiguous(), scale


def tensors_in(results: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples and lists."""
    if isinstance(results, torch.Tensor):
        yield results
    elif isinstance(results, tuple | list):
        for each in results:
            yield from tensors_in(each)


def received_for_combine(
    ctx: EPContext, positions: torch.Tensor, ends: torch.Tensor, destinations: torch.Tensor,
    tokens: int, max_tokens: int, weights: torch.Tensor | None = None,
) -> Received:  # fmt: skip
    """Return the layout argument of ``ep_combine`` for products at ``positions``.

    Args:
        positions: int32 [ranks * max_tokens, choices], index of each product in y, or -1.
        ends: int32 [local experts]; y has at least ``ends[-1]`` rows.
        destinations, tokens, max_tokens: see ``Received``.
        weights: fp32 [rows of y].
    """
    return Received(
        ctx, positions, None, ends, ends, ends, weights, positions, positions, destinations, tokens,
        max_tokens,
    )  # fmt: skip
