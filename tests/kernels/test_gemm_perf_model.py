"""Peak rates by dtype."""

from __future__ import annotations

import pytest
import torch

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.nvidia.gemm_perf_model import get_tensorcore_tflops


@pytest.mark.parametrize(
    ("dtype", "relative"),
    [
        (torch.float16, 1),
        (torch.bfloat16, 1),
        (torch.float32, 0.5),
        (torch.int8, 2),
        (torch.float8_e4m3fn, 2),
    ],
)
def test_rates_relate_to_the_16_bit_rate(dtype, relative):
    assert get_tensorcore_tflops(dtype) == relative * get_tensorcore_tflops(torch.float16)


def test_cpu_ranks_are_modelled_as_h200():
    assert get_tensorcore_tflops(torch.bfloat16) == 989.0


def test_a_dtype_without_a_matrix_unit_is_refused():
    with pytest.raises(InvalidArgument, match=r"dtype is torch\.int64, expected one of"):
        get_tensorcore_tflops(torch.int64)
