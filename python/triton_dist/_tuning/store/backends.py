"""Access Redis, or a file system that fsspec supports, as a map from names to bytes with leases.

The methods may raise any exception and may block. :class:`RemoteStore` limits their time and
reports their errors. The libraries redis and fsspec are optional, and imported at the first use.
"""

from __future__ import annotations

import importlib
import os
import secrets
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TypeAlias

from triton_dist.errors import MissingExtra

_REDIS_SCHEMES = ("redis", "rediss")


class DamagedEntry(ValueError):
    """An entry cannot be read as bytes. The store itself works."""


def import_library(url: str) -> None:
    """Import the library for ``url``. Raise ``ImportError`` if it is not installed, and
    ``ValueError`` for an unsupported scheme."""
    scheme, separator, _ = url.partition("://")
    if not separator:
        raise ValueError("the URL has no scheme, such as redis:// or s3://")
    package = "redis" if scheme in _REDIS_SCHEMES else "fsspec"
    try:
        library = importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise MissingExtra(f"{scheme}://", package, package) from error
    if package == "fsspec":
        library.get_filesystem_class(scheme.partition("::")[0])


class _RedisBackend:
    """Backend that stores entries as strings that expire."""

    def __init__(self, url: str, seconds: float) -> None:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        limits = {"socket_timeout": seconds, "socket_connect_timeout": seconds}
        self._response_error = redis.exceptions.ResponseError
        self._client: Any = redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), **limits)

    def get(self, name: str, max_bytes: int) -> bytes | None:
        """Return the first ``max_bytes + 1`` bytes of an entry; ``None`` if it does not exist."""
        try:
            return bytes(self._client.getrange(name, 0, max_bytes)) or None
        except self._response_error as error:
            if str(error).startswith("WRONGTYPE"):
                raise DamagedEntry(f"it is not a string: {error}") from error
            raise

    def put(self, name: str, data: bytes, seconds: int) -> None:
        """Write or replace an entry. The store may delete it after ``seconds``."""
        self._client.set(name, data, ex=seconds)

    def names(self, prefix: str) -> Iterable[str]:
        """Return all names that begin with ``prefix``, which ends with a slash."""
        names = self._client.scan_iter(match=f"{prefix}*", count=1000)
        return [str(each, "ascii", "replace") for each in names]

    def acquire_lease(self, name: str, token: str, seconds: float) -> bool:
        """Create a lease that expires after ``seconds``. Return ``False`` if it exists already."""
        return bool(self._client.set(name, token, nx=True, px=max(1, int(seconds * 1000))))

    def remove(self, name: str) -> None:
        self._client.delete(name)


class _FileBackend:
    """Backend that stores entries as files. A lease is a file that expires by its age."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self._fs: Any
        self._fs, root = url_to_fs(url)
        self._root = root.rstrip("/")
        # Object stores replace a file atomically; local files are renamed (see `put`). In other
        # file systems, a reader may see a partial file, which it reports as damaged.
        self._is_local = url.startswith(("file://", "local://"))

    def get(self, name: str, max_bytes: int) -> bytes | None:
        try:
            return bytes(self._fs.cat_file(f"{self._root}/{name}", start=0, end=max_bytes + 1))
        except FileNotFoundError:
            return None
        except IsADirectoryError as error:
            raise DamagedEntry(f"it is not a file: {error}") from error

    def put(self, name: str, data: bytes, seconds: int) -> None:
        path = f"{self._root}/{name}"
        if not self._is_local:
            self._write(path, data)
            return
        temporary = f"{path}.{secrets.token_hex(8)}.tmp"
        try:
            self._write(temporary, data)
            os.replace(temporary, path)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary)

    def names(self, prefix: str) -> Iterable[str]:
        paths = self._fs.find(f"{self._root}/{prefix}".rstrip("/"))
        return [path[path.rindex(prefix) :] for path in paths]

    def acquire_lease(self, name: str, token: str, seconds: float) -> bool:
        path = f"{self._root}/{name}"
        for _ in range(2):
            with suppress(FileExistsError):
                self._write(path, token.encode(), mode="create")
                return True
            with suppress(FileNotFoundError):  # the holder has just removed the lease
                if self._fs.modified(path).timestamp() + seconds > time.time():
                    return False
                self._fs.rm_file(path)
        return False

    def remove(self, name: str) -> None:
        self._fs.rm_file(f"{self._root}/{name}")

    def _write(self, path: str, data: bytes, **options: str) -> None:
        """Write a file. If its folder is missing, create it; object stores have no folders."""
        try:
            self._fs.pipe_file(path, data, **options)
        except FileNotFoundError:
            self._fs.makedirs(os.path.dirname(path), exist_ok=True)
            self._fs.pipe_file(path, data, **options)


Backend: TypeAlias = _RedisBackend | _FileBackend


def connect(url: str, seconds: float) -> Backend:
    """Return the backend for ``url``. For Redis, ``seconds`` limits each wait for the server."""
    return (
        _RedisBackend(url, seconds)
        if url.partition("://")[0] in _REDIS_SCHEMES
        else _FileBackend(url)
    )
