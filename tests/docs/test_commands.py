"""The commands of the documentation run as they are printed.

Each line of a ``bash`` block is either run here, on CPU ranks and with a cache of the test, or has
a reason in ``NOT_RUN``. What ``scripts/launch.sh`` itself makes of a command line is tested in
``tests/architecture/test_scripts.py``; here its ranks begin at once, which takes a second instead
of five.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import commands
from tests.docs.markdown import ROOT, all_blocks
from tests.docs.run_blocks import run_program
from triton_dist.cli.main import main
from triton_dist.test.utils import TIMES_NOT_MEANINGFUL

NOT_RUN = {
    r"make |(TRITON_VERSION=\S+ )?bash scripts/test\.sh": "the test suite, of which this is a part",
    r"NNODES=": "needs several hosts",
    r".*--share-gpus": "needs a GPU; tests/gpu runs it",
    r"PIP_|pip install |triton-dist list": "needs a package index and what it installs",
    r".*triton-dist debug |.*triton_dist debug ": "tests/cli/test_debug.py runs the verb",
    r".*triton-dist dump --diff ": "tests/compile/test_runner.py runs the verb",
    r".*tune-model ": "tunes for half a minute; tests/layers/test_llm.py runs the verb",
    r"cp -r examples/own_op|cd ~/my_op|python -m pytest tests|(TRITON_INTERPRET=1 )?torchrun ":
        "tests/examples/test_own_op.py runs the template",
    r"export TRITON_DIST_AUTOTUNE_REMOTE|triton-dist remote ":
        "needs a store; tests/cli/test_remote.py runs the subcommand",
    r"tail ": "looks at the log of a tuning that is stuck",
    r"(python -m triton_dist|triton-dist) (dump|profile) .*-- ": "runs the reader's program",
    r"python -m triton_dist|triton-dist pack |.*triton-dist \w+ (mypackage|matmul)":
        "names the reader's functions",
    r"(bash scripts/launch\.sh|scripts/python) (scale|softmax|readme)\.py|TRITON_INTERPRET=0 ":
        "the page's own program, which test_code_blocks and test_programs run",
    r".*bench_(overlap|collectives|any_m|first_calls|prior|search_quality)\.py":
        "takes long on CPUs; tests/benchmarks measures less with the same options",
    r"(\w+=\S+ )*(bash scripts/launch\.sh|scripts/python)( --\S+)* examples/":
        "tests/examples runs it",
    r".*launch\.sh --help": "tests/architecture/test_scripts.py runs it",
    r"bash scripts/launch\.sh test_ep_a2a\.py": "test_ep_ll_a2a.py runs its functions",
    r".*--nproc_per_node=4 test_ag_gemm\.py --case check ": "two ranks run this script",
    r"(TRITON_DIST_DEVICE=cpu )?bash scripts/launch\.sh( --\S+)* test_ag_gemm\.py --case check$|"
    r"bash scripts/launch\.sh test_allreduce\.py --case check ":
        "tests/distributed/test_launch_check.py runs it, the all-reduce with fewer sizes",
}  # fmt: skip
# Lines that others are printed among, by a part of the command.
SHOWN = {
    "test_ag_gemm.py --case perf": [
        "ag_gemm ", "GEMM alone ", "all-gather alone ", "copy-engine all-gather alone ",
        "all-gather + matmul ",
    ],
    "test_gemm_rs.py --case perf": [
        "gemm_rs ", "GEMM alone ", "reduce-scatter alone ", "matmul + reduce-scatter ",
    ],
    "test_moe_reduce_rs.py 8192 2048 1536 32 2 --check": [
        "✅ check passed: 2 ranks, cpu, float16, 128x32x24 E=4 topk=2",
    ],
    "test_moe_reduce_ar.py": [
        "run_moe_reduce_ar ", "our product alone ", "all-reduce alone ",
        "our product + all-reduce ",
    ],
    "test_allreduce.py --case perf": ["       128 ", "       512 "],
    "correctness_tma_autotune": ["calls to tune: ", "✅ check passed: 2 ranks, cpu"],
}  # fmt: skip
LONG = ("benchmarks/bench_layers.py", "test_moe_reduce_ar.py")
"""Programs that ``make stress`` runs."""
TUNED = "correctness_tma_autotune"
"""All other commands use the first config. Tests of the ops and of launch.sh tune over ranks."""
RATES = ("TFLOP", "GB/s", "peaks", "x serial", "limit", " library")


@dataclass(frozen=True)
class Command:
    """A line of a ``bash`` block."""

    id: str
    line: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line, comments=True)

    @property
    def variables(self) -> dict[str, str]:
        """Those that the line sets in front of its program."""
        pairs = [word.partition("=") for word in self.words]
        first = next(i for i, word in enumerate(self.words) if not re.match(r"[A-Z_]+=", word))
        return {name: value for name, _, value in pairs[:first]}

    @property
    def reason(self) -> str | None:
        return next((why for which, why in NOT_RUN.items() if re.match(which, self.line)), None)


COMMANDS = list(
    {
        line: Command(block.id, line)
        for block in all_blocks("bash")
        for line in block.text.splitlines()
        if line
    }.values()
)
RUN = [command for command in COMMANDS if command.reason is None]
LAUNCHED = [command for command in RUN if "scripts/launch.sh" in command.line]
PYTHON = [command for command in RUN if command.line.startswith("scripts/python ")]
EXPLAIN = [command for command in RUN if command.line.startswith("scripts/triton-dist explain ")]
OTHERS = [command for command in RUN if command not in [*LAUNCHED, *PYTHON, *EXPLAIN]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like the repository, for what the commands write."""
    there = tmp_path_factory.mktemp("clone")
    for name in ("scripts", "benchmarks", "python", "examples", "pyproject.toml", "constraints"):
        (there / name).symlink_to(ROOT / name)
    return there


def launched(command: Command) -> tuple[int, str, list[str]]:
    """Ranks, script and its arguments of a ``launch.sh``."""
    words = command.words[command.words.index("scripts/launch.sh") + 1 :]
    ranks = 2
    while words[0].startswith("--"):
        option, _, value = words.pop(0).partition("=")
        ranks = int(value) if option == "--nproc_per_node" else ranks
    script = ROOT / words[0]
    if not script.exists():
        script = ROOT / "python" / "triton_dist" / "test" / "nvidia" / words[0]
    return ranks, str(script), words[1:]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(each, marks=pytest.mark.stress)
        if any(program in each.line for program in LONG)
        else each
        for each in LAUNCHED
    ],
    ids=lambda command: command.line,
)
def test_launched(command: Command, spawn_ranks, folder: Path, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    ranks, script, arguments = launched(command)
    env = {"HOME": str(folder / "home")} | command.variables
    if TUNED not in command.line:
        env["TRITON_DIST_AUTOTUNE"] = "0"
    (printed, *_) = spawn_ranks(
        ranks, run_program, script, *arguments, init=False, timeout=200, env=env
    )
    assert printed.strip()
    if "check" in arguments:
        assert f"✅ check passed: {ranks} ranks, cpu" in printed
    if "perf" in arguments:
        assert TIMES_NOT_MEANINGFUL in printed
        assert [rate for rate in RATES if rate in printed] == [], "of a GPU that is not there"
    shown = [lines for part, lines in SHOWN.items() if part in f"{command.line}\n"]
    assert [line for lines in shown for line in lines if f"\n{line}" not in f"\n{printed}"] == []


@pytest.mark.parametrize("command", PYTHON, ids=lambda command: command.line)
def test_program(command: Command, spawn_ranks, folder: Path, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    script, *arguments = command.words[1:]
    env = {"HOME": str(folder / "home")}
    (printed,) = spawn_ranks(1, run_program, script, *arguments, init=False, env=env)
    assert printed.strip()


@pytest.mark.parametrize("command", EXPLAIN, ids=lambda command: command.line)
def test_explain(command: Command, folder: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("HOME", str(folder / "home"))
    assert main(command.words[1:]) in (0, 1)  # 1: no record is valid here
    assert command.words[-1].partition(":")[0] in capsys.readouterr().out


@pytest.mark.parametrize("command", OTHERS, ids=lambda command: command.line)
def test_command(command: Command, folder: Path) -> None:
    home = str(folder / "home")
    done = commands.run("bash", "-c", command.line, cwd=folder, HOME=home)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_reason_and_each_line_is_needed() -> None:
    lines = [command.line for command in COMMANDS]
    unused = [which for which in NOT_RUN if not any(re.match(which, line) for line in lines)]
    unused += [part for part in SHOWN if not any(part in f"{line}\n" for line in lines)]
    assert unused == []
