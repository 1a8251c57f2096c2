"""No module outgrows one sitting of reading."""

from __future__ import annotations

from tests.architecture.source import modules, name

LONGEST = 620
"""Think again above 400, but do not split a class or a function to satisfy a number."""


def test_no_module_is_too_long() -> None:
    counts = {name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in modules()}
    assert not {module: count for module, count in counts.items() if count > LONGEST}
