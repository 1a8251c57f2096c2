"""Timing a call, and traces of all ranks in one file."""

from __future__ import annotations

import gzip
import json
import time

import torch
import torch.distributed as dist

from triton_dist.runtime.device import current_device
from triton_dist.runtime.profiling import (
    get_torch_prof_ctx,
    group_profile,
    perf_func,
    perf_func_with_l2_reset,
)


def test_perf_func_gives_the_last_output_and_the_mean():
    calls = []

    def work():
        calls.append(len(calls))
        time.sleep(0.05 if len(calls) <= 2 else 0.01)  # the first two are warm-up
        return len(calls)

    output, milliseconds = perf_func(work, iters=5, warmup_iters=2)
    assert output == len(calls) == 7
    assert 10 <= milliseconds < 30


def profile_region(folder, do_prof):
    with group_profile("region", do_prof, folder=folder):
        torch.ones(8) @ torch.ones(8)
    dist.barrier()  # rank 0 has merged


def test_traces_of_all_ranks_are_merged(spawn_ranks, tmp_path):
    spawn_ranks(2, profile_region, tmp_path / "prof", True)
    with gzip.open(tmp_path / "prof" / "region_merged.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    ranks_of = {
        str(event["pid"]).split()[0]
        for event in events
        if str(event.get("name", "")).startswith("aten::dot")
    }
    assert ranks_of == {"rank-0", "rank-1"}
    assert len(list((tmp_path / "prof" / "region").glob("rank-*.json.gz"))) == 2


def test_no_trace_unless_asked_for(spawn_ranks, tmp_path):
    spawn_ranks(2, profile_region, tmp_path / "prof", False)
    assert not (tmp_path / "prof").exists()


def test_a_process_alone_traces_itself(tmp_path):
    with group_profile("alone", folder=tmp_path):
        torch.ones(8).sum()
    assert (tmp_path / "alone_merged.json.gz").exists()


def test_what_is_kept_of_a_trace(tmp_path):
    with group_profile("all", folder=tmp_path, keep_merged_only=True, compress=False):
        torch.ones(8).sum()
    assert [path.name for path in tmp_path.rglob("*")] == ["all_merged.json"]
    assert json.loads((tmp_path / "all_merged.json").read_text())["traceEvents"]
    with group_profile("parts", folder=tmp_path / "other", merge_group=False):
        torch.ones(8).sum()
    files = [path for path in (tmp_path / "other").rglob("*") if path.is_file()]
    assert [path.name for path in files] == ["rank-0.json.gz"]


def test_the_cache_is_flushed_before_each_call_and_outside_of_its_time(monkeypatch):
    events = []
    monkeypatch.setattr(
        current_device(), "flush_cache", lambda: (events.append(0), time.sleep(0.1))
    )
    output, milliseconds = perf_func_with_l2_reset(lambda: events.append(1) or 7, 3, 2)
    assert events == [1, 1] + [0, 1] * 3
    assert output == 7
    assert milliseconds < 50


def test_a_profile_of_this_rank_alone():
    with get_torch_prof_ctx(True) as profile:
        torch.ones(8).sum()
    assert any(event.key == "aten::sum" for event in profile.key_averages())
    with get_torch_prof_ctx(False) as nothing:
        assert nothing is None
