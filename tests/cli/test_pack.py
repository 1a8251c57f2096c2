"""``triton-dist pack``, and how its files are used."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest

from tests.tuning.test_packs import MM, STUB, contents, kernel, one
from triton_dist import _archive, knobs
from triton_dist._archive import Pack, PackContents
from triton_dist._tuning.store.layout import with_checksum
from triton_dist._tuning.store.packs import pack_contents, records_of
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


@pytest.fixture(params=["work.tdpack", "work.json"])
def shipped(request, tmp_path, monkeypatch) -> Path:
    """Where a pack, or a single file of records, is looked for."""
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_READONLY_DIRS", str(tmp_path / "shipped"))
    return tmp_path / "shipped" / "packs" / request.param


def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_DIST_CACHE_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_FROZEN", "1")


def test_there_and_back_again(run, shipped, tmp_path, monkeypatch, capsys):
    function = tuned()
    winners = {size: function.best_config(size) for size in (1, 2, 30)}
    status, out, err = run("pack", "work", "--out", str(shipped))
    assert (status, err) == (0, "")
    counts, functions = out.splitlines()
    assert counts.startswith(f"{shipped}: 3 records, 0 kernels, ")
    assert functions == f"  3 records of {__name__}.work, version 1, on none (interpreter)"
    packed = Pack(shipped)
    (tree,) = [json.loads(packed.read_records(name)) for name in packed.records]
    assert [result["key"] for result in tree["groups"][0]["results"]] == [1, 2, 30]
    assert all(result["runners_up"] == 2 for result in tree["groups"][0]["results"])
    assert {"torch", "triton", "cuda"} <= tree["groups"][0]["tuned_with"].keys()

    elsewhere(tmp_path, monkeypatch)
    for size, winner in winners.items():
        edited = tuned(max_trials=2)  # something that a user's own record would not survive
        assert edited(size, autotune_verbose=True) == (size, winner["n"])
        assert edited.num_tunings == 0
        (line,) = capsys.readouterr().err.splitlines()
        assert f"using the shipped record for none (interpreter) from {shipped}: " in line
    with pytest.raises(TuningFrozen, match=r"key 4 on cpu.*: no record"):
        tuned()(4)
    with pytest.raises(TuningFrozen, match="version: the version of the function was 1, is 2"):
        tuned("2")(1)
    assert not Path(os.environ["TRITON_DIST_CACHE_DIR"]).exists()


def test_explain(run, shipped, tmp_path, monkeypatch):
    tuned().tune(1)
    run("pack", "work", "--out", str(shipped))
    elsewhere(tmp_path, monkeypatch)
    for version, space, prune_fn, said in (
        ("1", (3, 2, 1), prune, "used, unless prune_fn drops the winner\n"),
        ("2", (1, 2, 3), None, "not used: version: the version of the function was 1, is 2\n"),
        (None, (1, 2, 3), None, "not used: version: the version of the function was 1, is not de"),
        ("1", (9,), None, "not used: config space: the winner {'n': "),
        ("1", (3, 2, 1), None, "used\n"),
    )[0 if shipped.suffix == ".tdpack" else 3 :]:
        monkeypatch.setitem(globals(), "live", tuned(version, space, prune_fn=prune_fn))
        status, out, err = run("explain", f"{__name__}:live")
        assert err == ""
        assert f"\n  {said}" in out
        assert status == (0 if said.startswith("used") else 1)
        assert f"  file    {shipped}\n" in out
        assert "; shipped as version 1\n" in out
    asked = run("explain", f"{__name__}:live", "--world-size", "4")[1]
    assert "not used: topology: world_size was 1, is 4" in asked


def test_the_latest_version_and_of_a_key_the_latest_record(run, tmp_path):
    for version, sizes in (("1", (1, 2, 3)), ("2", (1, 2))):
        for size in sizes:
            tuned(version).tune(size)
    out = tmp_path / "work.tdpack"
    for path in knobs.cache_dir.get().rglob("*.json"):
        tree = json.loads(path.read_text())
        if tree["fingerprint"]["version"] == "2":
            tree["timestamp"] = "2999-01-01T00:00:00+00:00"
            path.write_text(with_checksum(tree))
    assert "2 records" in run("pack", f"{__name__}.work", "--out", str(out))[1]
    assert {record.fingerprint.version for record in records_of(Pack(out))} == {"2"}
    # A record of the same key under another place, as after a change of the signature.
    files = knobs.cache_dir.get().rglob("*.json")
    (newest,) = (path for path in files if json.loads(path.read_text())["key"] == 2)
    older = json.loads(newest.read_text()) | {"timestamp": "2998-01-01T00:00:00+00:00"}
    newest.with_name(newest.name.partition("-")[0] + "-00000000.json").write_text(
        with_checksum(older)
    )
    assert "2 records" in run("pack", "work", "--out", str(out))[1]
    assert {record.timestamp for record in records_of(Pack(out))} == {"2999-01-01"}


def test_records_of_several_gpus_are_packed(run, tmp_path):
    tuned().tune(1)
    (path,) = knobs.cache_dir.get().rglob("*.json")
    tree = json.loads(path.read_text())
    tree["fingerprint"]["hardware"]["gpu"] = "NVIDIA H200"
    tree["hardware_group"] = "cuda, NVIDIA H200, local_world_size 1, world_size 1"
    path.with_name("a-0.json").write_text(with_checksum(tree))
    _, said, _ = run("pack", "work", "--out", str(tmp_path / "work.tdpack"))
    assert said.splitlines()[1:] == [
        f"  1 record of {__name__}.work, version 1, on {gpu}"
        for gpu in ("NVIDIA H200", "none (interpreter)")
    ]


def test_what_cannot_be_packed(run, tmp_path):
    out = tmp_path / "work.tdpack"
    status, said, _ = run("pack", "work", "--out", str(out))
    assert (status, said) == (1, f"No record of work in {knobs.cache_dir.get()}.\n")
    assert run("pack", "work", "--cache", str(tmp_path / "none"), "--out", str(out))[0] == 1
    tuned(None).tune(1)
    status, _, err = run("pack", "work", "--out", str(out))
    assert status == 2
    assert "declares no version" in err
    assert not out.exists()


@pytest.mark.parametrize(
    "command", ["pack work --out {}", "export work --out {}", "pack merge {pack} --out {}"]
)
def test_a_file_is_replaced_in_one_step_and_what_is_no_file_is_written_through(
    run, tmp_path, command
):
    tuned().tune(1)
    (tmp_path / "in.tdpack").write_bytes(contents(1).to_bytes())
    target, link, pipe = (tmp_path / f"{name}.tdpack" for name in ("target", "link", "pipe"))

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
    folder = tmp_path / "folder.tdpack"
    folder.mkdir()
    assert to(folder) == 2


@pytest.mark.parametrize("command", ["pack --kernels", "profile"])
def test_that_the_output_cannot_be_written_is_said_before_the_command_runs(run, tmp_path, command):
    (tmp_path / "file").touch()
    out = str(tmp_path / "file" / "out.tdpack")
    status, _, err = run(*command.split(), "--out", out, "--", "touch", str(tmp_path / "ran"))
    assert status == 2
    assert str(tmp_path / "file") in err
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def model(tmp_path) -> Path:
    """One kernel, one native module, two records."""
    path = tmp_path / "model.tdpack"
    path.write_bytes(contents(1, 5).to_bytes())
    return path


def test_kernels_are_those_that_the_command_loads(run, model, tmp_path):
    tuned()(1)
    out = tmp_path / "shipped" / "work.tdpack"
    script = f'test $TRITON_DIST_AUTOTUNE_FROZEN = 1 && cp {model} "$TRITON_DIST_RECORD_KERNELS"'
    command = ["--", "sh", "-c", script]
    status, said, _ = run("pack", "work", "--kernels", "--out", str(out), *command)
    assert status == 0
    assert f"{out}: 3 records, 1 kernel, 1 native module, " in said
    assert "  1 record of tests.cli.test_pack.work, version 1, on none (interpreter)\n" in said
    assert Pack(out).kernels.keys() == {MM, STUB}
    assert len(Pack(out).records) == 2  # those of the part too
    status, said, _ = run("packs", "--kernels", "--out", str(tmp_path / "only.tdpack"), *command)
    assert status == 0
    assert "only.tdpack: 2 records, 1 kernel, 1 native module, " in said


def test_a_command_that_fails_writes_nothing(run, tmp_path):
    out = tmp_path / "work.tdpack"
    status, said, _ = run("pack", "--kernels", "--out", str(out), "--", "sh", "-c", "exit 7")
    assert (status, said) == (1, f"The command exited with status 7: {out} is not written.\n")
    assert not out.exists()
    status, _, err = run("pack", "--kernels", "--out", str(out), "--", "no-such-program")
    assert status == 2
    assert "no-such-program" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("pack work --kernels --out f.tdpack", "--kernels --out FILE -- COMMAND"),
        ("pack work --out f.tdpack -- true", "--kernels --out FILE -- COMMAND"),
        ("pack verify a --kernels -- true", "--kernels --out FILE -- COMMAND"),
        ("pack --out f.tdpack", "expected a FUNCTION"),
        ("pack work", "--out FILE is required"),
        ("pack work --out work.zip", "expected a name that ends in .tdpack"),
        ("pack merge a b", "--out FILE is required"),
        ("pack show a --out b.tdpack", "--out FILE is required to create or merge packs, and not"),
        ("pack show", "expected a pack"),
        ("pack diff a", "diff takes two packs"),
    ],
)
def test_what_is_asked_for_wrongly(arguments, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments.split())
    assert said in capsys.readouterr().err


def test_show(run, model):
    status, said, _ = run("pack", "show", str(model))
    assert status == 0
    assert said.splitlines() == [
        f"{model}: 2 records, 1 kernel, 1 native module",
        "  2 records of ops.run, version 7, on fake",
        f"  {STUB[:12]}  launcher  (cpython-311)",
        f"  {MM[:12]}  mm  (cuda 90)",
    ]
    (facts,) = json.loads(run("pack", "show", "--json", str(model))[1])
    assert [record["key"] for record in facts["records"]] == ["1", "5"]
    assert facts["kernels"][MM]["facts"]["option num_warps"] == "4"


def test_diff(run, model, tmp_path):
    assert run("pack", "diff", str(model), str(model)) == (0, "no difference\n", "")
    other = tmp_path / "other.tdpack"
    slow = one()
    slow.cost = lambda _, config: 4 - config["n"]  # there 3 is best
    records = pack_contents([slow.tuned.tune(1), slow.tuned.tune(9)]).records
    changed = PackContents(records, {MM: kernel(cubin=kernel().files["mm.cubin"] + b"!")})
    other.write_bytes(changed.to_bytes())
    status, said, _ = run("pack", "diff", str(model), str(other))
    assert status == 1
    assert said.splitlines() == [
        "! ops.run 7 fake 1: {'n': 1} 1 ms -> {'n': 3} 1 ms",
        "- ops.run 7 fake 5: {'n': 1} 1 ms",
        "+ ops.run 7 fake 9: {'n': 3} 1 ms",
        f"- kernel launcher {STUB[:12]}",
        f"! kernel mm {MM[:12]}: different bytes under the same digest",
    ]


def test_merge_verify_and_import(run, model, tmp_path):
    other, out = tmp_path / "other.tdpack", tmp_path / "both.tdpack"
    other.write_bytes(contents(9).to_bytes())
    status, said, _ = run("pack", "merge", str(model), str(other), "--out", str(out))
    assert status == 0
    assert said.startswith(f"{out}: 3 records, 1 kernel, 1 native module, ")
    whole = out.read_bytes()

    status, said, _ = run("pack", "import", str(out))
    there = Path(os.environ["TRITON_DIST_CACHE_DIR"]) / "packs" / "both.tdpack"
    assert (status, there.read_bytes()) == (0, whole)
    assert str(there) in said
    assert [packed.path for packed in _archive.packs_in(_archive.pack_locations())] == [there]

    one, two = tmp_path / "1" / "x.tdpack", tmp_path / "2" / "x.tdpack"
    for path, data in ((one, whole), (two, other.read_bytes())):
        path.parent.mkdir()
        path.write_bytes(data)
    assert run("pack", "import", str(one), str(two), str(one))[0] == 0
    kept = {path.read_bytes() for path in there.parent.glob("x*.tdpack")}
    assert kept == {whole, other.read_bytes()}

    other.write_bytes(whole[:-9])
    status, said, _ = run("pack", "verify", str(out), str(other))
    assert status == 1
    good, refused = said.splitlines()
    assert good == f"{out}: good: 3 records, 1 kernel, 1 native module"
    assert refused.startswith(f"pack {other} is refused: it is not a zip")
    assert run("pack", "import", str(other))[0] == 2
    assert run("pack", "show", str(tmp_path / "none.tdpack"))[0] == 2
