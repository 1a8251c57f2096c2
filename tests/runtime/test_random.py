"""Seeds and random operands."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from triton_dist.runtime.random import init_seed, rand_tensor


def test_a_seed_decides_every_generator():
    drawn = []
    for seed in (3, 3, 4):
        init_seed(seed)
        drawn.append((random.random(), np.random.rand(), torch.rand(()).item()))
    assert drawn[0] == drawn[1]
    assert all(first != other for first, other in zip(drawn[0], drawn[2], strict=True))


def test_products_of_fp32_are_fp32():
    torch.backends.cuda.matmul.allow_tf32 = True
    init_seed(0)
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_floating_operands_fill_minus_one_to_one(dtype):
    values = rand_tensor([64, 65], dtype, "cpu")
    assert (values.shape, values.dtype, values.device.type) == ((64, 65), dtype, "cpu")
    assert values.min() >= -1
    assert values.max() <= 1
    assert values.min() < -0.9
    assert values.max() > 0.9


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
def test_integers_fill_their_range(dtype):
    limits = torch.iinfo(dtype)
    values = rand_tensor((64, 64), dtype).double()
    span = limits.max - limits.min
    assert values.min() < limits.min + 0.05 * span
    assert values.max() > limits.max - 0.05 * span
