"""scripts/launch.sh: what it hands to torchrun, where it finds scripts, what it says."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import ROOT

LAUNCHER = ROOT / "scripts" / "launch.sh"


class Launcher:
    """Runs launch.sh with a TORCHRUN that records what it was given."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs = folder / "programs"
        self.programs.mkdir()
        self.recorder = self.program(
            "recorder",
            f"cd '{folder}' && printf '%s\\0' \"$@\" >arguments && env -0 >environment\n"
            "exit ${STATUS:-0}",
        )
        # Programs that a host with GPUs has are hidden, whatever host this is.
        for tool in ("bash", "dirname", "basename", "grep", "cat", "cksum", "env"):
            (self.programs / tool).symlink_to(str(shutil.which(tool)))
        (self.programs / "python3").symlink_to(sys.executable)
        self.environment = {
            "PATH": str(self.programs),
            "HOME": str(folder),
            "TORCHRUN": str(self.recorder),
        }
        # It has all packages, and torch for CUDA. test_launch_check.py checks a real Python.
        checked = f'[[ $1 == *requirements.py ]] && exit 0\nexec "{sys.executable}" "$@"'
        self.environment["PYTHON"] = str(self.program("checked-python", checked))

    def program(self, name: str, text: str) -> Path:
        path = self.programs / name
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)
        return path

    def gpus(self, count: int) -> None:
        lines = "\n".join(f"GPU {i}: NVIDIA H200 (UUID: GPU-{i})" for i in range(count))
        self.program("nvidia-smi", f"cat <<'END'\n{lines}\nEND")

    def __call__(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(LAUNCHER), *arguments],
            env=self.environment | variables,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )

    def handed_over(self, *arguments: str, **variables: str) -> list[str]:
        result = self(*arguments, **variables)
        assert result.returncode == 0, result.stderr
        return self.recorded()

    def recorded(self) -> list[str]:
        return (self.folder / "arguments").read_text().split("\0")[:-1]

    def exported(self) -> dict[str, str]:
        entries = (self.folder / "environment").read_text().split("\0")[:-1]
        return dict(entry.split("=", 1) for entry in entries)


@pytest.fixture
def launch(tmp_path: Path) -> Launcher:
    (tmp_path / "script.py").write_text("")
    return Launcher(tmp_path)


def option(handed_over: list[str], name: str) -> str:
    (value,) = (item.split("=", 1)[1] for item in handed_over if item.startswith(f"--{name}="))
    return value


def test_what_torchrun_gets(launch: Launcher) -> None:
    arguments = ["two words", "", "*", "$HOME", "a'b\"c", "--nproc_per_node=9", "--", "-x"]
    options = ["--max-restarts", "2", "--tee=3", "-r", "3", "--virtual-local-rank"]
    arguments += ["--max-restarts", "7"]
    several = f"{launch.recorder} --tool memcheck"
    handed_over = launch.handed_over(*options, "script.py", *arguments, TORCHRUN=several)
    end = handed_over.index("script.py")
    assert handed_over[:2] == ["--tool", "memcheck"]
    assert handed_over[end - len(options) : end] == options
    assert handed_over[end + 1 :] == arguments
    # A module is not looked for.
    assert launch.handed_over("-m", "some.module", "x")[-3:] == ["-m", "some.module", "x"]


ALL_4 = "device: cuda, 4 rank(s)"
ON_CPU = "device: cpu, 2 rank(s)"
# GPUs of the host, arguments before the script, variables; number of ranks, and where they are.
PLACED: list[tuple[int, list[str], dict[str, str], str, str]] = [
    (0, [], {}, "2", ON_CPU),
    (0, ["--nproc_per_node=3"], {}, "3", "device: cpu, 3 rank(s)"),
    (0, ["--nproc_per_node", "3"], {}, "3", "device: cpu, 3 rank(s)"),
    (0, ["--nproc-per-node=3"], {}, "3", "device: cpu, 3 rank(s)"),
    (0, ["--nproc-per-node", "3"], {}, "3", "device: cpu, 3 rank(s)"),
    (4, [], {}, "4", ALL_4),
    (4, [], {"CUDA_VISIBLE_DEVICES": "0,2"}, "2", "device: cuda, 2 rank(s)"),
    (4, [], {"CUDA_VISIBLE_DEVICES": "3"}, "1", "device: cuda, 1 rank(s)"),
    (4, [], {"CUDA_VISIBLE_DEVICES": ""}, "2", ON_CPU),
    (4, [], {"CUDA_VISIBLE_DEVICES": "-1"}, "2", ON_CPU),
    (4, [], {"TRITON_DIST_DEVICE": "cpu"}, "2", ON_CPU),
    (1, ["--share-gpus", "--nproc_per_node=4"], {}, "4", "4 rank(s), up to 4 per GPU"),
    (1, ["--nproc_per_node=2", "--share_gpus"], {}, "2", "2 rank(s), up to 2 per GPU"),
    (2, ["--share-gpus", "--nproc_per_node=3"], {}, "3", "3 rank(s), up to 2 per GPU"),
    (1, ["--share-gpus"], {}, "2", "2 rank(s), up to 2 per GPU"),
    (1, ["--nproc_per_node=3"], {"TRITON_DIST_SHARE_GPUS": " True"}, "3", "up to 3 per GPU"),
    (4, ["--share-gpus", "--nproc_per_node=2"], {}, "2", "device: cuda, 2 rank(s)"),
    (4, ["--share-gpus"], {}, "4", ALL_4),
    (1, [], {"TRITON_DIST_DEVICE": "cpu", "TRITON_DIST_SHARE_GPUS": "1"}, "2", ON_CPU),
]


@pytest.mark.parametrize(("gpus", "arguments", "variables", "ranks", "said"), PLACED)
def test_where_and_how_many_ranks_are(
    launch: Launcher,
    gpus: int,
    arguments: list[str],
    variables: dict[str, str],
    ranks: str,
    said: str,
) -> None:
    if gpus:
        launch.gpus(gpus)
    result = launch(*arguments, "script.py", **variables)
    assert said in result.stderr
    assert gpus or "because there is no nvidia-smi on PATH" in result.stderr
    assert option(launch.recorded(), "nproc_per_node") == ranks
    exported = launch.exported()
    on_cpu = "cpu" if "device: cpu" in said else None
    assert (exported.get("TRITON_INTERPRET"), exported.get("TRITON_DIST_DEVICE")) == (
        "1" if on_cpu else None,
        on_cpu,
    )
    asked = variables.get("TRITON_DIST_SHARE_GPUS") if on_cpu else None
    assert exported.get("TRITON_DIST_SHARE_GPUS") == ("1" if "per GPU" in said else asked)
    assert exported.get("OMP_NUM_THREADS") == ("1" if on_cpu else None)


def test_settings_of_ranks_on_gpus(launch: Launcher) -> None:
    launch.gpus(2)
    given = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    asked = {"TRITON_DIST_DEVICE": "cuda", "TRITON_INTERPRET": "1"}
    assert "ignoring TRITON_INTERPRET=1, because" in launch("script.py", **given, **asked).stderr
    exported = launch.exported()
    assert "TRITON_INTERPRET" not in exported
    assert given.items() <= exported.items()
    assert exported["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert exported["PYTHONPATH"] == str(ROOT / "python")
    launch.handed_over("script.py", CUDA_DEVICE_MAX_CONNECTIONS="8", PYTHONPATH="/mine")
    assert launch.exported()["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    assert launch.exported()["PYTHONPATH"] == f"{ROOT / 'python'}:/mine"


@pytest.mark.parametrize(
    ("driver", "said"),
    [
        ("echo no devices were found; exit 6", "nvidia-smi fails: no devices were found"),
        ("echo no devices", "nvidia-smi lists 0 GPU(s)"),
    ],
)
def test_a_driver_without_gpus_means_cpu(launch: Launcher, driver: str, said: str) -> None:
    launch.program("nvidia-smi", driver)
    assert f"because {said}" in launch("script.py").stderr


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ([], {}, "SCRIPT is missing. See"),
        (["--bogus", "x.py"], {}, "SCRIPT is missing (x.py was read as the value of --bogus). See"),
        (["missing.py"], {}, "missing.py: no such file in this folder"),
        (["no/such.py"], {}, "no/such.py: no such file"),
        (["--nproc_per_node"], {}, "requires a number"),
        (["--nproc_per_node=0", "script.py"], {}, "--nproc_per_node=0 is not a number of ranks"),
        (["--nproc-per-node", "abc", "script.py"], {}, "--nproc_per_node=abc is not a number"),
        (["--nproc_per_node=-1", "script.py"], {}, "pass 1 or more"),
        (["script.py"], {"TRITON_DIST_DEVICE": "cuda"}, "there is no GPU: there is no nvidia-smi"),
        (["script.py"], {"TRITON_DIST_DEVICE": "tpu"}, "expected auto, cuda or cpu"),
        (["script.py"], {"TRITON_DIST_SHARE_GPUS": "maybe"}, "=maybe, expected 0 or 1"),
        (["script.py"], {"NODE_RANK": "1"}, "NODE_RANK=1, expected 0 to 0: set NNODES, the number"),
        (["script.py"], {"NODE_RANK": "-1"}, "NODE_RANK=-1, expected 0 to 0"),
        (["script.py"], {"NODE_RANK": "08", "NNODES": "8"}, "NODE_RANK=08, expected 0 to 7"),
        (["script.py"], {"NNODES": "two"}, "NNODES=two, expected the number of hosts"),
        (["script.py"], {"NNODES": "2"}, "requires MASTER_PORT"),
        (["script.py"], {"NNODES": "2", "MASTER_PORT": "1"}, "requires MASTER_ADDR"),
        (["--share-gpus", "script.py"], {}, "but ranks would be on the CPU, because there is no"),
    ],
)
def test_mistakes_are_said(
    launch: Launcher, arguments: list[str], variables: dict[str, str], message: str
) -> None:
    result = launch(*arguments, **variables)
    assert result.returncode == 2
    assert message in result.stderr
    assert not (launch.folder / "arguments").exists()


def test_more_ranks_than_gpus_is_a_mistake(launch: Launcher) -> None:
    launch.gpus(2)
    result = launch("--nproc_per_node=3", "script.py")
    assert result.returncode == 2
    assert "but there are 2 GPU(s)" in result.stderr


def test_the_status_is_returned_and_the_command_printed(launch: Launcher) -> None:
    result = launch("script.py", "two words", STATUS="37")
    assert result.returncode == 37
    assert re.search(
        rf"running: {re.escape(str(launch.recorder))} .* script.py two\\ words\n", result.stderr
    )


def test_several_hosts_also_by_the_older_names(launch: Launcher) -> None:
    names = ("nnodes", "node_rank", "master_addr", "master_port")
    given = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "host-0", "MASTER_PORT": "2345"}
    handed_over = launch.handed_over("script.py", **given, ARNOLD_ID="7")
    assert [option(handed_over, name) for name in names] == ["2", "1", "host-0", "2345"]
    older = {"WORKER_NUM": "4", "ID": "3", "WORKER_0_HOST": "host-0", "WORKER_GPU": "8"}
    older["WORKER_0_PORT"] = "2345,2346"
    given = {f"ARNOLD_{name}": value for name, value in older.items()}
    handed_over = launch.handed_over("script.py", **given)
    assert [option(handed_over, name) for name in names] == ["4", "3", "host-0", "2345"]
    assert option(handed_over, "nproc_per_node") == "8"


def test_a_job_within_a_rank_is_a_job_of_its_own(launch: Launcher) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")
    names += ("NODE_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE")
    outer = dict.fromkeys((*names, "ARNOLD_WORKER_NUM", "ARNOLD_ID"), "3")
    outer |= {"MASTER_PORT": "2345", "ARNOLD_WORKER_0_PORT": "2345"}
    handed_over = launch.handed_over("script.py", **outer)
    assert (option(handed_over, "nnodes"), option(handed_over, "node_rank")) == ("1", "0")
    assert option(handed_over, "master_addr") == "127.0.0.1"
    assert option(handed_over, "master_port") != "2345"
    assert not outer.keys() & launch.exported().keys()
    handed_over = launch.handed_over("script.py", **outer, NNODES="4")
    assert [option(handed_over, name) for name in ("nnodes", "master_port")] == ["4", "2345"]


def test_the_port_is_free_and_another_each_time(launch: Launcher) -> None:
    ports = {option(launch.handed_over("script.py"), "master_port") for _ in range(3)}
    assert len(ports) > 1
    assert all(1024 <= int(port) < 65536 for port in ports)


def test_help_needs_nothing(launch: Launcher) -> None:
    result = launch("--help", PYTHON="/nowhere")
    assert result.returncode == 0
    assert "--nproc_per_node=N" in result.stdout
    page = (ROOT / "docs" / "reference" / "launch.md").read_text()
    names = r"-m MODULE|\b(?:TRITON_|NNODES|NODE_|MASTER_|TORCHRUN|PYTHON|PIP_)[A-Z_]*"
    assert set(re.findall(names, result.stdout)) == set(re.findall(names, page)) - {
        "TRITON_INTERPRET"  # which the launcher sets
    }


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A repository with the scripts alone."""
    for folder in ("scripts", "constraints"):
        shutil.copytree(ROOT / folder, tmp_path / "copy of it" / folder)
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "copy of it")
    return tmp_path / "copy of it"


def test_a_host_without_a_fitting_python_is_told_so(
    launch: Launcher, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LAUNCHER", copy / "scripts" / "launch.sh")
    (launch.programs / "python3").unlink()
    launch.program("python3", "[[ $1 == -c ]] && echo 3.9 || exit 1")
    result = launch("script.py", PYTHON="python3")
    assert result.returncode == 1
    assert "no Python from 3.10 to 3.13 found, only: 3.9" in result.stderr
    assert "PYTHON=/path/to/python3" in result.stderr
    assert not (copy / ".venv-triton-dist").exists()


def place(root: Path, where: str) -> str:
    path = root / where
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    return str(path)


def test_where_a_bare_name_is_looked_for(
    launch: Launcher, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LAUNCHER", copy / "scripts" / "launch.sh")
    in_package = place(copy, "python/triton_dist/test/nvidia/test_op.py")
    assert launch.handed_over("test_op.py")[-1] == in_package
    place(launch.folder, "test_op.py")
    assert launch.handed_over("test_op.py")[-1] == "test_op.py", "as given comes first"
    in_tests = place(copy, "tests/test_other.py")
    assert launch.handed_over("test_other.py")[-1] == in_tests
    place(copy, "python/triton_dist/test/other/test_other.py")
    result = launch("test_other.py")
    assert result.returncode == 2
    assert "several files match, pass the path" in result.stderr


@pytest.mark.stress  # tests/distributed/test_launch_check.py has a rank that raises
def test_a_rank_that_ends_is_named_without_a_traceback_of_torchrun(launch: Launcher) -> None:
    (launch.folder / "ends.py").write_text(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '0':\n    print('a mistake', file=sys.stderr)\n    sys.exit(2)\n"
        "time.sleep(60)\n"
    )
    result = launch("ends.py", TORCHRUN="")
    assert result.returncode == 2
    said = "a mistake\nlaunch.sh: rank 0 ended with status 2; its output is above\n"
    assert result.stderr.endswith(said)
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("number", "lines_before"),
    [(signal.SIGTERM, 1), pytest.param(signal.SIGINT, 8, marks=pytest.mark.stress)],
)
def test_a_signal_ends_a_launch_with_one_line(
    launch: Launcher, number: signal.Signals, lines_before: int
) -> None:
    """Also while ranks start: the first prints before the last of eight has started."""
    (launch.folder / "a script.py").write_text(
        "import os, sys, time\n"
        "line = f\"rank {os.environ['RANK']} {sys.argv[1:]}\\n\"\n"
        "os.write(1, line.encode())\n"  # in one piece
        "time.sleep(60)\n"
    )
    command = ["bash", str(LAUNCHER), "--nproc_per_node=8", "a script.py", "two words", "0"]
    expected = {f"rank {rank} ['two words', '0']\n" for rank in range(8)}
    with subprocess.Popen(
        command, env=launch.environment | {"TORCHRUN": ""}, cwd=launch.folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            printed = {process.stdout.readline() for _ in range(lines_before)}
            process.send_signal(number)
            _, errors = process.communicate(timeout=40)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert printed <= expected
    assert len(printed) == lines_before
    assert process.returncode == 128 + number
    assert errors.endswith(f"launch.sh: ended by {number.name}\n")
    assert "torch" not in errors[errors.index("a\\ script.py") :], "lines of torchrun"


def test_requirements_are_those_of_pyproject() -> None:
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11 to read TOML")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "requirements.py"), "list", "dev"],
        capture_output=True, text=True, check=True,
    ).stdout.split("\n")[:-1]  # fmt: skip
    extras = project["optional-dependencies"]
    included = extras["docs"] + extras["test"]
    assert listed == project["dependencies"] + included + extras["dev"][2:]
