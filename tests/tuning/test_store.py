from __future__ import annotations

import json
import os
import threading
import warnings

import pytest
from hypothesis import HealthCheck, given, settings

from tests.tuning.strategies import records
from tests.tuning.test_record import record
from triton_dist._tuning.store import FileStore, LayeredStore, MemoryStore
from triton_dist._tuning.store.layout import readable_json
from triton_dist._tuning.values import Failure, Key, Measurement, TuningRecord
from triton_dist.errors import CacheWarning

RECORD = record(Measurement(tuple(n / 7 for n in range(1, 11)), 3), Failure("launch", "no", 1))


@pytest.fixture(params=["memory", "file", "layered"])
def store(request, tmp_path):
    return {
        "memory": lambda: MemoryStore(),
        "file": lambda: FileStore(tmp_path),
        "layered": lambda: LayeredStore([MemoryStore(), FileStore(tmp_path)]),
    }[request.param]()


def test_a_store_gives_what_it_got(store):
    assert store.get(RECORD.key) is None
    store.put(RECORD)
    assert store.get(RECORD.key) == RECORD
    assert list(store.records()) == [RECORD]
    assert store.get(Key.of("ops.run", (2,), "fake")) is None


def test_a_store_replaces_the_record_of_a_key(store):
    store.put(RECORD)
    newer = record(Measurement((0.5,), 3))
    store.put(newer)
    assert store.get(RECORD.key) == newer
    assert list(store.records()) == [newer]


@given(records())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_every_record_survives_a_file(tmp_path, written):
    FileStore(tmp_path).put(written)
    assert FileStore(tmp_path).get(written.key) == written


def test_the_file_lies_where_the_contract_says_and_can_be_read(tmp_path):
    store = FileStore(tmp_path)
    store.put(RECORD)
    path = tmp_path / "autotune" / "run" / f"{RECORD.key.digest}.json"
    assert store.describe(RECORD.key) == str(path)
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
        "newer": json.dumps(tree | {"schema": 99}),
        "nested deeply": "[" * 100_000,
        "binary": "\x00\x01",
        "of another key": json.dumps(record_of_another_key().to_tree()),
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
    with pytest.warns(CacheWarning) as caught:
        assert store.get(RECORD.key) is None
    assert len(caught) == 1
    assert str(path) in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.get(RECORD.key) is None
        store.put(RECORD)
        assert store.get(RECORD.key) == RECORD
    assert path.with_name(path.name + ".damaged").read_text() == damaged_texts()[damage]


def test_a_file_that_was_mended_meanwhile_is_not_set_aside(tmp_path):
    store = FileStore(tmp_path)
    store.put(RECORD)
    with pytest.warns(CacheWarning):
        store._set_aside(store.path(RECORD.key), "it was damaged a moment ago")
    assert store.get(RECORD.key) == RECORD


def test_a_folder_in_place_of_the_file_is_a_miss(tmp_path):
    store = FileStore(tmp_path)
    store.path(RECORD.key).mkdir(parents=True)
    with pytest.warns(CacheWarning, match="cannot be read"):
        assert store.get(RECORD.key) is None


def test_a_disk_that_refuses_is_said_once_and_memory_keeps_the_record(tmp_path):
    (tmp_path / "autotune").write_text("a file where the folder should be")
    store = LayeredStore([MemoryStore(), FileStore(tmp_path)])
    with pytest.warns(CacheWarning, match="cannot be written"):
        store.put(RECORD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.put(record_of_another_key())
    with pytest.warns(CacheWarning, match="cannot be read"):
        assert store.describe(RECORD.key) == "memory"
    assert store.get(RECORD.key) == RECORD


def test_a_write_that_fails_leaves_the_old_record_and_no_litter(tmp_path, monkeypatch):
    store = FileStore(tmp_path)
    store.put(RECORD)

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(CacheWarning, match="No space left"):
        store.put(record(Measurement((0.5,), 3)))
    assert store.get(RECORD.key) == RECORD
    assert not list(tmp_path.rglob("*.tmp"))


def test_readers_never_see_half_a_record_while_others_write(tmp_path):
    variants = [record(Measurement((float(n),) * 50, 3)) for n in range(1, 5)]
    FileStore(tmp_path).put(variants[0])
    done = threading.Event()
    seen: list[TuningRecord | None] = []

    def write(variant):
        for _ in range(15):
            FileStore(tmp_path).put(variant)

    def read():
        while not done.is_set():
            seen.append(FileStore(tmp_path).get(RECORD.key))

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(variant,)) for variant in variants]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for thread in [reader, *writers]:
            thread.start()
        for thread in writers:
            thread.join()
        done.set()
        reader.join()
    assert seen
    assert all(each in variants for each in seen)


def test_records_leaves_out_what_cannot_be_read(tmp_path):
    store = FileStore(tmp_path)
    store.put(RECORD)
    (store.path(RECORD.key).parent / "zz.json").write_text("{")
    with pytest.warns(CacheWarning, match="left out"):
        assert list(store.records()) == [RECORD]


def test_a_name_with_odd_characters_names_a_folder(tmp_path):
    key = Key.of("ops.outer.<locals>.<lambda>", 1, "fake")
    assert FileStore(tmp_path).path(key).parent.name == "_lambda_"


def test_the_nearest_layer_answers():
    near, far = MemoryStore(), MemoryStore()
    far.put(RECORD)
    newer = record(Measurement((0.5,), 3))
    near.put(newer)
    layered = LayeredStore([near, far])
    assert layered.get(RECORD.key) == newer
    assert list(layered.records()) == [newer]
