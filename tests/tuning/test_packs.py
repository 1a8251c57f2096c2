"""Packs: what is shipped comes back whole and is used only for what it was made for.

Equal contents are equal bytes. Damaged or foreign files are refused."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import io
import json
import random
import stat
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tuning.fakes import Rank, fingerprint, thread_ranks, together
from tests.tuning.strategies import configs, edits, keys, measurements
from triton_dist import _archive, packs
from triton_dist._archive import (
    MANIFEST_FORMAT,
    PACKAGE_RECORDS,
    Pack,
    PackContents,
    PackedKernel,
    pack_locations,
    sha256,
)
from triton_dist._tuning.store import LayeredStore, MemoryStore, PackStore
from triton_dist._tuning.store.layout import readable_json
from triton_dist._tuning.store.packs import (
    merge_packs,
    pack_contents,
    read_verified,
    records_of,
)
from triton_dist._tuning.values import (
    PACK_FORMAT,
    Failure,
    FunctionIdentity,
    Key,
    Trial,
    TuningRecord,
    pack,
    unpack,
)
from triton_dist.errors import (
    CacheWarning,
    InvalidArgument,
    NewerSchema,
    NoSuchFunction,
    PackRefused,
    TuningFrozen,
)
from triton_dist.runtime.compiling import shipped
from triton_dist.tune import autotune

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
    path.write_bytes(PackContents(records, {}).to_bytes())
    return path


@st.composite
def several(draw: st.DrawFn) -> list[TuningRecord]:
    """Records of one function, version and GPU, no key twice."""
    hardware = {"gpu": draw(st.text(max_size=5)), "driver": "550.54"}
    found = fingerprint(hardware=hardware, version=draw(st.text(max_size=5)))
    chosen = draw(st.lists(keys, min_size=1, max_size=4))
    distinct = {Key.of(FunctionIdentity("run", "ops"), key, "fake") for key in chosen}
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
            measured_sizes=draw(st.sampled_from([(), (2050,)])),
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
        assert read.measured_sizes == record.measured_sizes
        median = read.best.outcome.median
        assert median == pytest.approx(record.best.outcome.median, abs=1e-6)
        assert read.fingerprint.software == {**record.fingerprint.software, "driver": "550.54"}
        assert (read.timestamp, read.is_shipped, record.is_shipped) == ("2030-01-02", True, False)


def test_a_hit_runs_nothing_and_says_that_it_is_shipped(tmp_path, capsys):
    path = written(tree_of(1, 5), tmp_path)
    rank = one(tmp_path)
    assert rank.tuned(1) == (1, {"n": 1})
    assert rank.calls == [{"n": 1}]
    assert rank.tuned.num_tunings == 0
    assert rank.tuned.tune(5).is_shipped
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
    assert rank.tuned.num_tunings == 1  # it was no hit


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
    assert rank.tuned.num_tunings == 2
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
    read = Pack.read_records
    monkeypatch.setattr(
        Pack, "read_records", lambda self, name: reads.append(name) or read(self, name)
    )
    rank = one(tmp_path)
    assert reads == []
    for key in (1, 5, 9):
        rank.tuned.clear()
        rank.tuned(key)
    assert reads == ["run.fake.json"]


def test_the_users_own_valid_record_goes_before_it(tmp_path):
    written(tree_of(1), tmp_path)
    own = MemoryStore()
    slow = one(disk=own)
    slow.cost = lambda _, config: 4 - config["n"]  # here 3 is best
    slow.tuned(1)
    assert one(tmp_path, disk=own).tuned(1) == (1, {"n": 3})
    stale = one(tmp_path, disk=own, fingerprint=dataclasses.replace(NOW, source={"run": "new"}))
    assert stale.tuned(1) == (1, {"n": 1})
    assert stale.tuned.num_tunings == 0


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
    assert [rank.tuned.num_tunings for rank in ranks] == [0, 0]


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
    assert pack_locations() == folders
    assert PACKAGE_RECORDS.is_dir()
    assert list(PackStore(tmp_path / "none").records()) == []
    written(tree_of(1, 5), tmp_path)
    (tmp_path / "run.fake.json").write_text(readable_json(tree_of(9)))
    store = PackStore(tmp_path)
    assert [stored.record.key.text for stored in store.records()] == ["1", "5", "9"]
    assert store.put(one().tuned.tune(1)) == ""


MM, STUB = sha256(b"mm"), sha256(b"stub")


def elf(machine: int = 190, abi: int = 51, flags: int = 0x5A055A) -> bytes:
    """A header as that of a cubin for compute capability 9.0."""
    head = bytearray(b"\x7fELF" + bytes(60) + bytes(range(200)))
    head[7], head[18:20], head[48:52] = (
        abi,
        machine.to_bytes(2, "little"),
        flags.to_bytes(4, "little"),
    )
    return bytes(head)


CUBIN = elf()
STUB_FILE = "launcher.cpython-311-x86_64-linux-gnu.so"


def kernel(digest: str = MM, arch: int = 90, cubin: bytes = CUBIN) -> PackedKernel:
    metadata = {"hash": digest, "target": {"backend": "cuda", "arch": arch}, "name": "mm"}
    files = {"mm.json": json.dumps(metadata).encode(), "mm.cubin": cubin}
    return PackedKernel("mm", {"target": f"cuda {arch}", "option num_warps": "4"}, files)


@functools.cache
def contents(*keys: int) -> PackContents:
    records = pack_contents([one().tuned.tune(key) for key in keys]).records
    stub = PackedKernel("launcher", {"python": "cpython-311"}, {STUB_FILE: b"\x7fELF stub"})
    return PackContents(records, {MM: kernel(), STUB: stub})


@functools.cache
def whole() -> bytes:
    return contents(1, 5).to_bytes()


@pytest.fixture
def pack_at(tmp_path, monkeypatch) -> Callable[[bytes], Path]:
    """Puts a file where packs are looked for, and forgets it afterwards."""
    monkeypatch.setenv("TRITON_DIST_CACHE_DIR", str(tmp_path))
    for name, fresh in (("_extracted", {}), ("_warned", set())):
        monkeypatch.setattr(shipped, name, fresh)
    monkeypatch.setattr(_archive, "_explicit_packs", [])

    def put(data: bytes, name: str = "model.tdpack") -> Path:
        path = tmp_path / "packs" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        return path

    return put


Members = dict[str, bytes]
Edit = Callable[[Members], Any]


def rezipped(edit: Edit, method: int = zipfile.ZIP_STORED) -> bytes:
    """The pack with its members changed; a manifest that is left alone is as it was."""
    with zipfile.ZipFile(io.BytesIO(whole())) as there:
        members = {name: there.read(name) for name in there.namelist()}
    edit(members)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as out:
        for name, data in members.items():
            out.writestr(name, data)
    return file.getvalue()


def manifest(edit: Callable[[Any], Any]) -> bytes:
    def change(members: Members) -> None:
        tree = json.loads(members["manifest.json"])
        edit(tree)
        members["manifest.json"] = json.dumps(tree).encode()

    return rezipped(change)


def consistent(name: str, data: bytes) -> bytes:
    """With another file for the kernel, and a manifest that says so."""

    def change(members: Members) -> None:
        tree = json.loads(members["manifest.json"])
        digest = STUB if name.endswith(".so") else MM
        members[f"kernels/{digest}/{name}"] = data
        tree["kernels"][digest]["files"][name] = sha256(data)
        members["manifest.json"] = json.dumps(tree).encode()

    return rezipped(change)


def rebuilt(**changes: Any) -> bytes:
    """With another kernel under the same digest, as a tool of somebody else may write it."""
    return PackContents({}, {MM: kernel(**changes)}).to_bytes()


def add(name: str, data: bytes = b"x", mode: int = stat.S_IFREG | 0o644, twice: bool = False):
    file = io.BytesIO(whole())
    with zipfile.ZipFile(file, "a") as out, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile's own, of a name that is there twice
        member = zipfile.ZipInfo(name)
        member.external_attr = mode << 16
        out.writestr(member, data)
    return file.getvalue()


def flipped(needle: bytes, offset: int) -> bytes:
    """With a bit flipped that far behind the first place of ``needle``."""
    data = bytearray(whole())
    data[data.index(needle) + offset] ^= 4
    return bytes(data)


def encrypted() -> bytes:
    data = bytearray(whole())
    data[data.rindex(b"PK\x01\x02") + 8] |= 1
    return bytes(data)


def record_edited(members: Members) -> None:
    (name,) = [name for name in members if name.startswith("records/")]
    members[name] = members[name].replace(b'{"n": 1}', b'{"n": 2}')
    tree = json.loads(members["manifest.json"])
    tree["records"][name.removeprefix("records/")] = sha256(members[name])
    members["manifest.json"] = json.dumps(tree).encode()


def foreign_metadata(text: str) -> bytes:
    return consistent("mm.json", text.encode())


RECORD = "records/run."
OF_MM = f"kernels/{MM}/mm"
# What is wrong with the file, and the member and the reason that are named.
REFUSED: dict[str, tuple[Callable[[], bytes], str, str]] = {
    "empty": (lambda: b"", "", "it is not a zip"),
    "text": (lambda: b"{}" * 99, "", "it is not a zip"),
    "cut in half": (lambda: whole()[: len(whole()) // 2], "", "it is not a zip"),
    "without its beginning": (lambda: whole()[99:], "", "damaged|not a zip"),
    "another zip": (lambda: rezipped(lambda members: members.clear()), "", "no manifest.json"),
    "without a manifest": (
        lambda: rezipped(lambda members: members.pop("manifest.json")), "", "no manifest.json"),
    "a later format": (
        lambda: manifest(lambda tree: tree.update(pack=MANIFEST_FORMAT + 1)),
        "",
        "a later version wrote",
    ),
    "an earlier format": (
        lambda: manifest(lambda tree: tree.update(pack=1)), "manifest.json", "its format is 1"),
    "a format that is true": (
        lambda: manifest(lambda tree: tree.update(pack=True)), "manifest.json", "format is True"),
    "a manifest that is no JSON": (
        lambda: rezipped(lambda members: members.update({"manifest.json": b"{"})),
        "manifest.json", "JSONDecodeError"),
    "a manifest that is a list": (
        lambda: rezipped(lambda members: members.update({"manifest.json": b"[]"})),
        "manifest.json", "TypeError"),
    "a deep manifest": (
        lambda: rezipped(lambda members: members.update({"manifest.json": b"[" * 100_000})),
        "manifest.json", "RecursionError"),
    "a manifest that fills the memory": (
        lambda: rezipped(
            lambda members: members.update({"manifest.json": b"[" + b" " * (1 << 24) + b"]"}),
            zipfile.ZIP_DEFLATED),
        "manifest.json", "16777218 bytes, the limit is 16777216"),
    "records that fill the memory": (
        lambda: rezipped(
            lambda members: members.update({"records/run.json": b"[" + b" " * (1 << 26) + b"]"}),
            zipfile.ZIP_DEFLATED),
        "records/run.json", "67108866 bytes, the limit is 67108864"),
    "a kernel without files": (
        lambda: manifest(lambda tree: tree["kernels"][MM].update(files={})),
        "manifest.json", "expected a json and a cubin"),
    "a kernel without facts": (
        lambda: manifest(lambda tree: tree["kernels"][MM].pop("facts")),
        "manifest.json", "must have name, facts and files"),
    "a number for a text": (
        lambda: manifest(lambda tree: tree["kernels"][MM]["facts"].update(target=90)),
        "manifest.json", "where a string is required"),
    "a kernel that is not listed": (
        lambda: manifest(lambda tree: tree["kernels"].pop(MM)), OF_MM, "not in the manifest"),
    "a kernel that is missing": (
        lambda: rezipped(lambda members: members.pop(f"{OF_MM}.cubin")), OF_MM, "not in the zip"),
    "a path that leads out": (lambda: add("kernels/../../evil.so"), "evil", "no file of a pack"),
    "an absolute path": (lambda: add("/etc/evil.json"), "/etc/evil", "no file of a pack"),
    "a path of Windows": (lambda: add(rf"kernels/{MM}/..\evil.so"), "evil", "no file of a pack"),
    "a name with a null byte": (
        lambda: add(f"{OF_MM}.json").replace(b"mm.json", b"m\0.json"), "m", "no file of a pack"),
    "a script": (lambda: add(f"kernels/{MM}/evil.py"), "evil.py", "no file of a pack"),
    "a pickle": (lambda: add("records/run.pkl"), "run.pkl", "no file of a pack"),
    "a link": (
        lambda: add(f"kernels/{MM}/link.so", b"/etc/passwd", stat.S_IFLNK | 0o777),
        "link.so", "not in the manifest"),
    "a member twice": (lambda: add(f"{OF_MM}.cubin"), OF_MM, "it occurs twice"),
    "an encrypted member": (encrypted, RECORD, "is encrypted"),
    "a bit of a cubin": (lambda: flipped(b"mm.cubin", 30), f"{OF_MM}.cubin", "damaged|SHA-256"),
    "another cubin": (
        lambda: rezipped(lambda members: members.update({f"{OF_MM}.cubin": CUBIN + b"!"})),
        f"{OF_MM}.cubin", "its SHA-256 is not the one in the manifest"),
    "a cubin that is none": (
        lambda: consistent("mm.cubin", b"#!/bin/sh"), f"{OF_MM}.cubin", "it is not a cubin"),
    "a program of the host": (
        lambda: consistent("mm.cubin", elf(machine=62)),
        f"{OF_MM}.cubin", "it is not a cubin"),
    "another architecture": (
        lambda: consistent("mm.json", kernel(arch=100).files["mm.json"]),
        f"{OF_MM}.json", "it is for cuda 100, the manifest says cuda 90"),
    "a cubin of another architecture": (
        lambda: consistent("mm.cubin", elf(flags=0x640564)),
        f"{OF_MM}.cubin", "it is for cuda 100, the manifest says cuda 90"),
    "the same of CUDA 13": (
        lambda: consistent("mm.cubin", elf(abi=65, flags=0x6006404)),
        f"{OF_MM}.cubin", "it is for cuda 100, the manifest says cuda 90"),
    "metadata of another kernel": (
        lambda: rebuilt(digest=STUB), f"{OF_MM}.json", f"it belongs to kernel {STUB}"),
    "metadata that are none": (lambda: foreign_metadata("[]"), f"{OF_MM}.json", "not the metadata"),
    "a native module that is none": (
        lambda: consistent(STUB_FILE, b"import os"), STUB_FILE, "it is not a native module"),
    "an edited winner": (lambda: rezipped(record_edited), RECORD, "checksum does not match"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_pack_that_is_damaged_or_foreign_is_refused_by_name_and_a_miss(what, pack_at):
    make, member, reason = REFUSED[what]
    path = pack_at(make())
    with pytest.raises(PackRefused, match=reason) as caught:
        read_verified(path)
    assert caught.value.pack == str(path)
    assert member in caught.value.member
    assert str(path) in str(caught.value)

    store = PackStore(path.parent)
    key = one().tuned.tune(1).key
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            found = [
                list(store.find(key)),
                shipped.extracted_files(MM),
                shipped.extracted_files(STUB),
            ]
    assert [each.category for each in warned] == [CacheWarning]
    assert str(path) in str(warned[0].message)
    assert member in str(warned[0].message)
    assert not all(found)


def test_what_is_no_file_is_refused_too(pack_at, tmp_path):
    folder = pack_at(whole()).parent / "folder.tdpack"
    folder.mkdir()
    with pytest.raises(PackRefused, match="not a regular file"):
        packs.use(folder)
    with pytest.raises(InvalidArgument, match="path is None, expected the path of a pack"):
        packs.use(None)
    with pytest.raises(FileNotFoundError):
        packs.use(tmp_path / "none.tdpack")


def test_a_whole_pack_is_found_and_equal_contents_are_equal_bytes(pack_at):
    path = pack_at(whole())
    packed = Pack(path)
    assert packed.contents() == contents(1, 5)
    assert packed.contents().to_bytes() == whole()
    paths = shipped.extracted_files(MM)
    assert {name: Path(each).read_bytes() for name, each in paths.items()} == kernel().files
    assert set(shipped.extracted_files(STUB)) == {STUB_FILE}
    assert shipped.extracted_files(sha256(b"other")) is None
    rank = one(path.parent)
    assert rank.tuned(1) == (1, {"n": 1})
    assert rank.tuned.num_tunings == 0
    assert sorted(record.key.text for record in records_of(packed)) == ["1", "5"]


def test_a_used_pack_goes_before_those_in_folders(pack_at, tmp_path):
    pack_at(whole())
    newer = tmp_path / "newer.tdpack"
    newer.write_bytes(PackContents({}, {MM: kernel(cubin=CUBIN + b"newer")}).to_bytes())
    packs.use(newer)
    assert Path(shipped.extracted_files(MM)["mm.cubin"]).read_bytes() == CUBIN + b"newer"


def test_a_merge_is_the_same_bytes_in_any_order():
    """Of eight packs that overlap, and contradict one another."""
    several = [contents(each, each + 1) for each in range(1, 6)]
    several += [
        PackContents({}, {sha256(bytes([each])): kernel(sha256(bytes([each])))}) for each in (1, 2)
    ]
    several.append(PackContents({}, {MM: kernel(cubin=CUBIN + b"other")}))
    shuffled = random.Random(20)
    first = merge_packs(several).to_bytes()
    for _ in range(5):
        shuffled.shuffle(several)
        assert merge_packs(several).to_bytes() == first
    assert merge_packs([merge_packs(several[:3]), merge_packs(several[3:])]).to_bytes() == first
    assert merge_packs([merge_packs(several)]).to_bytes() == first


def test_of_a_key_that_several_have_the_last_result_wins(tmp_path):
    def of(date: str, ms: str) -> PackContents:
        ((name, data),) = contents(1).records.items()
        tree = json.loads(data)
        tree["groups"][0]["date"] = date
        tree["groups"][0]["results"][0]["ms"] = float(ms)
        return PackContents({name: json.dumps(tree).encode()}, {})

    both = [of("2030-01-02", "3.0"), of("2031-01-02", "9.0")]
    for order in (both, both[::-1]):
        path = tmp_path / "merged.tdpack"
        _archive.write(path, merge_packs(order))
        (record,) = records_of(Pack(path))
        assert record.best.outcome.median == 9.0
    assert list(tmp_path.iterdir()) == [path]


PROGRAM = """
from triton_dist.tune import autotune

@autotune([{"n": 1}, {"n": 2}], key_fn=lambda size: size, version="1")
def work(size, n):
    return size * n
"""


def test_what_was_tuned_under_a_modules_earlier_name_is_packed_under_its_present_one(
    pack_at, tmp_path, monkeypatch
):
    """The user's cache answers whatever the module was called; a pack only the name in it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in (
        ("packed_before", PROGRAM),
        ("packed_after", PROGRAM),
        ("packed_twin", PROGRAM.replace("size * n", "size + n")),
        ("packed_anew", PROGRAM.replace('"1"', '"2"')),
    ):
        (tmp_path / f"{name}.py").write_text(text)
    before, after, twin, anew = (
        importlib.import_module(f"packed_{name}") for name in ("before", "after", "twin", "anew")
    )
    before.work(8)
    with packs.recording() as used:
        after.work(8)
    assert after.work.num_tunings == 0
    path = used.save(tmp_path / "after.tdpack", [after.work])
    for other in (twin, anew):
        with pytest.raises(NoSuchFunction, match=f"{other.__name__}.work.*it has no record"):
            used.save(tmp_path / "other.tdpack", [other.work])

    monkeypatch.setenv("TRITON_DIST_CACHE_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_FROZEN", "1")
    packs.use(path)
    after.work.clear()
    after.work(8)
    assert [str(record.key.full_name) for record in records_of(Pack(path))] == ["packed_after.work"]


def test_where_a_kernel_comes_from_is_no_part_of_what_was_timed():
    def loads(n):
        packs.use("model.tdpack")
        return shipped.extracted_files(MM), n

    tuned = autotune([{"n": 1}], key_fn=lambda: 1)(loads)
    assert [name.rpartition(".")[2] for name in tuned.fingerprint().source] == ["loads", "MM"]
