"""Write files atomically: write a temporary file next to the target and rename it.

After a full disk, a signal or a crash, the file has the old content. A reader gets the old or the
new content, never a mixture.
"""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

_STREAMS = ("/dev/std", "/dev/fd/", "/proc/")
"""Prefixes of paths that refer to open files of a process."""


def write(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path``. Create the folder if necessary.

    If ``path`` is a link, its target is replaced. A pipe or a device cannot be replaced and is
    written directly.

    Raises:
        OSError: ``path`` cannot be written; its content is unchanged.
    """
    if _is_stream(path):
        with open(path, "wb") as file:
            file.write(data)
        return
    target, temporary = _target_and_temporary(path)
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileNotFoundError):
            os.chmod(temporary, stat.S_IMODE(target.stat().st_mode))
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Raise ``OSError`` if :func:`write` would fail. Call it before long work."""
    if _is_stream(path):
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))  # opens a pipe even without a reader
        return
    _, temporary = _target_and_temporary(path)
    temporary.touch(exist_ok=False)
    temporary.unlink()


def _is_stream(path: Path) -> bool:
    """Return whether ``path`` is a pipe, device or open file; raise ``IsADirectoryError`` for a
    folder."""
    if path.is_dir():
        raise IsADirectoryError(21, os.strerror(21), str(path))
    return str(path).startswith(_STREAMS) or (path.exists() and not path.is_file())


def _target_and_temporary(path: Path) -> tuple[Path, Path]:
    """Return the file to replace, and a new temporary path next to it."""
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    return target, target.with_name(f".{secrets.token_hex(8)}.tmp")
