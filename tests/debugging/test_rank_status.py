"""A job that runs is looked into: the session of docs/how-to/debug-in-pdb.md, and ``where``."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import re
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from tests.debugging import bugs
from tests.docs.markdown import DOCS, blocks
from tests.docs.run_blocks import check_output
from triton_dist.cli.main import main
from triton_dist.debugging import rank_status
from triton_dist.debugging.rank_status import folder_of
from triton_dist.runtime import job
from triton_dist.runtime.job import job_folder

PDB = DOCS / "how-to" / "debug-in-pdb.md"


class Job(threading.Thread):
    """Ranks that run while the test looks into them."""

    def __init__(self, run, *args):
        super().__init__()
        self._call = lambda: run(*args)
        self.results = []
        self.start()

    def run(self):
        self.results = self._call()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.join()


@contextlib.contextmanager
def hanging(two_ranks, folder):
    """The job of ``bugs.stands_still``, and the files that end its two hangs."""
    hangs = [folder / "1", folder / "2"]
    with Job(two_ranks, bugs.stands_still, str(folder)) as job:
        try:
            yield job, hangs
        finally:
            for path in hangs:
                path.touch()


def named(folder):
    """The name of the job whose place this is."""
    return folder.name.rpartition("-")[2]


def asked_until(pattern, job, seconds=90.0):
    """The first answer of ``where`` that has ``pattern``."""
    end, said = time.monotonic() + seconds, ""
    while time.monotonic() < end:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            main(["debug", "where", *(["--job", job] if job else [])])
        said = out.getvalue()
        if re.search(pattern, said):
            return said
        time.sleep(0.1)
    pytest.fail(f"{pattern} is not in\n{said}")


def attached(rank, typed, monkeypatch, tmp_path):
    """The session, with what was typed, as a terminal shows it."""
    (tmp_path / "typed").write_text("".join(f"{line}\n" for line in typed))
    shown = io.BytesIO()
    with (tmp_path / "typed").open("rb") as keys, monkeypatch.context() as patched:
        patched.setattr(sys, "stdin", SimpleNamespace(buffer=keys))
        patched.setattr(sys, "stdout", SimpleNamespace(buffer=shown, flush=lambda: None))
        assert main(["debug", "attach", str(rank), "--wait", "100"]) == 0
    prompt = f"(rank {rank}) "
    first, *answers = shown.getvalue().decode().split(prompt)
    assert len(answers) == len(typed)
    said = zip(typed, answers, strict=True)
    return first + "".join(f"{prompt}{line}\n{answer}" for line, answer in said)


def test_the_recorded_session_over_two_ranks(two_ranks, monkeypatch, tmp_path):
    program, *recorded = [block for block in blocks(PDB) if block.language in ("python", "text")]
    path = tmp_path / "ring.py"
    path.write_text(program.text)
    with Job(two_ranks, bugs.stands_in_pdb, str(path)) as job:
        for rank, block in enumerate(recorded):
            typed = re.findall(rf"^\(rank {rank}\) (.*)$", block.text, re.M)
            said = attached(rank, typed, monkeypatch, tmp_path)
            check_output(SimpleNamespace(expected=block.text, text="", id=block.id), said)
            if rank == 0:
                name = named(folder_of(None, "pdb-1.sock"))
                stands = r"rank 1 \(process \d+\): is at [^\n]*ring.py:15 in kernel_ring"
                said = asked_until(f"(?s)rank 0[^\n]*waits in a kernel.*{stands}", name)
                assert "waits for ring.flag[0] of rank 0 to reach 1, it is 0" in said
                time.sleep(0.5)  # beyond the limit of rank 0, which waits while rank 1 stands
    assert job.results == [[10.0, 11.0, 12.0, 13.0], [0.0, 1.0, 2.0, 3.0]]


def test_where_names_the_missing_notify_and_the_rank_that_does_not_come(two_ranks, tmp_path):
    name = named(two_ranks(job_folder)[0])  # ranks of other tests may be about
    with hanging(two_ranks, tmp_path) as (job, (first_hang, _)):
        place = f"of kernel_told, {bugs.__file__}:{bugs.line_of('told')}"
        awaited = "waits for bugs.flag[0] of rank 0 to reach 1, it is 0"
        stands = r"rank 1 \(process \d+\): is at [^\n]*bugs.py:\d+ in _from_leader"  # eventually
        said = asked_until(f"(?s){re.escape(f'{place}: {awaited}')}.*{stands}", name)
        assert "2 of 2 ranks answer" in said
        assert "has set: bugs.flag" not in said
        first_hang.touch()
        differs = "ag_gemm, calls: rank 0: 2  rank 1: 1 <- differs"
        said = asked_until(f"(?s)ag_gemm[^\n]*which rank 1 sets.*{differs}", name)
        assert "last launches: " in said
    (first, second), other = job.results
    assert first[0] == second[0] == "WaitNeverEnds"
    assert other == [("", ""), ("", "")]


def test_a_signal_prints_the_status_of_the_ranks_once(capfd, monkeypatch):
    """Interrupt a main thread that is in C code and executes no bytecode."""
    lock, report, said, count = threading.Lock(), rank_status.report, "", 0
    lock.acquire()

    def reported(folder):
        nonlocal count
        count += 1
        os.write(rank_status._write_end, b"another line of the stack")
        try:
            return report(folder)
        finally:
            if count == 1:
                lock.release()

    monkeypatch.setattr(rank_status, "report", reported)
    with bugs.checking("waits", "where"):
        threading.Timer(0.1, os.kill, (os.getpid(), rank_status.SIGNAL)).start()
        assert lock.acquire(timeout=30)
        end = time.monotonic() + 30
        while "in test_a_signal_prints" not in said and time.monotonic() < end:
            time.sleep(0.01)
            said += capfd.readouterr().err
        (thread,) = (each for each in threading.enumerate() if each.name == "triton_dist-where")
    thread.join(30)
    assert count == 1
    assert signal.getsignal(rank_status.SIGNAL) is signal.SIG_DFL
    assert "triton_dist: rank 0 reports the status of all ranks\njob " in said
    assert ": 1 of 1 ranks answer\n" in said
    place = rf"rank 0 \(process {os.getpid()}\): is at {re.escape(__file__)}:\d+ in test_a_signal"
    assert re.search(place, said)


def test_a_signal_that_the_program_uses_is_left_to_it():
    came = []
    before = signal.signal(rank_status.SIGNAL, lambda *_: came.append(1))
    try:
        with bugs.checking("where"):
            os.kill(os.getpid(), rank_status.SIGNAL)
    finally:
        signal.signal(rank_status.SIGNAL, before)
    assert came == [1]


def test_a_folder_without_members_is_left_to_the_rank_that_makes_it(monkeypatch, tmp_path):
    """Else one rank would remove what another has made and is not yet a member of."""
    monkeypatch.setattr(job, "_root", lambda: tmp_path)
    of_another = tmp_path / f"{job._prefix()}7"
    with (tmp_path / f"triton_dist-debug-lock-{os.getuid()}").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        of_another.mkdir()
        cleaner = threading.Thread(target=job.create_job_folder)
        cleaner.start()
        cleaner.join(0.1)
        assert cleaner.is_alive()
        (of_another / f"{job._MEMBER_PREFIX}{os.getpid()}").touch()
    cleaner.join()
    assert {path.name for path in tmp_path.glob(f"{job._prefix()}*")} == {
        of_another.name,
        job.job_folder().name,
    }


def test_a_job_that_is_not_there(capfd, monkeypatch):
    monkeypatch.setattr(rank_status, "_ANSWER_SECONDS", 0.1)
    assert main(["debug", "where", "--job", "none such"]) == 2
    assert "job none such: " in capfd.readouterr().err
    assert main(["debug", "attach", "0", "--job", "none such", "--wait", "0.1"]) == 2
    assert "job none such: " in capfd.readouterr().err
