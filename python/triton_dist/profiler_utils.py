"""Import path of profiling functions that Triton-distributed's scripts use."""

from triton_dist.runtime.profiling import (
    benchmark_latency_memory,
    get_torch_prof_ctx,
    perf_func,
    perf_func_with_l2_reset,
    print_benchmark_comparison,
)
from triton_dist.timelines.recording import group_profile

__all__ = [
    "benchmark_latency_memory",
    "get_torch_prof_ctx",
    "group_profile",
    "perf_func",
    "perf_func_with_l2_reset",
    "print_benchmark_comparison",
]
