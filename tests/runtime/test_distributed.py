"""Joining and leaving a world, and printing from it."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO

import pytest
import torch
import torch.distributed as dist

from tests.architecture.source import ROOT
from triton_dist.runtime.distributed import (
    dist_print,
    finalize_distributed,
    initialize_distributed,
)


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


def run_alone(program, **variables):
    unwanted = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TRITON_INTERPRET", "TRITON_DIST_DEVICE")
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    return subprocess.run(
        [sys.executable, "-c", program],
        env=kept | {"PYTHONPATH": str(ROOT / "python")} | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )


PROGRAM = """
import torch.distributed as dist
from triton_dist.utils import *
initialize_distributed()
dist_print(dist.get_rank(), dist.get_world_size(), is_cuda())
finalize_distributed()
"""


def test_a_process_that_no_launcher_started_is_a_world_of_one():
    run = run_alone(PROGRAM, TRITON_INTERPRET="1", TRITON_DIST_DEVICE="cpu")
    lines = run.stdout.splitlines()  # gloo of torch 2.9 prints one of its own
    assert lines[-1:] == ["0 1 False"], run.stderr


def test_cpu_ranks_without_the_interpreter_say_what_to_set():
    run = run_alone(PROGRAM, TRITON_DIST_DEVICE="cpu")
    assert run.returncode != 0
    assert "DeviceUnavailable: device 'cpu' cannot be used" in run.stderr
    assert "Set TRITON_INTERPRET=1" in run.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
def test_cuda_ranks_without_a_gpu_say_so():
    run = run_alone(PROGRAM, TRITON_DIST_DEVICE="cuda")
    assert run.returncode != 0
    assert "DeviceUnavailable: device 'cuda' cannot be used" in run.stderr


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
