"""DeepEP's ``Buffer`` under its own name, in programs that change only the import."""

from __future__ import annotations

import pytest

from tests.distributed import deep_ep_ranks
from triton_dist import deep_ep
from triton_dist.errors import InvalidArgument

UNTUNED = {"TRITON_DIST_AUTOTUNE": "0"}


def test_many_tokens(on_two):
    on_two(deep_ep_ranks.many_tokens, env=UNTUNED)


def test_few_tokens(on_two):
    on_two(deep_ep_ranks.few_tokens, env=UNTUNED)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"comm": 1}, "comm is 1, expected None: pass a process group"),
        ({"enable_shrink": True}, "no rank can be masked"),
        ({"allow_nvlink_for_low_latency_mode": False}, "RDMA is not supported"),
    ],
)
def test_refused_buffers(options, message):
    with pytest.raises(InvalidArgument, match=message):
        deep_ep.Buffer(None, **options)


def test_refused_calls_and_configs():
    with pytest.raises(InvalidArgument, match="ranks of one host: RDMA is not supported"):
        deep_ep.Buffer.internode_dispatch(None, x=None)
    with pytest.raises(InvalidArgument, match="new_num_sms is 3, expected an even number"):
        deep_ep.Buffer.set_num_sms(3)
    before = deep_ep.Buffer.num_sms
    try:
        deep_ep.Buffer.set_num_sms(8)
        assert deep_ep.Buffer.get_combine_config(2).num_sms == 8
    finally:
        deep_ep.Buffer.num_sms = before
