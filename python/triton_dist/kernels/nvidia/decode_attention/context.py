"""Context of decode attention over ranks, and checks of calls."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from triton_dist.kernels.common.context import (
    Check,
    OpContext,
    agree_to_create,
    checked_buffer,
    dtype_checks,
    gradient_check,
    is_int,
    raise_first_error,
    range_check,
    tensor_checks,
)
from triton_dist.kernels.common.exchange.buffer import (
    LINE_BYTES,
    MAX_CTAS,
    ExchangeBuffer,
    slot_bytes_for_shards,
)
from triton_dist.kernels.common.peers import Disagreements
from triton_dist.runtime.ranks import Group, process_group_of

FP8 = torch.float8_e4m3fn
MAX_QUERY_LENGTH, MAX_BATCH, MAX_HEAD_DIM = 8, 4096, 1024
MIN_COLUMNS = 64
"""Minimum number of columns of a chunk, unless a row has fewer."""


class SpDecodeContext(OpContext[ExchangeBuffer]):
    """Symmetric memory of ``sp_decode_attn``. A context manager."""

    def __init__(
        self,
        max_batch: int,
        max_q_len: int,
        num_q_heads: int,
        head_dim: int,
        v_head_dim: int,
        dtype: torch.dtype,
        shard_queries: bool,
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__("sp_decode_attn", group)
        self.max_batch, self.max_q_len, self.num_q_heads = max_batch, max_q_len, num_q_heads
        self.head_dim, self.v_head_dim, self.dtype = head_dim, v_head_dim, dtype
        self.shard_queries = shard_queries
        rows, lines = max_batch * max_q_len * num_q_heads, v_head_dim * dtype.itemsize // LINE_BYTES
        lines += -(-v_head_dim // MIN_COLUMNS)  # an LSE for each chunk of columns
        packet_bytes = rows * lines * LINE_BYTES if self.num_ranks > 1 else 0
        shard = rows // self.num_ranks * head_dim if shard_queries else 0
        slot_bytes = slot_bytes_for_shards(shard, dtype, self.num_ranks)
        value = "digest of the shapes and options of sp_decode_attn"
        disagreements = Disagreements(value, group)
        with self.allocating() as add:
            buffer = ExchangeBuffer(
                slot_bytes, group, "sp_decode_attn", packet_bytes, disagreements
            )
            self.buffer = add(buffer)
        device = self.device.torch_device
        words = torch.zeros(2 * MAX_CTAS, dtype=torch.int64, device=device)
        self.epochs, self.barrier_counter = words.chunk(2)
        """Epochs of packets, one word per program, and the counter of the grid barrier."""
        self.resident: set[object] = set()
        """Params and specs of the launches whose programs can all be resident at the same time."""

    def reset(self) -> None:
        super().reset()
        self.epochs.zero_()
        self.barrier_counter.zero_()
        self.device.synchronize()


def create_sp_decode_context(
    rank: int,
    world_size: int,
    local_world_size: int,
    max_batch: int,
    num_q_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    v_head_dim: int | None = None,
    max_q_len: int = 1,
    shard_queries: bool = False,
    group: Group = None,
) -> SpDecodeContext:
    """Create the context of ``sp_decode_attn``. Collective over ``group``.

    The context uses about ``4 * world_size * max_batch * max_q_len * num_q_heads * v_head_dim``
    elements of ``dtype`` in the memory of each rank.

    Args:
        rank, world_size, local_world_size: this rank, the number of ranks of the group, and the
            number of ranks on this host.
        max_batch: maximum number of sequences, 1 to 4096.
        num_q_heads: number of query heads over all ranks.
        head_dim: number of elements of a query or key, a multiple of 8, 16 to 1024.
        dtype: dtype of queries and outputs: fp16, bf16 or fp32.
        v_head_dim: number of elements of a value, a multiple of 8, 16 to 1024; default:
            ``head_dim``.
        max_q_len: maximum number of new tokens of a sequence, 1 to 8.
        shard_queries: whether to allocate memory also for queries that are sharded by heads.
        group: process group; default: the world, or this process alone.

    Returns:
        The context. Call ``finalize()`` or use ``with`` to free it.

    Raises:
        InvalidArgument, RankDisagreement, SymmetricMemoryFull: see ``create_ag_gemm_context``.
    """
    group = process_group_of(group)
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    sizes = {
        "max_batch": max_batch, "max_q_len": max_q_len, "num_q_heads": num_q_heads,
        "head_dim": head_dim, "v_head_dim": v_head_dim,
    }  # fmt: skip

    def checks() -> Iterator[Check]:
        yield range_check(MAX_BATCH, "max_batch", max_batch)
        yield range_check(MAX_QUERY_LENGTH, "max_q_len", max_q_len)
        for name, size in (("head_dim", head_dim), ("v_head_dim", v_head_dim)):
            fits = size % 8 == 0 and 16 <= size <= MAX_HEAD_DIM
            yield name, size, fits, f"a multiple of 8, 16 to {MAX_HEAD_DIM}"
        yield from dtype_checks("dtype", dtype)
        fits = not shard_queries or num_q_heads % world_size == 0
        expected = f"False, or num_q_heads = {num_q_heads} a multiple of {world_size}"
        yield "shard_queries", shard_queries, fits, expected

    agree_to_create(
        "create_sp_decode_context", "an attention", group, rank,
        {"world_size": world_size, "local_world_size": local_world_size}, sizes, checks(),
        dtype=dtype, shard_queries=shard_queries,
    )  # fmt: skip
    return SpDecodeContext(
        max_batch, max_q_len, num_q_heads, head_dim, v_head_dim, dtype, bool(shard_queries), group
    )


class DecodeKey(NamedTuple):
    """Tuning key of a call. The algorithms also use it as the call's sizes."""

    batch: int
    max_kv_len: int
    """Maximum number of keys of a sequence on this rank."""
    q_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    page_size: int
    """0 for a dense cache."""
    is_contiguous: bool
    """Whether the caches are contiguous."""
    shares_v: bool
    """Whether values are the first elements of the keys."""
    has_mask: bool
    """Whether the call has a window, a soft cap, several new tokens, or scales without fp8."""
    has_sharded_queries: bool
    shards_output: bool
    num_ranks: int


def is_finite(number: Any) -> bool:
    return isinstance(number, float | int) and math.isfinite(number)


def checked_key(call: Any) -> DecodeKey:
    """Return the tuning key of a call. Raise if an argument is invalid."""
    ctx, q, k, v = call.ctx, call.q, call.k_cache, call.v_cache
    checked_buffer(ctx, SpDecodeContext, "sp_decode_attn", "create_sp_decode_context")
    device, heads, table = ctx.device.torch_device, ctx.num_q_heads, call.block_table
    values = k if v is None else v
    tensors = {"q": q, "k_cache": k, "v_cache": values, "kv_lens": call.kv_lens}
    for name in ("block_table", "sinks", "k_scale", "v_scale"):
        if getattr(call, name) is not None:
            tensors[name] = getattr(call, name)

    def checks() -> Iterator[Check]:
        yield from tensor_checks(**tensors)
        for name, each in tensors.items():
            yield f"{name}.device", each.device, each.device == device, f"{device}"
        yield "q.dtype", q.dtype, q.dtype == ctx.dtype, f"the context's {ctx.dtype}"
        shape = tuple(q.shape)
        allowed_heads = [heads] + ([heads // ctx.num_ranks] if ctx.shard_queries else [])
        fits = len(shape) in (3, 4) and 1 <= shape[0] <= ctx.max_batch
        fits = fits and (len(shape) == 3 or 1 <= shape[1] <= ctx.max_q_len)
        fits = fits and shape[-2] in allowed_heads and shape[-1] == ctx.head_dim
        expected = f"[1 to {ctx.max_batch}, (1 to {ctx.max_q_len},) "
        expected += f"{' or '.join(map(str, allowed_heads))}, {ctx.head_dim}]"
        yield "q.shape", shape, fits, expected
        batch = shape[0]
        yield "k_cache.dtype", k.dtype, k.dtype in (ctx.dtype, FP8), f"{ctx.dtype} or {FP8}"
        yield "v_cache.dtype", values.dtype, values.dtype == k.dtype, f"{k.dtype}"
        for name in ("q", "k_cache", "v_cache"):
            each = tensors[name]
            yield gradient_check(name, each)
            yield f"{name}.stride(-1)", each.stride(-1), each.stride(-1) == 1, "1"
        fits = k.ndim == 4 and k.shape[3] == ctx.head_dim and k.shape[2] >= 1
        fits = fits and heads % k.shape[2] == 0 and k.shape[1] >= 1
        expected = f"[blocks, tokens, a divisor of {heads}, {ctx.head_dim}]"
        yield "k_cache.shape", tuple(k.shape), fits, expected
        size = max(values.shape[-1], ctx.v_head_dim) if v is None else ctx.v_head_dim
        fits = tuple(values.shape) == (*k.shape[:3], size)
        expected = f"{[*k.shape[:3], ctx.v_head_dim]}"
        yield "v_cache.shape", tuple(values.shape), fits, expected
        if table is None:
            expected = f"{batch} sequences without a block_table"
            yield "k_cache.shape[0]", k.shape[0], k.shape[0] == batch, expected
        else:
            fits = table.ndim == 2 and table.shape[0] == batch and table.shape[1] >= 1
            yield "block_table.shape", tuple(table.shape), fits, f"[{batch}, pages]"
            yield "block_table.stride(-1)", table.stride(-1), table.stride(-1) == 1, "1"
            yield "block_table.dtype", table.dtype, table.dtype == torch.int32, "torch.int32"
        dtype = call.kv_lens.dtype
        yield "kv_lens.dtype", dtype, dtype == torch.int32, "torch.int32"
        for name in ("interleave", "window", "max_kv_len"):
            tokens = getattr(call, name)
            fits = tokens is None or (is_int(tokens) and tokens >= 1)
            yield name, tokens, fits, "None, or tokens, at least 1"
        wanted = (ctx.num_ranks, batch) if call.interleave is None else (batch,)
        fits = tuple(call.kv_lens.shape) == wanted and call.kv_lens.is_contiguous()
        yield "kv_lens.shape", tuple(call.kv_lens.shape), fits, f"{list(wanted)}, contiguous"
        cap, scale = call.soft_cap, call.scale
        yield "soft_cap", cap, is_finite(cap) and cap >= 0, "a number, 0 or more"
        yield "scale", scale, scale is None or is_finite(scale), "None or a number"
        scales = ((1,), (k.shape[2],))
        for name, sizes in (("sinks", ((heads,),)), ("k_scale", scales), ("v_scale", scales)):
            if name in tensors:
                each = tensors[name]
                is_float = each.dtype == torch.float32 and each.is_contiguous()
                expected = f"fp32, contiguous, {' or '.join(str(list(s)) for s in sizes)}"
                fits = tuple(each.shape) in sizes and is_float
                yield name, (tuple(each.shape), each.dtype), fits, expected
        shapes = [x if x is None else tuple(x.shape) for x in (call.k_scale, call.v_scale)]
        expected = "the shape of k_scale: pass both or none"
        yield "v_scale", shapes[1], shapes[0] == shapes[1], expected
        fits = isinstance(call.shard_output, bool)
        fits = fits and (not call.shard_output or heads % ctx.num_ranks == 0)
        expected = f"False, or True if {heads} heads are a multiple of {ctx.num_ranks} ranks"
        yield "shard_output", call.shard_output, fits, expected
        yield "lse_base", call.lse_base, call.lse_base in ("e", "2"), "'e' or '2'"

    raise_first_error("sp_decode_attn", checks())
    capacity = k.shape[1] * (1 if table is None else table.shape[1])
    q_len = q.shape[1] if q.ndim == 4 else 1
    has_mask = q_len > 1 or call.window is not None or call.soft_cap > 0
    has_mask = has_mask or (call.k_scale is not None and k.dtype != FP8)
    return DecodeKey(
        q.shape[0], call.max_kv_len or capacity, q_len, heads, k.shape[2], ctx.head_dim,
        ctx.v_head_dim, q.dtype, k.dtype, 0 if table is None else k.shape[1],
        k.is_contiguous() and values.is_contiguous(), v is None, has_mask, q.shape[-2] < heads,
        call.shard_output, ctx.num_ranks,
    )  # fmt: skip
