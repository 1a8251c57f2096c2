"""Folder on this host that the ranks of a job share with each other and with debugging tools."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from triton_dist import knobs

_MEMBER_PREFIX = "member-"  # of a file per process of the job


def _prefix() -> str:
    return f"triton_dist-debug-{os.getuid()}-"


def _root() -> Path:
    return Path(tempfile.gettempdir())


def job_folder() -> Path:
    """Return the folder of this process's job. Its name contains ``MASTER_PORT``, or the process id
    of the parent if ``MASTER_PORT`` is not set. All ranks of a job have the same folder."""
    job = knobs.environment().get("MASTER_PORT") or f"of-{os.getppid()}"
    return _root() / f"{_prefix()}{job}"


def create_job_folder() -> Path:
    """Create the job's folder if needed, register this process as a member and return the folder.
    Removes the folders of jobs without a running process, such as jobs that were killed."""
    folder = job_folder()
    member = folder / f"{_MEMBER_PREFIX}{os.getpid()}"
    if not member.exists():
        # Locked, because another rank may have created a folder without a member file yet.
        with (_root() / f"triton_dist-debug-lock-{os.getuid()}").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for other in _root().glob(f"{_prefix()}*"):
                if not _running_members(other):
                    shutil.rmtree(other, ignore_errors=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            member.touch()
    return folder


def job_folders(pattern: str) -> dict[str, Path]:
    """Return the folders of running jobs that contain a file matching ``pattern``, by job name."""
    return {
        folder.name.removeprefix(_prefix()): folder
        for folder in sorted(_root().glob(f"{_prefix()}*"))
        if any(folder.glob(pattern)) and _running_members(folder)
    }


def _running_members(folder: Path) -> list[int]:
    pids = [
        int(path.name.removeprefix(_MEMBER_PREFIX)) for path in folder.glob(f"{_MEMBER_PREFIX}*")
    ]
    return [pid for pid in pids if is_running(pid)]


def is_running(pid: int) -> bool:
    """Return whether process ``pid`` runs. A zombie does not count."""
    return process_state(pid)[0] not in ENDED_STATES


ENDED_STATES = ("", "Z", "X")
"""State letters of a process that does not exist, of a zombie and of a dead process."""


def process_state(pid: int) -> tuple[str, str]:
    """Return state letter and start time (ticks since boot); empty if there is no such process."""
    try:
        # The second field, the program's name in parentheses, may contain spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]
