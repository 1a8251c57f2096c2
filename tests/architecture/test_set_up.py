"""Set-up from packages that are made here: what it installs together, says and leaves behind."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.architecture.source import ROOT
from triton_dist.cli.main import main

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ensurepip") is None, reason="this Python cannot make environments"
)
TRITON = {"triton": "3.7.1"}
OTHERS = {"filelock": "4.2.11", "packaging": "26.3", "rich": "15.0.0", "numpy": "2.4.6"}
FOR_3_10 = {"filelock": "4.1.0", "numpy": "2.2.6"}


def write_wheel(folder: Path, name: str, version: str, *demands: str, script: str = "") -> None:
    """Write a package that contains nothing, or a program with its name."""
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {demand}" for demand in demands]
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
        if script:
            program = zipfile.ZipInfo(f"{name}-{version}.data/scripts/{name}")
            program.external_attr = 0o100755 << 16
            wheel.writestr(program, f"#!/bin/sh\n{script}\n")


class Newcomer:
    """A clone, a Python that has nothing, and a folder of packages instead of an index."""

    def __init__(self, folder: Path) -> None:
        self.clone, self.packages, programs = (
            folder / name for name in ("a clone", "packages", "programs")
        )
        for path in (self.packages, programs):
            path.mkdir()
        for path in ("scripts", "constraints"):
            shutil.copytree(ROOT / path, self.clone / path)
        shutil.copy(ROOT / "pyproject.toml", self.clone)
        self.place("python/triton_dist/__main__.py", "import sys\nprint('arguments', sys.argv[1:])")
        base = getattr(sys, "_base_executable", sys.executable)
        self.programs = programs
        self.environment = {
            "PATH": f"{programs}:/usr/bin:/bin",
            "HOME": str(folder),
            "PYTHON": str(programs / "bare-python"),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.packages),
            "PIP_CONFIG_FILE": os.devnull,
        }
        # A link to the pip of this Python takes 0.1 s; an installation of pip takes 4 s.
        pip = Path(sysconfig.get_path("purelib", vars={"base": sys.base_prefix})) / "pip"
        link = f"ln -s '{pip}' \"$3\"/lib/python*/site-packages/ && exit"
        venv = f"[[ $2 == venv ]] && '{base}' -m venv --without-pip \"$3\" && {link}\n"
        for name, text in (
            # A GPU of this host stays unseen, and what the Python of this test has.
            ("nvidia-smi", "exit 1"),
            (
                "bare-python",
                f"[[ $2 == check ]] && exit 1\n{venv if pip.exists() else ''}exec '{base}' \"$@\"",
            ),
            ("uv", "exit 1"),
        ):
            self.program(name, text)
        for name in ("python3", "python3.13", "python3.12", "python3.11", "python3.10"):
            (programs / name).symlink_to("bare-python")
        old = FOR_3_10 if sys.version_info < (3, 11) else {}
        matplotlib = "3.10.9" if old else "3.11.2"
        for name, version in ({"matplotlib": matplotlib} | TRITON | OTHERS | old).items():
            write_wheel(self.packages, name, version)

    def program(self, name: str, text: str) -> None:
        (self.programs / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (self.programs / name).chmod(0o755)

    def place(self, path: str, text: str) -> None:
        (self.clone / path).parent.mkdir(parents=True, exist_ok=True)
        (self.clone / path).write_text(text)

    def __call__(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.environment | variables, cwd=self.clone, capture_output=True,
            text=True, check=False, timeout=100,
        )  # fmt: skip


@pytest.fixture
def newcomer(tmp_path: Path) -> Newcomer:
    return Newcomer(tmp_path)


def test_set_up_says_what_is_wrong_and_installs_what_agrees(newcomer: Newcomer) -> None:
    """Install again after a mistake, in the environment of the failed installation."""
    newcomer.place(".venv/bin/python", "of the user")
    write_wheel(newcomer.packages, "torch", "2.13.0+cpu", "triton==3.9.0")
    write_wheel(newcomer.packages, "triton", "3.9.0")
    disagree = newcomer("scripts/python", "-c", "")
    assert disagree.returncode == 1
    assert "uv failed; trying pip" in disagree.stderr
    assert "constraints/triton-3.7.1.txt, and a build of torch that accepts" in disagree.stderr
    assert "'python3 -m pip config list'" in disagree.stderr.splitlines()[-1]
    assert "pip must find all versions of constraints/tested.txt" in disagree.stderr
    assert not list((newcomer.clone / ".venv-triton-dist").glob(".ready-*"))

    newcomer.place(".venv-triton-dist/added.txt", "by the user")
    bare = (newcomer.programs / "bare-python").read_text()
    newcomer.program("bare-python", f"[[ $1 == --version ]] && exec echo Python 3.99\n{bare}")
    write_wheel(newcomer.packages, "torch", "2.13.0+cpu")  # the build for the CPU demands none
    result = newcomer("scripts/triton-dist", "list", "two words")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "arguments ['list', 'two words']\n"
    assert "installation with" in result.stderr

    program = (
        "import importlib.metadata as m, os, sys; print(m.version('torch'), m.version('triton'), "
        "m.version('matplotlib') > '3', os.environ['TRITON_INTERPRET'], sys.argv[1:])"
    )
    again = newcomer("scripts/python", "-c", program, "a b")
    assert (again.stdout, again.stderr) == ("2.13.0+cpu 3.7.1 True 1 ['a b']\n", "")
    assert (newcomer.clone / ".venv-triton-dist/added.txt").exists(), "another Python by now"
    assert (newcomer.clone / ".venv/bin/python").read_text() == "of the user"
    command = newcomer(".venv-triton-dist/bin/triton-dist", "explain", "a b")
    assert command.stdout == "arguments ['explain', 'a b']\n"


@pytest.mark.stress  # CI itself installs by uv where it finds uv
def test_set_up_by_uv(newcomer: Newcomer) -> None:
    uv = pytest.importorskip("uv", reason="needs uv, of the extra `pins`")
    (newcomer.programs / "uv").unlink()
    write_wheel(newcomer.packages, "uv", "0.13.9", script=f"exec '{uv.find_uv_bin()}' \"$@\"")
    write_wheel(newcomer.packages, "torch", "2.13.0+cpu")
    result = newcomer("scripts/triton-dist", "list", TRITON_VERSION="3.7.1")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "arguments ['list']\n"
    assert "installation with uv took" in result.stderr
    environment = newcomer.clone / ".venv-triton-dist-triton-3.7.1"
    assert (environment / "bin/triton-dist").exists()
    assert not (environment / ".uv").exists()


def test_what_set_up_did_not_make_is_left_alone(newcomer: Newcomer) -> None:
    for name, reason in (
        (".venv-triton-dist", "was not created by this script and is not changed: move it away"),
        (".venv-triton-dist-triton-3.6.0", "is a symbolic link, which is not supported"),
    ):
        place = newcomer.clone / name
        if "link" in reason:
            place.symlink_to(".venv-triton-dist")
        else:
            newcomer.place(f"{name}/bin/python", "of the user")
        version = {"TRITON_VERSION": "3.6.0"} if "3.6.0" in name else {}
        result = newcomer("scripts/python", "-c", "", **version)
        assert result.returncode == 2
        assert f"{place} {reason}" in result.stderr
        assert "PYTHON=/path/to/python3" in result.stderr
    kept = [path for path in newcomer.clone.glob(".venv-*/**/*") if path.is_file()]
    assert [path.read_text() for path in {path.resolve() for path in kept}] == ["of the user"]


def test_only_versions_with_constraints_can_be_asked_for(newcomer: Newcomer) -> None:
    result = newcomer("scripts/python", "-c", "", TRITON_VERSION="3.5.1")
    assert result.returncode == 2
    assert "TRITON_VERSION=3.5.1, expected one of: 3.6.0 3.7.1 3.8.0 3.9.0" in result.stderr


def test_the_command_that_pip_installs_is_the_same() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (value,) = re.findall(r'^\[project\.scripts\]\ntriton-dist = "(.*)"$', text, re.MULTILINE)
    entry = importlib.metadata.EntryPoint("triton-dist", value, "console_scripts")
    assert entry.load() is main
