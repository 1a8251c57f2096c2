"""Timelines on GPUs: what calls took on the device, by either profiler."""

from __future__ import annotations

import json

import pytest

from tests.gpu.ranks import few_ranks
from tests.timelines import timeline_ranks
from triton_dist.timelines import trace

pytestmark = [pytest.mark.timeout(600), pytest.mark.gpu]


@few_ranks
def test_a_call_takes_what_its_work_on_the_device_takes(on_gpus, num_ranks, tmp_path):
    told = on_gpus(timeline_ranks.profile_calls, tmp_path)
    merged = trace.read(tmp_path / "region_merged.json.gz")
    assert [rank["device"] for rank in merged[trace.SCOPE]["ranks"]] == ["cuda"] * num_ranks
    calls = [call for call in trace.calls_of(merged) if "shape" in call]
    assert len(calls) == 2 * num_ranks
    base = merged["baseTimeNanoseconds"]
    for call in calls:
        begin, end = told[call["rank"]]["spans"][call["op"]]
        assert call["on_device"]
        assert call["link_bytes"] == told[call["rank"]]["costs"][call["op"]].link_bytes
        assert 0 < call["ms"] < (end - begin) / 1e6 + 1
        began = base + call["begin_us"] * 1000
        assert begin - 2e6 < began < end + 2e6


@few_ranks
def test_proton_keeps_the_work_of_ops(on_gpus, num_ranks, tmp_path):
    told = on_gpus(timeline_ranks.profile_calls, tmp_path, "proton")
    root, _ = json.loads((tmp_path / "region_merged.hatchet").read_text())
    ranks = [child["frame"]["name"] for child in root["children"]]
    assert ranks == [f"rank {rank}" for rank in range(num_ranks)]
    for place, child in enumerate(root["children"]):
        scopes = {each["frame"]["name"]: each for each in child["children"]}
        for op, cost in told[place]["costs"].items():
            metrics = scopes[f"{op} {timeline_ranks.SHAPE}"]["metrics"]
            assert metrics["flops"] == cost.flops
            assert metrics["link_bytes"] == cost.link_bytes
