"""A program that tunes before anything is compiled, and then inside of what is; prints how many
graphs a first call and a hit make."""

from __future__ import annotations

import sys

import torch

import triton_dist.kernels.nvidia
from triton_dist.tune import autotune, to_hashable

A, B = torch.arange(3.0), torch.ones(3)


@autotune([{"n": 3}, {"n": 3, "m": 0}], lambda a, b: to_hashable(a))
def scaled(a, b, n, m=0):
    return a * n + b + m


def model(a, b):
    return scaled(a.sin(), b).cos()


def graphs_of(size: int) -> int:
    from torch._dynamo.testing import CompileCounter

    torch.compiler.reset()
    a, b, graphs = torch.arange(float(size)), torch.ones(size), CompileCounter()
    result = torch.compile(model, backend=graphs)(a, b)
    torch.testing.assert_close(result, (a.sin() * 3 + b).cos())
    return graphs.frame_count


if __name__ == "__main__":
    assert hasattr(triton_dist.kernels.nvidia, "gemm_rs")
    scaled(A, B)
    assert scaled.tuning_count == 1
    assert "torch._dynamo" not in sys.modules
    print(graphs_of(4), graphs_of(3))
