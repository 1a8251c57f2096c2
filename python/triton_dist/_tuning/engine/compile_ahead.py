"""Compile the kernels of candidates in other processes while earlier candidates are measured.

Ranks that share a kernel cache, such as the ranks of a host, compile each kernel once. The ranks
exchange the kernels that each candidate needs, and the name of the cache of each rank. From these
lists, every rank derives without further messages which rank compiles which kernel, and which
candidates must wait for a kernel.
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
    """The kernels that are not in the cache of one rank."""

    cache: str
    """Identifies the cache. Ranks with equal values share their compiled kernels."""
    kernels: Mapping[str, Sequence[str]]
    """For each candidate, by digest: the kernels that are not in the cache, in order of use."""


class CompileAhead:
    """Compilation of the candidates' kernels before their trials, until it is closed.

    It does nothing if ``prepare``, which compiles a candidate without launching it, or ``compiler``
    is ``None``. ``seconds`` limits the time to list the kernels.
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
        self._missing_by_digest: dict[str, list[str]] = {}
        """By digest of the candidate: kernels that are not in the cache of some rank."""
        self._compiled: set[str] = set()

    def begin(self, candidates: Sequence[Config]) -> None:
        """Start to compile this rank's share of the kernels. All ranks call this.

        Candidates that were passed before are skipped. ``prepare`` runs once per candidate, with
        compilation disabled, to list the kernels.
        """
        prepare, compiler = self._prepare, self._compiler
        if compiler is None or prepare is None:
            return
        step = Step("list the kernels")
        new = [config for config in candidates if config.digest not in self._missing_by_digest]
        with self._ranks.user_code(step, self._seconds):
            kernels = {c.digest: compiler.collect(functools.partial(prepare, c)) for c in new}
        missing = MissingKernels(compiler.cache, kernels)
        by_rank = self._ranks.all_gather(step, missing, self._seconds)
        for digest in kernels:
            names = (each.kernels.get(digest, ()) for each in by_rank)
            self._missing_by_digest[digest] = list(
                dict.fromkeys(itertools.chain.from_iterable(names))
            )
        num_sharing = sum(each.cache == missing.cache for each in by_rank)
        compiler.begin(kernels_to_compile(by_rank, self._ranks.rank), num_sharing)

    def must_compile(self, config: Config) -> bool:
        """Return, equally on all ranks, whether a kernel of ``config`` is still to be compiled."""
        return not self._compiled.issuperset(self._kernels(config))

    def wait(self, config: Config) -> None:
        """Wait until this rank has compiled its share of the kernels of ``config``."""
        for kernel in self._kernels(config):
            if self._compiler is not None:
                self._compiler.wait(kernel)

    def mark_compiled(self, config: Config) -> None:
        """Note that all ranks have compiled their shares for ``config``."""
        self._compiled.update(self._kernels(config))

    def _kernels(self, config: Config) -> list[str]:
        return self._missing_by_digest.get(config.digest, [])

    def close(self) -> None:
        """Stop compiling. Repeated calls have no effect."""
        self._prepare = None  # it may refer to the arguments of a call
        if self._compiler is not None:
            self._compiler.close()


def kernels_to_compile(by_rank: Sequence[MissingKernels], rank: int) -> list[str]:
    """Return the kernels that ``rank`` compiles, in the order in which candidates need them.

    Ranks that share a cache compile each kernel once. It is compiled by one of the ranks that need
    it: the rank to which the fewest kernels are assigned so far.
    """
    sharing = [other for other, each in enumerate(by_rank) if each.cache == by_rank[rank].cache]
    assigned: dict[int, list[str]] = {other: [] for other in sharing}
    all_assigned: set[str] = set()
    for config in by_rank[rank].kernels:
        needed_by: dict[str, list[int]] = {}
        for other in sharing:
            for kernel in by_rank[other].kernels.get(config, ()):
                needed_by.setdefault(kernel, []).append(other)
        for kernel, ranks in needed_by.items():
            if kernel not in all_assigned:
                all_assigned.add(kernel)
                fewest = min(ranks, key=lambda other: (len(assigned[other]), other))
                assigned[fewest].append(kernel)
    return assigned[rank]
