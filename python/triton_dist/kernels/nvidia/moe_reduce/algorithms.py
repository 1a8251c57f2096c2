"""Algorithms of the ops that end a mixture-of-experts layer: the second GEMM and the sums.

``common/moe/summing.py`` describes the ops. "Choices" are the topk experts of a token.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.moe.columns import ColumnChunks
from triton_dist.kernels.common.moe.product import grouped_product
from triton_dist.kernels.common.moe.routing import block_map
from triton_dist.kernels.common.moe.rows import (
    ROWS_OF_SINGLE_TILE,
    check_grouped_library,
    gather_rows,
    has_library_kernel,
    is_library_candidate,
    multiply_sorted,
    sorted_scales,
)
from triton_dist.kernels.common.moe.spaces import fits_grouped, grouped_tiles
from triton_dist.kernels.common.moe.summing import COLLECTIVE, MoESumContext, SumCall, SumSizes
from triton_dist.kernels.common.moe.topk_sum import TOPK_EXCHANGE, RoutedSums, topk_sum
from triton_dist.kernels.common.op import Algorithm, Algorithms, check_tiles
from triton_dist.kernels.nvidia.moe_reduce.context import MoEReduceARContext, MoEReduceRSContext
from triton_dist.runtime.device import current_device
from triton_dist.runtime.launch import Launch

_CHUNK_COUNTS = (1, 2, 4, 8)
# Tiles with fewer rows are for products whose time is the reading of weights. These are too short
# to hide a transfer. A copy engine takes some us per push, hence the minimum bytes of a push.
_MIN_CHUNKED_BLOCK_M, _MIN_PUSH_BYTES = 64, 256 << 10


class Product(ABC):
    """The grouped product of a call and the sums over choices, computed in chunks of columns."""

    def __init__(self, call: SumCall, block_m: int) -> None:
        self.call = call
        self.blocks = block_map(call.chosen_experts, call.key.E, block_m)
        self.queue_launch: Callable[[Launch], None] = call.ctx.buffer.slots.launcher.repeat
        self.x, self.weights = call.x.detach(), call.weights.detach()

    def begin(self) -> None:
        """Queue the launches that the products of all chunks need."""
        for launch in self.blocks.launches:
            self.queue_launch(launch)

    @abstractmethod
    def queue_products(self, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queue the product of columns ``first`` to ``end``.

        Return (product [M * topk, end - first], row of each route in the product). The rows are
        ``None`` if they are in the order of routes. The product is valid until the next call.
        """

    def queue_sums(self, first: int, end: int, out: torch.Tensor, rows_per_block: int) -> None:
        """Queue the sums over choices of columns ``first`` to ``end`` into ``out``.

        ``topk_sum`` describes the layout of ``out`` with row blocks of ``rows_per_block`` tokens.
        """
        products, rows = self.queue_products(first, end)
        self.queue_launch(self._sum_launch(products, rows, first, out, rows_per_block))

    def _sum_launch(
        self,
        products: torch.Tensor,
        rows: torch.Tensor | None,
        first: int,
        out: torch.Tensor,
        rows_per_block: int,
    ) -> Launch:
        call = self.call
        return topk_sum(
            products, call.expert_weight.detach(), call.chosen_experts, rows, out, call.key.E,
            rows_per_block=rows_per_block, first_column=first, N=call.key.N,
        )  # fmt: skip

    def compile(self, columns: ColumnChunks, out: torch.Tensor) -> None:
        """Compile and load the launches for the first and the last chunk."""
        for launch in self.blocks.launches:
            launch.compile()
        chunks = list(columns)
        for first, end in dict.fromkeys((chunks[0], chunks[-1])):
            for launch in self.launches(first, end, out, columns.rows):
                launch.compile()

    @abstractmethod
    def launches(
        self, first: int, end: int, out: torch.Tensor, rows_per_block: int
    ) -> Iterator[Launch]:
        """Yield the launches for columns ``first`` to ``end``, in any order."""


class TiledProduct(Product):
    """Our kernel, which gathers rows of x while loading and stores rows in the order of routes."""

    def __init__(self, call: SumCall) -> None:
        assert call.tile_config is not None
        self.tile_config = call.tile_config
        super().__init__(call, call.tile_config.kwargs["BLOCK_SIZE_M"])
        self._product_memory: torch.Tensor | None = None

    def queue_products(self, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        C, launch = self._chunk_launch(first, end)
        self.queue_launch(launch)
        return C, None

    def launches(
        self, first: int, end: int, out: torch.Tensor, rows_per_block: int
    ) -> Iterator[Launch]:
        C, launch = self._chunk_launch(first, end)
        yield launch
        yield self._sum_launch(C, None, first, out, rows_per_block)

    def _chunk_launch(self, first: int, end: int) -> tuple[torch.Tensor, Launch]:
        """Return the memory for the product of a chunk, and the launch that computes it.

        All chunks use one memory, so that it stays in the L2 cache.
        """
        routes = self.call.chosen_experts.numel()
        elements = routes * (end - first)
        if self._product_memory is None or self._product_memory.numel() < elements:
            self._product_memory = self.call.new_empty(elements)
        C = self._product_memory[:elements].view(routes, end - first)
        weights, scales = self.weights[:, :, first:end], self.call.scales
        return C, grouped_product(
            self.x, weights, C, self.blocks, self.tile_config,
            scales=None if scales is None else scales.columns(first, end),
        )  # fmt: skip


class LibraryProduct(Product):
    """torch's grouped GEMM of a copy of x whose rows are sorted by expert.

    The sums read the rows of the product in this sorted order.
    """

    def __init__(self, call: SumCall) -> None:
        super().__init__(call, ROWS_OF_SINGLE_TILE)
        self._sorted = torch.empty_like(self.x, memory_format=torch.contiguous_format)
        self._scales = call.scales

    def begin(self) -> None:
        super().begin()
        self.queue_launch(gather_rows(self.x, self._sorted, self.blocks))
        if self.call.scales is not None:
            self._scales, copy_scales = sorted_scales(self.call.scales, self.blocks)
            self.queue_launch(copy_scales)

    def queue_products(self, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        scales = None if self._scales is None else self._scales.columns(first, end)
        weights = self.weights[:, :, first:end]
        C = multiply_sorted(self._sorted, weights, self.blocks, scales, self.call.key)
        return C, self.blocks.rows

    def launches(
        self, first: int, end: int, out: torch.Tensor, rows_per_block: int
    ) -> Iterator[Launch]:
        yield gather_rows(self.x, self._sorted, self.blocks)
        if self.call.scales is not None:
            yield sorted_scales(self.call.scales, self.blocks)[1]
        C = self.call.new_empty(self.call.chosen_experts.numel(), end - first)
        yield self._sum_launch(C, self.blocks.rows, first, out, rows_per_block)


class SumAlgorithm(Algorithm[SumCall, SumSizes]):
    """Base class of the algorithms. The first tunable is a tile config, except in ``Library``."""

    product_class: ClassVar[type[TiledProduct] | type[LibraryProduct]] = TiledProduct

    def candidates(self) -> Iterator[tuple[Any, ...]]:
        if self.product_class is LibraryProduct:
            yield from ((each,) for each in self.values_of_last_tunable() if has_library_kernel())
        else:
            yield from itertools.product(grouped_tiles(), self.values_of_last_tunable())

    @abstractmethod
    def values_of_last_tunable(self) -> tuple[Any, ...]:
        """Return the values of the last tunable to try on this device, the simplest first."""

    def fits(self, config: Mapping[str, Any], sizes: SumSizes) -> bool:
        key = sizes.key
        if self.product_class is LibraryProduct:
            if sizes.config or not is_library_candidate(key):
                return False
        elif sizes.config is not None:
            # The caller's config replaces the candidate's tiles, so one candidate is sufficient.
            if not _has_first_tiles(config):
                return False
        elif not fits_grouped(config, key.dtype, key.E, key.N, key.M, key.topk, key):
            return False
        return self.fits_reduction(config, sizes)

    @abstractmethod
    def fits_reduction(self, config: Mapping[str, Any], sizes: SumSizes) -> bool:
        """Return whether the value of the last tunable in a config is worth trying."""

    def check(self, call: SumCall) -> None:
        if self.product_class is TiledProduct:
            check_tiles(call.ctx_type.function, call.tile_config, self.name)
        else:
            check_grouped_library(call.ctx_type.function, self.name, call.key)


class ChunkedPush(SumAlgorithm):
    """Algorithm that sends each chunk of columns by copy engine while the next chunk is computed.

    The rows of a chunk are sent to the ranks that add them.
    """

    name, tunables = "chunks", ("gemm_config", "num_chunks")

    def values_of_last_tunable(self) -> tuple[Any, ...]:
        return _CHUNK_COUNTS[:2] if current_device().interprets else _CHUNK_COUNTS

    def fits_reduction(self, config: Mapping[str, Any], sizes: SumSizes) -> bool:
        key, num_chunks = sizes.key, config["num_chunks"]
        if sizes.n_chunks is not None:
            return bool(num_chunks == 1)  # one candidate, because the caller's number replaces it
        if num_chunks == 1 or num_chunks > key.n_chunks_max:
            return bool(num_chunks == 1)
        if current_device().interprets:  # One config is sufficient for tests.
            return key.num_ranks > 1 and _has_first_tiles(config)
        has_few_row_tiles = config["gemm_config"].kwargs["BLOCK_SIZE_M"] < _MIN_CHUNKED_BLOCK_M
        pushed_bytes = sizes.nbytes // key.num_ranks // num_chunks
        return key.num_ranks > 1 and not has_few_row_tiles and pushed_bytes >= _MIN_PUSH_BYTES

    def check(self, call: SumCall) -> None:
        super().check(call)
        try:
            fits = 1 <= call.num_column_chunks <= call.ctx.n_chunks_max
        except TypeError:
            fits = False
        if not fits:
            expected = f"1 to the context's n_chunks_max = {call.ctx.n_chunks_max}"
            chunks = call.num_column_chunks
            raise InvalidArgument(call.ctx_type.function, "num_chunks", chunks, expected)

    def compile(self, call: SumCall) -> None:
        columns, ctx = call.column_chunks, call.ctx
        addends = call.new_empty(ctx.num_ranks * columns.rows * columns.N)
        TiledProduct(call).compile(columns, addends)
        if ctx.num_ranks > 1:
            out = call.new_empty(columns.rows, columns.N)
            ctx.buffer.launch(columns, addends, out, call.key.M).compile()
            ctx.compile_finish(out, call.key.M)

    def run(self, call: SumCall) -> torch.Tensor:
        ctx, M, product = call.ctx, call.key.M, TiledProduct(call)
        if ctx.num_ranks == 1:
            return sum_all_columns(product)
        columns = call.column_chunks
        addends = call.new_empty(ctx.num_ranks * columns.rows * columns.N)
        out = call.new_empty(columns.rows, columns.N)
        product.begin()
        ctx.buffer.run(
            columns, addends, out, M,
            lambda first, end: product.queue_sums(first, end, addends, columns.rows),
        )  # fmt: skip
        result: torch.Tensor = ctx.finish_chunks(out, M)
        return result


class Serial(SumAlgorithm):
    """Algorithm that computes the full product, then the sums over choices, then over ranks."""

    name: str = "serial"
    tunables: ClassVar[tuple[str, ...]] = ("gemm_config", "reduction")
    ctx_type: type[MoESumContext]

    def __init__(self, ctx_type: type[MoESumContext]) -> None:
        self.ctx_type = ctx_type

    def values_of_last_tunable(self) -> tuple[Any, ...]:
        reductions, device = self.ctx_type.reductions, current_device()
        if device.interprets:
            return reductions[:1]
        return (*reductions, COLLECTIVE) if device.has_nccl else reductions

    def fits_reduction(self, config: Mapping[str, Any], sizes: SumSizes) -> bool:
        if sizes.key.num_ranks == 1 or (sizes.n_chunks or 1) > 1:
            return False
        if current_device().interprets:  # One config is sufficient for tests.
            return _has_first_tiles(config)
        reduction = config["reduction"]
        return reduction == COLLECTIVE or self.ctx_type.fits_sum(reduction, sizes.nbytes)

    def check(self, call: SumCall) -> None:
        super().check(call)
        reductions = (*self.ctx_type.reductions, COLLECTIVE)
        reduction = call.reduction or reductions[0]
        if reduction not in reductions:
            expected = f"None or one of {', '.join(map(repr, reductions))}"
            raise InvalidArgument(call.ctx_type.function, "reduction", call.reduction, expected)
        nbytes = call.key.M * call.key.N * call.ctx.dtype.itemsize
        if reduction != COLLECTIVE and not self.ctx_type.fits_sum(reduction, nbytes):
            expected = f"a reduction that supports {nbytes} bytes"
            raise InvalidArgument(call.ctx_type.function, "reduction", reduction, expected)
        call.reduction = reduction

    def compile(self, call: SumCall) -> None:
        total, ctx = call.new_empty(call.key.M, call.key.N), call.ctx
        self.product_class(call).compile(ColumnChunks(call.key.M, call.key.N, call.key.N), total)
        if ctx.num_ranks > 1 and call.reduction == TOPK_EXCHANGE:
            routes = call.chosen_experts.numel()
            rows = call.chosen_experts.new_empty(routes, dtype=torch.int32)
            products = call.new_empty(routes, call.key.N)
            sums = _routed_sums(
                call, products, None if self.product_class is TiledProduct else rows
            )
            sums.compile(ctx.exchange, ctx.returns_all_rows)
        elif ctx.num_ranks > 1 and call.reduction != COLLECTIVE:
            ctx.compile_sum_over_ranks(total, call.reduction)

    def run(self, call: SumCall) -> torch.Tensor:
        product, ctx = self.product_class(call), call.ctx

        def run_unfused() -> torch.Tensor:
            if ctx.num_ranks == 1:
                return sum_all_columns(product)
            if call.reduction == TOPK_EXCHANGE:
                product.begin()
                sums = _routed_sums(call, *product.queue_products(0, call.key.N))
                return sums.run(ctx.exchange, ctx.returns_all_rows)
            total: torch.Tensor = ctx.sum_over_ranks(sum_all_columns(product), call.reduction)
            return total

        result: torch.Tensor = ctx.buffer.slots.run_without_slots(run_unfused)
        return result


class Library(Serial):
    """Algorithm like ``Serial``, with torch's grouped GEMM."""

    name, tunables = "library", ("reduction",)
    product_class, is_fallback = LibraryProduct, True


def _has_first_tiles(config: Mapping[str, Any]) -> bool:
    return str(config.get("gemm_config")) == str(grouped_tiles()[0])


def _routed_sums(call: SumCall, products: torch.Tensor, rows: torch.Tensor | None) -> RoutedSums:
    weight, ids = call.expert_weight.detach(), call.chosen_experts
    return RoutedSums(products, rows, weight, ids, call.key.E)


def sum_all_columns(product: Product) -> torch.Tensor:
    """Return this rank's sums over choices, [M, N]."""
    call = product.call
    total = call.new_empty(call.key.M, call.key.N)
    product.begin()
    product.queue_sums(0, call.key.N, total, call.key.M)
    return total


def _algorithms(ctx_type: type[MoESumContext]) -> Algorithms[SumCall, SumSizes]:
    return Algorithms(ctx_type.function, (ChunkedPush(), Serial(ctx_type), Library(ctx_type)))


class ReduceScatterCall(SumCall):
    """One call of ``run_moe_reduce_rs``."""

    ctx_type = MoEReduceRSContext
    algorithms = _algorithms(ctx_type)


class AllReduceCall(SumCall):
    """One call of ``run_moe_reduce_ar``."""

    ctx_type = MoEReduceARContext
    algorithms = _algorithms(ctx_type)
