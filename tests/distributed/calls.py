"""Calls of an op with fresh data, checked after the last call: the same on CPU ranks and on GPUs.

Every operand is a function of the rank and of the call, so each rank computes the expected results
alone. No collective of a check synchronises the ranks: calls follow each other as in production.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, ClassVar, TypeAlias, TypeVar
from unittest import mock

import torch
import torch.distributed as dist

from tests.distributed.compiled_ahead import is_rehearsal, note
from triton_dist import knobs
from triton_dist.debugging.checks import checking
from triton_dist.debugging.modes import interpreter_checks
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for
from triton_dist.testing import assert_allclose

T = TypeVar("T")
NAN = float("nan")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
Options: TypeAlias = Mapping[str, Any]
"""Keyword arguments of a call."""


@contextmanager
def some_configs(op: Any, most: int = 99) -> Iterator[None]:
    """Tune ``op`` over one config of each algorithm on CPU ranks, or two if it has one algorithm.

    At most ``most`` configs are tuned, with at most two samples each. Interpreting a config takes
    long. Tuning works alike for any number of configs, and other tests call each config on its own.
    """
    if not current_device().interprets:
        yield
        return
    by_algorithm: dict[str, list[Any]] = {}
    for config in op.config_space:
        by_algorithm.setdefault(config["algorithm"], []).append(config)
    of_each = 1 if len(by_algorithm) > 1 else 2
    few = [config for configs in by_algorithm.values() for config in configs[:of_each]]
    with (
        mock.patch.object(op, "config_space", type(op.config_space)(few[:most])),
        mock.patch.object(op, "_components_for", with_few_samples(op._components_for)),
    ):
        yield


def with_few_samples(components_for: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``components_for`` of a tuner, with at most two samples of each config."""

    def components_with_few_samples(*args: Any) -> Any:
        components = components_for(*args)
        policy = replace(components.settings.policy, rounds=(1,), repeat=1)
        return replace(components, settings=replace(components.settings, policy=policy))

    return components_with_few_samples


def under_checks(function: Callable[..., T], *args: Any) -> T:
    """Return ``function(*args)``, called under the checks for races and bounds."""
    active = interpreter_checks(knobs.debug.get())
    with checking(*(check for check in ("race", "bounds") if check not in active)):
        return function(*args)


class Calls(ABC):
    """Calls of one op in one context over a group (default: the world). Collective.

    Memory that peers write holds NaN before the first call. Nothing synchronises the ranks after
    it. The operand that travels becomes NaN as soon as a call has returned.
    """

    name: ClassVar[str]
    op: ClassVar[Any]
    """The tuned op."""
    algorithms: ClassVar[Sequence[Options]]
    """For calls in sequence."""
    many: ClassVar[int]
    """Rows of a large call in sequence."""
    few: ClassVar[int]
    row_step: ClassVar[int] = 13
    """Difference between the rows of consecutive calls."""
    config_rows: ClassVar[int]
    """Rows of calls with each config."""
    fewest_configs: ClassVar[int] = 15
    """Configs of the op on GPUs, at least."""
    tuned_calls: ClassVar[Sequence[Options]]
    tunings: ClassVar[int] = 2
    """Tunings of ``tuned_calls``."""
    residents: ClassVar[int] = 1
    """Programs of a kernel that must run at the same time."""
    flags: ClassVar[Sequence[str]] = ()
    """Regions of a slot that count epochs."""
    epoch_algorithms: ClassVar[Sequence[Options]] = ()
    """Algorithms that count epochs in slots."""
    gives_up: ClassVar[Sequence[Options]]
    """Calls of rank 0 alone."""
    overdue: ClassVar[Sequence[str]]
    """Flag that does not arrive in each call of ``gives_up``, without the number of the slot."""
    same_on_gpus: ClassVar[bool] = False
    """Whether compiled kernels report the same flags."""

    def __init__(
        self, ctx: Any, dtype: torch.dtype, group: dist.ProcessGroup | None, rtol: float
    ) -> None:
        self.ctx, self.dtype, self.rtol, self.atol = ctx, dtype, rtol, rtol
        self.members = (
            dist.get_process_group_ranks(group or dist.group.WORLD)
            if dist.is_initialized()
            else [0]
        )
        self.number = self.made = 0
        self.results: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self.poison()
        current_device().synchronize()
        group_for(group).barrier("memory is poisoned")

    @classmethod
    @abstractmethod
    def first(cls) -> Calls:
        """Create a context for calls in sequence."""

    @classmethod
    @abstractmethod
    def second(cls) -> Calls:
        """Create a smaller context of another dtype."""

    @classmethod
    @abstractmethod
    def for_configs(cls) -> Calls:
        """Create a context for calls with each config."""

    @classmethod
    @abstractmethod
    def in_group(cls, number: int, group: dist.ProcessGroup) -> Calls:
        """Create a context of group ``number`` for calls of up to 5 rows."""

    @classmethod
    def few_configs(cls) -> AbstractContextManager[None]:
        """Context manager for quick tunings."""
        return some_configs(cls.op)

    @classmethod
    @abstractmethod
    def config_space(cls) -> Sequence[Options]:
        """Return the candidates of the tuner."""

    @classmethod
    def rows_of_config(cls, config: Options) -> int:
        """Return the rows of a call with this config."""
        return cls.config_rows

    @classmethod
    def in_sequence(cls, number: int, is_second: bool = False) -> Options:
        """Return the options of call ``number`` in the ``first`` or ``second`` context."""
        return cls.algorithms[number % len(cls.algorithms)]

    @property
    def slots(self) -> Any:
        return self.ctx.buffer.slots

    @abstractmethod
    def poison(self) -> None:
        """Fill memory that peers write with NaN."""

    def set_defaults(self, options: dict[str, Any]) -> None:  # noqa: B027
        """Complete the options of a call that is not tuned."""

    @abstractmethod
    def arguments(
        self, rows: int, layout: str, options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], torch.Tensor]:
        """Return new positional arguments and the expected result of call ``number``.

        Options of these tests are removed from ``options``, and tensors are added to it.
        """

    def run(self, op: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return op(*args, **options)

    def __call__(
        self,
        rows: int,
        layout: str = "row-major",
        *,
        op: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        """Call ``op``, by default the function of the tuned op, with ``rows`` rows."""
        self.number += 1
        what = f"{self.name}, call {self.number}: {rows} rows, {layout}, {options}"
        if op is None:
            op = type(self).op.fn
            self.set_defaults(options)
        args, expected = self.arguments(rows, layout, options)
        if is_rehearsal():
            note(lambda: type(self).op._hooks.prepare(*args, **options))
            return
        C = self.run(op, args, options)
        args[0].fill_(NAN)
        self.results.append((what, C, expected))
        self.made += 1

    def skip(self) -> None:
        """Leave out a call that other ranks make."""
        self.number += 1

    def compare(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        assert_allclose(found, expected, rtol=self.rtol, atol=self.atol)

    def check(self) -> int:
        """Compare all results; return the number of calls."""
        current_device().synchronize()
        for what, found, expected in self.results:
            try:
                self.compare(found, expected)
            except AssertionError as error:
                raise AssertionError(f"{what}: {error}") from None
        return self.made

    def finish(self) -> int:
        """Check, and free the context."""
        count = self.check()
        self.ctx.finalize()
        return count
