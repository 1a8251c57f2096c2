"""Print the average sentence length and the longest sentence of pages, in words.

    sentences.py [PAGE ...]     default: README, how-to pages and tutorials

Each item of a list and each cell of a table starts a sentence, and a colon ends one. A code span is
one word; code blocks and headings do not count.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def paragraphs(text: str) -> Iterator[str]:
    """Yield paragraphs, items of lists and cells of tables of a Markdown page."""
    text = re.sub(r"^ *```.*?^ *```$|<!--.*?-->", "\n\n", text, flags=re.M | re.S)
    text = re.sub(r"`[^`\n]*`", "CODE", text)  # may hold a | or a full stop
    lines: list[str] = []
    for line in [*map(str.strip, text.splitlines()), ""]:
        item = re.match(r"([-*+]|\d+\.)\s+", line)
        if lines and (item or not line or line[0] in "|#"):
            yield " ".join(lines)
            lines = []
        if line.startswith("|"):
            yield from line.strip("|").split("|")
        elif line and not re.match("#|:::", line):
            lines.append(line[item.end() :] if item else line)


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield (number of words, sentence) of a page, except fragments of less than six words."""
    for paragraph in paragraphs(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph).replace("**", "")
        for sentence in re.split(r"(?<=[.!?:])[)\"]?\s+(?=[A-Z(\"*0-9])", plain):
            words = sum(bool(re.search(r"\w", word)) for word in sentence.split())
            if words >= 6:
                yield words, sentence.strip()


def lengths(pages: list[Path]) -> tuple[float, int, str]:
    """Return the average length, the largest length, and the longest sentence with its page."""
    found = [
        (words, f"{page.name}: {sentence}")
        for page in pages
        for words, sentence in sentences(page.read_text("utf-8"))
    ]
    return sum(words for words, _ in found) / len(found), *max(found)


GROUPS = {"README": "README.md", "how-to": "docs/how-to/*.md", "tutorials": "docs/tutorials/*.md"}


def main() -> None:
    groups = {name: sorted(ROOT.glob(pattern)) for name, pattern in GROUPS.items()}
    if sys.argv[1:]:
        groups = {"pages": [Path(page) for page in sys.argv[1:]]}
    for name, pages in groups.items():
        average, max_words, longest = lengths(pages)
        print(f"{name}: {average:.1f} words on average, longest {max_words}: {longest}")


if __name__ == "__main__":
    main()
