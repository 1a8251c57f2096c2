"""Write the results of a GPU report into the documentation, and its records into the package.

    scripts/python benchmarks/gpu_pages.py gpu-report

The folder is the output of ``gpu_report.py``, or has only packs (archives of tuning records). The
page has a table for each step that ran, with its commit and day, and lists the other steps. The
records in packs are merged into the records that ship with the package; of two results of a key,
the later one is kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import bench_collectives
from gpu_report import DONE, ROOT, STEPS, Step
from overlap import any_m
from overlap.table import summary_table
from rich.table import Table
from rich.text import Text

from triton_dist._archive import Pack
from triton_dist._tuning.store.layout import readable_json
from triton_dist._tuning.store.packs import LINE_WIDTH
from triton_dist._tuning.values import merge

PAGE = ROOT / "docs" / "explanation" / "performance-report.md"
RECORDS = ROOT / "python" / "triton_dist" / "records"
_TITLE = "What a GPU report measured"
_LOG_LINES = 20
"""Number of last log lines that the page shows for a step without a table."""
Tree = dict[str, Any]


def page(folder: Path) -> str:
    """Return the page about the report in ``folder``, in Markdown."""
    report = json.loads((folder / "report.json").read_text("utf-8"))
    lines = [f"# {_TITLE}", "", "Written by `benchmarks/gpu_pages.py`.", ""]
    for part in ("hardware", "software"):
        lines += [f"{part}: " + ", ".join(f"{k} {v}" for k, v in report[part].items()), ""]
    missing = []
    for step in STEPS:
        result = report["steps"].get(step.name, {"state": "not selected"})
        if result["state"] == DONE:
            lines += [f"## {step.name[0].upper()}{step.name[1:]}", ""]
            lines += [f"Commit {result['commit']}, {result['when'][:10]}.", ""]
            lines += [*_results(step, folder), ""]
        else:
            missing.append(f"- {step.name}: {result['state']}")
    return "\n".join([*lines, *(["## Not measured", "", *missing, ""] if missing else [])])


def _results(step: Step, folder: Path) -> Iterator[str]:
    """Yield the lines of the step's table, or else the end of its log."""
    path = folder / f"{step.file}.json"
    tree = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if "shapes" in tree:
        yield from _markdown(summary_table(tree))
    elif "points" in tree:
        yield from ("```text", *any_m.summary(tree["points"]), "```")
    elif "sizes" in tree:
        for table in bench_collectives.tables(tree):
            yield from (str(table.title), "", *_markdown(table), "")
    else:
        log = (folder / f"{step.file}.log").read_text("utf-8", errors="replace")
        yield from ("```text", *log.splitlines()[-_LOG_LINES:], "```")


def _markdown(table: Table) -> Iterator[str]:
    yield f"| {' | '.join(str(column.header) for column in table.columns)} |"
    yield "|---" * len(table.columns) + "|"
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        plain = (Text.from_markup(cell).plain if isinstance(cell, str) else "" for cell in cells)
        yield f"| {' | '.join(plain)} |"


def add_to_index(page: Path) -> None:
    """Add ``page`` to the index of the documentation, after the entry of performance.md."""
    index = page.parents[1] / "README.md"
    entry = f"- [{_TITLE}]({page.parent.name}/{page.name})"
    lines = index.read_text("utf-8").splitlines() if index.exists() else []
    before = [n for n, line in enumerate(lines) if "/performance.md)" in line]
    if before and entry not in lines:
        lines.insert(before[0] + 1, entry)
        index.write_text("\n".join(lines) + "\n", encoding="utf-8")


def merge_packs(folder: Path, records: Path) -> list[Path]:
    """Merge the packs in ``folder`` into the records in ``records``; return the written files."""
    written = []
    packs = [Pack(path) for path in sorted(folder.glob("*.tdpack"))]
    for tree in [json.loads(each.read_records(name)) for each in packs for name in each.records]:
        file = records / f"{tree['function']}.{tree['gpu'].replace(' ', '_')}.json"
        shipped = json.loads(file.read_text("ascii")) if file.exists() else {}
        # Drop shipped results of an earlier version of the op: lookups would ignore them.
        trees = [each for each in (shipped, tree) if each.get("version") == tree["version"]]
        file.write_text(readable_json(merge(trees), LINE_WIDTH), encoding="ascii")
        written.append(file)
    return written


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="output folder of gpu_report.py")
    parser.add_argument("--page", type=Path, default=PAGE, help="file; default: %(default)s")
    parser.add_argument(
        "--records", type=Path, default=RECORDS, help="folder; default: %(default)s"
    )
    options = parser.parse_args(arguments)
    written = merge_packs(options.folder, options.records)
    if (options.folder / "report.json").exists() or not written:
        options.page.write_text(page(options.folder), encoding="utf-8")
        add_to_index(options.page)
        written.append(options.page)
    print(*written, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
