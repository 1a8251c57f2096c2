from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import pickle
import re
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

import filelock
import pytest
import triton
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.tuning.strategies import Method, edits, records
from tests.tuning.test_record import record
from triton_dist._tuning.store import FileStore, LayeredStore, MemoryStore, ReadOnlyStore, readonly
from triton_dist._tuning.store.layout import readable_json, with_checksum
from triton_dist._tuning.values import (
    SCHEMA,
    Config,
    Failure,
    FunctionIdentity,
    Key,
    Measurement,
    TuningRecord,
)
from triton_dist.errors import CacheWarning

HERE = Path(__file__).parent
RECORD = record(Measurement(tuple(n / 7 for n in range(1, 11)), 3), Failure("launch", "no", 1))


@pytest.fixture(params=["memory", "file", "layered"])
def store(request, tmp_path):
    return {
        "memory": lambda: MemoryStore(),
        "file": lambda: FileStore(tmp_path),
        "layered": lambda: LayeredStore([MemoryStore(), FileStore(tmp_path)]),
    }[request.param]()


@pytest.fixture
def kept(tmp_path) -> FileStore:
    """Has the record."""
    kept = FileStore(tmp_path)
    kept.put(RECORD)
    return kept


def found(store, key=RECORD.key) -> list[TuningRecord]:
    return [stored.record for stored in store.find(key)]


def test_a_store_gives_what_it_got(store):
    assert found(store) == []
    where = store.put(RECORD)
    assert where
    layers = 2 if isinstance(store, LayeredStore) else 1
    assert found(store) == [RECORD] * layers
    assert [stored.record for stored in store.records()] == [RECORD] * layers
    assert where in [stored.location for stored in store.find(RECORD.key)]
    assert found(store, Key.of("ops.run", (2,), "fake")) == []


def test_a_store_replaces_the_record_of_a_key(store):
    store.put(RECORD)
    newer = record(Measurement((0.5,), 3))
    store.put(newer)
    assert newer in found(store)
    assert RECORD not in found(store)
    assert [stored.record for stored in store.records()] == found(store)


@given(records())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_every_record_survives_a_file(tmp_path, written):
    FileStore(tmp_path).put(written)
    (read,) = found(FileStore(tmp_path), written.key)
    assert (read, read.best, read.digest) == (written, written.best, written.digest)


def test_the_file_lies_where_the_contract_says_and_can_be_read(tmp_path):
    store = FileStore(tmp_path)
    assert store.put(RECORD) == str(store.path(RECORD.key))
    (path,) = (tmp_path / "autotune" / "run").glob("*.json")
    assert path.name.startswith(RECORD.key.digest)
    assert store.path(RECORD.key) == path
    lines = path.read_text().splitlines()
    assert max(map(len, lines)) <= 100
    tree = json.loads(path.read_text())
    assert tree["function"] == "ops.run"
    assert tree["best"]["ms"] == RECORD.best.outcome.median
    assert {"key", "trials", "fingerprint", "timestamp", "schema"} <= tree.keys()
    assert sorted(os.listdir(path.parent)) == sorted([".lock", path.name])


def damaged_texts():
    whole = readable_json(RECORD.to_tree())
    tree = RECORD.to_tree()
    return {
        "empty": "",
        "truncated": whole[: len(whole) // 2],
        "not JSON": "the cat sat",
        "not an object": "[]",
        "an empty object": "{}",
        "of something else": '{"name": "left-pad", "version": "1.3.0", "schema": "2"}',
        "an incomplete one of the first schema": '{"schema": 1}',
        "of no schema that there was": json.dumps(tree | {"schema": 0}),
        "nested deeply": "[" * 100_000,
        "binary": "\x00\x01",
        "of another key": with_checksum(record_of_another_key().to_tree()),
    }


def record_of_another_key() -> TuningRecord:
    return TuningRecord(
        Key.of("ops.run", (2,), "fake"), RECORD.fingerprint, RECORD.trials, "2030", 1.0
    )


@pytest.mark.parametrize("damage", sorted(damaged_texts()))
def test_a_damaged_file_is_a_miss_with_one_warning_and_set_aside(tmp_path, damage):
    store = FileStore(tmp_path)
    path = store.path(RECORD.key)
    path.parent.mkdir(parents=True)
    path.write_text(damaged_texts()[damage])
    with pytest.warns(CacheWarning, match="its key is tuned again") as caught:
        assert found(store) == []
    assert len(caught) == 1
    assert str(path) in str(caught[0].message)
    assert found(store) == []
    store.put(RECORD)
    assert found(store) == [RECORD]
    assert path.with_name(path.name + ".damaged").read_text() == damaged_texts()[damage]


def test_a_file_that_was_mended_meanwhile_is_not_set_aside(kept):
    with pytest.warns(CacheWarning):
        kept._report_damaged(kept.path(RECORD.key), "it was damaged a moment ago")
    assert found(kept) == [RECORD]


def test_a_disk_that_refuses_is_said_once_and_memory_keeps_the_record(tmp_path):
    (tmp_path / "autotune").write_text("a file where the folder should be")
    store = LayeredStore([MemoryStore(), FileStore(tmp_path)])
    with pytest.warns(CacheWarning, match="cannot be written"):
        store.put(RECORD)
    store.put(record_of_another_key())
    assert found(store) == [RECORD]


def test_a_write_that_fails_leaves_the_old_record_and_no_litter(kept, tmp_path, monkeypatch):

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(CacheWarning, match="No space left"):
        kept.put(record(Measurement((0.5,), 3)))
    assert found(kept) == [RECORD]
    assert not list(tmp_path.rglob("*.tmp"))


def test_readers_never_see_half_a_record_while_others_write(tmp_path):
    variants = [record(Measurement((float(n),) * 50, 3)) for n in range(1, 5)]
    FileStore(tmp_path).put(variants[0])
    done = threading.Event()
    seen: list[TuningRecord] = []

    def write(variant):
        for _ in range(15):
            FileStore(tmp_path).put(variant)

    def read():
        while not done.is_set():
            seen.extend(found(FileStore(tmp_path)))

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(variant,)) for variant in variants]
    for thread in [reader, *writers]:
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    reader.join()
    assert seen
    assert all(each in variants for each in seen)


def test_records_leaves_out_what_cannot_be_read(kept):
    damaged = kept.path(RECORD.key).parent / f"{'ab' * 16}-12345678.json"
    damaged.write_text("{")
    with pytest.warns(CacheWarning, match=damaged.name):
        assert [stored.record for stored in kept.records()] == [RECORD]
    assert not damaged.exists()


def test_a_file_that_is_larger_than_any_record_is_a_miss(tmp_path):
    store = FileStore(tmp_path)
    path = Path(store.put(RECORD))
    os.truncate(path, (1 << 28) + 1)
    with pytest.warns(CacheWarning, match="268435457 bytes, the limit is 268435456"):
        assert found(store) == []


def test_records_leaves_files_of_others_alone(kept):
    """Another library may keep files in a folder that it shares with ours."""
    others = [kept.path(RECORD.key).with_name(name) for name in ("tuned.json", "0.json")]
    for other in others:
        other.write_text('{"best": [64, 128]}')
    assert [stored.record for stored in kept.records()] == [RECORD]
    assert [other.read_text() for other in others] == ['{"best": [64, 128]}'] * 2


def test_a_name_with_odd_characters_names_a_folder(tmp_path):
    key = Key.of("ops.outer.<locals>.<lambda>", 1, "fake")
    assert FileStore(tmp_path).path(key).parent.name == "_lambda_"


def test_a_read_only_folder_comes_last_and_is_never_written(tmp_path):
    shipped = tmp_path / "shipped"
    FileStore(shipped).put(RECORD)
    damaged = shipped / "autotune" / "run" / f"{RECORD.key.digest}-0.json"
    damaged.write_text("{")
    before = {path: path.stat().st_mtime_ns for path in shipped.rglob("*")}
    store = LayeredStore([FileStore(tmp_path / "own"), ReadOnlyStore(shipped)])
    with pytest.warns(CacheWarning) as caught:
        assert found(store) == [RECORD]
    assert len(caught) == 1
    newer = record(Measurement((0.5,), 3))
    assert store.put(newer).startswith(str(tmp_path / "own"))
    assert found(store) == [newer, RECORD]
    assert {path: path.stat().st_mtime_ns for path in shipped.rglob("*")} == before
    assert ReadOnlyStore(tmp_path / "absent").put(RECORD) == ""
    assert not (tmp_path / "absent").exists()


def identity(**changes):
    return FunctionIdentity("run", "ops", "(x, n) tunes n")._replace(**changes)


def of(key, like=RECORD) -> TuningRecord:
    return dataclasses.replace(like, key=key)


@pytest.mark.parametrize("change", [{"module": "other"}, {"signature": "(x, m) tunes m"}])
def test_two_functions_of_one_name_keep_their_records(tmp_path, change):
    store = FileStore(tmp_path)
    mine, other = Key.of(identity(), 1, "fake"), Key.of(identity(**change), 1, "fake")
    store.put(of(mine))
    store.put(of(other, record(Measurement((0.5,), 3))))
    store.put(of(mine))
    assert [each.key.module for each in found(store, mine)] == [mine.module, other.module]
    assert found(store, mine)[0] == of(mine)
    assert found(store, other)[0] == of(other, record(Measurement((0.5,), 3)))


@pytest.mark.parametrize("kind", [FileStore, ReadOnlyStore])
def test_a_newer_schema_is_a_miss_with_one_warning_and_stays(tmp_path, kind):
    FileStore(tmp_path).put(RECORD)
    path = FileStore(tmp_path).path(RECORD.key)
    text = json.dumps(RECORD.to_tree() | {"schema": SCHEMA + 1, "best": "something new"})
    path.write_text(text)
    store = kind(tmp_path)
    with pytest.warns(CacheWarning, match=f"schema is {SCHEMA + 1}.*later"):
        assert found(store) == []
    assert found(store) == []
    assert list(store.records()) == []
    assert path.read_text() == text


def test_a_record_of_the_first_schema_is_found_and_loads(tmp_path):
    """A file as version 0.1.0 wrote it."""
    store = FileStore(tmp_path)
    key = Key.of(
        FunctionIdentity(
            "matmul", "tests.tuning.ops", "(A, B, config, method) tunes config, method"
        ),
        ((8, 4), "n"),
        "cuda, NVIDIA H200, local_world_size 4, world_size 4",
    )
    folder = tmp_path / "autotune" / "matmul"
    folder.mkdir(parents=True)
    old = (HERE / "data" / "record_schema_1.json").read_text()
    (folder / f"{json.loads(old)['name of its file']}.json").write_text(old)
    (read,) = found(store, key)
    assert read.key == key
    assert read.key.module == key.module
    assert read.best.outcome.samples == (0.25, 0.5, 0.75)
    live = Config({"config": triton.Config({"BLOCK": 64}, num_warps=4), "method": Method.PULL})
    assert read.best.digest == live.digest
    assert [str(trial.outcome)[:6] for trial in read.trials[2:]] == ["launch"]
    assert read.fingerprint.topology["world_size"] == "4"
    store.put(read)
    assert found(store, key)[0] == read


def test_a_stale_file_of_a_killed_writer_is_removed_by_a_later_one(kept):
    folder = kept.path(RECORD.key).parent
    stale, fresh = folder / ".old.1.ab.tmp", folder / ".new.1.ab.tmp"
    for path in (stale, fresh):
        path.write_text("{")
    os.utime(stale, (time.time() - 4000,) * 2)
    kept.put(RECORD)
    assert not stale.exists()
    assert fresh.exists()


@pytest.mark.parametrize("failure", [OSError(errno.ENOLCK, "no locks"), NotImplementedError()])
def test_where_locks_do_not_work_records_are_written_and_damaged_files_stay(
    tmp_path, monkeypatch, failure
):
    def refuse(*_, **__):
        raise failure

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    store = FileStore(tmp_path)
    store.put(RECORD)
    assert found(store) == [RECORD]
    store.path(RECORD.key).write_text("{")
    with pytest.warns(CacheWarning, match="cannot be locked"):
        assert found(store) == []
    assert store.path(RECORD.key).read_text() == "{"


def test_a_writer_that_is_stopped_with_the_lock_held_stops_nobody(kept, monkeypatch):
    monkeypatch.setattr("triton_dist._tuning.store.file._LOCK_TIMEOUT_SECONDS", 0.1)
    with filelock.FileLock(kept.path(RECORD.key).parent / ".lock"):
        thread = threading.Thread(target=kept.put, args=(record(Measurement((0.5,), 3)),))
        thread.start()
        thread.join(60)
    assert found(kept) == [record(Measurement((0.5,), 3))]


def test_a_file_that_is_replaced_on_nfs_while_it_is_read_is_read_again(kept, monkeypatch):
    read_bytes, calls = readonly.read_bytes, []

    def stale_once(path):
        calls.append(path)
        if len(calls) == 1:
            raise OSError(errno.ESTALE, "Stale file handle")
        return read_bytes(path)

    monkeypatch.setattr(readonly, "read_bytes", stale_once)
    assert found(kept) == [RECORD]
    assert len(calls) == 2


# All characters but surrogates, as by default. The default takes Hypothesis 2 s to compute.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner),
    max_leaves=5,
)


@st.composite
def mangled(draw):
    """A record's tree in which one value, anywhere, is something else."""
    tree = json.loads(json.dumps(RECORD.to_tree()))
    place, at = tree, None
    while at is None or (isinstance(place[at], (dict, list)) and place[at] and draw(st.booleans())):
        place = tree if at is None else place[at]
        at = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
    place[at] = draw(json_values)
    return tree


@given(mangled())
@example({**RECORD.to_tree(), "function": math.inf})
@example({**RECORD.to_tree(), "hardware_group": math.nan})
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_whatever_is_in_a_file_is_a_record_or_a_miss(tmp_path, tree):
    path = FileStore(tmp_path).path(RECORD.key)
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(ValueError):  # infinite numbers have no text
        path.write_text(with_checksum(tree))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        assert all(each.key == RECORD.key for each in found(FileStore(tmp_path)))
        path.unlink(missing_ok=True)


def test_whatever_is_edited_in_a_record_is_noticed_but_not_its_layout(tmp_path):
    store = FileStore(tmp_path)
    written = record(Measurement((3.0, 3.0), 0), Measurement((1.0, 1.0), 0))
    path = Path(store.put(written))
    text = path.read_text()
    tree = json.loads(text)
    for _ in edits(tree):
        for edited in (json.dumps(tree), readable_json(tree)):
            path.write_text(edited)
            with pytest.warns(CacheWarning, match="checksum does not match|its schema is"):
                assert found(FileStore(tmp_path)) == []
    assert tree == json.loads(text)
    path.write_text(re.sub(r',\n  "checksum": ".*"\n', "\n", text))
    with pytest.warns(CacheWarning, match="checksum does not match"):
        assert found(FileStore(tmp_path)) == []
    path.write_text(json.dumps(tree, indent=8).replace("\n", "\r\n"))
    assert found(FileStore(tmp_path)) == [written]


def test_a_record_of_schema_3_which_has_no_checksum_is_found(tmp_path):
    store = FileStore(tmp_path)
    path = Path(store.put(RECORD))
    path.write_text(json.dumps(RECORD.to_tree() | {"schema": 3, "whole": "0" * 32}))
    (read,) = found(store)
    assert (read.key, read.trials) == (RECORD.key, RECORD.trials)


def test_a_record_whose_trials_were_not_read_is_the_record(tmp_path):
    store = FileStore(tmp_path)
    written = record(*[Measurement((9.0 - n, 9.0), 0) for n in range(5)], Failure("launch", "no"))
    store.put(written)
    (read,) = found(store)
    assert "trials" not in vars(read)
    copied = pickle.loads(pickle.dumps(read))  # as it is sent to other ranks
    assert (read.best, read.digest) == (written.best, written.digest)
    assert "trials" not in vars(read)
    assert read == written == copied
    assert read.to_tree() == written.to_tree()
