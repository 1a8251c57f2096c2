"""Support for tests of distributed kernels: spawned ranks and tensor assertions."""

from __future__ import annotations

from triton_dist.errors import RankFailure, RanksFailed
from triton_dist.testing.assertions import assert_allclose, poisoned_empty
from triton_dist.testing.rank_pool import spawn_ranks

__all__ = ["RankFailure", "RanksFailed", "assert_allclose", "poisoned_empty", "spawn_ranks"]
