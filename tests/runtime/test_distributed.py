"""Joining and leaving a world, and printing from it."""

from __future__ import annotations

import os
import re
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.docs.run_blocks import LAUNCHER_VARIABLES
from triton_dist.errors import DeviceUnavailable
from triton_dist.runtime import distributed
from triton_dist.runtime.device import current_device
from triton_dist.runtime.device.location import RankLocation
from triton_dist.runtime.distributed import (
    dist_print,
    finalize_distributed,
    initialize_distributed,
)
from triton_dist.runtime.sharing import ranks_per_gpu


def join_and_leave():
    assert not dist.is_initialized()
    group = initialize_distributed()
    assert initialize_distributed(seed=5) is group is dist.group.WORLD
    first = torch.rand(()).item()
    initialize_distributed()
    drawn = torch.rand(()).item()
    seen = dist.get_rank(), dist.get_world_size(), dist.get_backend()
    finalize_distributed()
    assert not dist.is_initialized()
    finalize_distributed()
    return seen, first, drawn


def test_ranks_join_with_a_seed_of_their_own(spawn_ranks):
    (first, same_0, own_0), (second, same_1, own_1) = spawn_ranks(2, join_and_leave, init=False)
    assert (first, second) == ((0, 2, "gloo"), (1, 2, "gloo"))
    assert same_0 == same_1
    assert own_0 != own_1


def test_leaving_does_not_hold_up_an_exception(monkeypatch):
    done = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "barrier", lambda: done.append("barrier"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: done.append("left"))

    def fail():
        try:
            raise KeyError("the real error")
        finally:
            finalize_distributed()

    with pytest.raises(KeyError, match="the real error"):
        fail()
    assert done == ["left"]
    finalize_distributed()
    assert done == ["left", "barrier", "left"]


def join_alone(device, interpreted=True):
    """A process that no launcher started joins: its rank, size and device, or the error."""
    for variable in LAUNCHER_VARIABLES:
        os.environ.pop(variable, None)
    os.environ["TRITON_DIST_DEVICE"] = device
    if not interpreted:
        del os.environ["TRITON_INTERPRET"]
    try:
        initialize_distributed()
    except DeviceUnavailable as error:
        return str(error)
    seen = dist.get_rank(), dist.get_world_size(), current_device().name
    finalize_distributed()
    return seen


def test_a_process_that_no_launcher_started_is_a_world_of_one(spawn_ranks):
    assert spawn_ranks(1, join_alone, "cpu", init=False) == [(0, 1, "cpu")]


def test_cpu_ranks_without_the_interpreter_say_what_to_set(spawn_ranks):
    (message,) = spawn_ranks(1, join_alone, "cpu", False, init=False)
    assert "device 'cpu' cannot be used" in message
    assert "Set TRITON_INTERPRET=1" in message


def join_on_one_gpu(mistakes):
    """Ranks join as if they had one GPU; ``mistakes``: of ranks, in their location or its use."""
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])
    mistake, used = mistakes.get(rank, {}), []

    def use(gpu):
        used.append(gpu)
        if "memory" in mistake:
            raise torch.OutOfMemoryError("CUDA out of memory.\nmore lines")

    distributed.current_device = lambda: SimpleNamespace(name="cuda", synchronize=lambda: None)
    distributed.torch.cuda.device_count = lambda: 1
    distributed._set_current_gpu = use
    location = RankLocation("a", "boot", ("", ""), "gpu", "0:1", ("gpu",), ranks_per_gpu())
    if "visible" in mistake:
        location = replace(location, visible_gpus=("gpu", "another"))
    distributed.RankLocation = SimpleNamespace(of=lambda gpu: location)
    try:
        initialize_distributed()
    except DeviceUnavailable as error:
        assert not dist.is_initialized()
        return str(error)
    seen = used, dist.get_backend()
    dist.destroy_process_group()
    return seen


SHARED = {"init": False, "env": {"TRITON_DIST_SHARE_GPUS": "1"}}


def test_ranks_that_share_a_gpu_join_without_nccl(spawn_ranks):
    assert spawn_ranks(3, join_on_one_gpu, {}, **SHARED) == [([0], "gloo")] * 3


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("visible", "rank 0 and rank 1 see different GPUs: .* same CUDA_VISIBLE_DEVICES"),
        ("memory", "rank 1 cannot use its shared GPU: CUDA out of memory.. Start fewer"),
    ],
)
def test_what_keeps_one_rank_from_sharing_is_said_on_all(spawn_ranks, mistake, message):
    said = spawn_ranks(2, join_on_one_gpu, {1: {mistake: True}}, **SHARED)
    assert said[0] == said[1]
    assert re.search(message, said[0])


def test_a_rank_without_a_gpu_says_how_to_share(monkeypatch):
    monkeypatch.setattr(distributed, "current_device", lambda: SimpleNamespace(name="cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(DeviceUnavailable, match=r"'cuda:1' .* has 1 GPU.* launch.sh --share-gpus"):
        initialize_distributed()


def print_from_ranks():
    printed = []
    for options in (
        {},
        {"allowed_ranks": [1]},
        {"allowed_ranks": "all", "prefix": True},
        {"allowed_ranks": [0, 1], "need_sync": True, "end": "!"},
    ):
        out = StringIO()
        with redirect_stdout(out):
            dist_print("value", 3, **options)
        printed.append(out.getvalue())
    return printed


def test_some_ranks_print(spawn_ranks):
    assert spawn_ranks(3, print_from_ranks) == [
        ["value 3\n", "", "[rank 0] value 3\n", "value 3!"],
        ["", "value 3\n", "[rank 1] value 3\n", "value 3!"],
        ["", "", "[rank 2] value 3\n", ""],
    ]


def print_in_turn(path):
    for number in range(3):
        with open(path, "a", buffering=1) as file:
            dist_print(number, allowed_ranks="all", need_sync=True, prefix=True, file=file)


def test_ranks_print_in_order_when_synchronised(spawn_ranks, tmp_path):
    spawn_ranks(3, print_in_turn, tmp_path / "out")
    lines = (tmp_path / "out").read_text().splitlines()
    assert lines == [f"[rank {rank}] {number}" for number in range(3) for rank in range(3)]


def test_alone_it_prints(capsys):
    dist_print("alone", need_sync=True)
    dist_print("not this one", allowed_ranks=[1])
    assert capsys.readouterr().out == "alone\n"


def test_before_ranks_join_it_prints_on_those_of_the_launcher(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    dist_print("of rank 0")
    dist_print("of rank 1", allowed_ranks="all", prefix=True)
    assert capsys.readouterr().out == "[rank 1] of rank 1\n"
