"""A cache that cannot be reached is a miss with one warning, whatever lies at its path."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.architecture.source import ROOT
from tests.tuning.test_store import RECORD, found
from triton_dist import knobs
from triton_dist._tuning.store import FileJournal, FileStore, PackStore, ReadOnlyStore
from triton_dist._tuning.store.layout import _hash, readable_json, with_checksum
from triton_dist._tuning.values import Key
from triton_dist.errors import CacheWarning, NoValidConfig
from triton_dist.tune import autotune


def work(x, n):
    return x, n


def tuned():
    return autotune([{"n": 1}, {"n": 2}], key_fn=lambda x: x, scope="rank")(work)


def called(x: object = 1) -> list[warnings.WarningMessage]:
    """The warnings of a call of a function that has to be tuned."""
    function = tuned()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert function(x)[0] == x
        function.clear()
        function(x)
    assert function.num_tunings in (1, 2)  # 2: nothing could be written
    return caught


def looped(path: Path) -> None:
    path.symlink_to(path.name)


THINGS: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a link to a device that never ends": lambda path: path.symlink_to("/dev/zero"),
    "a loop": looped,
    "a folder": Path.mkdir,
}
PLACES = {
    "the root": "autotune",
    "the folder": "autotune/work",
    "the record": "autotune/work/{}.json",
    "the journal": "autotune/work/{}.journal",
    "the events": "autotune/work/{}.log.jsonl",
    "the lines": "autotune/work/{}.rank-0.log",
    "the lock": "autotune/work/.lock",
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("thing", THINGS)
def test_whatever_lies_there_is_no_hang_no_error_and_at_most_one_warning(place, thing, tmp_path):
    cache = knobs.cache_dir.get()
    tuned()(1)
    (record,) = (cache / "autotune" / "work").glob("*.json")
    cache.rename(tmp_path / "elsewhere")
    path = cache / PLACES[place].format(record.stem)
    path.parent.mkdir(parents=True)
    THINGS[thing](path)
    caught = called()
    assert {warning.category for warning in caught} <= {CacheWarning}
    assert {warning.filename for warning in caught} <= {__file__}
    is_place_of_records = place in ("the root", "the folder", "the record")
    is_usable = thing == "a folder" and place in ("the root", "the folder")
    assert len(caught) == (is_place_of_records and not is_usable)


@pytest.mark.parametrize("thing", THINGS)
def test_a_pack_that_is_no_file_is_a_miss_with_one_warning(thing, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_READONLY_DIRS", str(tmp_path / "shipped"))
    (tmp_path / "shipped" / "packs").mkdir(parents=True)
    THINGS[thing](tmp_path / "shipped" / "packs" / "work.tdpack")
    assert [warning.category for warning in called()] == [CacheWarning]


def test_the_warning_points_at_the_line_that_calls(tmp_path):
    cache = knobs.cache_dir.get()
    cache.write_text("a file in place of the folder")
    function = tuned()
    for call in (function, function.tune, function.best_config):
        what = f"cannot be .* Set TRITON_DIST_CACHE_DIR to a folder: {cache} is a file"
        line = inspect.currentframe().f_lineno + 2
        with pytest.warns(CacheWarning, match=what) as caught:
            call(1)
        assert [(each.filename, each.lineno) for each in caught] == [(__file__, line)]
        cache = cache.with_name(cache.name + "x")  # another store, which has not warned yet
        cache.write_text("")
        os.environ["TRITON_DIST_CACHE_DIR"] = str(cache)  # the fixture sets it back
        function.clear()


def named(name: str) -> Callable[..., object]:
    def function(x, n):
        return x

    function.__name__ = function.__qualname__ = name
    return autotune([{"n": 1}, {"n": 2}], key_fn=lambda x: x, scope="rank")(function)


def test_a_function_of_a_very_long_name_has_a_folder(tmp_path):
    for name in ("f" * 255, "f" * 256, "f" * 300 + "a", "f" * 300 + "b"):
        named(name)(1)
        again = named(name)
        again(1)
        assert again.num_tunings == 0
    folders = sorted(path.name for path in (knobs.cache_dir.get() / "autotune").iterdir())
    assert len(folders) == 4
    assert "f" * 255 in folders  # as it was named before


@pytest.mark.parametrize("name", ["f" * 300, "a\0b"], ids=["long", "null"])
def test_a_path_that_no_file_can_have_is_a_miss_with_one_warning(name, tmp_path):
    store = FileStore(tmp_path / name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert found(store) == []
        assert store.put(RECORD) == ""
        assert found(store) == []
        assert list(store.records()) == []
    assert [each.category for each in caught] == [CacheWarning]
    assert list(PackStore(tmp_path / name).find(RECORD.key)) == []


def test_damaged_and_refused_are_said_apart(tmp_path):
    store = ReadOnlyStore(tmp_path)
    other = Key.of("ops.run", (2,), "fake")
    for key in (RECORD.key, other):
        store.path(key).parent.mkdir(parents=True, exist_ok=True)
    store.path(RECORD.key).write_text("{")
    os.mkfifo(store.path(other))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for key in (RECORD.key, other, other):
            assert found(store, key) == []
    assert ["is not used" in str(each.message) for each in caught] == [True, False]


HUGE = "1" + "0" * 400
NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", '"NaN"', "[]", HUGE]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number[:8])
@pytest.mark.parametrize("name", ["seconds", "reduction", "warmup", "ms", "samples"])
def test_what_is_no_number_is_damage(name, number, tmp_path):
    """Where all is read, and, of what is no trial, where the trials are not read yet."""
    store = FileStore(tmp_path)
    tree = json.loads(with_checksum(RECORD.to_tree()))
    trial = tree["trials"][0]
    place = tree if name == "seconds" else trial
    place[name] = "HERE"
    if name == "samples":
        place[name] = ["HERE"]
    path = store.path(RECORD.key)
    path.parent.mkdir(parents=True)
    del tree["checksum"]
    text = readable_json(tree).replace('"HERE"', number)
    if name == "seconds":  # as it was written
        text = f'{text[:-3]},\n  "checksum": "{_hash(text.encode())}"\n}}\n'
    else:  # laid out otherwise
        with suppress(ValueError):
            text = json.dumps(json.loads(with_checksum(json.loads(text))))
    path.write_text(text)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read = found(store)
    # A median is for the eye alone, and a count may be as large as it likes.
    ignored = (name == "ms" and number in NUMBERS[4:]) or (name, number) == ("warmup", HUGE)
    assert (len(read), len(caught)) == ((1, 0) if ignored else (0, 1))
    assert all("is not used" in str(each.message) for each in caught)


def test_a_journal_of_odd_numbers_is_read_as_far_as_it_goes(tmp_path):
    path = tmp_path / "a.journal"
    entry = {"n": 0, "config": "c", "asked": 1, "seconds": 1.0, "samples": [1.0], "warmup": 0}
    entry |= {"reduction": "none"}
    lines = [{"head": {}}, entry, entry | {"n": 1, "seconds": "HERE"}]
    for number in NUMBERS:
        path.write_text("\n".join(map(json.dumps, lines)).replace('"HERE"', number))
        journal = FileJournal(path)
        kept = journal.begin({}, None)
        journal.close()
        assert len(kept) == 1, number


def test_text_that_cannot_be_encoded_is_kept_as_it_can(tmp_path):
    """An ``OSError`` of a path that is no text."""
    error = OSError(2, "No such file", os.fsdecode(b"/data/\xff\xfe"))

    def fails(x, n):
        raise error

    function = autotune([{"n": 1}], key_fn=lambda x: x, scope="rank")(fails)
    for _ in range(2):
        with pytest.raises(NoValidConfig) as raised:
            function(1, autotune_verbose=True)
        assert "\\udcff" in str(raised.value).encode("utf-8").decode()
    (lines,) = knobs.cache_dir.get().rglob("*.rank-0.log")
    assert "\\udcff" in lines.read_text(encoding="utf-8")
    assert list(knobs.cache_dir.get().rglob("*.log.jsonl"))


PROGRAM = """
import json, os, sys, warnings
from tests.tuning.test_unreachable import called
from triton_dist._tuning.shared import file_store

closed, asked = sys.argv[1], sys.argv[2].split(",")
os.chmod(closed, 0)
assert not sys.flags.utf8_mode
assert not called()  # what is imported late is read by who may
if os.geteuid() == 0:
    os.setgroups([]), os.setgid(4242), os.setuid(4242)
told = {}
for case in asked:
    os.environ["HOME"] = closed
    os.environ.pop("TRITON_DIST_CACHE_DIR", None)
    file_store.cache_clear()
    if case == "home unknown":
        del os.environ["HOME"]
    elif case != "home closed":
        os.environ["TRITON_DIST_CACHE_DIR"] = os.path.join(closed, case)
    told[case] = [[w.category.__name__, w.filename, str(w.message)] for w in called()]
print(json.dumps(told))
"""


def test_another_user_or_no_home_folder_is_a_miss_with_one_warning(tmp_path):
    """In a process that gives up being root, as which every folder is open. Its locale has no
    letters beyond ASCII, and before all else it keeps a record under a path that has one."""
    closed = tmp_path / "closed"
    (closed / "autotune" / "work").mkdir(parents=True)
    cases = ["home closed", "", "sub"]
    if os.geteuid() == 0:  # who has an entry among the users has a home folder
        cases.append("home unknown")
    folder = tmp_path / "Schlüssel"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(ROOT)]),
        "TRITON_DIST_CACHE_DIR": str(folder),
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(closed), ",".join(cases)],
            env=environment, cwd="/", capture_output=True, text=True, check=False,
        )  # fmt: skip
    finally:
        closed.chmod(0o700)
    assert done.returncode == 0, done.stderr
    (lines,) = folder.rglob("*.rank-0.log")
    assert "Schl\\udcc3\\udcbcssel" in lines.read_text()
    told = json.loads(done.stdout)
    assert list(told) == cases
    for case, warned in told.items():
        assert len(warned) == 1, case
        ((category, file, message),) = warned
        assert (category, file) == ("CacheWarning", __file__), case
        assert ("set HOME or TRITON_DIST_CACHE_DIR" in message) == (case == "home unknown")
