"""Context of expert-parallel dispatch and combine, and the result of a dispatch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from triton_dist._jit import jit
from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.context import (
    Check,
    OpContext,
    agree_to_create,
    dtype_checks,
    gradient_check,
    is_differentiated,
    raise_first_error,
    range_check,
    tensor_checks,
)
from triton_dist.kernels.common.exchange.buffer import LINE_BYTES, MAX_CTAS, ExchangeBuffer
from triton_dist.kernels.common.moe.positions import Positions
from triton_dist.kernels.common.peers import Disagreements
from triton_dist.kernels.nvidia.expert_parallel import kernel, packets
from triton_dist.kernels.nvidia.expert_parallel.kernel import FAULT_OUT_ROWS, EPLayout, report_fault
from triton_dist.runtime.device import current_device
from triton_dist.runtime.launch import Launch
from triton_dist.runtime.ranks import Group, process_group_of

MAX_EXPERTS, MAX_TOPK = 512, 16
ANY_SIZE = range(2**31)
SCALE_ELEMENTS: int = kernel.SCALE_ELEMENTS.value
MAX_PACKET_TOKENS = 128
"""Maximum number of tokens of a rank for the algorithm ``"packets"``."""
_EXPECTED_ROWS = "at least num_positions() rows"
FAULTS = {
    kernel.FAULT_ID.value: (
        "ep_dispatch", "topk_ids", "on a rank, an id without expert",
        "ids of experts, or -1; in a row of expert_map, -1 only after the experts",
    ),
    kernel.FAULT_WEIGHT.value: ("ep_dispatch", "topk_weights", "NaN on a rank", "no NaN"),
    kernel.FAULT_Y_ROWS.value: ("ep_combine", "y.shape", "fewer rows", _EXPECTED_ROWS),
    kernel.FAULT_OUT_ROWS.value: ("expanded", "out.shape", "fewer rows", _EXPECTED_ROWS),
}  # fmt: skip
_BLOCK_ROUTES = 256
"""Routes of a block of tokens. A token counts as topk routes, rounded up to a power of two."""
ROUTING_ALIGNMENT = 128
"""Slots of routing data begin at multiples of this number of elements."""


class EPContext(OpContext[ExchangeBuffer]):
    """Symmetric memory of ``ep_dispatch`` and ``ep_combine``. A context manager.

    Attributes:
        dropped: int32 [1] on the device, the number of tokens that calls and replays have dropped
            because of ``capacity``. Calls of the tuner do not count.
    """

    def __init__(
        self,
        max_tokens: int,
        hidden: int,
        num_experts: int,
        topk: int,
        dtype: torch.dtype,
        capacity: int,
        group: dist.ProcessGroup | None,
        can_combine: bool = True,
    ) -> None:
        super().__init__("ep_dispatch", group)
        self.max_tokens, self.hidden, self.num_experts = max_tokens, hidden, num_experts
        self.topk, self.dtype, self.capacity, self.can_combine = topk, dtype, capacity, can_combine
        self.local_experts = num_experts // self.num_ranks
        num_ranks, row_bytes = self.num_ranks, hidden * dtype.itemsize
        counts = -(-max_tokens // block_tokens(topk)) * self.local_experts
        routing_elements = num_ranks * (max_tokens * (2 * topk + 1) + counts)
        self.routing_elements = -(-routing_elements // ROUTING_ALIGNMENT) * ROUTING_ALIGNMENT
        scales = num_ranks * capacity * -(-hidden // SCALE_ELEMENTS)
        # A source rank has lines of routes and counts (routing lines), then of rows and scales.
        packet_tokens = min(max_tokens, MAX_PACKET_TOKENS) if num_ranks > 1 else 0
        blocks = -(-packet_tokens // block_tokens(topk, True))
        self.routing_lines = packet_tokens * topk + blocks * -(-self.local_experts // 4)
        row_lines = -(-row_bytes // (2 * LINE_BYTES))
        packet_lines = self.routing_lines + packet_tokens * row_lines
        value = "digest of max_tokens, topk, weights, scales and num_ctas of a dispatch or combine"
        disagreements = Disagreements(value, group)
        with self.allocating() as add:
            self.buffer = add(
                ExchangeBuffer(
                    1, group, "ep_dispatch", LINE_BYTES * packet_lines, disagreements,
                    packet_slots=packets.NUM_SLOTS.value,
                    regions={
                        "rows": ((num_ranks * capacity * row_bytes,), torch.uint8),
                        "scales": ((scales,), torch.float32),
                        "routing": ((2 * self.routing_elements,), torch.int32),
                    },
                )
            )  # fmt: skip
            # Combines of few tokens alternate between two slots. In memory, these slots follow the
            # rows of combines of more tokens.
            self.slot_tokens = min(max_tokens, MAX_PACKET_TOKENS)
            self.first_slot_token = max_tokens if max_tokens > self.slot_tokens else 0
            sum_rows = self.first_slot_token + 2 * self.slot_tokens
            packet_bytes = LINE_BYTES * sum_rows * row_lines if can_combine else 0
            self.combine_buffer = add(
                ExchangeBuffer(1, group, "ep_combine", packet_bytes, disagreements, packet_slots=1)
            )
        device = self.device.torch_device
        # Number of calls of each program of the algorithm "packets".
        self.epochs = torch.zeros(MAX_CTAS, dtype=torch.int64, device=device)
        # The addresses of both are multiples of 16 bytes, so Triton compiles one kernel for both.
        counters = torch.zeros(5, dtype=torch.int32, device=device)
        self.dropped, _, self.dropped_in_tuning = counters.split((1, 3, 1))
        # Kernels store a fault in a word of host memory, whose address they read on the device.
        self.faults = self.device.host_word()
        address = [self.faults.data_ptr()]
        self.fault_address = torch.tensor(address, dtype=torch.int64, device=device)
        self.pending: Received | None = None
        """Result of an ``ep_send`` whose ``wait`` has not been called."""
        self.receive_pending: Callable[..., None] | None = None
        """Function that receives the rows of ``pending`` on the current stream. Its arguments are
        tensors of the stream of ``ep_send``. They are marked as used by the current stream too."""

    def check(self) -> None:
        """Wait for the device and raise the errors that kernels have recorded.

        Raises:
            InvalidArgument: a rank passed an id that is not an expert, or a weight that is NaN
                (raised on every rank); or a ``y`` or ``out`` of this rank was too short.
            RankDisagreement: ranks passed different ``max_tokens``, ``topk``, scales, weights or
                numbers of programs.
        """
        super().check()
        # Only this function checks faults. If calls did, ranks could raise before different calls,
        # and other ranks would then hang.
        fault = int(self.faults[0])
        if fault:
            self.faults[0] = 0
            raise InvalidArgument(*FAULTS[fault])

    def reset(self) -> None:
        super().reset()
        self.epochs.zero_()
        self.faults[0] = 0
        self.pending = self.receive_pending = None
        self.device.synchronize()


def matrix_checks(
    ctx: EPContext,
    name: str,
    matrix: torch.Tensor,
    rows: Sequence[int],
    columns: Sequence[int],
    *dtypes: torch.dtype,
) -> Iterator[Check]:
    """Yield the checks of a contiguous matrix. ``rows`` and ``columns`` are the valid sizes."""
    yield from tensor_checks(**{name: matrix})
    shape, device = tuple(matrix.shape), ctx.device.torch_device
    fits = len(shape) == 2 and shape[0] in rows and shape[1] in columns
    fits_all = fits and matrix.dtype in dtypes and matrix.device == device
    if fits_all and matrix.is_contiguous() and not is_differentiated(matrix):
        return  # formatting the texts below would take several microseconds
    sizes = [f"{n[0]}" if len(n) == 1 else f"{n[0]} to {n[-1]}" for n in (rows, columns)]
    yield f"{name}.shape", shape, fits, f"[{', '.join(sizes)}]"
    expected = " or ".join(map(str, dtypes))
    yield f"{name}.dtype", matrix.dtype, matrix.dtype in dtypes, expected
    yield f"{name}.device", matrix.device, matrix.device == device, f"{device}"
    yield f"{name}.stride()", matrix.stride(), matrix.is_contiguous(), "a contiguous tensor"
    yield gradient_check(name, matrix)


def pending_send_check(ctx: EPContext) -> Check:
    expected = "a context without one: call wait() of the last result of ep_send first"
    return "ctx", "a pending send", ctx.pending is None, expected


def create_ep_context(
    rank: int,
    world_size: int,
    local_world_size: int,
    max_tokens: int,
    hidden: int,
    num_experts: int,
    topk: int,
    dtype: torch.dtype,
    *,
    capacity: int | None = None,
    can_combine: bool = True,
    group: Group = None,
) -> EPContext:
    """Create the context of ``ep_dispatch`` and ``ep_combine``. Collective over ``group``.

    In the memory of each rank, the context uses about ``world_size * (capacity + max_tokens) *
    hidden`` elements of ``dtype``, and for calls of few tokens 5 times ``world_size *
    min(max_tokens, 128) * hidden`` elements.

    Args:
        rank, world_size, local_world_size: this rank, the number of ranks of the group, and the
            number of ranks on this host.
        max_tokens: maximum number of tokens of a rank.
        hidden: number of elements of a token.
        num_experts: number of physical experts of all ranks, a multiple of ``world_size``, at most
            512 per rank. Rank r owns ``num_experts / world_size`` experts from expert ``r *
            num_experts / world_size`` on.
        topk: maximum number of experts per token, 1 to 16.
        dtype: dtype of results: fp16, bf16 or fp32.
        capacity: maximum number of tokens that a rank receives from each rank, 1 to ``max_tokens``
            (default). Further tokens are dropped and counted in ``dropped``.
        can_combine: whether to allocate the memory of ``ep_combine``.
        group: process group; default: the world, or this process alone.

    Returns:
        The context. Call ``finalize()`` or use ``with`` to free it.

    Raises:
        InvalidArgument, RankDisagreement, SymmetricMemoryFull: see ``create_ag_gemm_context``.
    """
    group = process_group_of(group)
    capacity = max_tokens if capacity is None else capacity
    sizes = {
        "max_tokens": max_tokens, "hidden": hidden, "num_experts": num_experts, "topk": topk,
        "capacity": capacity,
    }  # fmt: skip

    def checks() -> Iterator[Check]:
        per_rank, rest = divmod(num_experts, world_size)
        expected = f"a multiple of world_size = {world_size}, 1 to {MAX_EXPERTS} per rank"
        fits = rest == 0 and per_rank <= MAX_EXPERTS
        yield "num_experts", num_experts, fits, expected
        yield range_check(MAX_TOPK, "topk", topk)
        yield from dtype_checks("dtype", dtype)
        yield range_check(max_tokens, "capacity", capacity)

    agree_to_create(
        "create_ep_context", "an expert-parallel", group, rank,
        {"world_size": world_size, "local_world_size": local_world_size}, sizes, checks(),
        dtype=dtype, can_combine=can_combine,
    )  # fmt: skip
    return EPContext(max_tokens, hidden, num_experts, topk, dtype, capacity, group, can_combine)


@functools.cache
def block_tokens(topk: int, in_packets: bool = False) -> int:
    """Return the number of tokens of a block. A program reads the ids of one block at once."""
    routes: int = packets.BLOCK_ROUTES.value if in_packets else _BLOCK_ROUTES
    return routes // int(triton.next_power_of_2(topk))


@jit(do_not_specialize=["out_rows"])
def kernel_expand(
    rows_ptr, scales_ptr, row_of_position_ptr, out_ptr, out_scales_ptr, ends_ptr,
    fault_address_ptr, out_rows, hidden, groups, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
    GROUP_LANES: tl.constexpr,
):  # fmt: skip
    """Copy rows to their positions in ``out`` [out_rows, hidden]. Rows of padding become zero.

    Grid (programs,).
    """
    total = tl.load(ends_ptr + EXPERTS - 1)
    if (tl.program_id(0) == 0) & (total > out_rows):
        report_fault(fault_address_ptr, FAULT_OUT_ROWS)
    total = tl.minimum(total, out_rows)
    position = tl.program_id(0).to(tl.int64)
    while position < total:
        row = tl.load(row_of_position_ptr + position).to(tl.int64)
        exists = row >= 0
        for first in range(0, hidden, BLOCK):
            column = first + tl.arange(0, BLOCK)
            mask = column < hidden
            x = tl.load(rows_ptr + row * hidden + column, mask=mask & exists, other=0.0)
            tl.store(out_ptr + position * hidden + column, x, mask=mask)
        if scales_ptr is not None:
            group = tl.arange(0, GROUP_LANES)
            mask = group < groups
            scale = tl.load(scales_ptr + row * groups + group, mask=mask & exists, other=0.0)
            tl.store(out_scales_ptr + position * groups + group, scale, mask=mask)
        position += tl.num_programs(0)


@dataclass(frozen=True, eq=False)
class Received:
    """Result of a dispatch, the input of grouped GEMMs and of ``ep_combine``.

    A position is the index of a route (a token's choice of a local expert) after sorting by
    expert, source rank, token and choice. The tensors have room for the worst routing.

    Attributes:
        rows: received tokens, each stored once, in memory of the context. The next dispatch with
            the context overwrites them.
        scales: fp32 [rows, hidden / 128], scales of fp8 rows, or ``None``.
        row_of_position: int32 [positions], index in ``rows``, or -1 for positions that only align
            the next expert (padding).
        ends: int32 [local experts], end of the positions of each expert.
        counts: int32 [local experts, ranks], number of routes of each expert by source rank.
        weights: fp32 [positions], or ``None`` if the dispatch had no ``topk_weights``.
        position_of_route: int32 [ranks * max_tokens, topk], -1 for routes to other ranks.
        local_ids: int32 [ranks * max_tokens, topk], local expert of each route, or -1 for routes to
            other ranks. Unless the capacity is limited, these are the ``topk_ids`` of
            ``grouped_gemm`` for ``rows``.
        destinations: int32 [max_tokens]. Bit r is set if the token was sent to rank r.
        tokens: number of this rank's tokens.
        max_tokens: maximum number of tokens of a rank in this call.
    """

    ctx: EPContext
    rows: torch.Tensor
    scales: torch.Tensor | None
    row_of_position: torch.Tensor
    ends: torch.Tensor
    counts: torch.Tensor
    weights: torch.Tensor | None
    position_of_route: torch.Tensor
    local_ids: torch.Tensor
    destinations: torch.Tensor
    tokens: int
    max_tokens: int
    routing_skew: str | None = None

    @functools.cached_property
    def layout(self) -> EPLayout:
        """The tensors as an argument of kernels."""
        return EPLayout(
            self.row_of_position, self.weights, self.position_of_route, self.local_ids, self.ends,
            self.counts, self.destinations, self.ctx.fault_address,
        )  # fmt: skip

    def wait(self) -> Received:
        """Receive the rows of ``ep_send``. Required before the next call with the context.

        The current stream may differ from the stream of ``ep_send``.
        """
        ctx, receive = self.ctx, self.ctx.receive_pending
        if ctx.pending is self and receive is not None:
            ctx.pending = ctx.receive_pending = None
            # All int32 arrays are in the allocation of ``row_of_position``.
            receive(self.row_of_position, *(() if self.weights is None else (self.weights,)))
        return self

    @property
    def positions(self) -> Positions:
        """Argument ``topk_ids`` of ``grouped_gemm`` with A = ``rows``; ``alignment`` must be 1."""
        self._check_received("positions")
        topk, number = self.local_ids.shape[1], len(self.row_of_position)
        if number != self.local_ids.numel():
            raise InvalidArgument("positions", "alignment", "above 1", "1")
        return Positions(self.ends, number, self.row_of_position, self.max_tokens, topk)

    def num_positions(self) -> int:
        """Wait for the dispatch, and return the number of positions in use, including padding.

        Cannot be captured in a CUDA graph.
        """
        self._check_received("num_positions")
        return int(self.ends[-1])

    def _check_received(self, function: str) -> None:
        if self.ctx.pending is self:
            expected = "a received result: call wait() first"
            raise InvalidArgument(function, "self", "the result of ep_send", expected)

    def expanded(self, out: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a row for each position, and the rows' scales. Rows of padding are zero.

        Args:
            out: memory for the rows, [at least the positions in use, hidden], contiguous, dtype of
                ``rows``; default: new memory for the worst routing. If ``out`` is too short,
                ``ctx.check()`` raises.

        Raises:
            InvalidArgument: ``out`` does not have the required shape, dtype or device, or is not
                contiguous, or ``wait()`` was not called after ``ep_send``.
        """
        self._check_received("expanded")
        hidden = self.rows.shape[1]
        if out is None:
            out = self.rows.new_empty((len(self.row_of_position), hidden))
        checks = matrix_checks(self.ctx, "out", out, ANY_SIZE, (hidden,), self.rows.dtype)
        raise_first_error("expanded", checks)
        scales, groups = None, -(-hidden // SCALE_ELEMENTS)
        if self.scales is not None:
            scales = self.scales.new_empty((len(out), groups))
        block = min(4096, triton.next_power_of_2(hidden))
        arguments = (
            self.rows, self.scales, self.row_of_position, out, scales, self.ends,
            self.ctx.fault_address, len(out), hidden, groups,
        )  # fmt: skip
        options = {
            "EXPERTS": len(self.ends), "BLOCK": block,
            "GROUP_LANES": triton.next_power_of_2(groups), "num_warps": 8,
        }  # fmt: skip
        programs = 8 * current_device().num_sms
        launch = Launch(kernel_expand, (programs,), arguments, options)
        self.ctx.buffer.launcher.repeat(launch)
        return out, scales
