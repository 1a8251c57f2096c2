"""Algorithms of AllGather-GEMM: their candidates, checks and launches."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import triton

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
    fits_fused,
    fused_tiles,
    is_worth_trying,
    sharded_gemm,
    split_k_tiles,
)
from triton_dist.kernels.common.gemm.scales import (
    FP8,
    NO_SCALING,
    Recipe,
    Scaling,
    call_tag,
    fits_async_tp,
    fits_library,
    library_check,
    library_matmul,
    scaling_of,
)
from triton_dist.kernels.common.libraries import LibraryAlgorithm
from triton_dist.kernels.common.op import (
    Algorithms,
    OpCall,
    SelectableAlgorithm,
    check_straggler,
    check_tiles,
)
from triton_dist.kernels.common.peers import GatheredShards
from triton_dist.kernels.common.slots.gathered import MAX_CHUNKS, MAX_COMM_SMS, AllGatherMethod
from triton_dist.kernels.nvidia.allgather_gemm.context import (
    GATHERED_BYTES,
    AllGatherGEMMTensorParallelContext,
    check_operands,
)
from triton_dist.runtime.capabilities import has_links_between_all_gpus
from triton_dist.runtime.device import current_device
from triton_dist.runtime.launch import Launch, dot_precision, fits_descriptor

_DEFAULT_COMM_SMS = 16
_CHUNKS, _COMM_SMS = range(1, MAX_CHUNKS + 1), range(1, MAX_COMM_SMS + 1)
# Any positive int is valid; a test for membership of a range accepts the usual values faster.
_COMMON_STREAM_COUNTS = range(1, 9)
# Numbers of chunks tried with each of the first warp-specialised tiles. The fourth tile is the
# largest that supports BLOCK scales.
_CHUNKS_OF_SPECIALIZED = ((2, 4), (2, 4), (), (2,))
# Programs of an all-gather before the GEMM, and the bytes that one program moves at a time.
_SERIAL_COMM_SMS = (128, 64, 32, 16, 8)
_SMALL_BLOCK, _LARGE_BLOCK = 2048, 8192


@dataclass(eq=False, repr=False)  # not frozen: created per call, and freezing costs 1 us
class Call(OpCall):
    """One call: the arguments of ``ag_gemm``."""

    A: torch.Tensor
    B: torch.Tensor
    ctx: AllGatherGEMMTensorParallelContext
    gemm_config: triton.Config | None
    persistent: bool | None
    method: AllGatherMethod | LibraryAlgorithm | None
    num_streams: int
    num_chunks: int
    local_copy: bool
    straggler_option: tuple[int, int] | None
    num_comm_sms: int | None
    algorithm: str | None
    gathered: torch.Tensor | None = None
    A_scale: torch.Tensor | None = None
    B_scale: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None
    use_fast_accum: bool = False
    accepted_key: tuple[Any, ...] | None = None

    def __post_init__(self) -> None:
        known = self.accepted_key
        scaling = scaling_of(self.A_scale, self.B_scale, None, self.out_dtype, self.use_fast_accum)
        self.scaling = scaling
        self.operands = known[0] if known is not None else check_operands(
            self.A, self.B, self.ctx, self.local_copy, self.gathered, scaling
        )  # fmt: skip
        self.size = call_tag(self.operands, len(self.A))
        if self.straggler_option is not None:
            check_straggler("ag_gemm", self.straggler_option)
        self.local_shard = self.A if self.local_copy else self.ctx.own_rows(self.A.shape[0])
        """Shard of this rank, [M_per_rank, K]."""
        if self.num_chunks not in _CHUNKS:
            raise InvalidArgument("ag_gemm", "num_chunks", self.num_chunks, f"1 to {MAX_CHUNKS}")
        streams = self.num_streams
        if streams not in _COMMON_STREAM_COUNTS and not (is_int(streams) and streams > 0):
            raise InvalidArgument("ag_gemm", "num_streams", self.num_streams, "at least 1")
        if self.method is not None:  # the default config has an algorithm too; ``method`` wins
            self.algorithm = ALGORITHMS.requested(self.method)
        self.chosen = ALGORITHMS[
            self.algorithm or ALGORITHMS.requested(self.ctx.all_gather_method) or ""
        ]
        self.chosen.check(self)

    def scales_in_memory(self) -> torch.Tensor | None:
        """Return the scales of this rank's shard in the order of their memory, or ``None``."""
        scale = self.A_scale
        if scale is None:
            return None
        return (scale.t() if scale.ndim == 2 else scale).detach().reshape(-1)

    def scaling_of_all_rows(self, gathered_scales: torch.Tensor) -> Scaling:
        """Return the scaling for the gathered A, from every rank's ``scales_in_memory``.

        Each rank has its own scale, so one scale per tensor becomes one scale per row.
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
    """Sizes that decide which configs are worth trying; M is the largest of the key's bucket."""

    A: torch.Tensor
    """[M_per_rank, K] of the call; the number of rows represents its bucket."""
    B: torch.Tensor
    num_ranks: int
    requested: str | None
    """Algorithm that the caller's keywords require, or ``None``."""
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
        return cls(A, B, ctx.num_ranks, ALGORITHMS.requested(method), scaling_of(**options))


class _Tiled(SelectableAlgorithm[Call, Sizes]):
    """The consumer: our GEMM over all tiles, each of which waits for its rows."""

    def fits_sizes(self, config: Mapping[str, Any], sizes: Sizes) -> bool:
        A, B, tiles = sizes.A, sizes.B, config["gemm_config"]
        if not spaces.fits_gemm(config, A, B, sizes, **sizes.scaling._asdict()):
            return False
        if "SPLIT_K" in tiles.kwargs and not fits_descriptor(B):
            return False  # without TMA the kernel equals the one of another config
        return is_worth_trying(tiles, A.shape[0], B.shape[1], sizes.num_ranks)

    def check(self, call: Call) -> None:
        check_tiles("ag_gemm", call.gemm_config, self.name)

    def compile(self, call: Call) -> None:
        self._consumer(call, _empty_product(call), self.describe(call)).compile()

    def run(self, call: Call) -> torch.Tensor:
        buffer, awaited = call.ctx.buffer, False
        gathered = self.start(call)
        try:
            call.ctx.sleep(call.straggler_option)
            C = _empty_product(call)
            self._consume(call, C, gathered)
            if call.gathered is not None:
                shard = call.local_shard.detach()  # a push does not write the local shard
                first = call.ctx.rank * len(shard)
                call.gathered.copy_(gathered.rows)
                call.gathered[first : first + len(shard)].copy_(shard)
            awaited = True  # some tile waits for every peer's shard
        finally:  # even if the consumer failed: the peers wait for the release of their shards
            buffer.finish(awaited)
        return C

    @abstractmethod
    def describe(self, call: Call) -> GatheredShards:
        """Return the shards, flags and order that the consumer reads in the current slot."""

    @abstractmethod
    def start(self, call: Call) -> GatheredShards:
        """Start the all-gather; return the result of ``describe``."""

    @staticmethod
    def _consumer(call: Call, C: torch.Tensor, gathered: GatheredShards) -> Launch:
        ctx, tiles = call.ctx, call.gemm_config
        assert tiles is not None  # see ``check``
        return sharded_gemm(
            call.local_shard, call.B, C, tiles,
            num_sms=ctx.device.num_sms, persistent=bool(call.persistent),
            rank=ctx.rank, num_ranks=ctx.num_ranks,
            gathered=gathered if ctx.num_ranks > 1 else None,
            split=ctx.split_workspace if tiles.kwargs.get("SPLIT_K", 1) > 1 else None,
            scales=call.scaling.kernel_argument(call.A, call.B, gathered.scales),
        )  # fmt: skip

    def _consume(self, call: Call, C: torch.Tensor, gathered: GatheredShards) -> None:
        """Launch the consumer; reuse the pre-built launch if only addresses changed."""
        local_shard, B, tiles = call.local_shard, call.B, call.gemm_config
        tensors = {"local_ptr": local_shard, "b_ptr": B, "c_ptr": C}
        if call.A_scale is not None and call.B_scale is not None:
            tensors |= {"shards.a_scale": call.A_scale, "shards.b_scale": call.B_scale}
        call.ctx.launcher.run(
            (
                call.operands, local_shard.stride(), B.stride(), dot_precision(B.dtype),
                id(gathered), id(tiles), bool(call.persistent),
            ),
            lambda: self._consumer(call, C, gathered),
            tensors,
            keep_alive=(gathered, tiles),  # the key contains the ids of these objects
        )  # fmt: skip


class CopyEngine(_Tiled):
    """Copy engines move the shards with an ``AllGatherMethod`` while the consumer runs."""

    tunables = ("gemm_config", "persistent", "num_streams", "num_chunks")

    def __init__(self, method: AllGatherMethod, *schedules: tuple[int, int]) -> None:
        """Try the default tiles with ``schedules`` of (``num_streams``, ``num_chunks``)."""
        self.name, self._method, self._schedules = method.value, method, schedules

    def candidates(self) -> Iterator[tuple[Any, ...]]:
        best = next(spaces.tiles_with_persistent(spaces.get_config_space))
        for schedule in self._schedules:
            yield *best, *schedule

    def describe(self, call: Call) -> GatheredShards:
        return call.ctx.buffer.describe(call.A.shape[0], call.num_chunks)

    def start(self, call: Call) -> GatheredShards:
        return call.ctx.buffer.start(
            call.local_shard, self._method, call.num_streams, call.num_chunks,
            call.scales_in_memory(), call.size,
        )  # fmt: skip


class Push(CopyEngine):
    """Each rank pushes its shard to every peer; all tiles are tried with it.

    This was the fastest algorithm for nearly all sizes on 4 H200.
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
        for tiles, chunks in zip(specialized, _CHUNKS_OF_SPECIALIZED, strict=False):
            for num_chunks in chunks:
                yield tiles, True, 1, num_chunks


class Ring(CopyEngine):
    """Each rank forwards the shards that it receives, for hosts without links between all GPUs."""

    def fits_sizes(self, config: Mapping[str, Any], sizes: Sizes) -> bool:
        if sizes.requested is None and has_links_between_all_gpus():
            return False
        # With two ranks, a ring equals the full mesh.
        return sizes.num_ranks > 2 and super().fits_sizes(config, sizes)


class FusedPush(_Tiled):
    """The first programs of the consumer send the shard, in chunks along K.

    Tiles wait for the chunks inside their K loop (``common/gemm/work_items.py``). For small shards,
    where the fixed cost of copies dominates the call. Not for fp8, whose scales it does not send.
    """

    name = AllGatherMethod.FUSED_PUSH.value
    tunables = ("gemm_config", "persistent", "num_chunks", "num_comm_sms")

    def candidates(self) -> Iterator[tuple[Any, ...]]:
        for tiles, num_comm_sms, num_chunks in (
            fused_tiles() if current_device().prefers_descriptors else ()
        ):
            yield tiles, True, num_chunks, num_comm_sms

    def fits_sizes(self, config: Mapping[str, Any], sizes: Sizes) -> bool:
        if sizes.A.dtype in FP8:
            return False
        return fits_fused(sizes.A, sizes.B, sizes.num_ranks) and super().fits_sizes(config, sizes)

    def check(self, call: Call) -> None:
        super().check(call)
        if call.A.dtype in FP8:
            expected = "another algorithm for fp8"
            raise InvalidArgument("ag_gemm", "algorithm", self.name, expected)
        max_comm_sms = min(MAX_COMM_SMS, call.ctx.device.num_sms - 1)
        if call.num_comm_sms is None:
            call.num_comm_sms = min(_DEFAULT_COMM_SMS, max_comm_sms)
        if call.num_comm_sms not in _COMM_SMS or call.num_comm_sms > max_comm_sms:
            raise InvalidArgument(
                "ag_gemm", "num_comm_sms", call.num_comm_sms, f"1 to {max_comm_sms}"
            )

    def describe(self, call: Call) -> GatheredShards:
        return call.ctx.buffer.describe(call.A.shape[0], call.num_chunks, call.num_comm_sms or 0)

    def start(self, call: Call) -> GatheredShards:
        rows, num_comm_sms = call.A.shape[0], call.num_comm_sms or 0
        return call.ctx.buffer.start_fused(rows, num_comm_sms, call.num_chunks)


class _GatherThenMultiply(SelectableAlgorithm[Call, Sizes]):
    """Gather all shards, then call ``torch.matmul``.

    Shards are gathered into memory of the call instead of a slot of the context. Waiting for the
    peers and releasing the slot took 9 of 74 us at 64 rows (4 H200).
    """

    def fits_sizes(self, config: Mapping[str, Any], sizes: Sizes) -> bool:
        # One rank gathers nothing.
        return sizes.num_ranks > 1 and fits_library(sizes.A, sizes.B, sizes.scaling)

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
        """Return the product of all rows and B; called with at least two ranks."""
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
    """All-gather in one launch of our exchange, then ``torch.matmul``.

    Programs store the local shard into every peer's memory, set flags, and copy out what arrives
    (``common/exchange/protocol.py``). The exchange needs no barrier, and no release after the GEMM,
    because the GEMM reads memory of the call. For few rows, where the transfer is shorter than the
    cost of hiding it.
    """

    name, is_fallback = AllGatherMethod.SERIAL.value, True
    tunables: ClassVar[tuple[str, ...]] = ("num_chunks", "num_comm_sms")

    def candidates(self) -> Iterator[tuple[Any, ...]]:
        # The interpreter is slow: try one candidate there.
        for number in _SERIAL_COMM_SMS[-1 if current_device().interprets else 0 :]:
            yield 1, number

    def fits_sizes(self, config: Mapping[str, Any], sizes: Sizes) -> bool:
        fits = fits_serial(sizes.A, config.get("num_comm_sms"), sizes.num_ranks)
        return fits and super().fits_sizes(config, sizes)

    def check(self, call: Call) -> None:
        super().check(call)
        serial_params(call.local_shard.nbytes, call.num_comm_sms, call.num_chunks)
        if call.local_shard.shape[0] * call.ctx.num_ranks > call.ctx.exchanged_rows:
            expected = f"another algorithm for M > {call.ctx.exchanged_rows} (ctx.exchanged_rows)"
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
        return all_gather_exchange(shard, call.ctx.num_ranks, params, call.size, out)


class Collective(_GatherThenMultiply):
    """All-gather of the process group (NCCL; gloo on CPU ranks), then ``torch.matmul``."""

    name, method = LibraryAlgorithm.COLLECTIVE.value, LibraryAlgorithm.COLLECTIVE
    is_fallback = True

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        return (
            [()]
            if self.method in libraries.candidate_library_algorithms(libraries.ALL_GATHER_MATMUL)
            else []
        )

    def gather(self, call: Call, shard: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        return libraries.all_gather_rows(shard, call.ctx.group, out)


class AsyncTP(Collective):
    """PyTorch's async tensor parallelism: GPUs only, in builds of torch that include it."""

    name, method = LibraryAlgorithm.ASYNC_TP.value, LibraryAlgorithm.ASYNC_TP

    def fits_sizes(self, config: Mapping[str, Any], sizes: Sizes) -> bool:
        fits = fits_async_tp(sizes.A, sizes.B, sizes.scaling)
        return fits and super().fits_sizes(config, sizes)

    def check(self, call: Call) -> None:
        super().check(call)
        if not fits_async_tp(call.A, call.B, call.scaling):
            expected = "another algorithm for block scales and for e5m2"
            raise InvalidArgument("ag_gemm", "algorithm", self.name, expected)
        libraries.check_async_tp("ag_gemm", libraries.ALL_GATHER_MATMUL, call.ctx.num_ranks)

    def multiply(self, call: Call, local_shard: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        # cuBLAS requires that the scales of each shard begin at a multiple of 16 bytes.
        if call.A.dtype in FP8 and call.A.shape[0] % 4:
            return super().multiply(call, local_shard, B)
        scales = call.scaling.row_wise(call.A, B)
        return libraries.async_tp_matmul(local_shard, B, call.ctx.group, call.gathered, scales)


@functools.lru_cache(maxsize=4096)
def serial_params(shard_bytes: int, num_comm_sms: int | None, num_chunks: int) -> LaunchParams:
    """Return the launch parameters of an all-gather before the GEMM, for shards of ``shard_bytes``.

    A program moves its part of a chunk in steps of 2 KB to 8 KB. If ``num_comm_sms`` is ``None``,
    use the number of programs that was fastest for the all-gather alone on 4 H200 (4 KB to 4 MB).
    """
    if num_comm_sms is None:
        num_comm_sms = small_params(shard_bytes).num_ctas
    elif not (is_int(num_comm_sms) and 1 <= num_comm_sms <= MAX_CTAS):
        raise InvalidArgument("ag_gemm", "num_comm_sms", num_comm_sms, f"1 to {MAX_CTAS}")
    bytes_per_program = -(-shard_bytes // (num_comm_sms * num_chunks))
    block_bytes = min(_LARGE_BLOCK, max(_SMALL_BLOCK, 1 << (bytes_per_program - 1).bit_length()))
    return LaunchParams(num_comm_sms, block_bytes, num_chunks)


def fits_serial(A: torch.Tensor, num_comm_sms: int | None, num_ranks: int) -> bool:
    """Return whether ``num_comm_sms`` programs are worth trying for A [M_per_rank, K].

    They are worth it if half of them could not move the bucket's largest shard in one step. The
    context's rows must not matter, because other contexts share the key.
    """
    shard_bytes = spaces.max_rows_of_key(A.shape[0], num_ranks) * A.shape[1] * A.element_size()
    if num_ranks == 1 or shard_bytes * num_ranks > GATHERED_BYTES:
        return False
    if num_comm_sms is None or num_comm_sms == _SERIAL_COMM_SMS[-1]:  # keep at least one candidate
        return True
    return shard_bytes > num_comm_sms // 2 * _SMALL_BLOCK


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
