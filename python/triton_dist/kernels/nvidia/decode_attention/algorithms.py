"""Algorithms of decode attention over ranks: checks, candidates and launches."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import triton

from triton_dist.errors import CandidateFailed, InvalidArgument
from triton_dist.kernels.common import libraries
from triton_dist.kernels.common.exchange.buffer import (
    MAX_CTAS,
    all_gather_exchange,
    params_for_device,
)
from triton_dist.kernels.common.op import Algorithm, Algorithms, OpCall
from triton_dist.kernels.common.peers import digest_of
from triton_dist.kernels.nvidia.decode_attention.backends import BACKENDS, is_installed
from triton_dist.kernels.nvidia.decode_attention.context import (
    FP8,
    MIN_COLUMNS,
    DecodeKey,
    SpDecodeContext,
    checked_key,
)
from triton_dist.kernels.nvidia.decode_attention.kernel import (
    KV,
    Parts,
    Query,
    Spec,
    Target,
    kernel_attend,
    kernel_combine,
    kernel_merge,
)
from triton_dist.kernels.nvidia.decode_attention.packets import kernel_decode_packets
from triton_dist.runtime.device import current_device
from triton_dist.runtime.launch import Launch, dot_precision

TUNABLES = ("ctas_per_sm", "block_n", "num_stages", "num_warps")
"""Names of the values in each of the following configs."""
_CONFIGS = (
    (2, 64, 3, 4), (2, 64, 4, 4), (1, 128, 3, 8), (1, 64, 3, 8), (2, 32, 3, 4), (1, 64, 3, 4),
    (2, 32, 4, 4), (2, 64, 2, 4), (2, 64, 6, 4), (2, 32, 6, 4), (1, 32, 3, 8), (1, 32, 2, 8),
    (1, 16, 1, 8),
)  # fmt: skip
_FEW_CONFIGS = ((2, 64, 3, 4), (1, 64, 3, 4), (2, 32, 3, 4), (1, 32, 3, 8), (1, 16, 1, 8))
"""Configs of the algorithms that are rarely the fastest."""
_FREE_SMS = 4
"""Number of SMs left free for kernels of other ops."""
_MAX_ACCUMULATORS = 128
"""Maximum number of fp32 accumulators per thread. More do not fit in its registers."""
_MAX_LOADED_ELEMENTS = 8192
"""Maximum number of elements of partial outputs, of all ranks, that a program loads at once."""
_LSE_BYTES = 16
"""Bytes of a packed row after the output: the LSE, and padding to a whole 16-byte vector."""
_RESERVED_BYTES = 1024
"""Bytes of shared memory that CUDA reserves for each program."""


@functools.cache
def blocks_of(size: int) -> tuple[int, int]:
    """Return the sizes of two blocks that together hold ``size`` elements.

    Both are powers of two of at least 16. The second is 0 if the first block holds all elements.
    """
    first = 1 << (size.bit_length() - 1)
    return first, max(16, triton.next_power_of_2(size - first)) if size > first else 0


def block_m(sizes: DecodeKey) -> int:
    """Return the rows of a tile."""
    rows = sizes.q_heads // sizes.kv_heads * sizes.q_len
    return int(min(64, max(16, triton.next_power_of_2(rows))))


def shared_memory_of(ctas_per_sm: int) -> int:
    """Return the bytes of shared memory of each of ``ctas_per_sm`` programs."""
    nbytes = current_device().shared_memory_bytes() + _RESERVED_BYTES
    return nbytes // ctas_per_sm - _RESERVED_BYTES


def fits_device(config: Mapping[str, Any], sizes: DecodeKey) -> bool:
    """Estimate whether ``ctas_per_sm`` programs fit on an SM."""
    if current_device().interprets:
        return True
    per_sm, block_n, stages, warps = (config[name] for name in TUNABLES)
    k, v = sum(blocks_of(sizes.head_dim)), triton.next_power_of_2(sizes.v_head_dim)
    bytes_per_element = sizes.kv_dtype.itemsize * max(1, stages - 1)
    # A block of an fp8 cache is also stored after its conversion to the dtype of q.
    bytes_per_element += sizes.dtype.itemsize if sizes.kv_dtype == FP8 else 0
    rows = block_m(sizes)
    nbytes = block_n * (k + (0 if sizes.shares_v else v)) * bytes_per_element
    nbytes += rows * (k + block_n) * sizes.dtype.itemsize
    accumulators = rows * v // (32 * warps)
    return bool(
        nbytes <= shared_memory_of(per_sm)
        and accumulators * max(1, per_sm * warps / 8) <= _MAX_ACCUMULATORS
    )


@dataclass(eq=False, repr=False)  # not frozen, because that would take 1 us more per call
class Call(OpCall):
    """The arguments of one call of ``sp_decode_attn``, and values derived from them."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor | None
    kv_lens: torch.Tensor
    ctx: SpDecodeContext
    block_table: torch.Tensor | None = None
    scale: float | None = None
    soft_cap: float = 0.0
    window: int | None = None
    sinks: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    interleave: int | None = None
    shard_output: bool = False
    lse_base: str = "e"
    max_kv_len: int | None = None
    ctas_per_sm: int | None = None
    block_n: int | None = None
    num_stages: int | None = None
    num_warps: int | None = None
    backend: str | None = None
    algorithm: str | None = None
    validated_key: Any = None
    chosen_algorithm: Algorithm[Call, DecodeKey] = field(init=False)

    def __post_init__(self) -> None:
        self.key = checked_key(self) if self.validated_key is None else self.validated_key
        default = Packets.name if self.ctx.num_ranks > 1 else AllToAll.name
        self.chosen_algorithm = ALGORITHMS[self.algorithm or default]
        self.chosen_algorithm.check(self)
        self.batch, self.q_len = self.key.batch, self.key.q_len
        self.shards = self.ctx.num_ranks if self.shard_output else 1
        self.out_heads = self.key.q_heads // self.shards

    def params(self) -> tuple[int, int, int, int]:
        """Return the tunables: the caller's values, else the values of the default config."""
        per_sm, block_n, stages, warps = default_params(self.key)
        return (
            self.ctas_per_sm or per_sm, self.block_n or block_n, self.num_stages or stages,
            self.num_warps or warps,
        )  # fmt: skip

    def num_programs(self) -> int:
        """Return the number of programs of a launch, which all must be resident at the same time.

        Some SMs stay free for kernels of other ops, which a peer may start before this op. The
        launches of this op must start in the same order on all ranks.
        """
        device = current_device()
        if device.interprets:
            return device.num_sms
        return min(MAX_CTAS, self.params()[0] * max(1, device.num_sms - _FREE_SMS))

    def spec(self) -> Spec:
        return spec_of(
            self.key, self.num_programs(), self.params()[1], self.out_heads,
            self.q.shape[-2], self.interleave or 0, self.window or 0, self.soft_cap > 0,
            self.k_scale is not None and len(self.k_scale) > 1, self.lse_base == "2",
        )  # fmt: skip

    def new_target(self) -> Target:
        """Return uninitialised memory for the output and the LSE, as an argument of kernels."""
        shape = (*self.q.shape[:-2], self.out_heads)
        out = self.q.new_empty((*shape, self.key.v_head_dim))
        lse = self.q.new_empty(shape, dtype=torch.float32)
        return Target(out, lse, self.sinks, self.key.v_head_dim, 1)

    def scale_of(self) -> float:
        return float(self.key.head_dim**-0.5 if self.scale is None else self.scale)

    def operands(self, q: torch.Tensor, spec: Spec) -> tuple[Query, KV, Parts]:
        """Return the first arguments of ``attend``: ``queries()``, the cache, and new parts."""
        k, table = self.k_cache, self.block_table
        v = k if self.v_cache is None else self.v_cache
        strides = *k.stride()[:3], *v.stride()[:3], 0 if table is None else table.stride(0)
        kv = KV._make((k, v, table, self.kv_lens, self.k_scale, self.v_scale, *strides))
        rows = (self.batch * spec.TILES + self.num_programs()) * spec.BLOCK_M
        memory = self.q.new_empty(rows * (spec.V + 1), dtype=torch.float32)
        return Query(q, *q.stride()[:4]), kv, Parts(*memory.split((rows * spec.V, rows)))

    def queries(self, gather: bool = True) -> torch.Tensor:
        """Return q as [shards, batch, new tokens, heads of a shard, head_dim].

        If q is sharded by heads, this call gathers the shards of all ranks and is collective. If
        ``gather`` is false, the result then is uninitialised and the call is not collective.
        """
        q = self.q.detach() if self.q.ndim == 4 else self.q.detach()[:, None]
        if not self.key.has_sharded_queries:
            return q[None]
        shard, ranks = q.contiguous().view(1, -1), self.ctx.num_ranks
        exchange, rows = all_gather_exchange(shard, ranks, params_for_device(), self.digest())
        if gather:
            self.ctx.buffer.run(exchange, shard, rows)
        return rows.view(ranks, *q.shape)

    def digest(self) -> int:
        """Return the call tag, a digest of the arguments that must be equal on all ranks."""
        return digest_of(
            self.batch, self.key._replace(max_kv_len=0, page_size=0), self.window, self.interleave,
            float(self.soft_cap), self.scale_of(), self.sinks is None, self.num_programs(),
        )  # fmt: skip

    def options(self, spec: Spec) -> dict[str, Any]:
        """Return the options of the kernels that compute attention."""
        per_sm, _, stages, warps = self.params()
        maxnreg = min(255, 2048 // (per_sm * warps))
        return {"spec": spec, "num_stages": stages, "num_warps": warps, "maxnreg": maxnreg}

    def packed_target(self, packed: torch.Tensor) -> Target:
        """Return the kernel argument that stores outputs and LSEs in packed rows."""
        return Target(packed, self.packed_lse(packed), None, packed.stride(0),
                      packed.stride(0) * packed.element_size() // 4)  # fmt: skip

    def packed_lse(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the LSEs of packed rows, a view."""
        return packed.view(torch.float32)[:, self.key.v_head_dim * packed.element_size() // 4]

    def new_packed(self) -> torch.Tensor:
        """Return uninitialised packed rows, [shards * rows of a shard, v_head_dim + padding]."""
        rows = self.batch * self.q_len * self.key.q_heads
        columns = self.key.v_head_dim + _LSE_BYTES // self.q.element_size()
        return self.q.new_empty((rows, columns))


@functools.lru_cache(4096)
def default_params(sizes: DecodeKey) -> tuple[int, int, int, int]:
    """Return the first candidate that fits, else the last, which needs the least memory."""
    configs = [dict(zip(TUNABLES, each, strict=True)) for each in _CONFIGS]
    config = next((each for each in configs if fits_device(each, sizes)), configs[-1])
    return tuple(config[name] for name in TUNABLES)  # type: ignore[return-value]


@functools.lru_cache(4096)
def spec_of(
    key: DecodeKey, num_programs: int, block_n: int, out_heads: int, shard_heads: int,
    interleave: int, window: int, has_soft_cap: bool, has_scale_per_head: bool, is_lse_base_2: bool,
) -> Spec:  # fmt: skip
    d0, d1 = blocks_of(key.head_dim)
    v = triton.next_power_of_2(key.v_head_dim)
    rows, tile = key.q_heads // key.kv_heads * key.q_len, block_m(key)
    # Choose the size of an item so that there are about as many items as programs. An item is a
    # chunk of the columns of one row or of several rows.
    columns, all_rows = v, key.batch * key.q_len * key.q_heads
    chunk = triton.next_power_of_2(max(1, columns * all_rows // num_programs))
    chunk = min(columns, max(MIN_COLUMNS, chunk))
    item = triton.next_power_of_2(max(1, all_rows // num_programs))
    item = min(item, triton.next_power_of_2(rows), tile, max(1, _MAX_LOADED_ELEMENTS // 4 // chunk))
    head_tiles = -(-rows // tile)
    return Spec(
        NUM_RANKS=key.num_ranks, LANES=max(16, triton.next_power_of_2(key.batch)), Q_LEN=key.q_len,
        HEADS=key.q_heads, KV_HEADS=key.kv_heads, SHARD_HEADS=shard_heads, OUT_HEADS=out_heads,
        D=key.head_dim, D0=d0, D1=d1, DV=key.v_head_dim, V=v,
        SHARED_V=key.shares_v and v == d0, PAGE=key.page_size, INTERLEAVE=interleave,
        WINDOW=window, HAS_SOFT_CAP=has_soft_cap, HAS_SCALE_PER_HEAD=has_scale_per_head,
        IS_LSE_BASE_2=is_lse_base_2, BLOCK_M=tile, BLOCK_N=block_n, HEAD_TILES=head_tiles,
        TILES=key.kv_heads * head_tiles, ROWS=item, ITEMS=-(-min(rows, tile) // item),
        COLUMNS=chunk, CHUNKS=-(-key.v_head_dim // chunk),
        PARTS=max(1, _MAX_LOADED_ELEMENTS // (item * chunk)), PRECISION=dot_precision(key.dtype),
    )  # fmt: skip


class _Algorithm(Algorithm[Call, DecodeKey]):
    """Base class of the algorithms that compute attention with a kernel of this package."""

    tunables: ClassVar[tuple[str, ...]] = TUNABLES
    configs: ClassVar[tuple[tuple[int, ...], ...]] = _FEW_CONFIGS
    min_ranks: ClassVar[int] = 2

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        return ((1, 64, 2, 4), (1, 32, 2, 4)) if current_device().interprets else self.configs

    def fits(self, config: Mapping[str, Any], sizes: DecodeKey) -> bool:
        values = tuple(config[name] for name in TUNABLES)
        fits = fits_device(config, sizes) or values == default_params(sizes)
        return fits and sizes.num_ranks >= self.min_ranks

    def check(self, call: Call) -> None:
        if call.ctx.num_ranks < self.min_ranks:
            expected = f"another algorithm than {self.name!r}, which requires several ranks"
            raise InvalidArgument("sp_decode_attn", "algorithm", self.name, expected)


class Packets(_Algorithm):
    """One launch, in which ranks exchange rows in packets (``exchange/packets.py``)."""

    name, configs = "packets", _CONFIGS

    def launch(self, call: Call, target: Target, q: torch.Tensor) -> Launch:
        ctx, spec = call.ctx, call.spec()
        packets = ctx.buffer.packet_regions()._replace(calls=ctx.epochs)
        arguments = (
            *call.operands(q, spec), target, packets, ctx.barrier_counter, call.scale_of(),
            float(call.soft_cap), call.batch, ctx.rank, call.digest(),
        )  # fmt: skip
        return Launch(kernel_decode_packets, (call.num_programs(),), arguments, call.options(spec))

    def compile(self, call: Call) -> None:
        self.check_resident(call, self.launch(call, call.new_target(), call.queries(False)))

    def check_resident(self, call: Call, launch: Launch) -> None:
        """Raise ``CandidateFailed`` if the programs do not fit on the device together."""
        checked = call.params(), call.key.kv_dtype, launch.options["spec"]
        if call.ctx.device.interprets or checked in call.ctx.resident:
            return
        launch.compile()
        compiled = launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.options)
        if compiled is None:  # kernels are only collected, not compiled
            return
        limit = shared_memory_of(call.params()[0])
        if compiled.metadata.shared > limit:
            raise CandidateFailed(f"{compiled.metadata.shared} bytes of shared memory, not {limit}")
        call.ctx.resident.add(checked)

    def run(self, call: Call) -> Any:
        target = call.new_target()
        launch = self.launch(call, target, call.queries())
        self.check_resident(call, launch)
        call.ctx.buffer.repeat(launch)
        return target.out, target.lse


class AllToAll(_Algorithm):
    """Attention by a kernel of this package, then an exchange of packed rows by NCCL.

    The exchange is an all-to-all if the output is sharded, else an all-gather.
    """

    name, min_ranks = "all_to_all", 1

    def launches(self, call: Call, q: torch.Tensor, target: Target) -> tuple[Launch, Launch]:
        """Return the launches that compute the parts of this rank and combine them."""
        spec, ctx, num_programs = call.spec(), call.ctx, call.num_programs()
        operands = call.operands(q, spec)
        arguments: tuple[Any, ...]
        arguments = *operands, call.scale_of(), float(call.soft_cap), call.batch, ctx.rank
        attend = Launch(kernel_attend, (num_programs,), arguments, call.options(spec))
        arguments = call.kv_lens, operands[2], target, call.batch, ctx.rank, num_programs
        options = {"IS_FINAL": ctx.num_ranks == 1, "spec": spec, "num_warps": 4}
        items = call.batch * spec.TILES * spec.ITEMS * spec.CHUNKS
        return attend, Launch(kernel_combine, (items,), arguments, options)

    def compile(self, call: Call) -> None:
        is_final = call.ctx.num_ranks == 1
        target = call.new_target() if is_final else call.packed_target(call.new_packed())
        for launch in self.launches(call, call.queries(False), target):
            launch.compile()

    def run(self, call: Call) -> Any:
        if call.ctx.num_ranks == 1:
            target = call.new_target()
            for launch in self.launches(call, call.queries(), target):
                call.ctx.buffer.launcher.repeat(launch)
            return target.out, target.lse
        packed = self.partial(call)
        if not call.shard_output:
            return self.merge(call, libraries.all_gather_rows(packed, call.ctx.group))
        arrived = torch.empty_like(packed)
        dist.all_to_all_single(arrived, packed, group=call.ctx.group)
        return self.merge(call, arrived)

    def partial(self, call: Call) -> torch.Tensor:
        """Return the partial outputs of this rank in packed rows, sorted by output shard."""
        packed = call.new_packed()
        for launch in self.launches(call, call.queries(), call.packed_target(packed)):
            call.ctx.buffer.launcher.repeat(launch)
        return packed

    def merge(self, call: Call, packed: torch.Tensor) -> Any:
        """Return the output and the LSE, merged from the packed rows of all ranks."""
        target, rows = call.new_target(), len(packed) // call.ctx.num_ranks
        columns = triton.next_power_of_2(call.key.v_head_dim)
        block = max(1, min(16, 2048 // columns))
        arguments = call.packed_target(packed), target, rows, call.ctx.rank
        options = {"ROWS": block, "COLUMNS": columns, "spec": call.spec(), "num_warps": 4}
        launch = Launch(kernel_merge, (-(-rows // block),), arguments, options)
        call.ctx.buffer.launcher.repeat(launch)
        return target.out, target.lse


class ReduceScatter(AllToAll):
    """Attention by a kernel of this package, then a sum of weighted outputs by NCCL.

    An all-gather of the LSEs determines the weights. The sum is a reduce-scatter if the output is
    sharded, else an all-reduce.
    """

    name, min_ranks = "reduce_scatter", 2

    def run(self, call: Call) -> Any:
        ctx, packed, dim = call.ctx, self.partial(call), call.key.v_head_dim
        own_lse = call.packed_lse(packed) * math.log(2)
        lses = libraries.all_gather_rows(own_lse[None], ctx.group)
        if call.sinks is not None:
            sinks = call.sinks.view(call.shards, 1, 1, -1)
            sinks = sinks.expand(-1, call.batch, call.q_len, -1).reshape(1, -1)
            lses = torch.cat([lses, sinks])
        lse = lses.logsumexp(0)
        weight = (own_lse - lse).exp().nan_to_num(0)  # NaN in rows without keys
        addend = (packed[:, :dim] * weight[:, None]).to(packed.dtype)
        lse = lse / math.log(2) if call.lse_base == "2" else lse
        if call.shard_output:
            out, lse = libraries.reduce_scatter(addend, ctx.group), lse.chunk(call.shards)[ctx.rank]
        else:
            out = libraries.all_reduce(addend, ctx.group)
        shape = (*call.q.shape[:-2], call.out_heads)
        return out.view(*shape, dim), lse.view(shape)


class Library(AllToAll):
    """Attention by the library ``backend``, with the exchange of ``"all_to_all"``."""

    name, tunables, is_fallback = "library", ("backend",), True

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        return [(name,) for name, each in BACKENDS.items() if each.is_candidate()]

    def fits(self, config: Mapping[str, Any], sizes: DecodeKey) -> bool:
        return sizes.num_ranks > 1 and BACKENDS[config["backend"]].fits(sizes)

    def check(self, call: Call) -> None:
        call.backend = call.backend or next(iter(BACKENDS))
        backend = BACKENDS.get(call.backend)
        if backend is None or not is_installed(backend.module):
            expected = f"None, or an installed library of {', '.join(map(repr, BACKENDS))}"
            raise InvalidArgument("sp_decode_attn", "backend", call.backend, expected)
        if call.key.num_ranks < 2 or not backend.fits(call.key):
            expected = f"another algorithm: backend {call.backend!r} requires several ranks, "
            expected += f"one new token, no window, no soft cap, no scales, and {backend.requires}"
            raise InvalidArgument("sp_decode_attn", "algorithm", call.algorithm, expected)

    def compile(self, call: Call) -> None:
        pass

    def partial(self, call: Call) -> torch.Tensor:
        ctx, packed, shards, interleave = call.ctx, call.new_packed(), call.shards, call.interleave
        if interleave is None:
            lens = call.kv_lens[ctx.rank]
        else:
            full, rest = call.kv_lens // (cycle := interleave * ctx.num_ranks), call.kv_lens % cycle
            rest = (rest - ctx.rank * interleave).clamp(0, interleave)
            lens = (full * interleave + rest).int()
        q = call.queries()[:, :, 0].transpose(0, 1).flatten(1, 2)
        backend = BACKENDS[str(call.backend)]
        out, lse = backend.attend(
            q, call.k_cache, call.v_cache, call.block_table, lens, call.scale_of()
        )
        has_keys = (lens > 0)[:, None]
        lse = lse.where(has_keys, -math.inf).unflatten(1, (shards, -1)).transpose(0, 1)
        out = out.where(has_keys[..., None], 0).unflatten(1, (shards, -1)).transpose(0, 1)
        packed[:, : out.shape[-1]].view(out.shape).copy_(out)
        call.packed_lse(packed).view(lse.shape).copy_(lse)
        return packed


class LibraryReduceScatter(Library, ReduceScatter):
    """Attention by the library ``backend``, with the exchange of ``"reduce_scatter"``."""

    name = "library_reduce_scatter"


ALGORITHMS = Algorithms(
    "sp_decode_attn",
    (Packets(), AllToAll(), ReduceScatter(), Library(), LibraryReduceScatter()),
)
