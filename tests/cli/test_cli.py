"""``triton-dist``: verbs, exit statuses and what is said to whom."""

from __future__ import annotations

import datetime
import importlib
import io
import json
import linecache
import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton

import triton_dist
from tests.architecture.source import ROOT
from tests.commands import python
from tests.docs.run_blocks import run_program
from tests.tuning import ops
from triton_dist._tuning.store import packs
from triton_dist._tuning.store.layout import with_checksum
from triton_dist.cli import text, validator
from triton_dist.cli.main import SUBCOMMANDS, full_parser, main
from triton_dist.errors import NoSuchFunction, TuningWarning
from triton_dist.tune import autotune

A, B = torch.ones(2, 3), torch.ones(3, 4)
OPS = "tests.tuning.ops"


@pytest.fixture(autouse=True)
def _fresh():
    ops.matmul.clear()
    ops.Layer.forward.clear()
    yield
    ops.matmul.clear()
    ops.Layer.forward.clear()


def cache() -> Path:
    return Path(os.environ["TRITON_DIST_CACHE_DIR"])


def test_only_records_of_functions_with_the_name_are_read(run, package_records, monkeypatch):
    parsed, parse = [], packs._parsed
    monkeypatch.setattr(packs, "_parsed", lambda *file: parsed.append(file[1]) or parse(*file))
    for name in ("all_gather", "triton_dist.kernels.nvidia.shard_collectives.all_gather"):
        parsed.clear()
        assert run("show", name, "--top", "1")[0] == 0
        assert {each.partition(".")[0] for each in parsed} == {"all_gather"}


def test_no_file_is_run_unless_asked_and_two_of_one_name_are_two_modules(
    run, spawn_ranks, tmp_path, monkeypatch
):
    ran = tmp_path / "ran"
    scripts = [tmp_path / folder / "plain.py" for folder in "ab"]
    for script in scripts:
        script.parent.mkdir()
        script.write_text(
            "import os\nfrom triton_dist.tune import autotune\n\n"
            f"with open({str(ran)!r}, 'a') as file:\n    print(__file__, os.getpid(), file=file)\n"
            "@autotune([{'n': 1}, {'n': 2}], key_fn=lambda x: x)\n"
            f"def work(x, n):\n    return '{script.parent.name}', x\n\n"
            "work(3)\nos.environ['TRITON_DIST_AUTOTUNE_FROZEN'] = '1'\n"
        )
        spawn_ranks(1, run_program, str(script), init=False)
    ran.unlink()
    files = {path: path.read_bytes() for path in cache().rglob("*") if path.is_file()}
    for command in ("list", "show work", "status", "explain work", "explain plain:work",
                    "clear --all --stale",
                    "clear --all --import --dry-run"):  # fmt: skip
        shown = run(*command.split())[1]
    assert "would remove 2 records" in shown
    monkeypatch.chdir(tmp_path)
    assert f"{scripts[0]}.work, key 3\n" in run("explain", "work", "--module", "a/plain.py")[1]
    assert not ran.exists()
    assert {path: path.read_bytes() for path in cache().rglob("*") if path.is_file()} == files

    scripts[1].write_text(scripts[1].read_text().replace("'b', x", "'b', x, n"))
    status, shown, _ = run("clear", "--all", "--stale", "--json")
    removed = [each["file"] for each in json.loads(shown)["removed"]]
    (record,) = [file for file in removed if file.endswith(".json")]
    assert json.loads(files[Path(record)])["module"] == str(scripts[1])
    assert [each["why"][:34] for each in json.loads(shown)["left_alone"]] == [
        "not compared: its code is the same"
    ]
    assert not ran.exists()
    shown = run("clear", "--all", "--stale", "--import", "--json")[1]
    assert json.loads(shown)["removed"] == json.loads(shown)["left_alone"] == []
    ((file, pid),) = [line.rsplit(" ", 1) for line in ran.read_text().splitlines()]
    assert file == str(scripts[0])
    assert pid != str(os.getpid())

    monkeypatch.setattr(validator, "IMPORT_SECONDS", 0.1)
    status, _, err = run("explain", "work", "--module", str(scripts[0]), "--import")
    assert status == 2
    assert f"{scripts[0]}: its process did not end within" in err


def test_a_module_that_calls_what_it_tunes_tunes_nothing_for_a_command(run, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(validator, "OWN_PACKAGES", {"calling_script"})
    script = tmp_path / "calling_script.py"
    script.write_text(
        "from triton_dist.tune import autotune\n\n"
        "@autotune([{'n': 1}, {'n': 2}], key_fn=lambda x: x, scope='rank')\n"
        "def scale(x, n):\n    return x * n\n\n"
        "scale(3)\n"
    )
    importlib.import_module("calling_script")
    (file,) = cache().rglob("*.json")
    before = file.read_text()
    script.write_text(script.read_text().replace("x * n", "x / n + 0"))
    monkeypatch.delitem(sys.modules, "calling_script")
    linecache.clearcache()
    assert "would remove 1 record" in run("clear", "--all", "--stale", "--dry-run")[1]
    assert [*cache().rglob("*.json")] == [file]
    assert file.read_text() == before
    assert "TRITON_DIST_AUTOTUNE" not in os.environ


def test_explain_says_key_winner_date_file_and_that_it_is_used(run):
    record = ops.matmul.tune(A, B)
    status, out, err = run("explain", f"{OPS}:matmul")
    assert (status, err) == (0, "")
    (file,) = cache().rglob("*.json")
    for part in (str(record.key), str(record.best), record.timestamp, str(file), "  used\n"):
        assert part in out
    assert run("explain", "matmul", "--module", OPS)[1] == out
    assert run("explain", f"{OPS}.matmul")[1] == out


def test_without_import_versions_and_files_are_compared(run, monkeypatch):
    monkeypatch.setattr(validator, "OWN_PACKAGES", {"triton_dist"})
    ops.matmul(A, B)
    for name in ("matmul", f"{OPS}:matmul"):
        status, out, _ = run("explain", name)
        assert status == 0
        assert (
            "  not compared: its code is the same; its config space is compared with --import"
            in out
        )
        assert "1 record of matmul, 0 used, 1 not compared." in out
        assert "world_size was 1, is 8" in run("explain", name, "--world-size", "8")[1]
    monkeypatch.setattr(triton, "__version__", "2.0.0")
    assert "removed 1 record" in run("clear", "--all", "--stale")[1]


def test_without_a_record_the_status_is_1_and_says_where_was_looked(run, package_records):
    for name in ("matmul", f"{OPS}:matmul"):
        status, out, _ = run("explain", name)
        assert status == 1
        assert f"No record of matmul in {cache()}." in out


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no.such.module:matmul", "cannot be imported: ModuleNotFoundError"),
        (f"{OPS}:absent", "'tests.tuning.ops' has no 'absent'"),
        (f"{OPS}:Layer.absent", "'Layer' has no 'absent'"),
        (f"{OPS}:key_fn", "it is an object of <class 'function'>, not a tuned function"),
    ],
)
def test_a_mistake_has_status_2_and_is_said_on_standard_error(run, monkeypatch, name, said):
    monkeypatch.setattr(validator, "OWN_PACKAGES", {"tests", "no"})
    ops.matmul(A, B)
    status, out, err = run("explain", name, "--import")
    assert (status, out) == (2, "")
    assert said in err


def test_a_module_that_fails_when_it_is_imported_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    for body, said in (
        ("1 / 0", "ZeroDivisionError"), ("import sys; sys.exit(0)", "SystemExit: 0"),
    ):  # fmt: skip
        (tmp_path / "broken_ops.py").write_text(f"{body}\n")
        with pytest.raises(NoSuchFunction, match=said):
            validator.load_module(str(tmp_path / "broken_ops.py"))


def test_what_the_locale_cannot_write_is_escaped(run, tmp_path, monkeypatch):
    plain = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stderr", plain)
    assert main(["show", "größe.json"]) == 2
    assert b"gr\\xf6\\xdfe" in plain.buffer.getvalue()


def test_a_closed_output_is_said(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["list"]) == 2
    assert capsys.readouterr().err == "triton-dist: standard output is closed\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "required: SUBCOMMAND"),
        ("dance", "invalid choice: 'dance'"),
        ("explain", "required: FUNCTION"),
        ("clear", "required"),
        ("clear f --all", "not allowed"),
        ("explain f --world-size -3", "--world-size: '-3': expected an integer, 1 or more"),
        ("replay f --seeds 0", "--seeds: '0': expected an integer, 1 or more"),
        ("replay f --tries ten", "--tries: 'ten': expected an integer, 1 or more"),
        ("compare f --cache /not/there", "--cache: '/not/there': no such folder"),
        ("debug interp", "a command is needed: debug MODE -- COMMAND"),
        ("debug attach", "attach needs a RANK: debug attach RANK"),
        ("profile show a.json b", "unexpected 'b': write -- before the program to run"),
        ("list -- python a.py", "list takes no program after --"),
    ],
)
def test_a_command_that_is_none_has_status_2_and_an_example(capsys, line, said):
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    message, _, example = capsys.readouterr().err.partition(" error: ")[2].partition("\n")
    assert said in message
    subcommand = line.partition(" ")[0]
    known = subcommand in ("explain", "clear", "replay", "compare", "debug", "profile")
    assert (f"\n  triton-dist {subcommand} " if known else ": triton-dist list\n") in example


def test_explain_uses_what_a_tuner_would_from_read_only_folders(run, monkeypatch, tmp_path):
    ops.matmul(A, B)
    shipped = tmp_path / "shipped"
    cache().rename(shipped)
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_READONLY_DIRS", f"{tmp_path / 'none'}:{shipped}")
    status, out, _ = run("explain", f"{OPS}:matmul")
    assert status == 0
    assert str(shipped) in out
    ops.matmul.clear()
    before = ops.matmul.num_tunings
    ops.matmul(A, B)
    assert ops.matmul.num_tunings == before
    assert not cache().exists()

    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_ALWAYS_TUNE", "1")
    ops.matmul.clear()
    ops.matmul(A, B)
    (own,) = cache().rglob("*.json")
    status, out, _ = run("explain", f"{OPS}:matmul")
    assert f"not used: another record of this key is found first and is used: {own}" in out
    assert "2 records of matmul, 1 used" in out
    assert "TRITON_DIST_AUTOTUNE_ALWAYS_TUNE is set" in out


def test_a_damaged_file_is_a_warning_without_a_line_of_code(run):
    ops.matmul(A, B)
    (file,) = cache().rglob("*.json")
    file.write_text("{")
    status, _, err = run("list")
    assert status == 0
    assert err.startswith(f"triton-dist: tuning record {file} is not used: it is damaged (")
    assert err.endswith(". Delete it or replace it\n")
    assert file.read_text() == "{"
    status, _, err = run("show", str(file))
    assert status == 2
    assert err.startswith(
        f"triton-dist: {file}: the file is not a tuning record, or it is damaged: "
    )
    assert "Delete a damaged record: its key is tuned again at the next call. " in err


@pytest.mark.parametrize(
    "words",
    ["list", "show work", "status", "clear --all", "explain work", "pack work --out x.tdpack"],
)
def test_a_cache_folder_that_is_a_file_is_a_mistake(run, monkeypatch, tmp_path, words):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("TRITON_DIST_CACHE_DIR", str(file))
    status, _, err = run(*words.split())
    assert status == 2
    said = f"TRITON_DIST_CACHE_DIR='{file}', expected a folder, and it is a file\n"
    assert err == f"triton-dist: environment variable {said}"


def test_list_has_a_line_for_each_record_and_more_of_a_function(run):
    assert run("list")[:2] == (0, f"No record of any function in {cache()}.\n")
    record = ops.matmul.tune(A, B)
    key = str(record.key)
    ops.Layer(2.0).forward(A)
    status, out, _ = run("list")
    assert status == 0
    lines = out.splitlines()
    assert lines[0] == f"{OPS}.Layer.forward"
    at = lines.index(f"{OPS}.matmul")
    assert lines[at + 1] == "  on cpu, none (interpreter), local_world_size 1, world_size 1"
    heads, row = lines[at + 2 : at + 4]
    assert heads.split("  ")[-1] == "key"
    assert re.fullmatch(r" +time \(ms\) +tuned  key", heads)
    assert re.fullmatch(rf" +\d+\.\d{{4}}  \d s ago  {re.escape(key)}", row)
    assert heads.index("key") == row.index(key)
    assert lines[-1].startswith(f"2 records of 2 functions in {cache()}. Winners and files: ")
    assert run("list", "absent")[0] == 1

    (file,) = (cache() / "autotune" / "matmul").glob("*.json")
    for name in ("matmul", f"{OPS}.matmul", f"{OPS}:matmul"):
        lines = run("list", name)[1].splitlines()
        assert f"    winner  {record.best}" in lines
        assert f"    file    {file}" in lines
        assert not any("Layer" in line for line in lines)


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_list_fits_a_terminal(run, monkeypatch, columns):
    ops.matmul(A, B)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(text, "is_terminal", lambda: True)
    for arguments in ([], ["matmul"]):
        lines = run("list", *arguments)[1].splitlines()
        paths = [line for line in lines if str(cache()) in line or "autotune/" in line]
        assert all(len(line) <= columns for line in lines if line not in paths)


def test_list_as_json_has_it_all(run):
    record = ops.matmul.tune(A, B)
    tree = json.loads(run("list", "--json")[1])
    (only,) = tree["records"]
    assert (only["function"], only["key"]) == (f"{OPS}.matmul", str(record.key))
    assert (only["winner"], only["ms"]) == (str(record.best), record.best.outcome.median)
    assert Path(only["file"]).exists()
    assert tree["interrupted"] == tree["of_other_programs"] == []


def test_files_of_another_program_are_counted_and_left_alone(run):
    ops.matmul(A, B)
    (file,) = cache().rglob("*.json")
    others = [file.with_name(f"{'ab' * 32}{end}") for end in (".json", ".2030-01-02.log")]
    for other in others:
        other.write_text('{"config": [], "deps": {}, "key": [8], "func": "matmul"}')
    status, out, err = run("list")
    assert (status, err) == (0, "")
    assert "\n2 files of another program in " in out
    assert f"such as matmul/{others[1].name}: not read, not changed" in out
    tree = json.loads(run("list", "--json")[1])
    assert sorted(tree["of_other_programs"]) == sorted(map(str, others))
    ops.matmul.clear()
    ops.matmul(A, B)
    assert "removed 1 record, 2 logs of" in run("clear", "--all")[1]
    assert sorted(file.parent.glob("[!.]*")) == sorted(others)


def test_what_the_caller_gave_is_shown_after_the_key_and_compared(run):
    with pytest.warns(TuningWarning, match="overwrites"):
        pair(64, m=5, autotune_allow_arg_overwrite=True)
    assert "  64 with {'m': 5}" in run("list", "pair")[1]
    status, out, _ = run("explain", f"{__name__}:pair")
    assert status == 0
    assert "key 64 with {'m': 5}\n" in out
    assert "\n  used\n" in out


@autotune([{"n": n, "m": m} for n in (1, 2) for m in (3, 4)], key_fn=lambda x, **_: x)
def pair(x, n, m):
    return x, n, m


def test_clear_removes_the_records_of_one_function_or_all(run):
    ops.matmul(A, B)
    ops.Layer(2.0).forward(A)
    status, out, _ = run("clear", "matmul")
    assert status == 0
    assert "removed 1 record, 2 logs of matmul" in out
    (left,) = cache().rglob("*.json")
    assert left.parent.name == "forward"
    assert run("clear", "matmul")[0] == 1
    assert run("clear", "../forward")[0] == 1
    left.with_name(f"{'0' * 32}-1.json.damaged").write_text("{")
    status, out, _ = run("clear", "--all")
    assert status == 0
    assert "removed 1 record, 3 logs of all functions" in out
    assert [path.name for path in left.parent.iterdir()] == [".lock"]
    assert run("clear", "--all")[0] == 0


def test_explain_says_the_one_cause_of_a_record_that_was_interpreted(run, monkeypatch):
    """And it is not used."""
    ops.matmul(A, B)
    (file,) = cache().rglob("*.json")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    status, out, _ = run("explain", f"{OPS}:matmul")
    assert status == 1
    assert [line for line in out.splitlines() if "not used" in line] == [
        "  not used: it was made with TRITON_INTERPRET=1, which is not set now"
    ]
    ops.matmul.clear()
    before = ops.matmul.num_tunings
    ops.matmul(A, B)
    assert ops.matmul.num_tunings == before + 1
    assert file.exists()
    assert len(list(cache().rglob("*.json"))) == 2


def test_explain_says_the_one_cause_of_a_record_of_another_gpu(run):
    """And none of the versions, sources and spaces that are others there."""
    ops.matmul(A, B)
    (file,) = cache().rglob("*.json")
    tree = json.loads(file.read_text())
    about = tree["fingerprint"]
    about["hardware"]["driver"], about["software"]["triton"], about["space"] = "1", "2.0.0", "3"
    for gpu, told in {
        "NVIDIA H200": "it was made without TRITON_INTERPRET=1, on NVIDIA H200; now it is none ",
        "toaster (interpreter)": "hardware: gpu was toaster (interpreter), is none (interpreter)",
    }.items():
        about["hardware"]["gpu"] = gpu
        file.write_text(with_checksum(tree))
        reasons = [e for e in run("explain", f"{OPS}:matmul")[1].splitlines() if "not used" in e]
        assert len(reasons) == 1
        assert told in reasons[0]


def test_env_says_versions_variables_and_paths(run, package_records, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_TIMEOUT", "soon")
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_ALLWAYS", "1")
    status, out, err = run("env")
    assert (status, err) == (0, "")
    for part in (
        f"triton_dist: {triton_dist.__version__} in ",
        f"torch: {torch.__version__}",
        "gpu: none (interpreter)",
        "TRITON_DIST_AUTOTUNE_TIMEOUT: soon  (wrong: ",
        "TRITON_DIST_AUTOTUNE_ALLWAYS: 1  (unknown variable: it has no effect)",
        f"cache: {cache()}  (does not exist yet)",
        "  read-only: none\n  packs:\n    ",
    ):
        assert out.count(part) == 1
    assert "uninstall" not in out
    assert json.loads(run("env", "--json")[1])["versions"]["triton"] == triton.__version__

    other = tmp_path / "site" / "triton_dist-3.4.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: triton_dist\nVersion: 3.4.0\n")
    (other / "top_level.txt").write_text("triton_dist\n")
    monkeypatch.syspath_prepend(str(other.parent))
    told = run("env")[1]
    assert f"  triton_dist 3.4.0 in {other.parent}\n" in told
    assert "  (uninstall all but triton-dist-tuner: " in told


def test_env_of_a_broken_device_and_home_says_so(run, monkeypatch):
    monkeypatch.setenv("TRITON_DIST_DEVICE", "toaster")
    monkeypatch.setattr(Path, "expanduser", refuse)
    monkeypatch.setattr("triton_dist.cli.env.pack_locations", lambda: refuse(None))
    status, out, _ = run("env")
    assert status == 0
    assert "device: not known: InvalidKnob: " in out
    assert "(cannot be reached: no home)" in out
    assert "packs: not known: RuntimeError: no home" in out


def refuse(_):
    raise RuntimeError("no home")


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    packages = {name: metadata.version(name) for name in ("torch", "triton")}
    versions = {"triton_dist": triton_dist.__version__, **packages}
    versions["Python"] = platform.python_version()
    said = ", ".join(f"{name} {version}" for name, version in versions.items())
    assert capsys.readouterr().out.split() == said.split()


COMPLETIONS = {
    "expl": {"explain "},
    "explain mat": {"matmul "},
    "show all_g": {"all_gather "},  # its records are shipped
    "explain x --loc": {"--local-world-size "},
}


@pytest.mark.parametrize("line", COMPLETIONS)
def test_a_shell_completes_subcommands_options_and_functions(package_records, line):
    argcomplete = pytest.importorskip("argcomplete", reason="completion needs it, extra cli")
    ops.matmul(A, B)
    *words, last = line.split()
    finder = argcomplete.CompletionFinder(full_parser())
    found = finder._get_completions(["triton-dist", *words], last, "", None)
    assert set(found) == COMPLETIONS[line]


def test_a_shell_that_asks_for_completions_gets_them_and_runs_nothing(run, monkeypatch):
    asked = []

    def autocomplete(parser, exit_method):
        asked.append(parser.prog)
        exit_method(0)

    monkeypatch.setitem(sys.modules, "argcomplete", SimpleNamespace(autocomplete=autocomplete))
    assert run("list")[0] == 0
    assert asked == []
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    with pytest.raises(SystemExit):
        run("list")
    assert asked == ["triton-dist"]
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert run("list")[0] == 0


def test_explain_counts_records_with_the_same_reasons_and_prints_one_of_each(run):
    record = ops.matmul.tune(A, B)
    (file,) = cache().rglob("*.json")
    tree = json.loads(file.read_text())
    tree["fingerprint"]["software"]["triton"] = "2.0.0"
    for key in range(5):
        tree["key"] = key
        if key == 4:
            tree["fingerprint"]["hardware"]["gpu"] = tree["hardware_group"] = (
                "toaster (interpreter)"
            )
        file.with_name(f"{key:032x}-0.json").write_text(with_checksum(tree))
    status, out, _ = run("explain", "matmul")
    assert status == 0
    lines = out.splitlines()
    counts = [line for line in lines if line.endswith(", for example:")]
    assert counts == [f"{count} of 6 records, for example:" for count in (1, 4, 1)]
    assert lines[1] == f"{OPS}.matmul, key {record.key}"
    assert [line for line in lines if "used" in line and not line.startswith("6 records")] == [
        "  used",
        f"  not used: software: triton was 2.0.0, is {triton.__version__}",
        "  not used: hardware: gpu was toaster (interpreter), is none (interpreter)",
    ]
    assert lines[-1].endswith("Every record: --all")
    whole = run("explain", "matmul", "--all")[1]
    assert whole.count(f"{OPS}.matmul, key ") == 6
    assert "for example" not in whole
    assert len(json.loads(run("explain", "matmul", "--json")[1])["records"]) == 6

    def explained(*options):
        status, out, _ = run("explain", "matmul", *options)
        return status, re.findall(r"^\S+matmul, key (.*)$", out, re.MULTILINE)

    assert explained("--key", "2") == (1, ["2"])
    assert explained("--on", "toaster") == (1, ["4"])
    assert explained("--used") == (0, [str(record.key)])
    status, out, _ = run("explain", "matmul", "--used", "--key", "2")
    assert (status, out) == (
        1, "No record of matmul would be used. Without --used, the reasons are printed.\n",
    )  # fmt: skip


@pytest.mark.parametrize(
    "subcommand", [subcommand.__name__.rpartition(".")[2] for subcommand in SUBCOMMANDS] + ["diff"]
)
def test_the_help_of_a_verb_has_a_command_to_try_and_no_option_that_its_page_lacks(
    subcommand, capsys
):
    subcommand = {"listing": "list", "tune_model": "tune-model"}.get(subcommand, subcommand)
    with pytest.raises(SystemExit):
        main([subcommand, "--help"])
    out = capsys.readouterr().out
    assert f"usage: triton-dist {subcommand} " in out
    usage = out.partition("\n\n")[0]
    assert ("-- COMMAND" in usage) == (subcommand in ("debug", "dump", "pack", "profile"))
    assert f"\n  triton-dist {subcommand}" in out
    assert max(map(len, out.splitlines())) <= 80
    pages = [ROOT / f"docs/reference/{page}.md" for page in ("cli", "cli-records", "LLM")]
    heading = "Tune ahead" if subcommand == "tune-model" else subcommand
    whole = "".join(page.read_text() for page in pages)
    section = whole.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    assert [each for each in re.findall(r"--[a-z][-a-z_]*", usage) if each not in section] == []


def test_it_runs_as_a_module_which_needs_no_torch_for_a_list():
    """So that ``list`` is quick, and ``env`` works where torch does not."""
    ended = python("-X", "importtime", "-m", "triton_dist", "list")
    assert (ended.returncode, ended.stdout[:10]) == (0, "No record "), ended.stderr
    assert re.search(r"triton_dist\.cli\.listing$", ended.stderr, re.MULTILINE)
    assert not re.search(r"\| +torch$", ended.stderr, re.MULTILINE)


@pytest.mark.parametrize(
    ("seconds", "shown"), [(-5, "0 s"), (90, "1 min"), (7201, "2 h"), (9e5, "10 d")]
)
def test_an_age_is_shown_in_its_largest_unit(seconds, shown):
    now = datetime.datetime.now(datetime.timezone.utc)
    then = now - datetime.timedelta(seconds=seconds)
    assert text.age(then.isoformat()) == shown
    assert text.age("the day before") == text.age("2030-01-01") == "unknown"
