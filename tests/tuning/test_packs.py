"""Packs: what is shipped comes back whole, and is used for what it was made for alone."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tuning.fakes import Rank, fingerprint, thread_ranks, together
from tests.tuning.strategies import configs, edits, keys, measurements
from triton_dist._archive import PACKAGE_RECORDS, Contents, Pack, pack_places
from triton_dist._tuning.store import LayeredStore, MemoryStore, PackStore
from triton_dist._tuning.store.layout import readable_json
from triton_dist._tuning.values import (
    PACK_FORMAT,
    Failure,
    Key,
    Origin,
    Trial,
    TuningRecord,
    pack,
    unpack,
)
from triton_dist.errors import CacheWarning, NewerSchema, TuningFrozen

SPACE = [{"n": n} for n in (3, 2, 1)]
NOW = fingerprint(version="7", topology={"world_size": "2"})


def one(folder: Path | None = None, **options: Any) -> Rank:
    (ranks,) = thread_ranks(1)
    disk = options.pop("disk", MemoryStore())
    layers = [disk] if folder is None else [disk, PackStore(folder)]
    options = {"fingerprint": NOW, **options}
    return Rank(ranks, SPACE, lambda _, config: config["n"], disk=LayeredStore(layers), **options)


def tree_of(*keys: int, checksum: bool = False) -> Any:
    """A pack; without its checksum, so that a test may edit it."""
    rank = one()
    tree = pack([rank.tuned.tune(key) for key in keys])
    return tree if checksum else {name: tree[name] for name in tree if name != "checksum"}


def written(tree: Any, folder: Path, **others: str) -> Path:
    """A pack of ``tree``, and of ``others`` by function."""
    files = {"run": tree if isinstance(tree, str) else readable_json(tree), **others}
    records = {f"{name}.fake.json": text.encode() for name, text in files.items()}
    path = folder / "a.tdpack"
    path.write_bytes(Contents(records, {}).to_bytes())
    return path


@st.composite
def several(draw: st.DrawFn) -> list[TuningRecord]:
    """Records of one function, version and GPU, no key twice."""
    hardware = {"gpu": draw(st.text(max_size=5)), "driver": "550.54"}
    found = fingerprint(hardware=hardware, version=draw(st.text(max_size=5)))
    chosen = draw(st.lists(keys, min_size=1, max_size=4))
    distinct = {Key.of(Origin("run", "ops"), key, "fake") for key in chosen}
    return [
        TuningRecord(
            key,
            found,
            (
                Trial.of(draw(configs), draw(measurements)),
                Trial("other", {}, Failure("launch", "no", 0)),
            ),
            "2030-01-02T03:04:05+00:00",
            1.5,
            at=draw(st.sampled_from([(), (2050,)])),
        )
        for key in distinct
    ]


@given(several())
def test_a_pack_comes_back_with_keys_sizes_winners_and_medians(records):
    tree = json.loads(readable_json(pack(records)))
    back = {record.key: record for record in unpack(tree)}
    assert back.keys() == {record.key for record in records}
    for record in records:
        read = back[record.key]
        assert (read.key.full_name, read.key.text) == (record.key.full_name, record.key.text)
        assert read.best.digest == record.best.digest
        assert read.best.config == record.best.config
        assert read.at == record.at
        median = read.best.outcome.median
        assert median == pytest.approx(record.best.outcome.median, abs=1e-6)
        assert read.fingerprint.software == {**record.fingerprint.software, "driver": "550.54"}
        assert (read.timestamp, read.shipped, record.shipped) == ("2030-01-02", True, False)


def test_a_hit_runs_nothing_and_says_that_it_is_shipped(tmp_path, capsys):
    path = written(tree_of(1, 5), tmp_path)
    rank = one(tmp_path)
    assert rank.tuned(1) == (1, {"n": 1})
    assert rank.calls == [{"n": 1}]
    assert rank.tuned.tuning_count == 0
    assert rank.tuned.tune(5).shipped
    one(tmp_path, verbose=True).tuned(1)
    said = f"key 1: using the shipped record for fake from {path}: 1.0000 ms"
    assert said in capsys.readouterr().err


def changed(**changes: Any) -> dict[str, Any]:
    return {"fingerprint": dataclasses.replace(NOW, **changes)}


# What is different where the pack is looked up, and the reason that is said; None: it is used.
LIVE: dict[str, tuple[dict[str, Any], str | None]] = {
    "nothing": ({}, None),
    "the driver": (changed(hardware={"gpu": "fake", "driver": "999.1"}), None),
    "torch and triton": (changed(software={"torch": "9.9", "triton": "9.9"}), None),
    "the code": (changed(source={"run": "edited", "helper": "new"}), None),
    "the policy": (changed(policy={"timing": "graph"}), None),
    "the space's digest": (changed(space="another"), None),
    "a strict check of versions": ({"strict": True}, None),
    "the GPU": (changed(hardware={"gpu": "H100"}), "hardware: gpu was fake, is H100"),
    "the ranks": (changed(topology={"world_size": "4"}), "topology: world_size was 2, is 4"),
    "the version": (changed(version="8"), "version: the version of the function was 7, is 8"),
    "no version": (changed(version=""), "version: the version of the function was 7, is not dec"),
    "the winner is dropped": (
        {"prune_fn": lambda config, x: config["n"] > 1},
        "prune_fn drops the winner {'n': 1}",
    ),
    "prune_fn fails": ({"prune_fn": lambda config, x: 1 / 0}, "prune_fn raised ZeroDivisionError"),
    "prune_fn keeps it": ({"prune_fn": lambda config, x: config["n"] < 2}, None),
    "the function": ({"name": "walk"}, "no record"),
}  # fmt: skip


@pytest.mark.parametrize("what", LIVE)
def test_what_must_be_the_same_where_it_is_looked_up(what, tmp_path):
    options, reason = LIVE[what]
    written(tree_of(1), tmp_path)
    rank = one(tmp_path, frozen=True, **options)
    if reason is None:
        assert rank.tuned(1) == (1, {"n": 1})
        return
    (error,) = together([rank])
    assert isinstance(error, TuningFrozen)
    assert reason in str(error)
    if reason != "no record":
        assert "the shipped record in " in str(error)


FILE: dict[str, Callable[[Any], Any]] = {
    "another key": lambda tree: tree["groups"][0]["results"][0].update(key=2),
    "another type of key": lambda tree: tree["groups"][0]["results"][0].update(key=True),
    "another group of ranks": lambda tree: tree["groups"][0].update(hardware_group="fake, 2"),
    "another module": lambda tree: tree.update(module="elsewhere"),
    "another function": lambda tree: tree.update(function="walk"),
    "another version": lambda tree: tree.update(version="8"),
    "another GPU": lambda tree: tree.update(gpu="H100"),
    "another topology": lambda tree: tree["groups"][0]["topology"].update(world_size="4"),
}  # fmt: skip


@pytest.mark.parametrize("what", FILE)
def test_what_must_be_the_same_in_the_file(what, tmp_path):
    tree = tree_of(1)
    FILE[what](tree)
    written(tree, tmp_path)
    rank = one(tmp_path)
    assert rank.tuned(1) == (1, {"n": 1})
    assert rank.tuned.tuning_count == 1  # it was no hit


def test_a_winner_that_is_no_longer_in_the_space_is_a_miss(tmp_path):
    tree = tree_of(1)
    rank = one(tmp_path, frozen=True)
    written(tree, tmp_path)
    rank.tuned.config_space.__dict__["_configs"] = rank.tuned.config_space[:2]
    (error,) = together([rank])
    assert "config space: the winner {'n': 1} is not in it" in str(error)


DAMAGE: dict[str, Callable[[str], str]] = {
    "cut": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "no object": lambda text: "[1]",
    "a record": lambda text: '{"schema": 2}',
    "an edited config": lambda text: text.replace('{"n": 1}', '{"n": 2}'),
    "an unknown config": lambda text: text.replace('"config": "', '"config": "x'),
    "a time that is none": lambda text: text.replace('"ms": 1.0', '"ms": "soon"'),
    "an infinite time": lambda text: text.replace('"ms": 1.0', '"ms": Infinity'),
    "a missing name": lambda text: text.replace('"tuned_with"', '"tuned"'),
    "a list for a table": lambda text: text.replace('"groups": [', '"groups": [[], '),
    "another encoding": lambda text: text.replace("fake", "fäke"),
    "deep": lambda text: "[" * 100_000,
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_is_one_warning_and_a_miss(how, tmp_path):
    text = readable_json(tree_of(1))
    damaged = DAMAGE[how](text)
    assert damaged != text
    path = written(damaged, tmp_path)
    whole = path.read_bytes()
    rank = one(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert rank.tuned(1) == (1, {"n": 1})
        assert rank.tuned(2) == (2, {"n": 1})
    assert rank.tuned.tuning_count == 2
    assert [warning.category for warning in caught] == [CacheWarning]
    assert str(caught[0].message).startswith(
        f"pack {path}, member 'records/run.fake.json', is refused: "
    )
    assert path.read_bytes() == whole  # it is not ours to move


def test_whatever_is_edited_in_a_pack_is_noticed():
    tree = tree_of(1, checksum=True)
    assert len(list(unpack(json.loads(json.dumps(tree, indent=4))))) == 1
    for _ in edits(tree):
        with pytest.raises(
            ValueError, match=r"checksum does not match|not a pack|a later version wrote"
        ):
            list(unpack(tree))


def test_a_later_format_is_said():
    tree = tree_of(1) | {"pack": PACK_FORMAT + 1}
    with pytest.raises(NewerSchema, match="a later version wrote"):
        list(unpack(tree))


def test_a_file_is_read_once_and_only_for_its_function(tmp_path, monkeypatch):
    written(tree_of(1, 5), tmp_path, walk="damaged")
    reads = []
    read = Pack.record
    monkeypatch.setattr(Pack, "record", lambda self, name: reads.append(name) or read(self, name))
    rank = one(tmp_path)
    assert reads == []
    for key in (1, 5, 9):
        rank.tuned.clear()
        rank.tuned(key)
    assert reads == ["run.fake.json"]


def test_told_to_tune_always_it_is_not_used(tmp_path):
    written(tree_of(1), tmp_path)
    rank = one(tmp_path, always_tune=True)
    rank.tuned(1)
    assert rank.tuned.tuning_count == 1


def test_the_users_own_valid_record_goes_before_it(tmp_path):
    written(tree_of(1), tmp_path)
    own = MemoryStore()
    slow = one(disk=own)
    slow.cost = lambda _, config: 4 - config["n"]  # here 3 is best
    slow.tuned(1)
    assert one(tmp_path, disk=own).tuned(1) == (1, {"n": 3})
    stale = one(tmp_path, disk=own, fingerprint=dataclasses.replace(NOW, source={"run": "new"}))
    assert stale.tuned(1) == (1, {"n": 1})
    assert stale.tuned.tuning_count == 0


@pytest.mark.parametrize("owner", [0, 1])
def test_the_own_record_of_any_rank_goes_before_that_of_every_package(owner, tmp_path):
    """Of the leader too, which has the shipped one."""
    written(tree_of(1), tmp_path)
    own = MemoryStore()
    slow = one(disk=own)
    slow.cost = lambda _, config: 4 - config["n"]
    slow.tuned(1)
    ranks = [
        Rank(
            each,
            SPACE,
            lambda _, config: config["n"],
            disk=LayeredStore([own if each.rank == owner else MemoryStore(), PackStore(tmp_path)]),
            fingerprint=NOW,
        )
        for each in thread_ranks(2)
    ]
    assert together(ranks) == [(1, {"n": 3})] * 2
    assert [rank.tuned.tuning_count for rank in ranks] == [0, 0]


def test_a_shipped_winner_that_is_not_valid_stays_in_the_race_to_its_end(tmp_path):
    """As any incumbent."""
    written(tree_of(1), tmp_path)
    incumbents = []

    def search(candidates, policy, incumbent):
        incumbents.append(incumbent)
        return Rank.__dataclass_fields__["search"].default(candidates, policy, incumbent)

    one(tmp_path, search=search, fingerprint=dataclasses.replace(NOW, version="8")).tuned(1)
    assert [dict(incumbent) for incumbent in incumbents] == [{"n": 1}]


def test_packs_are_looked_for_in_read_only_folders_and_last_in_the_package(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_DIST_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_READONLY_DIRS", str(tmp_path))
    folders = [tmp_path / "own" / "packs", tmp_path / "packs", PACKAGE_RECORDS]
    assert pack_places() == folders
    assert PACKAGE_RECORDS.is_dir()
    assert list(PackStore(tmp_path / "none").records()) == []
    written(tree_of(1, 5), tmp_path)
    (tmp_path / "run.fake.json").write_text(readable_json(tree_of(9)))
    store = PackStore(tmp_path)
    assert [stored.record.key.text for stored in store.records()] == ["1", "5", "9"]
    assert store.put(one().tuned.tune(1)) == ""
