"""Find and round the sizes in a key, such as the number of rows of a matrix.

``sizes=("M",)`` of ``tune.autotune`` names parameters of the function, or fields of a named tuple
that ``key_fn`` returns. A size in a key is rounded up, so one tuning serves a range of sizes
(:func:`fine_bucket`). Keys that differ only in sizes are a *family*. The tuning of a new key first
tries configs that were fast for other keys of its family.
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

_LIBRARY_ROW_ALIGNMENT = 32
Rounding = Callable[[int], int]
"""Function that returns the largest size of the range that contains a size."""
WavesFn = Callable[[Any, Config], float | None]
_POSITIONAL_KINDS = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
KeyPath = tuple[int, ...]
"""Path of a size in a key of nested tuples: the index at each level."""


def fine_bucket(n: int) -> int:
    """Return the largest size in the range of ``n``; 0 stays 0.

    Ranges end at tile boundaries. Up to 16, they end at powers of two. Above 16, they end at
    multiples of a step. The step is 16 up to 128, 32 up to 2048, 128 up to 8192, and 1/64 to 1/32
    of ``n`` above 8192. Ranges are so narrow that tiles and waves are about equally full for all
    sizes of a range.

    A range that ends at a multiple of 32 has only multiples of 32. Its other sizes have a separate
    range, because libraries use different kernels for them (cuBLAS on an H200: 443 us for 1408
    rows, 421 us for 1406 and 1410 rows). There are 296 ranges up to 16384.

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
    return end - 1 if end % _LIBRARY_ROW_ALIGNMENT == 0 and n % _LIBRARY_ROW_ALIGNMENT else end


class Sizes:
    """The sizes in the keys of one function.

    Args:
        function: name of the function, for messages.
        rounding: by name of a size, the function that rounds it up to the end of its range.
        waves_fn: ``waves_fn`` of ``tune.autotune``: the number of waves of a config.
        are_added: the sizes are parameters of the function and were added to the result of the
            user's ``key_fn``.
    """

    def __init__(
        self,
        function: str,
        rounding: Mapping[str, Rounding],
        waves_fn: WavesFn | None = None,
        are_added: bool = False,
    ) -> None:
        self.function, self.rounding, self._waves_fn = function, dict(rounding), waves_fn
        self._checks_duplicates = are_added

    def rounded_key(self, key: Any) -> Any:
        """Return ``key`` with each size replaced by the largest size of its range.

        Raises:
            InvalidArgument: a size is negative or not an int, or the key lacks a size.
        """
        names = [name for _, name, _ in self._sizes_in(key)]
        if self._checks_duplicates and len(names) > len(self.rounding):
            duplicates = ", ".join(name for name in self.rounding if names.count(name) > 1)
            warn(
                f"{self.function}: {duplicates} is both an argument, which sizes= adds to the key, "
                "and a field of the result of key_fn. The key contains it twice, so the exact size "
                "does not choose the config within a range. Remove it from the result of key_fn.",
                TuningWarning,
            )
            self._checks_duplicates = False  # warn once
        missing = self.rounding.keys() - set(names)
        if missing:
            expected = f"a named tuple with the fields {', '.join(sorted(self.rounding))}, of sizes"
            raise InvalidArgument(self.function, "the result of key_fn", key, expected)
        return self._replaced(key, self._end_of_range)

    def values(self, key: Any) -> tuple[int, ...]:
        """Return the sizes in ``key``."""
        return tuple(operator.index(value) for _, _, value in self._sizes_in(key))

    def family(self, key: Any) -> KeyFamily:
        """Return the keys that differ from ``key``, a result of ``key_fn``, only in sizes."""
        return KeyFamily(list(self._sizes_in(key)), key, self.rounding)

    def with_fixed_arguments(self, fixed: Config) -> Sizes:
        """Return the sizes for calls that pass the values ``fixed`` of tuned parameters.

        The key of such a call is a tuple that starts with the result of ``key_fn``. ``waves_fn``
        gets this result, and configs with the values ``fixed``.
        """
        waves_fn = self._waves_fn
        if waves_fn is None:
            return self

        def waves(key: Any, config: Config) -> float | None:
            return waves_fn(key[0], Config({**config, **fixed}))

        return Sizes(self.function, self.rounding, waves)

    def waves(self, key: Any, config: Config, sizes: Sequence[int]) -> float | None:
        """Return the number of waves of ``config`` for ``key`` with ``sizes``; ``None`` if
        ``waves_fn`` does not provide it.

        Raises:
            InvalidArgument: ``waves_fn`` returned neither a number of waves nor ``None``.
            Exception: raised by ``waves_fn``.
        """
        if self._waves_fn is None:
            return None
        new_sizes = iter(sizes)
        waves = self._waves_fn(self._replaced(key, lambda *_: next(new_sizes)), config)
        if waves is None:
            return None
        if isinstance(waves, bool) or not isinstance(waves, (int, float)) or not 0 <= waves < 1e12:
            expected = f"a number, 0 or more, or None; for {config}"
            raise InvalidArgument(self.function, "the result of waves_fn", waves, expected)
        return float(waves)

    def _replaced(self, key: Any, new_size: Callable[[str, Any], int]) -> Any:
        """Return ``key`` with each size replaced by ``new_size(name, size)``, in order."""
        if not isinstance(key, tuple):
            return key
        names = getattr(key, "_fields", None)
        if names is None:
            if type(key) is not tuple:
                return key
            return tuple(self._replaced(each, new_size) for each in key)
        values = (
            new_size(name, value) if name in self.rounding else self._replaced(value, new_size)
            for name, value in zip(names, key, strict=True)
        )
        return key._make(values)  # type: ignore[attr-defined]

    def _end_of_range(self, name: str, value: object) -> int:
        size = _integer(value)
        if size is None or size < 0:
            raise InvalidArgument(self.function, f"size {name}", value, "an int, 0 or more")
        rounded = self.rounding[name](size)
        end = _integer(rounded)
        if end is None or end < size:
            expected = f"an int, {size} or more, the largest size of its range"
            raise InvalidArgument(self.function, f"{size} rounded, size {name}", rounded, expected)
        return end

    def _sizes_in(self, key: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str, Any]]:
        """Yield path, name and value of each size in ``key``."""
        if not isinstance(key, tuple):
            return
        names = getattr(key, "_fields", [""] * len(key))
        for index, (name, value) in enumerate(zip(names, key, strict=True)):
            if name in self.rounding:
                yield (*path, index), name, value
            else:
                yield from self._sizes_in(value, (*path, index))


class KeyFamily:
    """The keys that differ from a given key only in sizes.

    Attributes:
        sizes: sizes of the given key.
    """

    def __init__(
        self, fields: Sequence[tuple[KeyPath, str, int]], key: Any, rounding: Mapping[str, Rounding]
    ) -> None:
        self._paths = tuple(path for path, _, _ in fields)
        self._names = [name for _, name, _ in fields]
        self.sizes = tuple(value for _, _, value in fields)
        self._rounding = [rounding[name] for name in self._names]
        self._rest_digest = _split_sizes(codec.to_json(codec.encode(key)), self._paths)[1]

    def sizes_of(self, key: Key) -> tuple[int, ...] | None:
        """Return the sizes in the key of a record; ``None`` if the key is not in the family."""
        try:
            sizes, rest_digest = _split_sizes(key.text, self._paths)
        except (LookupError, TypeError, AttributeError):  # the key of an earlier key_fn
            return None
        is_in_family = rest_digest == self._rest_digest
        return sizes if is_in_family and all(type(size) is int for size in sizes) else None

    def have_single_sizes(self, range_ends: Sequence[int]) -> bool:
        """Return whether each size in ``range_ends`` is the only size of its range.

        A rounding may give a special size, such as a multiple of 32, a range of its own.
        """
        pairs = zip(self._rounding, range_ends, strict=True)
        return all(end < 2 or _rounded(each, end - 1) not in (end, None) for each, end in pairs)

    def rounds_to(self, range_ends: Sequence[int], measured_sizes: Sequence[int]) -> bool:
        """Return whether ``measured_sizes`` round to ``range_ends``.

        The rounding may have changed since a record with the sizes ``range_ends`` in its key was
        measured. If ``measured_sizes`` is empty, the record was measured at ``range_ends``.
        """
        if not measured_sizes:
            return True
        if len(measured_sizes) != len(range_ends):
            return False
        pairs = zip(self._rounding, measured_sizes, strict=True)
        return [_rounded(*each) for each in pairs] == [*range_ends]

    def show(self, sizes: Sequence[int]) -> str:
        """Return ``sizes`` with their names, such as ``M=512``."""
        return ", ".join(f"{name}={size}" for name, size in zip(self._names, sizes, strict=True))


@functools.lru_cache(maxsize=4096)  # a first call does this for every record of its function
def _split_sizes(text: str, paths: tuple[KeyPath, ...]) -> tuple[tuple[Any, ...], str]:
    """Return the sizes at ``paths`` in the text of a key, and a digest of the rest of the key."""
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
    """Return the largest size in the range of ``size``; ``None`` if the user's ``rounding``
    raises."""
    try:
        return rounding(size)
    except Exception:
        return None


def distance(one: Sequence[int], other: Sequence[int]) -> float:
    """Return the maximum over the sizes of ``abs(log2(size / other_size))``.

    The distance between 0 and a positive size is infinite: with size 0, all configs are equally
    fast.
    """
    pairs = list(zip(one, other, strict=True))
    if any((a == 0) != (b == 0) for a, b in pairs):
        return math.inf
    return max(abs(math.log2(max(a, 1) / max(b, 1))) for a, b in pairs)


def key_fn_with_sizes(
    function: Callable[..., Any],
    key_fn: Callable[..., Any],
    rounding: Mapping[str, Rounding],
    waves_fn: WavesFn | None = None,
) -> tuple[Callable[..., Any], Sizes | None]:
    """Return the ``key_fn`` to call, and a description of the sizes in its result.

    If all names in ``rounding`` are parameters of ``function``, the returned ``key_fn`` adds their
    arguments to the result of the given ``key_fn``. If ``rounding`` is empty, there are no sizes:
    return the given ``key_fn`` and ``None``.
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
    positional = [name for name, each in parameters.items() if each.kind in _POSITIONAL_KINDS]
    positions = [
        (name, positional.index(name) if name in positional else math.inf, parameters[name].default)
        for name in names
    ]
    sized: Any = namedtuple("Sized", [*names, "key"], rename=True)  # type: ignore[misc]
    # A parameter may have a name that namedtuple refuses, such as "key" (twice) or "_m".
    sized._fields = (*names, "" if "key" in names else "key")  # type: ignore[assignment]

    @functools.wraps(key_fn)
    def key(*args: Any, **kwargs: Any) -> Any:
        sizes = (
            args[position] if position < len(args) else kwargs.get(name, default)  # type: ignore[index]
            for name, position, default in positions
        )
        return sized._make([*sizes, key_fn(*args, **kwargs)])

    return key


def _items(tree: Any) -> Any:
    return tree["items"] if "items" in tree else tree["tuple"]
