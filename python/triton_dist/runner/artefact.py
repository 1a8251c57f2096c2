"""The artefact: a kernel at one compilation level, with the metadata that a launch requires."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triton_dist._tuning.values import codec
from triton_dist._tuning.values.show import show
from triton_dist.errors import InvalidArtefact
from triton_dist.runner.specialisation import (
    CONSTANT,
    Specialisation,
    is_restorable,
    restore_constant,
)

LEVELS = ("ttir", "ttgir", "llir", "ptx", "cubin")
"""Compilation levels for NVIDIA GPUs, from source to machine code; Gluon starts at ttgir."""
SCHEMA = 1
UNKNOWN_ARCH = 0
_ENTRY_PATTERNS = {"ptx": r"\.entry\s+([\w$]+)", "llir": r"define\s+[^@\n]*@\"?([\w$.]+)\"?\("}
_ELF_HEADER = struct.Struct("<4s28xQQ6xHHHH")
"""Magic, offsets of the program and section headers, size and number of each."""


@dataclass(frozen=True)
class ArtefactMetadata:
    """The metadata of a compiled kernel, which ``<kernel>.json`` stores."""

    function: str
    """Name of the kernel function, and name of its files without ``.<level>``."""
    arch: int
    """Compute capability times 10, such as 90; ``UNKNOWN_ARCH`` if the IR has no target."""
    specialisation: Specialisation | None
    """``None``: unknown, because another tool wrote the artefact."""
    options: Mapping[str, Any]
    """Compiler inputs: ``num_warps``, ``num_stages`` and others."""
    launch_metadata: Mapping[str, Any]
    """Compiler results: entry point, shared memory and others."""
    compiler: str = ""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for metadata that would crash Triton or the driver. Other tools may
        have written the files, and Triton does not check metadata."""
        for name, value in {**self.options, **self.launch_metadata}.items():
            if not _is_plausible(name, value):
                raise ValueError(f"it has {name} {value!r:.80}, which is not plausible")
        if self.options.get("num_warps", 1).bit_count() != 1:
            raise ValueError(f"num_warps is {self.options['num_warps']}, not a power of two")

    def launch_mismatch(
        self, level: str, launch_specialisation: Specialisation, arch: int
    ) -> str | None:
        """Return why a launch cannot run this kernel; ``None`` if it can.

        Args:
            level: level of the artefact; only TTIR can be compiled for any GPU.
            launch_specialisation: specialisation of the launch.
            arch: compute capability of the GPU times 10, such as 90.
        """
        found = (
            []
            if self.specialisation is None
            else self.specialisation.mismatches(launch_specialisation)
        )
        if level != "ttir" and self.arch not in (arch, UNKNOWN_ARCH):
            found.insert(0, f"it is for sm_{self.arch}, the device is sm_{arch}")
        return "; ".join(found) or None

    def to_tree(self) -> codec.Tree:
        """Return the content of ``<kernel>.json``."""
        known = self.specialisation
        return {
            "triton_dist_artefact": SCHEMA,
            "function": self.function,
            "arch": self.arch,
            "compiler": self.compiler,
            "arguments": None if known is None else known.to_tree(),
            "options": dict(self.options),
            "launch": dict(self.launch_metadata),
        }

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> ArtefactMetadata:
        """Return the metadata that ``to_tree`` wrote.

        Raises:
            KeyError, TypeError, AttributeError, ValueError: ``tree`` has another format.
        """
        if int(tree["triton_dist_artefact"]) > SCHEMA:
            raise ValueError("a later version of triton_dist wrote it")
        known = tree["arguments"]
        specialisation = None if known is None else Specialisation.from_tree(known)
        return cls(str(tree["function"]), int(tree["arch"]), specialisation, dict(tree["options"]),
                   dict(tree["launch"]), str(tree["compiler"]))  # fmt: skip


class Artefact:
    """A kernel at ``level``, which ``kernel[grid](..., artefact=artefact)`` launches.

    Artefacts with equal content are equal and have the same ``repr``, regardless of their path. An
    artefact can therefore be a value in a config space.
    """

    # Not a dataclass: the tuner would write the fields, with the bytes, into records.

    def __init__(
        self,
        level: str,
        data: bytes,
        metadata: ArtefactMetadata,
        location: str = "an artefact in memory",
    ) -> None:
        self.level = level
        self.data = data
        self.metadata = metadata
        self.location = location
        """Path of the file, for error messages."""

    @functools.cached_property
    def digest(self) -> str:
        """Hash of the kernel and its metadata, 24 hexadecimal characters."""
        described = json.dumps([self.level, self.metadata.to_tree()], sort_keys=True)
        return hashlib.sha256(described.encode() + self.data).hexdigest()[:24]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Artefact) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        options = {name: self.metadata.options.get(name) for name in ("num_warps", "num_stages")}
        shown = {name: show(tree) for name, tree in self._constant_trees().items()} | options
        values = "".join(f", {name}={value}" for name, value in shown.items())
        return f"Artefact({self.metadata.function}.{self.level} {self.digest}{values})"

    def check(self) -> None:
        """Raise :class:`InvalidArtefact` if the bytes cannot be this kernel at this level.

        A driver that loads a truncated file may crash.
        """
        if self.level not in LEVELS[:2] and "shared" not in self.metadata.launch_metadata:
            raise InvalidArtefact(self.location, "its json has no size of shared memory (shared)")
        if self.level == "cubin" and not _is_complete_elf(self.data):
            raise InvalidArtefact(self.location, "the file is not a cubin, or it is truncated")
        if self.level in _ENTRY_PATTERNS:
            found = re.findall(_ENTRY_PATTERNS[self.level], self.data.decode("utf-8", "replace"))
            entry = self.metadata.launch_metadata.get("name", self.metadata.function)
            if entry not in found:
                there = ", ".join(found) or "none"
                raise InvalidArtefact(
                    self.location, f"it has no kernel {entry}; it contains {there}"
                )

    def constants(self) -> dict[str, Any]:
        """Return the constant arguments by name, except values that cannot be restored."""
        trees = self._constant_trees()
        return {name: restore_constant(tree) for name, tree in trees.items() if is_restorable(tree)}

    def _constant_trees(self) -> dict[str, codec.Tree]:
        known = self.metadata.specialisation
        if known is None:
            return {}
        named = {
            path: name for path, (name, arg_type) in known.leaves.items() if arg_type == CONSTANT
        }
        return {name: known.constants[path] for path, name in named.items() if len(path) == 1}


_BOOL_FIELDS = ("enable_fp_fusion", "launch_cooperative_grid", "launch_pdl")
_INT_FIELDS = (
    "num_warps", "num_ctas", "num_stages", "maxnreg", "shared", "tmem_size", "global_scratch_size",
    "global_scratch_align", "profile_scratch_size", "profile_scratch_align",
)  # fmt: skip
_DESCRIPTOR_FIELDS = {"swizzle", "elem_size", "elem_type", "block_size", "fp4_padded"}


def _is_plausible(name: str, value: Any) -> bool:
    """Return whether Triton may have written ``value`` for metadata field ``name``."""
    if name == "name":
        return isinstance(value, str)
    if name in _BOOL_FIELDS:
        return isinstance(value, bool)
    if name == "tensordesc_meta":
        return value is None or (
            isinstance(value, (list, tuple))
            and all(isinstance(each, dict) and each.keys() >= _DESCRIPTOR_FIELDS for each in value)
        )
    return name not in _INT_FIELDS or (type(value) is int and 0 <= value < 1 << 31)


def _is_complete_elf(data: bytes) -> bool:
    """Return whether ``data`` is a 64-bit ELF that contains all of its headers."""
    if len(data) < _ELF_HEADER.size:
        return False
    magic, programs, sections, *sizes = _ELF_HEADER.unpack_from(data)
    ends = programs + sizes[0] * sizes[1], sections + sizes[2] * sizes[3]
    return bool(magic == b"\x7fELF" and max(ends) <= len(data))
