"""Device of a process: selection, timer, facts, peaks, copy streams and graph capture."""

from __future__ import annotations

import gc
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from tests import garbage
from triton_dist.errors import DeviceUnavailable, WaitTimeout
from triton_dist.knobs import InvalidKnob
from triton_dist.runtime import addresses, peaks
from triton_dist.runtime.device import (
    cuda,
    current_device,
    get_device_max_shared_memory_size,
    is_cuda,
    sleep_async,
)
from triton_dist.runtime.device.cpu import CpuCopyStream, CpuDevice
from triton_dist.runtime.device.transfer import AwaitFlag, Copy
from triton_dist.runtime.garbage import no_garbage_collection
from triton_dist.testing.timing import capture_graph

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")


@pytest.mark.parametrize("asked", ["cpu", "CPU"])
def test_the_cpu_when_asked_for(monkeypatch, asked):
    monkeypatch.setenv("TRITON_DIST_DEVICE", asked)
    assert isinstance(current_device(), CpuDevice)
    assert current_device() is current_device()
    assert not is_cuda()


@no_gpu
@pytest.mark.parametrize("asked", [None, "auto", ""])
def test_the_cpu_when_there_is_no_gpu(monkeypatch, asked):
    monkeypatch.delenv("TRITON_DIST_DEVICE", raising=False)
    if asked is not None:
        monkeypatch.setenv("TRITON_DIST_DEVICE", asked)
    assert current_device().name == "cpu"


@no_gpu
def test_a_gpu_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setenv("TRITON_DIST_DEVICE", "cuda")
    with pytest.raises(DeviceUnavailable, match=r"'cuda' cannot be used.*TRITON_DIST_DEVICE=cpu"):
        current_device()


def test_an_unknown_device_names_the_variable(monkeypatch):
    monkeypatch.setenv("TRITON_DIST_DEVICE", "tpu")
    with pytest.raises(InvalidKnob, match="TRITON_DIST_DEVICE='tpu', expected auto, cuda or cpu"):
        current_device()


@pytest.fixture
def cpu(monkeypatch):
    monkeypatch.setenv("TRITON_DIST_DEVICE", "cpu")
    return current_device()


def test_the_cpu_has_the_limits_of_hopper(cpu):
    assert cpu.shared_memory_bytes() == get_device_max_shared_memory_size(0) == 232448
    assert not cpu.is_capturing()


def test_a_timer_measures_wall_clock(cpu):
    timer = cpu.timer()
    timer.start()
    sleep_async(30)
    timer.stop()
    assert 29 < timer.milliseconds() < 2000
    timer.start()
    cpu.sleep(50_000_000)  # cycles
    timer.stop()
    assert 25 < timer.milliseconds() < 2000


def test_a_copy_stream_works_in_order_beside_its_caller():
    stream, order = CpuCopyStream(), []
    go_on = threading.Event()
    stream._queue(lambda: (go_on.wait(10), order.append(threading.current_thread())))
    source, destination = torch.arange(6.0).view(2, 3), torch.zeros(2, 3)
    flags = torch.zeros(4, dtype=torch.int32)
    stream.copy(destination, source)
    stream.write_flag(flags, 2, 7)
    stream.copy(flags[3:], flags[2:3])
    assert not destination.any()
    go_on.set()
    stream.join_current()
    assert order != [threading.current_thread()]
    assert torch.equal(destination, source)
    assert flags.tolist() == [0, 0, 7, 7]


def test_a_copy_stream_waits_for_a_flag():
    stream, other = CpuCopyStream(), CpuCopyStream()
    flags, target = torch.zeros(2, dtype=torch.int32), torch.zeros(1)
    stream.wait_flag(flags, 1, 3)
    stream.copy(target, torch.ones(1))
    other.write_flag(flags, 1, 2)
    other.join_current()
    time.sleep(0.02)
    assert target.item() == 0
    other.write_flag(flags, 1, 3)
    stream.join_current()
    assert target.item() == 1


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "dropped"])
def test_the_thread_of_a_copy_stream_ends_with_it(is_closed):
    before = set(threading.enumerate())
    stream, target = CpuCopyStream(), torch.zeros(1)
    (thread,) = set(threading.enumerate()) - before
    stream.copy(target, torch.ones(1))  # is done all the same
    if is_closed:
        stream.close()
    else:
        del stream
    thread.join(60)
    assert not thread.is_alive()
    assert target.all()


def test_what_goes_wrong_on_a_copy_stream_comes_with_the_join():
    stream, target = CpuCopyStream(), torch.zeros(2)
    stream.copy(target, torch.ones(3))
    stream.copy(target, torch.ones(2))
    with pytest.raises(RuntimeError, match="size"):
        stream.join_current()
    assert not target.any()  # what follows a failure is left out
    stream.copy(target, torch.ones(2))
    stream.join_current()
    assert target.all()


def test_steps_that_await_a_kernel_that_failed_are_left_out():
    flags, target = torch.zeros(2, dtype=torch.int32), torch.zeros(2)
    steps = [
        AwaitFlag(0, flags, 0, 1), Copy(0, target[:1], torch.ones(1)),
        AwaitFlag(0, flags, 1, 1), Copy(0, target[1:], torch.ones(1)),
    ]  # fmt: skip
    device = CpuDevice()
    transfer = device.transfer(steps, [device.copy_stream()])
    transfer.fork(device.current_stream())
    flags[0] = 1  # and then the kernel raises
    deadline = time.monotonic() + 10
    while target[0] == 0:
        assert time.monotonic() < deadline
        time.sleep(1e-3)
    transfer.join(device.current_stream())
    assert target.tolist() == [1, 0]
    flags[0] = 0
    transfer.fork(device.current_stream())
    flags.fill_(1)
    transfer.queue()
    transfer.join(device.current_stream())
    assert target.tolist() == [1, 1]


def test_an_overdue_flag_of_a_copy_stream_is_named(monkeypatch):
    monkeypatch.setenv("TRITON_DIST_WAIT_TIMEOUT", "0.1")
    monkeypatch.setenv("RANK", "3")
    flags = torch.tensor([0, 4], dtype=torch.int32)
    addresses.register(flags.data_ptr(), 8, 4, "ring.forward")
    stream = CpuCopyStream()
    stream.wait_flag(flags, 1, 1)
    begin = time.monotonic()
    with pytest.raises(WaitTimeout) as overdue:
        stream.join_current()
    addresses.forget(flags.data_ptr())
    assert 0.1 <= time.monotonic() - begin < 10
    error = overdue.value
    assert (error.rank, error.flag, error.expected, error.seen) == (3, "ring.forward[1]", 1, 4)
    assert "copy stream" in str(error)


@pytest.mark.gpu
def test_a_captured_call_is_run_once_and_then_replayed():
    device = current_device()
    counter = torch.zeros(4, device=device.torch_device)
    replay = device.capture(lambda: counter.add_(1), 30.0)
    device.synchronize(30.0)
    assert counter.tolist() == [1.0] * 4
    replay()
    replay()
    device.synchronize(30.0)
    assert counter.tolist() == [3.0] * 4


@pytest.mark.gpu
def test_what_cannot_be_captured_says_why_and_breaks_nothing():
    device = current_device()
    counter = torch.zeros(4, device=device.torch_device)
    stream = torch.cuda.current_stream()
    with pytest.raises(RuntimeError, match="not permitted"):
        device.capture(lambda: counter.add_(1).sum().item(), 30.0)
    assert torch.cuda.current_stream() == stream
    counter.add_(1)
    device.synchronize(30.0)
    assert counter.tolist() == [2.0] * 4
    device.capture(lambda: counter.add_(1), 30.0)()
    device.synchronize(30.0)
    assert counter.tolist() == [4.0] * 4


@pytest.mark.gpu
def test_the_exception_of_the_call_itself_is_raised():
    device, runs = current_device(), []

    def call():
        runs.append(1)
        if len(runs) == 2:
            raise KeyError("in the capture")

    with pytest.raises(KeyError, match="in the capture"):
        device.capture(call, 30.0)
    assert not device.is_capturing()


@pytest.mark.gpu
def test_memory_of_graphs_that_are_gone_comes_back(monkeypatch):
    # A sixteenth of what is kept otherwise: other tests need the GPU's memory, too.
    monkeypatch.setattr(cuda, "_GRAPH_MEMORY_DIVISOR", 256)
    device, most = current_device(), torch.cuda.get_device_properties(0).total_memory // 16
    source = torch.ones(most // 64, dtype=torch.uint8, device=device.torch_device)
    device.capture(lambda: source + 1, 30.0)()
    for _ in range(64):  # which leave twice the most
        device.capture(lambda: (source + 1) * 2, 30.0)()
        device.synchronize(30.0)
    assert torch.cuda.memory_reserved() < most // 4


@pytest.mark.gpu
def test_garbage_is_not_collected_in_a_capture():
    device = current_device()
    counter = torch.zeros(4, device=device.torch_device)

    def call():
        counter.add_(garbage.leave() / 100_000)

    replay = device.capture(call, 30.0)
    assert gc.isenabled()
    replay()
    device.synchronize(30.0)
    assert counter.tolist() == [2.0] * 4


def test_captures_of_several_threads_forbid_collection_until_the_last_is_over():
    first, second = no_garbage_collection(), no_garbage_collection()
    with first:
        second.__enter__()
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()
    gc.disable()
    try:
        with no_garbage_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()  # as the program wants it
    finally:
        gc.enable()


@pytest.mark.gpu
def test_runs_before_a_capture_come_after_what_is_queued():
    device, seen = current_device(), []
    flag = torch.zeros(4, device=device.torch_device)
    device.sleep_milliseconds(50.0)
    flag.add_(1)
    capture_graph(lambda: seen.append(flag.clone()), warmup=3)
    device.synchronize(30.0)
    assert [each.tolist() for each in seen[:3]] == [[1.0] * 4] * 3  # the fourth never ran


@pytest.fixture(autouse=True)
def _forget():
    cuda._peer_access.cache_clear()
    cuda._driver_version.cache_clear()
    yield
    cuda._peer_access.cache_clear()
    cuda._driver_version.cache_clear()


def gpus(monkeypatch, count, reaches):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", reaches)


@pytest.mark.parametrize(
    ("count", "reaches", "said"),
    [
        (4, lambda a, b: True, "full mesh of 4"),
        (4, lambda a, b: a // 2 == b // 2, "4 of 12 pairs"),
        (4, lambda a, b: False, "none"),
        (1, lambda a, b: True, "none"),
    ],
)
def test_how_gpus_reach_one_another(monkeypatch, count, reaches, said):
    gpus(monkeypatch, count, reaches)
    assert cuda._peer_access() == said


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build\nGCC\n",
    ],
)
def test_the_driver_is_the_kernel_modules(monkeypatch, tmp_path, text):
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(cuda, "_DRIVER_FILE", tmp_path / "version")
    assert cuda._driver_version() == "550.54.15"


@pytest.mark.parametrize(("status", "said"), [(0, "12.8"), (3, "unknown")])
def test_where_the_kernel_does_not_show_it_the_driver_is_asked(monkeypatch, tmp_path, status, said):
    def ask(name):
        assert name == "cuDriverGetVersion"
        return get_version

    def get_version(version):
        version._obj.value = 12080
        return status

    monkeypatch.setattr(cuda, "_DRIVER_FILE", tmp_path / "absent")
    monkeypatch.setattr(cuda.cuda_driver, "function", ask)
    assert cuda._driver_version() == said


def test_a_gpu_says_all_that_can_change_code_or_timing(monkeypatch, tmp_path):
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.1.2 \n")
    monkeypatch.setattr(cuda, "_DRIVER_FILE", tmp_path / "version")
    gpus(monkeypatch, 8, lambda a, b: True)
    device = object.__new__(cuda.CudaDevice)
    device.num_sms = 132
    device._properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert device.facts()["gpu"] == "NVIDIA H200 (interpreter)"
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert device.facts() == {
        "gpu": "NVIDIA H200",
        "gpus_on_host": "8",
        "capability": "9.0",
        "sms": "132",
        "driver": "570.1.2",
        "peer_access": "full mesh of 8",
    }


@pytest.mark.parametrize(("interpreted", "gpu"), [("1", "none (interpreter)"), ("0", "none")])
def test_the_cpu_says_that_there_is_no_gpu_and_what_runs_in_its_place(
    monkeypatch, interpreted, gpu
):
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    assert CpuDevice().facts()["gpu"] == gpu


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of some name, capability and number of SMs."""

    def become(name, capability="9.0", sms=132, reachable=True):
        facts = {"gpu": name, "capability": capability, "sms": str(sms)}
        device = SimpleNamespace(
            name="cuda", torch_device=torch.device("cuda", 0), facts=lambda: facts
        )
        monkeypatch.setattr(peaks, "current_device", lambda: device)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: reachable)
        peaks.device_peak.cache_clear()

    yield become
    peaks.device_peak.cache_clear()


@pytest.mark.parametrize(
    ("name", "tflops", "memory", "link"),
    [
        ("NVIDIA H200", 989.0, 4800.0, 450.0),
        ("NVIDIA H20", 148.0, 4000.0, 450.0),
        ("NVIDIA H100 80GB HBM3", 989.0, 3350.0, 450.0),
        ("NVIDIA H800", 989.0, 3350.0, 200.0),
        ("NVIDIA A100-SXM4-80GB", 312.0, 2039.0, 300.0),
        ("NVIDIA B200", 2250.0, 8000.0, 900.0),
    ],
)
def test_a_known_gpu(gpu, name, tflops, memory, link):
    gpu(name)
    peak = peaks.device_peak()
    assert (peak.tflops, peak.memory_gbps, peak.link_gbps) == (tflops, memory, link)
    assert peaks.get_intranode_max_speed_gbps() == link


def test_an_unknown_gpu_is_scaled_from_its_generation(gpu):
    gpu("NVIDIA Something", "9.0", sms=66)
    peak = peaks.device_peak()
    assert peak.tflops == pytest.approx(989.0 / 2)
    assert peak.sms == 66
    assert peak.link_gbps < 100


def test_gpus_that_do_not_reach_each_other_go_over_pcie(gpu):
    gpu("NVIDIA H200", reachable=False)
    assert peaks.get_intranode_max_speed_gbps() < 100
