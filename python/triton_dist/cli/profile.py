"""``profile``: record a timeline of all ranks of a program, and print the rates of its ops."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triton_dist import _files, knobs
from triton_dist._warn import printable
from triton_dist.cli import site
from triton_dist.cli.subcommand import add_command, add_subcommand, counted
from triton_dist.cli.text import print_json, print_lines, table, wrapped
from triton_dist.errors import InvalidArgument, MissingExtra

if TYPE_CHECKING:
    from triton_dist.timelines.summary import OpSummary

_DEFAULT_FILE = Path("profile.json.gz")
_COLUMNS = ("op", "calls", "ms", "skew us", "TFLOP/s", "GB/s", "link", "bound by", "share")


def add_to(subcommands: Any) -> None:
    parser = add_subcommand(
        subcommands,
        "profile",
        _run,
        help="record a timeline of all ranks of a command, and print the rates of its ops",
        description="Runs COMMAND under torch.profiler and merges the timelines of all ranks into "
        "one file for Perfetto or chrome://tracing. Each call of a tuned function is a scope. The "
        "scope of an op has the op's FLOPs, its bytes of memory traffic, and its bytes over the "
        "links to other ranks. `show FILE` prints for each op the time of the slowest rank, the "
        "rates of one rank, the resource that limits the op, and the share of this resource's peak "
        "that the op reaches. --png draws a roofline plot. Calls that tune are left out of the "
        "results, so run COMMAND once before profiling.",
        examples=[
            "profile -- torchrun --nproc-per-node=2 script.py",
            "profile --calls 10:20 --out p.json.gz -- python script.py",
            "profile --marks --calls 4:6 -- python script.py",
            "profile show p.json.gz",
            "profile show p.json.gz --png roofline.png",
        ],
    )
    parser.add_argument("show", nargs="?", choices=["show"], help="print the ops of a timeline")
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="with show: a timeline")
    parser.add_argument(
        "--out",
        type=Path,
        default=_DEFAULT_FILE,
        metavar="FILE",
        help=f"output file (default: {_DEFAULT_FILE})",
    )
    parser.add_argument(
        "--calls", metavar="FIRST:LAST",
        help="calls of tuned functions to record, counted from 0 in each process; call LAST is not "
        "recorded (default: 1:1001, because call 0 compiles)",
    )  # fmt: skip
    parser.add_argument(
        "--marks",
        action="store_true",
        help="also record the phases (marks) of each kernel program: wait, load, multiply, store, "
        "push; record few calls, because each call makes many marks, which slow kernels down",
    )
    parser.add_argument("--json", action="store_true", help="with show: print JSON")
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="with show: write a roofline plot to FILE"
    )
    add_command(parser)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.show and arguments.file and not arguments.command:
        return _show(arguments.file, arguments.json, arguments.png)
    if arguments.show or not arguments.command:
        arguments.fail("a command or a file is needed: profile -- COMMAND, or profile show FILE")
    _files.check_writable(arguments.out)
    calls = arguments.calls or ":".join(map(str, knobs.profile_calls.default))
    try:
        knobs.profile_calls.parse(calls)
    except ValueError as error:
        expected = f"{knobs.profile_calls.expected}, FIRST below LAST"
        raise InvalidArgument("profile", "--calls", calls, expected) from error
    with tempfile.TemporaryDirectory(prefix="triton_dist-profile-") as folder:
        variables = {
            knobs.profile_dir.variable: folder,
            knobs.profile_calls.variable: calls,
            knobs.profile_marks.variable: str(int(arguments.marks)),
        }
        status = site.run(arguments.command, variables)
        from triton_dist.timelines import recording

        files = recording.files_of_ranks(Path(folder), recording.FILE_ENDING)
        failed = [
            each.read_text() for each in sorted(Path(folder).glob(f"*{recording.FAILURE_SUFFIX}"))
        ]
        if not files:
            first = calls.partition(":")[0]
            reason = f"no process reached call {first} of a tuned function and exited normally"
            reason = "; ".join(failed) or reason
            print(f"triton-dist profile: nothing recorded: {printable(reason)}", file=sys.stderr)
            return status or 1
        merged = Path(folder, "merged", arguments.out.name)  # --out may be a pipe
        recording.merge_files(files, merged)
        _files.write(arguments.out, merged.read_bytes())
        print(f"{arguments.out}: timeline of {_counted([r for r, _ in files])}", file=sys.stderr)
        for each in failed:
            print(f"triton-dist profile: missing: {printable(each)}", file=sys.stderr)
        _show(merged, False, None)
    return status if status >= 0 else 128 - status


def _show(file: Path, as_json: bool, png: Path | None) -> int:
    # Imported here because other subcommands do not need the modules that read traces.
    from triton_dist.timelines import trace
    from triton_dist.timelines.summary import summaries

    try:
        content = trace.read(file)
        ranks = content[trace.METADATA_KEY]["ranks"]
    except (ValueError, KeyError, TypeError, EOFError) as error:
        expected = "a timeline that triton-dist profile or group_profile(tool='torch') has merged"
        raise InvalidArgument("profile show", "FILE", str(file), expected) from error
    found = summaries(trace.metadata_of_calls(content))
    if png is not None:
        try:
            from triton_dist.cli import roofline
        except ImportError as error:
            raise MissingExtra("triton-dist profile show --png", "matplotlib", "bench") from error
        _files.write(png, roofline.png(found, ranks[0]["peak"], ranks[0]["gpu"]))
    if as_json:
        print_json({"file": str(file), "ranks": ranks, "ops": [each.tree() for each in found]})
    else:
        print_lines(*_lines(found, ranks))
    return 0 if found else 1


def _lines(found: Sequence[OpSummary], ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    hosts = sorted({rank["host"] for rank in ranks})
    numbers = [rank["rank"] for rank in ranks]
    lines = [f"{_counted(numbers)} on {counted(len(hosts), 'host')}, {ranks[0]['gpu']}"]
    if ranks[0]["device"] != "cuda":
        lines += wrapped("shares refer to the peaks of an H200 and are meaningless on CPU ranks", 0)
    if not found:
        return [*lines, "no call of a tuned function was recorded"]
    head, *rows = table(_COLUMNS, [*map(_row, found)], left=("op",))
    lines.append(head)
    for each, row in zip(found, rows, strict=True):
        lines.append(row)
        notes = [" ".join(filter(None, (each.shape, each.dtype)))]
        notes += [f"{each.num_ranks} ranks"] * (each.num_ranks > 1)
        notes += [f"program {each.run + 1}"] * (len(set(numbers)) < len(numbers))
        by_rank = [f"{ms:.4g}" for ms in each.ms_by_rank.values()]
        notes += [f"ms by rank: {', '.join(by_rank)}"] * (len(by_rank) > 1)
        notes += [f"{counted(each.tuned_calls, 'call')} tuned, left out"] * bool(each.tuned_calls)
        lines += wrapped("  " + "; ".join(filter(None, notes)), 4) if any(notes) else []
        if each.marks:
            shares = ", ".join(f"{name} {share:.0%}" for name, share in each.marks.items())
            lines += wrapped(f"  share of kernel program time: {shares}", 4)
    made = [rank.get("marks", {"kept": 0, "made": 0}) for rank in ranks]
    lost = sum(each["made"] - each["kept"] for each in made)
    if lost:
        lines += wrapped(f"{lost} marks are missing: the buffer was full; profile fewer calls", 0)
    return lines


def _row(each: OpSummary) -> list[str]:
    rates = (_number(rate, 1) for rate in (each.tflops, each.gbps, each.link_gbps))
    share = "-" if each.share is None else f"{each.share:.0%}"
    numbers = (str(each.calls), _number(each.ms, 4), f"{each.skew_us:.0f}", *rates)
    return [each.op, *numbers, each.bound or "-", share]


def _counted(ranks: Sequence[int]) -> str:
    """Return the number of ranks as text. If a rank had several processes, add their number."""
    each = counted(len(set(ranks)), "rank")
    return each if len(set(ranks)) == len(ranks) else f"{each}, {len(ranks)} processes"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
