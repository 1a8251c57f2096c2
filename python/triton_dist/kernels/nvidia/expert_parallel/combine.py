"""Kernels and algorithms of expert-parallel combine; ``op.py`` describes the op."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.kernels.common import libraries
from triton_dist.kernels.common.context import (
    Check,
    checked_buffer,
    raise_first_error,
)
from triton_dist.kernels.common.exchange.buffer import (
    LaunchParams,
    checked_params,
    params_for_device,
    params_in,
)
from triton_dist.kernels.common.exchange.protocol import (
    after_wait,
    await_programs,
    chunk_flag,
    notify_ranks,
)
from triton_dist.kernels.common.op import Algorithm, Algorithms, OpCall
from triton_dist.kernels.common.peers import target_at
from triton_dist.kernels.nvidia.expert_parallel.algorithms import (
    DEFAULT_PARAMS,
    Key,
    ceil_div,
    check_packets,
    digest_of,
    fits_packets,
    launch_options,
    most_programs,
    num_sms_check,
    packet_options,
    packet_programs_of_sm,
    plan_of,
)
from triton_dist.kernels.nvidia.expert_parallel.context import (
    ANY_SIZE,
    EPContext,
    Received,
    matrix_checks,
)
from triton_dist.kernels.nvidia.expert_parallel.kernel import (
    EPLayout,
    EPPlan,
    begin_call_of,
    check_rows,
    sum_of_choices,
)
from triton_dist.kernels.nvidia.expert_parallel.packets import kernel_combine_packets
from triton_dist.runtime.device import current_device
from triton_dist.runtime.launch import Launch

_COMBINE = tuple(
    LaunchParams(ctas, nbytes, chunks)
    for ctas in (256, 128, 64, 24)
    for nbytes in (16384, 8192, 4096)
    for chunks in (1, 4, 8, 16)
)
_PACKETS = tuple(LaunchParams(256, nbytes) for nbytes in (4096, 2048, 8192))
_MIN_TOKENS_OF_CHUNKS = 4


def programs_of_sm(params: LaunchParams) -> int:
    """Return the programs that fit on a multiprocessor; large blocks need more registers."""
    return 2 if params.block_bytes <= 8192 else 1


@jit
def send_sums(
    y_ptr, y_rows, partials_ptr, partials_table, ep_layout, call, token, max_tokens, hidden,
    ep_plan: tl.constexpr,
):  # fmt: skip
    """Send the sums of a token of each peer, if this rank has products of it."""
    NUM_RANKS: tl.constexpr = ep_plan.NUM_RANKS
    TOPK: tl.constexpr = ep_plan.TOPK
    for step in range(1, NUM_RANKS):
        source = (call.rank + step) % NUM_RANKS
        target_ptr = target_at(partials_table, source, partials_ptr)
        route = (source * max_tokens + token) * TOPK
        latest = -1
        for choice in tl.static_range(TOPK):
            position = tl.load(ep_layout.position_of_route + route + choice)
            latest = tl.maximum(latest, position)
        if latest >= 0:
            for first in range(0, hidden, ep_plan.BLOCK):
                column = first + tl.arange(0, ep_plan.BLOCK)
                row = call.offset + call.rank * max_tokens + token
                target = target_ptr + row * hidden + column
                with dl.mark("push"):
                    total = sum_of_choices(
                        y_ptr, y_rows, ep_layout, route, column, hidden, ep_plan
                    )  # fmt: skip
                    tl.store(target, total.to(y_ptr.dtype.element_ty), mask=column < hidden)


@jit
def add_sums(
    y_ptr, y_rows, out_ptr, partials_ptr, offset, ep_layout, call, token, max_tokens, hidden,
    ep_plan: tl.constexpr,
):  # fmt: skip
    """Add the sums that the ranks have sent for a token of this rank, in the order of ranks."""
    ranks = tl.load(ep_layout.destinations + token)
    route = (call.rank * max_tokens + token) * ep_plan.TOPK
    NUM_RANKS: tl.constexpr = ep_plan.NUM_RANKS
    for first in range(0, hidden, ep_plan.BLOCK):
        column = first + tl.arange(0, ep_plan.BLOCK)
        in_row = column < hidden
        total = tl.full((ep_plan.BLOCK,), 0.0, tl.float32)
        own = sum_of_choices(y_ptr, y_rows, ep_layout, route, column, hidden, ep_plan)
        for source in tl.static_range(NUM_RANKS):
            is_sent = ((ranks >> source) & 1 != 0) & (call.rank != source)
            row = call.offset + source * max_tokens + token
            # Bypass L1, which may hold the sums of an earlier call.
            received = tl.load(
                partials_ptr + offset + row * hidden + column, mask=in_row & is_sent, other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
            # Round the own sum like the others.
            rounded = own.to(received.dtype).to(tl.float32)
            total += tl.where(call.rank == source, rounded, received.to(tl.float32))
        out = out_ptr + (call.offset + token) * hidden + column
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=in_row)


@jit(do_not_specialize=["y_rows", "tokens", "max_tokens", "rank", "num_chunks", "digest"])
def kernel_combine(
    y_ptr, y_rows, out_ptr, partials_ptr, partials_table, peers, ep_layout, tokens, max_tokens,
    hidden, rank, num_chunks, digest, ep_plan: tl.constexpr,
):  # fmt: skip
    """Sum the products of each token over experts and ranks into out [tokens, hidden].

    Grid (programs,). partials: [NUM_RANKS, max_tokens, hidden]. The first half of the programs
    sends sums, chunk by chunk. The others add them when they arrive.
    """
    call = begin_call_of(peers, digest, rank, False, ep_plan)
    program = tl.program_id(0)
    check_rows(y_rows, ep_layout, ep_plan)
    # A rank that has begun no longer reads what an earlier call sent.
    if program == 0:
        notify_ranks(call, 1, chunk_flag(call, 0), ep_plan)
    senders = tl.cdiv(tl.num_programs(0), 2)
    steps = tl.cdiv(tl.cdiv(max_tokens, senders), num_chunks)
    if program < senders:
        first_programs = tl.full((ep_plan.LANES,), 0, tl.int32)
        await_programs(peers, 1, first_programs, chunk_flag(call, 0), ep_plan)
        for chunk in range(num_chunks):
            begin = chunk * steps * senders + program
            end = tl.minimum((chunk + 1) * steps * senders, max_tokens)
            for token in range(begin, end, senders):
                send_sums(
                    y_ptr, y_rows, partials_ptr, partials_table, ep_layout, call, token, max_tokens,
                    hidden, ep_plan,
                )  # fmt: skip
            notify_ranks(call, 0, chunk_flag(call, chunk), ep_plan)
    adders = tl.maximum(tl.num_programs(0) - senders, 1)
    # A single program sends, then adds.
    first_sender = tl.where(tl.num_programs(0) == 1, 0, program - senders)
    if first_sender >= 0:
        for chunk in range(num_chunks):
            for sender in range(first_sender, senders, adders):
                same_programs = tl.full((ep_plan.LANES,), 0, tl.int32) + sender
                waited = await_programs(peers, 0, same_programs, chunk_flag(call, chunk), ep_plan)
                offset = after_wait(call.offset, waited)
                begin = chunk * steps * senders + sender
                end = tl.minimum((chunk + 1) * steps * senders, tokens)
                for token in range(begin, end, senders):
                    add_sums(
                        y_ptr, y_rows, out_ptr, partials_ptr, offset, ep_layout, call, token,
                        max_tokens, hidden, ep_plan,
                    )  # fmt: skip


@jit(do_not_specialize=["y_rows", "tokens"])
def kernel_partial_sums(
    y_ptr, y_rows, out_ptr, ep_layout, tokens, hidden, ep_plan: tl.constexpr
):  # fmt: skip
    """Store this rank's sum for each token of all ranks in out [tokens, hidden], for a library."""
    check_rows(y_rows, ep_layout, ep_plan)
    token = tl.program_id(0).to(tl.int64)
    while token < tokens:
        for first in range(0, hidden, ep_plan.BLOCK):
            column = first + tl.arange(0, ep_plan.BLOCK)
            route = token * ep_plan.TOPK
            total = sum_of_choices(y_ptr, y_rows, ep_layout, route, column, hidden, ep_plan)
            out = out_ptr + token * hidden + column
            tl.store(out, total.to(out_ptr.dtype.element_ty), mask=column < hidden)
        token += tl.num_programs(0)


@dataclass(eq=False, repr=False)
class CombineCall(OpCall):
    """One call of ``ep_combine``: its arguments."""

    y: torch.Tensor
    received: Received
    ctx: EPContext
    apply_weights: bool = True
    num_sms: int | None = None
    num_ctas: int | None = None
    block_bytes: int | None = None
    num_chunks: int | None = None
    algorithm: str | None = None
    accepted_key: Any = None

    def __post_init__(self) -> None:
        self.key = self.checked_key() if self.accepted_key is None else self.accepted_key
        self.chosen = COMBINE[self.algorithm or CombinePush.name]
        params = checked_params(
            "ep_combine", self.num_ctas, self.block_bytes, self.num_chunks, DEFAULT_PARAMS
        )
        limit = most_programs(self.num_sms, programs_of_sm(params))
        self.params = replace(params, num_ctas=min(params.num_ctas, limit))
        self.chosen.check(self)

    def checked_key(self) -> Key:
        """Return the key that a tuning is recorded under. Raise if the call cannot work."""
        ctx, received, function = self.ctx, self.received, "ep_combine"
        checked_buffer(ctx, EPContext, function, "create_ep_context")

        def checks() -> Iterator[Check]:
            is_own = isinstance(received, Received) and received.ctx is ctx
            yield "received", type(received).__name__, is_own, "a result of ep_dispatch with ctx"
            yield "ctx", "can_combine=False", ctx.can_combine, "a context with can_combine=True"
            yield "ctx", "a pending send", ctx.pending is None, "wait() of the result of ep_send"
            yield from matrix_checks(ctx, "y", self.y, ANY_SIZE, (ctx.hidden,), ctx.dtype)
            yield num_sms_check(self.num_sms)

        raise_first_error(function, checks())
        return Key(
            received.max_tokens, ctx.hidden, received.position_of_route.shape[1], ctx.num_experts,
            self.y.dtype, ctx.num_ranks, "none", self.has_weights, False, 0, None, 1, self.num_sms,
            received.routing_skew,
        )  # fmt: skip

    @property
    def has_weights(self) -> bool:
        return self.apply_weights and self.received.weights is not None

    def layout(self) -> EPLayout:
        layout: EPLayout = self.received.layout
        return layout if self.has_weights else layout._replace(weights=None)

    def plan(self) -> EPPlan:
        block = self.params.block_bytes // self.y.element_size()
        topk = self.received.position_of_route.shape[1]
        return plan_of(self.ctx.num_ranks, self.ctx.local_experts, topk, BLOCK=block)

    def digest(self) -> int:
        topk = self.received.position_of_route.shape[1]
        return digest_of(self.received.max_tokens, topk, self.has_weights, self.params)

    def partial_sums(self) -> torch.Tensor:
        """Return this rank's sum for each token of all ranks, [ranks * max_tokens, hidden]."""
        received, ctx = self.received, self.ctx
        tokens = len(received.position_of_route)
        out = self.y.new_empty((tokens, ctx.hidden))
        options = {"ep_plan": self.plan(), "num_warps": self.params.num_warps}
        arguments = (self.y, len(self.y), out, self.layout(), tokens, ctx.hidden)
        grid = (min(tokens, 8 * ctx.device.num_sms),)
        ctx.sums.launcher.repeat(Launch(kernel_partial_sums, grid, arguments, options))
        return out

    def new_out(self) -> torch.Tensor:
        return self.y.new_empty((self.received.tokens, self.ctx.hidden))


def combine_key(*args: Any, **kwargs: Any) -> Key:
    """Return the key that a tuning is recorded under. Raise if the call cannot work."""
    return CombineCall(*args, **kwargs).key


class CombinePush(Algorithm[CombineCall, Key]):
    """Each rank sends one sum per token to its source, which adds the sums. One launch."""

    name = "push"
    tunables: ClassVar[tuple[str, ...]] = ("num_ctas", "block_bytes", "num_chunks")

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        candidates = dict.fromkeys((params_for_device(DEFAULT_PARAMS), *_COMBINE))
        return (params.values for params in candidates)

    def fits(self, config: Mapping[str, Any], sizes: Key) -> bool:
        limit = most_programs(sizes.num_sms, programs_of_sm(params_in(config)))
        smallest = min(ctas for ctas, *_ in self.candidates())
        per_program = sizes.M // config["num_ctas"]
        chunks = int(config["num_chunks"])
        enough = chunks == 1 or bool(per_program >= _MIN_TOKENS_OF_CHUNKS * chunks)
        return enough and int(config["num_ctas"]) <= max(limit, smallest)

    def compile(self, call: CombineCall) -> None:
        self.launch(call, call.new_out()).compile()

    def run(self, call: CombineCall) -> torch.Tensor:
        buffer, out, params = call.ctx.sums, call.new_out(), call.params
        # Only the first half of the programs sends sums and sets flags of phase 0.
        buffer.begin(1, ceil_div(params.num_ctas, 2), params.num_chunks)
        buffer.launcher.repeat(self.launch(call, out))
        buffer.timeout_words.end()
        return out

    def launch(self, call: CombineCall, out: torch.Tensor) -> Launch:
        ctx, received, params = call.ctx, call.received, call.params
        _, peers = ctx.sums.regions(call.y.dtype)
        partials = ctx.sums.memory["partials"]
        arguments = (
            call.y, len(call.y), out, partials.local.view(call.y.dtype), partials.pointers, peers,
            call.layout(), received.tokens, received.max_tokens, ctx.hidden, ctx.rank,
            params.num_chunks, call.digest(),
        )  # fmt: skip
        options = {"ep_plan": call.plan(), **launch_options(params, programs_of_sm(params))}
        return Launch(kernel_combine, (params.num_ctas,), arguments, options)


class CombinePackets(CombinePush):
    """Sums travel in words that mark their own arrival. One launch, for few tokens."""

    name = "packets"
    tunables = ("num_ctas", "block_bytes")

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        candidates = dict.fromkeys(map(params_for_device, _PACKETS))
        return ((params.num_ctas, params.block_bytes) for params in candidates)

    def fits(self, config: Mapping[str, Any], sizes: Key) -> bool:
        return fits_packets(sizes) and super().fits({**config, "num_chunks": 1}, sizes)

    def check(self, call: CombineCall) -> None:
        check_packets("ep_combine", call.key)

    def launch(self, call: CombineCall, out: torch.Tensor) -> Launch:
        ctx, received, params = call.ctx, call.received, call.params
        arguments = (
            call.y, len(call.y), out, ctx.packets(ctx.sums), call.layout(), received.tokens,
            received.max_tokens, ctx.hidden, ctx.rank, call.digest(),
        )  # fmt: skip
        options = {"ep_plan": call.plan(), **packet_options(params, ctx.num_ranks)}
        programs = most_programs(call.num_sms, packet_programs_of_sm(ctx.num_ranks))
        programs = min(params.num_ctas, programs)
        return Launch(kernel_combine_packets, (programs,), arguments, options)


class CombineCollective(Algorithm[CombineCall, Key]):
    """Sums of all tokens, then the group's reduce-scatter (NCCL; gloo on CPU ranks)."""

    name = "collective"
    is_fallback = True

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        return [()] if current_device().has_nccl else []

    def fits(self, config: Mapping[str, Any], sizes: Key) -> bool:
        return sizes.num_ranks > 1

    def run(self, call: CombineCall) -> torch.Tensor:
        sums = call.partial_sums()
        if call.ctx.num_ranks == 1:
            return sums[: call.received.tokens]
        return libraries.reduce_scatter(sums, call.ctx.group)[: call.received.tokens]


COMBINE = Algorithms("ep_combine", (CombinePush(), CombinePackets(), CombineCollective()))
