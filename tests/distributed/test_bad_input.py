"""Bad input is a typed error on every rank before any of them launches; then work goes on."""

from __future__ import annotations

from tests.distributed import bad_input_ranks
from tests.distributed.bad_input_ranks import COLUMNS, ROWS, K, bad_calls, bad_contexts

LIMITS = {"TRITON_DIST_WAIT_TIMEOUT": "2"}

MESSAGES = {
    "A.dtype": "torch.bfloat16, expected the context's torch.float16",
    "A.dtype (integers)": "torch.int32, expected the context's torch.float16",
    "B.dtype": "torch.bfloat16, expected the context's torch.float16",
    "A.device": "device(type='meta'), expected the context's cpu",
    "A.shape": f"({ROWS}, {K + 1}), expected [M_per_rank, K = {K}]",
    "A.shape (no rows)": f"(0, {K}), expected [M_per_rank, K = {K}] with at least one row",
    "M (too many)": f"{2 * (ROWS + 1)}, expected at most the context's max_M = {2 * ROWS}",
    "B.shape": f"({K}, {COLUMNS + 1}), expected [K, N_per_rank] = ({K}, {COLUMNS})",
    "A.stride()": f"({2 * K}, 1), expected a contiguous A; call A.contiguous()",
    "num_chunks": "0, expected 1 to 8",
    "num_streams": "0, expected at least 1",
    "method": "'full_mesh_push', expected",
    "way": "'ring', expected None or one of 'full_mesh_push', ",
    "way (many rows)": f"expected another one for an M of more than {2 * (ROWS - 1)}",
    "num_comm_sms": "0, expected 1 to 256",
}

CONTEXT_MESSAGES = {
    "num_ranks": "3, expected 2, the size of the group",
    "max_M": f"{2 * ROWS + 1}, expected a positive multiple of num_ranks = 2",
    "N": f"{2 * COLUMNS + 1}, expected a positive multiple of num_ranks = 2",
    "K": "0, expected at least 1",
    "dtype": "torch.float64, expected torch.float16, torch.bfloat16 or torch.float32",
}


def argument_of(case: str) -> str:
    return case.split(" (")[0]


def test_a_bad_call_names_the_argument_and_launches_nothing(spawn_ranks):
    for seen in spawn_ranks(2, bad_input_ranks.every_bad_call):
        assert list(seen) == list(bad_calls(2))
        assert seen.keys() >= MESSAGES.keys()
        for case, (argument, message, launched) in seen.items():
            assert argument == argument_of(case)
            assert message.startswith(f"ag_gemm: {argument} is ")
            assert MESSAGES.get(case, "") in message
            assert launched == 0, case


def test_a_bad_context_names_the_argument(spawn_ranks):
    for rank, seen in enumerate(spawn_ranks(2, bad_input_ranks.every_bad_context)):
        assert list(seen) == list(bad_contexts(2, rank))
        for case, (argument, message) in seen.items():
            assert argument == argument_of(case)
            assert message.startswith(f"create_ag_gemm_context: {argument} is ")
            assert CONTEXT_MESSAGES.get(case, "") in message
        assert f"rank is {rank + 1}, expected {rank}" in seen["rank"][1]


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
