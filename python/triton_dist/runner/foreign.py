"""Read kernel metadata that other tools wrote: Triton's metadata, triton-runner's files, IR text.

Triton's metadata has what a launch requires, but not the specialisation (types, alignments and
constants of arguments). triton-runner's metadata also has the specialisation. The text of TTIR and
TTGIR has types and alignments of run-time arguments, but not the constants.
"""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton

from triton_dist._tuning.values import codec
from triton_dist._warn import warn_at
from triton_dist.errors import ArtefactRefused, ArtefactWarning, InvalidArgument, InvalidArtefact
from triton_dist.runner.artefact import UNKNOWN_ARCH, Artefact, ArtefactMetadata
from triton_dist.runner.specialisation import (
    CONSTANT,
    DIVISIBILITY,
    ArgumentPath,
    Specialisation,
    constant_tree,
)

SELF_DESCRIBING = ("ttir", "ttgir")
"""Levels that can be compiled and launched without metadata."""
_OPTION_FIELDS = (
    "num_warps", "num_ctas", "num_stages", "maxnreg", "enable_fp_fusion",
    "launch_cooperative_grid", "launch_pdl",
)  # fmt: skip
_LAUNCH_FIELDS = (
    "name", "num_warps", "shared", "tmem_size", "global_scratch_size", "global_scratch_align",
    "profile_scratch_size", "profile_scratch_align", "tensordesc_meta",
)  # fmt: skip
_INTERNAL_MODULES = re.compile(r"(triton|triton_dist)(\.|$)")
_TRITON_TYPES = {"f16": "fp16", "bf16": "bf16", "f32": "fp32", "f64": "fp64", "f8E5M2": "fp8e5",
          "f8E4M3FN": "fp8e4nv"}  # fmt: skip


def compiler_options_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the compiler inputs in Triton's metadata."""
    return {n: metadata[n] for n in _OPTION_FIELDS if metadata.get(n) is not None}


def launch_metadata_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the compiler results in Triton's metadata."""
    return {name: metadata[name] for name in _LAUNCH_FIELDS if metadata.get(name) is not None}


def metadata_of(src: Any, metadata: Mapping[str, Any], ttgir: str) -> ArtefactMetadata:
    """Return the complete metadata of a kernel that Triton compiled from ``src``."""
    function, arch = str(src.fn.__name__), int(metadata["target"].arch)
    named = {path: src.fn.arg_names[path[0]] for path in src.constants}
    constants = {}
    for path, value in src.constants.items():
        try:
            constants[path] = constant_tree(value)
        except TypeError as error:
            expected = f"a value with an exact text ({error})"
            raise InvalidArgument(function, named[path], value, expected) from error
    attributes = {path: dict(each) for path, each in src.attrs.items() if each}
    options = compiler_options_of(metadata)
    # With warp specialisation, num_warps in the metadata includes the helper warps.
    num_warps = re.search(r'"ttg\.num-warps" = (\d+)', ttgir)
    if num_warps:
        options["num_warps"] = int(num_warps[1])
    return ArtefactMetadata(
        function, arch, Specialisation(src.signature, constants, attributes), options,
        launch_metadata_of(metadata), f"triton {triton.__version__}",
    )  # fmt: skip


def read_metadata(metadata: Any, function: str, where: str) -> ArtefactMetadata:
    """Return ``metadata`` as ``ArtefactMetadata``.

    Args:
        metadata: a dict, the path of a JSON file, ``compiled.metadata``, or the compiled kernel
            itself. Only the compiled kernel always has the specialisation.
        function: name of the kernel.
        where: source of the metadata, for error messages.

    Raises:
        InvalidArtefact: ``metadata`` cannot be read.
    """
    if hasattr(metadata, "asm") and hasattr(metadata, "src"):
        return metadata_of(
            metadata.src, metadata.metadata._asdict(), str(metadata.asm.get("ttgir"))
        )
    try:
        if isinstance(metadata, (str, os.PathLike)):
            where, metadata = str(metadata), codec.loads(Path(metadata).read_bytes())
        tree = metadata._asdict() if hasattr(metadata, "_asdict") else metadata
        if "triton_dist_artefact" in tree:
            return ArtefactMetadata.from_tree(tree)
        target = tree["target"]
        arch = target["arch"] if isinstance(target, Mapping) else target.arch
        signature = tree.get("kernel_signature")
        specialisation = None if signature is None else _parse_triton_runner(signature)
        version = f"triton {tree.get('triton_version', '')}".strip()
        return ArtefactMetadata(
            function,
            int(arch),
            specialisation,
            compiler_options_of(tree),
            launch_metadata_of(tree),
            version,
        )
    except (OSError, KeyError, TypeError, ValueError, AttributeError, SyntaxError) as error:
        why = f"its metadata cannot be read: {type(error).__name__}: {error}"
        raise InvalidArtefact(where, why) from error


def _parse_triton_runner(signature: str) -> Specialisation:
    """Parse triton-runner's text: for each argument (name, type, specialisation, is keyword)."""
    arg_types: dict[str, Any] = {}
    constants: dict[ArgumentPath, Any] = {}
    attributes: dict[ArgumentPath, dict[str, int]] = {}
    for index, (name, arg_type, special, *_) in enumerate(ast.literal_eval(signature)):
        arg_types[name] = arg_type
        if arg_type == CONSTANT:
            constants[(index,)] = constant_tree(special)
        elif special == "D":
            attributes[(index,)] = {DIVISIBILITY: 16}
    return Specialisation(arg_types, constants, attributes)


def metadata_from_ir(function: str, text: str, where: str) -> ArtefactMetadata:
    """Return the metadata that the TTIR or TTGIR of a kernel contains."""
    if "tt.func" not in text:
        raise InvalidArtefact(where, "the text is not a kernel in TTIR or TTGIR")
    target = re.search(r'ttg\.target = "cuda:(\d+)"', text)
    warps = re.search(r'"ttg\.num-warps" = (\d+)', text)
    options = {"num_warps": int(warps[1])} if warps else {}
    try:
        return ArtefactMetadata(
            function, int(target[1]) if target else UNKNOWN_ARCH, None, options, {}
        )
    except ValueError as error:
        raise InvalidArtefact(where, str(error)) from error


def with_specialisation(artefact: Artefact, launch_specialisation: Specialisation) -> Artefact:
    """Return ``artefact`` with a specialisation.

    If the artefact has none, warn, read types and alignments from the IR, and take constants from
    ``launch_specialisation``. If the IR cannot be read, use all of ``launch_specialisation``.
    """
    if artefact.metadata.specialisation is not None:
        return artefact
    passed = [
        path for path, (_, arg_type) in launch_specialisation.leaves.items() if arg_type != CONSTANT
    ]
    arg_types = {path: arg_type for path, (_, arg_type) in launch_specialisation.leaves.items()}
    # A host-side tensor descriptor becomes several parameters in the IR.
    has_descriptors = any(arg_type.startswith("tensordesc") for arg_type in arg_types.values())
    is_readable = artefact.level in SELF_DESCRIBING and not has_descriptors
    arguments = _ir_arguments(artefact) if is_readable else None
    attributes = dict(launch_specialisation.attributes)
    unchecked_text = "neither types, alignments nor constants of its arguments can be checked"
    if arguments is not None:
        if len(arguments) != len(passed):
            raise ArtefactRefused(
                artefact.metadata.function, artefact.location,
                f"it takes {len(arguments)} arguments at run time, the call has {len(passed)}",
            )  # fmt: skip
        for path, (arg_type, known) in zip(passed, arguments, strict=True):
            attributes[path] = known
            if arg_type and arg_type != arg_types[path].replace("u", "i").replace("*k", "*"):
                # MLIR has neither unsigned types nor pointers to constants.
                arg_types[path] = arg_type
        unchecked_text = "constants of its arguments cannot be checked"
    warn_at(
        _calling_frame(),
        f"{artefact.location} has no specialisation: {unchecked_text}. Export the kernel with "
        "runner.export, or pass metadata_json=compiled, the kernel that a launch returned",
        ArtefactWarning,
    )
    types_by_name = {
        name: _nested_types((index,), arg_type, arg_types)
        for index, (name, arg_type) in enumerate(launch_specialisation.types.items())
    }
    specialisation = Specialisation(
        types_by_name, dict(launch_specialisation.constants), attributes
    )
    metadata = dataclasses.replace(artefact.metadata, specialisation=specialisation)
    return Artefact(artefact.level, artefact.data, metadata, artefact.location)


def _calling_frame() -> types.FrameType:
    """Return the frame of the launch: the innermost frame outside of Triton and this package."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and _INTERNAL_MODULES.match(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return frame or sys._getframe(1)


def _nested_types(path: ArgumentPath, arg_type: Any, arg_types: Mapping[ArgumentPath, str]) -> Any:
    if isinstance(arg_type, (tuple, list)):
        return tuple(
            _nested_types((*path, i), inner, arg_types) for i, inner in enumerate(arg_type)
        )
    return arg_types[path]


def _ir_arguments(artefact: Artefact) -> list[tuple[str, dict[str, int]]] | None:
    """Return type and attributes of each argument of the public function in the artefact's IR."""
    text = artefact.data.decode("utf-8", "replace")
    line = re.search(r"tt\.func public @[^(\n]*\((.*)", text)
    if line is None:
        return None
    found = []
    for argument in re.split(r"%[^\s:]+: ", line[1].partition(") attributes")[0])[1:]:
        arg_type = re.match(r"!tt\.ptr<\w+>|[\w.]*", argument)
        known = re.findall(r"(tt\.\w+) = (\d+) : i32", argument)
        found.append(
            (_triton_type(arg_type[0] if arg_type else ""), {name: int(n) for name, n in known})
        )
    return found


def _triton_type(arg_type: str) -> str:
    """Return Triton's name of an MLIR type; empty for a type that is not compared."""
    pointer = re.fullmatch(r"!tt\.ptr<(\w+)>", arg_type)
    if pointer:
        inner = _triton_type(pointer[1])
        return f"*{inner}" if inner else ""
    return _TRITON_TYPES.get(arg_type, arg_type if re.fullmatch(r"i\d+", arg_type) else "")
