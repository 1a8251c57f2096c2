"""Define ``contextual_autotune``: build its tuner from the implementations of all its components.

The module ``compose`` builds the tuner of ``tune.autotune``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch

from triton_dist import knobs
from triton_dist._tuning.arguments import check_tunable
from triton_dist._tuning.engine.components import NoWorld
from triton_dist._tuning.engine.contextual.dispatch import ContextualAutoTuner
from triton_dist._tuning.engine.contextual.interception import Interception
from triton_dist._tuning.engine.contextual.kernel_tuning import ContextualComponents
from triton_dist._tuning.protocols import RankGroup
from triton_dist._tuning.search.launch_plans import OrderedPlan, RacingPlan
from triton_dist._tuning.shared import common_components, fingerprint_of, is_off, is_predict_only
from triton_dist._tuning.source import sources_of
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
os.register_at_fork(after_in_child=_interception.reset_after_fork)

P = ParamSpec("P")
R = TypeVar("R")


def contextual_autotune(
    is_dist: bool = False,
    n_repeat: int = 5,
    n_warmup: int = 3,
    *,
    race: bool = False,
    group: Any = None,
) -> Callable[[Callable[P, R]], ContextualAutoTuner[P, R]]:
    """Return a decorator that tunes the ``triton.autotune`` kernels that a function launches.

    Launches of these kernels are intercepted while the function runs. The first call tunes: it
    calls the whole function repeatedly and returns the result of the last call. In each of these
    calls, every kernel is launched as in production, with the config to try next. Side effects and
    synchronisation between ranks therefore happen as in production. A kernel that has tried all its
    configs uses the best one while other kernels continue. Winners are recorded on disk, so a later
    process calls the function once.

    The decorator may be above or below ``staticmethod`` and ``classmethod``. The function is called
    without tuning while torch traces, and for fake or meta tensors.

    Args:
        is_dist: with ``True``, ranks tune together. The time of a config is its time on the slowest
            rank, and all ranks use the same config. With ``False``, this rank tunes alone.
        n_repeat: number of timed launches of each config.
        n_warmup: number of untimed launches before the timed launches.
        race: drop clear losers early. ``n_repeat`` then applies to configs that stay to the end,
            and each config has at most one untimed launch.
        group: process group of the ranks that tune together, if ``is_dist=True``; by default all
            ranks.

    Raises:
        InvalidArgument: an argument has an unsupported value; or the decorated object is a
            kernel, a coroutine function, or not a function.
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
    search = "race" if race else "exhaustive"
    policy = Policy(warmup=n_warmup, repeat=n_repeat, timing="contextual", search=search)

    def ranks_now() -> RankGroup:
        return group_for(group, "world" if is_dist else "rank")

    def current_components() -> ContextualComponents:
        """Return the components of a tuning, with the current environment."""
        if is_interpreting():
            # Kernels of libraries do not call triton_dist.jit, which installs the interpreter.
            modes.install_interpreter()
        ranks = ranks_now()
        common = common_components(policy, ranks, verbose=False)
        path = knobs.autotune_log_dir.get() / f"rank-{int(ranks.global_rank(ranks.rank))}.log"
        return ContextualComponents(
            **vars(common),
            fingerprint=functools.partial(_fingerprint, ranks, policy),
            plan=RacingPlan if race else OrderedPlan,
            log=StepLog(path, prints=common.settings.verbose and ranks.is_leader),
            no_grad=torch.no_grad,
        )

    def decorate(fn: Any) -> Any:
        if isinstance(fn, (staticmethod, classmethod)):
            return type(fn)(decorate(fn.__func__))
        check_tunable(fn, "contextual_autotune")
        return ContextualAutoTuner(
            fn,
            current_components,
            _interception,
            default_group if is_dist else NoWorld,
            ranks_now,
            lambda: is_off() or is_predict_only(),  # inner kernels have no predictions
            functools.partial(RandomState, torch_only=True),
        )

    return decorate


def _fingerprint(
    ranks: RankGroup, policy: Policy, autotuner: Any, space: ConfigSpace
) -> Fingerprint:
    # The space has the names of the hooks. Add their source, if it can be found.
    hooks = [config.pre_hook for config in autotuner.configs if config.pre_hook is not None]
    for name in ("pre_hook", "post_hook"):
        if getattr(autotuner, f"user_defined_{name}"):
            hooks.append(getattr(autotuner, name))
    source, hooks_source = sources_of(
        [autotuner.base_fn, *_heuristics(autotuner.fn), *hooks],
        [hook for hook in (autotuner.early_config_prune, autotuner.perf_model) if hook],
    )
    digest = codec.digest(space.digest, hooks_source.digests, autotuner.configs_top_k)
    return fingerprint_of(ranks, policy, source, hooks_source, digest)


def _heuristics(fn: Any) -> Iterator[Callable[..., Any]]:
    """Yield the functions of each ``triton.heuristics`` between the tuner and the kernel."""
    while hasattr(fn, "fn"):
        if isinstance(getattr(fn, "values", None), dict):
            yield from fn.values.values()
        fn = fn.fn
