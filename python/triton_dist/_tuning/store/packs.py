"""Look up records in packs; create, merge and compare packs.

A pack is a file that ships records, and optionally compiled kernels, to other machines. A record in
a pack is valid although code or software versions changed. Packs are therefore searched last, and
only for a function of the same module. A file of records is read once, at the first look-up of its
function.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from triton_dist._archive import (
    MAX_RECORDS_BYTES,
    RECORDS_SUFFIX,
    SUFFIX,
    Pack,
    PackContents,
    PackedKernel,
    files_in,
    open_pack,
)
from triton_dist._tuning.store.disk import read_bytes
from triton_dist._tuning.store.layout import readable_json
from triton_dist._tuning.values import (
    Fingerprint,
    Key,
    StoredRecord,
    TuningRecord,
    codec,
    merge,
    pack,
    unpack,
)
from triton_dist._warn import warn
from triton_dist.errors import CacheWarning, NoSuchFunction, PackRefused

LINE_WIDTH = 200
"""Width of a line in a file of records, enough for one result per line."""


class PackStore:
    """Records of all packs in a folder, or of one pack.

    No method raises. A file that cannot be read is skipped with one warning.

    Args:
        root: path of the folder or of the pack.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._read: dict[tuple[Path, str], Mapping[Key, TuningRecord]] = {}

    def find(self, key: Key) -> Iterator[StoredRecord]:
        for location, records in self._files(key.function_name):
            record = records.get(key)
            # Equal keys may belong to functions of equal name in different modules.
            if record is not None and record.key.full_name == key.full_name:
                yield StoredRecord(record, location)

    def put(self, record: TuningRecord) -> str:
        """Do nothing: ``triton-dist pack`` creates packs."""
        return ""

    def records(self, function: str | None = None) -> Iterator[StoredRecord]:
        for location, records in self._files(function):
            yield from (StoredRecord(record, location) for record in records.values())

    def _files(self, function: str | None) -> Iterator[tuple[str, Mapping[Key, TuningRecord]]]:
        """Yield the pack's path and the records of each file of records, of ``function`` if it is
        given."""
        prefix = "" if function is None else f"{_file_name_part(function)}."
        for path in files_in(self._root, (SUFFIX, RECORDS_SUFFIX)):
            for name, read in _readers(path):
                if name.startswith(prefix):
                    if (path, name) not in self._read:
                        self._read[path, name] = {}
                        try:
                            records = _parsed(path, name, read())
                            self._read[path, name] = {each.key: each for each in records}
                        except (OSError, PackRefused) as error:
                            warn(str(error), CacheWarning)
                    yield str(path), self._read[path, name]


def _readers(path: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Yield the name of each file of records in ``path`` (a pack or one file), and its reader."""
    if path.suffix != SUFFIX:
        yield path.name, functools.partial(read_bytes, path, MAX_RECORDS_BYTES)
    elif packed := open_pack(path):
        for name in packed.records:
            yield name, functools.partial(packed.read_records, name)


def records_of(packed: Pack) -> list[TuningRecord]:
    """Return all records in a pack. Raise ``PackRefused`` if a file is damaged."""
    parts = (_parsed(packed.path, name, packed.read_records(name)) for name in packed.records)
    return list(itertools.chain.from_iterable(parts))


def _parsed(path: Path, name: str, data: bytes) -> list[TuningRecord]:
    """Return the records in one file of records. Raise ``PackRefused`` if the file is damaged."""
    try:
        return list(unpack(codec.loads(data.decode("ascii"))))
    except ValueError as error:
        raise PackRefused(str(path), f"records/{name}", str(error)) from error


def read_verified(path: Path) -> Pack:
    """Return the pack at ``path`` after reading and checking every file in it.

    Raise ``PackRefused`` if a file is damaged or does not belong to the pack, and ``OSError`` if
    the pack cannot be read.
    """
    packed = Pack(path)
    packed.contents()
    records_of(packed)
    return packed


def latest_records(name: str, records: Iterable[TuningRecord]) -> list[TuningRecord]:
    """Return the latest record of each key, for the function's version that was tuned last.

    A record tuned with special environment settings, such as a debugging run, is returned only if
    its key has no other record.

    Args:
        name: name of the function, for the error message.
        records: one or more records of one function on one GPU model.

    Raises:
        NoSuchFunction: the function declares no version.
    """
    by_time = sorted(records, key=lambda record: record.timestamp)
    ordered = sorted(by_time, key=lambda record: not record.fingerprint.settings)
    version = by_time[-1].fingerprint.version
    if not version:
        raise NoSuchFunction(
            name,
            "it declares no version, which shipped records require",
            "Decorate it with autotune(..., version='1'), and tune again",
        )
    return list({r.key: r for r in ordered if r.fingerprint.version == version}.values())


def records_of_function(
    key: Key, present: Fingerprint, stored: Iterable[StoredRecord]
) -> list[TuningRecord]:
    """Return the ``stored`` records that belong to the function of ``key``.

    A record with another module name belongs to the function if code, constants and declared
    version equal those in ``present``. The module name in the returned records is the name in
    ``key``, because a look-up in a pack compares module names.
    """
    own = []
    for record, _ in (each for each in stored if each.is_of_function(key)):
        with_present_code = replace(
            record.fingerprint,
            source=present.source,
            literal=present.literal,
            bound=present.bound,
            version=present.version,
        )
        if record.key.module == key.module or not record.fingerprint.diff(with_present_code):
            own.append(replace(record, key=replace(record.key, module=key.module)))
    return own


def pack_contents(records: Iterable[TuningRecord]) -> PackContents:
    """Return a pack's contents with the latest records of each function and GPU model.

    The pack has no kernels.

    Raises:
        NoSuchFunction: a function declares no version.
    """

    def group_of(record: TuningRecord) -> tuple[str, str]:
        return record.key.full_name, str(record.fingerprint.hardware.get("gpu"))

    groups = itertools.groupby(sorted(records, key=group_of), group_of)
    return _contents_of_trees(
        [pack(latest_records(name, list(group))) for (name, _), group in groups], {}
    )


def merge_packs(packs: Sequence[PackContents]) -> PackContents:
    """Return the union of ``packs``. Their order has no effect.

    If a key is in several packs, the latest result is kept. Kernels with equal digests differ only
    in paths in their metadata. Of these, the kernel with the smallest hashes is kept.
    """

    def sort_key(kernel: PackedKernel) -> tuple[object, ...]:
        entry = kernel.entry
        return sorted(entry.files.items()), sorted(entry.facts.items()), entry.name

    trees = [codec.loads(data.decode("ascii")) for each in packs for data in each.records.values()]
    kernels: dict[str, PackedKernel] = {}
    for digest, kernel in itertools.chain.from_iterable(each.kernels.items() for each in packs):
        kernels[digest] = min(kernels.get(digest, kernel), kernel, key=sort_key)
    return _contents_of_trees(trees, kernels)


def differences(before: Pack, after: Pack) -> Iterator[str]:
    """Yield a line of text for each result and each kernel that is in one pack only, or differs.

    The line starts with ``-`` (only in ``before``), ``+`` (only in ``after``) or ``!`` (differs).
    """
    old, new = _results(before), _results(after)
    for key in sorted(old.keys() | new.keys()):
        if key not in new:
            yield f"- {' '.join(key)}: {_winner(old[key])}"
        elif key not in old:
            yield f"+ {' '.join(key)}: {_winner(new[key])}"
        elif old[key].best.digest != new[key].best.digest:
            yield f"! {' '.join(key)}: {_winner(old[key])} -> {_winner(new[key])}"
    for digest in sorted(before.kernels.keys() | after.kernels.keys()):
        old_kernel, new_kernel = before.kernels.get(digest), after.kernels.get(digest)
        if old_kernel is None or new_kernel is None:
            sign, entry = ("+", new_kernel) if old_kernel is None else ("-", old_kernel)
            assert entry is not None
            yield f"{sign} kernel {entry.name} {digest[:12]}"
        elif old_kernel.files != new_kernel.files:
            yield f"! kernel {new_kernel.name} {digest[:12]}: different bytes under the same digest"


def _contents_of_trees(
    trees: Iterable[codec.Tree], kernels: Mapping[str, PackedKernel]
) -> PackContents:
    """Return a pack's contents with one file for each function, version and GPU model."""
    files: dict[str, list[codec.Tree]] = {}
    for tree in trees:
        identity = [str(tree[name]) for name in ("module", "function", "version", "gpu")]
        function = _file_name_part(identity[1].rpartition(".")[2])
        name = f"{function}.{codec.digest(*identity)[:8]}.json"
        files.setdefault(name, []).append(tree)
    records = {
        name: readable_json(merge(parts), LINE_WIDTH).encode("ascii")
        for name, parts in files.items()
    }
    return PackContents(records, kernels)


def _file_name_part(function: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", function)[:100]


def _results(packed: Pack) -> dict[tuple[str, ...], TuningRecord]:
    return {
        (r.key.full_name, r.fingerprint.version, r.key.hardware, r.key.text): r
        for r in records_of(packed)
    }


def _winner(record: TuningRecord) -> str:
    outcome = record.best.outcome
    return f"{record.best.config} {getattr(outcome, 'median', 0):.4g} ms"
