"""Seeds and random operands."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from triton_dist.errors import InvalidArgument
from triton_dist.models.utils import init_model_cpu
from triton_dist.runtime.device import current_device
from triton_dist.runtime.random import generate_data, init_seed, rand_tensor


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


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, "float16"])
def test_a_dtype_without_a_range_is_refused(dtype):
    with pytest.raises(InvalidArgument, match="expected a floating or integer torch"):
        rand_tensor([2], dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_operands_are_where_kernels_run(dtype, monkeypatch):
    """Not where torch puts tensors by default."""
    elsewhere = SimpleNamespace(torch_device=torch.device("meta"))
    monkeypatch.setattr("triton_dist.runtime.random.current_device", lambda: elsewhere)
    assert rand_tensor([4], dtype).is_meta
    assert rand_tensor([4], dtype, "cpu").device.type == "cpu"
    (operand,) = next(generate_data([([4], dtype, (1, 0))]))
    assert operand.is_meta


def test_operands_for_each_step():
    rows = iter((3, 5))
    step = generate_data(
        [
            ((lambda: next(rows), 1000), torch.bfloat16, (0.5, 2)),
            (400, torch.int8, (4, 10)),
            None,
        ]
    )
    for size in (3, 5):
        first, second, third = next(step)
        assert (first.shape, first.dtype) == ((size, 1000), torch.bfloat16)
        assert 1.5 <= first.min() < 1.55 < 2.45 < first.max() <= 2.5
        assert set(second.tolist()) == set(range(6, 14))
        assert third is None
        assert first.device == second.device == current_device().torch_device


def test_weights_of_a_model_leave_the_generators_alone(monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    before = torch.get_rng_state()
    init_model_cpu("tiny", torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    assert not seeded
