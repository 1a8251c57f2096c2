"""Planted bugs, and the checks that find them: the table of docs/how-to/debug-kernels.md."""

from __future__ import annotations

import os
import re

import pytest
import torch

from tests.debugging import bugs
from triton_dist.debugging.faults import WaitNeverEnds
from triton_dist.debugging.modes import CHECKS

SAID = {
    "load": (
        "program (1, 0, 0) of kernel_load",
        "load outside of x, float32 [30], memory of rank 0: 1 of 15 elements, the farthest is 4 "
        "bytes (1 elements of fp32) after its last element",
    ),
    "store": (
        "outside of x, float32 [16], memory of rank 0: 1 of 16 elements, the farthest is 4 bytes "
        "(1 elements of fp32) before its first element",
    ),
    "neighbour": ("store outside of bugs.one, memory of rank 0: 8 of 16 elements",),
    "epoch": (
        "waits for bugs.flag[0] of rank 0 to reach 2, it is 1: no rank can set it any more",
        "last set by rank 0, program (0, 0, 0) of kernel_epoch",
    ),
    "reset": ("program (2, 0, 0) of kernel_reset",),
}
"""How far, and who, in the report of a bug."""
REPORTS = {
    "programs": (
        "rank 0, program .1.* of kernel_neighbours, ",
        "load of element 0",
        "program 0 stored",
    ),
    "again": (
        "rank 0, program .0.* of kernel_neighbours, ",
        "store of element 0",
        "program 1 loaded",
    ),
    "swap": ("rank 0, program .* of kernel_swap, ", "load of element 0", "rank 1 stored"),
    "reuse": ("rank 1, program .* of kernel_swap, ", "store of element 0", "rank 0 loaded"),
    "reach": ("rank 0, program .* of kernel_reach, ", "load of element 16", "rank 1 stored"),
    "take": ("rank 0, program .* of kernel_take, ", "load of element 0", "a copy .* rank . stored"),
    "tile": (
        "rank 0, program .* of kernel_tile, ",
        "load of element 0",
        "rank 1 .* by TMA",
    ),
    "copy": ("rank 1, copy queued at ", "store of element 0", "rank 0 loaded"),
}
"""Where, what and who else, in the report of a race at a line."""


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("bug", bugs.BUGS)
def test_a_bug_is_found_by_its_check_and_by_no_other(bug, check, monkeypatch):
    monkeypatch.setenv("TRITON_DIST_WAIT_TIMEOUT", "0.1")  # of the other checks
    monkeypatch.setattr(bugs.deadlock_check, "QUIET_SECONDS", bugs.deadlock_check.QUIET_SECONDS)
    run, finds, error = bugs.BUGS[bug]
    if finds == "waits" == check:
        monkeypatch.delenv("TRITON_DIST_WAIT_TIMEOUT")
    kind, text = bugs.found(run, check, quiet=0.1)
    if check == finds or finds == "any":
        assert kind == error
        assert "rank 0, program (" in text
        assert f"of kernel_{bug}, {bugs.__file__}:{bugs.line_of(bug)}: " in text
        for said in SAID.get(bug, ()):
            assert said in text
    else:
        assert kind == ("WaitTimeout" if finds == "waits" else "")


def test_a_wait_is_told_as_itself_and_not_as_the_one_before(monkeypatch):
    monkeypatch.setenv("TRITON_DIST_WAIT_TIMEOUT", "0.01")
    flags, since = {"flag": ((1,), torch.int32)}, []
    with bugs.checking("waits"), bugs.symmetric.allocate("bugs", flags) as memory:
        notes = bugs.deadlock_check.waits.on_poll.__self__
        for bug, other in (("first", "second"), ("second", "first"), ("second", "first")):
            with pytest.raises(WaitNeverEnds) as raised:
                bugs.kernel_either[(1,)](memory["flag"].local, bug == "first")
            assert f"{bugs.__file__}:{bugs.line_of(bug)}: waits for" in str(raised.value)
            assert f"{bugs.__file__}:{bugs.line_of(other)}: " not in str(raised.value)
            since.append(notes._state()["unchanged_since"])
    assert sorted(set(since)) == since, "each began anew, though the last two are at one line"


@pytest.mark.parametrize(("as_of", "ends"), [(9.0, False), (11.0, False), (12.0, True)])
def test_a_wait_ends_by_what_others_told_since_it_began(as_of, ends, monkeypatch):
    monkeypatch.setattr(bugs.deadlock_check, "QUIET_SECONDS", 2.0)
    this = {"pid": os.getpid(), "unchanged_since": 10.0, "as_of": 20.0}
    other = {"pid": os.getpid(), "unchanged_since": 1.0, "as_of": as_of}
    assert bugs.deadlock_check._is_deadlocked({0: this, 1: other}) is ends


def test_bugs_between_ranks(two_ranks):
    first, second = two_ranks(bugs.on_each_rank)
    for told, rank in ((first, 0), (second, 1)):
        kind, text = told["circle"]
        assert kind == "WaitNeverEnds"
        for waits in (0, 1):
            place = f"rank {waits}, program (0, 0, 0) of kernel_circle, {bugs.__file__}"
            awaited = f"waits for bugs.flag[0] of rank {waits} to reach 1, it is 0"
            assert f"{place}:{bugs.line_of('circle')}: {awaited}" in text
        kind, text = told["neighbour"]
        assert kind == "OutOfBounds"
        assert f"rank {rank}, " in text
        assert (
            "outside of bugs.one" + (" of rank 1:" if rank == 0 else ", memory of rank 1:") in text
        )
    for bug in ("missing notify", "wrong peer"):
        kind, text = first[bug]
        assert kind == "WaitNeverEnds"
        assert (
            f"of kernel_told, {bugs.__file__}:{bugs.line_of('told')}: waits for bugs.flag[0]"
            in text
        )
        assert "rank 1: is not waiting in a kernel, but is at " in text
        assert "in _from_leader" in text
    assert "bugs.flag[0] of rank 1: set by rank 1, program (0, 0, 0) of kernel_told" in text


def test_races_between_ranks(two_ranks):
    ranks = two_ranks(bugs.races_of_each_rank)
    for race, (_, marker) in bugs.RACES.items():
        reports = [told[race] for told in ranks if told[race][0]]
        if not marker:
            assert reports == [], race
            continue
        assert [kind for kind, _ in reports] == ["DataRace"], race
        ((_, text),) = reports
        at, access, other = REPORTS[marker]
        place = f"{at}{bugs.__file__}:{bugs.line_of(marker)}"
        assert re.search(f"{place}.*: {access} of bugs.inbox of rank 0, which {other}", text)
        if marker == "take":
            copier = 0 if race.startswith("pull") else 1
            assert f"copy stream of rank {copier} stored at line {bugs.line_of('copy')}: " in text
        elif marker == "swap":
            assert f"stored at line {bugs.line_of('reuse')}: " in text
    # Races that are meant end nothing: each of the two epochs has its own.
    (kind, text), nothing = (told["meant"] for told in ranks)
    assert nothing == ("", "")
    assert kind == ""
    place = f"rank 0, program (0, 0, 0) of kernel_swap, {bugs.__file__}:{bugs.line_of('swap')}: "
    assert [line.startswith(place) for line in text.splitlines()] == [True, True]


def test_nothing_is_left_when_checks_are_off():
    before = torch.empty, dict(vars(bugs.tl.core)), vars(_builder()).copy()
    with bugs.checking(*CHECKS):
        assert torch.empty is not before[0]
    assert (torch.empty, dict(vars(bugs.tl.core)), vars(_builder()).copy()) == before
    assert bugs.deadlock_check.waits.on_poll is None


def _builder():
    from triton.runtime import interpreter

    return interpreter.InterpreterBuilder
