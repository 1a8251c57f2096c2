"""Write the results of a GPU report into the documentation, and its records into the package.

    scripts/python benchmarks/gpu_pages.py gpu-report

The folder is the output of ``gpu_report.py``, or contains only packs (archives of tuning records).
From the JSON files of the report's steps, the command writes a page with a table for each step, the
step's commit and day, and a list of steps that did not run. Records of packs are merged into the
records that ship with the package; the latest result of each key is kept.
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
from triton_dist._tuning.store.packs import COLUMNS
from triton_dist._tuning.values import merge

PAGE = ROOT / "docs" / "explanation" / "performance-report.md"
RECORDS = ROOT / "python" / "triton_dist" / "records"
_TITLE = "What a GPU report measured"
_SHOWN = 20
"""Last lines of a log that are shown for a step without a table."""
Tree = dict[str, Any]


def page(folder: Path) -> str:
    """Return the page in Markdown."""
    report = json.loads((folder / "report.json").read_text("utf-8"))
    lines = [f"# {_TITLE}", "", "Written by `benchmarks/gpu_pages.py`.", ""]
    for part in ("hardware", "software"):
        lines += [f"{part}: " + ", ".join(f"{k} {v}" for k, v in report[part].items()), ""]
    left = []
    for step in STEPS:
        facts = report["steps"].get(step.name, {"state": "not asked for"})
        if facts["state"] == DONE:
            commit, day = facts["commit"], facts["when"][:10]
            lines += [
                f"## {step.name[0].upper()}{step.name[1:]}",
                "",
                f"Commit {commit}, {day}.",
                "",
            ]
            lines += [*_shown(step, folder), ""]
        else:
            left.append(f"- {step.name}: {facts['state']}")
    return "\n".join([*lines, *(["## Not measured", "", *left, ""] if left else [])])


def _shown(step: Step, folder: Path) -> Iterator[str]:
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
        yield from ("```text", *log.splitlines()[-_SHOWN:], "```")


def _markdown(table: Table) -> Iterator[str]:
    yield f"| {' | '.join(str(column.header) for column in table.columns)} |"
    yield "|---" * len(table.columns) + "|"
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        plain = (Text.from_markup(cell).plain if isinstance(cell, str) else "" for cell in cells)
        yield f"| {' | '.join(plain)} |"


def put_into_index(page: Path) -> None:
    """Add ``page`` to the index of the documentation, after the page performance.md."""
    index = page.parents[1] / "README.md"
    entry = f"- [{_TITLE}]({page.parent.name}/{page.name})"
    lines = index.read_text("utf-8").splitlines() if index.exists() else []
    places = [n for n, line in enumerate(lines) if "/performance.md)" in line]
    if places and entry not in lines:
        lines.insert(places[0] + 1, entry)
        index.write_text("\n".join(lines) + "\n", encoding="utf-8")


def ship(folder: Path, records: Path) -> list[Path]:
    """Merge the records of the packs in the folder into ``records``; return the files written."""
    written = []
    packs = [Pack(path) for path in sorted(folder.glob("*.tdpack"))]
    for tree in [json.loads(each.record(name)) for each in packs for name in each.records]:
        file = records / f"{tree['function']}.{tree['gpu'].replace(' ', '_')}.json"
        shipped = json.loads(file.read_text("ascii")) if file.exists() else {}
        # Lookups ignore results of an earlier version of the op.
        trees = [each for each in (shipped, tree) if each.get("version") == tree["version"]]
        file.write_text(readable_json(merge(trees), COLUMNS), encoding="ascii")
        written.append(file)
    return written


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="output of gpu_report.py")
    parser.add_argument("--page", type=Path, default=PAGE, help="default: %(default)s")
    parser.add_argument("--records", type=Path, default=RECORDS, help="default: %(default)s")
    options = parser.parse_args(arguments)
    written = ship(options.folder, options.records)
    if (options.folder / "report.json").exists() or not written:
        options.page.write_text(page(options.folder), encoding="utf-8")
        put_into_index(options.page)
        written.append(options.page)
    print(*written, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
