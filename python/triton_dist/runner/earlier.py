"""Texts of earlier versions of Triton, as the assembler of this one must have them."""

from __future__ import annotations

import re

from triton_dist.errors import InvalidArtefact
from triton_dist.runner.artefact import Artefact

_NAME = b"tensormap.replace.tile.global_stride"
_STRIDE = re.compile(
    rb"(@!?[%$]\w+\s+)?(" + re.escape(_NAME) + rb"[\w:.]*\s*\[[^\]]*\],\s*\w+,\s*)([%$]\w+);"
)
"""A predicate, the instruction up to its last operand, and that: in PTX, and in PTX in LLIR."""
_BLACKWELL = 100
"""From this architecture on Triton 3.3 has the assembler of a later CUDA."""


def translated(artefact: Artefact) -> bytes:
    """The text of ``artefact``, with strides of tensor descriptors in bytes.

    ptxas of CUDA 12.4, with Triton up to 3.3, takes units of 16 bytes and writes them into the
    descriptor as they are. That of 12.8, with Triton from 3.4 on, takes bytes and divides them,
    whatever version the PTX names: the SASS of both says so. A descriptor's rows would lie at a
    sixteenth of their distance.

    Raises:
        InvalidArtefact: a stride is set in a way that is not known.
    """
    text = artefact.data
    if _NAME not in text or not _counts_in_16_bytes(artefact):
        return text
    text, count = _STRIDE.subn(
        rb"{ .reg .b64 %bytes; shl.b64 %bytes, \3, 4; \1\2%bytes; }", artefact.data
    )
    if count != artefact.data.count(_NAME):
        why = f"it is for CUDA 12.4, which counts strides in 16 bytes: {_NAME.decode()} is not "
        raise InvalidArtefact(artefact.where, why + "as Triton writes it. Run its cubin instead")
    return text


def _counts_in_16_bytes(artefact: Artefact) -> bool:
    triton = re.match(r"triton (\d+)\.(\d+)", artefact.about.compiler)
    if triton and (int(triton[1]), int(triton[2])) >= (3, 4):
        return False
    if artefact.level == "ptx":
        isa = re.search(rb"^\.version (\d+)\.(\d+)", artefact.data, re.MULTILINE)
        return isa is not None and (int(isa[1]), int(isa[2])) < (8, 5)
    return artefact.level == "llir" and triton is not None and artefact.about.arch < _BLACKWELL
