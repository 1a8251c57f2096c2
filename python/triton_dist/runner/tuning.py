"""Config spaces for ``tune.autotune``: pre-compiled kernels, and compilers (toolchains)."""

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
    """Return a config space of all cubins of ``kernel`` in ``folder`` and its subfolders.

    ``tune.autotune`` reads the folder at the first tuning. Configs are ``{"artefact": artefact}``,
    ordered by path. They contain digests of the files, not their paths. A changed, added or removed
    file therefore causes a new tuning, and a moved folder does not.

    Args:
        folder: output of ``triton-dist dump``, or folders of ``runner.export``.
        kernel: the kernel (a decorated function), or its name.
        name: name of the tunable argument.

    Raises:
        InvalidArgument: at the first tuning, if ``folder`` has no cubin of ``kernel``.
        InvalidArtefact: at the first tuning, if a cubin is damaged.
    """
    function = kernel if isinstance(kernel, str) else str(kernel.__name__)

    def space() -> list[dict[str, Any]]:
        paths = sorted(Path(folder).expanduser().rglob(f"{files.stem_of(function)}.cubin"))
        if not paths:
            expected = f"a folder with {function}.cubin in it or in its subfolders"
            raise InvalidArgument("runner.tuning.cubin_space", "folder", str(folder), expected)
        return [{name: files.load(path.parent, function)} for path in paths]

    return space


def toolchain_space(
    configs: Iterable[Mapping[str, Any]], name: str = "toolchain"
) -> Callable[[], list[dict[str, Any]]]:
    """Return a config space that combines each config with each compiler.

    Compilers are this process's Triton (``{name: None}``), then the toolchains: other installed
    Tritons, in the order of ``TRITON_DIST_TOOLCHAINS``, which is read at the first tuning. A config
    contains the toolchain's version of Triton, so a new version causes a new tuning.

    Raises:
        InvalidArgument: at the first tuning, if a toolchain's folder has no Triton.
    """
    every = [dict(config) for config in configs]

    def space() -> list[dict[str, Any]]:
        names = (None, *(Toolchain(each) for each, _ in knobs.toolchains.get()))
        return [{**config, name: each} for each in names for config in every]

    return space
