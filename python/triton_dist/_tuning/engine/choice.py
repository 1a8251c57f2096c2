"""Keep the chosen configs of a tuned function, for reuse in later calls.

A *hit* is a call whose exact key is cached with the values of the tuned arguments. A hit does
nothing but this look-up.

If each call has a new key, each call tunes, and a warning reports this. To detect it without a
counter in hits, a tuned key is cached only at its second call, which proves that keys repeat. The
first four keys of a function are cached immediately.
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

_NUM_CACHED_IMMEDIATELY = 4
"""Number of keys of a function that are cached immediately after their tuning."""
_MAX_UNREPEATED = 16
"""A warning is given after this number of consecutive keys that were tuned and not called again."""


class UnrepeatedKeys:
    """The latest keys of one function that were tuned and not called again."""

    def __init__(self) -> None:
        self._num_tuned = 0
        self._unrepeated: dict[Hashable, None] = {}
        self._has_advised = False

    def should_delay_caching(self, key: Hashable) -> bool:
        """Note a tuned key. Return whether to cache it only at its second call."""
        self._num_tuned += 1
        if self._num_tuned <= _NUM_CACHED_IMMEDIATELY or self._has_advised:
            return False
        self._unrepeated[key] = None
        return True

    def note_repeated_call(self, key: Hashable) -> None:
        """Note a call, which was not a hit, of a key that has a config."""
        if key in self._unrepeated:
            self._unrepeated.clear()

    def advice(self, function: str, sizes: Collection[str]) -> str:
        """Return the text of a warning, once, if the last 16 keys were not called again.

        The text names the parts of the key that vary. Parts with names in ``sizes`` are ignored.
        """
        if len(self._unrepeated) < _MAX_UNREPEATED:
            return ""
        keys = list(self._unrepeated)
        self._unrepeated.clear()
        parts = [part for part in _varying_parts(keys) if part[0].partition(".")[2] not in sizes]
        if not parts:
            return ""
        self._has_advised = True
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


def _varying_parts(
    values: Sequence[Hashable], path: str = "key"
) -> Iterator[tuple[str, Sequence[Hashable]]]:
    """Yield path and values of each part of the keys ``values`` that differs between them."""
    first = values[0]
    if len(set(values)) == 1:
        return
    if not all(isinstance(v, tuple) and len(v) == len(first) for v in values):  # type: ignore[arg-type]
        yield path, values
        return
    names = getattr(first, "_fields", ())
    for index, each in enumerate(zip(*values, strict=True)):
        name = f".{names[index]}" if index < len(names) else f"[{index}]"
        yield from _varying_parts(each, f"{path}{name}")


_logger = logging.getLogger("triton_dist.tuning")
_CONFIG_ERRORS = {"OutOfResources", "CompilationError", "PTXASError", "CandidateFailed"}
"""Exception classes whose cause is the config, by name, because triton is not imported here. Out of
device memory is not included: other allocations of the program may cause it."""
_PASS_FAILED_TEXT = "PassManager::run failed"
"""Text of the ``RuntimeError`` that Triton raises if a compiler pass fails."""


def is_caused_by_config(error: Exception) -> bool:
    """Return whether the config is the cause of the error.

    A recorded winner may fail because another driver or compiler rejects the kernel.
    """
    names = {cls.__name__ for cls in type(error).__mro__}
    return not names.isdisjoint(_CONFIG_ERRORS) or _PASS_FAILED_TEXT in error_text(error)


def add_note(error: Exception, text: str) -> None:
    """Attach ``text`` to ``error``; before Python 3.11, append it to the message or log it."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    elif len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{text}",)
    else:
        _logger.warning("%s", text)


@dataclass(frozen=True)
class Choice:
    """The config chosen for a key, and its record."""

    config: Config
    record: TuningRecord | None
    """``None``: nothing was measured. The config was predicted, or is the default."""
    is_reusable: bool = True
    size_table: SizeTable | None = None
    """Configs by exact size within the range of the key."""
    try_recorded_winner: Callable[[Callable[[], Any]], tuple[Any, str]] | None = None
    """Makes the user's first call with the winner of a record. Returns the result, and why all
    ranks must tune again; empty if they need not. Set in the call that found the record."""
    was_tuned: bool = False
    """The config was tuned in this call, and not read from a record."""
    advice: str = ""
    """Warning that explains why the key was tuned again."""
    changed_arguments: tuple[str, ...] = ()
    """Names of arguments that trials changed in place and that were not restored."""

    def for_sizes(self, sizes: tuple[int, ...]) -> Choice:
        """Return the choice for the exact ``sizes`` of a call."""
        return (
            self
            if self.size_table is None
            else replace(self, config=self.size_table.config_for(sizes[0]))
        )


@dataclass
class Choices:
    """The choices of one tuned function, valid until the group of all ranks changes.

    A *rounded* key has sizes rounded up to the ends of their ranges. An *exact* key has the sizes
    of a call.
    """

    by_ranks_and_key: dict[Any, Choice] = field(default_factory=dict)
    """Choices, by the ranks that tuned together and rounded key."""
    cached_arguments: dict[Any, dict[str, Any]] = field(default_factory=dict)
    """Values of the tuned arguments by exact key, for calls without a process group."""
    cached_arguments_by_group: dict[Any, dict[Any, dict[str, Any]]] = field(default_factory=dict)
    """Values of the tuned arguments, by process group and then exact key."""
    by_rounded_key: dict[Any, Choice] = field(default_factory=dict)
    """Choices, by process group and rounded key. Unlike exact keys, these are not evicted."""
    max_cached_keys: int = 0
    """Maximum number of exact keys in ``cached_arguments``, and for each process group."""
    unrepeated_keys: UnrepeatedKeys = field(default_factory=UnrepeatedKeys)

    def cache_arguments(self, group: Any, key: Any, arguments: dict[str, Any]) -> None:
        """Cache the arguments of an exact key. If the cache is full, evict the oldest key."""
        cached_arguments = (
            self.cached_arguments
            if group is None
            else self.cached_arguments_by_group.setdefault(group, {})
        )
        # A dict keeps the insertion order, so its first key is the oldest.
        while len(cached_arguments) >= self.max_cached_keys:
            with suppress(KeyError, StopIteration, RuntimeError):  # another thread evicted it
                del cached_arguments[next(iter(cached_arguments))]
        cached_arguments[key] = arguments

    def drop_destroyed_groups(self, is_destroyed: Callable[[Any], bool]) -> None:
        """Drop the choices of destroyed process groups: a program may create many groups."""
        tables: list[tuple[dict[Any, Any], Callable[[Any], bool]]] = [
            (self.cached_arguments_by_group, is_destroyed),
            (self.by_rounded_key, lambda key: is_destroyed(key[0])),
            (self.by_ranks_and_key, lambda key: not key[0].is_current()),
        ]
        for table, is_gone in tables:
            for key in list(table):  # a copy, because other threads may add keys
                if is_gone(key):
                    table.pop(key, None)
