"""Names that existing scripts import, and that therefore never change."""

from __future__ import annotations

import importlib

import pytest

NAMES = {
    "triton_dist": ["jit", "tune", "autotuner", "language", "__version__"],
    "triton_dist.autotuner": ["contextual_autotune"],
    "triton_dist.tune": ["autotune", "to_hashable"],
    "triton_dist.utils": [
        "initialize_distributed",
        "finalize_distributed",
        "dist_print",
        "rand_tensor",
        "is_cuda",
        "get_device_max_shared_memory_size",
        "sleep_async",
        "init_seed",
        "get_bool_env",
        "get_int_env",
    ],
    "triton_dist.profiler_utils": ["perf_func", "group_profile"],
    "triton_dist.nv_utils": ["get_intranode_max_speed_gbps"],
    "triton_dist.test.utils": [
        "LAYER_CONFIGS",
        "assert_allclose",
        "bitwise_equal",
        "assert_bitwise_equal",
    ],
    "triton_dist.kernels.nvidia": [
        "ag_gemm",
        "create_ag_gemm_context",
        "gemm_rs",
        "create_gemm_rs_context",
        "gemm_ar",
        "create_gemm_ar_context",
        "all_reduce",
        "create_allreduce_ctx",
    ],
    "triton_dist.kernels.nvidia.allreduce": [
        "AllReduceMethod",
        "all_reduce",
        "create_allreduce_ctx",
        "get_allreduce_methods",
        "to_allreduce_method",
    ],
    "triton_dist.kernels.nvidia.allgather_gemm": [
        "AllGatherGEMMTensorParallelContext",
        "create_ag_gemm_context",
        "ag_gemm",
        "gemm_persistent",
        "gemm_non_persistent",
        "local_copy_and_barrier_all",
        "kernel_consumer_gemm_persistent",
        "ag_gemm_persistent",
    ],
    "triton_dist.kernels.nvidia.gemm": [
        "get_config_space",
        "matmul",
        "prune_fn_by_shared_memory",
        "prune_fn_by_group_size_m",
    ],
    "triton_dist.kernels.nvidia.gemm_perf_model": ["get_tensorcore_tflops"],
}


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in NAMES.items() for n in names])
def test_name_is_there(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)
