"""Statements about a process that has just started; one process checks them all."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

import triton_dist.kernels.nvidia
from tests.architecture.source import ROOT
from tests.commands import python
from tests.tuning import test_torch_compile as compiling
from triton_dist._tuning.source import source_of

PROGRAM = """
import ctypes, sys, threading, time, torch
from tests.tuning import test_new_process as here
from triton_dist.runtime.inherited import InheritedValue

print(here.graphs_after_an_eager_call())
print(here.sources_of_an_op())

class Slow:
    def __del__(self):
        time.sleep(0.5)

def work():
    value, slow = InheritedValue("value"), Slow()
    value.put(value.put(1))
    count = sys.getrefcount(slow)
    torch._C._stash_obj_in_tls("slow", slow)
    if sys.getrefcount(slow) == count:  # torch 2.11 takes a reference without adding one
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(slow))

thread = threading.Thread(target=work)
thread.start()
thread.join()
print("joined")
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> subprocess.CompletedProcess[str]:
    """The process. It compiles kernels, and has another hash seed than this process."""
    path = os.pathsep.join([str(ROOT / "python"), str(ROOT)])
    cache = {"TRITON_DIST_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}
    new = {"PYTHONPATH": path, "PYTHONHASHSEED": "1", "TRITON_INTERPRET": "0"}
    return python("-c", PROGRAM, **cache, **new)


def graphs_after_an_eager_call() -> list[int]:
    """Tune before anything is compiled, then inside; graphs of a first call, and of a hit."""
    assert hasattr(triton_dist.kernels.nvidia, "gemm_rs")
    scaled = compiling.make()
    scaled(compiling.A, compiling.B)
    assert scaled.num_tunings == 1
    assert "torch._dynamo" not in sys.modules
    counts = []
    for size in (4, 3):
        torch.compiler.reset()
        a, b, graphs = torch.arange(float(size)), torch.ones(size), compiling.graph_counter()
        result = torch.compile(lambda a, b: scaled(a.sin(), b).cos(), backend=graphs)(a, b)
        torch.testing.assert_close(result, (a.sin() * 3 + b).cos())
        counts.append(graphs.frame_count)
    return counts


def test_tuning_does_not_import_the_compiler(ended) -> None:
    assert ended.stdout.startswith("[2, 1]\n"), ended.stderr


def sources_of_an_op() -> str:
    def choose(x: str) -> bool:
        return x in {"push", "pull", "both", "tree", "ring", "none"}

    roots = [triton_dist.kernels.nvidia.ag_gemm.fn, choose]
    return json.dumps(source_of(roots)._asdict(), sort_keys=True)


def test_processes_that_interpret_or_compile_find_the_same_whatever_their_hash_seed(ended) -> None:
    digests = sources_of_an_op()
    assert ended.stdout.splitlines()[1:2] == [digests], ended.stderr
    for name in ("kernel_gemm_persistent", "multiply_tile", "wait", "sharded_gemm"):
        assert f":{name}" in digests


def test_a_process_waits_at_its_exit_for_threads_that_torch_still_cleans_up(ended) -> None:
    """``join`` returned; torch drops what the thread put, which takes as long as under load."""
    assert (ended.returncode, ended.stdout.splitlines()[2:]) == (0, ["joined"]), ended.stderr
