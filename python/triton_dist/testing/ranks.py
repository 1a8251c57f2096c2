"""Run a function in several ranks, each a process, and get every rank's result or failure.

>>> results = spawn_ranks(2, all_gather_once, torch.float16, timeout=30)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from triton_dist.errors import InvalidArgument
from triton_dist.testing.rank_pool import RankPool

T = TypeVar("T")


def spawn_ranks(
    world_size: int,
    fn: Callable[..., T],
    *args: Any,
    timeout: float = 60.0,
    grace: float = 10.0,
    env: Mapping[str, str] | None = None,
    device: str = "cpu",
    share_gpus: bool = False,
    init: bool = True,
    poison_empty: bool = True,
    fresh: bool = False,
) -> list[T]:
    """``fn(*args)`` in ``world_size`` processes; what they return, ordered by rank.

    ``fn`` is a function at the top of an importable module; it, ``args`` and results are pickled.
    A rank finds the variables of a torchrun worker (``RANK``, ``WORLD_SIZE``, ``MASTER_PORT``, ...)
    in its environment, a copy of the caller's with ``env`` on top, and has one torch thread. No
    process, and nothing in /dev/shm, is left behind whatever happens.

    Args:
        timeout: seconds for everything, start included.
        grace: seconds that the other ranks have to end by themselves once one has failed.
        device: ``"cpu"``: ranks interpret kernels. ``"cuda"``: rank i compiles and runs on GPU i.
        share_gpus: with fewer GPUs than ranks, several ranks have a GPU.
        init: initialise the default process group: gloo on CPU ranks and where ranks share GPUs,
            gloo and NCCL on GPUs.
        poison_empty: ranks run under :func:`triton_dist.testing.poisoned_empty`.
        fresh: ranks are new interpreters that have imported no kernel, for libraries that must be
            imported before any; takes some seconds.

    Raises:
        InvalidArgument: ``world_size`` is no number of ranks, ``device`` is another, or ``fn`` is
            not at the top of a module.
        RanksFailed: some rank raised, died or was stuck; has each one's traceback.
    """
    if device not in ("cpu", "cuda"):
        raise InvalidArgument("spawn_ranks", "device", device, "'cpu' or 'cuda'")
    if not isinstance(world_size, int) or world_size < 1:
        raise InvalidArgument("spawn_ranks", "world_size", world_size, "an int, 1 or more")
    pool = RankPool(world_size, env or {}, device, share_gpus, init, poison_empty, fresh, timeout)
    return pool.run(fn, *args, timeout=timeout, grace=grace, last=True)
