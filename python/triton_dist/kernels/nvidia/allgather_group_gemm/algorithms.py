"""Algorithms of AllGather + grouped GEMM: their candidates, checks and launches."""

from __future__ import annotations

import dataclasses
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common import libraries
from triton_dist.kernels.common.agreement import check_equal_on_ranks
from triton_dist.kernels.common.exchange.buffer import Exchange, small_params
from triton_dist.kernels.common.exchange.protocol import kernel_all_gather
from triton_dist.kernels.common.gemm.scales import call_tag, scaling_of
from triton_dist.kernels.common.gemm.spaces import max_rows_of_key
from triton_dist.kernels.common.moe.product import grouped_product, kernel_grouped_gemm
from triton_dist.kernels.common.moe.routing import MAX_GROUPS, BlockMap, block_map
from triton_dist.kernels.common.moe.rows import (
    ROWS_OF_SINGLE_TILE,
    check_grouped_library,
    gather_rows,
    has_library_kernel,
    is_library_candidate,
    restore_row_order,
    sorted_product,
)
from triton_dist.kernels.common.moe.scales import OperandScales, pack, packed_format, unpacked
from triton_dist.kernels.common.moe.skew import SkewedKey
from triton_dist.kernels.common.moe.spaces import fits_grouped, grouped_tiles
from triton_dist.kernels.common.op import (
    Algorithm,
    Algorithms,
    GEMMCall,
    check_straggler,
    check_tiles,
)
from triton_dist.kernels.common.peers import GatheredShards
from triton_dist.kernels.common.slots.gathered import AllGatherMethod
from triton_dist.kernels.nvidia.allgather_group_gemm.context import (
    MAX_GATHERED_BYTES,
    MoEAllGatherGroupGEMMTensorParallelContext,
    RoutedKey,
    check_operands,
)
from triton_dist.runtime.capabilities import has_links_between_all_gpus
from triton_dist.runtime.device import current_device
from triton_dist.runtime.launch import Launch

EXCHANGE, COLLECTIVE = "exchange", "collective"
"""All-gathers before the GEMM: our kernel in one launch, and ``torch.distributed``."""
PUSH, RING = AllGatherMethod.FULL_MESH_PUSH.value, AllGatherMethod.RING_PUSH_1D.value
"""All-gathers that overlap with the GEMM."""
# The GEMM reads the weights once per group of shards. Several groups are tried only if, per group,
# an expert has on average this number of rows, which is the largest BLOCK_SIZE_M.
_MIN_ROWS_PER_GROUP = 128
_VALID_NUM_GROUPS = range(1, MAX_GROUPS + 1)


@dataclass(eq=False, repr=False)
class Call(GEMMCall):
    """One call: the arguments of ``ag_group_gemm``."""

    a: torch.Tensor
    b: torch.Tensor
    ctx: MoEAllGatherGroupGEMMTensorParallelContext
    full_topk_ids: torch.Tensor
    num_groups: int
    gather: str | None
    straggler_option: tuple[int, int] | None
    out_dtype: torch.dtype | None
    routing_skew: str | None

    def __post_init__(self) -> None:
        scaling = scaling_of(self.A_scale, self.B_scale, None, self.out_dtype, self.use_fast_accum)
        skewed_key = self.validated_key
        if skewed_key is None:
            key = check_operands(self.a, self.b, self.ctx, self.full_topk_ids, scaling)
            skewed_key = SkewedKey.of("ag_group_gemm", key, self.routing_skew)
        self.key: RoutedKey = SkewedKey.without_skew(skewed_key)
        self.scales = OperandScales.of(self.a, self.b, scaling)
        self.output_dtype = scaling.output_dtype(self.a)
        self.shard = self.a
        """Rows that this rank sends: a, or packed rows of a and their scales."""
        self.is_packed = self.scales is not None and self.ctx.num_ranks > 1
        if self.is_packed:
            width, dtype = packed_format(self.key.K, self.a.dtype)
            self.shard = self.a.new_empty(len(self.a), width, dtype=dtype)
        if self.straggler_option is not None:
            check_straggler("ag_group_gemm", self.straggler_option)
        self.tiles = self.gemm_config or self.ctx.gemm_config
        check_tiles("ag_group_gemm", self.tiles)
        self.chosen_algorithm = chosen = ALGORITHMS[self.algorithm or Arrivals.name]
        assert isinstance(chosen, _GatherAlgorithm)
        self.gather = self.gather or chosen.gather_methods[0]
        if self.gather not in chosen.gather_methods:
            names = ", ".join(map(repr, chosen.gather_methods))
            expected = f"one of {names} for algorithm={chosen.name!r}"
            raise InvalidArgument("ag_group_gemm", "gather", self.gather, expected)
        chosen.check(self)

    def run(self) -> torch.Tensor:
        if self.ctx.compares_ids:
            check_equal_on_ranks("ag_group_gemm", "ids", self.full_topk_ids, self.ctx.group)
        if self.is_packed and self.scales is not None:
            pack(self.a, self.scales, self.shard)
        return self.chosen_algorithm.run(self)

    def empty_product(self) -> torch.Tensor:
        return self.a.new_empty(self.full_topk_ids.numel(), self.key.N, dtype=self.output_dtype)

    def unpack(
        self, rows: torch.Tensor, own: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, OperandScales | None]:
        """Return the elements and the scales of gathered ``rows``, which may be packed.

        ``own`` are this rank's rows, if they are in other memory.
        """
        if not self.is_packed or self.scales is None:
            return rows, self.scales
        return unpacked(rows, self.a.dtype, self.key.K), self.scales.of_packed_rows(rows, own)

    def block_map(self, block_m: int, **groups: Any) -> BlockMap:
        """Return the map from routes (pairs of token and expert) to tiles; it is not launched."""
        return block_map(self.full_topk_ids, self.key.E, block_m, **groups)

    def exchange(self) -> Exchange:
        """Describe our all-gather in one launch."""
        a, num_ranks = self.shard, self.ctx.num_ranks
        return Exchange(
            kernel_all_gather,
            a.numel(),
            a.numel() * num_ranks,
            small_params(a.nbytes),
            call_tag(self.key, len(a)),
        )

    def gather_all_rows(self, overlapped_work: Callable[[], object]) -> torch.Tensor:
        """Gather the rows of all ranks. ``overlapped_work()`` queues work that needs no gathered
        rows."""
        a, ctx = self.shard.detach(), self.ctx
        ctx.sleep(self.straggler_option)
        if ctx.num_ranks == 1:
            overlapped_work()
            return a
        rows = a.new_empty(a.shape[0] * ctx.num_ranks, a.shape[1])
        if self.gather == COLLECTIVE:
            pending = libraries.begin_all_gather(rows, a, ctx.group)
            overlapped_work()
            pending.wait()
        else:
            overlapped_work()
            ctx.exchange.run(self.exchange(), a.view(-1), rows.view(-1))
        return rows


class _GatherAlgorithm(Algorithm[Call, RoutedKey]):
    """Base class of the algorithms."""

    gather_methods: tuple[str, ...]
    """All-gathers that the algorithm can use, the default first."""


class Arrivals(_GatherAlgorithm):
    """Copy engines send shards during the GEMM; a tile waits for the shards of its rows.

    Tiles are sorted by group of shards (in the order of arrival), then by expert.
    """

    name = "arrivals"
    tunables = ("gemm_config", "num_groups", "gather")
    gather_methods = (PUSH, RING)

    def candidates(self) -> Iterator[tuple[Any, ...]]:
        tiles = grouped_tiles()
        max_block_m = max(each.kwargs["BLOCK_SIZE_M"] for each in tiles)
        tallest = [each for each in tiles if each.kwargs["BLOCK_SIZE_M"] == max_block_m]
        for num_groups in _VALID_NUM_GROUPS:
            for each in tiles if num_groups == 1 else tallest:
                yield each, num_groups, PUSH
        if not has_links_between_all_gpus():
            for num_groups in (1, 2):
                yield tiles[0], num_groups, RING

    def fits(self, config: Mapping[str, Any], sizes: RoutedKey) -> bool:
        num_groups, gather = config["num_groups"], config["gather"]
        if num_groups > sizes.num_ranks or (sizes.num_ranks == 1 and gather != PUSH):
            return False
        if gather == RING and sizes.num_ranks == 2:  # a ring of two ranks is a full mesh
            return False
        rows = max_rows_of_key(sizes.M) * sizes.topk / sizes.E
        has_full_tiles = num_groups == 1 or rows >= num_groups * _MIN_ROWS_PER_GROUP
        return (has_full_tiles or current_device().interprets) and fits_tiles(config, sizes)

    def check(self, call: Call) -> None:
        if call.num_groups not in _VALID_NUM_GROUPS:
            expected = f"1 to {MAX_GROUPS}"
            raise InvalidArgument("ag_group_gemm", "num_groups", call.num_groups, expected)

    def compile(self, call: Call) -> None:
        gathered = call.ctx.buffer.gathered_shards(call.a.shape[0], 1)
        _, blocks, product = self._launches(call, gathered)
        for launch in (*blocks.launches, product):
            launch.compile()

    def run(self, call: Call) -> torch.Tensor:
        buffer, has_awaited_peers = call.ctx.buffer, False
        gathered = buffer.start(
            call.shard,
            AllGatherMethod(call.gather),
            num_streams=1,
            num_chunks=1,
            call_tag=call_tag(call.key, len(call.a)),
        )
        call.ctx.sleep(call.straggler_option)
        try:
            C, blocks, product = self._launches(call, gathered)
            blocks.queue()
            product.run()
            has_awaited_peers = True  # every shard has rows in some tile, which waits for the shard
        finally:  # even if a launch failed, because peers wait for the release of the slot
            buffer.finish(has_awaited_peers)
        return C

    @staticmethod
    def _launches(call: Call, gathered: GatheredShards) -> tuple[torch.Tensor, BlockMap, Launch]:
        ctx, C = call.ctx, call.empty_product()
        blocks = call.block_map(
            call.tiles.kwargs["BLOCK_SIZE_M"], rank=ctx.rank, num_sources=ctx.num_ranks,
            group_ends=group_ends(call.num_groups, ctx.num_ranks),
        )  # fmt: skip
        a, scales = call.unpack(call.shard)
        if ctx.num_ranks > 1:
            rows, scales = call.unpack(gathered.rows, call.shard)
            gathered = dataclasses.replace(gathered, rows=rows)
        product = grouped_product(
            a, call.b, C, blocks, call.tiles,
            gathered=gathered if ctx.num_ranks > 1 else None, rank=ctx.rank, scales=scales,
        )  # fmt: skip
        return C, blocks, with_exported_kernel(product)


class _GatherThenMultiply(_GatherAlgorithm):
    """Gather all shards, then multiply. Only the computation of the map overlaps."""

    gather_methods = (EXCHANGE, COLLECTIVE)

    def check(self, call: Call) -> None:
        num_ranks, max_M = call.ctx.num_ranks, call.ctx.max_exchange_M
        if call.gather == EXCHANGE and num_ranks > 1 and max_M < call.key.M:
            expected = f"'{COLLECTIVE}' for M > {max_M} (ctx.max_exchange_M)"
            raise InvalidArgument("ag_group_gemm", "gather", call.gather, expected)

    def run(self, call: Call) -> torch.Tensor:
        return call.ctx.buffer.slots.run_without_slots(lambda: self.multiply(call))

    @abstractmethod
    def multiply(self, call: Call) -> torch.Tensor:
        """Gather all rows and return the grouped product."""

    def compile_gather(self, call: Call) -> None:
        """Compile the kernel that ``Call.gather_all_rows`` launches."""
        if call.ctx.num_ranks > 1 and call.gather == EXCHANGE:
            out = call.shard.new_empty(call.shard.numel() * call.ctx.num_ranks)
            call.ctx.exchange.launch(call.exchange(), call.shard.view(-1), out).compile()


class Serial(_GatherThenMultiply):
    """Gather all rows, then run our grouped GEMM.

    For few tokens, where the transfer takes less time than the overhead of overlapping, and for few
    rows per expert.
    """

    name = "serial"
    tunables = ("gemm_config", "gather")

    def candidates(self) -> Iterator[tuple[Any, ...]]:
        for gather in candidate_gathers():
            for tiles in grouped_tiles():
                yield tiles, gather

    def fits(self, config: Mapping[str, Any], sizes: RoutedKey) -> bool:
        if sizes.num_ranks == 1:  # nothing to gather
            return False
        # Try NCCL only if our exchange cannot be used, because NCCL is slower.
        fits = fits_exchange(sizes) == (config["gather"] == EXCHANGE)
        return fits and fits_tiles(config, sizes)

    def compile(self, call: Call) -> None:
        self.compile_gather(call)
        rows = call.shard.new_empty(call.key.M, call.shard.shape[1])
        _, blocks, product = self._launches(call, rows, self._blocks(call))
        for launch in (*blocks.launches, product):
            launch.compile()

    def multiply(self, call: Call) -> torch.Tensor:
        blocks = self._blocks(call)
        C, _, product = self._launches(call, call.gather_all_rows(blocks.queue), blocks)
        product.run()
        return C

    @staticmethod
    def _blocks(call: Call) -> BlockMap:
        return call.block_map(call.tiles.kwargs["BLOCK_SIZE_M"])

    @staticmethod
    def _launches(
        call: Call, rows: torch.Tensor, blocks: BlockMap
    ) -> tuple[torch.Tensor, BlockMap, Launch]:
        C, (a, scales) = call.empty_product(), call.unpack(rows)
        product = grouped_product(a, call.b, C, blocks, call.tiles, scales=scales)
        return C, blocks, with_exported_kernel(product)


class Library(_GatherThenMultiply):
    """torch's grouped GEMM, between two copies that sort the rows and restore their order."""

    name = "library"
    tunables = ("gather",)
    is_fallback = True

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        return [(gather,) for gather in candidate_gathers()] if has_library_kernel() else []

    def fits(self, config: Mapping[str, Any], sizes: RoutedKey) -> bool:
        if not is_library_candidate(sizes):
            return False
        if sizes.num_ranks == 1:
            return bool(config["gather"] == EXCHANGE)
        return config["gather"] == COLLECTIVE or fits_exchange(sizes)

    def check(self, call: Call) -> None:
        super().check(call)
        check_grouped_library("ag_group_gemm", self.name, call.key)

    def compile(self, call: Call) -> None:
        self.compile_gather(call)
        blocks, C = call.block_map(ROWS_OF_SINGLE_TILE), call.empty_product()
        rows, _ = call.unpack(call.shard.new_empty(call.key.M, call.shard.shape[1]))
        sorted_rows = call.a.new_empty(len(C), call.key.K)
        copies = gather_rows(rows, sorted_rows, blocks), restore_row_order(C, C, blocks)
        for launch in (*blocks.launches, *copies):
            launch.compile()

    def multiply(self, call: Call) -> torch.Tensor:
        blocks = call.block_map(ROWS_OF_SINGLE_TILE)
        rows, scales = call.unpack(call.gather_all_rows(blocks.queue))
        product = sorted_product(rows, call.b.detach(), blocks, scales, call.key)
        C = call.empty_product()
        restore_row_order(product, C, blocks).run()
        return C


def with_exported_kernel(launch: Launch) -> Launch:
    """Return ``launch`` with the kernel that the package exports, which scripts may replace.

    If the replacement is wrapped in ``triton.autotune``, drop the options that its configs set.
    """
    kernel = sys.modules[__package__].kernel_consumer_m_parallel_scatter_group_gemm
    if kernel is kernel_grouped_gemm:
        return launch
    chosen = set().union(*(each.all_kwargs() for each in kernel.configs))
    options = {name: value for name, value in launch.options.items() if name not in chosen}
    return dataclasses.replace(launch, kernel=kernel, options=options)


def group_ends(num_groups: int, num_ranks: int) -> tuple[int, ...]:
    """Return the end of each group of shards, in the order of arrival; the local shard is first.

    If ``num_groups`` is at least ``num_ranks``, each shard is a group. Otherwise the first of 2
    groups has one third of the shards. With 3 groups, the local shard is also a group of its own.
    With 4 groups, the last two thirds are halved, too. The first group is small, so that the GEMM
    starts early.
    """
    if num_groups >= num_ranks:
        return tuple(range(1, num_ranks + 1))
    third = -(-num_ranks // 3)
    return (*((), (third,), (1, third), (1, third, 2 * third))[num_groups - 1], num_ranks)


def candidate_gathers() -> list[str]:
    """Return the all-gathers to try before the GEMM on this device."""
    return [EXCHANGE, COLLECTIVE] if current_device().has_nccl else [EXCHANGE]


def fits_exchange(sizes: RoutedKey) -> bool:
    """Return whether one launch can gather the rows of every call of the key."""
    rows = max_rows_of_key(sizes.M // sizes.num_ranks, sizes.num_ranks) * sizes.num_ranks
    width, dtype = packed_format(sizes.K, sizes.dtype)
    return rows * width * dtype.itemsize <= MAX_GATHERED_BYTES


def fits_tiles(config: Mapping[str, Any], sizes: RoutedKey) -> bool:
    return fits_grouped(config, sizes.dtype, sizes.E, sizes.N, sizes.M, sizes.topk, sizes)


ALGORITHMS = Algorithms("ag_group_gemm", (Arrivals(), Serial(), Library()))
