"""The few things that are asked of a disk, in a form that cannot hang or surprise.

A shared folder may hold anything under a name of ours: a pipe, a link to a device, a folder. Only
regular files are read and written. All else that goes wrong, whatever Python calls it, is an
:class:`OSError`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FLAGS = os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK


def expanded(path: Path) -> Path:
    """``path`` with the user's home folder for ``~``; unchanged, so that it can be named, if none
    is known. Then each use of it is refused."""
    try:
        return path.expanduser()
    except RuntimeError:
        return path


@contextmanager
def os_errors(path: Path) -> Iterator[None]:
    """Within, ``path`` is used; a ``ValueError`` (a null byte, a letter that the file system's
    encoding lacks) becomes an ``OSError``, and so does a home folder that nobody knows."""
    if path.parts[:1] and path.parts[0].startswith("~"):
        why = "nobody knows the home folder of this user; set HOME or TRITON_DIST_CACHE_DIR"
        raise OSError(errno.EINVAL, why, str(path))
    try:
        yield
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error), str(path)) from error


def open_regular(path: Path, flags: int) -> int:
    """A file descriptor of a regular file; does not wait for whoever is at the other end of a
    pipe.

    Raises:
        OSError: there is none, or something else lies there.
    """
    with os_errors(path):
        file = os.open(path, flags | _FLAGS, 0o666)
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def read_bytes(path: Path, largest: int = 1 << 28) -> bytes:
    """Return the content of a regular file of at most ``largest`` bytes. Raises ``OSError``."""
    with open(open_regular(path, os.O_RDONLY), "rb") as file:
        if (size := os.fstat(file.fileno()).st_size) > largest:
            raise OSError(errno.EFBIG, f"it has {size} bytes, the limit is {largest}", str(path))
        try:
            return file.read()
        except MemoryError as error:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), str(path)) from error


def names_in(folder: Path) -> list[str]:
    """Names in ``folder``, sorted; none if there is no such folder. Raises ``OSError``."""
    try:
        with os_errors(folder):
            return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def make_folder(folder: Path) -> None:
    """``folder`` with its parents, unless it is there. Raises ``OSError``."""
    with os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
