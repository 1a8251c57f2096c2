"""``remote``: list, push and pull records of the remote store, and check the store."""

from __future__ import annotations

import argparse
import secrets
import time
from collections.abc import Iterable
from typing import Any

from triton_dist import knobs
from triton_dist._tuning.store import FileStore, RemoteStore, configured_remote, entry_name
from triton_dist._tuning.values import TuningRecord
from triton_dist.cli import cache, listing, text
from triton_dist.cli.subcommand import add_subcommand, counted

_SECONDS = 30.0
"""Time limit of a request. A user's command may wait longer for the store than a tuning."""
_LEFT_ALIGNED = ("function", "key")


def add_to(subcommands: Any) -> None:
    parser = add_subcommand(
        subcommands,
        "remote",
        _run,
        help="list and copy the records of a store that machines share; check the store",
        description=f"Works on the store whose URL is in {knobs.autotune_remote.variable}. list: "
        "list its records. push: publish the user's records that are newer than the store's. pull: "
        "copy the store's records that are newer than the user's into TRITON_DIST_CACHE_DIR. "
        "status: check that the store can be read and written. Exit status: 0 for success, "
        "1 if there is no record, 2 if the store cannot be used.",
        examples=["remote status", "remote list matmul", "remote push", "remote pull matmul"],
    )
    parser.add_argument("action", choices=("list", "push", "pull", "status"), help="what to do")
    cache.add_function(parser, metavar="FUNCTION", nargs="?", help="only this function")
    parser.add_argument("--json", action="store_true", help="list: print JSON")


def _run(arguments: argparse.Namespace) -> int:
    store, function, action = configured_remote(_SECONDS), arguments.function, arguments.action
    if store is None:
        arguments.fail(f"set {knobs.autotune_remote.variable} to the URL of the store")
    assert store is not None
    if action == "status":
        return _status(store)
    if action == "push" and store.read_only:
        arguments.fail(f"push is refused: {knobs.autotune_remote_readonly.variable} is set")
    source: Any = cache.user_store() if action == "push" else store
    records = list(cache.records_of([source], function))
    if action == "list" and arguments.json:
        text.print_json({"records": [*map(listing.tree_of, records)]})
    elif not records:
        print(f"No record of {function or 'any function'} to {action}: {store.url}.")
    elif action == "list":
        trees = map(listing.tree_of, records)
        rows = [[f"{each['ms']:.4f}", text.age(each["timestamp"]), each["function"], each["key"]]
                for each in trees]  # fmt: skip
        text.print_lines(*text.table(("time (ms)", "age", "function", "key"), rows, _LEFT_ALIGNED))
    else:
        done = (_push if action == "push" else _pull)(store, (each.record for each in records))
        print(f"{action}: {done} of {counted(len(records), 'record')} copied, {store.url}.")
    return 0 if records else 1


def _push(store: RemoteStore, records: Iterable[TuningRecord]) -> int:
    """Publish the records that are newer than the store's; return their number."""
    names = ((record, entry_name(record.key, record.fingerprint)) for record in records)
    return sum(_is_newer(r, store.read(name)) and store.write(r) for r, name in names)


def _pull(store: RemoteStore, records: Iterable[TuningRecord]) -> int:
    """Store the records that are newer than the user's; return their number."""
    files, pulled = FileStore(knobs.cache_dir.get()), 0
    for record in records:
        path = str(files.path(record.key))
        own = next((known for known, where in files.find(record.key) if where == path), None)
        pulled += _is_newer(record, own) and bool(files.put(record))
    return pulled


def _is_newer(record: TuningRecord, known: TuningRecord | None) -> bool:
    return known is None or record.timestamp > known.timestamp


def _status(store: RemoteStore) -> int:
    """Read from the store, and write to it unless it is read-only. Print its facts."""
    begin = time.monotonic()
    probe = f"triton_dist-status-{secrets.token_hex(4)}"  # several commands may run at once
    store.request(lambda backend: backend.get(probe, 1))
    milliseconds = 1e3 * (time.monotonic() - begin)
    if not store.read_only:
        store.request(lambda backend: backend.acquire_lease(probe, "probe", 1.0))
        store.request(lambda backend: backend.remove(probe))
    access = "read-only" if store.read_only else "read, write and lease"
    signed = "signed" if knobs.autotune_remote_key.get() else "not signed"
    records = counted(len(list(store.records())), "record")
    text.print_lines(f"{store.url}: {records}, {access}, {signed}, {milliseconds:.1f} ms a request")
    return 0
