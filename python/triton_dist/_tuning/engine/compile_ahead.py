"""Compile candidates while others are measured, each kernel once per host.

The ranks exchange the kernels that each candidate needs and the cache that each rank uses. From
these lists every rank derives, without further messages, which rank compiles which kernel and which
candidates must wait.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from triton_dist._tuning.engine.channel import Channel, Step
from triton_dist._tuning.protocols import Compiler
from triton_dist._tuning.values import Config


@dataclass(frozen=True)
class MissingKernels:
    """The kernels that one rank lacks."""

    cache: str
    kernels: Mapping[str, Sequence[str]]
    """For each candidate, by digest: the kernels that are not in the cache, in order of use."""


class CompileAhead:
    """Compilation of the candidates' kernels before their trials, until it is closed.

    Args:
        prepare: compiles a candidate without launching it. ``None``: this object does nothing.
        compiler: returns the compiler. ``None``: nothing is compiled on this device.
        seconds: time limit for one kernel.
    """

    def __init__(
        self,
        prepare: Callable[[Config], object] | None,
        compiler: Callable[[], Compiler] | None,
        seconds: float,
        ranks: Channel,
    ) -> None:
        self._prepare, self._seconds, self._ranks = prepare, seconds, ranks
        self._compiler = None if compiler is None else compiler()
        self._needed: dict[str, list[str]] = {}
        """Kernels that some rank lacks, by the digest of the candidate."""
        self._done: set[str] = set()

    def begin(self, candidates: Sequence[Config]) -> None:
        """Start to compile this rank's share of the kernels. All ranks call this.

        Candidates of earlier calls are skipped. ``prepare`` runs once per candidate, with
        compilation disabled, to list its kernels.
        """
        prepare, compiler = self._prepare, self._compiler
        if compiler is None or prepare is None:
            return
        step = Step("list the kernels")
        new = [config for config in candidates if config.digest not in self._needed]
        with self._ranks.user_code(step, self._seconds):
            kernels = {c.digest: compiler.collect(functools.partial(prepare, c)) for c in new}
        own = MissingKernels(compiler.cache, kernels)
        everyone = self._ranks.all_gather(step, own, self._seconds)
        for digest in kernels:
            missed = (needs.kernels.get(digest, ()) for needs in everyone)
            self._needed[digest] = list(dict.fromkeys(itertools.chain.from_iterable(missed)))
        sharers = sum(needs.cache == own.cache for needs in everyone)
        compiler.begin(kernels_to_compile(everyone, self._ranks.rank), sharers)

    def is_needed(self, config: Config) -> bool:
        """Return whether some rank lacks a kernel of ``config``; equal on all ranks."""
        return not self._done.issuperset(self._kernels(config))

    def wait(self, config: Config) -> None:
        """Wait until this rank has compiled its share of the kernels of ``config``.

        The share includes kernels that other ranks need.
        """
        for kernel in self._kernels(config):
            if self._compiler is not None:
                self._compiler.wait(kernel)

    def mark_done(self, config: Config) -> None:
        """Note that all ranks have compiled their shares for ``config``."""
        self._done.update(self._kernels(config))

    def _kernels(self, config: Config) -> list[str]:
        """Return the kernels that some rank lacks for ``config``."""
        return self._needed.get(config.digest, [])

    def close(self) -> None:
        """Stop compiling. Repeated calls have no effect."""
        self._prepare = None  # it may refer to the arguments of a call
        if self._compiler is not None:
            self._compiler.close()


def kernels_to_compile(everyone: Sequence[MissingKernels], rank: int) -> list[str]:
    """Return the kernels that ``rank`` compiles, in the order in which candidates need them.

    Ranks that share a cache compile each kernel once. Of the ranks that lack the kernel, the rank
    with the fewest kernels compiles it.
    """
    sharers = [other for other, needs in enumerate(everyone) if needs.cache == everyone[rank].cache]
    shares: dict[int, list[str]] = {other: [] for other in sharers}
    assigned: set[str] = set()
    for config in everyone[rank].kernels:
        missed_by: dict[str, list[int]] = {}
        for other in sharers:
            for kernel in everyone[other].kernels.get(config, ()):
                missed_by.setdefault(kernel, []).append(other)
        for kernel, ranks in missed_by.items():
            if kernel not in assigned:
                assigned.add(kernel)
                # The rank with the fewest kernels so far; the lowest of these.
                shares[min(ranks, key=lambda other: (len(shares[other]), other))].append(kernel)
    return shares[rank]
