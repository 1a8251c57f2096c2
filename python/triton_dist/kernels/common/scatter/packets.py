"""Sum of products over ranks in one launch, for few rows, whose tiles are sent in packets.

This is the one-shot all-reduce of ``scatter/one_launch.py`` without flags. A program sends a tile
from registers to all peers in packets, words that mark their own arrival (``exchange/packets.py``).
It adds the tiles of peers in registers and stores only C. A program finishes each tile before it
begins the next tile.

    lines     [M, cdiv(N, line)]    a line has 4 elements of 16 bits, or 2 of 32 bits, in the order
                                    of C; the last line of a row may be partly unused

The tiles of all ranks are rounded to the output's dtype and added in fp32 in the order of ranks.
The result is bitwise equal to the result of ``exchanged_gemm``.

*No deadlock.* On all ranks, programs with equal numbers have equal tiles in equal order, and send a
tile before they wait for it. Among the waiting programs with the smallest number, take the program
with the earliest tile. The programs with its number on other ranks have sent this tile, are
running, or have not started. They will start, because programs with smaller numbers do not wait.

===================  =========  ============================  ====================
argument             dtype      shape                         written by
===================  =========  ============================  ====================
a, b                 of A       [M, K], [K, N], ``strides``   caller
out.c                of C       [M, N]                        this kernel
out.bias             of C       [N], or ``None``              caller
scales               fp32       ``gemm.scales.Scales``        caller
packets              int64      see ``exchange/packets.py``   kernels of the sources
M, rank              int        not specialised               host
tile                 constants  ``Tile``                      host
===================  =========  ============================  ====================
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_dist._jit import jit
from triton_dist.kernels.common.exchange.packets import (
    add_lines,
    await_lines,
    clear_lines,
    packet_offset,
    packet_tag,
    packet_targets,
    payload_of,
    send_lines,
)
from triton_dist.kernels.common.exchange.protocol import LINE_BYTES, Packets, begin_call
from triton_dist.kernels.common.gemm.scales import NO_SCALES, Scales
from triton_dist.kernels.common.gemm.tile import Strides, tile_in_group
from triton_dist.kernels.common.scatter.algorithms import ExchangeLaunch
from triton_dist.kernels.common.scatter.one_launch import num_exchange_programs, one_launch_options
from triton_dist.kernels.common.scatter.partials import SumOutput
from triton_dist.kernels.common.scatter.tiles import make_operands, multiply_operands
from triton_dist.runtime.launch import Launch, normalise_strides


@jit(do_not_specialize=["M", "rank"])
def kernel_gemm_packets(
    a_ptr,
    b_ptr,
    strides,
    out,
    scales,
    packets,
    N,
    K,
    M,
    rank,
    NUM_RANKS: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    tile: tl.constexpr,
):
    """Multiply, exchange packets and add in one launch. Grid (programs,), at most ``MAX_CTAS``.

    ``DESCRIPTORS``: read A and B through tensor descriptors (TMA from sm_90 on), otherwise by
    pointers with any strides.
    """
    BLOCK_SIZE_M: tl.constexpr = tile.M
    BLOCK_SIZE_N: tl.constexpr = tile.N
    DTYPE: tl.constexpr = out.c.dtype.element_ty
    ELEMENTS_PER_LINE: tl.constexpr = LINE_BYTES // (DTYPE.primitive_bitwidth // 8)
    LINES_PER_TILE_ROW: tl.constexpr = BLOCK_SIZE_N // ELEMENTS_PER_LINE
    # Operations that do not need the product come first, to overlap with it.
    targets = packet_targets(packets, rank, NUM_RANKS)
    epoch = begin_call(packets.calls)
    tag = packet_tag(epoch, M)
    tiles_m = tl.cdiv(M, BLOCK_SIZE_M)
    tiles_n = tl.cdiv(N, BLOCK_SIZE_N)
    a, b = make_operands(a_ptr, b_ptr, M, N, K, strides.bk, strides.bn, DESCRIPTORS, tile)
    for tile_number in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        m, n = tile_in_group(tile_number, tiles_m, tiles_n, tile.GROUP_M)
        row, column = m * BLOCK_SIZE_M, n * BLOCK_SIZE_N
        product = multiply_operands(a, b, row, column, M, N, K, strides, scales, DESCRIPTORS, tile)
        own_payload = payload_of(product.to(DTYPE))
        line_in_tile = tl.arange(0, BLOCK_SIZE_M * LINES_PER_TILE_ROW)
        line_row = row + line_in_tile // LINES_PER_TILE_ROW
        line_column = n * LINES_PER_TILE_ROW + line_in_tile % LINES_PER_TILE_ROW
        lines_n = tl.cdiv(N, ELEMENTS_PER_LINE)
        line = line_row * lines_n + line_column
        valid = (line_row < M) & (line_column < lines_n)
        own_payload = _to_line_layout(own_payload, valid)
        offset = packet_offset(epoch, rank, packets.shard_words, NUM_RANKS)
        send_lines(targets, offset, own_payload, line, valid, tag)
        payloads = await_lines(packets, epoch, tag, line, valid, rank, NUM_RANKS)
        total = add_lines(own_payload, payloads, rank, NUM_RANKS, DTYPE)
        # Keep the layout of lines, in which the thread that polled a line also stores its sum.
        total = tl.reshape(total, [BLOCK_SIZE_M * LINES_PER_TILE_ROW, ELEMENTS_PER_LINE])
        columns = (line_column * ELEMENTS_PER_LINE)[:, None] + tl.arange(0, ELEMENTS_PER_LINE)[
            None, :
        ]
        mask = valid[:, None] & (columns < N)
        if out.bias is not None:
            total += tl.load(out.bias + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(out.c + (line_row * N)[:, None] + columns, total.to(DTYPE), mask=mask)
        clear_lines(packets, epoch, line, valid, rank, NUM_RANKS)


@jit
def _to_line_layout(payload, valid):
    """Return ``payload`` [lines, 2] in the register layout of received payloads.

    In this layout a thread holds full lines. Converting this rank's payload once avoids converting
    the payload of each peer.
    """
    first, second = tl.split(payload)
    return tl.join(tl.where(valid, first, 0), tl.where(valid, second, 0))


def packet_bytes_of_row(N: int, item_bytes: int) -> int:
    """Return the bytes of data, without tags, of a row of C in packets."""
    line: int = LINE_BYTES.value
    return -(-N * item_bytes // line) * line


def packet_gemm(
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    bias: torch.Tensor | None,
    config: triton.Config,
    packets: Packets,
    *,
    rank: int,
    num_ranks: int,
    num_sms: int,
    persistent: bool,
    scales: tuple[Scales, int] = (NO_SCALES, 0),
) -> Launch:
    """Return the launch that computes ``A @ B``, sends it to all ranks in packets, and stores the
    sum in C.

    The packet memory of each source rank must hold C [M, N]. ``persistent``: read A and B through
    descriptors if TMA supports their layout.
    """
    A = normalise_strides(A)
    (M, K), N = A.shape, B.shape[1]
    strides, out = Strides(*A.stride(), *B.stride()), SumOutput(C, bias, None, None)
    options = one_launch_options(A, B, config, persistent, scales[1]) | {"NUM_RANKS": num_ranks}
    num_ctas = num_exchange_programs(config, M, N, num_sms, num_ranks, to_owners=False)
    arguments = (A, B, strides, out, scales[0], packets, N, K, M, rank)
    return Launch(kernel_gemm_packets, (num_ctas,), arguments, options)


class PacketLaunch(ExchangeLaunch):
    """The launch of a call that sends packets. Every rank adds all rows."""

    def num_phases(self) -> int:
        return 0

    def gemm(self, C: torch.Tensor) -> Launch:
        call, buffer = self.call, self.buffer
        return packet_gemm(
            call.A, call.B, C, call.bias, call.gemm_config, buffer.packet_regions(),
            rank=buffer.rank, num_ranks=buffer.num_ranks, num_sms=buffer.device.num_sms,
            persistent=call.persistent, scales=call.scaling.kernel_argument(call.A, call.B),
        )  # fmt: skip
