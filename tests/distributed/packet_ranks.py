"""What every rank does in the tests of packets, on CPU ranks and on GPUs alike."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.distributed.calls import DTYPES
from tests.distributed.collective_calls import NO_TAG, ROOM, AllReduce, shape
from triton_dist.errors import WaitTimeout
from triton_dist.kernels.common.exchange.buffer import MAX_CHUNKS, MAX_CTAS
from triton_dist.kernels.common.peers import flag_value
from triton_dist.kernels.nvidia import all_reduce, create_allreduce_ctx
from triton_dist.runtime.device import current_device
from triton_dist.runtime.waits import bounded_waits
from triton_dist.testing.assertions import assert_bitwise_equal

PACKETS = AllReduce.algorithm("packets")
SIZES = (2000, 1, 513, 7, 64)


def many_sizes(rounds: int) -> int:
    """Calls of different sizes follow one another, so that words lie unused for long. Afterwards no
    word is left that was sent: each is 0, or was never written to."""
    calls = AllReduce()
    for number in range(rounds):
        calls(
            SIZES[number % len(SIZES)] + number // len(SIZES) % 3,
            dtype=DTYPES[number % len(DTYPES)], misaligned=number % 7 == 3, num_ctas=2,
            block_bytes=(512, 2048)[number % 2], **PACKETS,
        )  # fmt: skip
        if number % 11 == 5:
            calls(900, num_ctas=2, **AllReduce.algorithm("one_shot"))
    count = calls.check()
    dist.barrier()
    words = calls.ctx.buffer.memory["packets"].local
    untouched = int.from_bytes(bytes([NO_TAG] * 8), "little")
    assert ((words == 0) | (words == untouched)).all()
    assert (words == 0).any()
    assert (words == untouched).any()
    calls.ctx.finalize()
    return count


def tags_come_again(before: int) -> int:
    """Calls from number ``before`` + 1 on, on whose way the bits that a tag has of it wrap."""
    calls = AllReduce()
    memory = calls.ctx.buffer.memory
    memory["calls"].local.fill_(before * MAX_CTAS)
    memory["arrivals"].local.fill_(flag_value(before * MAX_CHUNKS, 0))
    current_device().synchronize()
    dist.barrier()
    for number in range(6):
        calls(700 - 100 * number, **PACKETS, **shape(number))
    return calls.finish()


def odd_values() -> int:
    """NaN with a payload, infinities, zeros of both signs and the smallest numbers: the same bits
    as with flags."""
    rank, size = dist.get_rank(), dist.get_world_size()
    device = current_device().torch_device
    seen = 0
    with create_allreduce_ctx(ROOM, rank, size, size) as ctx:
        for dtype in DTYPES:
            whole = torch.int32 if dtype == torch.float32 else torch.int16
            special = torch.tensor([-0.0, 0.0, 1.0, float("inf"), float("-inf")]).to(dtype)
            nan = torch.full((2,), float("nan"), dtype=dtype)
            bits = torch.cat([special, nan]).view(whole)
            bits[-1] |= 5  # a payload of NaN
            bits = torch.cat([bits, torch.tensor([1, -1], dtype=whole)])  # and the least, and NaN
            x = bits.roll(rank).repeat(30).to(device).view(dtype)
            sums = [
                all_reduce.fn(x, ctx, **AllReduce.algorithm(name), num_ctas=2).view(whole)
                for name in ("packets", "one_shot")
            ]
            current_device().synchronize()
            assert torch.equal(*sums)
            zeros = torch.full((9,), -0.0, dtype=dtype, device=device)
            assert_bitwise_equal(all_reduce.fn(zeros, ctx, **PACKETS), zeros.abs())
            seen += 1
    return seen


def large(elements: int) -> int:
    """More than one launch takes, whatever its shape."""
    calls = AllReduce(4 * elements)
    for number, dtype in enumerate(DTYPES[:2]):
        calls(elements, dtype=dtype, num_ctas=(4, 64)[number % 2], block_bytes=8192, **PACKETS)
    return calls.finish()


def who_is_late(late: int) -> tuple[str, int, int]:
    """All but rank ``late`` call; what they wait for: its name, the tag it should and does have."""
    seen = "", 0, 0
    calls = AllReduce()
    calls(300, num_ctas=2, **PACKETS)
    calls.check()
    dist.barrier()
    if dist.get_rank() == late:
        calls.skip()
    else:
        try:
            with bounded_waits(2.0):  # the others send meanwhile, on a loaded host too
                calls(300, **PACKETS, num_ctas=2)
        except WaitTimeout as error:
            seen = error.flag, error.expected, error.seen
    dist.barrier()
    calls.ctx.reset()
    calls(20, num_ctas=2, **PACKETS)
    calls.finish()
    return seen
