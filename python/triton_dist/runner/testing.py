"""Triton's own testing functions, under the module name that triton-runner's scripts import."""

from triton.testing import Benchmark as Benchmark
from triton.testing import Mark as Mark
from triton.testing import assert_close as assert_close
from triton.testing import do_bench as do_bench
from triton.testing import do_bench_cudagraph as do_bench_cudagraph
from triton.testing import perf_report as perf_report
