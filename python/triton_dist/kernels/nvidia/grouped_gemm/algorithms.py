"""Algorithms of the grouped GEMM: their candidates, checks and launches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from triton_dist.kernels.common.context import (
    DTYPE_NAMES,
    DTYPES,
    Check,
    cached_after_checks,
    gradient_check,
    operand_signature,
    tensor_checks,
)
from triton_dist.kernels.common.gemm.scales import FP8, NO_SCALING, Scaling, scaling_of
from triton_dist.kernels.common.gemm.spaces import predict_gemm_ms, predict_library_ms
from triton_dist.kernels.common.moe.positions import Positions
from triton_dist.kernels.common.moe.product import grouped_product, weights_layout
from triton_dist.kernels.common.moe.routing import BlockMap, block_map, check_ids
from triton_dist.kernels.common.moe.rows import (
    ROWS_OF_SINGLE_TILE,
    check_grouped_library,
    clear_padding_rows,
    gather_rows,
    has_library_kernel,
    is_library_candidate,
    multiply_sorted,
    restore_row_order,
    sorted_product,
)
from triton_dist.kernels.common.moe.scales import OperandScales
from triton_dist.kernels.common.moe.skew import SkewedKey
from triton_dist.kernels.common.moe.sorted_rows import gather_positions, tiles_of_positions
from triton_dist.kernels.common.moe.spaces import fits_grouped, grouped_tiles
from triton_dist.kernels.common.op import Algorithm, Algorithms, GEMMCall, check_tiles
from triton_dist.runtime.device import current_device
from triton_dist.runtime.launch import BoundedDict, Launch

ORDERS = ("route", "sorted")
SILU_MUL = "silu_mul"
_ROUTES_PER_ROW = {"gathered": 1, "position": 0}
"""Argument ``routes_per_row`` of ``grouped_product`` by the value of ``GroupedKey.rows``. 0: rows
of A are sorted by expert."""
# Keys by the signatures of operands that passed the checks, which take several us.
_CHECKED_KEYS: BoundedDict[Any, Any] = BoundedDict()


def checks(
    A: torch.Tensor,
    B: torch.Tensor,
    topk_ids: torch.Tensor | Positions,
    order: object,
    activation: object,
    scaling: Scaling = NO_SCALING,
) -> Iterator[Check]:
    """Yield the checks of a call. The ids are checked first, because later checks need them."""
    ids: Any = topk_ids.ends if isinstance(topk_ids, Positions) else topk_ids
    yield from tensor_checks(A=A, B=B, topk_ids=ids)
    if not isinstance(topk_ids, Positions):
        check_ids("grouped_gemm", ids, B.shape[0] if B.ndim == 3 else 1)
    device = current_device().torch_device.type
    if A.dtype not in FP8:
        yield "A.dtype", A.dtype, A.dtype in DTYPES, DTYPE_NAMES
        yield "B.dtype", B.dtype, B.dtype == A.dtype, f"the dtype of A, {A.dtype}"
    yield "A.device", A.device, A.device.type == device, f"a tensor on {device}"
    for name, tensor in (("B", B), ("topk_ids", ids)):
        expected = f"the device of A, {A.device}"
        yield f"{name}.device", tensor.device, tensor.device == A.device, expected
    yield gradient_check("A", A)
    yield gradient_check("B", B)
    shape = tuple(B.shape)
    yield "B.shape", shape, B.ndim == 3 and min(shape) > 0, "[E, K, N]"
    if isinstance(topk_ids, Positions):
        yield from topk_ids.checks(A, B)
    else:
        routes = topk_ids.numel()
        is_valid = A.ndim == 2 and A.shape[1] == shape[1] and A.shape[0] in (len(topk_ids), routes)
        expected = f"[{len(topk_ids)} tokens or {routes} routes, K = {shape[1]}]"
        yield "A.shape", tuple(A.shape), is_valid, expected
    expected = "unit stride along K; call A.contiguous()"
    yield "A.stride()", A.stride(), A.stride(1) == 1 or A.shape[1] == 1, expected
    yield "order", order, order in ORDERS, f"one of {', '.join(map(repr, ORDERS))}"
    expected = f"None or {SILU_MUL!r}"
    yield "activation", activation, activation in (None, SILU_MUL), expected
    expected = f"[E, K, N] with an even N for activation={SILU_MUL!r}"
    yield "B.shape", shape, activation is None or shape[2] % 2 == 0, expected
    yield from scaling.checks(A, B)


class GroupedKey(NamedTuple):
    """Tuning key of a call."""

    M: int
    """Number of tokens. One tuning serves a range of M."""
    N: int
    K: int
    E: int
    topk: int
    dtype: torch.dtype
    layout: str
    """Memory layout of B."""
    rows: str
    """What A has a row for: each ``"token"``, ``"route"`` or ``"position"``; or ``"gathered"`` if
    ``Positions.rows`` has the row of each position."""
    order: str
    activation: str | None

    @classmethod
    def of(
        cls,
        A: torch.Tensor,
        B: torch.Tensor,
        topk_ids: torch.Tensor | Positions,
        *,
        order: str = "route",
        activation: str | None = None,
        **scales: Any,
    ) -> GroupedKey:
        """Return the key of a call, which is a ``ScaledKey`` for fp8 operands.

        Raises:
            InvalidArgument: shapes, dtypes or devices do not match.
        """
        scaling = scaling_of(**scales)
        routing: Any = topk_ids
        position_sizes: tuple[Any, ...] = ()
        if isinstance(topk_ids, Positions):
            order, routing, position_sizes = "sorted", topk_ids.ends, topk_ids.key_parts

        def make_key() -> GroupedKey:
            M, topk, rows, *_ = position_sizes or (*routing.shape, "route")
            if rows == "route" and len(A) == M:
                rows = "token"
            E, K, N = B.shape
            unscaled_key = cls(
                M, N, K, E, topk, A.dtype, weights_layout(B), rows, order, activation
            )
            return scaling.extend_key(unscaled_key, A, B)

        device = current_device().torch_device
        signature = operand_signature(B, A, B, routing), device, position_sizes
        return cached_after_checks(
            _CHECKED_KEYS,
            (*signature, order, activation, *scaling.signature(B)),
            "grouped_gemm",
            lambda: checks(A, B, topk_ids, order, activation, scaling),
            make_key,
        )


@dataclass(eq=False, repr=False)
class Call(GEMMCall):
    """One call: the arguments of ``grouped_gemm``."""

    A: torch.Tensor
    B: torch.Tensor
    topk_ids: torch.Tensor | Positions
    order: str
    activation: str | None
    out_dtype: torch.dtype | None
    routing_skew: str | None

    def __post_init__(self) -> None:
        scaling = scaling_of(self.A_scale, self.B_scale, None, self.out_dtype, self.use_fast_accum)
        skewed_key = self.validated_key
        if skewed_key is None:
            key = GroupedKey.of(
                self.A, self.B, self.topk_ids, order=self.order, activation=self.activation,
                **scaling._asdict(),
            )  # fmt: skip
            skewed_key = SkewedKey.of("grouped_gemm", key, self.routing_skew)
        self.key: GroupedKey = SkewedKey.without_skew(skewed_key)
        self.scales = OperandScales.of(self.A, self.B, scaling)
        self.output_dtype = scaling.output_dtype(self.A)
        self.out_columns = self.key.N // (1 if self.activation is None else 2)
        self.chosen_algorithm = ALGORITHMS[self.algorithm or Tiled.name]
        self.chosen_algorithm.check(self)

    def empty_product(self) -> torch.Tensor:
        return self.A.new_empty(self.topk_ids.numel(), self.out_columns, dtype=self.output_dtype)

    def block_map(self, block_m: int) -> BlockMap:
        """Return the map from routes (pairs of token and expert) to tiles.

        Its launches, which compute the map, are not queued yet.
        """
        if isinstance(self.topk_ids, Positions):
            return tiles_of_positions(self.topk_ids, block_m)
        return block_map(self.topk_ids, self.key.E, block_m)


class Tiled(Algorithm[Call, GroupedKey]):
    """Our kernel, which gathers rows while it loads them."""

    name, tunables = "tiled", ("gemm_config",)

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        return [(tiles,) for tiles in grouped_tiles()]

    def fits(self, config: Mapping[str, Any], sizes: GroupedKey) -> bool:
        return fits_grouped(config, sizes.dtype, sizes.E, sizes.N, sizes.M, sizes.topk, sizes)

    def check(self, call: Call) -> None:
        check_tiles("grouped_gemm", call.gemm_config, self.name)

    def compile(self, call: Call) -> None:
        _, blocks, product = self._launches(call)
        for launch in (*blocks.launches, product):
            launch.compile()

    def run(self, call: Call) -> torch.Tensor:
        C, blocks, product = self._launches(call)
        blocks.queue()
        product.run()
        return C

    @staticmethod
    def _launches(call: Call) -> tuple[torch.Tensor, BlockMap, Launch]:
        assert call.gemm_config is not None
        C = call.empty_product()
        blocks = call.block_map(call.gemm_config.kwargs["BLOCK_SIZE_M"])
        product = grouped_product(
            call.A, call.B, C, blocks, call.gemm_config,
            is_sorted=call.key.order == "sorted", silu_mul=call.activation is not None,
            scales=call.scales, routes_per_row=_ROUTES_PER_ROW.get(call.key.rows),
        )  # fmt: skip
        return C, blocks, product


class Library(Algorithm[Call, GroupedKey]):
    """torch's grouped GEMM, between two copies that sort the rows and restore their order."""

    name: str = "library"
    tunables: ClassVar[tuple[str, ...]] = ()
    is_fallback = True

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        return [()] if has_library_kernel() else []

    def fits(self, config: Mapping[str, Any], sizes: GroupedKey) -> bool:
        return is_library_candidate(sizes)

    def check(self, call: Call) -> None:
        check_grouped_library("grouped_gemm", self.name, call.key)

    def compile(self, call: Call) -> None:
        if isinstance(call.topk_ids, Positions):
            for _, gather in self._gather_launches(call, call.topk_ids):
                gather.compile()
            return
        blocks, routes = call.block_map(ROWS_OF_SINGLE_TILE), call.topk_ids.numel()
        C = call.empty_product()
        copies = gather_rows(call.A, call.A.new_empty(routes, call.key.K), blocks)
        for launch in (*blocks.launches, copies, self._order_rows(call, C, blocks)[1]):
            launch.compile()

    def run(self, call: Call) -> torch.Tensor:
        if isinstance(call.topk_ids, Positions):
            return self._apply_activation(call, self._product_of_positions(call, call.topk_ids))
        blocks = call.block_map(ROWS_OF_SINGLE_TILE).queue()
        C = sorted_product(call.A.detach(), call.B.detach(), blocks, call.scales, call.key)
        out, order_launch = self._order_rows(call, self._apply_activation(call, C), blocks)
        order_launch.run()
        return out

    @staticmethod
    def _apply_activation(call: Call, C: torch.Tensor) -> torch.Tensor:
        if call.activation is None:
            return C
        gate, up = C.chunk(2, dim=1)
        return torch.nn.functional.silu(gate).mul_(up)

    def _product_of_positions(self, call: Call, positions: Positions) -> torch.Tensor:
        rows, scales = call.A.detach(), call.scales
        gathered = self._gather_launches(call, positions)
        for _, gather in gathered:
            gather.run()
        if gathered:
            (rows, _), *gathered_scales = gathered
            for out, _ in gathered_scales:
                scales = scales and scales._replace(a=out)
        blocks = call.block_map(ROWS_OF_SINGLE_TILE)
        return multiply_sorted(rows, call.B.detach(), blocks, scales, call.key)

    @staticmethod
    def _gather_launches(call: Call, positions: Positions) -> list[tuple[torch.Tensor, Launch]]:
        """Return pairs of (memory, launch) that gather the rows of A, and the scales, by position.

        If the rows of A are already in the order of positions, return an empty list.
        """
        if positions.rows is None:
            return []
        scales = [] if call.scales is None else [call.scales.a.contiguous()]
        return [gather_positions(positions, each) for each in (call.A.detach(), *scales)]

    @staticmethod
    def _order_rows(call: Call, C: torch.Tensor, blocks: BlockMap) -> tuple[torch.Tensor, Launch]:
        """Return the result, and the launch that stores its rows in the order ``call.order``."""
        if call.order == "sorted":
            return C, clear_padding_rows(C, blocks)
        out = torch.empty_like(C)
        return out, restore_row_order(C, out, blocks)


ALGORITHMS = Algorithms("grouped_gemm", (Tiled(), Library()))


def predict_ms(config: Mapping[str, Any], key: GroupedKey) -> float:
    """Return the predicted milliseconds of a call whose experts have equal numbers of routes."""
    sizes = key.M * key.topk, key.N, key.K, key.dtype
    if config["algorithm"] == Library.name:
        return predict_library_ms(*sizes, key.E)
    return predict_gemm_ms(config["gemm_config"], *sizes, num_experts=key.E)
