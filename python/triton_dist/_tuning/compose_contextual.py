"""Picks and wires the parts of a contextual tuning, as ``compose`` does for ``tune.autotune``."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from triton_dist import knobs
from triton_dist._tuning.engine.contextual.context import ContextualParts
from triton_dist._tuning.engine.contextual.dispatch import ContextualAutoTuner
from triton_dist._tuning.engine.contextual.interception import Interception
from triton_dist._tuning.engine.decorated import check_tunable
from triton_dist._tuning.engine.parts import NoGroup
from triton_dist._tuning.protocols import RankGroup
from triton_dist._tuning.search.steps import InOrder, Race
from triton_dist._tuning.shared import common_parts, fingerprint_of, is_off
from triton_dist._tuning.source import source_of
from triton_dist._tuning.store import StepLog
from triton_dist._tuning.values import ConfigSpace, Fingerprint, Policy, codec
from triton_dist.debugging import modes
from triton_dist.errors import InvalidArgument
from triton_dist.runtime.inherited import InheritedValue, in_backward
from triton_dist.runtime.random import RandomState
from triton_dist.runtime.ranks import default_group, group_for
from triton_dist.runtime.tracing import is_traced
from triton_dist.runtime.triton_compat import is_interpreting

_interception = Interception(
    InheritedValue("triton_dist.contextual_autotune"), in_backward, is_traced
)
os.register_at_fork(after_in_child=_interception.forget)


def contextual_autotune(
    is_dist: bool = False,
    n_repeat: int = 5,
    n_warmup: int = 3,
    *,
    race: bool = False,
    group: Any = None,
) -> Callable[[Callable[..., Any]], ContextualAutoTuner]:
    """Decorator: tune the ``triton.autotune`` kernels that a function launches, by calling it.

    While the function runs, launches of such kernels are intercepted. The whole function is called
    again and again; in each call every kernel runs once for each key, with its current config, so
    that side effects and hand-shakes between ranks happen as in production. Each kernel and key
    goes through its configs; one that is through goes on with its best while others continue. The
    result of the last call is returned. Winners are kept on disk: a later process calls the
    function once.

    Args:
        is_dist: ranks step together, the slowest rank's time counts, and all choose the same
            config for every kernel. ``False``: this rank alone, whatever other ranks do.
        n_repeat: timed launches of each config.
        n_warmup: untimed launches before them.
        race: clear losers leave early; the numbers above are then those of a config that stays to
            the end.
        group: ranks that step together with ``is_dist=True``; default: the world.

    Static and class methods may be decorated in either order. While torch traces, and on fake or
    meta tensors, the function is called as it is.

    Raises:
        InvalidArgument: an argument that cannot work; or, of the decorator, something that is no
            function which computes when it is called, such as a kernel or a coroutine function.
    """
    if callable(is_dist):
        expected = "True or False; write @contextual_autotune() with parentheses"
        raise InvalidArgument("contextual_autotune", "is_dist", is_dist, expected)
    for name, count, least in (("n_repeat", n_repeat, 1), ("n_warmup", n_warmup, 0)):
        if type(count) is not int or count < least:
            raise InvalidArgument(
                "contextual_autotune", name, count, f"an integer, at least {least}"
            )
    if group is not None and not is_dist:
        raise InvalidArgument("contextual_autotune", "group", group, "None unless is_dist=True")
    composer = _Composer(is_dist, n_repeat, n_warmup, race, group)

    def decorate(fn: Any) -> Any:
        if isinstance(fn, (staticmethod, classmethod)):
            return type(fn)(decorate(fn.__func__))
        check_tunable(fn, "contextual_autotune")
        group = default_group if is_dist else NoGroup
        return ContextualAutoTuner(
            fn,
            composer.compose,
            _interception,
            group,
            composer.ranks,
            is_off,
            functools.partial(RandomState, torch_only=True),
        )

    return decorate


@dataclass(frozen=True)
class _Composer:
    """Puts the parts together for one tuning, as the environment is then."""

    is_dist: bool
    repeat: int
    warmup: int
    race: bool
    group: Any

    def ranks(self) -> RankGroup:
        return group_for(self.group, "world" if self.is_dist else "rank")

    def compose(self) -> ContextualParts:
        if is_interpreting():
            # All kernels may be those of libraries, which do not call triton_dist.jit.
            modes.install_interpreter()
        ranks = self.ranks()
        policy = Policy(
            warmup=self.warmup,
            repeat=self.repeat,
            timing="contextual",
            search="race" if self.race else "exhaustive",
        )
        common = common_parts(policy, ranks, verbose=False)
        path = knobs.autotune_log_dir.get() / f"rank-{int(ranks.named(ranks.rank))}.log"
        return ContextualParts(
            **vars(common),
            fingerprint=functools.partial(_fingerprint, ranks, policy),
            plan=Race if self.race else InOrder,
            log=StepLog(path, prints=common.settings.verbose and ranks.is_leader),
            no_grad=torch.no_grad,
        )


def _fingerprint(ranks: RankGroup, policy: Policy, tuner: Any, space: ConfigSpace) -> Fingerprint:
    # Of the live configs: a hook without a stable text is in the space by its name alone.
    hooks = [config.pre_hook for config in tuner.configs if config.pre_hook is not None]
    for name in ("pre_hook", "post_hook"):
        if getattr(tuner, f"user_defined_{name}"):
            hooks.append(getattr(tuner, name))
    validators = source_of(
        [validator for validator in (tuner.early_config_prune, tuner.perf_model) if validator]
    )
    source = source_of([tuner.base_fn, *_heuristics(tuner.fn), *hooks])
    digest = codec.digest(space.digest, validators.digests, tuner.configs_top_k)
    return fingerprint_of(ranks, policy, source, validators, digest)


def _heuristics(fn: Any) -> Iterator[Callable[..., Any]]:
    """The functions of each ``triton.heuristics`` between the tuner and the kernel."""
    while hasattr(fn, "fn"):
        if isinstance(getattr(fn, "values", None), dict):
            yield from fn.values.values()
        fn = fn.fn
