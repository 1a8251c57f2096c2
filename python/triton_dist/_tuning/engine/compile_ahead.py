"""Compiling the candidates while others are measured, each kernel once on a host.

The ranks tell one another which kernels each would compile for which candidate, and which cache
they share. So all know, with no further message, which rank compiles what, and for which candidates
there is something to wait for.
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
class Needs:
    """Kernels that one rank misses."""

    cache: str
    kernels: Mapping[str, Sequence[str]]
    """For each candidate, by digest: the kernels that are not in the cache, in order."""


class CompileAhead:
    """Compiles kernels of the candidates until it is closed; what is left then is not compiled.

    Args:
        prepare: compiles a candidate, launching nothing; ``None``: there is no such thing, and
            nothing is done here.
        compiler: makes what compiles; ``None`` where nothing is compiled.
        seconds: longest time for one kernel.
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
        """Kernels that some rank misses, by the digest of the candidate."""
        self._done: set[str] = set()

    def begin(self, candidates: Sequence[Config]) -> None:
        """Collective, for those of ``candidates`` that were not begun. Run ``prepare`` for each,
        with compiling left out; then start compiling this rank's share of what is missing."""
        prepare, compiler = self._prepare, self._compiler
        if compiler is None or prepare is None:
            return
        at = Step("list the kernels")
        new = [config for config in candidates if config.digest not in self._needed]
        with self._ranks.user_code(at, self._seconds):
            kernels = {c.digest: compiler.missing(functools.partial(prepare, c)) for c in new}
        own = Needs(compiler.cache, kernels)
        everyone = self._ranks.all_gather(at, own, self._seconds)
        for digest in kernels:
            missed = (needs.kernels.get(digest, ()) for needs in everyone)
            self._needed[digest] = list(dict.fromkeys(itertools.chain.from_iterable(missed)))
        sharers = sum(needs.cache == own.cache for needs in everyone)
        compiler.begin(share(everyone, self._ranks.rank), sharers)

    def is_needed(self, config: Config) -> bool:
        """True if some rank misses a kernel for ``config`` that was not waited for; the same answer
        on every rank."""
        return not self._done.issuperset(self._kernels(config))

    def wait(self, config: Config) -> None:
        """Until this rank has done its share for ``config``, for whichever rank needs it.

        Raises:
            CandidateFailed: a kernel does not compile.
            CompileTimeout: a kernel takes too long.
        """
        for kernel in self._kernels(config):
            if self._compiler is not None:
                self._compiler.wait(kernel)

    def is_done(self, config: Config) -> None:
        """All ranks have done their shares for ``config``."""
        self._done.update(self._kernels(config))

    def _kernels(self, config: Config) -> list[str]:
        """Kernels that some rank misses for it."""
        return self._needed.get(config.digest, [])

    def close(self) -> None:
        """Idempotent."""
        self._prepare = None  # it may hold the arguments of a call
        if self._compiler is not None:
            self._compiler.close()


def share(everyone: Sequence[Needs], rank: int) -> list[str]:
    """Kernels that ``rank`` compiles, in order of need.

    Of the ranks that share a cache and miss a kernel, the one with the least to do takes it.
    """
    sharers = [other for other, needs in enumerate(everyone) if needs.cache == everyone[rank].cache]
    shares: dict[int, list[str]] = {other: [] for other in sharers}
    taken: set[str] = set()
    for config in everyone[rank].kernels:
        missed_by: dict[str, list[int]] = {}
        for other in sharers:
            for kernel in everyone[other].kernels.get(config, ()):
                missed_by.setdefault(kernel, []).append(other)
        for kernel, ranks in missed_by.items():
            if kernel not in taken:
                taken.add(kernel)
                shares[min(ranks, key=lambda other: (len(shares[other]), other))].append(kernel)
    return shares[rank]
