"""Places on this host at which the ranks of a job, and who debugs them, find one another."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from triton_dist import knobs
from triton_dist.runtime.debugging.faults import NoSuchJob

_MEMBER = "member-"


def _prefix() -> str:
    return f"triton_dist-debug-{os.getuid()}-"


def _root() -> Path:
    return Path(tempfile.gettempdir())


def job_folder() -> Path:
    """The place of this process's job, by the port that its ranks meet at, or else by who started
    them."""
    job = knobs.environment().get("MASTER_PORT") or f"of-{os.getppid()}"
    return _root() / f"{_prefix()}{job}"


def made_folder() -> Path:
    """The same, made if it is not there, with this process as a member. Folders that have none any
    more are removed on the way: a process may end in ways in which it removes nothing."""
    folder = job_folder()
    member = folder / f"{_MEMBER}{os.getpid()}"
    if not member.exists():
        # One at a time: a folder that another rank has made and is not yet a member of has none.
        with (_root() / f"triton_dist-debug-lock-{os.getuid()}").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for other in _root().glob(f"{_prefix()}*"):
                if not _members(other):
                    shutil.rmtree(other, ignore_errors=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            member.touch()
    return folder


def folder_of(job: str | None, holds: str) -> Path:
    """The place of the job named ``job``; ``None``: of the only one with a file that matches
    ``holds``.

    Raises:
        NoSuchJob: there is none, or there are several.
    """
    found = {
        folder.name.removeprefix(_prefix()): folder
        for folder in sorted(_root().glob(f"{_prefix()}*"))
        if any(folder.glob(holds)) and _members(folder)
    }
    if job is None and len(found) == 1:
        return next(iter(found.values()))
    if job not in found:
        raise NoSuchJob(job, sorted(found))
    return found[job]


def _members(folder: Path) -> list[int]:
    pids = [int(path.name.removeprefix(_MEMBER)) for path in folder.glob(f"{_MEMBER}*")]
    return [pid for pid in pids if runs(pid)]


def runs(pid: int) -> bool:
    """False once the process has ended, also where its parent has not asked yet."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True
