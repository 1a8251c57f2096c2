"""Handle the sizes in a key, which let a tuning serve a range and warm-start neighbouring keys.

``sizes=("M",)`` names parameters of the function, or fields of a named tuple that ``key_fn``
returns. A tuning serves a range of sizes (:func:`fine_bucket`). Keys that differ only in sizes are
a *family*: the tuning of a new key is warm-started from records of its family.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import numbers
import operator
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from triton_dist._tuning.values import codec
from triton_dist._tuning.values.config import Config
from triton_dist._tuning.values.key import Key, qualified_name
from triton_dist._warn import warn
from triton_dist.errors import InvalidArgument, TuningWarning

_ALIGNED = 32
Rounding = Callable[[int], int]
WavesFn = Callable[[Any, Config], float | None]
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
Path = tuple[int, ...]
"""Path of a size in a key of nested tuples: the index at each level."""


def fine_bucket(n: int) -> int:
    """Return the largest size in the range of ``n``; 0 stays 0.

    Ranges end at tile boundaries. Up to 16 they end at powers of two, above at multiples of a step:
    16 up to 128, 32 up to 2048, 128 up to 8192, and 1/32 to 1/64 of ``n`` above. Ranges are narrow
    enough to keep tiles and waves about equally full within a range.

    Multiples of 32 form a separate range from the other sizes, because libraries use different
    kernels for them (cuBLAS on an H200: 443 us for 1408 rows, 421 us for 1406 and 1410 rows). There
    are 296 ranges up to 16384.

    Raises:
        InvalidArgument: ``n`` is negative or not an int.
    """
    size = _integer(n)
    if size is None or size < 0:
        raise InvalidArgument("fine_bucket", "n", n, "an int, 0 or more")
    n = size
    below = (n - 1).bit_length() - 1  # 2 ** below < n <= 2 ** (below + 1)
    if n <= 16:
        return 1 << below + 1 if n > 0 else 0
    step = 1 << max(4, min(5, below - 2), 7 * (below > 10), below - 5)
    end = -(-n // step) * step
    return end - 1 if end % _ALIGNED == 0 and n % _ALIGNED else end


class Sizes:
    """The sizes in the keys of one function.

    Args:
        function: name of the function, for messages.
        rounding: for each size name, the function that returns the largest size of a range.
        waves_fn: ``waves_fn`` of ``tune.autotune``.
        are_added: the sizes are parameters of the function, added to the result of ``key_fn``.
    """

    def __init__(
        self,
        function: str,
        rounding: Mapping[str, Rounding],
        waves_fn: WavesFn | None = None,
        are_added: bool = False,
    ) -> None:
        self.function, self.rounding, self._waves_fn = function, dict(rounding), waves_fn
        self._may_be_twice = are_added

    def range_of(self, key: Any) -> Any:
        """Return ``key`` with each size replaced by the largest size of its range.

        Raises:
            InvalidArgument: a size is negative or not an int, or the key lacks a size.
        """
        names = [name for _, name, _ in self._fields(key)]
        if self._may_be_twice and len(names) > len(self.rounding):
            twice = ", ".join(name for name in self.rounding if names.count(name) > 1)
            warn(
                f"{self.function}: {twice} is both an argument, which sizes= adds to the key, and "
                "a field of the result of key_fn. The key contains it twice, so the exact size "
                "does not choose the config within a range. Remove it from the result of key_fn.",
                TuningWarning,
            )
            self._may_be_twice = False  # warn once
        missing = self.rounding.keys() - set(names)
        if missing:
            expected = f"a named tuple with the fields {', '.join(sorted(self.rounding))}, of sizes"
            raise InvalidArgument(self.function, "the result of key_fn", key, expected)
        return self._with(key, self._end)

    def values(self, key: Any) -> tuple[int, ...]:
        """Return the sizes in ``key``."""
        return tuple(operator.index(value) for _, _, value in self._fields(key))

    def family(self, key: Any) -> Family:
        """Return the family of ``key``, a result of ``key_fn``."""
        return Family(list(self._fields(key)), key, self.rounding)

    def with_fixed(self, fixed: Config) -> Sizes:
        """Return the sizes for calls that pass the values ``fixed`` of a config.

        ``waves_fn`` still gets the result of ``key_fn`` itself and complete configs.
        """
        waves_fn = self._waves_fn
        if waves_fn is None:
            return self

        def waves(key: Any, config: Config) -> float | None:
            return waves_fn(key[0], Config({**config, **fixed}))

        return Sizes(self.function, self.rounding, waves)

    def waves(self, key: Any, config: Config, sizes: Sequence[int]) -> float | None:
        """Return the waves of ``config`` for ``key`` with ``sizes``; ``None`` if not known.

        Raises:
            InvalidArgument: ``waves_fn`` returned neither a number of waves nor ``None``.
            Exception: raised by ``waves_fn``.
        """
        if self._waves_fn is None:
            return None
        given = iter(sizes)
        waves = self._waves_fn(self._with(key, lambda *_: next(given)), config)
        if waves is None:
            return None
        if isinstance(waves, bool) or not isinstance(waves, (int, float)) or not 0 <= waves < 1e12:
            expected = f"a number, 0 or more, or None; for {config}"
            raise InvalidArgument(self.function, "the result of waves_fn", waves, expected)
        return float(waves)

    def _with(self, key: Any, new: Callable[[str, Any], int]) -> Any:
        """Return ``key`` with each size replaced by ``new(name, size)``, in order."""
        if not isinstance(key, tuple):
            return key
        names = getattr(key, "_fields", None)
        if names is None:
            return tuple(self._with(each, new) for each in key) if type(key) is tuple else key
        values = (
            new(name, value) if name in self.rounding else self._with(value, new)
            for name, value in zip(names, key, strict=True)
        )
        return key._make(values)  # type: ignore[attr-defined]

    def _end(self, name: str, value: object) -> int:
        size = _integer(value)
        if size is None or size < 0:
            raise InvalidArgument(self.function, f"size {name}", value, "an int, 0 or more")
        rounded = self.rounding[name](size)
        end = _integer(rounded)
        if end is None or end < size:
            expected = f"an int, {size} or more, the largest size of its range"
            raise InvalidArgument(self.function, f"{size} rounded, size {name}", rounded, expected)
        return end

    def _fields(self, key: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[Path, str, Any]]:
        """Yield path, name and value of each size in ``key``."""
        if not isinstance(key, tuple):
            return
        names = getattr(key, "_fields", [""] * len(key))
        for place, (name, value) in enumerate(zip(names, key, strict=True)):
            if name in self.rounding:
                yield (*path, place), name, value
            else:
                yield from self._fields(value, (*path, place))


class Family:
    """The keys that differ from a given key only in sizes.

    Attributes:
        sizes: sizes of the given key.
    """

    def __init__(
        self, fields: Sequence[tuple[Path, str, int]], key: Any, rounding: Mapping[str, Rounding]
    ) -> None:
        self._paths = tuple(path for path, _, _ in fields)
        self._names = [name for _, name, _ in fields]
        self.sizes = tuple(value for _, _, value in fields)
        self._rounding = [rounding[name] for name in self._names]
        self._others = _cut(codec.text(codec.encode(key)), self._paths)[1]

    def sizes_of(self, record: Key) -> tuple[int, ...] | None:
        """Return the sizes in the key of a record; ``None`` if it is not in the family."""
        try:
            sizes, others = _cut(record.text, self._paths)
        except (LookupError, TypeError, AttributeError):  # from an earlier key_fn
            return None
        fits = others == self._others and all(type(size) is int for size in sizes)
        return sizes if fits else None

    def are_single_sizes(self, ends: Sequence[int]) -> bool:
        """Return whether each of ``ends``, the largest size of its range, is the only size in it.

        A rounding may give special sizes, such as multiples of 32, their own range.
        """
        pairs = zip(self._rounding, ends, strict=True)
        return all(end < 2 or _rounded(each, end - 1) not in (end, None) for each, end in pairs)

    def holds(self, ends: Sequence[int], at: Sequence[int]) -> bool:
        """Return whether the sizes ``at`` still round to ``ends``.

        The rounding may have changed since a record for ``ends`` was measured at the sizes ``at``.
        If ``at`` is empty, the record was measured at ``ends``.
        """
        if not at:
            return True
        if len(at) != len(ends):
            return False
        return [_rounded(*each) for each in zip(self._rounding, at, strict=True)] == [*ends]

    def show(self, sizes: Sequence[int]) -> str:
        """Return ``sizes`` with their names, such as ``M=512``."""
        return ", ".join(f"{name}={size}" for name, size in zip(self._names, sizes, strict=True))


@functools.lru_cache(maxsize=4096)  # a first call does this for every record of its function
def _cut(text: str, paths: tuple[Path, ...]) -> tuple[tuple[Any, ...], str]:
    """Return the sizes at ``paths`` in the text of a key, and a digest of the other parts."""
    tree, sizes = json.loads(text), []
    for path in paths:
        items = functools.reduce(lambda node, step: _items(node)[step], path[:-1], tree)
        sizes.append(_items(items)[path[-1]])
        _items(items)[path[-1]] = None
    return tuple(sizes), codec.digest(tree)


def _integer(value: Any) -> int | None:
    """Return ``value`` as an ``int`` if it is a Python or numpy integer, else ``None``."""
    if not isinstance(value, bool) and isinstance(value, numbers.Integral):
        return operator.index(value)
    return None


def _rounded(rounding: Rounding, size: int) -> int | None:
    """Return the largest size in the range of ``size``; ``None`` if ``rounding`` raises.

    A user's rounding may not support sizes that no call has used.
    """
    try:
        return rounding(size)
    except Exception:
        return None


def distance(one: Sequence[int], other: Sequence[int]) -> float:
    """Return the distance of sizes in doublings, the maximum over all sizes.

    The distance between 0 and a positive size is infinite: with no work, all configs are equally
    fast.
    """
    pairs = list(zip(one, other, strict=True))
    if any((a == 0) != (b == 0) for a, b in pairs):
        return math.inf
    return max(abs(math.log2(max(a, 1) / max(b, 1))) for a, b in pairs)


def sized_key(
    function: Callable[..., Any],
    key_fn: Callable[..., Any],
    rounding: Mapping[str, Rounding],
    waves_fn: WavesFn | None = None,
) -> tuple[Callable[..., Any], Sizes | None]:
    """Return the ``key_fn`` with sizes, and the sizes; ``None`` if ``rounding`` is empty.

    If all names in ``rounding`` are parameters of ``function``, the arguments are added to the key.
    """
    if not rounding:
        return key_fn, None
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # builtins have no signature
        parameters = {}  # type: ignore[assignment]
    are_added = all(name in parameters for name in rounding)
    if are_added:
        key_fn = _with_arguments(function, key_fn, list(rounding))
    return key_fn, Sizes(qualified_name(function), rounding, waves_fn, are_added)


def _with_arguments(
    function: Callable[..., Any], key_fn: Callable[..., Any], names: Sequence[str]
) -> Callable[..., Any]:
    """Return a function that adds the arguments ``names`` as sizes to the result of ``key_fn``."""
    parameters = inspect.signature(function).parameters
    by_place = [name for name, each in parameters.items() if each.kind in _BY_PLACE]
    places = [
        (name, by_place.index(name) if name in by_place else math.inf, parameters[name].default)
        for name in names
    ]
    sized: Any = namedtuple("Sized", [*names, "key"], rename=True)  # type: ignore[misc]
    # A parameter may have a name that namedtuple refuses, such as "key" (twice) or "_m".
    sized._fields = (*names, "" if "key" in names else "key")  # type: ignore[assignment]

    @functools.wraps(key_fn)
    def key(*args: Any, **kwargs: Any) -> Any:
        sizes = (
            args[place] if place < len(args) else kwargs.get(name, default)  # type: ignore[index]
            for name, place, default in places
        )
        return sized._make([*sizes, key_fn(*args, **kwargs)])

    return key


def _items(tree: Any) -> Any:
    """Return the items of a tuple in the tree of a key."""
    return tree["items"] if "items" in tree else tree["tuple"]
