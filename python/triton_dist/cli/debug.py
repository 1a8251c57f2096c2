"""``debug``: run a command with its kernels checked, or look into one that runs."""

from __future__ import annotations

import argparse
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from triton_dist import knobs
from triton_dist.cli.subcommand import add_subcommand

_SLOWER = 50.0  # how much longer a limit is under compute-sanitizer


def add_to(subcommands: Any) -> None:
    parser = add_subcommand(
        subcommands,
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
        return where(arguments.job)
    if not arguments.command and words == ("attach",) and arguments.rank is not None:
        return attach(arguments.rank, arguments.job, arguments.wait)
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


_LOOK_SECONDS = 0.05


def attach(rank: int, job: str | None, seconds: float) -> int:
    """Talk with the pdb of a rank, from standard input to standard output; waits ``seconds`` for
    the rank to stop.

    Raises:
        NoSuchJob: there is no such job, or several.
        TimeoutError: the rank does not stop.
    """
    from triton_dist.debugging import debugger
    from triton_dist.debugging.faults import NoSuchJob
    from triton_dist.debugging.rank_status import folder_of

    end = time.monotonic() + seconds
    while True:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                try:
                    folder = folder_of(job, debugger.socket_of(Path(), rank).name)
                except NoSuchJob:  # none of which it stands
                    folder = folder_of(job, "*")
                    debugger.request_of(folder, rank).touch()
                connection.connect(str(debugger.socket_of(folder, rank)))
            except (NoSuchJob, OSError) as failure:
                if time.monotonic() < end:
                    time.sleep(_LOOK_SECONDS)
                    continue
                if isinstance(failure, NoSuchJob):
                    raise
                debugger.request_of(folder, rank).unlink(missing_ok=True)
                raise TimeoutError(
                    f"rank {rank} did not stop within {seconds:g} s: it has come to no "
                    "dl.breakpoint and stands in no dl.wait of an interpreted kernel"
                ) from failure
            debugger.request_of(folder, rank).unlink(missing_ok=True)
            _talk(connection, sys.stdin.buffer, sys.stdout.buffer)
            return 0


def _talk(connection: socket.socket, typed: BinaryIO, shown: BinaryIO) -> None:
    """Pass on what is typed and what is said, until the rank goes on."""
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        with suppress(OSError):  # a file needs no waiting, and cannot be waited for
            selector.register(typed, selectors.EVENT_READ)
        if len(selector.get_map()) == 1:
            connection.sendall(typed.read())
            connection.shutdown(socket.SHUT_WR)
        while True:
            for key, _ in selector.select():
                if key.fileobj is connection:
                    said = connection.recv(1 << 16)
                    if not said:
                        return
                    shown.write(said)
                    shown.flush()
                elif line := os.read(typed.fileno(), 1 << 16):
                    connection.sendall(line)
                else:
                    selector.unregister(typed)
                    connection.shutdown(socket.SHUT_WR)


def where(job: str | None) -> int:
    """Print where the ranks of a job stand.

    Raises:
        NoSuchJob: there is no such job, or several.
    """
    from triton_dist.debugging import rank_status
    from triton_dist.debugging.rank_status import folder_of

    text, answers = rank_status.report(folder_of(job, "[0-9]*.json"))
    print(text)
    return 0 if answers else 1
