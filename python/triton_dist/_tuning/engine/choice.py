"""The choices of a tuned function, and the rules by which calls reuse them.

The first call with a recorded winner may fail: another driver or compiler may need more shared
memory or reject a kernel. If that happens on one rank, all ranks must tune again, so the ranks
exchange one message after the first call. Later calls send no message.

A function whose key is new in each call is tuned in each call, and a warning reports it. To detect
this without a counter on the hot path, a tuned key becomes a hit only at its second call, which
proves that the key repeats. The first few keys of a function become hits immediately.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from triton_dist._tuning.sizes.size_table import SizeTable
from triton_dist._tuning.values import Config, TuningRecord
from triton_dist._tuning.values.show import error_text

_IMMEDIATE_HITS = 4
"""The first keys of a function, which become hits immediately."""
_MAX_UNREPEATED = 16
"""Number of consecutive keys that were tuned and not called again before a warning."""


class NewKeys:
    """The latest keys of one function that were tuned and not called again."""

    def __init__(self) -> None:
        self._tuned = 0
        self._waiting: dict[Hashable, None] = {}
        self._is_over = False

    def delays_hit(self, key: Hashable) -> bool:
        """Note a tuned key. Return whether it becomes a hit only at its second call."""
        self._tuned += 1
        if self._tuned <= _IMMEDIATE_HITS or self._is_over:
            return False
        self._waiting[key] = None
        return True

    def called_again(self, key: Hashable) -> None:
        """Note a call of a known key that is not a hit."""
        if key in self._waiting:
            self._waiting.clear()

    def advice(self, function: str, sizes: Collection[str]) -> str:
        """Return the warning about a part that varies, other than ``sizes``, once if it is due."""
        if len(self._waiting) < _MAX_UNREPEATED:
            return ""
        keys = list(self._waiting)
        self._waiting.clear()
        parts = [part for part in _varying(keys) if part[0].partition(".")[2] not in sizes]
        if not parts:
            return ""
        self._is_over = True
        varying = "; ".join(
            f"{path}, latest values {', '.join(f'{value!r:.80}' for value in values[-3:])}"
            for path, values in parts[:3]
        )
        return (
            f"{function}: {len(keys)} consecutive keys were tuned and not called again. Varying "
            f"parts: {varying}. If a part has a new value in each call, each call is tuned. Name "
            "the part in sizes=(...) of autotune, so that one tuning serves a range of values, "
            "or remove it from the key"
        )


def _varying(
    values: Sequence[Hashable], path: str = "key"
) -> Iterator[tuple[str, Sequence[Hashable]]]:
    """Yield the parts that differ between ``values``: the path of the part and its values."""
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


_logger = logging.getLogger("triton_dist.tuning")
_CONFIG_ERRORS = {"OutOfResources", "CompilationError", "PTXASError", "CandidateFailed"}
"""Names of exception classes that blame the config; triton is not imported here. Running out of
device memory is not included, because other allocations of the program may cause it."""
_FAILED_PASS = "PassManager::run failed"
"""Triton's text for a failed compiler pass. Triton raises a plain ``RuntimeError``."""


def blames_config(error: Exception) -> bool:
    """Return whether the error blames the config, which another compiler build may reject."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return not names.isdisjoint(_CONFIG_ERRORS) or _FAILED_PASS in error_text(error)


def add_note(error: Exception, text: str) -> None:
    """Attach ``text`` to ``error``.

    Python before 3.11 has no notes: append the text to the message, or log it.
    """
    if hasattr(error, "add_note"):
        error.add_note(text)
    elif len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{text}",)
    else:
        _logger.warning("%s", text)


@dataclass(frozen=True)
class Choice:
    """The config of a key, and its origin."""

    config: Config
    record: TuningRecord | None
    """``None``: nothing could be tuned. The config is the default, for this call only."""
    is_reusable: bool = True
    """Later calls use the choice too."""
    size_table: SizeTable | None = None
    """Configs by exact size within the range of the key."""
    first_use: Callable[[Callable[[], Any]], tuple[Any, str]] | None = None
    """Makes the first call with the winner of a record. Set in the call that found the record."""
    tuned: bool = False
    """The config was tuned in this call."""
    advice: str = ""
    """Warning that explains why the key was tuned again."""
    changed: tuple[str, ...] = ()
    """Names of arguments that trials changed in place and that nothing restored."""

    def for_sizes(self, sizes: tuple[int, ...]) -> Choice:
        """Return the choice for exact sizes."""
        return (
            self
            if self.size_table is None
            else replace(self, config=self.size_table.config_for(sizes[0]))
        )


@dataclass
class Choices:
    """The choices of one tuned function, valid until the group of all ranks changes."""

    by_ranks: dict[Any, Choice] = field(default_factory=dict)
    """Choices by ranks and key."""
    hits: dict[Any, dict[str, Any]] = field(default_factory=dict)
    """Arguments by exact key, for calls without a process group."""
    group_hits: dict[Any, dict[Any, dict[str, Any]]] = field(default_factory=dict)
    """Arguments by process group and exact key."""
    ranges: dict[Any, Choice] = field(default_factory=dict)
    """Choices by process group and range. Unlike exact keys, ranges are never evicted."""
    max_cached_keys: int = 0
    """Maximum number of cached exact keys."""
    new_keys: NewKeys = field(default_factory=NewKeys)
    """Keys that were tuned and may not repeat."""

    def keep(self, group: Any, key: Any, arguments: dict[str, Any]) -> None:
        """Cache the arguments of an exact key, and evict the oldest key if the cache is full."""
        hits = self.hits if group is None else self.group_hits.setdefault(group, {})
        # A dict keeps the insertion order, so its first key is the oldest.
        while len(hits) >= self.max_cached_keys:
            with suppress(KeyError, StopIteration, RuntimeError):  # another thread evicted it
                del hits[next(iter(hits))]
        hits[key] = arguments

    def drop_destroyed(self, is_destroyed: Callable[[Any], bool]) -> None:
        """Drop the choices of destroyed process groups.

        A program may create many groups in its lifetime.
        """
        tables: list[tuple[dict[Any, Any], Callable[[Any], bool]]] = [
            (self.group_hits, is_destroyed),
            (self.ranges, lambda key: is_destroyed(key[0])),
            (self.by_ranks, lambda key: not key[0].is_current()),
        ]
        for table, is_gone in tables:
            for key in list(table):  # a copy, because other threads may add keys
                if is_gone(key):
                    table.pop(key, None)
