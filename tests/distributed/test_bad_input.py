"""Bad input is a typed error on every rank before any of them launches; then work goes on."""

from __future__ import annotations

from tests.distributed import bad_input_ranks
from tests.distributed.bad_input_ranks import K

LIMITS = {"TRITON_DIST_WAIT_TIMEOUT": "2"}


def test_one_rank_that_differs_is_an_error_on_all(spawn_ranks):
    by_rank = spawn_ranks(3, bad_input_ranks.one_rank_differs, env=LIMITS)
    for rank, seen in enumerate(by_rank):
        max_m, k, dtype, a_dtype, rows, layout, local_copy = seen
        own_fault = "InvalidArgument" if rank == 1 else "RankDisagreement"
        assert max_m[0] == own_fault
        assert "max_M is" in max_m[1]
        assert a_dtype[0] == own_fault
        assert "A.dtype is torch.bfloat16" in a_dtype[1]
        for kind, message in (k, dtype, rows, layout, local_copy):
            assert kind == "RankDisagreement"
            assert "  rank 1: " in message


def test_a_rank_that_does_not_come_is_named_in_time(spawn_ranks):
    limits = LIMITS | {"TRITON_DIST_AUTOTUNE_MEETING_TIMEOUT": "1"}
    first, _ = spawn_ranks(2, bad_input_ranks.one_rank_does_not_come, env=limits)
    assert 0.9 < first < 20  # and not the minute that there is by default


def test_too_little_shared_memory_says_how_much_is_missing(spawn_ranks):
    needed_at_least = 2**40 * 3 * K * 2
    for kind, needed, available, message in spawn_ranks(3, bad_input_ranks.too_large):
        assert kind == "SymmetricMemoryFull"
        assert needed >= needed_at_least
        assert 0 < available < needed
        assert f"needs {needed} bytes, {available} bytes are available" in message
        assert "/dev/shm" in message


def test_too_little_shared_memory_on_one_rank_is_an_error_on_all(spawn_ranks):
    for message in spawn_ranks(2, bad_input_ranks.full_on_one_rank):
        assert message.startswith("SymmetricMemoryFull: ag_gemm, rank 1, /dev/shm: ")
        assert "123 bytes are available" in message
