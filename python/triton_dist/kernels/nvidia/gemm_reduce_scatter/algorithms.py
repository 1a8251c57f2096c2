"""Algorithms of GEMM-ReduceScatter: their candidates, checks and launches."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import triton

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common import libraries
from triton_dist.kernels.common.context import raise_first_error
from triton_dist.kernels.common.exchange.buffer import (
    Exchange,
    LaunchParams,
    checked_params,
    is_worth_trying,
    reduce_scatter_exchange,
)
from triton_dist.kernels.common.gemm import spaces
from triton_dist.kernels.common.gemm.scales import (
    FP8,
    async_tp_check,
    async_tp_supports,
    library_check,
    library_matmul,
    library_supports,
)
from triton_dist.kernels.common.gemm.spaces import TransferCost, predict_op_ms
from triton_dist.kernels.common.libraries import LibraryAlgorithm
from triton_dist.kernels.common.op import Algorithms
from triton_dist.kernels.common.scatter.algorithms import (
    OneLaunchAlgorithm,
    OverlappedAlgorithm,
    SummingCall,
    SummingSizes,
    UnfusedAlgorithm,
)
from triton_dist.kernels.common.scatter.partials import ScatterMode
from triton_dist.kernels.common.scatter.to_owners import ReduceScatterLaunches, add_row_block
from triton_dist.kernels.nvidia.gemm_reduce_scatter.context import (
    MAX_EXCHANGED_BYTES,
    GEMMReduceScatterTensorParallelContext,
)
from triton_dist.runtime.device import current_device
from triton_dist.runtime.garbage import no_garbage_collection
from triton_dist.runtime.launch import Launch

# ``"copy_engine"`` tries the first ``_NUM_PUSHED_SHAPES`` tile shapes: the largest shapes with
# ``_CHUNK_COUNTS`` chunks, the others with ``_FEW_CHUNK_COUNTS``.
_NUM_PUSHED_SHAPES, _NUM_LARGEST_SHAPES = 7, 3
_CHUNK_COUNTS, _FEW_CHUNK_COUNTS = (1, 2, 4, 8), (1, 2)
# Config of the kernel that sums in ``"row_blocks"``, and minimum elements of a product per SM.
(_SUM_TILES,) = spaces.tile_configs((64, 256, 64, 8, 1, 1))
_MIN_ELEMENTS_PER_SM = 128 * 128
# An fp8 product by cuBLAS must have a multiple of this number of rows: it refused 19 rows.
_FP8_ROW_MULTIPLE = 16
# Launch parameters of the reduce-scatter after the GEMM: CTAs, block bytes, chunks. Likely winners
# come first.
_SERIAL_PARAMS = (
    *(LaunchParams(ctas, 16384) for ctas in (128, 64)),
    LaunchParams(64, 16384, 4),
    *(LaunchParams(ctas, 8192) for ctas in (128, 64, 32)),
)


@dataclass(eq=False, repr=False)  # not frozen, because that would take 1 us more per call
class Call(SummingCall):
    """One call: the arguments of ``gemm_rs``."""

    ctx_type = GEMMReduceScatterTensorParallelContext
    reduce_st: bool | None
    fuse_scatter: bool | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method is not None or self.fuse_scatter is not None:
            self.algorithm = self.requested_algorithm(self.method, self.fuse_scatter)
        self.chosen_algorithm = ALGORITHMS[self.algorithm or Fused.name]
        self.adds_on_arrival = self.adds_tiles_on_arrival(self.ctx, self.reduce_st)
        self.chosen_algorithm.check(self)

    @staticmethod
    def requested_algorithm(
        method: enum.Enum | None = None, fuse_scatter: bool | None = None, **_: Any
    ) -> str | None:
        if method is None and fuse_scatter is not None:
            return Fused.name if fuse_scatter else CopyEngine.name
        return ALGORITHMS.requested_algorithm(method)

    @staticmethod
    def adds_tiles_on_arrival(ctx: Any, reduce_st: bool | None = None, **_: Any) -> bool:
        if reduce_st and not ctx.reduce_st:
            expected = "a context that was created with reduce_st=True"
            raise InvalidArgument("gemm_rs", "reduce_st", reduce_st, expected)
        return bool(ctx.reduce_st if reduce_st is None else reduce_st)

    key_option = adds_tiles_on_arrival

    def check_not_added_on_arrival(self) -> None:
        """Raise if the call sets ``reduce_st``, because only ``"fused"`` adds tiles on arrival."""
        if self.adds_on_arrival:
            expected = f"{Fused.name!r} with reduce_st=True"
            raise InvalidArgument("gemm_rs", "algorithm", self.chosen_algorithm.name, expected)


class _OverlappedReduceScatter(OverlappedAlgorithm[Call]):
    """Base class of algorithms that send each tile to the owner of its rows during the GEMM."""

    mode: ScatterMode
    scattered_launches_class: ClassVar[type[ReduceScatterLaunches]] = ReduceScatterLaunches

    def fits_sizes(self, config: Mapping[str, Any], sizes: SummingSizes) -> bool:
        return sizes.kernel_fits(config)

    def scatter_launches(self, call: Call) -> ReduceScatterLaunches:
        shape = call.ctx.rows_of_rank(call.A.shape[0]), call.ctx.N
        C = call.A.new_empty(shape, dtype=call.ctx.output_dtype)
        tile_memory = call.ctx.buffer.tile_memory("add" if call.adds_on_arrival else self.mode)
        return self.scattered_launches_class(call, C, tile_memory)


class Fused(_OverlappedReduceScatter):
    """The program that computes a tile stores it in the owner's memory, or adds it there."""

    name, tunables = "fused", ("gemm_config", "persistent")
    mode, supports_all_calls = "tile", True

    def candidates(self) -> Iterator[tuple[Any, ...]]:
        return spaces.tiles_with_persistent(spaces.get_config_space)


class OneLaunch(OneLaunchAlgorithm[Call]):
    """Multiply, send and add in one launch, for few rows.

    With few rows, most programs of ``"fused"`` would be idle while the last programs add. Here all
    programs add after they have multiplied their tiles. A tile may have rows of several ranks, so B
    is read less often. No other launch precedes or follows the kernel.
    """

    name, to_owners = "one_launch", True

    def candidates(self) -> Iterator[tuple[Any, ...]]:
        return spaces.tiles_with_persistent(spaces.tiles_to_owners)

    def fits_sizes(self, config: Mapping[str, Any], sizes: SummingSizes) -> bool:
        fits = spaces.fits_split(config["gemm_config"], sizes.M, sizes.B.shape[1])
        return fits and sizes.nbytes <= MAX_EXCHANGED_BYTES and sizes.tiles_fit(config, sizes.M)

    def check(self, call: Call) -> None:
        super().check(call)
        call.check_not_added_on_arrival()
        call.check_rows(call.ctx.max_exchange_M)
        if call.ctx.num_ranks == 1:  # nothing to exchange
            call.chosen_algorithm = ALGORITHMS[Fused.name]


class _CopyEngineLaunches(ReduceScatterLaunches):
    """Launches of a call whose tiles copy engines push, on another stream."""

    def run(self) -> None:
        call, ctx = self.call, self.call.ctx
        if ctx.num_ranks == 1:
            return super().run()
        rows, stream = ctx.rows_of_rank(call.A.shape[0]), ctx.device.current_stream()
        push_transfer = ctx.buffer.push_transfer(rows, call.gemm_config, call.num_chunks)
        try:
            # The running GEMM waits for pushes that the peers queue after they have launched their
            # GEMM. Freeing GPU memory waits for the GEMM. If all ranks freed memory here, before
            # they queue the pushes, they would deadlock.
            with no_garbage_collection():
                push_transfer.fork(stream)
                self.multiply()
                push_transfer.queue()  # before launches that may block the host until the GEMM ends
            self.add_deferred_tiles()
        finally:  # even if a wait in the kernel gave up, because the pushes still complete
            push_transfer.join(stream)


class CopyEngine(_OverlappedReduceScatter):
    """Tiles are stored locally. A copy engine pushes each complete chunk of a peer's rows."""

    name, tunables = "copy_engine", ("gemm_config", "persistent", "num_chunks")
    mode, scattered_launches_class, uses_copy_engines = "row_block", _CopyEngineLaunches, True

    def candidates(self) -> Iterator[tuple[Any, ...]]:
        persistent = current_device().prefers_descriptors
        num_shapes = 1 if current_device().interprets else _NUM_PUSHED_SHAPES
        shapes = spaces.tile_shapes(spaces.get_config_space(persistent))
        for number, tiles in enumerate(shapes[:num_shapes]):
            for num_chunks in _CHUNK_COUNTS if number < _NUM_LARGEST_SHAPES else _FEW_CHUNK_COUNTS:
                yield tiles, persistent, num_chunks

    def fits_sizes(self, config: Mapping[str, Any], sizes: SummingSizes) -> bool:
        if current_device().launches_block:
            return False
        return sizes.has_chunks(config, sizes.M // sizes.num_ranks) and super().fits_sizes(
            config, sizes
        )

    def check(self, call: Call) -> None:
        super().check(call)
        call.check_not_added_on_arrival()
        if current_device().launches_block:
            # The GEMM waits for pushes that are queued after its launch. With this setting, the
            # launch would block the host, so the pushes would never be queued.
            expected = "another algorithm while CUDA_LAUNCH_BLOCKING is set: it would deadlock"
            raise InvalidArgument("gemm_rs", "algorithm", self.name, expected)

    def flags_per_row_block(self, call: Call) -> int:
        return call.num_chunks


class _RowBlockLaunches(ReduceScatterLaunches):
    """A GEMM and a push for each chunk of a row block, then a launch that adds.

    All pushes are queued before the first kernel that waits for a peer, so there is no deadlock.
    """

    def run(self) -> None:
        call, ctx, last_transfer = self.call, self.call.ctx, None
        A, B, stream = call.A.detach(), call.B.detach(), ctx.device.current_stream()
        try:
            for first, C, transfer in ctx.buffer.row_block_products(
                len(self.C), _sum_tiles(), call.num_chunks
            ):
                rows, A_scale = slice(first, first + len(C)), call.A_scale
                if A_scale is not None and A_scale.numel() > 1:
                    # Copy BLOCK scales, because their stride along K must be the number of rows.
                    A_scale = A_scale[rows].t().contiguous().t()
                library_matmul(A[rows], B, call.scaling._replace(A_scale=A_scale), C)
                if transfer is not None:
                    last_transfer = transfer
                    transfer.fork(stream)
                    transfer.queue()
            self._launch(("sum", *self.key), self._sum_launch, self._outputs())
        finally:
            if last_transfer is not None:  # all pushes are on one stream
                last_transfer.join(stream)

    def compile(self) -> None:
        self._sum_launch().compile()

    def _sum_launch(self) -> Launch:
        call, config = self.call, _sum_tiles()
        return add_row_block(
            self.C, call.bias, config, self.tile_memory, len(call.A), call.num_chunks
        )


class RowBlocks(_OverlappedReduceScatter):
    """Multiply one row block after another by ``scaled_mm`` or ``torch.matmul``.

    A copy engine pushes each product during the next product. This is for fp8, because the fastest
    fp8 kernels cannot send tiles. With other dtypes it is tried on more than two ranks, where our
    GEMM kernel slows down while the copy engine reads its results.
    """

    name, tunables = "row_blocks", ("num_chunks",)
    mode, scattered_launches_class, uses_copy_engines = "row_block", _RowBlockLaunches, True

    def candidates(self) -> Iterator[tuple[Any, ...]]:
        return ((num_chunks,) for num_chunks in _FEW_CHUNK_COUNTS)

    def fits_sizes(self, config: Mapping[str, Any], sizes: SummingSizes) -> bool:
        A, B, rows = sizes.A, sizes.B, sizes.M // sizes.num_ranks
        # The product of a row block must occupy all SMs.
        occupies_sms = rows * B.shape[1] >= _MIN_ELEMENTS_PER_SM * current_device().num_sms
        return (
            (A.dtype in FP8 or sizes.num_ranks > 2)
            and occupies_sms
            and library_supports(A, B, sizes.scaling)
            and sizes.has_chunks({**config, "gemm_config": _sum_tiles()}, rows)
        )

    def check(self, call: Call) -> None:
        call.check_not_added_on_arrival()
        raise_first_error("gemm_rs", [library_check(self.name, call.A, call.B, call.scaling)])
        rows = call.ctx.rows_of_rank(call.A.shape[0])
        if call.A.dtype in FP8 and call.A.device.type != "cpu" and rows % _FP8_ROW_MULTIPLE:
            # Other calls of the tuning key may have a valid number of rows, so do not raise.
            call.chosen_algorithm = ALGORITHMS[Collective.name]

    def flags_per_row_block(self, call: Call) -> int:
        return call.num_chunks


def _sum_tiles() -> triton.Config:
    return spaces.INTERPRETED_TILES[1] if current_device().interprets else _SUM_TILES


class Serial(UnfusedAlgorithm[Call]):
    """Call ``torch.matmul``, then our reduce-scatter in one launch."""

    name, tunables = "serial", ("num_chunks", "num_ctas", "block_bytes")
    is_fallback = True

    def candidates(self) -> Iterator[tuple[Any, ...]]:
        # The interpreter is slow: try one candidate there.
        candidates = _SERIAL_PARAMS[-1:] if current_device().interprets else _SERIAL_PARAMS
        for params in candidates:
            yield params.num_chunks, params.num_ctas, params.block_bytes

    def fits_sizes(self, config: Mapping[str, Any], sizes: SummingSizes) -> bool:
        params = checked_params(
            "gemm_rs", config["num_ctas"], config["block_bytes"], config["num_chunks"]
        )
        shard_bytes = sizes.nbytes // sizes.num_ranks
        return sizes.nbytes <= MAX_EXCHANGED_BYTES and is_worth_trying(params, shard_bytes)

    def check(self, call: Call) -> None:
        super().check(call)
        call.check_not_added_on_arrival()
        call.check_rows(call.ctx.max_exchange_M)
        checked_params("gemm_rs", call.num_ctas, call.block_bytes, call.num_chunks)

    def compile(self, call: Call) -> None:
        shape = call.A.shape[0], call.B.shape[1]
        product = call.A.new_empty(shape, dtype=call.ctx.output_dtype)
        exchange, rows = self._exchange(call, product)
        call.ctx.exchange.launch(exchange, product, rows).compile()

    def sum(self, call: Call, product: torch.Tensor) -> torch.Tensor:
        exchange, rows = self._exchange(call, product)
        call.ctx.exchange.run(exchange, product, rows)
        return rows

    def _exchange(self, call: Call, product: torch.Tensor) -> tuple[Exchange, torch.Tensor]:
        params = checked_params("gemm_rs", call.num_ctas, call.block_bytes, call.num_chunks)
        return reduce_scatter_exchange(product, call.ctx.num_ranks, params)


class Collective(UnfusedAlgorithm[Call]):
    """Call ``torch.matmul``, then reduce-scatter by ``torch.distributed`` (NCCL or gloo)."""

    name, method = LibraryAlgorithm.COLLECTIVE.value, LibraryAlgorithm.COLLECTIVE
    is_fallback = True

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        return libraries.library_configs(self.method, libraries.MATMUL_REDUCE_SCATTER)

    def fits_sizes(self, config: Mapping[str, Any], sizes: SummingSizes) -> bool:
        return True

    def sum(self, call: Call, product: torch.Tensor) -> torch.Tensor:
        return libraries.reduce_scatter(product, call.ctx.group)


class AsyncTP(Collective):
    """PyTorch's async tensor parallelism: GPUs only, in builds of torch that include it."""

    name, method = LibraryAlgorithm.ASYNC_TP.value, LibraryAlgorithm.ASYNC_TP

    def fits_sizes(self, config: Mapping[str, Any], sizes: SummingSizes) -> bool:
        return async_tp_supports(sizes.A, sizes.B, sizes.scaling)

    def check(self, call: Call) -> None:
        super().check(call)
        raise_first_error("gemm_rs", [async_tp_check(self.name, call.A, call.B, call.scaling)])
        libraries.check_async_tp("gemm_rs", libraries.MATMUL_REDUCE_SCATTER, call.ctx.num_ranks)

    def multiply(self, call: Call, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        scales = call.scaling.row_wise_scales(A, B)
        return libraries.async_tp_matmul_scatter(A, B, call.ctx.group, scales)


ALGORITHMS = Algorithms(
    "gemm_rs", (Fused(), OneLaunch(), CopyEngine(), RowBlocks(), Serial(), Collective(), AsyncTP())
)

# Overhead in us, slowdown of the GEMM, and chunks from which the transfer overlaps; fitted.
_TRANSFER_COSTS = {
    Fused.name: TransferCost(53, 1.05, 1),
    OneLaunch.name: TransferCost(9, 1.02, 1),
    CopyEngine.name: TransferCost(32, 1.03, 2),
    RowBlocks.name: TransferCost(35, 0.99, 1),
    Serial.name: TransferCost(14, 1.0),
    Collective.name: TransferCost(46, 0.93),
    AsyncTP.name: TransferCost(14, 1.02),
}


def predict_ms(config: Mapping[str, Any], sizes: SummingSizes) -> float:
    """Return the predicted milliseconds of a call."""
    (M, K), N, ranks = sizes.A.shape, sizes.B.shape[1], sizes.num_ranks
    received_bytes = M * N * sizes.item_bytes * (ranks - 1) / ranks
    cost = _TRANSFER_COSTS[config["algorithm"]]
    return predict_op_ms(
        config, cost, M, N, K, sizes.A.dtype, received_bytes, copies_per_block=ranks - 1
    )
