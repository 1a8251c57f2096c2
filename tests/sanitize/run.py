"""Run a little of each op under compute-sanitizer, on ranks that may share one GPU.

    python tests/sanitize/run.py                              all tools, all ops, 2 ranks
    python tests/sanitize/run.py --tools racecheck gemm_rs    one tool, one op

Each op in runs of its own: the first without a tool, so that kernels are compiled and the op is
known to be right, then one with each tool, which finds the kernels on disk. The exit status is the
number of runs of which something was reported, that failed, or that did not end.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "python")]

import torch.distributed as dist  # noqa: E402

from triton_dist.debugging import sanitizer as reports  # noqa: E402

_GRACE = 20.0  # seconds for the others once a rank has failed
_STACKS = 5.0  # seconds before the end of a run in which ranks say where they are
_NO_TOOL = "no tool"
OPS = ("ag_gemm", "gemm_rs", "gemm_ar", "all_reduce", "reduce_scatter", "all_gather")


class Ranks:
    """Processes of one world, each with a tool before its command, or none."""

    def __init__(self, size: int, program: Path | None, tool: str, op: str, options: Any):
        name = f"{op}-{tool.replace(' ', '-')}"
        self.logs = [options.logs / f"{name}-{rank}.log" for rank in range(size)]
        self.outputs = [log.with_suffix(".out") for log in self.logs]
        # Torch's rendezvous, on a port that nobody can take meanwhile.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._store, self._processes = store, []
        world = {
            "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TRITON_DIST_DEVICE": options.device, "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": f"{ROOT / 'python'}:{os.environ.get('PYTHONPATH', '')}",
        }  # fmt: skip
        if options.device == "cpu":
            world |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        else:
            world["TRITON_DIST_SHARE_GPUS"] = "1"
        arguments = [op, "--seconds", str(max(options.seconds - _STACKS, 1.0))]
        if program is None:
            arguments.append("--compile")
        else:
            if tool == "racecheck":  # under which torch.matmul ended in an illegal address
                arguments.append("--own")
            world["CUDA_LAUNCH_BLOCKING"] = "1"  # as the tools do: some ways ask for it
            if not options.torch_cache:
                # A tensor, an allocation: else all lie in large ones of torch's.
                world["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        inherited = {name: each for name, each in os.environ.items() if name != "TRITON_INTERPRET"}
        for rank, (log, output) in enumerate(zip(self.logs, self.outputs, strict=True)):
            before = reports.command(program, tool, log) if program else []
            with output.open("w") as file:
                self._processes.append(
                    _start(
                        [*before, sys.executable, str(ROOT / "tests/sanitize/rank.py"), *arguments],
                        inherited | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                        file,
                    )
                )

    def wait(self, seconds: float) -> list[int | None]:
        """Exit statuses; ``None`` for a rank that was ended because time was over, or because it
        went on for long after another had failed."""
        deadline = time.monotonic() + seconds
        failed = False
        try:
            while any(process.poll() is None for process in self._processes):
                statuses = [process.poll() for process in self._processes]
                if not failed and any(status not in (None, 0) for status in statuses):
                    failed, deadline = True, min(deadline, time.monotonic() + _GRACE)
                if time.monotonic() > deadline:
                    break
                time.sleep(0.1)
        finally:
            ended = [self._end(process) for process in self._processes]
        return ended

    def _end(self, process: subprocess.Popen[bytes]) -> int | None:
        status = process.poll()
        with suppress(ProcessLookupError):  # the tool's child too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return status


def _start(command: list[str], environment: dict[str, str], output: IO[str]) -> Any:
    return subprocess.Popen(
        command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )


def verdict(status: int | None, report: reports.Report | None, output: str) -> str:
    """What is wrong with a rank; empty: nothing."""
    if report is not None and not report.is_clean:
        return str(report)
    last = "".join([line for line in output.splitlines() if line.strip()][-1:])
    if status is None:
        return f"did not end: {last}" if last else "did not end"
    if status != 0:
        return f"exited with status {status}: {last}"
    if "calls are right" not in output:
        return "made no calls"
    return ""


def _run(program: Path | None, tool: str, op: str, options: Any) -> bool:
    """One run; prints its line, and below it what was found. True if all is well."""
    begin = time.monotonic()
    ranks = Ranks(options.ranks, program, tool, op, options)
    statuses = ranks.wait(options.seconds)
    found = {}
    for rank, status in enumerate(statuses):
        log, output = ranks.logs[rank], ranks.outputs[rank].read_text(errors="replace")
        text = log.read_text(errors="replace") if log.exists() else ""
        wrong = verdict(status, reports.parse_report(text) if program else None, output)
        if wrong:
            found[rank] = wrong
    seconds = time.monotonic() - begin
    state = "reported" if found else "clean" if program else "right"
    print(f"{op:<16} {tool:<10} {state:<9} {seconds:6.1f} s", flush=True)
    for rank, wrong in found.items():
        print(f"    rank {rank}: {wrong} (see {ranks.outputs[rank]})", flush=True)
    return not found


def _sanitized(op: str, tools: list[str], program: Path, options: Any) -> int:
    """Runs of ``op`` that were not well; where the first is not, the others would not be."""
    if not _run(None, _NO_TOOL, op, options):
        return 1
    return sum(not _run(program, tool, op, options) for tool in tools)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("ops", nargs="*", default=list(OPS), help=f"of {', '.join(OPS)}")
    parser.add_argument("--tools", default=",".join(reports.TOOLS), help="default: %(default)s")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=120.0, help="of one run at most")
    parser.add_argument(
        "--torch-cache", action="store_true",
        help="torch's allocator as it is: quicker, but one tensor's end is another's start",
    )  # fmt: skip
    parser.add_argument("--logs", type=Path, help="folder; default: a new one")
    parser.set_defaults(device="cuda")
    options = parser.parse_args()
    tools = options.tools.split(",")
    unknown = [f"{each!r}" for each in tools if each not in reports.TOOLS]
    unknown += [f"{each!r}" for each in options.ops if each not in OPS]
    if unknown:
        parser.error(f"{', '.join(unknown)}: expected tools of {reports.TOOLS}, ops of {OPS}")
    program = reports.find()
    if program is None:
        print(reports.not_found_message(), file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ranks are ended on the way out
    print(f"using {program}", flush=True)
    options.logs = options.logs or Path(tempfile.mkdtemp(prefix="triton_dist_sanitize_"))
    options.logs.mkdir(parents=True, exist_ok=True)
    return sum(_sanitized(op, tools, program, options) for op in options.ops)


if __name__ == "__main__":
    sys.exit(main())
