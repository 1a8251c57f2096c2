"""What the suite under checks says of pytest's reports; make debug-suite runs it."""

from __future__ import annotations

from tests.debugging import suite

RACE = "--- rank 1: DataRace: rank 1, program (0, 0, 0) of kernel, kernel.py:7: load"
REPORT = f"""<testsuites><testsuite>
<testcase name="good"/>
<testcase name="skipped"><skipped message="needs a GPU"/></testcase>
<testcase name="races"><failure message="RanksFailed: &#10;--- rank 0: RankTimeout&#10;{RACE}"/>
</testcase>
<testcase name="bad"><failure message="assert 1 == 2&#10;more"/></testcase>
<testcase name="bad before"><error message="no fixture"/></testcase>
</testsuite></testsuites>"""


def test_a_rank_that_a_check_ended_comes_before_those_that_waited_for_it():
    said, failed = suite.outcome_of(REPORT)
    assert said == "3 failed, 1 passed, 1 skipped"
    assert failed == (
        f"races: {RACE}",
        "bad: assert 1 == 2",
        "bad before: no fixture",
    )
