"""Exporting all kernels of a program, for ``triton-dist dump``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triton_dist import knobs
from triton_dist.errors import ArtefactWarning, InvalidArgument
from triton_dist.runner import files, foreign
from triton_dist.runner.artefact import LEVELS, Artefact


def dump(
    *, src: Any, metadata: Mapping[str, Any], metadata_group: Mapping[str, str], **_: Any
) -> None:
    """Export one kernel into ``TRITON_DIST_DUMP_DIR``: a listener of Triton's compilations.

    What cannot be exported is left out with a warning: the program goes on.
    """
    folder, wanted = knobs.dump_dir.get(), knobs.dump_levels.get()
    if folder is None or not hasattr(src, "fn"):  # a kernel that was compiled from a file of IR
        return
    paths = {Path(path).suffix[1:]: Path(path) for path in metadata_group.values()}
    texts = {level: paths[level].read_bytes() for level in LEVELS if level in paths}
    try:
        about = foreign.about_of(src, metadata, texts.get("ttgir", b"").decode())
    except InvalidArgument as error:
        warnings.warn(f"not dumped: {error}", ArtefactWarning, stacklevel=2)
        return
    name = f"{about.function}-{Artefact('cubin', texts['cubin'], about).digest[:12]}"
    kept = {level: text for level, text in texts.items() if level in (*wanted, "cubin")}
    files.write(folder / name, about, kept)
