"""``triton-dist pack``, and what becomes of the file."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest

from tests.tuning.test_archives import contents
from triton_dist import knobs
from triton_dist._tuning.store.layout import with_checksum
from triton_dist.cli.main import main
from triton_dist.errors import TuningFrozen
from triton_dist.tune import autotune


def work(size: int, n: int) -> tuple[int, int]:
    return size, n


def prune(config: dict[str, int], size: int) -> bool:
    return config["n"] < 3


def tuned(version: str | None = "1", space: tuple[int, ...] = (1, 2, 3), **options):
    """As another process would have it."""
    return autotune([{"n": n} for n in space], lambda size: size, version=version, **options)(work)


@pytest.fixture
def shipped(tmp_path, monkeypatch) -> Path:
    """Where a pack is looked for."""
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_READONLY_DIRS", str(tmp_path / "shipped"))
    return tmp_path / "shipped" / "packs" / "work.cpu.json"


def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_DIST_CACHE_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_FROZEN", "1")


def test_there_and_back_again(run, shipped, tmp_path, monkeypatch, capsys):
    function = tuned()
    winners = {size: function.best_config(size) for size in (1, 2, 30)}
    status, out, err = run("pack", "work", "--out", str(shipped))
    assert (status, err) == (0, "")
    said = f"{shipped}: 3 records of {__name__}.work, version 1, on none (interpreter); 0 left out"
    assert out == f"{said}\n"
    tree = json.loads(shipped.read_text())
    assert [result["key"] for result in tree["groups"][0]["results"]] == [1, 2, 30]
    assert all(result["runners_up"] == 2 for result in tree["groups"][0]["results"])
    assert {"torch", "triton", "cuda"} <= tree["groups"][0]["tuned_with"].keys()

    elsewhere(tmp_path, monkeypatch)
    for size, winner in winners.items():
        edited = tuned(max_trials=2)  # something that a user's own record would not survive
        assert edited(size, autotune_verbose=True) == (size, winner["n"])
        assert edited.tuning_count == 0
        (line,) = capsys.readouterr().err.splitlines()
        assert f"using the shipped record for none (interpreter) from {shipped}: " in line
    with pytest.raises(TuningFrozen, match=r"key 4 on cpu.*: no record"):
        tuned()(4)
    with pytest.raises(TuningFrozen, match="version: that of the function was 1, is 2"):
        tuned("2")(1)
    assert not Path(os.environ["TRITON_DIST_CACHE_DIR"]).exists()


@pytest.mark.parametrize(
    ("version", "space", "prune_fn", "said"),
    [
        ("1", (3, 2, 1), None, "\n  used\n"),
        ("1", (3, 2, 1), prune, "\n  used, unless prune_fn drops the winner\n"),
        ("2", (1, 2, 3), None, "\n  not used: version: that of the function was 1, is 2\n"),
        (None, (1, 2, 3), None, "\n  not used: version: that of the function was 1, is not decla"),
        ("1", (9,), None, "\n  not used: config space: the winner {'n': "),
    ],
)
def test_explain(run, shipped, tmp_path, monkeypatch, version, space, prune_fn, said):
    tuned().tune(1)
    run("pack", "work", "--out", str(shipped))
    elsewhere(tmp_path, monkeypatch)
    monkeypatch.setitem(globals(), "live", tuned(version, space, prune_fn=prune_fn))
    status, out, err = run("explain", f"{__name__}:live")
    assert err == ""
    assert said in out
    assert status == (0 if "\n  used" in said else 1)
    assert f"  file    {shipped}\n" in out
    assert "; shipped as version 1\n" in out
    asked = run("explain", f"{__name__}:live", "--world-size", "4")[1]
    assert "not used: topology: world_size was 1, is 4" in asked


def test_the_latest_version_and_of_a_key_the_latest_record(run, tmp_path):
    for version, sizes in (("1", (1, 2, 3)), ("2", (1, 2))):
        for size in sizes:
            tuned(version).tune(size)
    out = tmp_path / "work.json"
    for path in knobs.cache_dir.get().rglob("*.json"):
        tree = json.loads(path.read_text())
        if tree["fingerprint"]["version"] == "2":
            tree["timestamp"] = "2999-01-01T00:00:00+00:00"
            path.write_text(with_checksum(tree))
    assert "2 records" in run("pack", f"{__name__}.work", "--out", str(out))[1]
    assert json.loads(out.read_text())["version"] == "2"
    # A record of the same key under another place, as after a change of the signature.
    files = knobs.cache_dir.get().rglob("*.json")
    (newest,) = (path for path in files if json.loads(path.read_text())["key"] == 2)
    older = json.loads(newest.read_text()) | {"timestamp": "2998-01-01T00:00:00+00:00"}
    newest.with_name(newest.name.partition("-")[0] + "-00000000.json").write_text(
        with_checksum(older)
    )
    assert "2 records" in run("pack", "work", "--out", str(out))[1]
    assert "2998" not in out.read_text()


def test_of_several_gpus_one_is_named(run, tmp_path):
    tuned().tune(1)
    (path,) = knobs.cache_dir.get().rglob("*.json")
    tree = json.loads(path.read_text())
    tree["fingerprint"]["hardware"]["gpu"] = "NVIDIA H200"
    tree["hardware_group"] = "cuda, NVIDIA H200, local_world_size 1, world_size 1"
    path.with_name("a-0.json").write_text(with_checksum(tree))
    out = str(tmp_path / "work.json")
    status, _, err = run("pack", "work", "--out", out)
    assert status == 2
    assert "models of GPU: NVIDIA H200, none (interpreter). Name one: --gpu" in err
    status, said, _ = run("pack", "work", "--gpu", "NVIDIA H200", "--out", out)
    assert status == 0
    assert "on NVIDIA H200; 1 left out" in said
    status, _, err = run("pack", "work", "--gpu", "NVIDIA B200", "--out", out)
    assert status == 2
    assert "models of GPU: NVIDIA H200, none (interpreter)." in err


def test_what_cannot_be_packed(run, tmp_path):
    out = tmp_path / "work.json"
    status, said, _ = run("pack", "work", "--out", str(out))
    assert (status, said) == (1, f"No record of work in {knobs.cache_dir.get()}.\n")
    assert run("pack", "work", "--cache", str(tmp_path / "none"), "--out", str(out))[0] == 1
    tuned(None).tune(1)
    status, _, err = run("pack", "work", "--out", str(out))
    assert status == 2
    assert "declares no version" in err
    assert not out.exists()
    with pytest.raises(SystemExit):
        main(["pack", "work"])


@pytest.mark.parametrize(
    "command",
    ["pack work --out {}", "export work --out {}", "packs merge {pack} --out {}"],
    ids=lambda command: command.split()[0],
)
def test_a_file_is_replaced_in_one_step_and_what_is_no_file_is_written_through(
    run, tmp_path, command
):
    tuned().tune(1)
    (tmp_path / "in.tdpack").write_bytes(contents(1).to_bytes())
    target, link, pipe = (tmp_path / name for name in ("work.target", "work.link", "work.pipe"))

    def to(path: Path) -> int:
        return run(*command.format(path, pack=tmp_path / "in.tdpack").split())[0]

    target.write_bytes(b"old")
    target.chmod(0o640)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # as a full disk
    try:
        assert to(target) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert target.read_bytes() == b"old"
    link.symlink_to(target)
    assert to(link) == 0
    assert link.is_symlink()
    assert len(target.read_bytes()) > 100
    assert target.stat().st_mode & 0o777 == 0o640
    assert not list(tmp_path.glob(".*"))
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert to(pipe) == 0
    assert os.read(reader, 1 << 16) == target.read_bytes()
    assert pipe.is_fifo()
    os.close(reader)
    assert to(tmp_path) == 2


@pytest.mark.parametrize("command", ["pack --kernels", "profile"])
def test_that_the_output_cannot_be_written_is_said_before_the_command_runs(run, tmp_path, command):
    (tmp_path / "file").touch()
    out = str(tmp_path / "file" / "out.tdpack")
    status, _, err = run(*command.split(), "--out", out, "--", "touch", str(tmp_path / "ran"))
    assert status == 2
    assert str(tmp_path / "file") in err
    assert not (tmp_path / "ran").exists()


def test_a_name_under_which_it_is_not_found_is_said(run, tmp_path):
    tuned().tune(1)
    for name, hints in (("work.json", 0), ("my_work.json", 1)):
        out = run("pack", "work", "--out", str(tmp_path / name))[1]
        assert out.count("a name that begins with work.") == hints
