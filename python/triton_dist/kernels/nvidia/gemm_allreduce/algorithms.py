"""Algorithms of GEMM-AllReduce: their candidates, checks and launches."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import triton

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.exchange.buffer import (
    LaunchParams,
    checked_params,
    is_worth_trying,
)
from triton_dist.kernels.common.exchange.sums import (
    MAX_ONE_SHOT_BYTES,
    MAX_PACKET_BYTES,
    ONE_SHOT,
    TWO_SHOT,
    TWO_SHOT_IN_PACKETS,
    TWO_SHOT_PACKET_CANDIDATES,
    max_one_shot_bytes,
    max_two_shot_packet_bytes,
)
from triton_dist.kernels.common.gemm import spaces
from triton_dist.kernels.common.gemm.scales import library_matmul
from triton_dist.kernels.common.gemm.spaces import TransferCost, predict_op_ms
from triton_dist.kernels.common.op import Algorithm, Algorithms
from triton_dist.kernels.common.scatter.algorithms import (
    OneLaunchAlgorithm,
    OverlappedAlgorithm,
    SummingCall,
    SummingSizes,
    UnfusedAlgorithm,
)
from triton_dist.kernels.common.scatter.packets import PacketLaunch, packet_bytes_of_row
from triton_dist.kernels.common.scatter.partials import row_block_rows
from triton_dist.kernels.common.scatter.to_all import TwoShotLaunches
from triton_dist.kernels.nvidia.gemm_allreduce.context import (
    MAX_SUMMED_BYTES,
    GEMMAllReduceTensorParallelContext,
)
from triton_dist.runtime.device import current_device
from triton_dist.runtime.symmetric.cuda import group_name, has_operator

# Bytes of a product from which ``"two_shot"`` is the default. Tuning finds the faster algorithm.
_MIN_OVERLAPPED_BYTES = 1 << 20
# torch's all-reduce in symmetric memory requires that a row's bytes are a multiple of this number.
_ROW_ALIGNMENT_BYTES = 16
# Numbers of chunks to try with the first tile shapes, and the number of these shapes.
_CHUNK_COUNTS, _NUM_CHUNKED_SHAPES = (2, 4), 7
# Launch parameters to try for ``"serial"``, the largest first, which are likely the fastest.
_LARGE_PARAMS = (LaunchParams(128, 16384), LaunchParams(128, 8192))
_SERIAL_CANDIDATES: dict[str, Sequence[LaunchParams]] = {
    ONE_SHOT: (
        *_LARGE_PARAMS,
        *(LaunchParams(*each) for each in ((64, 8192), (64, 2048), (16, 2048))),
    ),
    TWO_SHOT: (
        *_LARGE_PARAMS,
        *(LaunchParams(*each) for each in ((64, 8192), (128, 4096), (32, 8192), (8, 2048))),
    ),
    TWO_SHOT_IN_PACKETS: TWO_SHOT_PACKET_CANDIDATES,
}


@dataclass(eq=False, repr=False)  # not frozen, because that would take 1 us more per call
class Call(SummingCall):
    """One call: the arguments of ``gemm_ar``."""

    ctx_type = GEMMAllReduceTensorParallelContext
    copy_to_local: bool
    reduction: str | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method is not None:
            self.algorithm = self.requested_algorithm(self.method)
        self.chosen_algorithm = ALGORITHMS[self.algorithm or BySize.name]
        if self.ctx.num_ranks == 1:  # nothing to sum
            self.chosen_algorithm = ALGORITHMS[Collective.name]
        self.chosen_algorithm.check(self)

    @staticmethod
    def requested_algorithm(method: enum.Enum | None = None, **_: Any) -> str | None:
        return ALGORITHMS.requested_algorithm(method)

    @staticmethod
    def key_option(ctx: Any, copy_to_local: bool = True, **_: Any) -> bool:
        return bool(copy_to_local)


class BySize(Algorithm[Call, SummingSizes]):
    """Default without tuning: one-shot or two-shot by size. The tuner does not try it."""

    name, tunables = "by_size", ("gemm_config", "persistent")

    def candidates(self) -> Iterator[tuple[Any, ...]]:
        descriptors = current_device().prefers_descriptors
        yield spaces.get_config_space(descriptors)[0], descriptors

    def fits(self, config: Mapping[str, Any], sizes: SummingSizes) -> bool:
        return False

    def check(self, call: Call) -> None:
        M, ctx = call.A.shape[0], call.ctx
        # Round up, so that ranks whose M differs usually launch the same kernel. The kernel detects
        # the difference.
        max_M = triton.next_power_of_2(M)
        is_small = (
            ctx.max_one_shot_M >= M
            and max_M * ctx.N * ctx.output_dtype.itemsize < _MIN_OVERLAPPED_BYTES
        )
        call.chosen_algorithm = ALGORITHMS[OneShot.name if is_small else TwoShot.name]
        call.chosen_algorithm.check(call)

    def run(self, call: Call) -> torch.Tensor:
        raise NotImplementedError  # ``check`` replaces ``call.chosen_algorithm``


class OneShot(OneLaunchAlgorithm[Call]):
    """Send each tile to all ranks, and add the tiles of all ranks, in one launch.

    For few rows: products of up to 4 MB.
    """

    name = "one_shot"

    def candidates(self) -> Iterator[tuple[Any, ...]]:
        return spaces.tiles_with_persistent(spaces.tiles_to_all)

    def fits_sizes(self, config: Mapping[str, Any], sizes: SummingSizes) -> bool:
        return sizes.nbytes <= MAX_ONE_SHOT_BYTES and sizes.tiles_fit(config, sizes.M)

    def check(self, call: Call) -> None:
        call.check_rows(call.ctx.max_one_shot_M)
        super().check(call)


class OneShotInPackets(OneShot):
    """One-shot in packets: 8-byte words, half data and half flag. For very few rows."""

    name, exchange_launch_class = "one_shot_in_packets", PacketLaunch

    def candidates(self) -> Iterator[tuple[Any, ...]]:
        min_rows = spaces.MIN_TILE_ROWS
        return (each for each in super().candidates() if each[0].kwargs["BLOCK_SIZE_M"] == min_rows)

    def fits_sizes(self, config: Mapping[str, Any], sizes: SummingSizes) -> bool:
        packet_bytes = sizes.M * packet_bytes_of_row(sizes.B.shape[1], sizes.item_bytes)
        return packet_bytes <= MAX_PACKET_BYTES and super().fits_sizes(config, sizes)

    def check(self, call: Call) -> None:
        super().check(call)
        call.check_rows(call.ctx.max_packet_M)


class TwoShotInOneLaunch(OneShot):
    """Send each tile to the owner of its rows, which adds it, then send the sums to all ranks.

    This takes one launch. Sums are sent after all tiles are multiplied.
    """

    name = "two_shot_in_one_launch"
    to_owners = broadcasts_sums = True

    def candidates(self) -> Iterator[tuple[Any, ...]]:
        all_tiles = spaces.get_config_space
        return spaces.tiles_with_persistent(
            lambda persistent: spaces.tile_shapes(all_tiles(persistent))
        )

    def fits_sizes(self, config: Mapping[str, Any], sizes: SummingSizes) -> bool:
        padded_M = -(-sizes.M // sizes.num_ranks) * sizes.num_ranks
        nbytes = padded_M * sizes.B.shape[1] * sizes.item_bytes
        return nbytes <= MAX_SUMMED_BYTES and sizes.tiles_fit(config, sizes.M)

    def check(self, call: Call) -> None:
        call.check_rows(call.ctx.max_exchange_M)
        OneLaunchAlgorithm.check(self, call)  # OneShot.check requires fewer rows


class TwoShot(OverlappedAlgorithm[Call]):
    """Two-shot that overlaps with the GEMM: sums are sent while later tiles are multiplied."""

    name, tunables = "two_shot", ("gemm_config", "persistent", "num_chunks")

    def candidates(self) -> Iterator[tuple[Any, ...]]:
        for each in spaces.tiles_with_persistent(spaces.get_config_space):
            yield *each, 1
        descriptors, interpreted = spaces.persistent_values()[0], current_device().interprets
        shapes = spaces.tile_shapes(spaces.get_config_space(descriptors))
        for tiles in shapes[: 1 if interpreted else _NUM_CHUNKED_SHAPES]:
            for num_chunks in _CHUNK_COUNTS:
                yield tiles, descriptors, num_chunks

    def fits_sizes(self, config: Mapping[str, Any], sizes: SummingSizes) -> bool:
        rows = row_block_rows(sizes.M, sizes.num_ranks)
        return sizes.has_chunks(config, rows) and sizes.tiles_fit(config, rows)

    def scatter_launches(self, call: Call) -> TwoShotLaunches:
        A, buffer = call.A, call.ctx.buffer
        sums, arrivals = buffer.sums(A.shape[0]), buffer.slots["sum_arrivals"].local
        C = torch.empty_like(sums) if call.copy_to_local else sums
        return TwoShotLaunches(call, C, buffer.tile_memory(), sums, arrivals)


class Serial(UnfusedAlgorithm[Call]):
    """Call ``torch.matmul``, then our all-reduce."""

    name, tunables = "serial", ("reduction", "num_chunks", "num_ctas", "block_bytes")
    is_fallback = True

    def candidates(self) -> Iterator[tuple[Any, ...]]:
        interpreted = current_device().interprets
        for reduction, candidates in _SERIAL_CANDIDATES.items():
            for params in candidates[-1:] if interpreted else candidates:
                yield reduction, params.num_chunks, params.num_ctas, params.block_bytes

    def fits_sizes(self, config: Mapping[str, Any], sizes: SummingSizes) -> bool:
        nbytes, num_ranks, reduction = sizes.nbytes, sizes.num_ranks, config["reduction"]
        if reduction == ONE_SHOT and nbytes > max_one_shot_bytes(num_ranks):
            return False
        if reduction == TWO_SHOT_IN_PACKETS and (
            num_ranks == 2 or nbytes > max_two_shot_packet_bytes(num_ranks)
        ):
            return False
        if reduction != ONE_SHOT:
            nbytes = -(-nbytes // num_ranks)
        params = checked_params(
            "gemm_ar", config["num_ctas"], config["block_bytes"], config["num_chunks"]
        )
        return is_worth_trying(params, nbytes)

    def check(self, call: Call) -> None:
        super().check(call)
        if call.reduction not in (None, *_SERIAL_CANDIDATES):
            expected = f"None or one of {', '.join(map(repr, _SERIAL_CANDIDATES))}"
            raise InvalidArgument("gemm_ar", "reduction", call.reduction, expected)
        checked_params("gemm_ar", call.num_ctas, call.block_bytes, call.num_chunks)

    def compile(self, call: Call) -> None:
        shape = call.A.shape[0], call.ctx.N
        product = call.A.new_empty(shape, dtype=call.ctx.output_dtype)
        call.ctx.exchange.compile_sum(product, *self._sum_params(call))

    def sum(self, call: Call, product: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = call.ctx.exchange.sum(product, *self._sum_params(call))
        return total

    @staticmethod
    def _sum_params(call: Call) -> tuple[Any, ...]:
        return call.reduction, call.num_ctas, call.block_bytes, call.num_chunks


class Collective(UnfusedAlgorithm[Call]):
    """Call ``torch.matmul``, then ``torch.distributed.all_reduce`` (NCCL; gloo on CPU ranks).

    With one rank, only ``torch.matmul`` is called.
    """

    name, supports_all_calls, is_fallback = "collective", True, True

    def candidates(self) -> Iterator[tuple[Any, ...]]:
        yield ()

    def fits_sizes(self, config: Mapping[str, Any], sizes: SummingSizes) -> bool:
        # CPU ranks test our kernels, so the library is not a candidate there.
        return (
            sizes.num_ranks == 1
            or sizes.requested_algorithm is not None
            or current_device().has_nccl
        )

    def sum(self, call: Call, product: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(product, group=call.ctx.group)
        return product


def supports_symmetric_all_reduce(dtype: torch.dtype, row_bytes: int, num_ranks: int) -> bool:
    """Return whether ``two_shot_all_reduce`` works on this device for rows of ``row_bytes``."""
    fits_sizes = dtype in (torch.bfloat16, torch.float32) and row_bytes % _ROW_ALIGNMENT_BYTES == 0
    fits_sizes = fits_sizes and num_ranks in (2, 4, 8)  # torch compiles its kernel for these
    return fits_sizes and current_device().has_async_tp and has_operator("two_shot_all_reduce_out")


def two_shot_all_reduce(
    addend: torch.Tensor, group: dist.ProcessGroup | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sum of ``addend`` over all ranks, in ``out`` or in place.

    ``addend`` must be in symmetric memory, at an equal offset on every rank; it is overwritten. The
    operator synchronises all ranks at its begin and at its end.
    """
    name = group_name(group)
    if out is None:
        torch.ops.symm_mem.two_shot_all_reduce_(addend, "sum", name)
        return addend
    torch.ops.symm_mem.two_shot_all_reduce_out(addend, "sum", name, out)
    return out


class SymmetricCollective(UnfusedAlgorithm[Call]):
    """Call ``torch.matmul`` into symmetric memory, then torch's two-shot all-reduce.

    Requires 2, 4 or 8 ranks, one GPU per rank, bf16 or fp32, and rows whose bytes are a multiple of
    16.
    """

    name, is_fallback = "symmetric_collective", True

    def candidates(self) -> Iterator[tuple[Any, ...]]:
        yield ()

    def fits_sizes(self, config: Mapping[str, Any], sizes: SummingSizes) -> bool:
        dtype = sizes.scaling.output_dtype(sizes.A)
        return self._supports(dtype, sizes.B.shape[1], sizes.num_ranks)

    def check(self, call: Call) -> None:
        super().check(call)
        if not self._supports(call.ctx.output_dtype, call.ctx.N, call.ctx.num_ranks):
            expected = "another algorithm: torch's all-reduce in symmetric memory requires bf16 or "
            expected += "fp32, rows of a multiple of 16 bytes, and 2, 4 or 8 ranks on a GPU each"
            raise InvalidArgument("gemm_ar", "algorithm", self.name, expected)

    def multiply(self, call: Call, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        sums = call.ctx.buffer.sums_of_next_slot(A.shape[0])
        return self.sum(call, library_matmul(A, B, call.scaling, sums))

    def sum(self, call: Call, product: torch.Tensor) -> torch.Tensor:
        if call.copy_to_local:
            return two_shot_all_reduce(product, call.ctx.group, torch.empty_like(product))
        call.ctx.buffer.slots.skip()  # the next call must not overwrite the result
        return two_shot_all_reduce(product, call.ctx.group)

    @staticmethod
    def _supports(dtype: torch.dtype, columns: int, num_ranks: int) -> bool:
        return supports_symmetric_all_reduce(dtype, columns * dtype.itemsize, num_ranks)


ALGORITHMS = Algorithms(
    "gemm_ar",
    (
        BySize(),
        OneShot(),
        OneShotInPackets(),
        TwoShot(),
        TwoShotInOneLaunch(),
        Serial(),
        Collective(),
        SymmetricCollective(),
    ),
)

# Overhead in us, slowdown of the GEMM, and chunks from which the transfer overlaps; fitted.
_TRANSFER_COSTS = {
    OneShot.name: TransferCost(8, 0.98),
    OneShotInPackets.name: TransferCost(2, 1.01),
    TwoShot.name: TransferCost(59, 1.15, 1),
    TwoShotInOneLaunch.name: TransferCost(21, 0.91, 1),
    Serial.name: TransferCost(5, 0.99),
    Collective.name: TransferCost(45, 1.06),
    SymmetricCollective.name: TransferCost(34, 1.09),
}


def predict_ms(config: Mapping[str, Any], sizes: SummingSizes) -> float:
    """Return the predicted milliseconds of a call."""
    (M, K), N, ranks = sizes.A.shape, sizes.B.shape[1], sizes.num_ranks
    exchange = config.get("reduction") or config["algorithm"]
    num_products_received = ranks if exchange.startswith(ONE_SHOT) else 2
    words = 2 if exchange.endswith("packets") else 1  # half of each packet is a flag, not data
    received_bytes = M * N * sizes.item_bytes * (ranks - 1) / ranks * num_products_received * words
    cost, copies = _TRANSFER_COSTS[config["algorithm"]], words * (ranks - 1)
    return predict_op_ms(
        config, cost, M, N, K, sizes.A.dtype, received_bytes, copies_per_block=copies
    )
