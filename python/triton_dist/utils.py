"""Import path of helper functions that Triton-distributed's scripts use."""

from triton_dist.knobs import get_bool_env, get_int_env
from triton_dist.profiler_utils import get_torch_prof_ctx, group_profile, perf_func
from triton_dist.runtime.capabilities import (
    has_tma,
    is_fp8_dtype,
    is_nvshmem_multimem_supported,
    requires_p2p_native_atomic,
    supports_p2p_native_atomic,
)
from triton_dist.runtime.device import get_device_max_shared_memory_size, is_cuda, sleep_async
from triton_dist.runtime.distributed import barrier_all_on_stream as nvshmem_barrier_all_on_stream
from triton_dist.runtime.distributed import (
    dist_print,
    finalize_distributed,
    init_nvshmem_by_torch_process_group,
    initialize_distributed,
)
from triton_dist.runtime.profiling import wait_until_max_gpu_clock_or_warning
from triton_dist.runtime.random import generate_data, init_seed, rand_tensor
from triton_dist.testing.assertions import assert_allclose

try:
    from cuda.bindings import driver as cuda  # type: ignore[import-not-found]
    from cuda.bindings import runtime as cudart
except ImportError:  # Scripts import these modules, but use them on GPUs only.
    cuda = cudart = None

__all__ = [
    "assert_allclose",
    "cuda",
    "cudart",
    "dist_print",
    "finalize_distributed",
    "generate_data",
    "get_bool_env",
    "get_device_max_shared_memory_size",
    "get_int_env",
    "get_torch_prof_ctx",
    "group_profile",
    "has_tma",
    "init_nvshmem_by_torch_process_group",
    "init_seed",
    "initialize_distributed",
    "is_cuda",
    "is_fp8_dtype",
    "is_nvshmem_multimem_supported",
    "nvshmem_barrier_all_on_stream",
    "perf_func",
    "rand_tensor",
    "requires_p2p_native_atomic",
    "sleep_async",
    "supports_p2p_native_atomic",
    "wait_until_max_gpu_clock_or_warning",
]
