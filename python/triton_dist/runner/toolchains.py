"""Compile kernels with another installed Triton: ``kernel[grid](..., toolchain="3.8")``.

A newer compiler makes some kernels faster and others slower. Another process, on whose
``PYTHONPATH`` the other Triton is first, compiles the kernel for this process's GPU without using
the GPU. The resulting artefact (cubin and metadata) is stored in ``TRITON_DIST_CACHE_DIR`` and runs
in this process.
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
from triton_dist.errors import CompileTimeout, InvalidArgument, InvalidArtefact, KernelNotShipped
from triton_dist.runner import files, foreign
from triton_dist.runner.artefact import Artefact
from triton_dist.runner.specialisation import Specialisation, is_restorable, restore_constant
from triton_dist.runtime import triton_compat
from triton_dist.runtime.compiling.kernels import use_target

_PACKAGE_INIT = "triton/__init__.py"
_COMPILE_PROGRAM = (
    f"import json, sys; from {__name__} import compile_request; "
    "compile_request(json.load(sys.stdin))"
)
_NUM_REPORTED_LINES = 4


class Toolchain(str):
    """The name of a toolchain (an installed Triton); its ``repr`` includes the Triton version."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Toolchain({str(self)!r}, triton {_version(folder_of(str(self)))})"


def _version(folder: Path) -> str:
    source = (folder / _PACKAGE_INIT).read_text(encoding="utf-8")
    found = re.search(r"__version__ = ['\"](.+)['\"]", source)
    return found[1] if found else "of unknown version"


def folder_of(name: Any) -> Path:
    """Return the folder that ``TRITON_DIST_TOOLCHAINS`` has for toolchain ``name``."""
    known = dict(knobs.toolchains.get())
    if name not in known:
        named = ", ".join(known) or "none"
        expected = f"one of TRITON_DIST_TOOLCHAINS, which has {named}"
        raise InvalidArgument("runner.jit", "toolchain", name, expected)
    folder = known[name]
    if not (folder / _PACKAGE_INIT).exists():
        expected = f"a folder with the package triton in it, {folder} has none"
        raise InvalidArgument("runner.jit", "toolchain", name, expected)
    return folder.resolve()


def compile_with_toolchain(
    function: Any, name: str, specialisation: Specialisation, options: Mapping[str, Any], arch: int
) -> Artefact:
    """Return the artefact of ``function`` that toolchain ``name`` compiles for ``sm_<arch>``.

    Raises:
        InvalidArgument: unknown toolchain, or a kernel that another process cannot import.
        InvalidArtefact: the toolchain cannot compile the kernel, or the result cannot be read.
        CompileTimeout: compilation took longer than ``TRITON_DIST_COMPILE_TIMEOUT``.
        KernelNotShipped: the kernel is not in the cache, and compiling is forbidden.
    """
    folder = folder_of(name)
    # The other process imports the kernel by module and qualified name.
    if "<locals>" in function.fn.__qualname__:
        expected = "a module-level kernel; another process cannot import a kernel in a function"
        raise InvalidArgument(function.__name__, "toolchain", function.fn.__qualname__, expected)
    file = inspect.getsourcefile(function.fn)
    request = {
        "module": str(function.fn.__module__),
        "file": os.path.abspath(file) if file else "",
        "function": str(function.fn.__qualname__),
        "arguments": specialisation.to_tree(),
        "options": foreign.compiler_options_of(options),
        "arch": arch,
    }
    digest = codec.digest(request, function.cache_key, _version(folder))
    cached = knobs.cache_dir.get() / "toolchains" / digest
    if not cached.exists():
        if knobs.compile_frozen.get():
            why = f"the Triton in {folder} would compile it"
            argument_texts = specialisation.argument_texts()
            raise KernelNotShipped(function.__name__, argument_texts, "", (), why, str(cached))
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent) as temporary:
            output = Path(temporary, "made")
            _compile_in_subprocess(function.__name__, folder, {**request, "out": str(output)})
            with suppress(OSError):  # another rank has already created the folder
                output.rename(cached)
    return files.load(cached, function.__name__)


def _compile_in_subprocess(kernel: str, folder: Path, request: Mapping[str, Any]) -> None:
    paths = [str(folder), *(path or os.getcwd() for path in sys.path)]
    environment = knobs.environment() | {"PYTHONPATH": os.pathsep.join(paths)}
    seconds = knobs.compile_timeout.get()
    try:
        done = subprocess.run(
            [sys.executable, "-c", _COMPILE_PROGRAM], input=json.dumps(request), env=environment,
            capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise CompileTimeout(f"{kernel} by {folder}", seconds) from error
    if done.returncode:
        last_lines = "; ".join(done.stderr.strip().splitlines()[-_NUM_REPORTED_LINES:])
        raise InvalidArtefact(f"{kernel} by the Triton in {folder}", last_lines)


def compile_request(request: Mapping[str, Any]) -> None:
    """Compile the kernel of a ``request`` of :func:`compile_with_toolchain`, in another process."""
    target = GPUTarget("cuda", request["arch"], 32)
    use_target(target)
    function = _import_kernel(request["module"], request["file"], request["function"])
    specialisation = Specialisation.from_tree(request["arguments"])
    unreadable = [tree for tree in specialisation.constants.values() if not is_restorable(tree)]
    if unreadable:
        raise ValueError(f"constants that cannot be passed to another process: {unreadable}")
    constants = {path: restore_constant(tree) for path, tree in specialisation.constants.items()}
    attributes = {
        p: [[n, v] for n, v in each.items()] for p, each in specialisation.attributes.items()
    }
    source_class = triton_compat.source_class(function)
    source = source_class(function, dict(specialisation.types), constants, attributes)
    files.export(triton.compile(source, target=target, options=request["options"]), request["out"])


def _import_kernel(module_name: str, file: str, function: str) -> Any:
    """Import a kernel, and remove decorators that select configs, such as ``triton.autotune``."""
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
