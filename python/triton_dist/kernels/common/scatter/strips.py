"""Strips of rows, and the programs that add them in a sum of products (``scatter/one_launch.py``).

The tiles of a product are numbered down its columns of tiles, and program p multiplies one of each
*wave*: those with the numbers p, p + NUM_SMS, …. What a rank adds is in part of the rows of tiles,
``own_tiles`` of the ``tiles_m`` of each column. Each own tile is cut in *strips* of ``STRIP_ROWS``
rows, and those of a column are dealt out evenly to ``tiles_m`` programs, from the one on that
multiplied the first of them:

    tiles_m = 4, own tile 2, 4 strips       program 0   1   2   3   4   5   6   7   8   9
                                            strip           0   1   2   3   4   5   6   7
                                            of tile         2   2   2   2   6   6   6   6

So all programs add, and who adds a strip has a number that is no smaller than that of who
multiplied it; those of a wave's last column go to as many programs as there are. The reason is the
order in which programs begin: see ``scatter/one_launch.py``.
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
def _strips_before(number, first, own_tiles, tiles_m, STRIPS: tl.constexpr):
    """Strips of tiles with numbers below ``number``."""
    of_column = tl.minimum(tl.maximum(number % tiles_m - first, 0), own_tiles)
    return (number // tiles_m * own_tiles + of_column) * STRIPS


@jit
def _dealt_before(
    program, wave, begin, end, first, own_tiles, tiles_m, num_programs, STRIPS: tl.constexpr
):
    """The first of the strips from ``begin`` to ``end``, all of a wave, that goes to ``program`` or
    to a later one."""
    of_column = own_tiles * STRIPS
    dealt = tl.cdiv(tl.maximum(wave + program - first, 0) * of_column, tiles_m)
    # Those of the wave's last column go to as many programs as there are from ``lowest`` on.
    last = tl.maximum((end - 1) // of_column * of_column, begin)
    tile = last // STRIPS
    lowest = tile // own_tiles * tiles_m + first + tile % own_tiles - wave
    width = tl.minimum(tl.cdiv((end - last) * tiles_m, of_column), num_programs - lowest)
    dealt_of_last = last + tl.cdiv(tl.maximum(program - lowest, 0) * (end - last), width)
    earlier = tl.minimum(tl.maximum(dealt, begin), last)
    return tl.where(program < lowest, earlier, tl.minimum(dealt_of_last, end))


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
    next_wave = tl.minimum(wave + NUM_SMS, tiles_m * tiles_n)
    begin = _strips_before(wave, first, own_tiles, tiles_m, STRIPS)
    end = _strips_before(next_wave, first, own_tiles, tiles_m, STRIPS)
    program, programs = tl.program_id(0), tl.num_programs(0)
    dealt, dealt_next = end, end
    if begin < end:
        dealt = _dealt_before(
            program, wave, begin, end, first, own_tiles, tiles_m, programs, STRIPS
        )
        dealt_next = _dealt_before(
            program + 1, wave, begin, end, first, own_tiles, tiles_m, programs, STRIPS
        )
    return dealt, dealt_next


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


def programs_for(tiles_m: int, tiles_n: int, last_begin: int, block_m: int) -> int:
    """Number of programs that have something to do in a wave of all tiles, where the rank with the
    last rows begins with row ``last_begin``: its last strips go to programs that multiply nothing.
    """
    return tiles_m * tiles_n + min(last_begin // block_m, tiles_m - 1)
