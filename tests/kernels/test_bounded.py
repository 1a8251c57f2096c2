"""Caches that services with very many shapes cannot fill without end."""

from __future__ import annotations

from triton_dist.kernels.common.launch import BoundedDict


def test_a_cache_is_emptied_before_it_has_more_than_its_most():
    cache = BoundedDict()
    cache.max_entries = 3
    for number in range(3):
        cache[number] = number
    cache[2] = "again"
    assert cache == {0: 0, 1: 1, 2: "again"}
    cache[3] = 3
    assert cache == {3: 3}
