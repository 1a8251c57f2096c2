"""Timelines on GPUs: what calls took on the device, by either profiler."""

from __future__ import annotations

import json

import pytest
import torch

from tests.gpu.ranks import few_ranks
from tests.timelines import timeline_ranks
from triton_dist.errors import DeviceUnavailable
from triton_dist.profiler_utils import group_profile
from triton_dist.testing import spawn_ranks
from triton_dist.timelines import trace

pytestmark = [pytest.mark.timeout(600), pytest.mark.gpu]


@few_ranks
def test_a_call_takes_what_its_work_on_the_device_takes(on_gpus, num_ranks, tmp_path):
    told = on_gpus(timeline_ranks.profile_calls, tmp_path)
    merged = trace.read(tmp_path / "region_merged.json.gz")
    assert [rank["device"] for rank in merged[trace.METADATA_KEY]["ranks"]] == ["cuda"] * num_ranks
    calls = [call for call in trace.metadata_of_calls(merged) if "shape" in call]
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
def test_programs_of_kernels_say_what_they_do_within_the_calls_of_their_rank(
    on_gpus, num_ranks, tmp_path
):
    on_gpus(timeline_ranks.profile_calls, tmp_path)
    marked = trace.read(tmp_path / "marked_merged.json.gz")
    # Programs of ``fused_push`` set flags of every other rank. Copy engines leave no arrows.
    starts = [event for event in marked["traceEvents"] if event.get("ph") == "s"]
    setters = {event["pid"] for event in starts if event["cat"] == "flag"}
    assert setters == {f"rank-{rank} marks in kernels" for rank in range(num_ranks)}
    for rank, facts in enumerate(marked[trace.METADATA_KEY]["ranks"]):
        made = [
            event for event in marked["traceEvents"]
            if event.get("cat") == "mark" and event["pid"] == f"rank-{rank} marks in kernels"
        ]  # fmt: skip
        # These numbers include the flags that were set and awaited.
        assert 0 < len(made) < facts["marks"]["kept"] == facts["marks"]["made"]
        assert all(0 <= event["dur"] < 1e7 for event in made)
        calls = [call for call in trace.metadata_of_calls(marked) if call["rank"] == rank]
        for call, more in zip(calls, (set(), {"push"}), strict=True):
            assert call["on_device"]
            # Marks that are shorter than the clock's step have no share of the time.
            assert set(call["marks"]) - {"load", "notify"} == {"wait", "mma", "store"} | more
        slack = 20  # microseconds, of the driver's clock beside the device's
        for event in made:
            assert any(
                call["begin_us"] - slack <= event["ts"]
                and event["ts"] + event["dur"] <= call["begin_us"] + call["ms"] * 1e3 + slack
                for call in calls
            )


@few_ranks
def test_marks_change_no_result_and_no_graph_makes_them(on_gpus, num_ranks, tmp_path):
    for told in on_gpus(timeline_ranks.marks_and_a_graph, tmp_path):
        assert told["same"] == [True] * 4  # with marks, in two replays, and afterwards
        assert told["once"]
        assert told["replayed"] == told["once"] == ["mark"] * len(told["once"])


def test_proton_keeps_the_work_of_ops(tmp_path):
    num_ranks = 2  # new processes: the driver serves torch's profiler in those of other tests
    told = spawn_ranks(
        num_ranks, timeline_ranks.profile_calls, tmp_path, "proton", device="cuda", timeout=200,
        share_gpus=torch.cuda.device_count() < num_ranks,
    )  # fmt: skip
    root, _ = json.loads((tmp_path / "region_merged.hatchet").read_text())
    ranks = [child["frame"]["name"] for child in root["children"]]
    assert ranks == [f"rank {rank}" for rank in range(num_ranks)]
    for place, child in enumerate(root["children"]):
        scopes = {each["frame"]["name"]: each for each in child["children"]}
        for op, cost in told[place]["costs"].items():
            metrics = scopes[f"{op} {timeline_ranks.SHAPE}"]["metrics"]
            assert metrics["flops"] == cost.flops
            assert metrics["link_bytes"] == cost.link_bytes


def proton_after_torch(folder):
    with group_profile("first", folder=folder):
        torch.ones(8, device="cuda").sum()
    with (
        pytest.raises(DeviceUnavailable, match="in a process that uses no other"),
        group_profile("then", folder=folder, tool="proton"),
    ):
        pytest.fail("the region must not run")


def test_proton_is_refused_where_the_driver_serves_another_profiler(tmp_path):
    spawn_ranks(1, proton_after_torch, tmp_path, device="cuda", timeout=100)
