"""Kernels compiled by another installed Triton: ``kernel[grid](..., toolchain="3.8")``.

A compiler's next version makes some kernels slower, and some faster. A process that has the other
Triton first on its path compiles the kernel, for the architecture of this one's GPU, which it does
not touch; what it made is an artefact, kept in ``TRITON_DIST_CACHE_DIR``, and runs here.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from triton_dist import knobs
from triton_dist._tuning.values import codec
from triton_dist.errors import (
    CompileTimeout,
    InvalidArgument,
    InvalidArtefact,
    KernelNotShipped,
)
from triton_dist.runner import files, foreign
from triton_dist.runner.artefact import Artefact
from triton_dist.runner.specialisation import Specialisation, can_be_read, value_of
from triton_dist.runtime import triton_compat
from triton_dist.runtime.compiling.kernels import without_gpu

_PACKAGE = "triton/__init__.py"
_PROGRAM = (
    f"import json, sys; from {__name__} import compile_here; compile_here(json.load(sys.stdin))"
)
_LAST_LINES = 4


class Toolchain(str):
    """The name of a toolchain, which prints with the version of its Triton."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Toolchain({str(self)!r}, triton {_version(folder_of(str(self)))})"


def _version(folder: Path) -> str:
    source = (folder / _PACKAGE).read_text(encoding="utf-8")
    found = re.search(r"__version__ = ['\"](.+)['\"]", source)
    return found[1] if found else "of no known version"


def folder_of(name: Any) -> Path:
    """The folder that has the Triton of that name.

    Raises:
        InvalidArgument: there is none in ``TRITON_DIST_TOOLCHAINS``.
    """
    known = dict(knobs.toolchains.get())
    if name not in known:
        named = ", ".join(known) or "none"
        expected = f"one of TRITON_DIST_TOOLCHAINS, which has {named}"
        raise InvalidArgument("runner.jit", "toolchain", name, expected)
    folder = known[name]
    if not (folder / _PACKAGE).exists():
        expected = f"a folder with the package triton in it, {folder} has none"
        raise InvalidArgument("runner.jit", "toolchain", name, expected)
    return folder.resolve()


def compiled(
    function: Any, name: str, call: Specialisation, options: Mapping[str, Any], arch: int
) -> Artefact:
    """``function``, specialised as ``call``, from the toolchain called ``name``.

    Raises:
        InvalidArgument: no such toolchain; a kernel that another process cannot import.
        InvalidArtefact: that Triton cannot compile it, or tells of it what cannot be used.
        CompileTimeout: it took longer than ``TRITON_DIST_COMPILE_TIMEOUT``.
        KernelNotShipped: it was not compiled before, and compiling is forbidden.
    """
    folder = folder_of(name)
    # By what another process finds the kernel.
    if "<locals>" in function.fn.__qualname__:
        expected = "a kernel of a module; another process cannot see one that a function defines"
        raise InvalidArgument(function.__name__, "toolchain", function.fn.__qualname__, expected)
    file = inspect.getsourcefile(function.fn)
    request = {
        "module": str(function.fn.__module__),
        "file": os.path.abspath(file) if file else "",
        "function": str(function.fn.__qualname__),
        "arguments": call.to_tree(),
        "options": foreign.options_of(options),
        "arch": arch,
    }
    digest = codec.digest(request, function.cache_key, _version(folder))
    kept = knobs.cache_dir.get() / "toolchains" / digest
    if not kept.exists():
        if knobs.compile_frozen.get():
            why = f"the Triton in {folder} would compile it"
            raise KernelNotShipped(function.__name__, call.shown(), "", (), why, str(kept))
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as beside:
            made = Path(beside, "made")
            _compile_apart(function.__name__, folder, {**request, "out": str(made)})
            with suppress(OSError):  # another rank was faster, and its folder is not empty
                made.rename(kept)
    return files.load(kept, function.__name__)


def _compile_apart(kernel: str, folder: Path, request: Mapping[str, Any]) -> None:
    paths = [str(folder), *(path or os.getcwd() for path in sys.path)]
    environment = knobs.environment() | {"PYTHONPATH": os.pathsep.join(paths)}
    seconds = knobs.compile_timeout.get()
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM], input=json.dumps(request), env=environment,
            capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise CompileTimeout(f"{kernel} by {folder}", seconds) from error
    if done.returncode:
        said = "; ".join(done.stderr.strip().splitlines()[-_LAST_LINES:])
        raise InvalidArtefact(f"{kernel} by the Triton in {folder}", said)


def compile_here(request: Mapping[str, Any]) -> None:
    """Do what ``compiled`` asks another process for."""
    target = GPUTarget("cuda", request["arch"], 32)
    without_gpu(target)
    function = _found(request["module"], request["file"], request["function"])
    made_for = Specialisation.from_tree(request["arguments"])
    unreadable = [tree for tree in made_for.constants.values() if not can_be_read(tree)]
    if unreadable:
        raise ValueError(f"constants that another process cannot be given: {unreadable}")
    constants = {place: value_of(tree) for place, tree in made_for.constants.items()}
    attributes = {p: [[n, v] for n, v in each.items()] for p, each in made_for.attributes.items()}
    source_class = triton_compat.source_class(function)
    source = source_class(function, dict(made_for.types), constants, attributes)
    files.export(triton.compile(source, target=target, options=request["options"]), request["out"])


def _found(module_name: str, file: str, function: str) -> Any:
    """The kernel, without decorators that chose among its configs."""
    try:
        if module_name == "__main__":
            raise ImportError
        module = importlib.import_module(module_name)
    except ImportError:
        spec = importlib.util.spec_from_file_location("triton_dist_toolchain_kernels", file)
        if spec is None or spec.loader is None:
            raise
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    found: Any = module
    for part in function.split("."):
        found = getattr(found, part)
    while not isinstance(found, triton.JITFunction):
        found = found.fn
    return found
