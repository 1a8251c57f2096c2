"""Records of runs under other settings, such as one with debugging on, lie beside one another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from triton_dist import knobs
from triton_dist._archive import Pack
from triton_dist._tuning.store.packs import records_of
from triton_dist._tuning.values import SCHEMA, codec
from triton_dist.cli import validator
from triton_dist.cli.main import main
from triton_dist.tune import AutoTuner, autotune

BLOCKING = "CUDA_LAUNCH_BLOCKING"
trials: list[int] = []


@autotune([{"n": 1}, {"n": 2}], key_fn=lambda size: size, version="1")
def settled(size, n):
    trials.append(n)
    return size * n


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(BLOCKING, raising=False)
    settled.clear()
    yield
    settled.clear()


def in_a_new_process(tuned: AutoTuner = settled) -> int:
    """Runs of a first call there: one where a record is used."""
    tuned.clear()
    trials.clear()
    tuned(1)
    return len(trials)


def files() -> list[Path]:
    return sorted(knobs.cache_dir.get().rglob("*.json"))


def settings_of(path: Path) -> str:
    return str(json.loads(path.read_text())["fingerprint"]["software"].get("settings", ""))


def test_a_debugging_run_replaces_no_record_of_another(monkeypatch):
    assert in_a_new_process() > 1
    (own,) = files()
    kept = own.read_text()
    monkeypatch.setenv(BLOCKING, "1")
    assert in_a_new_process() > 1
    assert in_a_new_process() == 1
    assert len(files()) == 2
    assert own.read_text() == kept
    monkeypatch.delenv(BLOCKING)
    assert in_a_new_process() == 1


def test_the_file_of_a_run_without_settings_is_named_as_before(monkeypatch):
    # What triton_dist sets itself, and Triton from 3.7 on tells.
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    in_a_new_process()
    (own,) = files()
    tree = json.loads(own.read_text())
    place = codec.digest(SCHEMA, tree["module"], "(size, n) tunes n")[:8]
    assert own.stem.partition("-")[2] == place
    assert tree["signature"] == "(size, n) tunes n"


def test_a_record_that_an_earlier_version_kept_in_the_one_place_is_found(monkeypatch):
    in_a_new_process()
    (place,) = files()
    place.unlink()
    monkeypatch.setenv(BLOCKING, "1")
    in_a_new_process()
    (own,) = files()
    own.rename(place)
    assert in_a_new_process() == 1


def test_paths_leave_no_file_at_each_start(monkeypatch, tmp_path):
    for number in range(3):
        monkeypatch.setenv("TRITON_PTXAS_PATH", str(tmp_path / f"{number}"))
        assert in_a_new_process() > 1
    (one,) = files()
    assert settings_of(one) == f"TRITON_PTXAS_PATH={tmp_path / '2'}"
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    assert in_a_new_process() > 1
    assert len(files()) == 2


def test_a_relative_folder_is_that_of_its_first_read(monkeypatch, tmp_path):
    relative = {
        "TRITON_DIST_CACHE_DIR": lambda: knobs.cache_dir.get(),
        "TRITON_DIST_AUTOTUNE_READONLY_DIRS": lambda: knobs.autotune_readonly_dirs.get()[0],
        "TRITON_DIST_AUTOTUNE_LOG_DIR": lambda: knobs.autotune_log_dir.get(),
        "TRITON_DIST_TOOLCHAINS": lambda: knobs.toolchains.get()[0][1],
    }
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable, folder in relative.items():
        name, at_home = f"folder of {variable}", f"~/{variable}"
        monkeypatch.chdir(tmp_path)
        prefix = "old=" if "TOOLCHAINS" in variable else ""
        monkeypatch.setenv(variable, prefix + name)
        assert folder() == tmp_path / name
        monkeypatch.chdir("/")
        assert folder() == tmp_path / name
        monkeypatch.setenv(variable, prefix + at_home)
        assert folder() == tmp_path / variable
    monkeypatch.delenv("TRITON_DIST_CACHE_DIR")
    assert knobs.cache_dir.get() == tmp_path / ".triton_dist"


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The files of a run, under "", and of one that blocks at each launch."""
    monkeypatch.setattr(validator, "OWN_PACKAGES", {"tests"})  # imported in this process
    in_a_new_process()
    monkeypatch.setenv(BLOCKING, "1")
    in_a_new_process()
    monkeypatch.delenv(BLOCKING)
    return {settings_of(path): path for path in files()}


UNDER = f", under {BLOCKING}=1\n"
NAME = f"{__name__}:settled"


def said(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    capsys.readouterr()
    main(command)
    return capsys.readouterr().out


@pytest.mark.parametrize("subcommand", ["list", "show", "explain"])
def test_commands_say_which_record_is_of_which_run(both, capsys, subcommand):
    shown = said(capsys, subcommand, NAME if subcommand == "explain" else "settled")
    assert shown.count(UNDER) == 1
    assert all(str(path) in shown for path in both.values())
    tree = json.loads(
        said(capsys, subcommand, NAME if subcommand == "explain" else "settled", "--json")
    )
    assert {each["settings"]: each["file"] for each in tree["records"]} == {
        name: str(path) for name, path in both.items()
    }


def test_explain_says_that_the_settings_differ(both, capsys, monkeypatch):
    reason = f"  not used: settings: they were {BLOCKING}=1, are none\n"
    shown = said(capsys, "explain", NAME)
    assert reason in shown
    assert "2 records of settled, 1 used" in shown
    monkeypatch.setenv(BLOCKING, "1")
    shown = said(capsys, "explain", NAME)
    assert f"  not used: settings: they were none, are {BLOCKING}=1\n" in shown


def test_one_of_them_is_named_by_its_settings(both, capsys):
    shown = said(capsys, "show", "settled", "--on", BLOCKING)
    assert str(both[f"{BLOCKING}=1"]) in shown
    assert str(both[""]) not in shown
    hardware = json.loads(both[""].read_text())["hardware_group"]
    shown = said(capsys, "show", "settled", "--on", hardware)
    assert str(both[""]) in shown
    assert str(both[f"{BLOCKING}=1"]) not in shown


def test_clear_says_which_is_which_and_takes_none_for_stale(both, capsys):
    assert "removed 0 records" in said(capsys, "clear", "settled", "--stale")
    shown = said(capsys, "clear", "settled")
    assert f"{both['']}\n" in shown
    assert f"{both[f'{BLOCKING}=1']}, tuned under {BLOCKING}=1\n" in shown
    assert not files()


def test_a_pack_takes_the_record_of_a_run_without_settings(both, capsys, tmp_path):
    out = tmp_path / "settled.tdpack"
    assert "1 record of" in said(capsys, "pack", "settled", "--out", str(out))
    (record,) = records_of(Pack(out))
    assert "settings" not in record.fingerprint.software
    both[""].unlink()
    assert "1 record of" in said(capsys, "pack", "settled", "--out", str(out))
    (record,) = records_of(Pack(out))
    assert record.fingerprint.software["settings"] == f"{BLOCKING}=1"
