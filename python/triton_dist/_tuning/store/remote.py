"""Share tuning records between machines through a store that they all reach.

An entry is a line of JSON, then the record as in a local file:

    {"expires": 1798761600, "hmac": "5f2c..."}
    {"schema": 4, ...}

Its name contains the schema, the key, and a digest of the fingerprint without patch levels.
Machines that can use each other's records share one entry, and others have their own. An entry is
parsed as JSON and checked like a local file. Nothing in it is executed.

Only the leader of a group uses the store. Each request runs in its own thread and is abandoned at
a time limit, because client libraries may block for longer than their own limits.
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

MAX_BYTES = 8 << 20
"""Size limit of an entry."""
_NAMESPACE = f"triton_dist-{SCHEMA}/"
_NAME = re.compile(re.escape(_NAMESPACE) + r"[\w-]+/[0-9a-f]{32}-[0-9a-f]{32}", re.ASCII)
_UNREACHABLE = {"TimeoutError", "ConnectionError", "gaierror", "ImportError"}
"""Names of exception classes (builtin, redis, botocore) that mean that the store cannot be
reached."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
"""Seconds between two look-ups while another job tunes."""

T = TypeVar("T")


@dataclass(eq=False, repr=False)
class RemoteStore:
    """Records in a store that other machines read and write.

    ``find``, ``publish`` and ``release`` never raise. If the store cannot be reached or a read
    fails, it is not used again. After another failed write or lease, only requests of that kind
    stop. All other methods raise ``OSError`` if the store cannot be used.

    Attributes:
        url: URL without credentials.
    """

    _url: str
    _seconds: float
    """Time limit of a request."""
    read_only: bool = False
    ttl: float = 86400.0
    lease_seconds: float = 0.0
    secret: str = ""
    """Key of the signatures. Empty: records are not signed."""

    def __post_init__(self) -> None:
        self.url = without_secrets(self._url, self._url)
        if self.read_only:
            self.lease_seconds = 0.0
        self._backend: Backend | None = None
        self._disabled_operations: set[str] = set()
        self._warned: set[str] = set()
        self._leases: dict[str, str] = {}
        """Tokens of the leases that this process holds, by name of the entry."""

    def longest_find(self, may_wait: bool) -> float:
        """Return the maximum duration of :meth:`find` in seconds."""
        # After the wait: a look-up, the lease, a second look-up, and the release.
        return self.lease_seconds + 4 * self._seconds if may_wait else 2 * self._seconds

    def find(
        self, key: Key, fingerprint: Fingerprint,
        is_valid: Callable[[TuningRecord], bool], may_wait: bool,
    ) -> StoredRecord | None:  # fmt: skip
        """Return the record of ``key`` if ``is_valid(record)`` is true, else ``None``.

        Without such a record the caller tunes. If ``may_wait`` is true and leases are on, first
        take the lease of this key, or wait at most ``lease_seconds`` for the record of the job that
        holds it.
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
            left = deadline - time.monotonic()
            if acquired is None or left <= 0:  # ``None``: the store failed
                return None
            time.sleep(min(pause, left))
            pause = min(1.5 * pause, _LONGEST_PAUSE)

    def publish(self, record: TuningRecord) -> None:
        """Publish ``record`` for other machines, unless the store is read-only."""
        if not self.read_only:
            self._attempt("write", lambda: self.write(record))

    def release(self, key: Key, fingerprint: Fingerprint) -> None:
        """Release the lease of this key, if this process holds it."""
        name = entry_name(key, fingerprint)
        token = self._leases.pop(name, "").encode()

        def remove(backend: Backend) -> None:
            # Not atomic: if the lease expires in between, another job's lease is removed, and one
            # more job tunes.
            if backend.get(f"{name}.lease", 64) == token:
                backend.remove(f"{name}.lease")

        if token:
            self._attempt("lease", lambda: self.request(remove))

    def records(self, function: str | None = None) -> Iterator[StoredRecord]:
        """Yield all records, or the records of functions with the bare name ``function``."""
        start = _NAMESPACE if function is None else f"{_NAMESPACE}{_folder(function)}/"
        for name in sorted(self.request(lambda backend: list(backend.names(start)))):
            record = self.read(name) if _NAME.fullmatch(name) else None
            if record is not None:
                yield StoredRecord(record, f"{self.url}/{name}")

    def read(self, name: str) -> TuningRecord | None:
        """Return the record in an entry; ``None`` if it is missing, expired or (warn) damaged."""
        try:
            data = self.request(lambda backend: backend.get(name, MAX_BYTES))
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
        if len(data) > MAX_BYTES:
            self._warn(name, f"entry {name} is not written: {len(data)} bytes, at most {MAX_BYTES}")
            return False
        self.request(lambda backend: backend.put(name, data, ttl))
        return True

    def request(self, work: Callable[[Backend], T]) -> T:
        """Return the result of ``work(backend)``, computed in another thread within the time limit.

        Raises:
            ConnectionError: the store did not answer.
            OSError: another error of the store.
            DamagedEntry: raised by ``work``.
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
            # A pool would join its threads when the process ends.
            threading.Thread(target=run, name="triton_dist.remote", daemon=True).start()
            return future.result(self._seconds)
        except DamagedEntry:
            raise
        except Exception as error:
            reason = without_secrets(f"{type(error).__name__}: {error}", self._url)
            if isinstance(error, FutureTimeout) and not future.done():
                reason = f"no answer within {self._seconds:g} s"
            is_unreachable = not _UNREACHABLE.isdisjoint(k.__name__ for k in type(error).__mro__)
        # Outside of the ``except`` block: the original error may contain the password.
        kind = ConnectionError if is_unreachable else OSError
        raise kind(f"remote store {self.url}: {reason}")

    def _attempt(self, operation: str, request: Callable[[], T]) -> T | None:
        """Return the result of a request, or ``None`` with a warning if it fails."""
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
        if len(data) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES} bytes")
        line, _, body = data.partition(b"\n")
        head = codec.loads(line)
        expires = head.get("expires") if isinstance(head, dict) else None
        if type(expires) is not int:
            raise ValueError("its first line has no time of expiry")
        signature, given = self._signature(name, expires, body), str(head.get("hmac"))
        if self.secret and not hmac.compare_digest(signature.encode(), given.encode()):
            raise ValueError(f"its signature does not match {knobs.autotune_remote_key.variable}")
        if expires < time.time():
            return None
        record = read_record(body)
        _ = record.trials  # parse them now, because later an error would end a tuning
        if entry_name(record.key, record.fingerprint) != name:
            raise ValueError(f"it is the record of another key, {record.key.text}")
        return record

    def _signature(self, name: str, expires: int, body: bytes) -> str:
        # The name is signed too: an entry cannot be copied to another key.
        signed = f"{name}\n{expires}\n".encode() + body
        return (
            hmac.new(os.fsencode(self.secret), signed, "sha256").hexdigest() if self.secret else ""
        )


def entry_name(key: Key, fingerprint: Fingerprint) -> str:
    """Return the name of the entry for a record of ``key`` with this fingerprint."""
    return f"{_NAMESPACE}{_folder(key.function_name)}/{key.digest}-{fingerprint.digest}"


def _folder(function: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", function)[:100] or "_"


def without_secrets(text: str, url: str) -> str:
    """Return ``text`` with the user, password and query of ``url`` replaced by ``***``."""
    rest = url.partition("://")[2] or url
    credentials, query = rest.rpartition("@")[0], rest.partition("?")[2]
    password = credentials.rpartition("://")[2].partition(":")[2]
    # If delimiters in a password are not escaped, parsers report a part of it as a host or port.
    found = {credentials, password, query, *re.split("[/?#@:]", password)}
    # Shorter values, such as db=1, also occur elsewhere in the text.
    found |= {value for part in query.split("&") if len(value := part.partition("=")[2]) > 2}
    if "?" in credentials or "://" in rest or rest == url:
        found.add(rest)  # which part is secret is ambiguous
    found |= {unquote(each) for each in found}
    for secret in sorted(filter(None, found), key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


_opened = functools.cache(RemoteStore)
# Connections cannot be shared with a forked process.
os.register_at_fork(after_in_child=_opened.cache_clear)


def configured_remote(seconds: float | None = None) -> RemoteStore | None:
    """Return the store that the environment names, or ``None``.

    The same store is returned each time, because it remembers that it cannot be reached.
    """
    url = knobs.autotune_remote.get()
    if not url:
        return None
    return _opened(
        url,
        seconds or knobs.autotune_remote_timeout.get(),
        knobs.autotune_remote_readonly.get(),
        knobs.autotune_remote_ttl.get(),
        knobs.autotune_remote_lease.get(),
        knobs.autotune_remote_key.get() or "",
    )
