"""``debug``: run a command with its kernels checked, or look into one that runs."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from triton_dist import knobs
from triton_dist.cli import debug_job
from triton_dist.cli.verb import add_verb

_SLOWER = 50.0  # how much longer a limit is under compute-sanitizer


def add_to(verbs: Any) -> None:
    parser = add_verb(
        verbs,
        "debug",
        _run,
        help="run a command with its kernels checked, or look into one that runs",
        description="Runs COMMAND with TRITON_DIST_DEBUG=MODE and all that the mode needs: interp "
        "(or some of its checks, as interp:bounds,interp:waits) on CPU ranks; on GPUs assert, a "
        "mode of Triton (consan, iisan, fpsan), or a tool of compute-sanitizer (memcheck, "
        "initcheck, racecheck, synccheck), with a report of each process; on both agree, which "
        "compares what ranks come to a call with. A mode that would find "
        "nothing here is refused, with the reason and the nearest that can. A command that runs "
        "in mode attach or where can be looked into meanwhile: `attach RANK` is the pdb of a rank "
        "that stands at a dl.breakpoint, or in a dl.wait; `where` says what each rank waits for.",
        examples=[
            "debug interp -- torchrun --nproc-per-node=2 script.py",
            "debug memcheck -- bash scripts/launch.sh test_ag_gemm.py",
            "debug attach,where -- torchrun --nproc-per-node=2 script.py",
            "debug attach 1",
            "debug where",
        ],
        takes_command=True,
    )
    parser.add_argument("mode", metavar="MODE", help="one or several, separated by commas")
    parser.add_argument("rank", nargs="?", type=int, help="of attach: of the world")
    parser.add_argument("--job", help="of attach and where, if several run: the port of its ranks")
    parser.add_argument(
        "--wait", type=float, default=60.0, help="of attach: seconds for it to stop; default: 60"
    )
    parser.add_argument("--reports", type=Path, help="folder for those of compute-sanitizer")
    parser.set_defaults(fail=parser.error, command=[])


def _run(arguments: argparse.Namespace) -> int:
    # Here, so that other verbs start without torch.
    from triton_dist.debugging import modes, sanitizer
    from triton_dist.debugging.faults import DebugModeRefused
    from triton_dist.runtime.triton_compat import triton_version

    words = knobs.words(arguments.mode)
    if not arguments.command and words == ("where",):
        return debug_job.where(arguments.job)
    if not arguments.command and words == ("attach",) and arguments.rank is not None:
        return debug_job.attach(arguments.rank, arguments.job, arguments.wait)
    if not arguments.command and words == ("attach",):
        arguments.fail("attach needs a RANK: debug attach RANK")
    if not arguments.command or not words:
        arguments.fail("a command is needed: debug MODE -- COMMAND")
    told = {knobs.debug.variable: ",".join(words)}
    before: list[str] = []
    tools = [word for word in words if word in modes.MODES and modes.MODES[word].tool]
    if modes.checks_of(words) or "attach" in words:
        modes.check(words, modes.Place(triton_version(), modes.INTERPRETER))
        told |= {knobs.triton_interpret.variable: "1", knobs.device.variable: "cpu"}
    elif words != ("where",):
        modes.check(words, modes.Place(triton_version(), modes.GPU, "".join(tools[:1])))
    reports = Path()
    if tools:
        program = sanitizer.find()
        if program is None:
            reason = sanitizer.missing().rstrip(".")
            raise DebugModeRefused(tools[0], reason, modes.nearest_of(tools[0], modes.GPU))
        told[knobs.debug_tool.variable] = tools[0]
        told["CUDA_LAUNCH_BLOCKING"] = "1"  # as the tool does: some ways ask for it
        told["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # a tensor, an allocation
        for limit in (knobs.autotune_timeout, knobs.compile_timeout):
            told[limit.variable] = str(_SLOWER * limit.get())
        reports = arguments.reports or Path(tempfile.mkdtemp(prefix="triton_dist-debug-"))
        reports.mkdir(parents=True, exist_ok=True)
        if sanitizer.starts_ranks(arguments.command):
            python = sanitizer.python_of_ranks(program, tools[0], reports.resolve())
            told["PYTHON_EXEC"] = str(python)
        else:
            before = sanitizer.command_of_all(program, tools[0], reports)
    ran = subprocess.run([*before, *arguments.command], env=knobs.environment() | told)
    if tools:
        found = {
            path.stem: sanitizer.report_of(path.read_text(encoding="utf-8", errors="replace"))
            for path in sorted(reports.glob("*.log"))
        }
        lines = [f"  {line}" for line in sanitizer.merged(found)]
        print(f"{tools[0]}: {len(found)} reports in {reports}", *lines, sep="\n")
        if not found:
            print(f"{tools[0]}: nothing of the command ran under it", file=sys.stderr)
            return ran.returncode or 1
    return ran.returncode if ran.returncode >= 0 else 128 - ran.returncode
