"""Slots that count their uses: their turns, and who learns that a wait gave up."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import triton.language as tl

import triton_dist
from triton_dist.errors import RankDisagreement, WaitTimeout
from triton_dist.kernels.common.peers import Disagreements, flag_value
from triton_dist.kernels.common.slots.epochs import (
    FLAG_WORD,
    GAVE_UP,
    EpochSlots,
    kernel_await_consumption,
)
from triton_dist.language.signals import DISAGREED, note_disagreement
from triton_dist.runtime import waits
from triton_dist.runtime.device import current_device
from triton_dist.runtime.waits import bounded_waits


def slots(name="test", found=None):
    regions = {"flags": ((4,), torch.int64), "data": ((3,), torch.float32)}
    return EpochSlots(name, regions, ("flags",), "the kernel of a test", None, disagreements=found)


def counting_waits():
    """The waits of the host for the device from now on, in this process: a list that grows."""
    device, seen = current_device(), []
    device.synchronize = lambda seconds=None: seen.append(seconds)
    return seen


def give_up(used):
    """What a kernel on a GPU does when its wait took too long; interpreted ones raise."""
    used.epoch[GAVE_UP.value] = 1


def settled_by_the_caller():
    """Calls with bounded waits, with and without somebody who settles: waits of the host for the
    device after each step, and the error of a call of which flag 2 did not come."""
    used, waits_seen, steps = slots(), counting_waits(), []

    def call(gives_up=False, behind=1):
        used.take()
        if gives_up:
            give_up(used)
            used["flags"].local[:] = used.epoch[FLAG_WORD]
            used["flags"].local[2] -= flag_value(behind, 0)
        used.finish(has_awaited_peers=True, awaited_flags=lambda: {"flags": [0, 2, 3]})
        steps.append(len(waits_seen))

    call()
    with bounded_waits(20.0):
        call()
        with waits.deferred_checks(current_device(), 20.0) as run_checks:
            call()
            call(gives_up=True)
            call()
            call()  # the slot is used again before anybody looks
            with pytest.raises(WaitTimeout) as overdue:
                run_checks()
            steps.append(len(waits_seen))
            call()
            run_checks()  # told once
            steps.append(len(waits_seen))
        with pytest.raises(WaitTimeout, match="arrived since"):
            call(gives_up=True, behind=0)
        dist.barrier()
    used.reset()
    before = len(waits_seen)
    call()
    assert len(waits_seen) == before  # production waits for nothing
    used.memory.barrier()
    used.free()
    error = overdue.value
    return steps, (error.flag, error.expected, error.seen, "the kernel of a test" in str(error))


def test_the_host_waits_in_the_call_only_if_nobody_settles(spawn_ranks):
    # production; checked in the call; four calls and a settling; another call and its settling;
    # after the reset, once more in production
    steps = [0, 1, 1, 1, 1, 1, 2, 2, 3]
    # The call that gave up was the second in the first slot.
    error = ("test.flags0[2]", 2, 1, True)
    for seen, told in spawn_ranks(2, settled_by_the_caller):
        assert seen[: len(steps)] == steps
        assert told == error


def nothing_is_left_of_earlier_trials():
    used = slots()
    for _ in range(2):
        with bounded_waits(20.0), waits.deferred_checks(current_device(), 20.0):
            used.take()
            give_up(used)
            used.finish()
            # the caller leaves without looking
        with bounded_waits(20.0), waits.deferred_checks(current_device(), 20.0) as run_checks:
            used.take()
            used.finish()
            run_checks()
        used.take()
        used.finish()
    used.memory.barrier()
    used.free()


def test_nobody_is_blamed_for_what_earlier_trials_left(spawn_ranks):
    spawn_ranks(2, nothing_is_left_of_earlier_trials)


def test_freed_slots_have_nothing_to_say():
    used = slots("freed")
    used.free()
    assert used.timeout_words.timeout_error() is None


@triton_dist.jit
def kernel_note(epoch_ptr, flag_ptr):
    note_disagreement(epoch_ptr + 1, flag_ptr.to(tl.int64), 5, 7)


def test_a_disagreement_ends_the_waits_of_all_memories_of_a_context():
    found = Disagreements("the rows of A", None)
    memories = [slots(name, found) for name in ("first", "second", "third")]
    control_words = [used.control_words_of_slot(slot) for used in memories for slot in (0, 1)]
    for number in (3, 0):
        kernel_note[(1,)](
            control_words[number], memories[number // 2].region_of_slot(number % 2, "flags").local
        )
        expected = [1] * 6
        expected[number] = DISAGREED.value
        assert [int(words[GAVE_UP.value]) for words in control_words] == expected
        for used in memories:
            assert isinstance(used.timeout_words.timeout_error(), RankDisagreement)
        with pytest.raises(RankDisagreement, match="the rows of A"):
            found.check()
        for used in memories:
            used.reset()
        found.check()
        assert not any(int(words[GAVE_UP.value]) for words in control_words)
    for used in memories:
        used.free()


def test_one_rank_launches_nothing(monkeypatch):
    used = slots("alone")
    monkeypatch.setattr(used.launcher, "run", lambda *_, **__: pytest.fail("launched"))
    with bounded_waits(20.0):
        for index in (1, 0, 1):
            used.take()
            used.finish()
            assert used.index == index
        assert used.run_without_slots(lambda: 3) == 3
    used.free()


@pytest.mark.parametrize("peer_is_done", [True, False])
def test_a_slot_is_free_once_peers_have_consumed_its_last_use(monkeypatch, peer_is_done):
    monkeypatch.setenv("TRITON_DIST_WAIT_TIMEOUT", "0.05")
    line = torch.zeros(16, dtype=torch.int64)
    line[FLAG_WORD] = flag_value(5, 0)
    # Of rank 0, who waits, no flag is looked at; rank 1 has consumed the fourth use, or the third.
    consumed = torch.tensor([0, 4 if peer_is_done else 3], dtype=torch.int32)
    if peer_is_done:
        kernel_await_consumption[(1,)](line, consumed, 7, 0, 2)
        assert int(line[FLAG_WORD]) == flag_value(5, 7)
    else:
        with pytest.raises(WaitTimeout):
            kernel_await_consumption[(1,)](line, consumed, 7, 0, 2)
