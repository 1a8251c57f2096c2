"""File operations that raise only :class:`OSError` and do not block on pipes or devices.

In a shared folder, a pipe, a device or a folder may have a file name that the tuner uses. Only
regular files are read and written.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OPEN_FLAGS = os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK


def expand_home(path: Path) -> Path:
    """Return ``path`` with ``~`` expanded; unchanged if the home folder is unknown."""
    try:
        return path.expanduser()
    except RuntimeError:
        return path


@contextmanager
def os_errors(path: Path) -> Iterator[None]:
    """Context manager that raises ``OSError`` for each invalid ``path``.

    It converts the ``ValueError`` for a null byte, or for a character outside the file system's
    encoding. It also raises if ``path`` starts with ``~`` and the home folder is unknown.
    """
    if path.parts[:1] and path.parts[0].startswith("~"):
        why = "the home folder of this user is unknown; set HOME or TRITON_DIST_CACHE_DIR"
        raise OSError(errno.EINVAL, why, str(path))
    try:
        yield
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error), str(path)) from error


def open_regular(path: Path, flags: int) -> int:
    """Open a regular file and return its descriptor, without waiting for the writer of a pipe.

    Raise ``OSError`` if ``path`` is not a regular file.
    """
    with os_errors(path):
        file = os.open(path, flags | _OPEN_FLAGS, 0o666)
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def read_bytes(path: Path, max_bytes: int = 1 << 28) -> bytes:
    """Return the content of a regular file of at most ``max_bytes`` bytes. Raises ``OSError``."""
    with open(open_regular(path, os.O_RDONLY), "rb") as file:
        if (size := os.fstat(file.fileno()).st_size) > max_bytes:
            raise OSError(errno.EFBIG, f"it has {size} bytes, the limit is {max_bytes}", str(path))
        try:
            return file.read()
        except MemoryError as error:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), str(path)) from error


def names_in(folder: Path) -> list[str]:
    """Return the sorted names in ``folder``; an empty list if it does not exist."""
    try:
        with os_errors(folder):
            return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def make_folder(folder: Path) -> None:
    """Create ``folder`` and its parents if necessary. Raises ``OSError``."""
    with os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
