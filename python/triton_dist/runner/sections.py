"""Split a kernel's text into layouts, loops and the rest, to compare two kernels.

Each instruction belongs to the innermost loop that contains it. Names of values and registers,
source lines and addresses are removed, because they do not affect execution.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

LAYOUTS, OUTSIDE = "layouts", "outside of loops"
ListingLine = tuple[str, str, str]
"""(label or address, instruction, label to which the instruction may branch); "" if absent."""

_COMMENT = re.compile(r"//.*")
_LABEL = re.compile(r"(\$?[\w.$]+):(?!:)\s*(.*)")
_BRANCH = re.compile(r"\bbra(?:\.\w+)*\s+(\$?[\w.$]+)")
_REGISTER = re.compile(r"%[a-z]+\d+")
_SASS = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
_SASS_BRANCH = re.compile(r"\bBRA\b.*?\b0x([0-9a-f]+)$")
_SASS_REGISTER = re.compile(r"\b(U?[RP])\d+\b")
_LOCATION = re.compile(r" loc\(.*")
_OPERATION = re.compile(r'^(?:%[^=]* = )?"?([a-z_]\w*\.[\w.]+)')
_VALUE = re.compile(r"%[\w-]+(?:[:#]\d+)?")


@dataclass
class Section:
    """A part of a kernel: its lines, and the number of uses of each operation."""

    lines: list[str] = field(default_factory=list)
    operations: Counter[str] = field(default_factory=Counter)

    def add(self, line: str, operation: str) -> None:
        self.lines.append(line)
        self.operations[operation] += 1


def sections(level: str, text: str) -> Mapping[str, Section]:
    """Return the parts of ``text`` by name: ``layouts``, ``outside of loops``, ``loop 1``, ...
    ``level`` is one of ``LEVELS_WITH_SECTIONS``."""
    return _SECTION_FUNCTIONS[level](text)


def _ttgir_sections(text: str) -> dict[str, Section]:
    found: dict[str, Section] = {LAYOUTS: Section(), OUTSIDE: Section()}
    regions = [OUTSIDE]
    for raw in text.splitlines():
        line = _LOCATION.sub("", raw).strip()
        if line.startswith("#"):
            if not line.startswith("#loc"):
                found[LAYOUTS].add(line, line.partition(" = ")[0])
            continue
        operation = _OPERATION.match(line)
        if line.startswith("}"):
            inner = regions.pop() if len(regions) > 1 else OUTSIDE
        elif operation is not None:
            found[regions[-1]].add(_VALUE.sub("%", line), operation[1])
            inner = regions[-1]
            if operation[1] in ("scf.for", "scf.while"):
                inner = f"loop {len(found) - 1}"
                found[inner] = Section()
        else:
            inner = regions[-1]
        if line.endswith("{"):
            regions.append(inner)
    return found


def _ptx_lines(text: str) -> Iterator[ListingLine]:
    pending = ""
    for raw in text.splitlines():
        line = _COMMENT.sub("", raw).strip()
        label = _LABEL.fullmatch(line)
        if label is not None and not pending:
            yield label[1], "", ""
            line = label[2]
        if line.strip("{} ") == "" or (not pending and line.startswith((".", ")"))):
            continue
        pending = f"{pending} {line}".strip()
        if pending.endswith(";"):
            branch = _BRANCH.search(pending)
            yield "", pending.rstrip(";"), branch[1] if branch else ""
            pending = ""


def _sass_sections(text: str) -> dict[str, Section]:
    lines: list[ListingLine] = []
    for address, instruction in _SASS.findall(text):
        branch = _SASS_BRANCH.search(instruction)
        target = f"{int(branch[1], 16):x}" if branch else ""
        label = f"{int(address, 16):x}"
        if instruction == "NOP" or target == label:  # padding after the end of the kernel
            continue
        lines += [(label, "", ""), ("", instruction, target)]
    return _loop_sections(lines, _SASS_REGISTER, r"\1")


def _loop_sections(
    lines: list[ListingLine], register: re.Pattern[str], replacement: str
) -> dict[str, Section]:
    """Return the sections of a listing with labels. A backward branch ends a loop, which began at
    the branch's target. ``replacement`` replaces the names of registers."""
    index_of_label = {label: index for index, (label, _, _) in enumerate(lines) if label}
    ends: dict[int, int] = {}
    for index, (_, _, target) in enumerate(lines):
        if target and index_of_label.get(target, index) < index:
            ends[index_of_label[target]] = index
    names = {begin: f"loop {number}" for number, begin in enumerate(sorted(ends), 1)}
    found = {name: Section() for name in (OUTSIDE, *names.values())}
    for index, (_, instruction, _) in enumerate(lines):
        if instruction:
            enclosing = [begin for begin, end in ends.items() if begin <= index <= end]
            words = re.sub(r"^@!?%?\w+\s+", "", instruction)
            line = register.sub(replacement, re.sub(r"\$L\w+|\b0x[0-9a-f]+$", "…", words))
            found[names[max(enclosing)] if enclosing else OUTSIDE].add(line, words.split()[0])
    return found


_SECTION_FUNCTIONS: Mapping[str, Callable[[str], dict[str, Section]]] = {
    "ttgir": _ttgir_sections,
    "ptx": lambda text: _loop_sections(list(_ptx_lines(text)), _REGISTER, "%"),
    "sass": _sass_sections,
}
LEVELS_WITH_SECTIONS = tuple(_SECTION_FUNCTIONS)
