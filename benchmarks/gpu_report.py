"""Run all tests and benchmarks that need GPUs, the most important first, within a time limit.

    make gpu-report MINUTES=25
    scripts/python benchmarks/gpu_report.py --minutes 25 --out report
    scripts/python benchmarks/gpu_report.py --list
    scripts/python benchmarks/gpu_report.py --minutes 5 --out report --steps "any M"
    scripts/python benchmarks/gpu_report.py --minutes 30 --out /tmp/tried --ranks 2

Each step is a command of this repository, with one rank per GPU and a time limit. Its results and
log are written to the folder --out. ``report.json`` and ``report.md`` list the machine, the
software versions, and the state and commit of each step. If --out has a report, steps that are done
are not repeated. --steps selects steps whose name contains the text. The exit status is the number
of failed steps.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from overlap.results import environment, software
from overlap.table import console
from rich.table import Table

from triton_dist.runtime.device import current_device

ROOT = Path(__file__).parents[1]
_GRACE_SECONDS = 10.0
"""Time between SIGINT and SIGKILL for a step that reached its time limit."""
_LOG_LINES = 60
"""Last lines of a log that the report shows. Steps print their tables at the end."""
DONE, FAILED, CUT_OFF, NOT_REACHED = "done", "failed", "cut off", "not reached"


@dataclass(frozen=True)
class Step:
    """A command of the report, with its time limit.

    In ``command``, ``{out}`` is replaced by the path of the results without a suffix, and
    ``{launch}`` by a command that starts a program on all ranks.
    """

    name: str
    minutes: float
    command: str

    @property
    def file(self) -> str:
        """Name of the step's result files and log, without a suffix."""
        return self.name.replace(" ", "-").replace(",", "")


def _steps() -> tuple[Step, ...]:
    gemms = ("ag_gemm", "gemm_rs", "gemm_ar")
    moe_ops = ("ag_group_gemm", "run_moe_reduce_rs", "run_moe_reduce_ar")
    overlap = "{launch} benchmarks/bench_overlap.py --mode graph --json {out}.json"
    any_m = "{launch} benchmarks/bench_any_m.py --minutes 4 --json {out}.json"
    without_ranks = "bash scripts/python benchmarks"
    train, serve = "examples/train_llama.py", "examples/serve_llama.py"
    moe = "--model tiny-moe"
    examples = (
        train,
        f"{train} --dtype bfloat16",
        f"{train} {moe}",
        serve,
        f"{serve} {moe}",
        f"{serve} --fp8",
        f"{serve} {moe} --fp8 block",
    )
    scripts = (
        "test_tp_mlp.py --check",
        "test_tp_attn.py --check --bsz 32",
        "test_tp_moe.py --check",
        "test_tp_e2e.py --check --bsz 8 --num_layers 2 --mode gemm_ar",
    )
    tests = " ".join(f"tests/gpu/test_{op}.py" for op in (*gemms, "ag_group_gemm", "moe_sums"))
    return (
        Step("tests of the ops", 6, f"bash scripts/test.sh --gpu {tests}"),
        *(Step(f"goals, {op}", 5, f"{overlap} --op {op} --best 3 --rounds 15") for op in gemms),
        *(
            Step(
                f"goals, {op}", 4,
                f"{overlap} --op {op} --layers all --M 4096,64,1024,16384,644 --best 0 --rounds 15",
            )
            for op in moe_ops
        ),
        Step("layers", 5, "{launch} benchmarks/bench_layers.py --json {out}.json"),
        *(Step(f"any M, {op}", 5, f"{any_m} --op {op} --M-random 64") for op in gemms),
        *(
            Step(
                f"any M, {op}, a layer that does not ship", 5,
                f"{any_m} --op {op} --M-random 64 --layer Qwen2-72B",
            )
            for op in gemms
        ),
        *(
            Step(
                f"first calls, {op}", 3,
                f"{{launch}} benchmarks/bench_first_calls.py --op {op} --json {{out}}.json",
            )
            for op in gemms
        ),
        Step(
            "goals, collectives", 4,
            "{launch} benchmarks/bench_collectives.py --mode graph --json {out}.json",
        ),
        Step("host cost", 2, "{launch} benchmarks/bench_host_cost.py --json {out}.json"),
        Step("launch", 2, f"{without_ranks}/bench_launch.py --json {{out}}.json"),
        Step("matmul", 8, f"{without_ranks}/bench_matmul.py --first 2 --json {{out}}.json"),
        Step("cold tuning", 4, "{launch} benchmarks/bench_cold_tuning.py --json {out}.json"),
        Step("contextual race", 4, "{launch} benchmarks/bench_contextual.py --json {out}.json"),
        Step(
            "stress", 6, 'bash scripts/test.sh --gpu tests/gpu/test_overlap_stress.py -m "gpu"'
        ),
        *(
            Step(
                f"records, {op}", 8,
                f"{{launch}} benchmarks/tune_layers.py --op {op} && "
                f"scripts/triton-dist pack {op} --out {{out}}.tdpack",
            )
            for op in gemms
        ),
        Step("examples", 5, " && ".join(f"{{launch}} {each}" for each in examples)),
        Step("scripts of layers", 5, " && ".join(f"{{launch}} {each}" for each in scripts)),
        Step("all other tests", 12, "bash scripts/test.sh --gpu"),
    )  # fmt: skip


STEPS = _steps()


def run_step(step: Step, folder: Path, seconds: float, ranks: int) -> dict[str, Any]:
    """Run the step for at most ``seconds``, or less if its own limit is lower; return its entry."""
    seconds = min(60 * step.minutes, seconds)
    share = " --share-gpus" if 0 < torch.cuda.device_count() < ranks else ""
    launch = f"bash scripts/launch.sh{share} --nproc_per_node={ranks}"
    command = step.command.format(out=shlex.quote(str(folder / step.file)), launch=launch)
    begin, log = time.monotonic(), folder / f"{step.file}.log"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status = _wait(process, seconds)
    took = time.monotonic() - begin
    state = CUT_OFF if status is None else FAILED if status else DONE
    when = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {
        "state": state, "status": status, "seconds": round(took, 1), "command": command,
        "log": log.name, "commit": commit(), "when": when,
    }  # fmt: skip


def _wait(process: subprocess.Popen[Any], seconds: float) -> int | None:
    """Return the exit status; ``None`` if the process ran longer than ``seconds`` and was ended."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        for signal_number in (signal.SIGINT, signal.SIGKILL):  # reaches background processes too
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal_number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_SECONDS)


def commit() -> str:
    """Return the repository's commit, with ``+`` if files differ from it; empty without git."""
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return ""
    return run.stdout.strip()


def run(steps: Sequence[Step], folder: Path, minutes: float, ranks: int) -> dict[str, Any]:
    """Run all steps that are not done; return the report, which is written after each step."""
    deadline = time.monotonic() + 60 * minutes
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "report.json"
    earlier = json.loads(path.read_text("utf-8"))["steps"] if path.exists() else {}
    report = {
        "hardware": {**current_device().facts(), "ranks": str(ranks)},
        "software": software(),
        "environment": environment(),
        "steps": earlier | {s.name: {"state": NOT_REACHED} for s in steps if not _done(earlier, s)},
    }
    write(report, folder)
    for step in steps:
        left = deadline - time.monotonic()
        if _done(earlier, step) or left < _GRACE_SECONDS:
            continue
        print(f"{step.name}: at most {min(left / 60, step.minutes):.1f} minutes", flush=True)
        report["steps"][step.name] = run_step(step, folder, left - _GRACE_SECONDS, ranks)
        write(report, folder)
    return report


def _done(steps: dict[str, Any], step: Step) -> bool:
    return bool(steps.get(step.name, {}).get("state") == DONE)


def write(report: dict[str, Any], folder: Path) -> None:
    """Write the report as JSON, and as Markdown with the last lines of each log."""
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    lines = ["# GPU report", ""]
    for part in ("hardware", "software", "environment"):
        lines += [f"{part}: " + ", ".join(f"{k} {v}" for k, v in report[part].items()), ""]
    lines += ["| step | state | s | commit | when |", "|---|---|---|---|---|"]
    for name, step in report["steps"].items():
        cells = (step.get(each, "") for each in ("state", "seconds", "commit", "when"))
        lines.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    for name, step in report["steps"].items():
        if "command" in step:
            text = (folder / step["log"]).read_text("utf-8", errors="replace")
            shown = text.splitlines()[-_LOG_LINES:]
            lines += ["", f"## {name}", "", f"`{step['command']}`", "", "```text", *shown, "```"]
    (folder / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def table(report: dict[str, Any]) -> Table:
    """Return a table with the state, seconds and commit of each step."""
    result = Table(title="GPU report", title_justify="left")
    for name in ("step", "state", "s", "commit"):
        result.add_column(name)
    for name, step in report["steps"].items():
        result.add_row(name, step["state"], str(step.get("seconds", "")), step.get("commit", ""))
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="limit; default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="output folder")
    parser.add_argument("--steps", default="", help="run only steps whose name has this text")
    parser.add_argument(
        "--ranks", type=int, default=0,
        help="number of ranks; default: number of GPUs. With more ranks than GPUs, or on CPU "
        "ranks, this only tests the commands; times are not meaningful",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="list the steps")
    options = parser.parse_args(arguments)
    steps = [step for step in STEPS if options.steps in step.name]
    if not steps:
        parser.error(f"no step has {options.steps!r}; steps: {', '.join(s.name for s in STEPS)}")
    if options.list:
        for step in steps:
            print(f"{step.name} ({step.minutes:g} min): {step.command}")
        return 0
    ranks = options.ranks or torch.cuda.device_count()
    if ranks == 0:
        parser.error("there is no GPU; --list shows the steps, --ranks 2 tests them on CPU ranks")
    report = run(steps, options.out.absolute(), options.minutes, ranks)
    console().print(table(report))
    return sum(step["state"] == FAILED for step in report["steps"].values())


if __name__ == "__main__":
    sys.exit(main())
