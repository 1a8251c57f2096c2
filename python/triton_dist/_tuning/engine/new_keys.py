"""Warn when a function is tuned in each call, because its key is a new one each time.

Hits are not counted, so that they cost nothing. Instead a tuned key becomes a hit only at its
second call, which shows that it came again. The first few keys of a function become hits at once.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence

_HITS_AT_ONCE = 4
"""Keys of a function, the first ones."""
_MANY = 16
"""Keys in a row that were tuned and not called again, from which on there is a warning."""


class NewKeys:
    """The latest keys of one function that were tuned and not called again."""

    def __init__(self) -> None:
        self._tuned = 0
        self._waiting: dict[Hashable, None] = {}
        self._is_over = False

    def waits(self, key: Hashable) -> bool:
        """Note a key that was tuned; return whether it is to become a hit at its second call."""
        self._tuned += 1
        if self._tuned <= _HITS_AT_ONCE or self._is_over:
            return False
        self._waiting[key] = None
        return True

    def again(self, key: Hashable) -> None:
        """Note a call of a known key that is not a hit."""
        if key in self._waiting:
            self._waiting.clear()

    def advice(self, function: str, sizes: Collection[str]) -> str:
        """Return the warning, once; else an empty text.

        Args:
            sizes: names of sizes in the keys, which may vary.
        """
        if len(self._waiting) < _MANY:
            return ""
        keys = list(self._waiting)
        self._waiting.clear()
        parts = [part for part in _varying(keys) if part[0].partition(".")[2] not in sizes]
        if not parts:
            return ""
        self._is_over = True
        varying = "; ".join(
            f"{path}, lately {', '.join(f'{value!r:.80}' for value in values[-3:])}"
            for path, values in parts[:3]
        )
        return (
            f"{function}: {len(keys)} keys in a row were tuned and not called again. What varies "
            f"in them: {varying}. If it has another value in each call, each call is tuned: name "
            "it in sizes=(...) of autotune, so that a tuning serves a range of values, or leave it "
            "out of the key"
        )


def _varying(
    values: Sequence[Hashable], path: str = "key"
) -> Iterator[tuple[str, Sequence[Hashable]]]:
    """Yield the parts that are not the same in all ``values``: where each is, and what it was."""
    first = values[0]
    if len(set(values)) == 1:
        return
    if not all(isinstance(v, tuple) and len(v) == len(first) for v in values):  # type: ignore[arg-type]
        yield path, values
        return
    names = getattr(first, "_fields", ())
    for place, each in enumerate(zip(*values, strict=True)):
        name = f".{names[place]}" if place < len(names) else f"[{place}]"
        yield from _varying(each, f"{path}{name}")
