"""Tuning among kernels that were compiled before."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from triton_dist import knobs
from triton_dist.errors import InvalidArgument
from triton_dist.runner import files
from triton_dist.runner.toolchains import Toolchain


def cubin_space(
    folder: str | os.PathLike[str], kernel: Any, name: str = "artefact"
) -> Callable[[], list[dict[str, Any]]]:
    """A config space of all cubins of ``kernel`` in ``folder`` and the folders in it.

    For ``tune.autotune``: it is read at the first tuning. Configs are ``{"artefact": artefact}``,
    in the order of their paths; digests of the files are part of the configs, so files that are
    overwritten, added or removed are tuned again, and a folder that moves is not.

    Args:
        folder: what ``triton-dist dump`` wrote, or folders of ``runner.export``.
        kernel: the kernel, or its name.
        name: name of the tunable argument.

    Raises:
        InvalidArgument: at the first tuning; ``folder`` has no such cubin.
        InvalidArtefact: at the first tuning; one that is damaged.
    """
    function = kernel if isinstance(kernel, str) else str(kernel.__name__)

    def space() -> list[dict[str, Any]]:
        paths = sorted(Path(folder).expanduser().rglob(f"{files.stem_of(function)}.cubin"))
        if not paths:
            expected = f"a folder with {function}.cubin in it, or in folders in it"
            raise InvalidArgument("runner.tuning.cubin_space", "folder", str(folder), expected)
        return [{name: files.load(path.parent, function)} for path in paths]

    return space


def toolchain_space(
    configs: Iterable[Mapping[str, Any]], name: str = "toolchain"
) -> Callable[[], list[dict[str, Any]]]:
    """A config space of ``configs``, each by this process's Triton and by every other one.

    For ``tune.autotune``: ``TRITON_DIST_TOOLCHAINS`` is read at the first tuning. ``{name: None}``
    is this process's; the others are in the order of the variable, and print with the version that
    lies there, so that another one is tuned again.

    Raises:
        InvalidArgument: at the first tuning; a folder that has no Triton.
    """
    every = [dict(config) for config in configs]

    def space() -> list[dict[str, Any]]:
        names = (None, *(Toolchain(each) for each, _ in knobs.toolchains.get()))
        return [{**config, name: each} for each in names for config in every]

    return space
