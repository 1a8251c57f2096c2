"""``remote``: list, push and pull records of a store that machines share, and check the store."""

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

_REQUEST_SECONDS = 30.0
"""Time limit of a request to the store. It is longer than in a tuning, which must not wait."""
_LEFT_ALIGNED = ("function", "key")


def add_to(subcommands: Any) -> None:
    parser = add_subcommand(
        subcommands,
        "remote",
        _run,
        help="list and copy the records of a store that machines share, or check the store",
        description=f"Uses the store whose URL is in {knobs.autotune_remote.variable}. list: list "
        "the records of the store. push: copy the user's records to the store if they are newer "
        "than the store's records of the same keys. pull: copy the store's records to "
        "TRITON_DIST_CACHE_DIR if they are newer than the user's records of the same keys. status: "
        "check that the store can be read and written. "
        "Exit status: 0 for success, 1 if there is no record, 2 if the store cannot be used.",
        examples=["remote status", "remote list matmul", "remote push", "remote pull matmul"],
    )
    parser.add_argument("action", choices=("list", "push", "pull", "status"), help="what to do")
    cache.add_function_argument(parser, metavar="FUNCTION", nargs="?", help="only this function")
    parser.add_argument("--json", action="store_true", help="list: print JSON")


def _run(arguments: argparse.Namespace) -> int:
    function, action = arguments.function, arguments.action
    store = configured_remote(_REQUEST_SECONDS)
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
        rows = [[f"{each['ms']:.4f}", text.age(each["timestamp"]), each["function"], each["key"]]
                for each in map(listing.tree_of, records)]  # fmt: skip
        text.print_lines(*text.table(("time (ms)", "age", "function", "key"), rows, _LEFT_ALIGNED))
    else:
        num_copied = (_push if action == "push" else _pull)(store, (r.record for r in records))
        print(f"{action}: {num_copied} of {counted(len(records), 'record')} copied, {store.url}.")
    return 0 if records else 1


def _push(store: RemoteStore, records: Iterable[TuningRecord]) -> int:
    """Copy the records that are newer than the store's records. Return their number."""
    names = ((record, entry_name(record.key, record.fingerprint)) for record in records)
    return sum(_is_newer(r, store.read(name)) and store.write(r) for r, name in names)


def _pull(store: RemoteStore, records: Iterable[TuningRecord]) -> int:
    """Copy the records that are newer than the user's records. Return their number."""
    files, pulled = FileStore(knobs.cache_dir.get()), 0
    for record in records:
        path = str(files.path(record.key))
        own = next((known for known, where in files.find(record.key) if where == path), None)
        pulled += _is_newer(record, own) and bool(files.put(record))
    return pulled


def _is_newer(record: TuningRecord, known: TuningRecord | None) -> bool:
    return known is None or record.timestamp > known.timestamp


def _status(store: RemoteStore) -> int:
    """Read from the store, and write to it unless it is read-only. Print the results. The write
    acquires a lease, the lock with which one machine tunes a key while others wait."""
    begin = time.monotonic()
    probe = f"triton_dist-status-{secrets.token_hex(4)}"  # several commands may run concurrently
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
