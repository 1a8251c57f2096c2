"""Harness of ``bench_overlap.py``: code that all overlapped ops share."""
