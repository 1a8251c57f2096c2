"""Capabilities of the device, the SM clock, and the timing functions of scripts."""

from __future__ import annotations

import itertools
import subprocess
import time
from types import SimpleNamespace

import pytest
import torch

from triton_dist.errors import InvalidArgument, TritonDistWarning
from triton_dist.runtime import capabilities, profiling
from triton_dist.runtime.device import current_device
from triton_dist.runtime.profiling import (
    benchmark_latency_memory,
    get_torch_prof_ctx,
    perf_func,
    perf_func_with_l2_reset,
    print_benchmark_comparison,
)


def test_dtypes_of_eight_bits():
    found = {dtype for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.half)
             if capabilities.is_fp8_dtype(dtype)}  # fmt: skip
    assert found == {torch.float8_e4m3fn, torch.float8_e5m2}


def test_cpu_ranks():
    assert not capabilities.has_tma()
    assert not capabilities.is_nvshmem_multimem_supported()
    assert capabilities.supports_p2p_native_atomic()
    assert capabilities.has_links_between_all_gpus()


def on_gpus(monkeypatch, *joined):
    """This process's GPU is 1 of 3; ``joined`` are pairs with native atomics."""
    device = SimpleNamespace(name="cuda", torch_device=torch.device("cuda", 1))
    monkeypatch.setattr(capabilities, "current_device", lambda: device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(capabilities, "_has_native_atomics", lambda *pair: pair in joined)


def test_atomics_have_to_reach_all_others(monkeypatch):
    on_gpus(monkeypatch, (1, 0), (1, 2))
    assert capabilities.supports_p2p_native_atomic()
    on_gpus(monkeypatch, (1, 0), (2, 1))
    assert not capabilities.supports_p2p_native_atomic()


def test_links_have_to_connect_all_pairs(monkeypatch):
    pairs = list(itertools.permutations(range(3), 2))
    on_gpus(monkeypatch, *pairs)
    assert capabilities.has_links_between_all_gpus()
    on_gpus(monkeypatch, *pairs[:-1])
    assert not capabilities.has_links_between_all_gpus()


def test_a_function_that_needs_them_warns(monkeypatch):
    @capabilities.requires_p2p_native_atomic
    def add(x, y=1):
        return x + y

    assert add(1, y=2) == 3
    on_gpus(monkeypatch)
    with pytest.warns(TritonDistWarning, match="add uses atomics on peers"):
        assert add(1) == 2
    assert add.__name__ == "add"


def test_the_clock_is_not_waited_for_unless_asked(monkeypatch):
    monkeypatch.setattr(profiling, "_wait_for_max_clock", lambda *_: pytest.fail("it waits"))
    assert profiling.wait_until_max_gpu_clock_or_warning()
    monkeypatch.setenv("TRITON_DIST_WAIT_GPU_CLOCK", "1")
    assert profiling.wait_until_max_gpu_clock_or_warning(device_id=0, timeout_sec=1)  # CPU ranks


def test_waiting_for_a_clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(profiling.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(
        profiling.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds)
    )
    rising = iter([(300, 1980), (1200, 1980), (1980, 1980)])
    assert profiling._wait_for_max_clock("cuda:0", lambda: next(rising), 10)
    assert 0.2 < now[0] < 1
    with pytest.warns(TritonDistWarning, match="cuda:0: the SM clock is 1200 MHz after 10 s"):
        assert not profiling._wait_for_max_clock("cuda:0", lambda: (1200, 1980), 10)
    assert now[0] < 11

    def without():
        raise FileNotFoundError("nvidia-smi")

    with pytest.warns(TritonDistWarning, match="does not report the SM clock: nvidia-smi"):
        assert not profiling._wait_for_max_clock("cuda:0", without, 10)


def test_the_clock_is_read_from_nvidia_smi(monkeypatch):
    def answer(command, **_):
        assert command[:3] == ["nvidia-smi", "-i", "GPU-1"]
        return SimpleNamespace(stdout="1755, 1980\n")

    monkeypatch.setattr(subprocess, "run", answer)
    assert profiling._clocks_in_mhz("GPU-1") == (1755, 1980)


def test_perf_func_gives_the_last_output_and_the_mean():
    calls = []

    def work():
        calls.append(len(calls))
        time.sleep(0.3 if len(calls) <= 2 else 0.01)  # the first two are warm-up
        return len(calls)

    output, milliseconds = perf_func(work, iters=5, warmup_iters=2)
    assert output == len(calls) == 7
    assert 10 <= milliseconds < 60


@pytest.mark.parametrize("timed", [perf_func, perf_func_with_l2_reset])
def test_no_call_has_no_mean(timed):
    for iters in (0, -1, 1.5):
        with pytest.raises(InvalidArgument, match=f"{timed.__name__}: iters is {iters}, expected"):
            timed(pytest.fail, iters, warmup_iters=1)


def test_the_cache_is_flushed_before_each_call_and_outside_of_its_time(monkeypatch):
    events = []
    monkeypatch.setattr(
        current_device(), "flush_cache", lambda: (events.append(0), time.sleep(0.2))
    )
    output, milliseconds = perf_func_with_l2_reset(lambda: events.append(1) or 7, 3, 2)
    assert events == [1, 1] + [0, 1] * 3
    assert output == 7
    assert milliseconds < 150


def test_latency_and_memory_prepare_each_warm_up():
    events = []
    latency, memory = benchmark_latency_memory(
        lambda: events.append("call"), 2, 1, lambda: events.append("prepare")
    )
    assert events == ["prepare", "call", "call", "call", "prepare"]
    assert latency > 0
    assert memory == 0


def test_a_comparison_has_a_row_per_configuration(capsys):
    print_benchmark_comparison(
        {
            (8, 2): {"ours_fwd": {"latency": 1.5, "memory": 3, "precision": True}},
            (16, 2, 64): {
                "ours_fwd": {"time": 2, "precision": False},
                "torch_fwd": {"latency": 0.25, "memory": 1.005, "precision": None},
            },
        },
        "MoE",
        ["M", "topk"],
        {"topk": 2},
    )
    title, names, *rows = capsys.readouterr().out.strip().splitlines()
    assert title == "MoE (topk=2) latency (ms) / peak memory (MiB) / precision"
    assert names.split() == ["M", "param_2", "ours_fwd", "torch_fwd"]
    assert [" ".join(row.split()) for row in rows] == [
        "8 1.500 / 3.00 / correct N/A",
        "16 64 2.000 / 0.00 / wrong 0.250 / 1.00 / N/A",
    ]
    print_benchmark_comparison({})


def test_a_profile_of_this_rank_alone():
    with get_torch_prof_ctx(True) as profile:
        torch.ones(8).sum()
    assert any(event.key == "aten::sum" for event in profile.key_averages())
    with get_torch_prof_ctx(False) as nothing:
        assert nothing is None
