"""The harness of ``bench_overlap.py``: what is the same for every overlapped op, and the ops."""
