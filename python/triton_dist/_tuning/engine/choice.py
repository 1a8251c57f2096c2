"""The choices of a tuned function, as calls use them.

The first call with a recorded winner may fail: another driver or compiler may need more shared
memory, or refuse a kernel. If that happens on one rank, all ranks have to tune again, so they
exchange one message after the first call. Later calls send none.

A function whose key is new in each call is tuned each time, and a warning says so. Hits are not
counted, so that they cost nothing. Instead a tuned key becomes a hit only at its second call, which
shows that the key came again. The first few keys of a function become hits at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from triton_dist._tuning.engine.channel import Channel, Step
from triton_dist._tuning.protocols import RandomState
from triton_dist._tuning.sizes.size_table import SizeTable
from triton_dist._tuning.values import Config, TuningRecord
from triton_dist._tuning.values.show import said
from triton_dist.errors import InvalidArgument, RankDisagreement, TuningTimeout

_IMMEDIATE_HITS = 4
"""Keys of a function, the first ones."""
_MAX_UNREPEATED = 16
"""Keys in a row that were tuned and not called again, from which on there is a warning."""


class NewKeys:
    """The latest keys of one function that were tuned and not called again."""

    def __init__(self) -> None:
        self._tuned = 0
        self._waiting: dict[Hashable, None] = {}
        self._is_over = False

    def hits_later(self, key: Hashable) -> bool:
        """Note a key that was tuned; return whether it is to become a hit at its second call."""
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
        """Return the warning, once; else an empty text.

        Args:
            sizes: names of sizes in the keys, which may vary.
        """
        if len(self._waiting) < _MAX_UNREPEATED:
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


_logger = logging.getLogger("triton_dist.tuning")
_UNUSABLE = {"OutOfResources", "CompilationError", "PTXASError", "CandidateFailed"}
"""Names of exception classes, since triton is not imported here. Running out of device memory is
not among them: other allocations of the program may be the cause."""
_REFUSALS = (InvalidArgument, RankDisagreement)
"""Errors that name their own cause."""
_FAILED_PASS = "PassManager::run failed"
"""Triton's text, in a plain ``RuntimeError``, for a compiler pass that failed."""


def use_first(
    call: Callable[[], Any],
    ranks: Channel,
    source: str,
    remedy: str,
    votes: bool,
    restores: bool,
    random_state: RandomState,
) -> tuple[Any, str]:
    """Make the first call of this process with the winner of a record.

    Return its result and an empty text. If the config is unusable on some rank, rewind the
    generators and return the reason on every rank, so that all ranks tune again.

    Args:
        ranks: the conversation in which all ranks agreed on the record.
        source: the config and the record that has it, in words.
        remedy: how to tune again.
        votes: every rank calls the function now, and may tune.
        restores: the function changes its arguments, so a rank that ran it cannot repeat it.
        random_state: of the generators before the call.

    Raises:
        Exception: of ``call``, with a note.
    """

    def reason_to_tune(failure: str | None) -> str:
        """Send the other ranks ``failure``: empty if the call returned, ``None`` for an exception
        that no tuning mends. Return why all ranks tune again, or an empty text."""
        if not votes:
            return ""
        try:
            failures = ranks.all_gather(Step("first use of a record"), failure)
        except TuningTimeout:  # the call itself is over, and without that rank nothing is tuned
            return ""
        if None in failures or (restores and "" in failures):
            return ""
        for rank, text in enumerate(failures):
            if text:
                random_state.rewind()
                return f"{source} failed on rank {ranks.named(rank)}: {text}"
        return ""

    try:
        result = call()
    except Exception as error:
        why = reason_to_tune(said(error) if is_unusable(error) else None)
        if why:
            return None, why
        if not isinstance(error, _REFUSALS):
            add_note(error, f"triton_dist: {source} was used. {remedy}")
        raise
    except BaseException as error:  # the others must not wait for this rank
        ranks.abort(error)
        raise
    return result, reason_to_tune("")


def is_unusable(error: Exception) -> bool:
    """Return whether a config is to blame, which another build of the compiler may have made so."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return not names.isdisjoint(_UNUSABLE) or _FAILED_PASS in said(error)


def add_note(error: Exception, text: str) -> None:
    """Show ``text`` with ``error``. Before Python 3.11, which has notes, make it a part of the
    message, or log it."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    elif len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{text}",)
    else:
        _logger.warning("%s", text)


@dataclass(frozen=True)
class Choice:
    """The config of a key, and where it comes from."""

    config: Config
    record: TuningRecord | None
    """``None``: nothing could be tuned, so the config is the default, for this call alone."""
    kept: bool = True
    """Later calls use the choice too."""
    size_table: SizeTable | None = None
    """Configs by exact size, within the range of the key."""
    first_use: Callable[[Callable[[], Any]], tuple[Any, str]] | None = None
    """:func:`use_first`, set in the call that found a record."""
    tuned: bool = False
    """It was tuned in this call."""
    advice: str = ""
    """Warning for the user about why the key was tuned again."""
    changed: tuple[str, ...] = ()
    """Names of arguments that trials changed in place and that nothing restored."""

    def for_sizes(self, sizes: tuple[int, ...]) -> Choice:
        """Return the choice for exact sizes."""
        return (
            self if self.size_table is None else replace(self, config=self.size_table.at(sizes[0]))
        )


@dataclass
class Choices:
    """The choices of one tuned function, which hold while the world is the same."""

    by_ranks: dict[Any, Choice] = field(default_factory=dict)
    """Choices by ranks and key."""
    hits: dict[Any, dict[str, Any]] = field(default_factory=dict)
    """Arguments by exact key, of calls without a group."""
    group_hits: dict[Any, dict[Any, dict[str, Any]]] = field(default_factory=dict)
    """Arguments by group and exact key, of calls with a group."""
    ranges: dict[Any, Choice] = field(default_factory=dict)
    """Choices by group and range. Ranges are never dropped, unlike exact keys."""
    most_hits: int = 0
    """Number of exact keys that are kept."""
    new_keys: NewKeys = field(default_factory=NewKeys)
    """Keys that were tuned and may not come again."""

    def keep(self, group: Any, key: Any, arguments: dict[str, Any]) -> None:
        """Keep the arguments of an exact key, in place of the oldest if there are many."""
        hits = self.hits if group is None else self.group_hits.setdefault(group, {})
        while len(hits) >= self.most_hits:
            with suppress(KeyError, StopIteration, RuntimeError):  # another thread was faster
                del hits[next(iter(hits))]
        hits[key] = arguments

    def drop_destroyed(self, is_destroyed: Callable[[Any], bool]) -> None:
        """Drop the choices of groups that were destroyed: a program may make many, one after
        another."""
        tables: list[tuple[dict[Any, Any], Callable[[Any], bool]]] = [
            (self.group_hits, is_destroyed),
            (self.ranges, lambda key: is_destroyed(key[0])),
            (self.by_ranks, lambda key: not key[0].is_current()),
        ]
        for table, is_gone in tables:
            for key in list(table):  # a list, as other threads may add some meanwhile
                if is_gone(key):
                    table.pop(key, None)
