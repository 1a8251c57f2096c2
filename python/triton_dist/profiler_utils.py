"""Names that scripts import from ``triton_dist.profiler_utils``."""

from triton_dist.runtime.profiling import group_profile, perf_func

__all__ = ["group_profile", "perf_func"]
