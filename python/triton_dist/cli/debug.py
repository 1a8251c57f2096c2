"""``debug``: run a command in a debug mode, or inspect a running job."""

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
from triton_dist.cli.subcommand import add_command, add_subcommand

_SANITIZER_SLOWDOWN = 50.0  # factor on timeouts under compute-sanitizer


def add_to(subcommands: Any) -> None:
    parser = add_subcommand(
        subcommands,
        "debug",
        _run,
        help="run a command in a debug mode, or inspect a running job",
        description="Runs COMMAND with TRITON_DIST_DEBUG=MODE and the settings that the mode "
        "needs. On CPU ranks: interp, or some of its checks, such as interp:bounds,interp:waits. "
        "On GPUs: assert, a mode of Triton (consan, iisan, fpsan), or a tool of compute-sanitizer "
        "(memcheck, initcheck, racecheck, synccheck) with one report per process. On both: agree, "
        "which checks that ranks pass equal expert ids and layer inputs. A mode that cannot find "
        "anything on this machine is refused, with a message that names a similar mode. If COMMAND "
        "runs in the modes attach or where, it can be inspected from another terminal: `debug "
        "attach RANK` opens pdb on a rank that has stopped at a dl.breakpoint or waits in a "
        "dl.wait, and `debug where` prints what each rank waits for.",
        examples=[
            "debug interp -- torchrun --nproc-per-node=2 script.py",
            "debug memcheck -- bash scripts/launch.sh test_ag_gemm.py",
            "debug attach,where -- torchrun --nproc-per-node=2 script.py",
            "debug attach 1",
            "debug where",
        ],
    )
    parser.add_argument("mode", metavar="MODE", help="one or more modes, separated by commas")
    parser.add_argument("rank", nargs="?", type=int, help="with attach: the global rank")
    parser.add_argument(
        "--job", help="with attach and where: MASTER_PORT of the job, if several jobs run"
    )
    parser.add_argument(
        "--wait", type=float, default=60.0,
        help="with attach: seconds to wait until the rank stops; default: 60",
    )  # fmt: skip
    parser.add_argument("--reports", type=Path, help="folder for the reports of compute-sanitizer")
    add_command(parser)


def _run(arguments: argparse.Namespace) -> int:
    # Imported here because other subcommands start without torch.
    from triton_dist.debugging import modes, rank_status, sanitizer
    from triton_dist.debugging.faults import DebugModeRefused
    from triton_dist.runtime.triton_compat import triton_version

    words = knobs.words(arguments.mode)
    if not arguments.command and words == ("where",):
        report, answers = rank_status.report(rank_status.folder_of(arguments.job, "[0-9]*.json"))
        print(report)
        return 0 if answers else 1
    if not arguments.command and words == ("attach",) and arguments.rank is not None:
        return attach(arguments.rank, arguments.job, arguments.wait)
    if not arguments.command and words == ("attach",):
        arguments.fail("attach needs a RANK: debug attach RANK")
    if not arguments.command or not words:
        arguments.fail("a command is needed: debug MODE -- COMMAND")
    variables = {knobs.debug.variable: ",".join(words)}
    prefix: list[str] = []
    tools = [word for word in words if word in modes.MODES and modes.MODES[word].is_sanitizer_tool]
    if modes.interpreter_checks(words) or "attach" in words:
        modes.check(words, modes.Environment(triton_version(), modes.INTERPRETER))
        variables |= {knobs.triton_interpret.variable: "1", knobs.device.variable: "cpu"}
    elif words != ("where",):
        modes.check(words, modes.Environment(triton_version(), modes.GPU, "".join(tools[:1])))
    reports = Path()
    if tools:
        program = sanitizer.find()
        if program is None:
            reason = sanitizer.not_found_message().rstrip(".")
            raise DebugModeRefused(tools[0], reason, modes.alternative_to(tools[0], modes.GPU))
        variables[knobs.debug_tool.variable] = tools[0]
        # Launches block under the tool. With this variable, ops exclude algorithms that would hang.
        variables["CUDA_LAUNCH_BLOCKING"] = "1"
        variables["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # one allocation per tensor
        for limit in (knobs.autotune_timeout, knobs.compile_timeout):
            variables[limit.variable] = str(_SANITIZER_SLOWDOWN * limit.get())
        reports = arguments.reports or Path(tempfile.mkdtemp(prefix="triton_dist-debug-"))
        reports.mkdir(parents=True, exist_ok=True)
        if sanitizer.starts_ranks(arguments.command):
            python = sanitizer.write_rank_python(program, tools[0], reports.resolve())
            variables["PYTHON_EXEC"] = str(python)
        else:
            prefix = sanitizer.command_prefix_with_children(program, tools[0], reports)
    ran = subprocess.run([*prefix, *arguments.command], env=knobs.environment() | variables)
    if tools:
        found = {
            path.stem: sanitizer.parse_report(path.read_text(encoding="utf-8", errors="replace"))
            for path in sorted(reports.glob("*.log"))
        }
        lines = [f"  {line}" for line in sanitizer.merge_reports(found)]
        print(f"{tools[0]}: {len(found)} reports in {reports}", *lines, sep="\n")
        if not found:
            print(f"{tools[0]}: no process of the command ran under the tool", file=sys.stderr)
            return ran.returncode or 1
    return ran.returncode if ran.returncode >= 0 else 128 - ran.returncode


_POLL_SECONDS = 0.05


def attach(rank: int, job: str | None, seconds: float) -> int:
    """Connect standard input and output to the pdb of a rank.

    Args:
        seconds: time limit for the rank to stop.

    Raises:
        NoSuchJob: no job matches, or several do.
        TimeoutError: the rank does not stop within ``seconds``.
    """
    from triton_dist.debugging import debugger
    from triton_dist.debugging.faults import NoSuchJob
    from triton_dist.debugging.rank_status import folder_of

    end = time.monotonic() + seconds
    while True:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                try:
                    folder = folder_of(job, debugger.socket_path(Path(), rank).name)
                except NoSuchJob:  # the rank has not stopped in any job: request a stop
                    folder = folder_of(job, "*")
                    debugger.stop_request_path(folder, rank).touch()
                connection.connect(str(debugger.socket_path(folder, rank)))
            except (NoSuchJob, OSError) as failure:
                if time.monotonic() < end:
                    time.sleep(_POLL_SECONDS)
                    continue
                if isinstance(failure, NoSuchJob):
                    raise
                debugger.stop_request_path(folder, rank).unlink(missing_ok=True)
                raise TimeoutError(
                    f"rank {rank} did not stop within {seconds:g} s: it did not reach a "
                    "dl.breakpoint and does not wait in a dl.wait of an interpreted kernel"
                ) from failure
            debugger.stop_request_path(folder, rank).unlink(missing_ok=True)
            _forward_input_and_output(connection, sys.stdin.buffer, sys.stdout.buffer)
            return 0


def _forward_input_and_output(
    connection: socket.socket, user_input: BinaryIO, user_output: BinaryIO
) -> None:
    """Forward the user's input to the rank, and its output to the user, until it continues."""
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        with suppress(OSError):  # epoll does not support regular files
            selector.register(user_input, selectors.EVENT_READ)
        if len(selector.get_map()) == 1:  # a regular file: send all of it
            connection.sendall(user_input.read())
            connection.shutdown(socket.SHUT_WR)
        while True:
            for key, _ in selector.select():
                if key.fileobj is connection:
                    output = connection.recv(1 << 16)
                    if not output:
                        return
                    user_output.write(output)
                    user_output.flush()
                elif line := os.read(user_input.fileno(), 1 << 16):
                    connection.sendall(line)
                else:
                    selector.unregister(user_input)
                    connection.shutdown(socket.SHUT_WR)
