"""Share tuning records between machines through a remote store, such as Redis or S3.

An entry of the store has a line of JSON, and then a record as in a local file:

    {"expires": 1798761600, "hmac": "5f2c..."}
    {"schema": 4, ...}

The name of an entry has the version of the record format, the digest of the key, and the digest of
the fingerprint (hardware, software, code) without patch levels. Machines that can use each other's
records therefore use the same entry. An entry is parsed as JSON and checked like a local file.
Nothing in it is executed.

Only rank 0 of a group uses the store. Each request runs in its own thread and is abandoned after a
time limit, because client libraries may block for longer than their own limits.
"""

from __future__ import annotations

import functools
import hmac
import json
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import unquote

from triton_dist import knobs
from triton_dist._tuning.store.backends import Backend, DamagedEntry, connect, import_library
from triton_dist._tuning.store.layout import read_record, record_text
from triton_dist._tuning.values import SCHEMA, Fingerprint, Key, StoredRecord, TuningRecord, codec
from triton_dist._tuning.values.outcome import UNREADABLE
from triton_dist._warn import warn
from triton_dist.errors import CacheWarning, NewerSchema

MAX_ENTRY_BYTES = 8 << 20
_NAMESPACE = f"triton_dist-{SCHEMA}/"
_ENTRY_NAME = re.compile(re.escape(_NAMESPACE) + r"[\w-]+/[0-9a-f]{32}-[0-9a-f]{32}", re.ASCII)
_UNREACHABLE = {"TimeoutError", "ConnectionError", "gaierror", "ImportError"}
"""Exception classes of Python, redis and botocore for a store that cannot be reached."""
_FIRST_PAUSE, _MAX_PAUSE = 0.1, 2.0
"""Seconds between two look-ups while another job tunes. Each pause is longer than the last."""

T = TypeVar("T")


@dataclass(eq=False, repr=False)
class RemoteStore:
    """Records in a store that other machines read and write.

    A *lease* of a key lets one job tune while other jobs wait for its record.

    ``find``, ``publish`` and ``release`` never raise. If the store cannot be reached or a read
    fails, they do not use the store again. If a write or a lease fails for another reason, they
    make no further writes, or leases. The other methods raise ``OSError`` if a request fails.

    Attributes:
        url: URL without credentials, for messages.
    """

    _url: str
    _seconds: float
    """Time limit of a request, in seconds."""
    read_only: bool = False
    ttl: float = 86400.0
    """Seconds after which a written entry expires."""
    lease_seconds: float = 0.0
    """Seconds after which a lease expires. 0: jobs use no leases."""
    secret: str = ""
    """Key of the entries' signatures. Empty: entries are not signed."""

    def __post_init__(self) -> None:
        self.url = without_secrets(self._url, self._url)
        if self.read_only:
            self.lease_seconds = 0.0
        self._backend: Backend | None = None
        self._disabled_operations: set[str] = set()
        self._warned: set[str] = set()
        self._leases: dict[str, str] = {}
        """Token of each lease that this process holds, by name of the entry."""

    def max_find_seconds(self, may_wait: bool) -> float:
        """Return the maximum duration of :meth:`find` in seconds."""
        # After the wait: a look-up, the lease, a second look-up, and the release.
        return self.lease_seconds + 4 * self._seconds if may_wait else 2 * self._seconds

    def find(
        self, key: Key, fingerprint: Fingerprint,
        is_valid: Callable[[TuningRecord], bool], may_wait: bool,
    ) -> StoredRecord | None:  # fmt: skip
        """Return the record of ``key`` if ``is_valid(record)`` is true, else ``None``.

        The caller tunes if there is no valid record. Therefore, with ``may_wait`` and leases, take
        the lease of this key before returning ``None``. If another job holds the lease, wait at
        most ``lease_seconds`` for the record of that job.
        """
        name = entry_name(key, fingerprint)
        lease, token, seconds = f"{name}.lease", secrets.token_hex(8), self.lease_seconds
        deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE
        while True:
            record = self._attempt("read", lambda: self.read(name))
            if record is not None and is_valid(record):
                self.release(key, fingerprint)
                return StoredRecord(record, f"{self.url}/{name}")
            if name in self._leases or not (may_wait and seconds):
                return None
            acquired = self._attempt(
                "lease",
                lambda: self.request(lambda backend: backend.acquire_lease(lease, token, seconds)),
            )
            if acquired:
                # Read again: another job may have published between the look-up and the lease.
                self._leases[name] = token
                continue
            if pause == _FIRST_PAUSE:
                log = logging.getLogger("triton_dist.cache")
                log.info("%s/%s: waiting for another job, %g s at most", self.url, name, seconds)
            remaining = deadline - time.monotonic()
            if acquired is None or remaining <= 0:  # ``None``: the request failed
                return None
            time.sleep(min(pause, remaining))
            pause = min(1.5 * pause, _MAX_PAUSE)

    def publish(self, record: TuningRecord) -> None:
        """Publish ``record`` for other machines, unless the store is read-only."""
        if not self.read_only:
            self._attempt("write", lambda: self.write(record))

    def release(self, key: Key, fingerprint: Fingerprint) -> None:
        """Release the lease of this key, if this process holds it."""
        name = entry_name(key, fingerprint)
        token = self._leases.pop(name, "").encode()

        def remove(backend: Backend) -> None:
            # Not atomic: if the lease expires between the two requests, the lease of another job is
            # removed, and one more job tunes.
            if backend.get(f"{name}.lease", 64) == token:
                backend.remove(f"{name}.lease")

        if token:
            self._attempt("lease", lambda: self.request(remove))

    def records(self, function: str | None = None) -> Iterator[StoredRecord]:
        """Yield all records, or the records of functions with the bare name ``function``."""
        prefix = _NAMESPACE if function is None else f"{_NAMESPACE}{_folder(function)}/"
        for name in sorted(self.request(lambda backend: list(backend.names(prefix)))):
            record = self.read(name) if _ENTRY_NAME.fullmatch(name) else None
            if record is not None:
                yield StoredRecord(record, f"{self.url}/{name}")

    def read(self, name: str) -> TuningRecord | None:
        """Return the record in an entry; ``None`` if it is missing, expired or (with a warning)
        damaged."""
        try:
            data = self.request(lambda backend: backend.get(name, MAX_ENTRY_BYTES))
            return None if data is None else self._parsed(name, data)
        except (NewerSchema, RecursionError, *UNREADABLE) as error:
            self._warn(name, f"entry {name} is not used: {error}")
            return None

    def write(self, record: TuningRecord) -> bool:
        """Write the entry of ``record``. Return ``False``, and warn, if it is too large."""
        name, ttl = entry_name(record.key, record.fingerprint), max(1, int(self.ttl))
        expires, body = int(time.time()) + ttl, record_text(record).encode("ascii")
        head = {"expires": expires, "hmac": self._signature(name, expires, body)}
        data = json.dumps(head).encode("ascii") + b"\n" + body
        if len(data) > MAX_ENTRY_BYTES:
            self._warn(
                name, f"entry {name} is not written: {len(data)} bytes, at most {MAX_ENTRY_BYTES}"
            )
            return False
        self.request(lambda backend: backend.put(name, data, ttl))
        return True

    def request(self, work: Callable[[Backend], T]) -> T:
        """Return the result of ``work(backend)``, computed in another thread within the time limit.

        Raises:
            ConnectionError: the store did not answer.
            OSError: another error of the store.
            DamagedEntry: ``work`` raised it.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                self._backend = self._backend or connect(self._url, self._seconds)
                future.set_result(work(self._backend))
            except BaseException as error:
                future.set_exception(error)

        try:
            import_library(self._url)
            # Not a thread pool: it would join its threads when the process ends.
            threading.Thread(target=run, name="triton_dist.remote", daemon=True).start()
            return future.result(self._seconds)
        except DamagedEntry:
            raise
        except Exception as error:
            reason = without_secrets(f"{type(error).__name__}: {error}", self._url)
            if isinstance(error, FutureTimeout) and not future.done():
                reason = f"no answer within {self._seconds:g} s"
            is_unreachable = not _UNREACHABLE.isdisjoint(k.__name__ for k in type(error).__mro__)
        # Outside of the ``except`` block, so that no traceback shows the original error, which may
        # contain the password.
        error_type = ConnectionError if is_unreachable else OSError
        raise error_type(f"remote store {self.url}: {reason}")

    def _attempt(self, operation: str, request: Callable[[], T]) -> T | None:
        """Return the result of ``request()``. If it fails, warn and return ``None``."""
        if operation in self._disabled_operations:
            return None
        try:
            return request()
        except (OSError, ValueError) as error:  # DamagedEntry is a ValueError
            if isinstance(error, ConnectionError) or operation == "read":
                self._disabled_operations |= {"read", "write", "lease"}
                ending = "This process continues without it"
            else:
                self._disabled_operations.add(operation)
                ending = f"This process makes no further {operation} requests"
            warn(f"{str(error).rstrip('.')}. {ending}", CacheWarning)
        return None

    def _warn(self, name: str, text: str) -> None:
        """Warn once about each entry."""
        if name not in self._warned:
            self._warned.add(name)
            warn(f"remote store {self.url}: {text}", CacheWarning)

    def _parsed(self, name: str, data: bytes) -> TuningRecord | None:
        """Return the record in ``data``; ``None`` if it has expired. Raises ``ValueError``."""
        if len(data) > MAX_ENTRY_BYTES:
            raise ValueError(f"it has more than {MAX_ENTRY_BYTES} bytes")
        line, _, body = data.partition(b"\n")
        head = codec.loads(line)
        expires = head.get("expires") if isinstance(head, dict) else None
        if type(expires) is not int:
            raise ValueError("its first line has no time of expiry")
        expected, signature = self._signature(name, expires, body), str(head.get("hmac"))
        if self.secret and not hmac.compare_digest(expected.encode(), signature.encode()):
            raise ValueError(f"its signature does not match {knobs.autotune_remote_key.variable}")
        if expires < time.time():
            return None
        record = read_record(body)
        _ = record.trials  # parse the trials now, because a later error would end a tuning
        if entry_name(record.key, record.fingerprint) != name:
            raise ValueError(f"it is the record of another key, {record.key.text}")
        return record

    def _signature(self, name: str, expires: int, body: bytes) -> str:
        # The name is signed too, so that an entry cannot be copied to another key.
        signed = f"{name}\n{expires}\n".encode() + body
        return (
            hmac.new(os.fsencode(self.secret), signed, "sha256").hexdigest() if self.secret else ""
        )


def entry_name(key: Key, fingerprint: Fingerprint) -> str:
    """Return the name of the entry for a record with this key and fingerprint."""
    return f"{_NAMESPACE}{_folder(key.function_name)}/{key.digest}-{fingerprint.digest}"


def _folder(function: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", function)[:100] or "_"


def without_secrets(text: str, url: str) -> str:
    """Return ``text`` with the user, password and query of ``url`` replaced by ``***``."""
    rest = url.partition("://")[2] or url
    credentials, query = rest.rpartition("@")[0], rest.partition("?")[2]
    password = credentials.rpartition("://")[2].partition(":")[2]
    # If delimiters in a password are not escaped, parsers take a part of it for the host or port,
    # and ``text`` may contain this part alone.
    secret_parts = {credentials, password, query, *re.split("[/?#@:]", password)}
    # Values of one or two characters, such as 1 in db=1, also occur elsewhere in the text.
    values = (part.partition("=")[2] for part in query.split("&"))
    secret_parts |= {value for value in values if len(value) > 2}
    if "?" in credentials or "://" in rest or rest == url:
        secret_parts.add(rest)  # it is ambiguous which part is secret
    secret_parts |= {unquote(each) for each in secret_parts}
    for secret in sorted(filter(None, secret_parts), key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


_cached_store = functools.cache(RemoteStore)
# A forked process cannot share the connections of its parent.
os.register_at_fork(after_in_child=_cached_store.cache_clear)


def configured_remote(seconds: float | None = None) -> RemoteStore | None:
    """Return the store that the environment variables name, or ``None``.

    Equal settings return the same object, because it records that the store cannot be reached.

    Args:
        seconds: time limit of a request; by default ``TRITON_DIST_AUTOTUNE_REMOTE_TIMEOUT``.
    """
    url = knobs.autotune_remote.get()
    if not url:
        return None
    return _cached_store(
        url,
        seconds or knobs.autotune_remote_timeout.get(),
        knobs.autotune_remote_readonly.get(),
        knobs.autotune_remote_ttl.get(),
        knobs.autotune_remote_lease.get(),
        knobs.autotune_remote_key.get() or "",
    )
