"""A grouped product: each row of A times the weights of the expert that its route goes to.

Rows of A are gathered in the load, by pointers; weights come through a 3-D descriptor, or by
pointers where TMA cannot read them. A 2-D view of all weights would do too, but behind the last
row of an expert lies the next one's: what is read there has to be zero, since 0 times NaN is not.

The grid is persistent and takes the number of tiles from memory (``moe/routing.py``). A tile that
is nobody's has no steps along K and stores zeros. So every row of the output is written.

Rows of A may come from peers while the kernel runs, brought by copy engines (``slots/gathered.py``)
in the order of positions of the map. The own rows are read where they lie. A tile waits until the
last position that it has rows of has come; a program that has waited for a position has waited for
all before it, and never does so again. Tiles of nobody wait too: who has run has seen every peer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.kernels.common.gemm.spaces import config_for
from triton_dist.kernels.common.gemm.tile import shard_in_arrival_order, tile_in_group
from triton_dist.kernels.common.launch import Launch, dot_precision
from triton_dist.kernels.common.moe.routing import RECORD, BlockMap
from triton_dist.kernels.common.peers import GatheredShards, flag_of, guard_of
from triton_dist.runtime.device import current_device

_ALIGNMENT = 16


@jit
def unit_of_run(tiles_ptr, unit, tiles_n, BLOCK_SIZE_M: tl.constexpr, GROUP_SIZE_M: tl.constexpr):
    """(expert, first row, end of rows, column tile, tile) of the ``unit``-th unit of work.

    A run of L tiles from the a-th on owns units ``a * tiles_n`` to ``(a + L) * tiles_n``. So tile
    ``unit // tiles_n`` is one of the unit's own run, and its record leads to the right one.
    """
    record = tiles_ptr + unit // tiles_n * RECORD
    expert = tl.load(record)
    row = tl.load(record + 1)
    end = tl.load(record + 2)
    first = tl.load(record + 3)
    tiles = tl.load(record + 4)
    m, n = tile_in_group(unit - first * tiles_n, tiles, tiles_n, GROUP_SIZE_M)
    return expert, row + m * BLOCK_SIZE_M, end, n, first + m


@jit
def await_positions(
    awaited,
    last,
    arrivals_ptr,
    epoch_ptr,
    rank,
    shard_rows,
    NUM_SOURCES: tl.constexpr,
    FLAGS_PER_RANK: tl.constexpr,
):
    """Wait until the shards of positions behind ``awaited``, up to ``last``, are there; gives the
    last position that was awaited so far, and a token."""
    token = 0
    while awaited < last:
        awaited += 1
        source = shard_in_arrival_order(awaited, rank, NUM_SOURCES)
        flag = flag_of(epoch_ptr, shard_rows)
        token += dl.wait(arrivals_ptr + source * FLAGS_PER_RANK, 1, flag, guard_of(epoch_ptr), True)
    return awaited, token


@jit
def load_weights(
    b,
    expert,
    k,
    column,
    N,
    K,
    stride_be,
    stride_bk,
    stride_bn,
    DESCRIPTORS: tl.constexpr,
    B_COLUMN_MAJOR: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
):
    """[BLOCK_SIZE_K, COLUMNS] of an expert's weights; zero behind K. ``b``: a descriptor, or the
    pointer."""
    if DESCRIPTORS:
        if B_COLUMN_MAJOR:
            return tl.reshape(b.load([expert, column, k]), (COLUMNS, BLOCK_SIZE_K)).T
        else:
            return tl.reshape(b.load([expert, k, column]), (BLOCK_SIZE_K, COLUMNS))
    else:
        row = k + tl.arange(0, BLOCK_SIZE_K)
        n = column + tl.arange(0, COLUMNS)
        base = b + expert.to(tl.int64) * stride_be
        return tl.load(
            base + row.to(tl.int64)[:, None] * stride_bk + n.to(tl.int64)[None, :] * stride_bn,
            mask=(row < K)[:, None] & (n < N)[None, :],
            other=0.0,
        )


@jit(do_not_specialize=["E", "routes_of_row", "rank", "shard_rows"])
def kernel_grouped_gemm(
    a_ptr,
    b_ptr,
    c_ptr,
    routes_ptr,
    tiles_ptr,
    num_tiles_ptr,
    E,
    N,
    K,
    stride_am,
    stride_be,
    stride_bk,
    stride_bn,
    width,
    routes_of_row,
    A_ALIGNED: tl.constexpr,
    C_ALIGNED: tl.constexpr,
    SORTED: tl.constexpr,
    SILU_MUL: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    B_COLUMN_MAJOR: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
    own_ptr=None,
    arrivals_ptr=None,
    epoch_ptr=None,
    rank=0,
    shard_rows=1,
    NUM_SOURCES: tl.constexpr = 1,
    FLAGS_PER_RANK: tl.constexpr = 1,
):
    """C [R, width] of A's rows, ``routes_of_row`` routes each, and B [E, K, N]; any grid.

    ``SORTED``: C's rows are sorted by expert, else they are in the order of routes.
    ``SILU_MUL``: ``width`` is N / 2, and C is silu(left half) * right half; a tile has as many
    columns of each half as one of the product would have in all, halved.
    ``NUM_SOURCES`` above 1: rows come in shards of ``shard_rows``, the own ones at ``own_ptr``, the
    others at their places in A once their flags are set (``peers.GatheredShards``).
    """
    COLUMNS: tl.constexpr = BLOCK_SIZE_N // 2 if SILU_MUL else BLOCK_SIZE_N
    tiles_n = tl.cdiv(width, COLUMNS)
    b = b_ptr
    if DESCRIPTORS:
        if B_COLUMN_MAJOR:
            b = tl.make_tensor_descriptor(
                b_ptr, [E, N, K], [stride_be, stride_bn, 1], [1, COLUMNS, BLOCK_SIZE_K]
            )
        else:
            b = tl.make_tensor_descriptor(
                b_ptr, [E, K, N], [stride_be, stride_bk, 1], [1, BLOCK_SIZE_K, COLUMNS]
            )
    k = tl.arange(0, BLOCK_SIZE_K)
    units = tl.load(num_tiles_ptr) * tiles_n
    awaited = 0
    own_rows_ptr = a_ptr
    if NUM_SOURCES > 1:  # where all rows would begin if they lay around the own ones
        own_rows_ptr = own_ptr - tl.cast(rank, tl.int64) * shard_rows * stride_am
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        expert, row, end, n, tile = unit_of_run(
            tiles_ptr, unit, tiles_n, BLOCK_SIZE_M, GROUP_SIZE_M
        )
        column = n * COLUMNS
        rows = row + tl.arange(0, BLOCK_SIZE_M)
        inside = rows < end
        route = tl.load(routes_ptr + rows, mask=inside, other=0)
        a_row = route // routes_of_row
        rows_ptr = a_ptr
        if NUM_SOURCES > 1:
            last = tl.load(tiles_ptr + tile * RECORD + 6)
            awaited, token = await_positions(
                awaited, last, arrivals_ptr, epoch_ptr, rank, shard_rows, NUM_SOURCES,
                FLAGS_PER_RANK,
            )  # fmt: skip
            a_row = dl.consume_token(a_row, token)
            is_own = (a_row >= rank * shard_rows) & (a_row < (rank + 1) * shard_rows)
            rows_ptr = tl.where(is_own, own_rows_ptr, a_ptr)
        a_rows = rows_ptr + a_row.to(tl.int64) * stride_am
        if A_ALIGNED:
            a_rows = tl.multiple_of(a_rows, 16)
        product = tl.zeros((BLOCK_SIZE_M, COLUMNS), tl.float32)
        if SILU_MUL:
            up = tl.zeros((BLOCK_SIZE_M, COLUMNS), tl.float32)
        # Nobody has no weights.
        steps = tl.where(expert < E, tl.cdiv(K, BLOCK_SIZE_K), 0)
        with dl.mark("mma"):
            for step in range(steps):
                at = step * BLOCK_SIZE_K
                # Weights first: they need not wait until routes are there.
                weights = load_weights(
                    b, expert, at, column, N, K, stride_be, stride_bk, stride_bn,
                    DESCRIPTORS, B_COLUMN_MAJOR, COLUMNS, BLOCK_SIZE_K,
                )  # fmt: skip
                a = tl.load(
                    a_rows[:, None] + (at + k)[None, :],
                    mask=inside[:, None] & (at + k < K)[None, :],
                    other=0.0,
                )
                product = tl.dot(a, weights, product, input_precision=INPUT_PRECISION)
                if SILU_MUL:
                    weights = load_weights(
                        b, expert, at, width + column, N, K, stride_be, stride_bk, stride_bn,
                        DESCRIPTORS, B_COLUMN_MAJOR, COLUMNS, BLOCK_SIZE_K,
                    )  # fmt: skip
                    up = tl.dot(a, weights, up, input_precision=INPUT_PRECISION)
        if SILU_MUL:
            product = product / (1.0 + tl.exp(-product)) * up
        out = rows if SORTED else route
        c_rows = c_ptr + out.to(tl.int64) * width
        if C_ALIGNED:
            c_rows = tl.multiple_of(c_rows, 16)
        columns = column + tl.arange(0, COLUMNS)
        with dl.mark("store"):
            tl.store(
                c_rows[:, None] + columns[None, :],
                product.to(c_ptr.dtype.element_ty),
                mask=inside[:, None] & (columns < width)[None, :],
            )


def fits_weights_descriptor(B: torch.Tensor) -> bool:
    """Tell whether TMA can read B [E, K, N] as it lies: N or K of unit stride, all other strides
    and the start multiples of 16 bytes."""
    by_expert, *inner = B.stride()
    strides = (max(inner), by_expert if B.shape[0] > 1 else _ALIGNMENT)
    return (
        min(inner) == 1
        and all(stride and stride * B.element_size() % _ALIGNMENT == 0 for stride in strides)
        and B.data_ptr() % _ALIGNMENT == 0
    )


def weights_layout(B: torch.Tensor) -> str:
    """Kind of strides of B [E, K, N]: ``"row-major"``, ``"column-major"``, or ``"strided"``, which
    pointers serve."""
    if not fits_weights_descriptor(B):
        return "strided"
    return "column-major" if B.stride(1) == 1 else "row-major"


def grouped_product(
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    blocks: BlockMap,
    config: triton.Config,
    *,
    is_sorted: bool = False,
    silu_mul: bool = False,
    gathered: GatheredShards | None = None,
    rank: int = 0,
) -> Launch:
    """The launch that computes C [R, N], or [R, N / 2] with ``silu_mul``.

    Args:
        A: [M, K], one row a token, or [R, K], one row a route; unit stride along K.
        B: [E, K, N], any strides.
        C: contiguous.
        blocks: map with tiles of the config's BLOCK_SIZE_M.
        config: BLOCK_SIZE_M, _N, _K, maybe GROUP_SIZE_M, and PROGRAMS: of the grid, for each
            multiprocessor.
        is_sorted: C's rows are sorted by expert, else in the order of routes.
        gathered: the shards of peers, as they come; then A is the shard of ``rank``, contiguous,
            and the map is of as many sources as there are ranks.
    """
    precision = dot_precision(A.dtype)
    options = config_for(config, A.dtype).all_kwargs()
    options.pop("EPILOGUE_SUBTILE", None)
    options.setdefault("GROUP_SIZE_M", 8)
    programs = current_device().num_sms * options.pop("PROGRAMS", 1)
    columns = options["BLOCK_SIZE_N"] // (2 if silu_mul else 1)
    units = len(blocks.tiles) * -(-C.shape[1] // columns)
    layout = weights_layout(B)
    item = A.element_size()
    # A block of a descriptor begins at a multiple of 16 bytes.
    halves_fit = not silu_mul or layout != "row-major" or C.shape[1] * item % _ALIGNMENT == 0
    sizes = (B.shape[0], B.shape[2], B.shape[1])
    rows, sources = (A, {}) if gathered is None else (gathered.rows, _sources(A, gathered, rank))
    strides = (rows.stride(0), *B.stride())
    rest = (C.shape[1], len(blocks.routes) // rows.shape[0])
    aligned = all(each % _ALIGNMENT == 0 for each in (rows.stride(0) * item, A.data_ptr()))
    return Launch(
        kernel_grouped_gemm,
        (min(programs, units),),
        (rows, B, C, blocks.routes, blocks.tiles, blocks.num_tiles, *sizes, *strides, *rest),
        {
            **options,
            **sources,
            "A_ALIGNED": aligned,
            "C_ALIGNED": C.shape[1] * item % _ALIGNMENT == 0,
            "SORTED": is_sorted,
            "SILU_MUL": silu_mul,
            # Without matrix units, what comes through a descriptor spills.
            "DESCRIPTORS": layout != "strided" and precision != "ieee" and halves_fit,
            "B_COLUMN_MAJOR": layout == "column-major",
            "INPUT_PRECISION": precision,
        },
    )


def _sources(own: torch.Tensor, gathered: GatheredShards, rank: int) -> dict[str, object]:
    """Arguments of a product whose rows come from several ranks."""
    return {
        "own_ptr": own,
        "arrivals_ptr": gathered.arrivals,
        "epoch_ptr": gathered.epoch,
        "rank": rank,
        "shard_rows": own.shape[0],
        "NUM_SOURCES": gathered.rows.shape[0] // own.shape[0],
        "FLAGS_PER_RANK": gathered.flags_per_rank,
    }
