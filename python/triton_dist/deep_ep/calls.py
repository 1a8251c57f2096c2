"""Contexts, streams and events of the calls of ``Buffer``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

from triton_dist.deep_ep.utils import EventHandle, EventOverlap
from triton_dist.kernels.nvidia.expert_parallel import EPContext, Received, create_ep_context
from triton_dist.kernels.nvidia.expert_parallel.context import MAX_TOPK
from triton_dist.kernels.nvidia.expert_parallel.kernel import EPLayout
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import Group, group_for, process_group_of

Rows: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""Rows, or fp8 rows and their scales."""


class Calls:
    """Base of ``Buffer``. Its first calls create contexts; larger calls replace them."""

    def __init__(self, group: Group) -> None:
        self.group, ranks = process_group_of(group), group_for(group)
        self.rank, self.group_size = ranks.rank, ranks.size
        self._device = current_device()
        self._contexts: dict[tuple[Any, ...], EPContext] = {}
        # CUDA graphs use the memory of these contexts, also after larger contexts replaced them.
        self._in_graphs: dict[EPContext, None] = {}
        self._last: dict[str, EventHandle] = {}

    def destroy(self) -> None:
        """Free the memory; idempotent. Collective."""
        contexts = dict.fromkeys([*self._contexts.values(), *self._in_graphs])
        self._contexts, self._in_graphs = {}, {}
        for ctx in contexts:
            ctx.finalize()

    def get_comm_stream(self) -> Any:
        """Return the stream of calls with ``async_finish``; ``None`` on CPU ranks."""
        return self._device.second_stream

    def _context(self, kind: str, max_tokens: int, hidden: int, num_experts: int) -> EPContext:
        """Return the context of ``kind`` for at least ``max_tokens``, equal on all ranks.
        Collective.

        A context with a pending send cannot be replaced, so the result may be too small.
        """
        key = kind, hidden, num_experts
        ctx = self._contexts.get(key)
        if ctx is None or (ctx.max_tokens < max_tokens and ctx.pending is None):
            if ctx is not None and ctx not in self._in_graphs:
                ctx.finalize()
            ranks, dtype = self.group_size, torch.float32 if kind == "weights" else torch.bfloat16
            ctx = self._contexts[key] = create_ep_context(
                self.rank, ranks, ranks, max_tokens, hidden, num_experts, MAX_TOPK, dtype,
                group=self.group,
            )  # fmt: skip
        if self._device.is_capturing():
            self._in_graphs[ctx] = None
        return ctx

    def _run(
        self,
        kind: str,
        work: Callable[[], Any],
        previous: EventOverlap | None,
        is_async: bool,
        *inputs: Any,
    ) -> tuple[Any, EventOverlap]:
        """Return the result of ``work`` and an event.

        Args:
            kind: calls of a kind run in order, also on different streams: they share a context.
            previous: event to wait for. An asynchronous call with an event does not wait for
                earlier work of the current stream.
            is_async: run on a second stream.
            inputs: tensors that ``work`` uses, also in tuples.
        """
        last, previous, results = self._last.get(kind), previous or EventOverlap(), []

        def run() -> None:
            if last is not None and last.must_be_awaited():
                last.current_stream_wait()
            previous.current_stream_wait()
            results.append(work())
            self._last[kind] = EventHandle(*(flat(results) if is_async else ()))

        if not is_async:
            run()
            self._last[kind].is_awaited = True  # by its own stream
            return results[0], EventOverlap()
        self._device.fork(run, *flat(inputs), after_current=previous.event is None)
        return results[0], EventOverlap(self._last[kind])


def flat(results: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples and lists."""
    if isinstance(results, torch.Tensor):
        yield results
    elif isinstance(results, tuple | list):
        for each in results:
            yield from flat(each)


def received_at(
    ctx: EPContext, positions: torch.Tensor, ends: torch.Tensor, destinations: torch.Tensor,
    tokens: int, max_tokens: int, weights: torch.Tensor | None = None,
) -> Received:  # fmt: skip
    """Return the argument of ``ep_combine`` for products at ``positions``.

    Args:
        positions: int32 [ranks * max_tokens, choices], index of each product in y, or -1.
        ends: int32 [local experts]; y has at least ``ends[-1]`` rows.
        destinations, tokens, max_tokens: see ``Received``.
        weights: fp32 [rows of y].
    """
    layout = EPLayout(ends, weights, positions, positions, ends, ends, destinations, ctx.control)
    return Received(
        ctx, positions, None, ends, ends, ends, weights, positions, positions, destinations, tokens,
        max_tokens, layout,
    )  # fmt: skip
