"""Kernels and algorithms of expert-parallel combine; ``op.py`` describes the op.

Sums are sent in untagged lines (``packets.py``), so a program adds a block as soon as its words
have arrived. A rank sends sums only after all ranks have begun the call. Each rank has then cleared
the lines of the previous call.

*Two slots for few tokens.* Calls of at most ``EPContext.slot_tokens`` tokens alternate between two
slots, so a rank sends before peers have begun the call. When it uses a slot again, it has waited
for the begun flags of a call in between. Every peer had then finished the earlier call.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.kernels.common import libraries
from triton_dist.kernels.common.context import Check, checked_buffer, raise_first_error
from triton_dist.kernels.common.exchange.buffer import (
    LaunchParams,
    checked_params,
    params_for_device,
)
from triton_dist.kernels.common.exchange.packet_calls import clear_packets, peer_ranks
from triton_dist.kernels.common.exchange.packets import add_lines, packet_offset, payload_of
from triton_dist.kernels.common.exchange.protocol import LINE_WORDS, chunk_flag, notify_ranks
from triton_dist.kernels.common.op import Algorithm, Algorithms, OpCall
from triton_dist.kernels.common.peers import digest_of, target_at
from triton_dist.kernels.nvidia.expert_parallel.algorithms import (
    EP_DEFAULT_PARAMS,
    MAX_COMBINE_PROGRAMS,
    Key,
    launch_options,
    max_programs,
    num_sms_check,
    packet_programs_per_sm,
    plan_of,
)
from triton_dist.kernels.nvidia.expert_parallel.context import (
    ANY_SIZE,
    EPContext,
    Received,
    matrix_checks,
    pending_send_check,
)
from triton_dist.kernels.nvidia.expert_parallel.kernel import (
    FAULT_Y_ROWS,
    EPLayout,
    EPPlan,
    await_begun,
    begin_ep_call,
    report_fault,
    store_row,
)
from triton_dist.kernels.nvidia.expert_parallel.packets import LINE_BITS, line_words, poll_untagged
from triton_dist.runtime.device import current_device
from triton_dist.runtime.launch import Launch

_COMBINE_PARAMS = tuple(
    LaunchParams(*each)
    for each in itertools.product((512, 256, 128), (16384, 8192, 4096), (1, 4, 16))
)


@jit
def report_missing_rows(y_rows, ep_layout, ep_plan: tl.constexpr):
    """Report a fault if y has fewer rows than positions in use. Missing products count as zero."""
    is_short = tl.load(ep_layout.ends + ep_plan.EXPERTS - 1) > y_rows
    if (tl.program_id(0) == 0) & is_short:
        report_fault(ep_layout.fault_address, FAULT_Y_ROWS)


@jit
def token_positions(ep_layout, first_route, valid, ep_plan: tl.constexpr):
    """Return the positions of a token's routes on this rank, or -1 if ``valid`` is false."""
    TOPK: tl.constexpr = ep_plan.TOPK
    positions = tl.tuple([])
    for choice in tl.static_range(TOPK):
        position_ptr = ep_layout.position_of_route + first_route + choice
        positions = positions + (tl.load(position_ptr, mask=valid, other=-1),)  # noqa: RUF005
    return positions


@jit
def sum_of_choices(y_ptr, y_rows, ep_layout, positions, column, hidden, ep_plan: tl.constexpr):
    """Return the weighted fp32 sum of a token's products on this rank."""
    TOPK: tl.constexpr = ep_plan.TOPK
    is_local, products, weights = tl.tuple([]), tl.tuple([]), tl.tuple([])
    for choice in tl.static_range(TOPK):
        position = positions[choice]
        exists = (position >= 0) & (position < y_rows)
        y = y_ptr + position.to(tl.int64) * hidden + column
        weight = 1.0
        if ep_layout.weights is not None:
            weight = tl.load(ep_layout.weights + position, mask=exists, other=0.0)
        product = tl.load(y, mask=(column < hidden) & exists, other=0.0)
        is_local, products = is_local + (exists,), products + (product,)  # noqa: RUF005
        weights = weights + (weight,)  # noqa: RUF005
    total = tl.full((ep_plan.BLOCK,), 0.0, tl.float32)
    # Skip choices of other ranks, which are most choices. All loads were issued before this loop.
    for choice in tl.static_range(TOPK):
        if is_local[choice]:
            total += products[choice].to(tl.float32) * weights[choice]
    return total


@jit
def send_sums(
    y_ptr, y_rows, packets, peers, ep_layout, call, begun, source, positions, item, first_token,
    hidden, ep_plan: tl.constexpr,
):  # fmt: skip
    """Send block ``item`` of the sums of this rank's products to ``source``, for its tokens.

    Skip tokens without products on this rank. Return the new value of ``begun`` (``await_begun``).
    """
    ELEMENTS_PER_LINE: tl.constexpr = LINE_BITS // y_ptr.dtype.element_ty.primitive_bitwidth
    TOPK: tl.constexpr = ep_plan.TOPK
    blocks, row_lines = tl.cdiv(hidden, ep_plan.BLOCK), tl.cdiv(hidden, ELEMENTS_PER_LINE)
    column = item % blocks * ep_plan.BLOCK + tl.arange(0, ep_plan.BLOCK)
    max_position = positions[0]
    for choice in tl.static_range(1, TOPK):
        max_position = tl.maximum(max_position, positions[choice])
    if max_position >= 0:
        target = target_at(packets.table, source, packets.words)
        sums = sum_of_choices(y_ptr, y_rows, ep_layout, positions, column, hidden, ep_plan)
        begun = await_begun(begun, 0, peers, call, ep_plan)
        token = first_token + item // blocks
        target += first_line(packets, call.rank, token, row_lines) * LINE_WORDS
        # Fill the last line with zeros, because the receiver waits for whole lines.
        row_ptr, in_lines = target.to(y_ptr.dtype) + column, column < row_lines * ELEMENTS_PER_LINE
        store_row(row_ptr, sums.to(y_ptr.dtype.element_ty), in_lines)
    return begun


@jit
def first_line(packets, source, token, row_lines):
    """Return the index of the first 16-byte line of a token's sums from ``source``."""
    return packet_offset(0, source, packets.shard_words, 1, 1) // 2 + token * row_lines


@jit
def add_sums(
    y_ptr, y_rows, out_ptr, packets, ep_layout, call, senders, positions, item, first_token,
    hidden, ep_plan: tl.constexpr,
):  # fmt: skip
    """Add the sums of all ranks for block ``item`` of this rank's tokens, in the order of ranks.

    Bit r of ``senders`` is set if rank r sends a sum.
    """
    NUM_RANKS: tl.constexpr = ep_plan.NUM_RANKS
    BLOCK: tl.constexpr = ep_plan.BLOCK
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    ELEMENTS_PER_LINE: tl.constexpr = LINE_BITS // DTYPE.primitive_bitwidth
    blocks, row_lines = tl.cdiv(hidden, BLOCK), tl.cdiv(hidden, ELEMENTS_PER_LINE)
    token, first = item // blocks, item % blocks * BLOCK
    column = first + tl.arange(0, BLOCK)
    index = first // ELEMENTS_PER_LINE + tl.arange(0, BLOCK // ELEMENTS_PER_LINE)
    own = sum_of_choices(y_ptr, y_rows, ep_layout, positions, column, hidden, ep_plan)
    lines, is_sent, payloads = tl.tuple([]), tl.tuple([]), tl.tuple([])
    words_ptr = packets.words.to(tl.pointer_type(tl.int32))
    other_ranks = peer_ranks(call.rank, NUM_RANKS)
    for peer in tl.static_range(NUM_RANKS - 1):
        line = first_line(packets, other_ranks[peer], first_token + token, row_lines) + index
        lines = lines + (words_ptr + line * 4,)  # noqa: RUF005
        is_sent = is_sent + ((index < row_lines) & ((senders >> other_ranks[peer]) & 1 != 0),)  # noqa: RUF005
    payload = tl.reshape(payload_of(own.to(DTYPE)), [BLOCK // ELEMENTS_PER_LINE, 4])
    if NUM_RANKS > 1:
        arrived = poll_untagged(lines, is_sent, packets.timeout_words)
        tl.debug_barrier()
        for peer in tl.static_range(NUM_RANKS - 1):
            words = tl.where(is_sent[peer][:, None], line_words(arrived, peer), 0)
            payloads = payloads + (words,)  # noqa: RUF005
    sums = add_lines(payload, payloads, call.rank, NUM_RANKS, DTYPE)
    out = out_ptr + (call.offset + token) * hidden + column
    with dl.mark("store"):
        tl.store(out, sums.to(out_ptr.dtype.element_ty), mask=column < hidden)
    for peer in tl.static_range(NUM_RANKS - 1):
        line = first_line(packets, other_ranks[peer], first_token + token, row_lines) + index
        clear_packets(packets.words, line, is_sent[peer])


@jit(
    do_not_specialize=[
        "y_rows", "tokens", "max_tokens", "first_slot_token", "slot_tokens", "rank", "num_chunks",
        "call_tag",
    ]
)  # fmt: skip
def kernel_combine(
    y_ptr, y_rows, out_ptr, packets, peers, ep_layout, tokens, max_tokens, first_slot_token,
    slot_tokens, hidden, rank, num_chunks, call_tag, ep_plan: tl.constexpr,
):  # fmt: skip
    """Sum the products of each token over experts and ranks into ``out`` [tokens, hidden].

    Grid (programs,). Each program sends its blocks of sums in ``num_chunks`` chunks. It adds a
    received block after it has sent the next chunk, and loads the positions of the next block
    early. If ``slot_tokens`` is not 0, calls alternate between two slots of ``slot_tokens`` tokens
    from ``first_slot_token`` on. A rank then sends before peers have begun the call.
    """
    NUM_RANKS: tl.constexpr = ep_plan.NUM_RANKS
    program, programs = tl.program_id(0), tl.num_programs(0)
    call = begin_ep_call(peers, call_tag, rank, False, ep_plan)
    # Every call waits for these flags of all ranks, because later calls of few tokens rely on it.
    if program == 0:
        notify_ranks(call, 0, chunk_flag(call, 0), ep_plan)
    slot = (call.epoch % 2).to(tl.int32)
    first_token = tl.where(slot_tokens > 0, first_slot_token + slot * slot_tokens, 0)
    blocks = tl.cdiv(hidden, ep_plan.BLOCK)
    num_items = tl.cdiv(max_tokens * blocks, programs)
    chunk_items = tl.cdiv(num_items, num_chunks)
    # Program 0 also sets flags, so give it the last item, which may not exist. ``can_send`` and
    # ``can_add`` become 1 when the program knows that all ranks have begun the call.
    first, can_send, can_add = programs - 1 - program, (slot_tokens > 0).to(tl.int32), 0
    route = (((rank + 1) % NUM_RANKS) * max_tokens + first // blocks) * ep_plan.TOPK
    next_sent_positions = token_positions(ep_layout, route, first < max_tokens * blocks, ep_plan)
    route = (rank * max_tokens + first // blocks) * ep_plan.TOPK
    is_own = first < tokens * blocks
    next_own_positions = token_positions(ep_layout, route, is_own, ep_plan)
    next_destinations = tl.load(ep_layout.destinations + first // blocks, mask=is_own)
    for step in range(num_items + chunk_items):
        item = first + step * programs
        if (step < num_items) & (item < max_tokens * blocks):
            for other in range(1, NUM_RANKS):
                positions = next_sent_positions
                is_last = other == NUM_RANKS - 1
                next_item = item + tl.where(is_last, programs, 0)
                source = (rank + tl.where(is_last, 1, other + 1)) % NUM_RANKS
                route = (source * max_tokens + next_item // blocks) * ep_plan.TOPK
                exists = next_item < max_tokens * blocks
                next_sent_positions = token_positions(ep_layout, route, exists, ep_plan)
                can_send = send_sums(
                    y_ptr, y_rows, packets, peers, ep_layout, call, can_send,
                    (rank + other) % NUM_RANKS, positions, item, first_token, hidden, ep_plan,
                )  # fmt: skip
        if step >= chunk_items:
            can_add = await_begun(can_add, 0, peers, call, ep_plan)
            item -= chunk_items * programs
            if item < tokens * blocks:
                own_positions, senders = next_own_positions, next_destinations
                token, exists = (item + programs) // blocks, item + programs < tokens * blocks
                route = (rank * max_tokens + token) * ep_plan.TOPK
                next_own_positions = token_positions(ep_layout, route, exists, ep_plan)
                next_destinations = tl.load(ep_layout.destinations + token, mask=exists)
                add_sums(
                    y_ptr, y_rows, out_ptr, packets, ep_layout, call, senders,
                    own_positions, item, first_token, hidden, ep_plan,
                )  # fmt: skip
    report_missing_rows(y_rows, ep_layout, ep_plan)


@jit(do_not_specialize=["y_rows", "tokens"])
def kernel_partial_sums(
    y_ptr, y_rows, out_ptr, ep_layout, tokens, hidden, ep_plan: tl.constexpr
):  # fmt: skip
    """Store this rank's sum for each token of all ranks in ``out`` [tokens, hidden].

    ``out`` is the input of the reduce-scatter of a library.
    """
    report_missing_rows(y_rows, ep_layout, ep_plan)
    token = tl.program_id(0).to(tl.int64)
    while token < tokens:
        for first in range(0, hidden, ep_plan.BLOCK):
            column = first + tl.arange(0, ep_plan.BLOCK)
            positions = token_positions(ep_layout, token * ep_plan.TOPK, True, ep_plan)
            total = sum_of_choices(y_ptr, y_rows, ep_layout, positions, column, hidden, ep_plan)
            out = out_ptr + token * hidden + column
            tl.store(out, total.to(out_ptr.dtype.element_ty), mask=column < hidden)
        token += tl.num_programs(0)


@dataclass(eq=False, repr=False)
class CombineCall(OpCall):
    """The arguments of one call of ``ep_combine``, and values derived from them."""

    y: torch.Tensor
    received: Received
    ctx: EPContext
    apply_weights: bool = True
    num_sms: int | None = None
    num_ctas: int | None = None
    block_bytes: int | None = None
    num_chunks: int | None = None
    algorithm: str | None = None
    validated_key: Any = None
    """Key of the call from the tuner. The arguments are then not checked again."""

    def __post_init__(self) -> None:
        self.key = self.checked_key() if self.validated_key is None else self.validated_key
        self.chosen_algorithm = COMBINE[self.algorithm or CombinePush.name]
        params = checked_params(
            "ep_combine", self.num_ctas, self.block_bytes, self.num_chunks, EP_DEFAULT_PARAMS,
            MAX_COMBINE_PROGRAMS,
        )  # fmt: skip
        self.programs_per_sm = packet_programs_per_sm(
            self.ctx.num_ranks, params.block_bytes, self.key.topk
        )
        limit = max_programs(self.num_sms, self.programs_per_sm)
        self.params = replace(params, num_ctas=min(params.num_ctas, limit))
        self.chosen_algorithm.check(self)

    def checked_key(self) -> Key:
        """Return the tuning key of the call. Raise if an argument is invalid."""
        ctx, received, function = self.ctx, self.received, "ep_combine"
        checked_buffer(ctx, EPContext, function, "create_ep_context")

        def checks() -> Iterator[Check]:
            is_own = isinstance(received, Received) and received.ctx is ctx
            yield "received", type(received).__name__, is_own, "a result of ep_dispatch with ctx"
            yield "ctx", "can_combine=False", ctx.can_combine, "a context with can_combine=True"
            yield pending_send_check(ctx)
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
        layout = self.received.layout
        return layout if self.has_weights else layout._replace(weights=None)

    def plan(self) -> EPPlan:
        block = self.params.block_bytes // self.y.element_size()
        return plan_of(self.ctx.num_ranks, self.ctx.local_experts, self.key.topk, BLOCK=block)

    def partial_sums(self) -> torch.Tensor:
        """Return this rank's sum for each token of all ranks, [ranks * max_tokens, hidden]."""
        received, ctx = self.received, self.ctx
        tokens = len(received.position_of_route)
        out = self.y.new_empty((tokens, ctx.hidden))
        options = {"ep_plan": self.plan(), "num_warps": self.params.num_warps}
        arguments = (self.y, len(self.y), out, self.layout(), tokens, ctx.hidden)
        grid = (min(tokens, 8 * ctx.device.num_sms),)
        ctx.combine_buffer.launcher.repeat(Launch(kernel_partial_sums, grid, arguments, options))
        return out


class CombinePush(Algorithm[CombineCall, Key]):
    """One launch. Ranks send one sum per token to the token's rank, which adds the sums."""

    name = "push"
    tunables: ClassVar[tuple[str, ...]] = ("num_ctas", "block_bytes", "num_chunks")

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        candidates = dict.fromkeys((params_for_device(EP_DEFAULT_PARAMS), *_COMBINE_PARAMS))
        return (params.tunable_values for params in candidates)

    def fits(self, config: Mapping[str, Any], sizes: Key) -> bool:
        nbytes = config["block_bytes"]
        limit = max_programs(
            sizes.num_sms, packet_programs_per_sm(sizes.num_ranks, nbytes, sizes.topk)
        )
        smallest = min(ctas for ctas, *_ in self.candidates())
        blocks = sizes.M * -(-sizes.hidden * sizes.dtype.itemsize // nbytes)
        enough = blocks > config["num_ctas"] * (config["num_chunks"] - 1)
        return bool(enough and config["num_ctas"] <= max(limit, smallest))

    def compile(self, call: CombineCall) -> None:
        self.launch(call)[1].compile()

    def run(self, call: CombineCall) -> torch.Tensor:
        out, launch = self.launch(call)
        call.ctx.combine_buffer.repeat(launch)
        return out

    def launch(self, call: CombineCall) -> tuple[torch.Tensor, Launch]:
        """Return the result, and the launch that computes it."""
        ctx, received, params = call.ctx, call.received, call.params
        out = call.y.new_empty((received.tokens, ctx.hidden))
        _, peers = ctx.combine_buffer.regions(call.y.dtype)
        slot_tokens = ctx.slot_tokens if received.max_tokens <= ctx.slot_tokens else 0
        call_tag = digest_of(received.max_tokens, call.key.topk, call.has_weights, params)
        arguments = (
            call.y, len(call.y), out, ctx.combine_buffer.packet_regions(), peers, call.layout(),
            received.tokens, received.max_tokens, ctx.first_slot_token, slot_tokens, ctx.hidden,
            ctx.rank, params.num_chunks, call_tag,
        )  # fmt: skip
        options = {"ep_plan": call.plan(), **launch_options(params, call.programs_per_sm, 1024)}
        return out, Launch(kernel_combine, (params.num_ctas,), arguments, options)


class CombineCollective(Algorithm[CombineCall, Key]):
    """Sums of this rank's products for the tokens of all ranks, then a reduce-scatter by
    ``torch.distributed`` (NCCL, or gloo on CPU ranks)."""

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


COMBINE = Algorithms("ep_combine", (CombinePush(), CombineCollective()))
