"""Algorithms of expert-parallel dispatch + grouped GEMM: their candidates, checks and launches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import triton

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.context import (
    Check,
    gradient_check,
    is_int,
    raise_first_error,
    tensor_checks,
)
from triton_dist.kernels.common.moe.product import grouped_product, weights_layout
from triton_dist.kernels.common.moe.routing import TILE_RECORD_WORDS, BlockMap, max_tiles
from triton_dist.kernels.common.moe.rows import (
    grouped_library_supports,
    has_library_kernel,
    is_library_candidate,
)
from triton_dist.kernels.common.moe.spaces import fits_grouped, grouped_tiles
from triton_dist.kernels.common.op import Algorithm, Algorithms, OpCall, check_tiles
from triton_dist.kernels.common.peers import digest_of
from triton_dist.kernels.nvidia.ep_group_gemm.kernel import (
    DispatchTensors,
    kernel_dispatch_grouped_gemm,
    kernel_order_tiles,
)
from triton_dist.kernels.nvidia.expert_parallel import (
    DispatchCall,
    EPContext,
    Received,
    ep_dispatch,
    max_programs,
)
from triton_dist.kernels.nvidia.grouped_gemm import SILU_MUL
from triton_dist.kernels.nvidia.grouped_gemm import Call as GroupedGemmCall
from triton_dist.runtime.device import current_device
from triton_dist.runtime.launch import Launch

_NUM_COPY_PROGRAMS = (32, 16, 64)
_BLOCK_BYTES = 8192
"""Bytes of a row that a copy program of ``"fused"`` sends at once."""
_LOCAL_FIRST_FRACTIONS = (1.0, 0.25)
"""Candidates of ``local_first_fraction``. The weights of these experts are read twice, so a small
fraction is faster if reading weights limits the GEMM."""
_TILES_PER_STEP = 128
"""Number of tiles whose records a program writes at a time."""


class EPGroupGEMMKey(NamedTuple):
    """Tuning key of a call. The algorithms also use it as the call's sizes.

    Fields without a description are as in the key of ``ep_dispatch``.
    """

    M: int
    """``max_tokens`` of the call."""
    N: int
    K: int
    num_experts: int
    topk: int
    dtype: torch.dtype
    num_ranks: int
    layout: str
    """Memory layout of the weights of experts."""
    activation: str | None
    has_weights: bool
    has_capacity: bool
    replicas: int
    id_dtype: torch.dtype | None
    routing_skew: str | None

    @property
    def scales(self) -> str:
        """Scales of x, as in the key of ``ep_dispatch``."""
        return "none"


class Dispatch(DispatchCall):
    """The dispatch in a call."""

    function = "ep_dispatch_group_gemm"


@dataclass(eq=False, repr=False)
class Call(OpCall):
    """One call: the arguments of ``ep_dispatch_group_gemm``."""

    function: ClassVar[str] = "ep_dispatch_group_gemm"
    x: torch.Tensor
    topk_ids: torch.Tensor
    B: torch.Tensor
    ctx: EPContext
    topk_weights: torch.Tensor | None = None
    activation: str | None = None
    max_tokens: int | None = None
    expert_map: torch.Tensor | None = None
    routing_skew: str | None = None
    gemm_config: triton.Config | None = None
    num_ctas: int | None = None
    """Number of programs that send rows in ``"fused"``."""
    local_first_fraction: float | None = None
    """Fraction of the experts whose tiles with only rows of this rank precede all other tiles."""
    algorithm: str | None = None
    validated_key: Any = None
    """Key of the call from the tuner. The arguments are then not checked again."""

    def __post_init__(self) -> None:
        key = self.validated_key
        self.dispatch = Dispatch(
            self.x, self.topk_ids, self.ctx, self.topk_weights, max_tokens=self.max_tokens,
            expert_map=self.expert_map, routing_skew=self.routing_skew, validated_key=key,
        )  # fmt: skip
        if key is None:
            raise_first_error(self.function, self._checks())
            base = self.dispatch.key
            key = EPGroupGEMMKey(
                base.M, self.B.shape[2], base.hidden, base.num_experts, base.topk, base.dtype,
                base.num_ranks, weights_layout(self.B), self.activation, base.has_weights,
                base.has_capacity, base.replicas, base.id_dtype, base.routing_skew,
            )  # fmt: skip
        self.key: EPGroupGEMMKey = key
        self.chosen_algorithm = ALGORITHMS[self.algorithm or Serial.name]
        if self.gemm_config is None:
            self.gemm_config = grouped_tiles()[0]
        check_tiles(self.function, self.gemm_config)
        self.chosen_algorithm.check(self)

    def _checks(self) -> Iterator[Check]:
        B, ctx, shape = self.B, self.ctx, (self.ctx.local_experts, self.ctx.hidden)
        yield from tensor_checks(B=B)
        yield "B.dtype", B.dtype, B.dtype == ctx.dtype, f"the dtype of the context, {ctx.dtype}"
        device = ctx.device.torch_device
        yield "B.device", B.device, B.device == device, f"{device}"
        fits = B.ndim == 3 and tuple(B.shape[:2]) == shape and B.shape[2] > 0
        yield "B.shape", tuple(B.shape), fits, f"[E / W, hidden, N] = [{shape[0]}, {shape[1]}, N]"
        yield gradient_check("B", B)
        fraction, num_ctas = self.local_first_fraction, self.num_ctas
        max_ctas = max_programs(None, 1)
        fits = fraction is None or (isinstance(fraction, (int, float)) and 0 <= fraction <= 1)
        yield "local_first_fraction", fraction, fits, "None, or 0 to 1"
        fits = num_ctas is None or (is_int(num_ctas) and 1 <= num_ctas <= max_ctas)
        yield "num_ctas", num_ctas, fits, f"None, or 1 to {max_ctas}"
        expected = f"None or {SILU_MUL!r}"
        yield "activation", self.activation, self.activation in (None, SILU_MUL), expected
        fits = self.activation is None or B.shape[2] % 2 == 0
        yield "B.shape", tuple(B.shape), fits, f"an even N for activation={SILU_MUL!r}"

    def product(self, received: Received, algorithm: str) -> GroupedGemmCall:
        return GroupedGemmCall(
            A=received.rows, B=self.B, topk_ids=received.positions, order="route",
            activation=self.activation, gemm_config=self.gemm_config, algorithm=algorithm,
            A_scale=None, B_scale=None, use_fast_accum=False, out_dtype=None, routing_skew=None,
            validated_key=None,
        )  # fmt: skip

    def run_dispatch(self) -> Received:
        """Run the dispatch, with its own tuning unless this call is untuned."""
        if self.algorithm is None:
            return self.dispatch.run()  # type: ignore[return-value]
        return ep_dispatch(
            self.x, self.topk_ids, self.ctx, self.topk_weights, max_tokens=self.max_tokens,
            expert_map=self.expert_map, routing_skew=self.routing_skew, autotune_pg=self.ctx.group,
        )  # fmt: skip


class Serial(Algorithm[Call, EPGroupGEMMKey]):
    """``ep_dispatch``, then our grouped GEMM, which gathers rows while it loads them."""

    name: str = "serial"
    tunables: ClassVar[tuple[str, ...]] = ("gemm_config",)
    product_algorithm: ClassVar[str] = "tiled"
    """Algorithm of the grouped GEMM."""

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        return [(tiles,) for tiles in grouped_tiles()]

    def fits(self, config: Mapping[str, Any], sizes: EPGroupGEMMKey) -> bool:
        return fits_tiles(config, sizes)

    def compile(self, call: Call) -> None:
        call.dispatch.compile()
        call.product(call.dispatch.result(), self.product_algorithm).compile()

    def run(self, call: Call) -> Any:
        received = call.run_dispatch()
        return call.product(received, self.product_algorithm).run(), received


class Library(Serial):
    """``ep_dispatch``, a copy that sorts rows by expert, then torch's grouped GEMM."""

    name, tunables, product_algorithm = "library", (), "library"
    is_fallback = True

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        return [()] if has_library_kernel() else []

    def fits(self, config: Mapping[str, Any], sizes: EPGroupGEMMKey) -> bool:
        return is_library_candidate(sizes)

    def check(self, call: Call) -> None:
        if not grouped_library_supports(call.key):
            expected = "another algorithm: K, N and the strides of B must be multiples of 16 bytes"
            raise InvalidArgument(call.function, "algorithm", self.name, expected)


class Fused(Algorithm[Call, EPGroupGEMMKey]):
    """One launch exchanges ids and computes the layout, another sends rows and multiplies.

    Tiles that have only rows of this rank come first.
    """

    name, tunables = "fused", ("gemm_config", "num_ctas", "local_first_fraction")

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        for num_ctas in _NUM_COPY_PROGRAMS:
            for fraction in _LOCAL_FIRST_FRACTIONS:
                for tiles in grouped_tiles():
                    yield tiles, num_ctas, fraction

    def fits(self, config: Mapping[str, Any], sizes: EPGroupGEMMKey) -> bool:
        tiles = config["gemm_config"]
        # With few rows, the transfer takes less time than the overhead of overlapping.
        has_tall_tiles = tiles.kwargs["BLOCK_SIZE_M"] >= 64 or current_device().interprets
        fits = has_tall_tiles and config["num_ctas"] <= max_programs(None, 1)
        return fits and self.fits_sizes(sizes) and fits_tiles(config, sizes)

    @staticmethod
    def fits_sizes(sizes: EPGroupGEMMKey) -> bool:
        return sizes.num_ranks > 1 and not sizes.has_capacity

    def check(self, call: Call) -> None:
        if call.key.has_capacity:
            expected = f"another algorithm than {self.name!r} for a limited capacity"
            raise InvalidArgument(call.function, "algorithm", self.name, expected)

    def compile(self, call: Call) -> None:
        received = call.dispatch.result()
        call.dispatch.dispatch_launch(received.layout, num_copy=0).compile()
        for launch in self.launches(call, received)[1]:
            launch.compile()

    def run(self, call: Call) -> Any:
        received = call.dispatch.result()
        C, (order, product) = self.launches(call, received)
        call.dispatch.launch_kernel(received.layout, num_copy=0)
        call.ctx.buffer.launcher.repeat(order)
        call.ctx.buffer.repeat(product, call.num_ctas or _NUM_COPY_PROGRAMS[0])
        return C, received

    def launches(self, call: Call, received: Received) -> tuple[torch.Tensor, list[Launch]]:
        """Return C, the launch that orders the tiles, and the launch that sends and multiplies."""
        ctx, dispatch, config = call.ctx, call.dispatch, call.gemm_config
        assert config is not None
        block_m, E = config.kwargs["BLOCK_SIZE_M"], ctx.local_experts
        ends, max_positions = received.ends, received.positions.max_positions
        C = call.x.new_empty(max_positions, call.key.N // (1 if call.activation is None else 2))
        tiles = ends.new_empty(max_tiles(max_positions, E, block_m), TILE_RECORD_WORDS.value)
        num_tiles = ends.new_empty(2)
        plan = dispatch.plan()._replace(BLOCK=max(1, _BLOCK_BYTES // call.x.element_size()))
        fraction = call.local_first_fraction
        fraction = _LOCAL_FIRST_FRACTIONS[0] if fraction is None else fraction
        options = {
            "EXPERTS": E, "EXPERT_LANES": triton.next_power_of_2(E), "NUM_RANKS": plan.NUM_RANKS,
            "LANES": plan.LANES, "BLOCK": _TILES_PER_STEP, "num_warps": 4,
        }  # fmt: skip
        arguments: tuple[Any, ...] = (
            ends, received.counts, tiles, num_tiles, ctx.rank, block_m, math.ceil(fraction * E),
        )  # fmt: skip
        order = Launch(kernel_order_tiles, (E,), arguments, options)
        index = received.row_of_position
        blocks = BlockMap(E, 1, block_m, index, index, ends, tiles, num_tiles, (order,))
        product = grouped_product(
            received.rows, call.B, C, blocks, config, is_sorted=True,
            silu_mul=call.activation is not None, routes_per_row=1,
        )  # fmt: skip
        _, B, _, block_map, _, _, K, strides, out_columns, _ = product.args
        grouped_plan = product.options["grouped_plan"]
        grouped_plan = grouped_plan._replace(
            NUM_SOURCES=plan.NUM_RANKS,
            A_ALIGNED=grouped_plan.A_ALIGNED and call.x.data_ptr() % 16 == 0,
        )
        rows = ctx.buffer.memory["rows"]
        tensors = DispatchTensors(
            call.x, call.topk_ids, call.expert_map, received.rows, rows.pointers
        )
        num_copy_programs = call.num_ctas or _NUM_COPY_PROGRAMS[0]
        max_tokens = dispatch.token_limit
        call_tag = digest_of(max_tokens, plan.TOPK, self.name, call.x.dtype, num_copy_programs)
        arguments = (
            tensors, ctx.buffer.regions(torch.int32)[1], B, C, block_map, dispatch.tokens,
            max_tokens, dispatch.logical_experts, ctx.rank, num_copy_programs, call_tag, K, strides,
            out_columns,
        )  # fmt: skip
        options = {**product.options, "ep_plan": plan, "grouped_plan": grouped_plan}
        grid = (num_copy_programs + product.grid[0],)  # type: ignore[index]
        return C, [order, Launch(kernel_dispatch_grouped_gemm, grid, arguments, options)]


def fits_tiles(config: Mapping[str, Any], sizes: EPGroupGEMMKey) -> bool:
    tokens = sizes.M * sizes.num_ranks
    columns = sizes.N // (1 if sizes.activation is None else 2)
    return fits_grouped(config, sizes.dtype, sizes.num_experts, columns, tokens, sizes.topk, sizes)


ALGORITHMS = Algorithms("ep_dispatch_group_gemm", (Serial(), Fused(), Library()))
