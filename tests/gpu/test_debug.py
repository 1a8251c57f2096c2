"""``triton-dist debug where`` while a kernel spins on a GPU."""

from __future__ import annotations

import re
import threading
import time

import pytest
import torch

from tests.debugging.late_rank import comes_late
from tests.debugging.test_rank_status import asked_until, named
from triton_dist.testing import spawn_ranks

pytestmark = [pytest.mark.timeout(300), pytest.mark.gpu]


def test_where_reads_flags_while_a_kernel_waits_for_a_rank_that_is_late(tmp_path):
    come, results = tmp_path / "come", []

    def ranks():
        results.extend(
            spawn_ranks(
                2, comes_late, str(come), device="cuda", timeout=110,
                share_gpus=torch.cuda.device_count() < 2,
            )
        )  # fmt: skip

    job = threading.Thread(target=ranks)
    job.start()
    waits = r"a kernel of ag_gemm waits for ag_gemm\.\S+ .*which rank 1 sets"
    late = r"rank 1 \(process \d+\): is at .*late_rank.py:\d+ in comes_late"
    try:
        while not (jobs := [*tmp_path.glob("triton_dist-debug-*")]):
            assert job.is_alive()
            time.sleep(0.1)
        # Rank 1 may still be on its way out of its first call when rank 0 waits already.
        said = asked_until(rf"(?=[\s\S]*{waits})(?=[\s\S]*{late})", named(jobs[0]))
    finally:
        come.touch()
        job.join()
    assert re.search(r"ag_gemm, calls: rank 0: 2  rank 1: 1 <- differs", said)
    assert re.search(r"ag_gemm, epoch of slot \d: rank 0: \d+  rank 1: \d+", said)
    assert "last launches: " in said
    assert results == [True, True]
