"""Marks inside kernels: when they are made, and what a timeline says of them."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl

from triton_dist import language as dl
from triton_dist import tune
from triton_dist._jit import jit
from triton_dist.errors import InvalidArgument
from triton_dist.profiler_utils import group_profile
from triton_dist.runtime import marking
from triton_dist.runtime.marking import FlagEvent, Mark, Marks
from triton_dist.timelines import trace
from triton_dist.timelines.marks import mark_shares

launches = []


@jit
def kernel_fill(out_ptr, value, WORD: tl.constexpr):
    with dl.mark("mma"):
        for _ in range(2):
            with dl.mark("load", pipelined=True):
                more = tl.load(out_ptr)
    with dl.mark(WORD):
        tl.store(out_ptr + tl.program_id(1), value + more * 0)


@tune.autotune(config_space=[{"value": 1}, {"value": 2}], key_fn=len)
def fill(out, value):
    launches.append(value)
    kernel_fill[(2, 3)](out, value, "store")
    return out


def marks_of(file):
    return [event for event in trace.read(file)["traceEvents"] if event.get("cat") == "mark"]


def test_the_winner_alone_makes_marks(tmp_path):
    launches.clear()
    with group_profile("tuned", folder=tmp_path, marks=True):
        fill(torch.zeros(3))
        tried = len(launches) - 1
        fill(torch.zeros(3))
        fill.fn(torch.zeros(3), 1)  # of no call of a tuned function
    assert tried > 2
    merged = tmp_path / "tuned_merged.json.gz"
    made = [event["name"] for event in marks_of(merged)]
    assert {word: made.count(word) for word in set(made)} == {"mma": 12, "load": 24, "store": 12}
    tuned, warm = trace.metadata_of_calls(trace.read(merged))
    assert (tuned["tuned"], warm["tuned"]) == (True, False)
    assert set(warm["marks"]) == {"mma", "load", "store"}
    programs = {event["args"]["program"] for event in marks_of(merged)}
    assert programs == set(range(6))
    rows = [e for e in trace.read(merged)["traceEvents"] if e.get("name") == "thread_name"]
    names = {row["args"]["name"] for row in rows if str(row["pid"]).endswith("marks in kernels")}
    assert names == {f"program {number}" for number in programs}


def test_without_marks_there_are_none(tmp_path):
    with group_profile("plain", folder=tmp_path):
        fill(torch.zeros(3), autotune=False)
    content = trace.read(tmp_path / "plain_merged.json.gz")
    assert not marks_of(tmp_path / "plain_merged.json.gz")
    assert all("marks" not in call for call in trace.metadata_of_calls(content))


def test_marks_end_within_what_tries_candidates_wherever_it_is():
    marks = Marks(None)
    with marks.on():
        with marks.on(), marking.off():
            assert marking.current() is None
            with marks.on():
                assert marking.current() is None
        assert marking.current() is marks
    assert marking.current() is None


def test_a_word_that_no_timeline_knows_is_refused_whether_marks_are_on_or_not():
    with pytest.raises(InvalidArgument, match="name is 'nap', expected one of"):
        dl.mark("nap")


def test_marks_beyond_what_is_kept_are_counted(monkeypatch):
    monkeypatch.setattr(marking, "MAX_MARKS", 5)
    marks = Marks(None)
    with marks.on():
        kernel_fill[(2, 2)](torch.zeros(2), 1, "push")
    kept, made = marks.read()
    assert (len(kept), made) == (5, 16)
    assert all(mark.begin_ns <= mark.end_ns for mark in kept)


def test_what_compiled_kernels_write_is_taken_apart():
    marks = Marks(torch.device("cpu"))
    memory = marking._buffer(torch.device("cpu"))
    word = 300 << 32 | 2 << 8 | marking.MARK_NAMES.index("store")
    flag = 300 << 32 | marking.FLAG_SET
    words = torch.tensor([7, 9, word, 0, 8, 2**47, flag, 5 << 20])
    memory[0] = 2
    memory[marking.HEADER_WORDS : marking.HEADER_WORDS + 2 * marking.WORDS_PER_MARK] = words
    mark = Mark("store", 300, 2, 7, 9)
    assert marks.read() == ([mark, FlagEvent(True, 300, 0, 8, 2**47, 5 << 20)], 2)
    assert (
        Marks(torch.device("cpu")).address == marks.address
    )  # kernels that are compiled stay good
    assert marks.read() == ([], 0)


def test_shares_are_of_the_time_of_all_programs():
    made = [
        Mark("wait", 0, 0, 100, 130), Mark("mma", 0, 0, 130, 190), Mark("store", 0, 0, 195, 200),
        Mark("load", 0, 1, 100, 150), Mark("load", 1, 0, 100, 150), Mark("push", -7, 0, 0, 999, 4),
    ]  # fmt: skip
    assert mark_shares(made) == {"wait": 0.15, "load": 0.5, "mma": 0.3, "store": 0.025}
    assert mark_shares([]) == {}
