"""Algorithms of AllGather-GEMM: their candidates, checks and launches."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common import libraries
from triton_dist.kernels.common.context import is_int, raise_first_error
from triton_dist.kernels.common.exchange.buffer import (
    MAX_CTAS,
    Exchange,
    LaunchParams,
    all_gather_exchange,
    small_params,
)
from triton_dist.kernels.common.gemm import spaces
from triton_dist.kernels.common.gemm.launch import (
    fits_fused_push,
    fused_push_candidates,
    is_worth_trying,
    sharded_gemm,
    split_k_tiles,
)
from triton_dist.kernels.common.gemm.scales import (
    FP8,
    NO_SCALING,
    Recipe,
    Scaling,
    async_tp_check,
    async_tp_supports,
    call_tag,
    library_check,
    library_matmul,
    library_supports,
    scaling_of,
)
from triton_dist.kernels.common.gemm.spaces import TransferCost, predict_op_ms
from triton_dist.kernels.common.libraries import LibraryAlgorithm
from triton_dist.kernels.common.op import (
    Algorithms,
    GEMMCall,
    SelectableAlgorithm,
    check_straggler,
    check_tiles,
)
from triton_dist.kernels.common.peers import GatheredShards
from triton_dist.kernels.common.slots.gathered import MAX_CHUNKS, MAX_COMM_SMS, AllGatherMethod
from triton_dist.kernels.nvidia.allgather_gemm.context import (
    MAX_GATHERED_BYTES,
    AllGatherGEMMTensorParallelContext,
    check_operands,
)
from triton_dist.runtime.capabilities import has_links_between_all_gpus
from triton_dist.runtime.device import current_device
from triton_dist.runtime.launch import Launch, dot_precision, fits_descriptor

_DEFAULT_COMM_SMS = 16
_VALID_NUM_CHUNKS, _VALID_NUM_COMM_SMS = range(1, MAX_CHUNKS + 1), range(1, MAX_COMM_SMS + 1)
# Any positive number of streams is valid. For these, a fast membership test replaces the check.
_COMMON_STREAM_COUNTS = range(1, 9)
# Numbers of chunks that are tried with each of the first four warp-specialized tiles. The fourth is
# the largest tile that supports BLOCK scales.
_WARP_SPECIALIZED_CHUNK_COUNTS = ((2, 4), (2, 4), (), (2,))
# Numbers of programs to try for an all-gather before the GEMM.
_SERIAL_COMM_SMS = (128, 64, 32, 16, 8)
# Minimum and maximum bytes that one of these programs moves at a time.
_MIN_BLOCK_BYTES, _MAX_BLOCK_BYTES = 2048, 8192


@dataclass(eq=False, repr=False)  # not frozen, because that would take 1 us more per call
class Call(GEMMCall):
    """One call: the arguments of ``ag_gemm``."""

    A: torch.Tensor
    B: torch.Tensor
    ctx: AllGatherGEMMTensorParallelContext
    persistent: bool | None
    method: AllGatherMethod | LibraryAlgorithm | None
    num_streams: int
    num_chunks: int
    local_copy: bool
    straggler_option: tuple[int, int] | None
    num_comm_sms: int | None
    gathered: torch.Tensor | None
    out_dtype: torch.dtype | None

    def __post_init__(self) -> None:
        scaling = scaling_of(self.A_scale, self.B_scale, None, self.out_dtype, self.use_fast_accum)
        self.scaling = scaling
        if self.validated_key is None:
            self.gemm_key = check_operands(
                self.A, self.B, self.ctx, self.local_copy, self.gathered, scaling
            )
        else:
            self.gemm_key = self.validated_key[0]
        self.call_tag = call_tag(self.gemm_key, len(self.A))
        if self.straggler_option is not None:
            check_straggler("ag_gemm", self.straggler_option)
        self.local_shard = self.A if self.local_copy else self.ctx.own_rows(self.A.shape[0])
        """Shard of this rank, [M_per_rank, K]."""
        if self.num_chunks not in _VALID_NUM_CHUNKS:
            raise InvalidArgument("ag_gemm", "num_chunks", self.num_chunks, f"1 to {MAX_CHUNKS}")
        streams = self.num_streams
        if streams not in _COMMON_STREAM_COUNTS and not (is_int(streams) and streams > 0):
            raise InvalidArgument("ag_gemm", "num_streams", self.num_streams, "at least 1")
        if self.method is not None:  # the default config has an algorithm too; ``method`` wins
            self.algorithm = ALGORITHMS.requested_algorithm(self.method)
        self.chosen_algorithm = ALGORITHMS[
            self.algorithm or ALGORITHMS.requested_algorithm(self.ctx.all_gather_method) or ""
        ]
        self.chosen_algorithm.check(self)

    def scales_in_memory(self) -> torch.Tensor | None:
        """Return the scales of this rank's shard, 1-D in memory order; ``None`` without scales."""
        scale = self.A_scale
        if scale is None:
            return None
        return (scale.t() if scale.ndim == 2 else scale).detach().reshape(-1)

    def scaling_of_all_rows(self, gathered_scales: torch.Tensor) -> Scaling:
        """Return the scaling for the gathered A.

        ``gathered_scales`` has the ``scales_in_memory`` of all ranks. TENSOR scales of A, one per
        rank, become one scale per row.
        """
        rows, num_ranks = self.A.shape[0], self.ctx.num_ranks
        if self.scaling.recipe(self.A, self.B) is Recipe.BLOCK:
            by_rank = gathered_scales.view(num_ranks, -1, rows)
            scales = torch.cat(tuple(by_rank), 1).t()  # column-major
        else:
            by_rank = gathered_scales.view(num_ranks, -1)
            scales = by_rank.expand(num_ranks, rows).reshape(-1)
        return self.scaling._replace(A_scale=scales)


class Sizes(NamedTuple):
    """Sizes that determine which configs are worth trying for all calls of a key."""

    A: torch.Tensor
    """[M_per_rank, K] of one call. Other calls of the key may have other numbers of rows."""
    B: torch.Tensor
    num_ranks: int
    requested_algorithm: str | None
    """Algorithm that the deprecated keyword ``method`` selects, or ``None``."""
    scaling: Scaling = NO_SCALING

    @classmethod
    def of(
        cls,
        A: torch.Tensor,
        B: torch.Tensor,
        ctx: Any,
        *_: Any,
        method: object = None,
        **options: Any,
    ) -> Sizes:
        return cls(
            A, B, ctx.num_ranks, ALGORITHMS.requested_algorithm(method), scaling_of(**options)
        )


class _OverlappedGEMM(SelectableAlgorithm[Call, Sizes]):
    """Base class of algorithms that run our GEMM kernel during the all-gather.

    The GEMM, called consumer, waits before each tile until the tile's rows have arrived.
    """

    def fits_sizes(self, config: Mapping[str, Any], sizes: Sizes) -> bool:
        A, B, tiles = sizes.A, sizes.B, config["gemm_config"]
        if not spaces.fits_gemm(config, A, B, sizes, **sizes.scaling._asdict()):
            return False
        if "SPLIT_K" in tiles.kwargs and not fits_descriptor(B):
            return False  # without TMA, SPLIT_K is ignored, and another config runs this kernel
        return is_worth_trying(tiles, A.shape[0], B.shape[1], sizes.num_ranks)

    def check(self, call: Call) -> None:
        check_tiles("ag_gemm", call.gemm_config, self.name)

    def compile(self, call: Call) -> None:
        self._consumer_launch(call, _empty_product(call), self.gathered_shards(call)).compile()

    def run(self, call: Call) -> torch.Tensor:
        buffer, has_awaited_peers = call.ctx.buffer, False
        gathered = self.start(call)
        try:
            call.ctx.sleep(call.straggler_option)
            C = _empty_product(call)
            self._run_consumer(call, C, gathered)
            if call.gathered is not None:
                shard = call.local_shard.detach()  # the all-gather does not copy the local shard
                first = call.ctx.rank * len(shard)
                call.gathered.copy_(gathered.rows)
                call.gathered[first : first + len(shard)].copy_(shard)
            has_awaited_peers = True  # each peer has a tile that waits for its shard
        finally:  # even if the consumer failed, because peers wait for the release of the slot
            buffer.finish(has_awaited_peers)
        return C

    @abstractmethod
    def gathered_shards(self, call: Call) -> GatheredShards:
        """Return the shards and flags that the consumer reads in the current slot."""

    @abstractmethod
    def start(self, call: Call) -> GatheredShards:
        """Start the all-gather; return the result of ``gathered_shards``."""

    @staticmethod
    def _consumer_launch(call: Call, C: torch.Tensor, gathered: GatheredShards) -> Launch:
        ctx, tiles = call.ctx, call.gemm_config
        assert tiles is not None  # see ``check``
        return sharded_gemm(
            call.local_shard, call.B, C, tiles,
            num_sms=ctx.device.num_sms, persistent=bool(call.persistent),
            rank=ctx.rank, num_ranks=ctx.num_ranks,
            gathered=gathered if ctx.num_ranks > 1 else None,
            split_workspace=ctx.split_workspace if tiles.kwargs.get("SPLIT_K", 1) > 1 else None,
            scales=call.scaling.kernel_argument(call.A, call.B, gathered.scales),
        )  # fmt: skip

    def _run_consumer(self, call: Call, C: torch.Tensor, gathered: GatheredShards) -> None:
        """Launch the consumer. Reuse the pre-built launch if only addresses have changed."""
        local_shard, B, tiles = call.local_shard, call.B, call.gemm_config
        tensors = {"local_ptr": local_shard, "b_ptr": B, "c_ptr": C}
        if call.A_scale is not None and call.B_scale is not None:
            tensors |= {"shards.a_scale": call.A_scale, "shards.b_scale": call.B_scale}
        call.ctx.launcher.run(
            (
                call.gemm_key, local_shard.stride(), B.stride(), dot_precision(B.dtype),
                id(gathered), id(tiles), bool(call.persistent),
            ),
            lambda: self._consumer_launch(call, C, gathered),
            tensors,
            keep_alive=(gathered, tiles),  # the key contains the ids of these objects
        )  # fmt: skip


class CopyEngine(_OverlappedGEMM):
    """Copy engines move the shards with an ``AllGatherMethod`` while the consumer runs."""

    tunables = ("gemm_config", "persistent", "num_streams", "num_chunks")

    def __init__(self, method: AllGatherMethod, *schedules: tuple[int, int]) -> None:
        """``schedules`` are the (``num_streams``, ``num_chunks``) to try with the default tiles."""
        self.name, self._method, self._schedules = method.value, method, schedules

    def candidates(self) -> Iterator[tuple[Any, ...]]:
        default_tiles = next(spaces.tiles_with_persistent(spaces.get_config_space))
        for schedule in self._schedules:
            yield *default_tiles, *schedule

    def gathered_shards(self, call: Call) -> GatheredShards:
        return call.ctx.buffer.gathered_shards(call.A.shape[0], call.num_chunks)

    def start(self, call: Call) -> GatheredShards:
        return call.ctx.buffer.start(
            call.local_shard, self._method, call.num_streams, call.num_chunks,
            call.scales_in_memory(), call.call_tag,
        )  # fmt: skip


class Push(CopyEngine):
    """Each rank pushes its shard to every peer.

    All tiles are tried with this algorithm, because it was the fastest for nearly all sizes on 4
    H200.
    """

    def candidates(self) -> Iterator[tuple[Any, ...]]:
        for each in spaces.tiles_with_persistent(spaces.get_config_space):
            yield *each, 1, 1
        yield from super().candidates()
        specialized = spaces.warp_specialized_tiles()
        for tiles in (
            *specialized,
            *(split_k_tiles() if current_device().prefers_descriptors else ()),
        ):
            yield tiles, True, 1, 1
        for tiles, chunks in zip(specialized, _WARP_SPECIALIZED_CHUNK_COUNTS, strict=False):
            for num_chunks in chunks:
                yield tiles, True, 1, num_chunks


class Ring(CopyEngine):
    """Each rank forwards the shards that it receives, for hosts without links between all GPUs."""

    def fits_sizes(self, config: Mapping[str, Any], sizes: Sizes) -> bool:
        if sizes.requested_algorithm is None and has_links_between_all_gpus():
            return False
        # With two ranks, a ring and a full mesh send equal copies.
        return sizes.num_ranks > 2 and super().fits_sizes(config, sizes)


class FusedPush(_OverlappedGEMM):
    """The first programs of the consumer send the shard, in chunks along K.

    Tiles wait for the chunks between steps along K (``common/gemm/sharded.py``). For small
    shards, where the fixed time of copies dominates the call. It does not support fp8, because it
    does not send scales.
    """

    name = AllGatherMethod.FUSED_PUSH.value
    tunables = ("gemm_config", "persistent", "num_chunks", "num_comm_sms")

    def candidates(self) -> Iterator[tuple[Any, ...]]:
        for tiles, num_comm_sms, num_chunks in (
            fused_push_candidates() if current_device().prefers_descriptors else ()
        ):
            yield tiles, True, num_chunks, num_comm_sms

    def fits_sizes(self, config: Mapping[str, Any], sizes: Sizes) -> bool:
        if sizes.A.dtype in FP8:
            return False
        return fits_fused_push(sizes.A, sizes.B, sizes.num_ranks) and super().fits_sizes(
            config, sizes
        )

    def check(self, call: Call) -> None:
        super().check(call)
        if call.A.dtype in FP8:
            expected = "another algorithm for fp8"
            raise InvalidArgument("ag_gemm", "algorithm", self.name, expected)
        max_comm_sms = min(MAX_COMM_SMS, call.ctx.device.num_sms - 1)
        if call.num_comm_sms is None:
            call.num_comm_sms = min(_DEFAULT_COMM_SMS, max_comm_sms)
        if call.num_comm_sms not in _VALID_NUM_COMM_SMS or call.num_comm_sms > max_comm_sms:
            raise InvalidArgument(
                "ag_gemm", "num_comm_sms", call.num_comm_sms, f"1 to {max_comm_sms}"
            )

    def gathered_shards(self, call: Call) -> GatheredShards:
        rows, num_comm_sms = call.A.shape[0], call.num_comm_sms or 0
        return call.ctx.buffer.gathered_shards(rows, call.num_chunks, num_comm_sms)

    def start(self, call: Call) -> GatheredShards:
        rows, num_comm_sms = call.A.shape[0], call.num_comm_sms or 0
        return call.ctx.buffer.start_fused(rows, num_comm_sms, call.num_chunks)


class _GatherThenMultiply(SelectableAlgorithm[Call, Sizes]):
    """Gather all shards, then call ``torch.matmul``.

    Shards are gathered into new memory instead of a slot of the context. With a slot, waiting for
    the peers and releasing it took 9 of 74 us at 64 rows (4 H200).
    """

    def fits_sizes(self, config: Mapping[str, Any], sizes: Sizes) -> bool:
        # With one rank, there is nothing to gather.
        return sizes.num_ranks > 1 and library_supports(sizes.A, sizes.B, sizes.scaling)

    def check(self, call: Call) -> None:
        raise_first_error("ag_gemm", [library_check(self.name, call.A, call.B, call.scaling)])

    def run(self, call: Call) -> torch.Tensor:
        ctx = call.ctx
        ctx.sleep(call.straggler_option)
        # Like our kernels, create no autograd history.
        local_shard, B = call.local_shard.detach(), call.B.detach()
        if ctx.num_ranks == 1:
            if call.gathered is not None:
                call.gathered.copy_(local_shard)
            return library_matmul(local_shard, B, call.scaling)
        return ctx.buffer.slots.run_without_slots(lambda: self.multiply(call, local_shard, B))

    def multiply(self, call: Call, local_shard: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        """Return the product of all rows and B. Called only if there are at least two ranks."""
        scales = call.scales_in_memory()
        if scales is None:
            return torch.matmul(self.gather(call, local_shard, call.gathered), B)
        # Neither NCCL nor gloo gathers every fp8 dtype.
        rows = None if call.gathered is None else call.gathered.view(torch.uint8)
        A = self.gather(call, local_shard.view(torch.uint8), rows).view(local_shard.dtype)
        gathered_scales = self.gather(call, scales.view(1, -1), None)
        return library_matmul(A, B, call.scaling_of_all_rows(gathered_scales.view(-1)))

    @abstractmethod
    def gather(self, call: Call, shard: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """Return the shards of all ranks, in ``out`` or new memory."""


class Serial(_GatherThenMultiply):
    """All-gather in one launch of our exchange kernel, then ``torch.matmul``.

    Programs store the local shard into every peer's memory, set flags, and copy received shards to
    new memory (``common/exchange/protocol.py``). The exchange needs no barrier. The GEMM reads the
    new memory, so no release follows the GEMM. For few rows, where the transfer takes less time
    than the overhead of overlapping.
    """

    name, is_fallback = AllGatherMethod.SERIAL.value, True
    tunables: ClassVar[tuple[str, ...]] = ("num_chunks", "num_comm_sms")

    def candidates(self) -> Iterator[tuple[Any, ...]]:
        # The interpreter is slow: try one candidate there.
        for num_comm_sms in _SERIAL_COMM_SMS[-1 if current_device().interprets else 0 :]:
            yield 1, num_comm_sms

    def fits_sizes(self, config: Mapping[str, Any], sizes: Sizes) -> bool:
        fits = is_serial_worth_trying(sizes.A, config.get("num_comm_sms"), sizes.num_ranks)
        return fits and super().fits_sizes(config, sizes)

    def check(self, call: Call) -> None:
        super().check(call)
        serial_params(call.local_shard.nbytes, call.num_comm_sms, call.num_chunks)
        if call.local_shard.shape[0] * call.ctx.num_ranks > call.ctx.max_exchange_M:
            expected = f"another algorithm for M > {call.ctx.max_exchange_M} (ctx.max_exchange_M)"
            raise InvalidArgument("ag_gemm", "algorithm", self.name, expected)

    def compile(self, call: Call) -> None:
        if call.ctx.num_ranks > 1:
            shards, scales = [call.local_shard], call.scales_in_memory()
            if scales is not None:
                shards = [call.local_shard.view(torch.uint8), scales.view(1, -1)]
            for shard in shards:
                exchange, rows = self._exchange(call, shard, None)
                call.ctx.exchange.launch(exchange, shard.view(-1), rows.view(-1)).compile()

    def gather(self, call: Call, shard: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        exchange, rows = self._exchange(call, shard, out)
        call.ctx.exchange.run(exchange, shard.view(-1), rows.view(-1))
        return rows

    @staticmethod
    def _exchange(
        call: Call, shard: torch.Tensor, out: torch.Tensor | None
    ) -> tuple[Exchange, torch.Tensor]:
        params = serial_params(shard.nbytes, call.num_comm_sms, call.num_chunks)
        return all_gather_exchange(shard, call.ctx.num_ranks, params, call.call_tag, out)


class Collective(_GatherThenMultiply):
    """All-gather by ``torch.distributed`` (NCCL; gloo on CPU ranks), then ``torch.matmul``."""

    name, method = LibraryAlgorithm.COLLECTIVE.value, LibraryAlgorithm.COLLECTIVE
    is_fallback = True

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        return libraries.library_configs(self.method, libraries.ALL_GATHER_MATMUL)

    def gather(self, call: Call, shard: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        return libraries.all_gather_rows(shard, call.ctx.group, out)


class AsyncTP(Collective):
    """PyTorch's async tensor parallelism: GPUs only, in builds of torch that include it."""

    name, method = LibraryAlgorithm.ASYNC_TP.value, LibraryAlgorithm.ASYNC_TP

    def fits_sizes(self, config: Mapping[str, Any], sizes: Sizes) -> bool:
        fits = async_tp_supports(sizes.A, sizes.B, sizes.scaling)
        return fits and super().fits_sizes(config, sizes)

    def check(self, call: Call) -> None:
        super().check(call)
        raise_first_error("ag_gemm", [async_tp_check(self.name, call.A, call.B, call.scaling)])
        libraries.check_async_tp("ag_gemm", libraries.ALL_GATHER_MATMUL, call.ctx.num_ranks)

    def multiply(self, call: Call, local_shard: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        # cuBLAS requires that the scales of each shard begin at a multiple of 16 bytes.
        if call.A.dtype in FP8 and call.A.shape[0] % 4:
            return super().multiply(call, local_shard, B)
        scales = call.scaling.row_wise_scales(call.A, B)
        return libraries.async_tp_matmul(local_shard, B, call.ctx.group, call.gathered, scales)


@functools.lru_cache(maxsize=4096)
def serial_params(shard_bytes: int, num_comm_sms: int | None, num_chunks: int) -> LaunchParams:
    """Return the launch parameters of an all-gather before the GEMM, for shards of ``shard_bytes``.

    A program moves 2 KB to 8 KB at a time. If ``num_comm_sms`` is ``None``, use the number of
    programs that was fastest for the all-gather alone on 4 H200 (shards of 4 KB to 4 MB).
    """
    if num_comm_sms is None:
        num_comm_sms = small_params(shard_bytes).num_ctas
    elif not (is_int(num_comm_sms) and 1 <= num_comm_sms <= MAX_CTAS):
        raise InvalidArgument("ag_gemm", "num_comm_sms", num_comm_sms, f"1 to {MAX_CTAS}")
    bytes_per_program = -(-shard_bytes // (num_comm_sms * num_chunks))
    block_bytes = max(_MIN_BLOCK_BYTES, 1 << (bytes_per_program - 1).bit_length())
    return LaunchParams(num_comm_sms, min(_MAX_BLOCK_BYTES, block_bytes), num_chunks)


def is_serial_worth_trying(A: torch.Tensor, num_comm_sms: int | None, num_ranks: int) -> bool:
    """Return whether ``num_comm_sms`` programs are worth trying for A [M_per_rank, K].

    They are worth trying if half of them could not move the shard in one step. The shard has the
    maximum number of rows over the calls of the key. The result must not depend on the context's
    sizes, because calls with different contexts share keys.
    """
    shard_bytes = spaces.max_rows_of_key(A.shape[0], num_ranks) * A.shape[1] * A.element_size()
    if num_ranks == 1 or shard_bytes * num_ranks > MAX_GATHERED_BYTES:
        return False
    if num_comm_sms is None or num_comm_sms == _SERIAL_COMM_SMS[-1]:  # keep at least one candidate
        return True
    return shard_bytes > num_comm_sms // 2 * _MIN_BLOCK_BYTES


def _empty_product(call: Call) -> torch.Tensor:
    shape = call.A.shape[0] * call.ctx.num_ranks, call.B.shape[1]
    return call.A.new_empty(shape, dtype=call.scaling.output_dtype(call.A))


ALGORITHMS = Algorithms(
    "ag_gemm",
    (
        Push(AllGatherMethod.FULL_MESH_PUSH, (1, 2), (2, 2), (1, 4)),
        Ring(AllGatherMethod.RING_PUSH_1D, (1, 1), (1, 4)),
        FusedPush(),
        Serial(),
        Collective(),
        AsyncTP(),
    ),
)

# Overhead in us, slowdown of the GEMM, and chunks from which the transfer overlaps; fitted.
_TRANSFER_COSTS = {
    AllGatherMethod.FULL_MESH_PUSH.value: TransferCost(30, 1.02, 1),
    AllGatherMethod.RING_PUSH_1D.value: TransferCost(20, 1.04, 1),
    FusedPush.name: TransferCost(17, 1.04, 1),
    Serial.name: TransferCost(14, 0.99),
    Collective.name: TransferCost(42, 1.0),
    AsyncTP.name: TransferCost(61, 0.94, 1),
}


def predict_ms(config: Mapping[str, Any], sizes: Sizes) -> float:
    """Return the predicted milliseconds of a call."""
    (rows, K), ranks, dtype = sizes.A.shape, sizes.num_ranks, sizes.A.dtype
    received_bytes, cost = sizes.A.nbytes * (ranks - 1), _TRANSFER_COSTS[config["algorithm"]]
    return predict_op_ms(
        config, cost, rows * ranks, sizes.B.shape[1], K, dtype, received_bytes, ranks
    )
