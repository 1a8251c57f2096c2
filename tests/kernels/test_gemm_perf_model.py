"""Peak rates, and times that follow from them."""

from __future__ import annotations

import math

import pytest
import torch

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.nvidia import comm_perf_model
from triton_dist.kernels.nvidia.gemm_perf_model import get_dram_gbps, get_tensorcore_tflops
from triton_dist.runtime.peaks import get_nic_gbps_per_gpu


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


def test_memory_of_cpu_ranks_is_modelled_as_h200s():
    assert get_dram_gbps() == get_dram_gbps(0) == get_dram_gbps("cuda:0") == 4800.0


@pytest.mark.parametrize(
    ("world_size", "local_world_size", "milliseconds"),
    [
        (1, 1, 0.0),
        (4, 4, 3.0),  # 3 shards of 1 GB at 1000 GB/s
        (8, 4, 1.5 + 5.0),  # and half a GB from the other host at 100, in place of 1.5 ms inside
        (4, 1, 3 * 10.0),  # one shard from each other host
    ],
)
def test_an_all_gather_takes_as_long_as_its_slowest_links(
    world_size, local_world_size, milliseconds
):
    arguments = (4e9, world_size, local_world_size, 1000.0, 100.0)
    for estimate in (
        comm_perf_model.estimate_all_gather_time_ms,
        comm_perf_model.estimate_reduce_scatter_time_ms,
    ):
        assert estimate(*arguments) == pytest.approx(milliseconds)
        unknown = estimate(4e9, world_size, local_world_size, 0.0, 0.0)
        assert unknown == (math.inf if milliseconds else 0)


def test_ranks_that_do_not_divide_into_hosts_are_refused():
    with pytest.raises(InvalidArgument, match="local_world_size is 3, expected a divisor"):
        comm_perf_model.estimate_all_gather_time_ms(1e9, 4, 3, 1.0, 1.0)


def test_adapters_as_the_system_lists_them(tmp_path):
    """Two of 200 Gbit/s and hardware count; a slower one, one that is down and a bridge do not."""
    for name, speed, hardware in (
        ("eth0", "200000", True),
        ("eth1", "200000", True),
        ("eth2", "10000", True),
        ("eth3", "-1", True),
        ("bridge", "400000", False),
    ):
        folder = tmp_path / "net" / name
        folder.mkdir(parents=True)
        (folder / "speed").write_text(f"{speed}\n")
        if hardware:
            (folder / "device").mkdir()
    assert get_nic_gbps_per_gpu(tmp_path) == 50.0
    port = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (port.parents[2] / "mlx5_1").mkdir()
    assert get_nic_gbps_per_gpu(tmp_path) == 50.0
    (port / "rate").write_text("100 Gb/sec (4X EDR)\n")
    assert get_nic_gbps_per_gpu(tmp_path) == 12.5
    assert get_nic_gbps_per_gpu(tmp_path / "nothing") == 0.0
