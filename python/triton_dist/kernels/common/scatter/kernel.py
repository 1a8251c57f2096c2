"""GEMM whose tiles go to the ranks that own their rows, and the sum of what arrives.

``A[M, K] @ B[K, N]`` is this rank's addend of a product; M consists of ``NUM_RANKS`` slabs of
``rows`` rows, one owned by each rank; the last ones may be short, or empty. A tile belongs to one
slab and is stored, rounded to the output's dtype, into this rank's part of the owner's slot:

    partials of a slot, on each rank: [source rank, max_rows, N], ``slot_stride`` elements a rank

Where the tiles of slab s go is ``targets_ptr[s]``, an address; what says that they are there are
int32 from ``flags_ptr[s]`` on, also an address. Four ways (``SCATTER``):

``"tile"``      target: the owner's slot; flag ``[tile * NUM_RANKS + rank]`` on the owner is set to
                the epoch.
``"slab"``      target: memory of this rank, from which a copy engine pushes. Each chunk of a slab,
                ``chunk_tiles_m`` rows of tiles, has a counter of its tiles here. After a chunk the
                copy engine sets flag ``[chunk * NUM_RANKS + rank]`` on the owner to the epoch.
``"add"``       target: one fp32 sum on the owner, to which tiles are added by atomics; flags as of
                ``"tile"``. Who finishes a tile of the own slab waits, rounds, and leaves zeros.
``"all"``       an all-reduce: as ``"tile"``, and C is [M, N]: who has added a tile of the own slab
                stores the sum to C and to ``sums_ptr[p]`` of each peer p, addresses, and then sets
                flag ``[tile * NUM_RANKS + rank]`` from ``sum_flags_ptr[p]`` on.
                ``scatter/tiles.py`` brings what arrives there to C.

The own slab comes last: the program that has computed one of its tiles waits for the same tile, or
its chunk, of every peer, and adds them all in fp32 in the order of ranks. So ``"tile"``, ``"slab"``
and ``"all"`` give the same bits on every call; ``"add"`` adds in the order of arrival.

With ``"all"``, slabs come in chunks (``tile_in_scatter_order``), of each chunk the own slab last:
so sums travel while later chunks are multiplied.

Ranks cannot wait in a circle. A wait at one place of the order is for tiles that peers have at
earlier places of theirs. One that waits has announced its tiles of earlier places, and nothing but
these waits keeps it from its next tile. So of all that wait in the end, the one at the earliest
place would have nobody left to wait for, but programs that have not begun. Of one tile a program,
these come later in the order. A persistent program waits only where all have begun, and else leaves
its own tiles to a kernel behind this one (``scatter/tiles.py``).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.kernels.common.gemm.spaces import config_for
from triton_dist.kernels.common.gemm.tile import (
    multiply_tile,
    multiply_tile_by_pointers,
    store_tile,
    tile_in_scatter_order,
)
from triton_dist.kernels.common.launch import Launch, as_rows, dot_precision, fits_descriptor
from triton_dist.kernels.common.peers import target_at
from triton_dist.kernels.common.scatter.partials import Scattering, tiles_of_slab
from triton_dist.kernels.common.scatter.tiles import (
    STAYS,
    add_partials,
    announce_tile,
    announce_to_all,
    await_partials,
    begin_program,
    stay_or_leave,
    store_tile_by_pointers,
    summing_options,
)

# Waves of tiles of a slab from which on a chunk is worth more waiting than each of its tiles.
_MANY_WAVES = 2


@jit(do_not_specialize=["M", "rows", "chunk_tiles_m", "rank"])
def kernel_gemm_scatter_persistent(
    a_ptr,
    b_ptr,
    c_ptr,
    bias_ptr,
    partials_ptr,
    targets_ptr,
    flags_ptr,
    arrivals_ptr,
    epoch_ptr,
    left_ptr,
    sums_ptr,
    sum_flags_ptr,
    M,
    rows,
    N,
    K,
    stride_b,
    slot_stride,
    chunk_tiles_m,
    rank,
    NUM_RANKS: tl.constexpr,
    SCATTER: tl.constexpr,
    ANNOUNCE_LATER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    B_COLUMN_MAJOR: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    NUM_SMS: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
    EPILOGUE_SUBTILE: tl.constexpr,
    REDUCE_ROWS: tl.constexpr,
):
    """Persistent kernel on tensor descriptors (TMA from sm_90 on); grid (min(NUM_SMS, tiles),).

    One loop over the tiles of all slabs: no wave is lost between slabs, and no store is waited for
    there (behind a loop with TMA stores, Triton waits until they have read shared memory).

    ``ANNOUNCE_LATER``: a tile is announced when its program has multiplied its next one. Then its
    TMA store, which takes 10 us and more over NVLink, is complete, and nobody waits for it.

    Of ``"all"``, a tile of the own slab is added when the next tile is stored, and its sum is
    announced when the one after that is multiplied: the own slab comes in the middle of the work,
    where the peers' parts are announced no sooner. The tile that is stored by then is unannounced
    yet, but its place is later than that of the sum.
    """
    stays = STAYS  # or leaves, or 0: has not looked yet
    if NUM_RANKS > 1:
        begin_program(epoch_ptr)
        stays = 0
    tiles_m = tl.cdiv(rows, BLOCK_SIZE_M)
    tiles_n = tl.cdiv(N, BLOCK_SIZE_N)
    tiles_per_slab = tiles_m * tiles_n
    store_n: tl.constexpr = BLOCK_SIZE_N // 2 if EPILOGUE_SUBTILE else BLOCK_SIZE_N

    a_desc = tl.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BLOCK_SIZE_M, BLOCK_SIZE_K])
    if B_COLUMN_MAJOR:
        b_desc = tl.make_tensor_descriptor(
            b_ptr, [N, K], [stride_b, 1], [BLOCK_SIZE_N, BLOCK_SIZE_K]
        )
    else:
        b_desc = tl.make_tensor_descriptor(
            b_ptr, [K, N], [stride_b, 1], [BLOCK_SIZE_K, BLOCK_SIZE_N]
        )
    # One for each slab, to choose from: made in the loop, each would lie in the place of the last
    # one, which a store may still be reading.
    target_descs = tl.tuple([])
    if SCATTER != "add":
        for owner in tl.static_range(NUM_RANKS):
            desc = tl.make_tensor_descriptor(
                target_at(targets_ptr, owner, partials_ptr), [1, rows, N],
                [rows.to(tl.int64) * N, N, 1], [1, BLOCK_SIZE_M, store_n],
            )  # fmt: skip
            target_descs = target_descs + (desc,)  # noqa: RUF005  # a star is no Triton

    own_begin = 0  # of the own rows in C
    if SCATTER == "all":
        own_begin = rank.to(tl.int64) * rows * N
    own_rows = min(rows, M - rank * rows)
    stored_slab, stored_unit = rank, 0  # what is to be announced yet; of the own slab: nothing
    awaited = -1
    # Of "all": an own tile that is to be added yet, and one whose sum is to be announced yet.
    due, due_row, due_column, summed = -1, 0, 0, -1
    for index in range(tl.program_id(0), NUM_RANKS * tiles_per_slab, NUM_SMS):
        slab, tile, m, n = tile_in_scatter_order(
            index, rank, NUM_RANKS, tiles_m, tiles_n,
            chunk_tiles_m if SCATTER == "all" else tiles_m, GROUP_SIZE_M,
        )  # fmt: skip
        unit = m // chunk_tiles_m if SCATTER == "slab" else tile
        row, column = m * BLOCK_SIZE_M, n * BLOCK_SIZE_N
        accumulator = multiply_tile(
            a_desc, b_desc, slab * rows + row, column, K, 0, 1,
            B_COLUMN_MAJOR, INPUT_PRECISION, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K,
        )  # fmt: skip
        if ANNOUNCE_LATER:  # noqa: SIM102  # a constexpr: not to be joined with the other condition
            if stored_slab != rank:
                dl.publish_tile()
                announce_tile(
                    flags_ptr, epoch_ptr, M, stored_slab, stored_unit, rank, NUM_RANKS, SCATTER
                )
                stored_slab = rank
        if SCATTER == "all":  # noqa: SIM102  # a constexpr: not to be joined with the other condition
            if summed >= 0:
                announce_to_all(sum_flags_ptr, epoch_ptr, M, summed, rank, NUM_RANKS)
                summed = -1
        if SCATTER == "add":
            store_tile_by_pointers(
                target_at(targets_ptr, slab, partials_ptr), accumulator, row, column, rows, N,
                SCATTER, BLOCK_SIZE_M, BLOCK_SIZE_N,
            )  # fmt: skip
        else:
            target_desc = target_descs[0]
            for owner in tl.static_range(1, NUM_RANKS):
                if slab == owner:
                    target_desc = target_descs[owner]
            store_tile(
                target_desc, accumulator, 0, row, column,
                EPILOGUE_SUBTILE, BLOCK_SIZE_M, BLOCK_SIZE_N,
            )  # fmt: skip
            if not ANNOUNCE_LATER:
                dl.publish_tile()
        if slab != rank:
            if ANNOUNCE_LATER:
                stored_slab, stored_unit = slab, unit
            else:
                announce_tile(flags_ptr, epoch_ptr, M, slab, unit, rank, NUM_RANKS, SCATTER)
        else:
            if ANNOUNCE_LATER:
                dl.publish_tile()  # to the other threads of this program
            if stays == 0:
                stays = stay_or_leave(epoch_ptr, left_ptr)
            if SCATTER != "all":  # noqa: SIM102  # a constexpr: not to be joined with the other one
                if stays == STAYS:
                    token = 0
                    if unit != awaited:  # tiles of a chunk arrive together
                        token = await_partials(arrivals_ptr, epoch_ptr, M, unit, rank, NUM_RANKS)
                        awaited = unit
                    add_partials(
                        partials_ptr, slot_stride, bias_ptr, c_ptr, row, column, rows, N, token,
                        rank, sums_ptr, own_begin,
                        NUM_RANKS, HAS_BIAS, SCATTER, BLOCK_SIZE_M, BLOCK_SIZE_N, REDUCE_ROWS,
                    )  # fmt: skip
        if SCATTER == "all":
            if due >= 0:
                token = await_partials(arrivals_ptr, epoch_ptr, M, due, rank, NUM_RANKS)
                add_partials(
                    partials_ptr, slot_stride, bias_ptr, c_ptr + own_begin, due_row, due_column,
                    own_rows, N, token, rank, sums_ptr, own_begin,
                    NUM_RANKS, HAS_BIAS, SCATTER, BLOCK_SIZE_M, BLOCK_SIZE_N, REDUCE_ROWS,
                )  # fmt: skip
                summed, due = due, -1
            if (slab == rank) & (stays == STAYS):
                due, due_row, due_column = tile, row, column
    if ANNOUNCE_LATER:  # noqa: SIM102  # a constexpr: not to be joined with the other condition
        if stored_slab != rank:  # of a program whose last tile is for others
            dl.publish_tile()
            announce_tile(
                flags_ptr, epoch_ptr, M, stored_slab, stored_unit, rank, NUM_RANKS, SCATTER
            )
    if SCATTER == "all":
        if summed >= 0:
            announce_to_all(sum_flags_ptr, epoch_ptr, M, summed, rank, NUM_RANKS)
        if due >= 0:
            token = await_partials(arrivals_ptr, epoch_ptr, M, due, rank, NUM_RANKS)
            add_partials(
                partials_ptr, slot_stride, bias_ptr, c_ptr + own_begin, due_row, due_column,
                own_rows, N, token, rank, sums_ptr, own_begin,
                NUM_RANKS, HAS_BIAS, SCATTER, BLOCK_SIZE_M, BLOCK_SIZE_N, REDUCE_ROWS,
            )  # fmt: skip
            announce_to_all(sum_flags_ptr, epoch_ptr, M, due, rank, NUM_RANKS)


@jit(do_not_specialize=["M", "rows", "chunk_tiles_m", "rank"])
def kernel_gemm_scatter_non_persistent(
    a_ptr,
    b_ptr,
    c_ptr,
    bias_ptr,
    partials_ptr,
    targets_ptr,
    flags_ptr,
    arrivals_ptr,
    epoch_ptr,
    sums_ptr,
    sum_flags_ptr,
    M,
    rows,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    slot_stride,
    chunk_tiles_m,
    rank,
    NUM_RANKS: tl.constexpr,
    SCATTER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
    REDUCE_ROWS: tl.constexpr,
):
    """One tile a program on pointers, for any strides of A and B; grid (tiles,)."""
    tiles_m = tl.cdiv(rows, BLOCK_SIZE_M)
    tiles_n = tl.cdiv(N, BLOCK_SIZE_N)
    slab, tile, m, n = tile_in_scatter_order(
        tl.program_id(0), rank, NUM_RANKS, tiles_m, tiles_n,
        chunk_tiles_m if SCATTER == "all" else tiles_m, GROUP_SIZE_M,
    )  # fmt: skip
    unit = m // chunk_tiles_m if SCATTER == "slab" else tile
    row, column = m * BLOCK_SIZE_M, n * BLOCK_SIZE_N
    a_slab_ptr = a_ptr + slab.to(tl.int64) * rows * stride_am
    rows_left = min(rows, M - slab * rows) - row
    accumulator = multiply_tile_by_pointers(
        a_slab_ptr, b_ptr, row, rows_left, column, N, K,
        stride_am, stride_ak, stride_bk, stride_bn,
        INPUT_PRECISION, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K,
    )  # fmt: skip
    target_ptr = target_at(targets_ptr, slab, partials_ptr)
    store_tile_by_pointers(
        target_ptr, accumulator, row, column, rows, N, SCATTER, BLOCK_SIZE_M, BLOCK_SIZE_N
    )
    if slab != rank:
        announce_tile(flags_ptr, epoch_ptr, M, slab, unit, rank, NUM_RANKS, SCATTER)
    else:
        own_begin = 0  # of the own rows in C
        if SCATTER == "all":
            own_begin = rank.to(tl.int64) * rows * N
        token = await_partials(arrivals_ptr, epoch_ptr, M, unit, rank, NUM_RANKS)
        add_partials(
            partials_ptr, slot_stride, bias_ptr, c_ptr + own_begin, row, column,
            min(rows, M - rank * rows), N, token, rank, sums_ptr, own_begin,
            NUM_RANKS, HAS_BIAS, SCATTER, BLOCK_SIZE_M, BLOCK_SIZE_N, REDUCE_ROWS,
        )  # fmt: skip
        if SCATTER == "all":
            announce_to_all(sum_flags_ptr, epoch_ptr, M, unit, rank, NUM_RANKS)


def scattered_gemm(
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    bias: torch.Tensor | None,
    config: triton.Config,
    to: Scattering,
    *,
    num_sms: int,
    persistent: bool,
    num_chunks: int = 1,
) -> Launch:
    """The launch that computes ``A @ B``, scatters its tiles, and sums the own rows into C.

    Args:
        A: [M, K]. B: [K, N], any strides, both. C: [M / num_ranks, N], the own rows of the sum;
            of ``"all"`` [M, N], of which the own ones are written. Contiguous.
        bias: [N], added to the sum; contiguous.
        config, num_sms, persistent: as for ``sharded_gemm``; an A that is not contiguous goes to
            the kernel on pointers too.
        num_chunks: of a slab: each pushed for itself, or of ``"all"`` in turn with those of the
            other slabs.
    """
    A = as_rows(A)
    M, K = A.shape
    rows, N = to.rows(M), C.shape[1]
    precision = dot_precision(A.dtype)
    tiles_per_slab = tiles_of_slab(config, rows, N)
    tiles = to.num_ranks * tiles_per_slab
    slots = (A, B, C, C if bias is None else bias, to.partials, to.targets, to.flags, to.arrivals)
    sums = (to.sums, to.sum_flags, M, rows, N, K)
    chunk_tiles_m, summing = summing_options(C, bias, config, to, rows, num_chunks)
    options: dict[str, Any] = {
        **config_for(config, A.dtype).all_kwargs(),
        "INPUT_PRECISION": precision,
        **summing,
    }
    where = (to.slot_stride, chunk_tiles_m, to.rank)
    # A slab of partials is a matrix like C: what TMA can do with one, it can do with the other.
    by_descriptor = persistent and precision != "ieee" and A.is_contiguous()
    if by_descriptor and fits_descriptor(A, B, C):
        options.setdefault("EPILOGUE_SUBTILE", False)
        # A chunk is pushed after its last tile, which is to be announced at once where the next one
        # is a large part of all.
        later = to.scatter in ("tile", "all") or tiles_per_slab >= _MANY_WAVES * num_sms
        options |= {
            "B_COLUMN_MAJOR": B.stride(0) == 1,
            "NUM_SMS": num_sms,
            "ANNOUNCE_LATER": later and to.scatter != "add",
        }
        return Launch(
            kernel_gemm_scatter_persistent,
            (min(num_sms, tiles),),
            (*slots, to.epoch, to.left, *sums, max(B.stride()), *where),
            options,
        )
    options.pop("EPILOGUE_SUBTILE", None)
    return Launch(
        kernel_gemm_scatter_non_persistent,
        (tiles,),
        (*slots, to.epoch, *sums, *A.stride(), *B.stride(), *where),
        options,
    )
