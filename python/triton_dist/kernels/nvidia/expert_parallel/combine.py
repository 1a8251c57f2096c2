"""Kernels and algorithms of expert-parallel combine; ``op.py`` describes the op.

Sums travel as unmarked lines (``packets.py``), so each program adds a block as soon
as its words have arrived. A rank sends after all ranks have begun the call, which means that they
have read and cleared the lines of the last call.
"""

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
from triton_dist.kernels.common.exchange.packet_calls import (
    clear,
    end_call,
    next_epoch,
    peers_of,
)
from triton_dist.kernels.common.exchange.packets import add_lines, packet_offset, payload_of
from triton_dist.kernels.common.exchange.protocol import (
    MAX_CTAS,
    Call,
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
    digest_of,
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
    check_rows,
    sum_of_choices,
)
from triton_dist.kernels.nvidia.expert_parallel.packets import (
    LINE_BITS,
    line_of,
    poll_unmarked,
    send_unmarked,
)
from triton_dist.runtime.device import current_device
from triton_dist.runtime.launch import Launch

_COMBINE = tuple(
    LaunchParams(ctas, nbytes, chunks)
    for ctas in (256, 128)
    for nbytes in (16384, 8192, 4096)
    for chunks in (1, 4, 16)
)


def programs_of_sm(params: LaunchParams, num_ranks: int) -> int:
    """Return the programs that fit on a multiprocessor; large blocks need more registers."""
    return packet_programs_of_sm(num_ranks) if params.block_bytes <= 8192 else 1


@jit
def send_sums(
    y_ptr, y_rows, packets, peers, ep_layout, call, begun, item, max_tokens, hidden,
    ep_plan: tl.constexpr,
):  # fmt: skip
    """Send block ``item`` of the sums of each peer, if this rank has products of the token.

    Wait until all ranks have begun the call, unless ``begun`` is 1. Return its new value.
    """
    NUM_RANKS: tl.constexpr = ep_plan.NUM_RANKS
    PER_LINE: tl.constexpr = LINE_BITS // y_ptr.dtype.element_ty.primitive_bitwidth
    blocks, row_lines = tl.cdiv(hidden, ep_plan.BLOCK), tl.cdiv(hidden, PER_LINE)
    token = item // blocks
    column = item % blocks * ep_plan.BLOCK + tl.arange(0, ep_plan.BLOCK)
    TOPK: tl.constexpr = ep_plan.TOPK
    for step in range(1, NUM_RANKS):
        source = (call.rank + step) % NUM_RANKS
        target = target_at(packets.table, source, packets.words)
        route = (source * max_tokens + token) * TOPK
        latest = -1
        for choice in tl.static_range(TOPK):
            position = tl.load(ep_layout.position_of_route + route + choice)
            latest = tl.maximum(latest, position)
        if latest >= 0:
            sums = sum_of_choices(y_ptr, y_rows, ep_layout, route, column, hidden, ep_plan)
            if begun == 0:
                await_begun(peers, call, ep_plan)
                begun = 1
            line = first_line(packets, call.rank, token, row_lines)
            # Lines have no gaps: columns after the row are zero.
            in_lines = column < row_lines * PER_LINE
            send_unmarked(target, line, sums.to(y_ptr.dtype.element_ty), column, in_lines)
    return begun


@jit
def await_begun(peers, call, ep_plan: tl.constexpr):
    """Wait until all ranks have begun the call. They have read the sums of the last call."""
    first_programs = tl.full((ep_plan.LANES,), 0, tl.int32)
    await_programs(peers, 0, first_programs, chunk_flag(call, 0), ep_plan)


@jit
def first_line(packets, source, token, row_lines):
    """Return the first line of a token's sums from rank ``source``."""
    return packet_offset(0, source, packets.shard_words, 1, 1) // 2 + token * row_lines


@jit
def add_sums(
    y_ptr, y_rows, out_ptr, packets, ep_layout, call, item, max_tokens, hidden,
    ep_plan: tl.constexpr,
):  # fmt: skip
    """Add block ``item`` of the sums of this rank's tokens in the order of ranks."""
    NUM_RANKS: tl.constexpr = ep_plan.NUM_RANKS
    BLOCK: tl.constexpr = ep_plan.BLOCK
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    PER_LINE: tl.constexpr = LINE_BITS // DTYPE.primitive_bitwidth
    blocks, row_lines = tl.cdiv(hidden, BLOCK), tl.cdiv(hidden, PER_LINE)
    token, first = item // blocks, item % blocks * BLOCK
    column = first + tl.arange(0, BLOCK)
    index = first // PER_LINE + tl.arange(0, BLOCK // PER_LINE)
    ranks = tl.load(ep_layout.destinations + token)
    route = (call.rank * max_tokens + token) * ep_plan.TOPK
    own = sum_of_choices(y_ptr, y_rows, ep_layout, route, column, hidden, ep_plan)
    lines, is_sent, payloads = tl.tuple([]), tl.tuple([]), tl.tuple([])
    words_ptr = packets.words.to(tl.pointer_type(tl.int32))
    peers = peers_of(call.rank, NUM_RANKS)
    for peer in tl.static_range(NUM_RANKS - 1):
        line = first_line(packets, peers[peer], token, row_lines) + index
        lines = lines + (words_ptr + line * 4,)  # noqa: RUF005
        is_sent = is_sent + ((index < row_lines) & ((ranks >> peers[peer]) & 1 != 0),)  # noqa: RUF005
    payload = tl.reshape(payload_of(own.to(DTYPE)), [BLOCK // PER_LINE, 4])
    if NUM_RANKS > 1:
        arrived = poll_unmarked(lines, is_sent, packets.timeout_words)
        tl.debug_barrier()
        for peer in tl.static_range(NUM_RANKS - 1):
            words = tl.where(is_sent[peer][:, None], line_of(arrived, peer), 0)
            payloads = payloads + (words,)  # noqa: RUF005
    sums = add_lines(payload, payloads, call.rank, NUM_RANKS, DTYPE)
    out = out_ptr + (call.offset + token) * hidden + column
    with dl.mark("store"):
        tl.store(out, sums.to(out_ptr.dtype.element_ty), mask=column < hidden)
    for peer in tl.static_range(NUM_RANKS - 1):
        line = first_line(packets, peers[peer], token, row_lines) + index
        clear(packets.words, line, is_sent[peer])


@jit(do_not_specialize=["y_rows", "tokens", "max_tokens", "rank", "num_chunks", "digest"])
def kernel_combine(
    y_ptr, y_rows, out_ptr, packets, peers, ep_layout, tokens, max_tokens, hidden, rank, num_chunks,
    digest, ep_plan: tl.constexpr,
):  # fmt: skip
    """Sum the products of each token over experts and ranks into out [tokens, hidden].

    Grid (programs,). Each program sends blocks of sums chunk by chunk, and adds the blocks that it
    receives of the chunk before.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = next_epoch(packets.calls)
    call = Call(flags=peers.table, epoch=epoch, offset=epoch * 0, size=digest, rank=rank)
    if program == 0:
        peer = tl.arange(0, ep_plan.LANES)
        table = tl.load(peers.table + peer, mask=peer < ep_plan.NUM_RANKS, other=0)
        begin = Call(
            flags=table.to(peers.arrivals.dtype) + rank, epoch=epoch, offset=epoch * 0, size=digest,
            rank=rank,
        )  # fmt: skip
        notify_ranks(begin, 0, chunk_flag(begin, 0), ep_plan)
        tl.store(peers.calls, epoch * MAX_CTAS)  # The host finds late flags by this word.
    blocks = tl.cdiv(hidden, ep_plan.BLOCK)
    stride = tl.cdiv(tl.cdiv(max_tokens * blocks, programs), num_chunks) * programs
    begun = 0
    for chunk in range(num_chunks + 1):
        # The first program sets the flags, so it has the last of the items.
        first = chunk * stride + programs - 1 - program
        end = tl.minimum((chunk + 1) * stride, max_tokens * blocks)
        if chunk < num_chunks:
            for item in range(first, end, programs):
                begun = send_sums(
                    y_ptr, y_rows, packets, peers, ep_layout, call, begun, item, max_tokens, hidden,
                    ep_plan,
                )  # fmt: skip
        if chunk > 0:
            if begun == 0:
                await_begun(peers, call, ep_plan)
                begun = 1
            end = tl.minimum(chunk * stride, tokens * blocks)
            for item in range(first - stride, end, programs):
                add_sums(
                    y_ptr, y_rows, out_ptr, packets, ep_layout, call, item, max_tokens, hidden,
                    ep_plan,
                )  # fmt: skip
    if program == 0:
        check_rows(y_rows, ep_layout, ep_plan)
    end_call(packets.calls, epoch)


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
        limit = most_programs(self.num_sms, programs_of_sm(params, self.ctx.num_ranks))
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
        limit = most_programs(sizes.num_sms, programs_of_sm(params_in(config), sizes.num_ranks))
        smallest = min(ctas for ctas, *_ in self.candidates())
        row_bytes = sizes.hidden * sizes.dtype.itemsize
        items = sizes.M * ceil_div(row_bytes, config["block_bytes"])
        chunks = int(config["num_chunks"])
        enough = chunks == 1 or bool(items > config["num_ctas"] * (chunks - 1))
        return enough and int(config["num_ctas"]) <= max(limit, smallest)

    def compile(self, call: CombineCall) -> None:
        self.launch(call, call.new_out()).compile()

    def run(self, call: CombineCall) -> torch.Tensor:
        buffer, out = call.ctx.sums, call.new_out()
        buffer.begin(1, 1, 1)
        buffer.launcher.repeat(self.launch(call, out))
        buffer.timeout_words.end()
        return out

    def launch(self, call: CombineCall, out: torch.Tensor) -> Launch:
        ctx, received, params = call.ctx, call.received, call.params
        _, peers = ctx.sums.regions(call.y.dtype)
        arguments = (
            call.y, len(call.y), out, ctx.packets(ctx.sums), peers, call.layout(),
            received.tokens, received.max_tokens, ctx.hidden, ctx.rank,
            params.num_chunks, call.digest(),
        )  # fmt: skip
        options = {
            "ep_plan": call.plan(),
            **packet_options(params, programs_of_sm(params, ctx.num_ranks)),
        }
        return Launch(kernel_combine, (params.num_ctas,), arguments, options)


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


COMBINE = Algorithms("ep_combine", (CombinePush(), CombineCollective()))
