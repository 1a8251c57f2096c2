"""Kernels of decode attention: split-KV attention, and the combination of its parts.

*Work.* A row is one query head of one new token. A tile is up to BLOCK_M rows of one sequence and
one KV head. A unit is the work of one tile on BLOCK_N keys. All units, in the order of sequences
and heads, are divided evenly over the programs, which read the lengths on the device. The units of
a program are therefore the end of one tile, whole tiles, and the begin of another tile. Each tile
has at least one unit, which may have no keys.

*Parts.* A part is the result of one program for one tile: a normalised output in fp32 and the
base-2 logarithm of its softmax denominator (LSE). The index of a part is tile + program. Later
programs never have earlier tiles, so no two parts have the same index, and the parts of a tile are
consecutive.

*Items.* An item is ROWS rows and COLUMNS columns of a tile. After all parts are stored, one program
combines the parts of each item.

*Rejected.* Transposed products, with keys as rows, compile to WGMMA, but calls take longer on an
H200: 102 instead of 90 us for 8 sequences of 32,768 latents, and the same for head dimension 128.

======================  ==========  ===================================================
argument                dtype       shape
======================  ==========  ===================================================
query.q                 any         by strides; heads in shards of SHARD_HEADS
kv.k, kv.v              any         [blocks, tokens, KV_HEADS, D] by strides
kv.table                int32       [batch, pages], or ``None`` for a dense cache
kv.lens                 int32       [NUM_RANKS, batch], or totals [batch] if cyclic
kv.k_scale, kv.v_scale  fp32        [1] or [KV_HEADS], or ``None``
parts.out               fp32        [tiles + programs, BLOCK_M, V]
parts.lse               fp32        [tiles + programs, BLOCK_M]
target.out              of q        rows of DV elements, ``target.row_stride`` elements apart
target.lse              fp32        ``target.lse_stride`` elements apart
======================  ==========  ===================================================
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from triton_dist._jit import jit

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class Query(NamedTuple):
    """Queries and their strides."""

    q: Any
    shard_stride: Any
    batch_stride: Any
    token_stride: Any
    head_stride: Any


class KV(NamedTuple):
    """The cache, and the strides of keys, values and the block table."""

    k: Any
    v: Any
    table: Any
    lens: Any
    k_scale: Any
    v_scale: Any
    k_block_stride: Any
    k_token_stride: Any
    k_head_stride: Any
    v_block_stride: Any
    v_token_stride: Any
    v_head_stride: Any
    table_stride: Any


class Parts(NamedTuple):
    """Memory of the parts of all tiles; see the module docstring."""

    out: Any
    lse: Any


class Target(NamedTuple):
    """Memory of the results."""

    out: Any
    lse: Any
    sinks: Any
    row_stride: Any
    lse_stride: Any


class Spec(NamedTuple):
    """Constants of a launch.

    LANES is the batch size, rounded up to a power of two. D and DV are the dimensions of keys and
    values. D is computed as two blocks whose sizes are powers of two: D0 and D1, which may be 0. V
    is DV, rounded up to a power of two. If SHARED_V is true, values are the first DV elements of
    keys, and V equals D0. PAGE is 0 for a dense cache. In a cyclic cache, the ranks hold INTERLEAVE
    consecutive tokens in turn; else INTERLEAVE is 0. WINDOW is 0 without a window. SHARD_HEADS is
    the number of heads of a shard of q, OUT_HEADS of a shard of the output. HEAD_TILES is the
    number of tiles of a KV head, TILES of a sequence. A tile has ITEMS x CHUNKS items
    of ROWS rows and COLUMNS columns. PARTS is the number of parts that a program combines at
    once. If HAS_SCALE_PER_HEAD is true, each KV head has its own ``k_scale`` and ``v_scale``.
    """

    NUM_RANKS: Any
    LANES: Any
    Q_LEN: Any
    HEADS: Any
    KV_HEADS: Any
    SHARD_HEADS: Any
    OUT_HEADS: Any
    D: Any
    D0: Any
    D1: Any
    DV: Any
    V: Any
    SHARED_V: Any
    PAGE: Any
    INTERLEAVE: Any
    WINDOW: Any
    HAS_SOFT_CAP: Any
    HAS_SCALE_PER_HEAD: Any
    IS_LSE_BASE_2: Any
    BLOCK_M: Any
    BLOCK_N: Any
    HEAD_TILES: Any
    TILES: Any
    ROWS: Any
    ITEMS: Any
    COLUMNS: Any
    CHUNKS: Any
    PARTS: Any
    PRECISION: Any


@jit
def local_keys(lens_ptr, batch, rank, spec: tl.constexpr):
    """Return four int32 [LANES] with one element per sequence.

    They are the begin and end of the keys of this rank that a new token can see, the position of
    the rank's first key, and the length of the sequence.
    """
    NUM_RANKS: tl.constexpr = spec.NUM_RANKS
    sequence = tl.arange(0, spec.LANES)
    valid = sequence < batch
    total = tl.load(lens_ptr + sequence, mask=valid, other=0)
    first_position = total * 0
    if spec.INTERLEAVE > 0:
        cycle = spec.INTERLEAVE * spec.NUM_RANKS
        rest = total % cycle - rank * spec.INTERLEAVE
        rest = tl.minimum(tl.maximum(rest, 0), spec.INTERLEAVE)
        end = total // cycle * spec.INTERLEAVE + rest
    else:
        total = tl.maximum(total, 0)
        end = total * (rank == 0).to(tl.int32)
        for other in tl.static_range(1, NUM_RANKS):
            keys = tl.load(lens_ptr + other * batch + sequence, mask=valid, other=0)
            keys = tl.maximum(keys, 0)
            first_position = tl.where(rank == other, total, first_position)
            end = tl.where(rank == other, keys, end)
            total += keys
    begin = end * 0
    if spec.WINDOW > 0:
        first = tl.maximum(total - spec.Q_LEN - spec.WINDOW + 1, 0)
        if spec.INTERLEAVE > 0:
            begin = first // (spec.INTERLEAVE * spec.NUM_RANKS) * spec.INTERLEAVE
        else:
            begin = tl.maximum(first - first_position, 0)
        begin = tl.minimum(begin, end)
    return begin, end, first_position, total


@jit
def position_of(index, first_position, rank, spec: tl.constexpr):
    """Return the positions in the sequence of keys ``index`` of this rank."""
    if spec.INTERLEAVE > 0:
        block = index // spec.INTERLEAVE * spec.NUM_RANKS + rank
        position = block * spec.INTERLEAVE + index % spec.INTERLEAVE
    else:
        position = first_position + index
    return position


@jit
def units_of(begin, end, batch, spec: tl.constexpr):
    """Return the number of units of a tile of each sequence with keys ``begin`` to ``end``."""
    units = tl.maximum(tl.cdiv(end - begin, spec.BLOCK_N), 1)
    return tl.where(tl.arange(0, spec.LANES) < batch, units, 0)


@jit
def element(values, index, spec: tl.constexpr):
    """Return element ``index`` of ``values`` [LANES], which are in registers."""
    return tl.sum(tl.where(tl.arange(0, spec.LANES) == index, values, 0), 0)


@jit
def tile_of(unit, units, spec: tl.constexpr):
    """Return the tile that contains ``unit``, and the tile's first unit."""
    TILES: tl.constexpr = spec.TILES
    lane = tl.arange(0, spec.LANES)
    sequence = tl.sum((tl.cumsum(units * TILES, 0) <= unit).to(tl.int32), 0)
    first_unit = tl.sum(tl.where(lane < sequence, units * TILES, 0), 0)
    tile_units = tl.sum(tl.where(lane == sequence, units, 0), 0)
    tile = (unit - first_unit) // tile_units
    return sequence * TILES + tile, first_unit + tile * tile_units


@jit
def rows_of(tile, row, spec: tl.constexpr):
    """Return the sequence, KV head, new token and query head of ``row`` of ``tile``, and whether
    the row exists."""
    TILES: tl.constexpr = spec.TILES
    TILES_PER_HEAD: tl.constexpr = spec.HEAD_TILES
    GROUP: tl.constexpr = spec.HEADS // spec.KV_HEADS
    within = tile % TILES
    kv_head = within // TILES_PER_HEAD
    row += within % TILES_PER_HEAD * spec.BLOCK_M
    head, valid = kv_head * GROUP + row % GROUP, row < GROUP * spec.Q_LEN
    return tile // TILES, kv_head, row // GROUP, head, valid


@jit
def load_tile(
    ptr, offset, rows, BEGIN: tl.constexpr, valid, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Load elements BEGIN to BEGIN + BLOCK of rows with SIZE elements at offsets ``rows``."""
    column = BEGIN + tl.arange(0, BLOCK)
    mask = valid[:, None]
    if BEGIN + BLOCK > SIZE:
        mask = mask & (column < SIZE)[None, :]
    return tl.load(ptr + offset + rows[:, None] + column[None, :], mask=mask, other=0.0).to(DTYPE)


@jit
def attend(query, kv, parts, scale, soft_cap, batch, rank, spec: tl.constexpr):
    """Compute this program's units and store their parts. Return the result of ``units_of``."""
    DTYPE: tl.constexpr = query.q.dtype.element_ty
    BLOCK_M: tl.constexpr = spec.BLOCK_M
    V: tl.constexpr = spec.V
    begins, ends, first_positions, lengths = local_keys(kv.lens, batch, rank, spec)
    units = units_of(begins, ends, batch, spec)
    total = tl.sum(units, 0) * spec.TILES
    units_per_program = tl.cdiv(total, tl.num_programs(0))
    begin = tl.program_id(0) * units_per_program
    end = tl.minimum(begin + units_per_program, total)
    tile, tile_begin = tile_of(tl.minimum(begin, total - 1), units, spec)
    last_tile, _ = tile_of(tl.maximum(end - 1, 0), units, spec)
    row = tl.arange(0, BLOCK_M)
    # A program after the last unit has begin >= end and no tiles.
    for index in range(tl.where(begin < end, last_tile + 1 - tile, 0)):
        current = tile + index
        sequence, kv_head, token, head, in_tile = rows_of(current, row, spec)
        first_key, end_key = element(begins, sequence, spec), element(ends, sequence, spec)
        first_position = element(first_positions, sequence, spec)
        length = element(lengths, sequence, spec)
        q_row = head // spec.SHARD_HEADS * query.shard_stride.to(tl.int64)
        q_row += sequence.to(tl.int64) * query.batch_stride + token * query.token_stride
        q_row += head % spec.SHARD_HEADS * query.head_stride
        q0 = load_tile(query.q, 0, q_row, 0, in_tile, spec.D, spec.D0, DTYPE)
        if spec.D1 > 0:
            q1 = load_tile(query.q, 0, q_row, spec.D0, in_tile, spec.D, spec.D1, DTYPE)
        score_scale, value_scale = scale, 1.0
        if kv.k_scale is not None:
            score_scale *= tl.load(kv.k_scale + (kv_head if spec.HAS_SCALE_PER_HEAD else 0))
        if kv.v_scale is not None:
            value_scale *= tl.load(kv.v_scale + (kv_head if spec.HAS_SCALE_PER_HEAD else 0))
        if not spec.HAS_SOFT_CAP:
            score_scale *= LOG2E
        max_score = tl.full([BLOCK_M], float("-inf"), tl.float32)
        denominator = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, V], tl.float32)
        k_head = kv_head.to(tl.int64) * kv.k_head_stride
        v_head = kv_head.to(tl.int64) * kv.v_head_stride
        blocks = tl.maximum(tl.cdiv(end_key - first_key, spec.BLOCK_N), 1)
        first_block = tl.maximum(begin - tile_begin, 0)
        for block in range(first_block, tl.minimum(end - tile_begin, blocks)):
            key = first_key + block * spec.BLOCK_N + tl.arange(0, spec.BLOCK_N)
            in_keys = key < end_key
            page, within = sequence.to(tl.int64), key
            if spec.PAGE > 0:
                page_ptr = kv.table + page * kv.table_stride + key // spec.PAGE
                page = tl.load(page_ptr, mask=in_keys, other=0).to(tl.int64)
                within = key % spec.PAGE
            k_row = page * kv.k_block_stride + within.to(tl.int64) * kv.k_token_stride
            k0 = load_tile(kv.k, k_head, k_row, 0, in_keys, spec.D, spec.D0, DTYPE)
            scores = tl.dot(q0, tl.trans(k0), input_precision=spec.PRECISION)
            if spec.D1 > 0:
                k1 = load_tile(kv.k, k_head, k_row, spec.D0, in_keys, spec.D, spec.D1, DTYPE)
                scores = tl.dot(q1, tl.trans(k1), scores, input_precision=spec.PRECISION)
            scores *= score_scale
            if spec.HAS_SOFT_CAP:  # cap * tanh(scores / cap)
                scores = soft_cap * (2 * tl.sigmoid(2 / soft_cap * scores) - 1) * LOG2E
            visible = in_keys[None, :]
            if spec.Q_LEN > 1 or spec.WINDOW > 0:
                distance = (length - spec.Q_LEN + token)[:, None]
                distance = distance - position_of(key, first_position, rank, spec)[None, :]
                visible = visible & (distance >= 0)
                if spec.WINDOW > 0:
                    visible = visible & (distance < spec.WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
            new_max = tl.maximum(max_score, tl.max(scores, 1))
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
            weights = tl.exp2(scores - base[:, None])
            rescale = tl.exp2(max_score - base)
            denominator = denominator * rescale + tl.sum(weights, 1)
            max_score = new_max
            v = k0
            if not spec.SHARED_V:
                v_row = page * kv.v_block_stride + within.to(tl.int64) * kv.v_token_stride
                v = load_tile(kv.v, v_head, v_row, 0, in_keys, spec.DV, V, DTYPE)
            acc = acc * rescale[:, None]
            acc = tl.dot(weights.to(DTYPE), v, acc, input_precision=spec.PRECISION)
        # Avoid 0 / 0 and log2(0) in rows without keys.
        divisor = tl.where(denominator > 0, denominator, 1.0)
        acc *= (value_scale / divisor)[:, None]
        lse = tl.where(denominator > 0, max_score + tl.log2(divisor), float("-inf"))
        # Without the select, LLVM computes the addresses of all elements before the inner loop,
        # which takes up to 70 registers per thread (Triton 3.6).
        part = tl.where(tile_begin >= 0, current + tl.program_id(0), 0)
        part_row = part.to(tl.int64) * BLOCK_M + row
        part_ptr = parts.out + part_row[:, None] * V + tl.arange(0, V)[None, :]
        tl.store(parts.lse + part_row, lse, mask=in_tile)
        tl.store(part_ptr, acc, mask=in_tile[:, None])
        tile_begin += blocks
    return units


@jit
def combine_item(parts, units, programs, item, spec: tl.constexpr):
    """Combine the parts of an item.

    ``programs`` is the number of programs that ran ``attend``. Return the output, fp32 [ROWS,
    COLUMNS], the LSE, [ROWS], the row's index in [batch, Q_LEN], its query head, whether it exists,
    and the index of the item's chunk.
    """
    TILES: tl.constexpr = spec.TILES
    CHUNKS: tl.constexpr = spec.CHUNKS
    ITEMS: tl.constexpr = spec.ITEMS
    ROWS: tl.constexpr = spec.ROWS
    COLUMNS: tl.constexpr = spec.COLUMNS
    block, chunk = item // CHUNKS, item % CHUNKS
    tile, row = block // ITEMS, block % ITEMS * ROWS + tl.arange(0, ROWS)
    sequence, _, token, head, valid = rows_of(tile, row, spec)
    column = chunk * COLUMNS + tl.arange(0, COLUMNS)
    first_unit = tl.sum(tl.where(tl.arange(0, spec.LANES) < sequence, units, 0), 0) * TILES
    tile_units = element(units, sequence, spec)
    tile_begin = first_unit + tile % TILES * tile_units
    units_per_program = tl.cdiv(tl.sum(units, 0) * TILES, programs)
    first_program = tile_begin // units_per_program
    last_program = (tile_begin + tile_units - 1) // units_per_program
    max_lse = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(first_program, last_program + 1, spec.PARTS):
        program = begin + tl.arange(0, spec.PARTS)
        exists = (program <= last_program)[:, None] & valid[None, :]
        part_row = (tile + program).to(tl.int64)[:, None] * spec.BLOCK_M + row[None, :]
        lse_ptr = parts.lse + part_row
        lse = tl.load(lse_ptr, mask=exists, other=float("-inf"), cache_modifier=".cg")
        part_ptr = parts.out + part_row[:, :, None] * spec.V + column[None, None, :]
        mask = exists[:, :, None] & (column < spec.DV)[None, None, :]
        part = tl.load(part_ptr, mask=mask, other=0.0, cache_modifier=".cg")
        new_max = tl.maximum(max_lse, tl.max(lse, 0))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale, weight = tl.exp2(max_lse - base), tl.exp2(lse - base[None, :])
        total = total * rescale + tl.sum(weight, 0)
        out = out * rescale[:, None] + tl.sum(part * weight[:, :, None], 0)
        max_lse = new_max
    divisor = tl.where(total > 0, total, 1.0)
    lse = tl.where(total > 0, max_lse + tl.log2(divisor), float("-inf"))
    return out / divisor[:, None], lse, sequence * spec.Q_LEN + token, head, valid, chunk


@jit
def with_sink(max_lse, sinks_ptr, head, valid):
    """Return the maximum of LSEs and the head's sink, and the sink's weight relative to it.

    Return 0 as maximum if the maximum is minus infinity.
    """
    sink = tl.full(max_lse.shape, float("-inf"), tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=valid, other=float("-inf")).to(tl.float32) * LOG2E
    base = tl.maximum(max_lse, sink)
    base = tl.where(base == float("-inf"), 0.0, base)
    return base, tl.exp2(sink - base)


@jit
def lse_of(base, total, spec: tl.constexpr):
    """Return the log-sum-exp of weights whose sum is ``total * 2**base``, as a natural or base-2
    logarithm."""
    lse = base + tl.log2(tl.where(total > 0, total, 1.0))
    lse = tl.where(total > 0, lse, float("-inf"))
    return lse if spec.IS_LSE_BASE_2 else lse * LN2


@jit(do_not_specialize=["batch", "rank"])
def kernel_attend(query, kv, parts, scale, soft_cap, batch, rank, spec: tl.constexpr):
    """Store the parts of all tiles. Grid (programs,)."""
    attend(query, kv, parts, scale, soft_cap, batch, rank, spec)


@jit(do_not_specialize=["batch", "rank", "programs"])
def kernel_combine(
    lens_ptr, parts, target, batch, rank, programs, IS_FINAL: tl.constexpr, spec: tl.constexpr,
):  # fmt: skip
    """Combine the parts of this rank. Grid (items,).

    If IS_FINAL is false, other ranks have parts too. The LSE then is in base 2 and without sinks.
    """
    begins, ends, _, _ = local_keys(lens_ptr, batch, rank, spec)
    units = units_of(begins, ends, batch, spec)
    out, lse, row, head, valid, chunk = combine_item(parts, units, programs, tl.program_id(0), spec)
    if IS_FINAL:
        base, sink = with_sink(lse, target.sinks, head, valid)
        weight = tl.exp2(lse - base)
        out = out * (weight / tl.where(weight + sink > 0, weight + sink, 1.0))[:, None]
        lse = lse_of(base, weight + sink, spec)
    # Rows are sorted by shards of OUT_HEADS heads.
    index = (head // spec.OUT_HEADS * batch * spec.Q_LEN + row) * spec.OUT_HEADS
    index = (index + head % spec.OUT_HEADS).to(tl.int64)
    column = chunk * spec.COLUMNS + tl.arange(0, spec.COLUMNS)
    mask = valid[:, None] & (column < spec.DV)[None, :]
    out_ptr = target.out + index[:, None] * target.row_stride + column[None, :]
    tl.store(out_ptr, out.to(target.out.dtype.element_ty), mask=mask)
    tl.store(target.lse + index * target.lse_stride, lse, mask=valid & (chunk == 0))


@jit(do_not_specialize=["rows", "rank"])
def kernel_merge(
    partial, target, rows, rank, ROWS: tl.constexpr, COLUMNS: tl.constexpr, spec: tl.constexpr
):
    """Merge the partial outputs [NUM_RANKS, rows] of all ranks. Grid (blocks of ROWS rows,)."""
    NUM_RANKS: tl.constexpr = spec.NUM_RANKS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid, column = row < rows, tl.arange(0, COLUMNS)
    mask = valid[:, None] & (column < spec.DV)[None, :]
    max_lse = tl.full([ROWS], float("-inf"), tl.float32)
    for source in tl.static_range(NUM_RANKS):
        source_row = (source * rows + row).to(tl.int64)
        lse_ptr = partial.lse + source_row * partial.lse_stride
        max_lse = tl.maximum(max_lse, tl.load(lse_ptr, mask=valid, other=float("-inf")))
    head = row % spec.OUT_HEADS
    if spec.OUT_HEADS < spec.HEADS:
        head += rank * spec.OUT_HEADS
    base, total = with_sink(max_lse, target.sinks, head, valid)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for source in tl.static_range(NUM_RANKS):
        source_row = (source * rows + row).to(tl.int64)
        lse_ptr = partial.lse + source_row * partial.lse_stride
        weight = tl.exp2(tl.load(lse_ptr, mask=valid, other=float("-inf")) - base)
        out_ptr = partial.out + source_row[:, None] * partial.row_stride + column[None, :]
        acc += tl.load(out_ptr, mask=mask, other=0.0).to(tl.float32) * weight[:, None]
        total += weight
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_ptr = target.out + row.to(tl.int64)[:, None] * target.row_stride + column[None, :]
    tl.store(out_ptr, out.to(target.out.dtype.element_ty), mask=mask)
    tl.store(target.lse + row * target.lse_stride, lse_of(base, total, spec), mask=valid)
