"""``triton-dist pack --kernels`` and ``triton-dist packs``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.cli.test_pack import tuned
from tests.tuning.test_archives import MM, STUB, contents, kernel
from tests.tuning.test_packs import one
from triton_dist import _archive
from triton_dist._archive import Contents, Pack
from triton_dist._tuning.store.archive import contents_of
from triton_dist.cli.main import main


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
    assert f"{out}: 1 record of tests.cli.test_pack.work" in said
    assert f"{out}: 1 kernel, 1 native module, " in said
    assert Pack(out).kernels.keys() == {MM, STUB}
    assert len(Pack(out).records) == 2  # those of the part too
    status, said, _ = run("pack", "--kernels", "--out", str(tmp_path / "only.zip"), *command)
    assert status == 0
    assert "a name that ends with .tdpack" in said


def test_a_command_that_fails_writes_nothing(run, tmp_path):
    out = tmp_path / "work.tdpack"
    status, said, _ = run("pack", "--kernels", "--out", str(out), "--", "sh", "-c", "exit 7")
    assert (status, said) == (1, f"The command ended with status 7: {out} is not written.\n")
    assert not out.exists()
    status, _, err = run("pack", "--kernels", "--out", str(out), "--", "no-such-program")
    assert status == 2
    assert "no-such-program" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("pack work --kernels --out f", "--kernels --out FILE -- COMMAND"),
        ("pack work --out f -- true", "--kernels --out FILE -- COMMAND"),
        ("pack --out f", "one FUNCTION is needed"),
        ("packs merge a b", "merge, and nothing else, takes --out"),
        ("packs show a --out b", "merge, and nothing else, takes --out"),
        ("packs diff a", "diff takes two files"),
    ],
)
def test_what_is_asked_for_wrongly(arguments, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments.split())
    assert said in capsys.readouterr().err


def test_show(run, model):
    status, said, _ = run("packs", "show", str(model))
    assert status == 0
    assert said.splitlines() == [
        f"{model}: 2 records, 1 kernel, 1 native module",
        "  2 records of ops.run, version 7, on fake",
        f"  {STUB[:12]}  launcher  (cpython-311)",
        f"  {MM[:12]}  mm  (cuda 90)",
    ]
    (facts,) = json.loads(run("packs", "show", "--json", str(model))[1])
    assert [record["key"] for record in facts["records"]] == ["1", "5"]
    assert facts["kernels"][MM]["facts"]["option num_warps"] == "4"


def test_diff(run, model, tmp_path):
    assert run("packs", "diff", str(model), str(model)) == (0, "no difference\n", "")
    other = tmp_path / "other.tdpack"
    slow = one()
    slow.cost = lambda _, config: 4 - config["n"]  # there 3 is best
    records = contents_of([slow.tuned.tune(1), slow.tuned.tune(9)]).records
    changed = Contents(records, {MM: kernel(cubin=kernel().files["mm.cubin"] + b"!")})
    other.write_bytes(changed.to_bytes())
    status, said, _ = run("packs", "diff", str(model), str(other))
    assert status == 1
    assert said.splitlines() == [
        "! ops.run 7 fake 1: {'n': 1} 1 ms -> {'n': 3} 1 ms",
        "- ops.run 7 fake 5: {'n': 1} 1 ms",
        "+ ops.run 7 fake 9: {'n': 3} 1 ms",
        f"- kernel launcher {STUB[:12]}",
        f"! kernel mm {MM[:12]}: other bytes under the same digest",
    ]


def test_merge_verify_and_import(run, model, tmp_path):
    other, out = tmp_path / "other.tdpack", tmp_path / "both.tdpack"
    other.write_bytes(contents(9).to_bytes())
    status, said, _ = run("packs", "merge", str(model), str(other), "--out", str(out))
    assert status == 0
    assert said.startswith(f"{out}: 3 records, 1 kernel, 1 native module, ")
    whole = out.read_bytes()
    run("packs", "merge", str(other), str(model), "--out", str(out))
    assert out.read_bytes() == whole

    status, said, _ = run("packs", "import", str(out))
    there = Path(os.environ["TRITON_DIST_CACHE_DIR"]) / "packs" / "both.tdpack"
    assert (status, there.read_bytes()) == (0, whole)
    assert str(there) in said
    assert [packed.path for packed in _archive.packs_in(_archive.pack_places())] == [there]

    one, two = tmp_path / "1" / "x.tdpack", tmp_path / "2" / "x.tdpack"
    for path, data in ((one, whole), (two, other.read_bytes())):
        path.parent.mkdir()
        path.write_bytes(data)
    assert run("packs", "import", str(one), str(two), str(one))[0] == 0
    kept = {path.read_bytes() for path in there.parent.glob("x*.tdpack")}
    assert kept == {whole, other.read_bytes()}

    other.write_bytes(whole[:-9])
    status, said, _ = run("packs", "verify", str(out), str(other))
    assert status == 1
    good, refused = said.splitlines()
    assert good == f"{out}: good: 3 records, 1 kernel, 1 native module"
    assert refused.startswith(f"pack {other} is refused: it is no zip")
    assert run("packs", "import", str(other))[0] == 2
    assert run("packs", "show", str(tmp_path / "none.tdpack"))[0] == 2
