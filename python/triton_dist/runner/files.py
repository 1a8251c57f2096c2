"""Read and write artefacts. An artefact is a compiled kernel in ``<kernel>.<level>``, for example
``<kernel>.cubin``, with its metadata in ``<kernel>.json`` in the same folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from triton_dist import _files, knobs
from triton_dist._tuning.values import codec
from triton_dist._warn import warn_without_raising
from triton_dist.errors import ArtefactWarning, InvalidArgument, InvalidArtefact
from triton_dist.runner import foreign
from triton_dist.runner.artefact import LEVELS, Artefact, ArtefactMetadata

_MAX_JSON_BYTES = 1 << 24
_MAX_NAME_BYTES = 240
"""Maximum bytes of a file name without ``.<level>``; the limit of a whole name is 255 bytes."""


def export(kernel: Any, folder: str | os.PathLike[str], levels: Sequence[str] = LEVELS) -> Path:
    """Write ``kernel`` at ``levels`` and its metadata into ``folder``, and return the folder.

    Args:
        kernel: the result of a launch or a ``warmup`` of any Triton or Gluon kernel.
        folder: created if missing; a kernel of the same name in it is replaced.
        levels: levels to write; default: all of ``LEVELS`` that the kernel has.

    Raises:
        InvalidArgument: ``kernel`` is not a compiled kernel, it does not have one of ``levels``, or
            a constexpr value cannot be written to JSON exactly.
    """
    known = getattr(kernel, "asm", None)
    if known is None:
        expected = "the result of a launch or a warmup of a compiled kernel"
        raise InvalidArgument("runner.export", "kernel", kernel, expected)
    for level in levels:
        if level not in LEVELS or (level not in known and levels is not LEVELS):
            there = ", ".join(each for each in LEVELS if each in known)
            raise InvalidArgument("runner.export", "levels", level, f"some of {there}")
    texts = {level: known[level] for level in levels if level in known}
    ttgir = known.get("ttgir", "")
    write(
        Path(folder), foreign.metadata_of(kernel.src, kernel.metadata._asdict(), str(ttgir)), texts
    )
    return Path(folder)


def write(folder: Path, metadata: ArtefactMetadata, texts: Mapping[str, str | bytes]) -> None:
    """Write each file atomically, the metadata last."""
    for level, text in {**texts, "json": json.dumps(metadata.to_tree(), indent=2) + "\n"}.items():
        data = text if isinstance(text, bytes) else text.encode()
        _files.write(folder / f"{stem_of(metadata.function)}.{level}", data)


def stem_of(function: str) -> str:
    """Return the file name of a kernel without ``.<level>``; a digest replaces a long end."""
    name = function.encode(errors="surrogatepass")
    if len(name) <= _MAX_NAME_BYTES:
        return function
    digest = hashlib.sha256(name).hexdigest()[:16]
    return f"{name[: _MAX_NAME_BYTES - 17].decode(errors='ignore')}-{digest}"


def load(folder: str | os.PathLike[str], function: str, level: str = "cubin") -> Artefact:
    """Return the kernel ``function`` at ``level`` from ``folder``; see :func:`export`.

    Folders of Triton's cache and of triton-runner can be read too, but may lack some metadata.

    Raises:
        InvalidArgument: ``level`` is not one of ``LEVELS``.
        InvalidArtefact: a file is missing, or ``<kernel>.json`` is damaged or was written by a
            later version. The kernel itself is checked at its first launch.
    """
    if level not in LEVELS:
        raise InvalidArgument("runner.load", "level", level, f"one of {', '.join(LEVELS)}")
    path = Path(folder).expanduser() / f"{stem_of(function)}.{level}"
    data = read_file(path)
    metadata_path = path.with_suffix(".json")
    if not metadata_path.exists() and level in foreign.SELF_DESCRIBING:
        text = data.decode("utf-8", "replace")
        return Artefact(level, data, foreign.metadata_from_ir(function, text, str(path)), str(path))
    metadata_bytes = read_file(metadata_path)
    try:
        if len(metadata_bytes) > _MAX_JSON_BYTES:
            raise ValueError(f"{len(metadata_bytes)} bytes, the limit is {_MAX_JSON_BYTES}")
        tree = codec.loads(metadata_bytes)
    except ValueError as error:
        raise InvalidArtefact(str(metadata_path), f"it cannot be read: {error}") from error
    metadata = foreign.read_metadata(tree, function, str(metadata_path))
    if function not in (metadata.function, stem_of(metadata.function)):
        raise InvalidArtefact(
            str(metadata_path), f"it describes kernel {metadata.function!r}, not {function!r}"
        )
    return Artefact(level, data, metadata, str(path))


def read_file(path: Path) -> bytes:
    """Return the bytes of a file; raise ``InvalidArtefact`` if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        folder = path.parent
        found = sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
        there = f"{folder} contains {', '.join(found[:8])}" if found else f"{folder} has no files"
        raise InvalidArtefact(str(path), f"{error.strerror}; {there}") from error


def dump(
    *, src: Any, metadata: Mapping[str, Any], metadata_group: Mapping[str, str], **_: Any
) -> None:
    """Export one kernel into ``TRITON_DIST_DUMP_DIR``.

    This function is registered as Triton's compilation listener. A kernel that cannot be exported
    is skipped with a warning.
    """
    if hasattr(src, "fn"):  # false for a kernel that was compiled from an IR file
        try:
            _dump(src, metadata, metadata_group)
        except Exception as error:
            name = metadata.get("name")
            warn_without_raising(
                f"kernel {name} is not dumped: {type(error).__name__}: {error}", ArtefactWarning
            )


def _dump(src: Any, metadata: Mapping[str, Any], metadata_group: Mapping[str, str]) -> None:
    folder, wanted = knobs.dump_dir.get(), knobs.dump_levels.get()
    if folder is None:
        return
    paths = {Path(path).suffix[1:]: Path(path) for path in metadata_group.values()}
    texts = {level: paths[level].read_bytes() for level in LEVELS if level in paths}
    artefact_metadata = foreign.metadata_of(src, metadata, texts.get("ttgir", b"").decode())
    digest = Artefact("cubin", texts["cubin"], artefact_metadata).digest[:12]
    name = f"{stem_of(artefact_metadata.function)}-{digest}"
    selected = {level: text for level, text in texts.items() if level in (*wanted, "cubin")}
    write(folder / name, artefact_metadata, selected)
