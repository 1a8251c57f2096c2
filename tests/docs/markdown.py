"""The documentation's pages, and what is in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    """Of its first line of text, counted from 1."""
    language: str
    words: tuple[str, ...]
    """What follows the language in the info string."""
    text: str
    expected: str | None = None
    """What it prints, where a ``text output`` block follows it; ``...`` stands for anything."""

    @property
    def id(self) -> str:
        return f"{name(self.page)}:{self.line}"

    @property
    def ranks(self) -> int:
        """Processes that it is for, by ``ranks=N``; 0 if it names none."""
        named = [word for word in self.words if word.startswith("ranks=")]
        return int(named[0].partition("=")[2]) if named else 0

    @property
    def is_program(self) -> bool:
        """Whether it is a file of its own, and not a part of its page's one program."""
        return "script" in self.words or self.ranks > 0


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@cache
def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


@cache
def blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^```(\w*)([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        language, words, content = match[1], tuple(match[2].split()), match[3]
        if language == "text" and words == ("output",):
            assert found, f"{name(page)}: an output without a program before it"
            found[-1] = Block(**{**vars(found[-1]), "expected": content})
            continue
        line = text.count("\n", 0, match.start(3)) + 1
        found.append(Block(page, line, language, words, content))
    return found


def all_blocks(language: str) -> list[Block]:
    return [block for page in pages() for block in blocks(page) if block.language == language]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def headings(page: Path) -> list[str]:
    return re.findall(r"^#+ +(.*?) *$", prose(page), re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What a link may name after ``#``: the headings as GitHub writes them."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings(page)
    }
