"""Exporting all kernels of a program, for ``triton-dist dump``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triton_dist import knobs
from triton_dist._warn import note
from triton_dist.errors import ArtefactWarning
from triton_dist.runner import files, foreign
from triton_dist.runner.artefact import LEVELS, Artefact


def dump(
    *, src: Any, metadata: Mapping[str, Any], metadata_group: Mapping[str, str], **_: Any
) -> None:
    """Export one kernel into ``TRITON_DIST_DUMP_DIR``: a listener of Triton's compilations.

    What cannot be exported is left out with a warning: the program goes on.
    """
    if hasattr(src, "fn"):  # not of a kernel that was compiled from a file of IR
        try:
            _dump(src, metadata, metadata_group)
        except Exception as error:
            name = metadata.get("name")
            note(f"kernel {name} is not dumped: {type(error).__name__}: {error}", ArtefactWarning)


def _dump(src: Any, metadata: Mapping[str, Any], metadata_group: Mapping[str, str]) -> None:
    folder, wanted = knobs.dump_dir.get(), knobs.dump_levels.get()
    if folder is None:
        return
    paths = {Path(path).suffix[1:]: Path(path) for path in metadata_group.values()}
    texts = {level: paths[level].read_bytes() for level in LEVELS if level in paths}
    about = foreign.about_of(src, metadata, texts.get("ttgir", b"").decode())
    digest = Artefact("cubin", texts["cubin"], about).digest[:12]
    name = f"{files.stem_of(about.function)}-{digest}"
    kept = {level: text for level, text in texts.items() if level in (*wanted, "cubin")}
    files.write(folder / name, about, kept)
