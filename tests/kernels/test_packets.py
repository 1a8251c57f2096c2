"""Words of packets, in a world of one; and what is tried of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import triton.language as tl

import triton_dist
from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.exchange.buffer import LaunchParams
from triton_dist.kernels.common.exchange.packets import packet_tag, payload_of, values_of
from triton_dist.kernels.common.exchange.sums import MAX_PACKET_BYTES
from triton_dist.kernels.common.peers import flag_value
from triton_dist.kernels.nvidia import AllReduceMethod, all_reduce, create_allreduce_ctx
from triton_dist.kernels.nvidia.allreduce.algorithms import ALGORITHMS, PACKET_CANDIDATES
from triton_dist.kernels.nvidia.expert_parallel.kernel import store_row
from triton_dist.testing.assertions import assert_bitwise_equal

WHOLE = {
    torch.float8_e4m3fn: torch.int8, torch.float16: torch.int16, torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
}  # fmt: skip


@triton_dist.jit
def there_and_back(x_ptr, payload_ptr, out_ptr, N: tl.constexpr, WORDS: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    payload = payload_of(x)
    tl.store(payload_ptr + tl.arange(0, WORDS), tl.reshape(payload, [WORDS]))
    tl.store(out_ptr + tl.arange(0, N), values_of(payload, x.dtype))


@triton_dist.jit
def untagged(x_ptr, out_ptr, N: tl.constexpr):
    index = tl.arange(0, N)
    store_row(out_ptr + index, tl.load(x_ptr + index), index < N)


@triton_dist.jit
def tag_at(epoch_ptr, tag_ptr, size):
    tl.store(tag_ptr, packet_tag(tl.load(epoch_ptr), size))


@pytest.mark.parametrize("dtype", list(WHOLE), ids=str)
def test_a_payload_is_the_bytes_of_its_elements(dtype):
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(-(2**31), 2**31, (64,), generator=generator, dtype=torch.int64)
    x = bits.to(WHOLE[dtype]).view(dtype)
    payload = torch.empty(x.nbytes // 4, dtype=torch.int32)
    out = torch.empty_like(x)
    there_and_back[(1,)](x, payload, out, N=64, WORDS=payload.numel())
    assert torch.equal(payload, x.view(torch.int32))
    assert_bitwise_equal(out, x)


@pytest.mark.parametrize("dtype", list(WHOLE), ids=str)
def test_untagged_words_are_complements_and_never_zero(dtype):
    bits = torch.arange(-(2**15), 2**15).to(WHOLE[dtype])
    out = torch.empty_like(bits)
    untagged[(1,)](bits.view(dtype), out, N=2**16)
    assert bool((out != 0).all())
    back = (~out).view(dtype)
    same = (~out == bits) | (bits == -1)
    assert bool(same.all())
    assert bool(back[bits == -1].isnan().all())


@pytest.mark.parametrize("epoch", [1, 2, 2**31 - 1, 2**31, 2**32, 2**40 + 7])
def test_a_tag_is_never_zero_and_says_which_call_of_which_size(epoch):
    tags, seen = torch.empty(1, dtype=torch.int32), set()
    for number in (epoch, epoch + 2):
        for size in (0, 1, 17, 2**20 - 1, 2**20 + 40):
            tag_at[(1,)](torch.tensor([number]), tags, size)
            assert int(tags) & 0xFFFFFFFF == flag_value(number, size) & 0x7FFFFFFF | 0x80000000
            seen.add(int(tags))
    assert len(seen) == 10


def test_packets_are_tried_where_they_fit():
    for nbytes, tried in ((2, True), (1 << 14, True), (MAX_PACKET_BYTES, True), (1 << 20, False)):
        x = torch.empty(nbytes // 2, dtype=torch.float16, device="meta")
        for method in (None, AllReduceMethod.ONE_SHOT):
            kept = [
                config["packets"]
                for config in ALGORITHMS.config_space()
                if all_reduce.prune_fn(config, x, SimpleNamespace(num_ranks=2), method=method)
                and config["algorithm"] == "one_shot"
            ]
            assert (True in kept) is tried
            assert False in kept


def test_a_thread_has_a_line_in_each_shape_for_packets():
    for shape in PACKET_CANDIDATES:
        assert shape.num_warps_in_packets * 32 * 8 == shape.block_bytes
    assert LaunchParams(1, 1 << 15).num_warps_in_packets == 32


def test_only_one_shot_goes_in_packets():
    with create_allreduce_ctx(1 << 14, 0, 1, 1) as ctx:
        for algorithm in ("two_shot", "collective"):
            with pytest.raises(InvalidArgument, match="packets is True, expected None or False"):
                all_reduce.fn(torch.ones(4), ctx, algorithm=algorithm, packets=True)
            all_reduce.fn(torch.ones(4), ctx, algorithm=algorithm, packets=False)
