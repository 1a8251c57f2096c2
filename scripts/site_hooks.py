"""Hooks of MkDocs for the documentation site: pages of source files, tabs, and code blocks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = {
    "README.md": "Home",
    "Tutorials": "Tutorials",
    "How to": "How-to guides",
    "Reference": "Reference",
    "Api": "API",
    "Explanation": "Explanation",
    "Adr": "Decisions",
    "Source": "Source files",
    "glossary.md": "Glossary",
}
"""Title of each tab, by page or by the title that MkDocs derives from a folder, in order."""
_FENCE = re.compile(r"^( *```+)(\w+) (.+)$", re.MULTILINE)
_LINK = re.compile(r"\]\((\.\./[^)#\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each source file that pages link to."""
    linked = set()
    for file in files.documentation_pages():
        linked |= {_source_file(file, link) for link in _LINK.findall(file.content_string)}
    for path in sorted(filter(None, linked)):
        language = {".py": "python", ".toml": "toml", ".md": "markdown"}[Path(path).suffix]
        source = (ROOT / path).read_text(encoding="utf-8")
        content = f"# `{path}`\n\n````{language}\n{source}````\n"
        content = source if language == "markdown" else content
        files.append(File.generated(config, f"source/{path}.md", content=content))
    return files


def on_nav(nav: Any, **_: Any) -> Any:
    """Sort and name the tabs."""
    keys = {id(item): item.file.src_uri if item.is_page else item.title for item in nav.items}
    for item in nav.items:
        item.title = SECTIONS[keys[id(item)]]
    nav.items.sort(key=lambda item: list(SECTIONS).index(keys[id(item)]))
    return nav


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Link to pages of source files, and remove the word after the language of a code block.

    Tests read this word and Git hosts ignore it, but MkDocs would not recognise the block.
    """

    def link_to_source_page(found: re.Match[str]) -> str:
        path = _source_file(page.file, found[1])
        up = "../" * page.file.src_uri.count("/")
        return found[0] if path is None else f"]({up}source/{path}.md)"

    title = {"output": ' title="Output"'}
    markdown = _FENCE.sub(lambda found: found[1] + found[2] + title.get(found[3], ""), markdown)
    return _LINK.sub(link_to_source_page, markdown)


def _source_file(file: Any, link: str) -> str | None:
    """Return the path of a linked file outside docs/, relative to the repository; else ``None``."""
    path = (ROOT / "docs" / file.src_uri).parent.joinpath(link).resolve()
    path = path / "README.md" if path.is_dir() else path
    outside = path.is_file() and not path.is_relative_to(ROOT / "docs")
    return str(path.relative_to(ROOT)) if outside else None
