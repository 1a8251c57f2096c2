"""Code shared by the benchmarks: shapes, measurement, JSON results, tables and plots."""
