"""Records in a store that machines share: Redis, and file systems that fsspec supports.

A job is a group of two ranks on threads. Each job has its own local store and its own connection.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from tests.architecture.source import ROOT
from tests.contextual.kernels import autotuned, configs, scale, scale_kernel, scaling
from tests.tuning.fakes import Rank, fingerprint, in_threads, thread_ranks, together
from triton_dist import knobs
from triton_dist._tuning.engine.contextual.kernel_tuning import KernelTuning
from triton_dist._tuning.store import RemoteStore, backends, remote, without_secrets
from triton_dist.autotuner import contextual_autotune
from triton_dist.errors import CacheWarning, NoValidConfig, TuningFrozen
from triton_dist.tune import autotune

SPACE = [{"n": 3}, {"n": 1}, {"n": 2}]
TUNED = (1, {"n": 1})
PASSWORD = "opensesame"
_SERVER = shutil.which("redis-server") or shutil.which(
    "redis-server", path=os.path.dirname(sys.executable)
)


def client(url: str) -> Any:
    import redis

    return redis.Redis.from_url(url)


class Server:
    """A redis-server on a free port of this host, without files."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = free.getsockname()
        port = address[1]
        self.url = f"redis://:{PASSWORD}@127.0.0.1:{port}/0"
        options = f"--port {port} --bind 127.0.0.1 --save --appendonly no --requirepass {PASSWORD}"
        self.process = subprocess.Popen(
            [str(_SERVER), *options.split()], cwd=folder, stdout=subprocess.DEVNULL
        )
        for _ in range(500):
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(address):
                return
            time.sleep(0.02)
        raise AssertionError("redis-server does not listen")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def _server(tmp_path_factory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


def server_or_skip(request) -> Server:
    if _SERVER is None:
        pytest.skip("redis-server is not installed")
    if importlib.util.find_spec("redis") is None:
        pytest.skip("the package redis is not installed")
    return request.getfixturevalue("_server")


@pytest.fixture(params=["memory", "file", "redis"])
def url(request, tmp_path) -> str:
    if request.param == "redis":
        server = server_or_skip(request)
        client(server.url).flushall()
        return server.url
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    return "memory://fleet" if request.param == "memory" else f"file://{tmp_path}/fleet"


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch) -> None:
    monkeypatch.setattr(remote, "_FIRST_PAUSE", 0.01)


def opened(url: str, seconds: float = 30.0, **options: Any) -> RemoteStore:
    return RemoteStore(url, seconds, **options)


def names(url: str) -> list[str]:
    found = opened(url).request(lambda backend: list(backend.names(remote._NAMESPACE)))
    return sorted(filter(remote._ENTRY_NAME.fullmatch, found))


def job(store: RemoteStore | None, **options: Any) -> list[Rank]:
    """Two ranks; the leader has the remote store."""
    cost = options.pop("cost", lambda rank, config: float(config["n"]))
    return [
        Rank(ranks=ranks, space=SPACE, cost=cost, remote=None if ranks.rank else store, **options)
        for ranks in thread_ranks(2)
    ]


def tunings(ranks: list[Rank]) -> list[int]:
    return [rank.tuned.num_tunings for rank in ranks]


def called(ranks: list[Rank], *keys: int) -> list[str]:
    """Call both ranks with each key, check the results, and return the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for key in keys or (1,):
            assert together(ranks, key) == [(key, {"n": 1})] * 2
    assert {each.category for each in caught} <= {CacheWarning}
    return [str(each.message) for each in caught]


def requests_of(store: RemoteStore, monkeypatch) -> list[str]:
    """A list that gets the name of each backend method that ``store`` calls."""
    made: list[str] = []
    request = store.request

    class Noted:
        def __init__(self, backend):
            self._backend = backend

        def __getattr__(self, name):
            made.append(name)
            return getattr(self._backend, name)

    monkeypatch.setattr(store, "request", lambda work: request(lambda b: work(Noted(b))))
    return made


def test_a_second_job_uses_the_record_of_the_first(url, monkeypatch):
    first, second = job(opened(url)), job(opened(url))
    assert called(first) == []
    assert tunings(first) == [1, 1]
    made = requests_of(second[0].remote, monkeypatch)
    assert called(second) == []
    assert (tunings(second), made) == ([0, 0], ["get"])
    assert [rank.calls for rank in second] == [[{"n": 1}]] * 2
    # The second rank waits as long as the leader's requests may take.
    assert second[1].ranks.limits["look up the remote store"] >= 4 * 30.0
    assert second[0].ranks.phases[1:] == ["look up the remote store", "first use of a record"]
    # The leader has a local copy: without the store, its next process does not tune.
    third = job(None)
    third[0].disk = second[0].disk
    assert called(third) == []
    assert tunings(third) == [0, 0]
    assert called(second, 1, 1) == []
    assert made == ["get"]


def test_without_a_store_no_message_is_added():
    ranks = job(None)
    called(ranks)
    assert "look up the remote store" not in ranks[0].ranks.phases


def test_machines_that_differ_do_not_replace_records_of_each_other(url):
    seen = {}
    for name, changes in {
        "torch 2.9": {},
        "torch 2.10": {"software": {"torch": "2.10.0", "triton": "3.6.0"}},
        "torch 2.9 again": {},
        "patch level": {"software": {"torch": "2.9.3", "triton": "3.6.1"},
                        "hardware": {"gpu": "fake", "driver": "550.90"}},
        "source": {"source": {"run": "4321"}},
        "uncounted": {"uncounted": {"RANK": "differs by rank"}, "literal": {"RANK": "1"}},
    }.items():  # fmt: skip
        ranks = job(opened(url), fingerprint=fingerprint(**changes))
        assert called(ranks) == []
        seen[name] = tunings(ranks)[0]
    assert seen == {"torch 2.9": 1, "torch 2.10": 1, "torch 2.9 again": 0, "patch level": 0,
                    "source": 1, "uncounted": 0}  # fmt: skip
    assert len(names(url)) == 3
    other = fingerprint(software={"torch": "2.9.9", "triton": "3.6.0"})
    strict = job(opened(url), strict=True, fingerprint=other)
    assert called(strict) == []
    assert tunings(strict) == [1, 1]


def test_frozen_jobs_read_and_always_tune_only_publishes(url, monkeypatch):
    frozen = job(opened(url, lease_seconds=60), frozen=True)
    made = requests_of(frozen[0].remote, monkeypatch)
    assert [type(each) for each in together(frozen)] == [TuningFrozen] * 2
    assert made == ["get"]
    always = job(opened(url), always_tune=True)
    made = requests_of(always[0].remote, monkeypatch)
    assert called(always) == []
    assert made == ["put"]
    assert called(job(opened(url), frozen=True)) == []


def test_read_only_stores_are_not_written(url, monkeypatch):
    if url.startswith("file:"):
        monkeypatch.setattr(os, "makedirs", None)
    ranks = job(opened(url, read_only=True, lease_seconds=60))
    made = requests_of(ranks[0].remote, monkeypatch)
    assert called(ranks) == []
    assert (made, names(url)) == (["get"], [])


SECRET = {"secret": "horse"}


def first_entry(url: str, **options: Any) -> str:
    called(job(opened(url, **options)))
    (name,) = names(url)
    return name


def put(url: str, name: str, data: bytes) -> None:
    opened(url).request(lambda backend: backend.put(name, data, 1000))


def get(url: str, name: str) -> bytes:
    return opened(url).request(lambda backend: backend.get(name, remote.MAX_ENTRY_BYTES)) or b""


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[: len(data) // 2],
    "one byte": lambda data: b"{",
    "a pickle": lambda data: b"cposix\nsystem\n(S'exit 1'\ntR.",
    "another time": lambda data: b'{"expires": "soon"}' + data[data.index(b"\n") :],
    "nested": lambda data: b"[" * 100_000 + b"\n",
    "edited": lambda data: data.replace(b'"seconds": ', b'"seconds": 1'),
    "too large": lambda data: data + b" " * remote.MAX_ENTRY_BYTES,
    "a newer schema": lambda data: data.replace(b'"schema": 4', b'"schema": 5'),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_a_damaged_entry_is_tuned_again_with_one_warning(damage, url):
    name = first_entry(url)
    put(url, name, DAMAGES[damage](get(url, name)))
    ranks = job(opened(url, lease_seconds=5))
    (said,) = called(ranks)
    assert f"entry {name} is not used: " in said
    assert tunings(ranks) == [1, 1]
    assert called(job(opened(url), frozen=True)) == []  # it was replaced


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_a_record_that_is_too_large_or_cannot_be_signed_is_not_published(url, monkeypatch):
    (said,) = called(job(opened(url, secret="\ud800")), 1, 2)  # cannot be encoded
    assert "This process makes no further write requests" in said
    monkeypatch.setattr(remote, "MAX_ENTRY_BYTES", 100)
    (said,) = called(job(opened(url)), 1)
    assert " bytes, at most 100" in said
    assert names(url) == []


def test_a_value_that_is_cut_off_on_any_store(url):
    name = first_entry(url, **SECRET)
    put(url, name, get(url, name)[:-100])
    (said,) = called(job(opened(url, **SECRET)))
    assert "its signature does not match TRITON_DIST_AUTOTUNE_REMOTE_KEY" in said


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_a_record_without_the_right_signature_is_not_used(url):
    for foreign in ({}, {"secret": "other"}, {"secret": os.fsdecode(b"\xffabc")}):
        name = first_entry(url, **foreign)
        ranks = job(opened(url, **SECRET))
        (said,) = called(ranks)
        assert "its signature does not match TRITON_DIST_AUTOTUNE_REMOTE_KEY" in said
        assert tunings(ranks) == [1, 1]
    signed = get(url, name)
    # A valid entry under the name of another key, and a later expiry.
    called(job(opened(url, **SECRET)), 2)
    (other,) = (each for each in names(url) if each != name)
    put(url, other, signed)
    (said,) = called(job(opened(url, **SECRET)), 2)
    assert "its signature" in said
    put(url, name, signed.replace(b'"expires": 1', b'"expires": 2'))
    (said,) = called(job(opened(url, **SECRET)), 1)
    assert "its signature" in said
    # Without a key, the entry of another key is refused too.
    put(url, other, signed)
    (said,) = called(job(opened(url)), 2)
    assert "it is the record of another key" in said


def test_an_expired_record_is_not_used(url, monkeypatch):
    name = first_entry(url, ttl=100)
    if url.startswith("redis:"):
        assert 90 < client(url).ttl(name) <= 100
    later = types.SimpleNamespace(**vars(time) | {"time": lambda: time.time() + 101})
    monkeypatch.setattr(remote, "time", later)
    ranks = job(opened(url))
    assert called(ranks) == []
    assert tunings(ranks) == [1, 1]


def of_another_type(url: str, name: str) -> None:
    if url.startswith("redis:"):
        client(url).delete(name)
        client(url).rpush(name, "a", "b")
    else:
        path = Path(url.removeprefix("file://")) / name
        path.unlink()
        path.mkdir()


@pytest.mark.parametrize("url", ["file", "redis"], indirect=True)
def test_an_entry_of_another_type_is_no_failure_of_the_store(url):
    name = first_entry(url)
    of_another_type(url, name)
    ranks = job(opened(url))
    said = called(ranks, 1, 2)
    assert f"entry {name} is not used: it is not a " in said[0]
    assert tunings(ranks) == [2, 2]
    assert len(said) == (1 if url.startswith("redis:") else 2)  # a folder cannot be replaced


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """A server that accepts connections and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"redis://user:{PASSWORD}@127.0.0.1:{listening.getsockname()[1]}/0"


@contextlib.contextmanager
def hanging_file_system(monkeypatch) -> Iterator[str]:
    end = threading.Event()
    monkeypatch.setattr(MemoryFileSystem, "cat_file", lambda *_, **__: end.wait(20))
    yield f"memory://fleet?password={PASSWORD}"
    end.set()


@pytest.mark.parametrize("kind", ["redis", "fsspec"])
def test_a_store_that_does_not_answer_costs_one_request_and_one_warning(kind, monkeypatch):
    if kind == "redis":
        pytest.importorskip("redis")
    hanging = silent_server() if kind == "redis" else hanging_file_system(monkeypatch)
    with hanging as url:
        ranks = job(opened(url, seconds=0.2, lease_seconds=600))
        made = requests_of(ranks[0].remote, monkeypatch)
        (said,) = called(ranks, 1, 2, 3)
        assert made == ["get"]
    assert tunings(ranks) == [3, 3]
    assert PASSWORD not in said
    assert "This process continues without it" in said
    assert kind == "redis" or "no answer within 0.2 s" in said  # redis-py may end first


def test_a_store_that_is_down_costs_one_warning(monkeypatch):
    pytest.importorskip("redis")
    with socket.socket() as closed:  # bound, but not listening
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        ranks = job(opened(f"redis://:{PASSWORD}@127.0.0.1:{port}", lease_seconds=600))
        (said,) = called(ranks, 1, 2)
    assert f"remote store redis://***@127.0.0.1:{port}: ConnectionError: " in said


def test_an_error_of_the_library_is_shown_without_the_password(monkeypatch):
    def cat_file(*_, **__):
        raise OSError(f"token {PASSWORD} is refused.")

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    (said,) = called(job(opened(f"memory://fleet?token={PASSWORD}")))
    assert said == (
        "remote store memory://fleet?***: OSError: token *** is refused. "
        "This process continues without it"
    )


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("nothing://x", "Protocol not known: nothing"),
        ("no url", "the URL has no scheme, such as redis:// or s3://"),
        ("redis://host:port", "ValueError"),
    ],
)
def test_a_wrong_url_is_one_warning(url, reason):
    if url.startswith("redis:"):
        pytest.importorskip("redis")
    (said,) = called(job(opened(url)), 1, 2)
    assert reason in said


@pytest.mark.parametrize("delimiter", "/#?")
def test_the_error_for_a_password_that_is_not_escaped_hides_it(delimiter):
    (said,) = called(job(opened(f"ftp://user:sesame{delimiter}horse@127.0.0.1/x")))
    assert "Port could not be cast to integer value as '***'" in said
    assert "sesame" not in said
    assert "horse" not in said


def test_a_missing_package_is_one_warning(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    (said,) = called(job(opened("redis://h")), 1, 2)
    assert "pip install 'triton-dist-tuner[redis]'" in said
    assert not {"redis", "fsspec"} & set(vars(backends))  # imported at the first use only


@contextlib.contextmanager
def full(url: str, monkeypatch) -> Iterator[None]:
    """Context manager in which the store has no space."""
    if url.startswith("redis:"):
        client(url).config_set("maxmemory", 1)
        yield
        client(url).config_set("maxmemory", 0)
        return
    kind = MemoryFileSystem if url.startswith("memory:") else LocalFileSystem
    write = kind.pipe_file

    def pipe_file(self, path, value, **options):
        write(self, path, value[:10], **options)
        raise OSError(errno.ENOSPC, "No space left on device", path)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "pipe_file", pipe_file)
        yield


def test_a_full_store_is_read_but_not_written_again(url, monkeypatch):
    first_entry(url)
    with full(url, monkeypatch):
        ranks = job(opened(url))
        made = requests_of(ranks[0].remote, monkeypatch)
        (said,) = called(ranks, 1, 2, 3)
        assert made == ["get", "get", "put", "get"]
    assert "This process makes no further write requests" in said
    assert tunings(ranks) == [2, 2]
    if url.startswith("file:"):
        folder = Path(url.removeprefix("file://"))
        assert [path.name for path in folder.rglob("*.tmp")] == []


def test_a_server_that_is_killed_during_a_tuning(request, tmp_path, monkeypatch):
    server_or_skip(request)
    server = Server(tmp_path)

    def cost(rank, config):
        server.stop()
        return float(config["n"])

    ranks = job(opened(server.url, lease_seconds=60), cost=cost)
    made = requests_of(ranks[0].remote, monkeypatch)
    (said,) = called(ranks, 1, 2)
    assert made == ["get", "acquire_lease", "get", "put"]
    assert "ConnectionError" in said
    assert PASSWORD not in said
    assert tunings(ranks) == [2, 2]


def waiting_job(url: str, ready: threading.Event, monkeypatch, **options: Any) -> list[Rank]:
    """A job that sets ``ready`` when it waits for the lease of another job."""
    ranks = job(opened(url, **{"lease_seconds": 60, **options}))
    request = ranks[0].remote.request

    def noted(work):
        result = request(work)
        if result is False:
            ready.set()
        return result

    monkeypatch.setattr(ranks[0].remote, "request", noted)
    return ranks


def test_of_two_jobs_one_tunes_and_the_other_waits(url, monkeypatch):
    waits, results = threading.Event(), []
    second = waiting_job(url, waits, monkeypatch)
    thread = threading.Thread(target=lambda: results.extend(together(second)))

    def cost(rank, config):
        if not (rank or thread.ident):
            thread.start()
            assert waits.wait(30)
        return float(config["n"])

    first = job(opened(url, lease_seconds=60), cost=cost)
    assert called(first) == []
    thread.join(30)
    assert results == [TUNED] * 2
    assert (tunings(first), tunings(second)) == ([1, 1], [0, 0])
    (name,) = names(url)
    assert get(url, f"{name}.lease") == b""


def test_a_lease_whose_holder_fails_is_taken_by_the_other_job(url, monkeypatch):
    waits, results = threading.Event(), []
    second = waiting_job(url, waits, monkeypatch)
    thread = threading.Thread(target=lambda: results.extend(together(second)))

    def cost(rank, config):
        if not (rank or thread.ident):
            thread.start()
            assert waits.wait(30)
        raise ValueError("no")

    first = job(opened(url, lease_seconds=60), cost=cost)
    assert [type(each) for each in together(first)] == [NoValidConfig] * 2
    thread.join(30)
    assert results == [TUNED] * 2
    assert tunings(second) == [1, 1]


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_a_lease_is_released_if_the_other_ranks_do_not_get_the_result(url, monkeypatch):
    first = job(opened(url, lease_seconds=60))
    gather = first[0].ranks.all_gather

    def all_gather(phase, *args):
        if phase == "look up the remote store":
            raise KeyboardInterrupt
        return gather(phase, *args)

    for rank in first:
        monkeypatch.setattr(rank.ranks, "all_gather", all_gather)
    made = requests_of(first[0].remote, monkeypatch)
    assert [type(each) for each in interrupted(first)] == [KeyboardInterrupt] * 2
    assert made == ["get", "acquire_lease", "get", "get", "remove"]


def interrupted(ranks: list[Rank]) -> list[Any]:
    def call(rank: Rank) -> Any:
        try:
            return rank.tuned(1)
        except KeyboardInterrupt as error:
            return error

    return in_threads([lambda rank=rank: call(rank) for rank in ranks])


def test_a_lease_that_stays_delays_a_job_up_to_the_bound(url, monkeypatch, caplog):
    caplog.set_level("INFO", "triton_dist.cache")
    name = first_entry(url)
    opened(url).request(lambda backend: backend.put(name, b"gone", 1000))
    lease = f"{name}.lease"
    assert opened(url).request(lambda backend: backend.acquire_lease(lease, "killed", 1000))
    assert not opened(url).request(lambda backend: backend.acquire_lease(lease, "other", 1000))
    slept = []
    times = {"sleep": slept.append, "monotonic": lambda: sum(slept)}
    clock = types.SimpleNamespace(**vars(time) | times)
    monkeypatch.setattr(remote, "time", clock)
    ranks = job(opened(url, lease_seconds=50))
    called(ranks)
    assert tunings(ranks) == [1, 1]
    assert sum(slept) == pytest.approx(50)
    assert max(slept) <= 2
    assert caplog.text.count("waiting for another job, 50 s at most") == 1
    # The lease of the other job stays.
    assert get(url, lease) == b"killed"
    ranks[0].remote._leases[name] = "other"
    ((record, _),) = ranks[0].disk.records()
    ranks[0].remote.release(record.key, record.fingerprint)
    assert get(url, lease) == b"killed"


def test_an_expired_lease_is_taken(url):
    def take(token: str, seconds: float) -> bool:
        return opened(url).request(
            lambda backend: backend.acquire_lease("x/y.lease", token, seconds)
        )

    assert take("killed", 0.02)
    time.sleep(0.05)
    assert take("second", 0.02)


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_missing_folders_are_made(url, monkeypatch):
    write = MemoryFileSystem.pipe_file

    def pipe_file(self, path, value, **options):
        if not self.isdir(self._parent(path)):
            raise FileNotFoundError(path)
        write(self, path, value, **options)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
    for lease_seconds, folder in ((0, url), (60, f"{url}2")):
        assert called(job(opened(folder, lease_seconds=lease_seconds))) == []
        assert len(names(folder)) == 1


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_a_store_without_exclusive_files_has_no_lease_but_records(url, monkeypatch):
    write = MemoryFileSystem.pipe_file
    monkeypatch.setattr(
        MemoryFileSystem, "pipe_file", lambda self, path, value: write(self, path, value)
    )
    ranks = job(opened(url, lease_seconds=60))
    (said,) = called(ranks, 1, 2)
    assert "This process makes no further lease requests" in said
    assert len(names(url)) == 2


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:sesame@host:1/0", "redis://***@host:1/0"),
        ("redis://host/0?password=sesame", "redis://host/0?***"),
        ("redis://10.0.0.1:6379/0?db=1", "redis://10.0.0.1:6379/0?***"),
        ("ftp://user:sesame/a@127.0.0.1/x", "ftp://***@127.0.0.1/x"),
        ("redis://u:se?sa@me@host", "redis://***"),
        ("redis://host?password=ses@me", "redis://***"),
        ("simplecache::s3://key:sesame@bucket/x", "simplecache::s3://***@bucket/x"),
        ("zip://a::s3://key:sesame@bucket", "zip://***"),
        ("user:sesame@host", "***"),
        ("s3://bucket/fleet", "s3://bucket/fleet"),
        ("file:///nfs/fleet", "file:///nfs/fleet"),
    ],
)
def test_urls_are_shown_without_credentials(url, shown):
    assert without_secrets(url, url) == shown
    assert "sesame" not in repr(opened(url, secret="sesame"))
    assert "sesame" not in without_secrets(f"no {url}, no sesame", url) or "sesame" not in url


def test_a_later_process_of_another_machine_tunes_nothing(url, monkeypatch, tmp_path):
    """Both tuners, with the parts that programs use."""
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_REMOTE", url)
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_REMOTE_LEASE", "0")
    x = torch.arange(64.0)
    counts = []
    for machine in "ab":
        monkeypatch.setenv("TRITON_DIST_CACHE_DIR", str(tmp_path / machine))
        function = scaling(16, 32)
        assert torch.equal(function(x), 2 * x)
        tuned = autotune(SPACE, key_fn=lambda x: x)(run)
        assert tuned(5)[0] == 5
        counts.append((function.num_tuning_calls > 0, tuned.num_tunings))
        remote._cached_store.cache_clear()
    assert counts == [(True, 1), (False, 0)]


def run(x, n):
    return x, n


def on_two_machines(url: str, folder: str) -> list[tuple[bool, int]]:
    """On each rank, whether the kernel was tuned and how often the function, on each machine.

    On machine b, rank 1 has no stable text for the key. The leader alone decides on the look-up.
    """
    counts = []
    for machine in "ab":
        with (
            knobs.with_value("TRITON_DIST_CACHE_DIR", f"{folder}/{machine}"),
            pytest.MonkeyPatch.context() as patch,
        ):
            if machine == "b":
                patch.setattr(KernelTuning, "can_persist", dist.get_rank() == 0)
            kernel = autotuned(scale_kernel, configs(16, 32))
            function = contextual_autotune(is_dist=True, n_repeat=1, n_warmup=0)(
                lambda x, kernel=kernel: scale(kernel, x)
            )
            x = torch.arange(64.0)
            assert torch.equal(function(x), 2 * x)
            tuned = autotune(SPACE, key_fn=lambda x: x)(run)
            assert tuned(5)[0] == 5
            counts.append((function.num_tuning_calls > 0, tuned.num_tunings))
    return counts


def test_ranks_in_processes_share_what_the_leader_fetches(on_ranks, tmp_path):
    url = f"file://{tmp_path}/fleet"
    env = {"TRITON_DIST_AUTOTUNE_REMOTE": url, "TRITON_DIST_AUTOTUNE_REMOTE_LEASE": "60"}
    counts = on_ranks(2)(on_two_machines, url, str(tmp_path), env=env)
    assert counts == [[(True, 1), (False, 0)]] * 2
    assert len(names(url)) == 2


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_twenty_processes_that_start_together_tune_a_key_once(url, tmp_path):
    if url.startswith("memory:"):
        pytest.skip("memory:// is not shared between processes")
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, time\n"
        "from triton_dist.tune import autotune\n"
        "@autotune([{'n': 1}, {'n': 2}], key_fn=lambda x: x, scope='rank')\n"
        "def work(x, n):\n"
        "    time.sleep(0.05)\n"
        "    return x\n"
        "open(sys.argv[1] + '.ready', 'w').close()\n"
        "while not os.path.exists(sys.argv[2]):\n"
        "    time.sleep(0.02)\n"
        "assert work(3) == 3\n"
        "print(work.num_tunings)\n"
    )
    start = tmp_path / "start"
    jobs = []
    for number in range(20):
        folder = tmp_path / f"machine-{number}"
        env = os.environ | {
            "TRITON_DIST_CACHE_DIR": str(folder),
            "TRITON_DIST_AUTOTUNE_REMOTE": url,
            "TRITON_DIST_AUTOTUNE_REMOTE_LEASE": "100",
            "TRITON_DIST_AUTOTUNE_REMOTE_TIMEOUT": "30",
            "PYTHONPATH": str(ROOT / "python"),
        }
        command = [sys.executable, "-W", "error", str(program), str(folder), str(start)]
        jobs.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    deadline = time.monotonic() + 200
    while len(list(tmp_path.glob("*.ready"))) < 20:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    start.touch()
    said = [each.communicate(timeout=200)[0].strip() for each in jobs]
    assert sorted(said) == ["0"] * 19 + ["1"]
