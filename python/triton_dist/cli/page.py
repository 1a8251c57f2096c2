"""Write the HTML page of a report: one file that needs no network.

Its only script sorts the tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from triton_dist._tuning.values.analysis import shown
from triton_dist.cli import cache, compare, plots
from triton_dist.cli.plots import Subject
from triton_dist.cli.show import spread

_ROWS = 300
"""Number of configs in the table, fastest first; `show --top` prints more."""

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em;
       color: #222; background: #fff }
h1 { font-size: 1.5em; overflow-wrap: anywhere } h2 { font-size: 1.15em; margin: 1.5em 0 .3em }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(24em, 1fr)); gap: 1.5em }
figure { margin: 0 } figure svg { width: 100%; height: auto } figcaption { font-weight: 600 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .15em .8em .15em 0; text-align: left; vertical-align: top }
th { border-bottom: 1px solid #999 } table.sortable th { cursor: pointer }
td.number { text-align: right } tr.winner { background: #e4efe2 }
code, pre { font-size: .9em; overflow-wrap: anywhere; white-space: pre-wrap }
.wide { overflow-x: auto }
"""

_SORT = """
for (const table of document.querySelectorAll("table.sortable"))
  table.tHead.rows[0].addEventListener("click", ({target}) => {
    const column = target.cellIndex, body = table.tBodies[0], cell = row => row.cells[column]
      .textContent, up = target.dataset.up = target.dataset.up === "1" ? "0" : "1";
    const order = (a, b) => cell(a).localeCompare(cell(b), undefined, {numeric: true});
    body.append(...[...body.rows].sort((a, b) => up === "1" ? order(a, b) : order(b, a)));
  });
"""


def html(subject: Subject) -> str:
    """Return the whole page."""
    return "\n".join(_lines(subject))


def _lines(subject: Subject) -> Iterator[str]:
    (record, where), found = subject.stored, subject.found
    yield '<!doctype html><html lang="en"><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width">'
    yield f"<title>{escape(record.key.function)}, a tuning</title><style>{_STYLE}</style>"
    yield f"<h1>{escape(record.key.full_name)}, key {escape(str(record.key))}</h1>"
    facts = [
        ["winner", _code(str(record.best)), f"{found.winner.ms:.4f} ms"],
        ["on", escape(cache.made_on(record)), ""],
        ["tuned", escape(record.timestamp), f"in {record.seconds:.1f} s"],
        ["file", _code(where), ""],
        *([["how", escape(record.warm_started_from), ""]] if record.warm_started_from else []),
        *([["all have", _code(shown(found.fixed, found.fixed)), ""]] if found.fixed else []),
    ]
    yield _table([], facts)
    yield '<div class="panels">'
    for title, svg in plots.svgs(subject):
        yield f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>"
    yield "</div>"
    if subject.changes is not None and subject.older is not None:
        yield f"<h2>What changed since {_code(subject.older.where)}</h2>"
        yield f"<pre>{escape(chr(10).join(compare.lines_of_changes(subject.changes)))}</pre>"
    count = f"the fastest {_ROWS} of {len(found.timed)}" if len(found.timed) > _ROWS else "all"
    yield f"<h2>Configs: {count}. A click on a heading sorts.</h2>"
    rows = [
        [
            str(place), f"{each.ms:.4f}", f"{found.ratio(each.ms):.3f}", spread(each.samples),
            str(len(each.samples)),
            *(escape(each.parameters.get(name, "-")) for name in found.varying),
        ]
        for place, each in enumerate(found.timed[:_ROWS], 1)
    ]  # fmt: skip
    heads = ["", "ms", "to best", "spread", "samples", *found.varying]
    yield '<div class="wide">'
    yield _table(heads, rows, marked=found.timed.index(found.winner), sortable=True)
    yield "</div>"
    yield from _ranks(subject)
    yield from _prices(subject)
    yield from _failures(subject)
    yield f"<script>{_SORT}</script></html>\n"


def _ranks(subject: Subject) -> Iterator[str]:
    """Yield the table of times by rank for the configs with most samples, fastest first."""
    known = subject.found.record.by_rank
    several = [each for each in subject.found.timed if each.trial.digest in known]
    if not several:
        return
    yield "<h2>By rank: median ms, and the share of samples in which the rank was the slowest</h2>"
    names = subject.found.varying
    rows = []
    for each in several:
        own = known[each.trial.digest]
        total = max(sum(own.slowest), 1)
        cells = (f"{ms:.4f}, {slow / total:.0%}" for ms, slow in zip(*own, strict=True))
        rows.append([_code(shown(each.parameters, names)), *cells])
    heads = [f"rank {rank}" for rank in range(len(rows[0]) - 1)]
    yield '<div class="wide">'
    winner = subject.found.winner
    place = several.index(winner) if winner in several else -1
    yield _table(["config", *heads], rows, marked=place)
    yield "</div>"


def _prices(subject: Subject) -> Iterator[str]:
    found = subject.found
    if not found.varying:
        return
    yield "<h2>Parameters: share of the variance, and cost of fixing a value</h2>"
    yield _table(
        ["parameter", "variance share", "fastest config with the value, relative to the winner"],
        [
            [
                _code(name),
                f"{share:.0%}",
                ", ".join(f"{_code(value)} {p:+.1%}" for value, p in found.price(name).items()),
            ]
            for name, share in found.ranked()
        ],
    )


def _failures(subject: Subject) -> Iterator[str]:
    found = subject.found
    if found.failed:
        yield "<h2>Failures</h2>"
        rows = [[escape(f.kind), str(f.count), _code(f.first[:500])] for f in found.failed]
        yield _table(["kind", "configs", "message of the first"], rows)
    if found.pruned:
        yield "<h2>Pruned</h2>"
        yield _table(["config", "reason"], [[*map(_code, each)] for each in found.pruned])
    if always := found.always_failed():
        values = ", ".join(f"{_code(f'{name}={value}')} ({count})" for name, value, count in always)
        yield f"<p>Nothing could be measured with {values}.</p>"


def _table(
    heads: Iterable[str], rows: Sequence[Sequence[str]], marked: int = -1, sortable: bool = False
) -> str:
    """Return a table; cells are HTML, ``heads`` are text. Row ``marked`` is the winner's."""
    head = "".join(f"<th>{escape(name)}" for name in heads)
    body = "\n".join(
        f"<tr{' class=winner' if place == marked else ''}>" + "".join(f"<td>{c}" for c in row)
        for place, row in enumerate(rows)
    )
    kind = " class=sortable" if sortable else ""
    return f"<table{kind}>{f'<thead><tr>{head}</thead>' if head else ''}<tbody>{body}</table>"


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"
