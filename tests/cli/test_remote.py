"""``triton-dist remote``, and commands that must not print the credentials of a store."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.tuning.test_store import RECORD
from triton_dist import knobs
from triton_dist._tuning.store import FileStore, entry_name, remote

NAME = entry_name(RECORD.key, RECORD.fingerprint)
LATER = replace(RECORD, timestamp="2999-01-01T00:00:00+00:00")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    folder = tmp_path / "fleet"
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_REMOTE", f"file://{folder}")
    return folder


def user_records():
    return [each.record for each in FileStore(knobs.cache_dir.get()).records()]


def test_records_travel_from_one_user_to_another(run, folder, tmp_path, monkeypatch):
    store = f"file://{folder}"
    assert run("remote", "list")[:2] == (1, f"No record of any function to list: {store}.\n")
    FileStore(knobs.cache_dir.get()).put(RECORD)
    assert run("remote", "push")[:2] == (0, f"push: 1 of 1 record copied, {store}.\n")
    assert run("remote", "push", "run")[1].startswith("push: 0 of 1 record")
    assert run("remote", "push", "other")[0] == 1
    monkeypatch.setenv("TRITON_DIST_CACHE_DIR", str(tmp_path / "other user"))
    assert run("remote", "pull", "run")[:2] == (0, f"pull: 1 of 1 record copied, {store}.\n")
    assert user_records() == [RECORD]
    assert run("remote", "pull")[1].startswith("pull: 0 of 1 record")
    FileStore(knobs.cache_dir.get()).put(LATER)
    assert run("remote", "pull")[1].startswith("pull: 0 of 1 record")
    assert run("remote", "push")[1].startswith("push: 1 of 1 record")
    (listed,) = json.loads(run("remote", "list", "run", "--json")[1])["records"]
    assert listed["file"] == f"file://{folder}/{NAME}"
    assert listed["timestamp"] == LATER.timestamp
    heads, row = run("remote", "list")[1].splitlines()
    assert heads.split() == ["time", "(ms)", "age", "function", "key"]
    assert row.split()[3:] == [RECORD.key.full_name, *str(RECORD.key).split()]


def test_a_damaged_entry_is_a_warning_and_left_out(run, folder):
    FileStore(knobs.cache_dir.get()).put(RECORD)
    run("remote", "push")
    (folder / NAME).write_bytes(b"{}")
    for action in ("list", "pull"):
        remote._cached_store.cache_clear()  # another process
        status, _, err = run("remote", action)
        assert status == 1
        assert f"entry {NAME} is not used: its first line has no time of expiry" in err
    assert run("remote", "push")[1].startswith("push: 1 of 1 record")


def test_status(run, folder, monkeypatch):
    status, out, _ = run("remote", "status")
    assert status == 0
    assert out.startswith(f"file://{folder}: 0 records, read, write and lease, not signed, ")
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_REMOTE_KEY", "horse")
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_REMOTE_READONLY", "1")
    assert ": 0 records, read-only, signed, " in run("remote", "status")[1]
    with pytest.raises(SystemExit):
        run("remote", "push")


def test_a_store_that_cannot_be_used_is_an_error_without_its_password(run, folder, monkeypatch):
    folder.touch()
    status, out, err = run("remote", "status")
    assert (status, out) == (2, "")
    assert f"remote store file://{folder}: NotADirectoryError" in err
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_REMOTE", "nothing://user:sesame@host/path")
    status, out, err = run("remote", "status")
    assert (status, out) == (2, "")
    assert "remote store nothing://***@host/path: ValueError: Protocol not known" in err
    assert "sesame" not in err


def test_env_hides_credentials(run, monkeypatch):
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_REMOTE", "redis://user:sesame@host/0")
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_REMOTE_KEY", "open://sesame")
    for options in ([], ["--json"]):
        out = run("env", *options)[1]
        assert "redis://***@host/0" in out
        assert "sesame" not in out


def test_without_a_url_the_command_is_a_usage_error(run, capsys):
    with pytest.raises(SystemExit):
        run("remote", "status")
    assert "set TRITON_DIST_AUTOTUNE_REMOTE to the URL of the store" in capsys.readouterr().err
