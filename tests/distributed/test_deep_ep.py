"""DeepEP's ``Buffer`` under its own name, in programs that change only the import."""

from __future__ import annotations

import pytest

from tests.distributed import deep_ep_ranks
from triton_dist import deep_ep
from triton_dist.deep_ep import EventOverlap
from triton_dist.errors import InvalidArgument
from triton_dist.runtime.device import current_device

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


def test_calls_on_different_streams_run_in_order(monkeypatch):
    """A context serves one call at a time, so a call waits for the last call on another stream."""
    device, waits = current_device(), []
    stream, capturing = [1], [False]
    monkeypatch.setattr(type(device), "current_stream", lambda _: stream[0])
    monkeypatch.setattr(type(device), "is_capturing", lambda _: capturing[0])
    monkeypatch.setattr(
        type(device), "record_event", lambda _, s=stream: lambda *_, at=s[0]: waits.append(at)
    )

    def fork(_, work, *inputs, after_current):
        waits.append(stream[0]) if after_current else None
        before, stream[0] = stream[0], 9
        work()
        stream[0] = before

    monkeypatch.setattr(type(device), "fork", fork)
    buffer = deep_ep.Buffer(None)

    def call(on: int, is_async: bool = False, previous=None) -> tuple[list[int], EventOverlap]:
        stream[0] = on
        waits.clear()
        result, event = buffer._run("rows", lambda: 5, previous, is_async)
        assert result == 5
        return waits[:], event

    assert call(1)[0] == []
    assert call(1)[0] == []
    assert call(2)[0] == [1]
    waited, event = call(2, is_async=True)
    assert waited == [2, 2]  # all work of the stream, and the last call
    stream[0] = 3
    event.current_stream_wait()
    assert call(3)[0] == []
    assert call(2)[0] == [3]
    waited, event = call(1, True, EventOverlap())
    assert waited == [1, 2]
    assert call(2)[0] == [9]  # stream 2 has not waited for this call
    capturing[0] = True
    assert call(4)[0] == []  # the last call is not in the graph
    assert call(5, is_async=True)[0] == [5]
    assert call(5)[0] == [9]
    capturing[0] = False
    assert call(1)[0] == []
