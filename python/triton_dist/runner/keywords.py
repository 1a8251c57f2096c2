"""Launch keywords that name an artefact, and those of other tools that do not work here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from triton_dist.errors import InvalidArgument, InvalidArtefact
from triton_dist.runner import files, foreign
from triton_dist.runner.artefact import LEVELS, Artefact

_IN_FOLDER = {f"{level}_dir": level for level in LEVELS} | {"autotune_cubin_dir": "cubin"}
_AS_TEXT = {f"{level}_src": level for level in LEVELS if level != "cubin"}
_NOT_HERE = {
    "amdgcn_dir": "NVIDIA GPUs: a folder for ttir_dir, ttgir_dir, llir_dir, ptx_dir or cubin_dir",
    "hsaco_dir": "NVIDIA GPUs: a folder for ttir_dir, ttgir_dir, llir_dir, ptx_dir or cubin_dir",
    "start_pass": "a whole level: the passes inside of one differ with every version of Triton",
    "dump_value": "runner.language.dump in the kernel's source: IR is not edited",
    "dump_grid": "the argument grid of runner.language.dump, in the kernel's source",
}
TOOLCHAIN = "toolchain"
DUMP = "dump_tensor"
KEYWORDS = frozenset({"artefact", TOOLCHAIN, DUMP, *_IN_FOLDER, *_AS_TEXT, *_NOT_HERE})


def resolve(function: str, keyword: str, value: Any, metadata: Any) -> Artefact:
    """The artefact that a launch of ``function`` names by ``keyword``.

    Raises:
        InvalidArgument: the keyword is not for this tool, or the value not for the keyword.
        InvalidArtefact: a file is missing or cannot be read.
    """
    if keyword in _NOT_HERE:
        raise InvalidArgument(function, keyword, value, _NOT_HERE[keyword])
    if metadata is not None and keyword not in _AS_TEXT:
        expected = "none: an artefact in a folder has its own <kernel>.json"
        raise InvalidArgument(function, "metadata_json", metadata, expected)
    if keyword == "artefact":
        if isinstance(value, Artefact):
            return _checked(value)
        raise InvalidArgument(function, keyword, value, "an artefact, as runner.load returns it")
    level = _IN_FOLDER.get(keyword) or _AS_TEXT[keyword]
    if not isinstance(value, (str, os.PathLike)):
        text = f"the text of a kernel in {level}, or the path of a file with one"
        expected = "the path of a folder" if keyword in _IN_FOLDER else text
        raise InvalidArgument(function, keyword, value, expected)
    if keyword in _IN_FOLDER:
        return _checked(files.load(value, function, level))
    where, text = keyword, str(value)
    if isinstance(value, os.PathLike) or ("\n" not in text and text.endswith(f".{level}")):
        where, text = text, files.content(Path(text)).decode("utf-8", "replace")
    about = foreign.about(metadata, function, where)
    if about is None:
        if level not in foreign.TELLING:
            why = "its launch needs metadata_json: shared memory and others are not in the text"
            raise InvalidArtefact(where, why)
        about = foreign.nothing_known(function, text, where)
    return _checked(Artefact(level, text.encode(), about, where))


def _checked(artefact: Artefact) -> Artefact:
    artefact.check()
    return artefact
