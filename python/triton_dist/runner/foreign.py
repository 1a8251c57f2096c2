"""Read kernel metadata that other tools wrote: Triton's metadata, triton-runner's files, IR text.

Triton's metadata has the launch facts, but not the specialisation. triton-runner adds types,
alignments and constants. TTIR and TTGIR contain the types and alignments of run-time arguments:
a launch of these can be checked except for its constants.
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
from triton_dist.runner.artefact import UNKNOWN, About, Artefact
from triton_dist.runner.specialisation import CONSTANT, DIVISIBILITY, Place, Specialisation, tree_of

SELF_DESCRIBING = ("ttir", "ttgir")
"""Levels whose text contains all launch facts."""
_OPTIONS = (
    "num_warps", "num_ctas", "num_stages", "maxnreg", "enable_fp_fusion",
    "launch_cooperative_grid", "launch_pdl",
)  # fmt: skip
_LAUNCH = (
    "name", "num_warps", "shared", "tmem_size", "global_scratch_size", "global_scratch_align",
    "profile_scratch_size", "profile_scratch_align", "tensordesc_meta",
)  # fmt: skip
_LIBRARIES = re.compile(r"(triton|triton_dist)(\.|$)")
_TYPES = {"f16": "fp16", "bf16": "bf16", "f32": "fp32", "f64": "fp64", "f8E5M2": "fp8e5",
          "f8E4M3FN": "fp8e4nv"}  # fmt: skip


def options_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the compiler inputs in Triton's metadata."""
    return {n: metadata[n] for n in _OPTIONS if metadata.get(n) is not None}


def launch_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the compiler results in Triton's metadata."""
    return {name: metadata[name] for name in _LAUNCH if metadata.get(name) is not None}


def about_of(src: Any, metadata: Mapping[str, Any], ttgir: str) -> About:
    """Return the complete metadata of a kernel that Triton compiled from ``src``."""
    function, arch = str(src.fn.__name__), int(metadata["target"].arch)
    named = {place: src.fn.arg_names[place[0]] for place in src.constants}
    constants = {}
    for place, value in src.constants.items():
        try:
            constants[place] = tree_of(value)
        except TypeError as error:
            expected = f"a value with an exact text ({error})"
            raise InvalidArgument(function, named[place], value, expected) from error
    attributes = {place: dict(each) for place, each in src.attrs.items() if each}
    options = options_of(metadata)
    # With warp specialisation, num_warps in the metadata includes the helper warps.
    num_warps = re.search(r'"ttg\.num-warps" = (\d+)', ttgir)
    if num_warps:
        options["num_warps"] = int(num_warps[1])
    return About(
        function, arch, Specialisation(src.signature, constants, attributes), options,
        launch_of(metadata), f"triton {triton.__version__}",
    )  # fmt: skip


def about(metadata: Any, function: str, where: str) -> About | None:
    """Return the facts in ``metadata``; ``None`` if ``metadata`` is ``None``.

    Args:
        metadata: a dict, the path of a JSON file, ``compiled.metadata``, or the compiled kernel
            itself, which has the most facts.

    Raises:
        InvalidArtefact: ``metadata`` cannot be read.
    """
    if metadata is None:
        return None
    if hasattr(metadata, "asm") and hasattr(metadata, "src"):
        return about_of(metadata.src, metadata.metadata._asdict(), str(metadata.asm.get("ttgir")))
    try:
        if isinstance(metadata, (str, os.PathLike)):
            where, metadata = str(metadata), codec.loads(Path(metadata).read_bytes())
        tree = metadata._asdict() if hasattr(metadata, "_asdict") else metadata
        if "triton_dist_artefact" in tree:
            return About.from_tree(tree)
        target = tree["target"]
        arch = target["arch"] if isinstance(target, Mapping) else target.arch
        signature = tree.get("kernel_signature")
        made_for = None if signature is None else _parse_triton_runner(signature)
        version = f"triton {tree.get('triton_version', '')}".strip()
        return About(function, int(arch), made_for, options_of(tree), launch_of(tree), version)
    except (OSError, KeyError, TypeError, ValueError, AttributeError, SyntaxError) as error:
        why = f"its metadata cannot be read: {type(error).__name__}: {error}"
        raise InvalidArtefact(where, why) from error


def _parse_triton_runner(signature: str) -> Specialisation:
    """Parse triton-runner's text: a tuple of (name, type, specialisation, passed by keyword)."""
    kinds: dict[str, Any] = {}
    constants: dict[Place, Any] = {}
    attributes: dict[Place, dict[str, int]] = {}
    for index, (name, kind, special, *_) in enumerate(ast.literal_eval(signature)):
        kinds[name] = kind
        if kind == CONSTANT:
            constants[(index,)] = tree_of(special)
        elif special == "D":
            attributes[(index,)] = {DIVISIBILITY: 16}
    return Specialisation(kinds, constants, attributes)


def about_from_ir(function: str, text: str, where: str) -> About:
    """Return the facts in the TTIR or TTGIR of a kernel without metadata."""
    if "tt.func" not in text:
        raise InvalidArtefact(where, "the text is not a kernel in TTIR or TTGIR")
    target = re.search(r'ttg\.target = "cuda:(\d+)"', text)
    warps = re.search(r'"ttg\.num-warps" = (\d+)', text)
    options = {"num_warps": int(warps[1])} if warps else {}
    try:
        return About(function, int(target[1]) if target else UNKNOWN, None, options, {})
    except ValueError as error:
        raise InvalidArtefact(where, str(error)) from error


def with_specialisation(artefact: Artefact, call: Specialisation) -> Artefact:
    """Return ``artefact`` with a specialisation.

    If its specialisation is unknown, read types and alignments from the IR, add the constants of
    ``call``, and warn. If the IR has no types either, use the specialisation of ``call``.
    """
    if artefact.about.specialisation is not None:
        return artefact
    passed = [place for place, (_, kind) in call.leaves.items() if kind != CONSTANT]
    kinds = {place: kind for place, (_, kind) in call.leaves.items()}
    # A host-side tensor descriptor becomes several parameters in the IR.
    has_descriptors = any(kind.startswith("tensordesc") for kind in kinds.values())
    is_readable = artefact.level in SELF_DESCRIBING and not has_descriptors
    arguments = _ir_arguments(artefact) if is_readable else None
    attributes = dict(call.attributes)
    unchecked = "neither types, alignments nor constants of its arguments can be checked"
    if arguments is not None:
        if len(arguments) != len(passed):
            raise ArtefactRefused(
                artefact.about.function, artefact.where,
                f"it takes {len(arguments)} arguments at run time, the call has {len(passed)}",
            )  # fmt: skip
        for place, (kind, known) in zip(passed, arguments, strict=True):
            attributes[place] = known
            if kind and kind != kinds[place].replace("u", "i").replace("*k", "*"):
                kinds[place] = kind  # MLIR has neither unsigned types nor pointers to constants
        unchecked = "constants of its arguments cannot be checked"
    warn_at(
        _calling_frame(),
        f"{artefact.where} has no specialisation: {unchecked}. Export the kernel with "
        "runner.export, or pass metadata_json=compiled, the kernel that a launch returned",
        ArtefactWarning,
    )
    every = {name: _nested((index,), kind, kinds)
             for index, (name, kind) in enumerate(call.types.items())}  # fmt: skip
    made_for = Specialisation(every, dict(call.constants), attributes)
    about = dataclasses.replace(artefact.about, specialisation=made_for)
    return Artefact(artefact.level, artefact.data, about, artefact.where)


def _calling_frame() -> types.FrameType:
    """Return the frame of the launch: the innermost frame outside of Triton and this package."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and _LIBRARIES.match(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return frame or sys._getframe(1)


def _nested(place: Place, kind: Any, kinds: Mapping[Place, str]) -> Any:
    if isinstance(kind, (tuple, list)):
        return tuple(_nested((*place, i), inner, kinds) for i, inner in enumerate(kind))
    return kinds[place]


def _ir_arguments(artefact: Artefact) -> list[tuple[str, dict[str, int]]] | None:
    """Return the type and the known attributes of each argument of the IR's public function."""
    text = artefact.data.decode("utf-8", "replace")
    line = re.search(r"tt\.func public @[^(\n]*\((.*)", text)
    if line is None:
        return None
    found = []
    for argument in re.split(r"%[^\s:]+: ", line[1].partition(") attributes")[0])[1:]:
        kind = re.match(r"!tt\.ptr<\w+>|[\w.]*", argument)
        known = re.findall(r"(tt\.\w+) = (\d+) : i32", argument)
        found.append((_type(kind[0] if kind else ""), {name: int(n) for name, n in known}))
    return found


def _type(kind: str) -> str:
    """Return Triton's name of an MLIR type; empty for a type that is not compared."""
    pointer = re.fullmatch(r"!tt\.ptr<(\w+)>", kind)
    if pointer:
        inner = _type(pointer[1])
        return f"*{inner}" if inner else ""
    return _TYPES.get(kind, kind if re.fullmatch(r"i\d+", kind) else "")
