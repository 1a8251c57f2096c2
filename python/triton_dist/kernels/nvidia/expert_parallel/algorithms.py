"""Algorithms of expert-parallel dispatch, and helpers that dispatch and combine share.

``kernel.py`` describes the kinds of programs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
import triton

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common import libraries
from triton_dist.kernels.common.context import (
    DTYPES,
    Check,
    checked_buffer,
    is_int,
    raise_first_error,
)
from triton_dist.kernels.common.exchange.buffer import (
    MAX_CTAS,
    LaunchParams,
    checked_params,
    params_for_device,
)
from triton_dist.kernels.common.gemm.quantise import quantise_launch
from triton_dist.kernels.common.gemm.scales import FP8
from triton_dist.kernels.common.moe.skew import SKEWS
from triton_dist.kernels.common.op import Algorithm, Algorithms, OpCall
from triton_dist.kernels.common.peers import digest_of
from triton_dist.kernels.nvidia.expert_parallel.context import (
    ANY_SIZE,
    MAX_PACKET_TOKENS,
    MAX_TOPK,
    SCALE_ELEMENTS,
    EPContext,
    Received,
    block_tokens,
    matrix_checks,
    pending_send_check,
)
from triton_dist.kernels.nvidia.expert_parallel.kernel import (
    EPLayout,
    EPMemory,
    EPPlan,
    kernel_dispatch,
    kernel_locate,
)
from triton_dist.kernels.nvidia.expert_parallel.packets import kernel_dispatch_packets
from triton_dist.runtime import waits
from triton_dist.runtime.device import current_device
from triton_dist.runtime.launch import Launch, int32_vectors

_MAX_ROUTING_PROGRAMS, _MAX_LAYOUT_PROGRAMS = 32, 32
_MIN_PROGRAMS = 4
"""Minimum of ``num_sms``: a dispatch needs programs for ids, rows and the layout."""
MAX_COMBINE_PROGRAMS = 512
_FREE_SMS = 4
"""Number of SMs left free for other launches."""
_LINE_ELEMENTS = 16
"""Number of elements of the smallest dtype in a line of 16 bytes. A row in packets must fill whole
lines."""
EP_DEFAULT_PARAMS = LaunchParams(num_ctas=128, block_bytes=8192)
_DISPATCH_PARAMS = (
    EP_DEFAULT_PARAMS,
    *(LaunchParams(ctas, nbytes) for ctas in (192, 128, 64) for nbytes in (16384, 8192, 4096)),
)
_PACKET_PARAMS = tuple(LaunchParams(*each) for each in ((192, 8192), (128, 8192), (192, 4096)))
ALIGNMENTS = tuple(1 << power for power in range(9))


class Key(NamedTuple):
    """Tuning key of a dispatch or combine. The algorithms also use it as the call's sizes."""

    M: int
    """``max_tokens`` of the call."""
    hidden: int
    topk: int
    num_experts: int
    dtype: torch.dtype
    num_ranks: int
    scales: str
    """Scales of x: "none", "given" or "computed". "none" for a combine."""
    has_weights: bool
    has_capacity: bool
    """Whether the capacity is below ``max_tokens``."""
    replicas: int
    """Number of columns of ``expert_map``. 0 without a map."""
    id_dtype: torch.dtype | None
    """Dtype of ``topk_ids``. ``None`` for a combine."""
    alignment: int
    num_sms: int | None
    routing_skew: str | None


def max_programs(num_sms: int | None, per_sm: int = 2) -> int:
    """Return the maximum number of programs of a launch if ``per_sm`` programs fit on an SM.

    Programs wait for peers. Ranks may start the launches of two contexts in different orders, so
    some SMs must stay free for the second launch.
    """
    device, limit = current_device(), MAX_CTAS if per_sm <= 2 else MAX_COMBINE_PROGRAMS
    resident = limit if device.interprets else per_sm * (device.num_sms - _FREE_SMS)
    return min(limit, resident, num_sms or limit)


def num_sms_check(num_sms: int | None) -> Check:
    fits = num_sms is None or (is_int(num_sms) and num_sms >= _MIN_PROGRAMS)
    return "num_sms", num_sms, fits, f"None, or at least {_MIN_PROGRAMS}"


def launch_options(params: LaunchParams, per_sm: int = 2, warp_bytes: int = 512) -> dict[str, int]:
    """Return compile options that let ``per_sm`` programs run on an SM at the same time."""
    warps = max(4, min(16, params.block_bytes // warp_bytes))
    return {"num_warps": warps, "maxnreg": min(255, 2048 // (per_sm * warps))}


def packet_programs_per_sm(num_ranks: int, block_bytes: int = 0, topk: int = MAX_TOPK) -> int:
    """Return how many programs that poll lines fit on an SM.

    Programs need more registers with more ranks, and for sums of larger blocks or more choices.
    """
    needs_most_registers = num_ranks > 2 or block_bytes > 8192
    return 1 if needs_most_registers else 2 if topk > 2 else 4


def fits_packets(sizes: Key) -> bool:
    has_lines = sizes.num_ranks > 1 and sizes.hidden % _LINE_ELEMENTS == 0
    return has_lines and sizes.M <= MAX_PACKET_TOKENS and not sizes.has_capacity


@functools.lru_cache(4096)
def plan_of(num_ranks: int, experts: int, topk: int, **constants: Any) -> EPPlan:
    """Return the constants of a launch. ``experts`` is per rank."""
    lanes, topk_lanes = triton.next_power_of_2(num_ranks), triton.next_power_of_2(topk)
    plan = EPPlan(
        NUM_RANKS=num_ranks, LANES=lanes, BLOCK=1, TOPK=topk, TOPK_LANES=topk_lanes,
        EXPERTS=experts, EXPERT_LANES=triton.next_power_of_2(max(8, experts)),
        EXPERT_BINS=triton.next_power_of_2(max(128, num_ranks * experts + 8)),
        ROUTING_FLAG_LANES=_MAX_ROUTING_PROGRAMS * lanes, FLAG_LANES=MAX_CTAS * lanes,
        TOKEN_BLOCKS=1, BLOCK_TOKENS=1, REPLICAS=0, ALIGNMENT=1, SCALES="none",
    )  # fmt: skip
    return plan._replace(**constants)


@dataclass(eq=False, repr=False)  # not frozen, because that would take 1 us more per call
class DispatchCall(OpCall):
    """The arguments of one call of ``ep_dispatch``, and values derived from them."""

    function: ClassVar[str] = "ep_dispatch"
    """Name of the op in errors of arguments."""
    x: torch.Tensor
    topk_ids: torch.Tensor
    ctx: EPContext
    topk_weights: torch.Tensor | None = None
    x_scale: torch.Tensor | None = None
    quantise: bool = False
    max_tokens: int | None = None
    expert_map: torch.Tensor | None = None
    alignment: int = 1
    num_sms: int | None = None
    routing_skew: str | None = None
    num_ctas: int | None = None
    block_bytes: int | None = None
    algorithm: str | None = None
    validated_key: Any = None
    """Key of the call from the tuner. The arguments are then not checked again."""
    chosen_algorithm: Push = field(init=False)

    def __post_init__(self) -> None:
        self.key = self.checked_key() if self.validated_key is None else self.validated_key
        self.chosen_algorithm = DISPATCH[self.algorithm or Push.name]  # type: ignore[assignment]
        self.params = checked_params(
            "ep_dispatch", self.num_ctas, self.block_bytes, None, EP_DEFAULT_PARAMS
        )
        ctx, experts = self.ctx, self.expert_map
        self.tokens, self.token_limit = len(self.x), self.key.M
        self.capacity = min(ctx.capacity, self.token_limit)
        self.logical_experts = ctx.num_experts if experts is None else len(experts)
        self.wire_dtype = torch.float8_e4m3fn if self.quantise else self.x.dtype
        self.chosen_algorithm.check(self)

    def checked_key(self) -> Key:
        """Return the tuning key of the call. Raise if an argument is invalid."""
        ctx, ids, skew = self.ctx, self.topk_ids, self.routing_skew
        checked_buffer(ctx, EPContext, self.function, "create_ep_context")
        limit = ctx.max_tokens if self.max_tokens is None else self.max_tokens
        fp8 = self.x_scale is not None
        groups = -(-ctx.hidden // SCALE_ELEMENTS)

        def checks() -> Iterator[Check]:
            yield pending_send_check(ctx)
            at_most = f"an int from 1 to {ctx.max_tokens}, equal on all ranks"
            yield "max_tokens", limit, is_int(limit) and 1 <= limit <= ctx.max_tokens, at_most
            dtypes, hidden = FP8 if fp8 else (ctx.dtype,), (ctx.hidden,)
            yield from matrix_checks(ctx, "x", self.x, range(limit + 1), hidden, *dtypes)
            tokens, choices = (len(self.x),), range(1, ctx.topk + 1)
            integers = torch.int32, torch.int64
            yield from matrix_checks(ctx, "topk_ids", ids, tokens, choices, *integers)
            for name, matrix, rows, columns, *valid_dtypes in (
                ("topk_weights", self.topk_weights, tokens, ids.shape[1:], *DTYPES),
                ("x_scale", self.x_scale, tokens, (groups,), torch.float32),
                ("expert_map", self.expert_map, ANY_SIZE, ANY_SIZE, torch.int32),
            ):
                if matrix is not None:
                    yield from matrix_checks(ctx, name, matrix, rows, columns, *valid_dtypes)
            quantise = self.quantise
            yield "quantise", quantise, not (quantise and fp8), "False for an x with x_scale"
            alignment = self.alignment
            fits = is_int(alignment) and alignment in ALIGNMENTS
            yield "alignment", alignment, fits, "a power of two, 1 to 256"
            yield num_sms_check(self.num_sms)
            hints = (None, *SKEWS)
            yield "routing_skew", skew, skew in hints, ", ".join(map(repr, hints))

        raise_first_error(self.function, checks())
        scales = "given" if fp8 else "computed" if self.quantise else "none"
        replicas = 0 if self.expert_map is None else self.expert_map.shape[1]
        return Key(
            limit, ctx.hidden, ids.shape[1], ctx.num_experts, self.x.dtype, ctx.num_ranks, scales,
            self.topk_weights is not None, ctx.capacity < limit, replicas, ids.dtype,
            self.alignment, self.num_sms, skew,
        )  # fmt: skip

    @functools.cached_property
    def locations(self) -> torch.Tensor | None:
        """Memory for the result of ``kernel_locate``; ``None`` unless the capacity is limited."""
        if self.capacity == self.token_limit:
            return None
        return int32_vectors(self.ctx.device.torch_device, self.ctx.num_ranks * self.token_limit)[0]

    def programs(self, num_copy: int | None = None) -> tuple[int, int, int]:
        """Return the numbers of routing, copy and layout programs."""
        blocks = -(-self.token_limit // block_tokens(self.key.topk))
        total = max_programs(self.num_sms)
        num_routing = max(1, min(_MAX_ROUTING_PROGRAMS, blocks, total // 8))
        num_layout = min(_MAX_LAYOUT_PROGRAMS, self.ctx.num_ranks * blocks)
        if num_copy is None:
            limit = total - num_routing - 1 - min(num_layout, total // 4)
            num_copy = max(1, min(self.params.num_ctas, limit))
        return num_routing, num_copy, max(1, min(num_layout, total - num_routing - 1 - num_copy))

    def plan(self) -> EPPlan:
        key, block = self.key, self.params.block_bytes // self.x.element_size()
        return plan_of(
            key.num_ranks, self.ctx.local_experts, key.topk, BLOCK=block,
            BLOCK_TOKENS=block_tokens(key.topk), REPLICAS=key.replicas, ALIGNMENT=self.alignment,
            SCALES=key.scales,
        )  # fmt: skip

    def result(self) -> Received:
        """Return a result whose tensors the call will fill."""
        ctx = self.ctx
        topk, experts, num_ranks = self.topk_ids.shape[1], ctx.local_experts, ctx.num_ranks
        routes, device = num_ranks * self.token_limit * topk, ctx.device.torch_device
        row_of_position, position_of_route, local_ids, ends, counts, destinations = int32_vectors(
            device, routes + experts * (self.alignment - 1), routes, routes, experts,
            experts * num_ranks, self.token_limit,
        )  # fmt: skip
        weights = None
        if self.topk_weights is not None:
            weights = torch.empty(len(row_of_position), dtype=torch.float32, device=device)
        rows, scales = num_ranks * self.capacity, None
        groups = -(-ctx.hidden // SCALE_ELEMENTS)
        if self.key.scales != "none":
            scales = ctx.buffer.memory["scales"].local[: rows * groups].view(rows, groups)
        return Received(
            ctx, self.row_buffer()[: rows * ctx.hidden].view(rows, ctx.hidden), scales,
            row_of_position, ends, counts.view(experts, num_ranks), weights,
            position_of_route.view(-1, topk), local_ids.view(-1, topk), destinations, self.tokens,
            self.token_limit, self.routing_skew,
        )  # fmt: skip

    def row_buffer(self) -> torch.Tensor:
        """Return the receive buffer as a 1-D tensor."""
        return self.ctx.buffer.memory["rows"].local.view(self.wire_dtype)

    def launch_kernel(
        self, layout: EPLayout, send: bool = True, receive: bool = True, num_copy: int | None = None
    ) -> None:
        """Launch the programs that send, the programs that receive, or both.

        ``num_copy`` replaces the number of copy programs. If it is 0, no rows are sent.
        """
        ctx = self.ctx
        if send and self.locations is not None:
            # The user's counter must not count tokens that calls of the tuner drop.
            is_tuning = num_copy is not None or waits.are_limited()
            arguments = (
                self.topk_ids, self.expert_map, self.locations,
                ctx.dropped_in_tuning if is_tuning else ctx.dropped, self.tokens, self.token_limit,
                self.capacity, self.logical_experts, ctx.rank,
            )  # fmt: skip
            options = {"ep_plan": self.plan(), "num_warps": self.params.num_warps}
            ctx.buffer.launcher.repeat(Launch(kernel_locate, (ctx.num_ranks,), arguments, options))
        num_routing, num_copy, _ = self.programs(num_copy)
        launch = self.dispatch_launch(layout, send, receive, num_copy)
        ctx.buffer.repeat(launch, num_routing + num_copy, 2)

    def call_tag(self, *programs: int) -> int:
        """Return the call tag, a digest of the arguments that must be equal on all ranks."""
        key, dtype = self.key, self.wire_dtype
        return digest_of(key.M, key.topk, key.scales, dtype, key.has_weights, *programs)

    def dispatch_launch(
        self, layout: EPLayout, send: bool = True, receive: bool = True, num_copy: int | None = None
    ) -> Launch:
        ctx, memory, plan = self.ctx, self.ctx.buffer.memory, self.plan()
        num_routing, num_copy, num_layout = self.programs(num_copy)
        programs = (num_routing + num_copy if send else 0) + (num_layout + 1 if receive else 0)
        call_tag = self.call_tag(num_routing, num_copy)
        has_scales = plan.SCALES != "none"
        scales, routing = memory["scales"], memory["routing"]
        ep_memory = EPMemory(
            self.row_buffer(), memory["rows"].pointers, scales.local if has_scales else None,
            scales.pointers if has_scales else None, routing.local, routing.pointers,
            ctx.routing_elements,
        )  # fmt: skip
        _, peers = ctx.buffer.regions(torch.int32)
        arguments = (
            self.x, self.x_scale, self.topk_ids, self.topk_weights, self.locations, self.expert_map,
            ep_memory, peers, layout, self.tokens, self.token_limit, self.capacity, ctx.hidden,
            self.logical_experts, ctx.rank, num_routing, num_copy, call_tag,
        )  # fmt: skip
        options = {"receives_only": not send, "ep_plan": plan, **launch_options(self.params)}
        return Launch(kernel_dispatch, (programs,), arguments, options)


class Push(Algorithm[DispatchCall, Key]):
    """One launch. Programs store each token once on each rank that owns one of its experts."""

    name = "push"
    tunables: ClassVar[tuple[str, ...]] = ("num_ctas", "block_bytes")
    params: ClassVar[tuple[LaunchParams, ...]] = _DISPATCH_PARAMS

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        candidates = dict.fromkeys(map(params_for_device, self.params))
        return ((params.num_ctas, params.block_bytes) for params in candidates)

    def fits(self, config: Mapping[str, Any], sizes: Key) -> bool:
        limit = max_programs(sizes.num_sms)
        return bool(config["num_ctas"] <= max(limit, min(ctas for ctas, _ in self.candidates())))

    def compile(self, call: DispatchCall) -> None:
        self.launch(call, call.result().layout).compile()

    def run(self, call: DispatchCall) -> Any:
        received = call.result()
        self.start(call, received)
        return received

    def launch(self, call: DispatchCall, layout: EPLayout) -> Launch:
        return call.dispatch_launch(layout)

    def start(self, call: DispatchCall, received: Received) -> None:
        """Launch a call that fills the tensors of ``received``."""
        call.launch_kernel(received.layout)


class Packets(Push):
    """One launch for few tokens. Receivers poll the words of ids and rows instead of flags."""

    name, params = "packets", _PACKET_PARAMS

    def fits(self, config: Mapping[str, Any], sizes: Key) -> bool:
        return fits_packets(sizes) and super().fits(config, sizes)

    def check(self, call: DispatchCall) -> None:
        if not fits_packets(call.key):
            expected = "another algorithm than 'packets', which requires several ranks, max_tokens "
            expected += f"of at most {MAX_PACKET_TOKENS}, a capacity of max_tokens, and a hidden "
            expected += f"that is a multiple of {_LINE_ELEMENTS}"
            raise InvalidArgument("ep_dispatch", "algorithm", "packets", expected)

    def start(self, call: DispatchCall, received: Received) -> None:
        call.ctx.buffer.repeat(self.launch(call, received.layout), call.params.num_ctas)

    def launch(self, call: DispatchCall, layout: EPLayout) -> Launch:
        ctx, topk = call.ctx, call.topk_ids.shape[1]
        block_size = block_tokens(topk, True)
        num_routing = -(-call.token_limit // block_size)
        plan = call.plan()._replace(
            BLOCK=max(4 * SCALE_ELEMENTS, call.params.block_bytes // call.x.element_size()),
            BLOCK_TOKENS=block_size,
            TOKEN_BLOCKS=triton.next_power_of_2(ctx.num_ranks * num_routing),
        )  # fmt: skip
        per_sm = packet_programs_per_sm(ctx.num_ranks)
        total = max_programs(call.num_sms, per_sm)
        num_routing = min(num_routing, -(-total // 8))
        num_layout = min(ctx.num_ranks * num_routing, -(-total // 4))
        num_copy = min(call.params.num_ctas, total - num_routing - num_layout)
        # Each copy program handles the same block of columns in all its rows. It then waits only
        # for programs with smaller numbers.
        blocks = -(-ctx.hidden // plan.BLOCK)
        num_copy -= num_copy % blocks if num_copy > blocks else 0
        programs = num_routing + num_copy + num_layout
        call_tag = call.call_tag(num_routing, num_copy)
        has_scales = plan.SCALES != "none"
        arguments = (
            call.x, call.x_scale, call.topk_ids, call.topk_weights, call.expert_map,
            call.row_buffer(), ctx.buffer.memory["scales"].local if has_scales else None,
            ctx.buffer.packet_regions()._replace(calls=ctx.epochs), layout, call.tokens,
            call.token_limit, ctx.hidden, call.logical_experts, ctx.rank, ctx.routing_lines,
            num_routing, num_copy, call_tag,
        )  # fmt: skip
        options = {"ep_plan": plan, **launch_options(call.params, per_sm, 1024)}
        return Launch(kernel_dispatch_packets, (programs,), arguments, options)


class Collective(Push):
    """All-gather of all rows by ``torch.distributed`` (NCCL, or gloo on CPU ranks)."""

    name = "collective"
    tunables = ()
    is_fallback = True

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        # CPU ranks test the kernels of this package, so libraries are no candidates there.
        return [()] if current_device().has_nccl else []

    def fits(self, config: Mapping[str, Any], sizes: Key) -> bool:
        return sizes.num_ranks > 1 and not sizes.has_capacity

    def check(self, call: DispatchCall) -> None:
        if call.key.has_capacity:
            expected = f"another algorithm than {self.name!r} for a limited capacity"
            raise InvalidArgument("ep_dispatch", "algorithm", self.name, expected)

    def start(self, call: DispatchCall, received: Received) -> None:
        call.launch_kernel(received.layout, num_copy=0)
        x, scale = call.x.detach(), call.x_scale
        if call.quantise:
            groups = -(-x.shape[1] // SCALE_ELEMENTS)
            scale = x.new_empty((groups, len(x)), dtype=torch.float32).T
            x = torch.empty_like(x, dtype=call.wire_dtype)
            if len(x):
                quantise_launch(call.x.detach(), x, scale, False).run()
            # PyTorch treats a single column as contiguous for any strides. Libraries require that
            # the last stride is 1.
            scale = scale.reshape(-1).view(len(x), groups)
        for source, target in ((x, received.rows), (scale, received.scales)):
            if source is not None and target is not None:
                shard = source
                if len(source) < call.token_limit:
                    shard = source.new_empty((call.token_limit, source.shape[1]))
                    shard[: len(source)] = source
                if call.ctx.num_ranks == 1:
                    target.copy_(shard)
                else:
                    rows, shard = target.view(torch.uint8), shard.view(torch.uint8)
                    libraries.all_gather_into(rows, shard, call.ctx.group)


DISPATCH = Algorithms("ep_dispatch", (Push(), Packets(), Collective()))
