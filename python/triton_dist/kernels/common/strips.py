"""Which program adds which rows of a sum of products (``exchanged_gemm.py``).

The tiles of a product are numbered down its columns of tiles, and program p multiplies those with
the numbers p, p + NUM_SMS, …, one of each *wave*. What a rank adds is in part of the rows of tiles:
``own_tiles`` of the ``tiles_m`` of each column. Each of these is cut in *strips* of
``STRIP_ROWS`` rows, and the strips of a column are dealt out evenly to ``tiles_m`` numbers, from
that of the first own tile on:

    tiles_m = 4, own tile 2, 4 strips       number  0   1   2   3   4   5   6   7   8   9
                                            strip           0   1   2   3   4   5   6   7
                                            of tile         2   2   2   2   6   6   6   6

So all programs add, and who adds a strip has a number that is no smaller than that of who
multiplied it; of a wave's last tiles what goes beyond the last program stays with that one. The
reason is the order in which programs begin: see ``exchanged_gemm.py``.
"""

from __future__ import annotations

import triton.language as tl

from triton_dist._jit import jit


@jit
def own_tiles_of(own_begin, own_end, BLOCK_SIZE_M: tl.constexpr):
    """(first, how many) of the rows of tiles in which the rows from ``own_begin`` to ``own_end``
    are."""
    first = own_begin // BLOCK_SIZE_M
    return first, tl.maximum(tl.cdiv(own_end, BLOCK_SIZE_M) - first, 0)


@jit
def _dealt_before(number, first, strips, tiles_m):
    """Strips that are dealt to numbers below ``number``; ``strips`` are those of a column."""
    return tl.cdiv(tl.maximum(number - first, 0) * strips, tiles_m)


@jit
def _multiplied_before(number, first, own_tiles, tiles_m, STRIPS: tl.constexpr):
    """Strips of tiles with numbers below ``number``."""
    of_column = tl.minimum(tl.maximum(number % tiles_m - first, 0), own_tiles)
    return (number // tiles_m * own_tiles + of_column) * STRIPS


@jit
def strips_of_program(
    wave,
    own_begin,
    own_end,
    tiles_m,
    tiles_n,
    NUM_SMS: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    STRIP_ROWS: tl.constexpr,
):
    """(first, end) of the strips that this program adds, of the wave of tiles that begins with
    number ``wave``."""
    STRIPS: tl.constexpr = BLOCK_SIZE_M // STRIP_ROWS
    first, own_tiles = own_tiles_of(own_begin, own_end, BLOCK_SIZE_M)
    number = wave + tl.program_id(0)
    strips = own_tiles * STRIPS
    begin = _dealt_before(number, first, strips, tiles_m)
    begin = tl.maximum(begin, _multiplied_before(wave, first, own_tiles, tiles_m, STRIPS))
    next_wave = tl.minimum(wave + NUM_SMS, tiles_m * tiles_n)
    end = _multiplied_before(next_wave, first, own_tiles, tiles_m, STRIPS)
    if tl.program_id(0) < tl.num_programs(0) - 1:
        end = tl.minimum(end, _dealt_before(number + 1, first, strips, tiles_m))
    return begin, end


@jit
def place_of_strip(
    strip, own_begin, own_end, tiles_m, BLOCK_SIZE_M: tl.constexpr, STRIP_ROWS: tl.constexpr
):
    """(row, end, n, number) of a strip: it begins with ``row`` of the own ones and ends before
    ``end`` at the latest, is in column ``n`` of tiles, and in the tile of that number. One of a
    tile that is not all own may be empty."""
    STRIPS: tl.constexpr = BLOCK_SIZE_M // STRIP_ROWS
    first, own_tiles = own_tiles_of(own_begin, own_end, BLOCK_SIZE_M)
    n = strip // (own_tiles * STRIPS)
    m = first + strip // STRIPS % own_tiles
    row = tl.maximum(m * BLOCK_SIZE_M, own_begin) + strip % STRIPS * STRIP_ROWS
    end = tl.minimum((m + 1) * BLOCK_SIZE_M, own_end)
    return row - own_begin, end - own_begin, n, n * tiles_m + m


def strip_numbers(tiles_m: int, tiles_n: int, last_begin: int, block_m: int) -> int:
    """How many numbers strips are dealt to, where the rank with the last rows begins with row
    ``last_begin``."""
    return tiles_m * tiles_n + min(last_begin // block_m, tiles_m - 1)
