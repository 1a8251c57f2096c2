"""Import path of profiling helpers used by Triton-distributed's scripts."""

from triton_dist.runtime.profiling import get_torch_prof_ctx, perf_func, perf_func_with_l2_reset
from triton_dist.timelines.recording import group_profile

__all__ = ["get_torch_prof_ctx", "group_profile", "perf_func", "perf_func_with_l2_reset"]
