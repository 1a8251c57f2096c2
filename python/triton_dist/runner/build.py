"""Run Triton's compiler from any level down to the cubin.

Only this module and ``function.py`` call private parts of Triton. This module uses the stages of a
backend, ``parse`` and ``CompiledKernel``, which are equal in Triton 3.6 to 3.9.
``tests/compile/test_runner.py`` checks that every level gives the same cubin; ``make versions``
runs this test with each version of Triton.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import re
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import triton
from triton._C.libtriton import get_cache_invalidating_env_vars, ir, llvm
from triton.compiler.compiler import CompiledKernel, parse

from triton_dist import knobs
from triton_dist.errors import InvalidArtefact, KernelNotShipped
from triton_dist.runner.artefact import LEVELS, Artefact
from triton_dist.runner.foreign import SELF_DESCRIBING
from triton_dist.runner.specialisation import ArgumentPath, Specialisation

_LAUNCH_DEFAULTS = {
    "tmem_size": 0, "global_scratch_size": 0, "global_scratch_align": 1, "profile_scratch_size": 0,
    "profile_scratch_align": 1,
}  # fmt: skip
"""Metadata that launchers read but that kernels of Triton before 3.6 do not have, with defaults."""
_FORK_SECONDS = 60.0
"""Time limit of ``_try_in_fork``, whose work normally takes milliseconds."""


def build(
    function: Any,
    artefact: Artefact,
    specialisation: Specialisation,
    constants: Mapping[ArgumentPath, Any],
    options: Any,
    target: Any,
    backend: Any,
) -> Any:
    """Return Triton's ``CompiledKernel`` of ``artefact``, compiled from its level down.

    Args:
        function: the JIT function.
        artefact: the kernel.
        specialisation: specialisation of the artefact, which may be more general than the launch's.
        constants: values of the constants of ``specialisation``.
        options, target, backend: compiler options, GPU target and compiler backend of the launch.

    Raises:
        InvalidArtefact: Triton cannot read or compile the artefact.
        KernelNotShipped: the artefact must be compiled, and compiling is forbidden.
    """
    if artefact.level != LEVELS[-1] and knobs.compile_frozen.get():
        why = f"it would be compiled from {artefact.level}, {artefact.location}"
        raise KernelNotShipped(
            function.__name__, specialisation.argument_texts(), "", (), why, "its cubin"
        )
    attributes = {
        p: [[n, v] for n, v in each.items()] for p, each in specialisation.attributes.items()
    }
    src = function.ASTSource(function, dict(specialisation.types), dict(constants), attributes)
    artefact_options = {n: v for n, v in artefact.metadata.options.items() if hasattr(options, n)}
    try:
        options = dataclasses.replace(options, **artefact_options, ir_override=None)
    except AssertionError as error:
        raise InvalidArtefact(artefact.location, f"its options are wrong: {error}") from error
    metadata = {
        "hash": artefact.digest,
        "target": target,
        **vars(options),
        **get_cache_invalidating_env_vars(),
        "triton_version": triton.__version__,
        **_LAUNCH_DEFAULTS,
        **artefact.metadata.launch_metadata,  # results of the skipped stages
    }
    # CompiledKernel reads its files once, so the folder may be temporary.
    with tempfile.TemporaryDirectory(prefix="triton_dist_") as folder:
        try:
            group, stage_us = _lower(Path(folder), function.__name__, artefact, src, metadata,
                                 options, backend)  # fmt: skip
        except Exception as error:
            why = f"Triton {triton.__version__} cannot compile it: {type(error).__name__}: {error}"
            if artefact.level in SELF_DESCRIBING:  # MLIR prints its errors to standard error only
                compiler = artefact.metadata.compiler or "an unknown version"
                why += (
                    f" (see standard error; {compiler} wrote it, and IR differs between versions)"
                )
            raise InvalidArtefact(artefact.location, why) from error
        kernel = CompiledKernel(src, group, artefact.digest)
        listener = triton.knobs.compilation.listener
        if listener is not None:
            listener(src=src, metadata=kernel.metadata._asdict(), metadata_group=group,
                     times=triton.knobs.CompileTimes(0, stage_us, 0), cache_hit=True)  # fmt: skip
    return kernel


def _lower(
    folder: Path, name: str, artefact: Artefact, src: Any, metadata: dict[str, Any],
    options: Any, backend: Any,
) -> tuple[dict[str, str], list[tuple[str, int]]]:  # fmt: skip
    """Compile to the cubin; return the path of each file, and the microseconds of each stage."""
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, src.language)
    if artefact.level not in stages:
        raise ValueError(f"a kernel of this kind has the levels {', '.join(stages)}")
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    group: dict[str, str] = {}

    def save(level: str, content: Any) -> Path:
        path = folder / f"{name}.{level}"
        path.write_bytes(content if isinstance(content, bytes) else str(content).encode())
        group[path.name] = str(path)
        return path

    first = save(artefact.level, with_strides_in_bytes(artefact))
    module = parse(str(first), artefact.level, context)
    if artefact.level == "llir":
        llvm.init_targets()  # LLVM crashes without; make_llir, which calls it, is skipped here
        _try_in_fork(lambda: stages["ptx"](module, dict(metadata)))
    stage_us = []
    for level in LEVELS[LEVELS.index(artefact.level) + 1 :]:
        begin = time.perf_counter()
        module = stages[level](module, metadata)
        stage_us.append((level, int((time.perf_counter() - begin) * 1e6)))
        save(level, module)
    save("json", json.dumps(metadata, default=vars))
    return group, stage_us


def _try_in_fork(step: Callable[[], object]) -> None:
    """Run ``step`` in a forked process, because LLVM aborts the process on invalid text. If the
    forked process fails, raise ``ValueError`` with the last lines of its standard error."""
    with tempfile.TemporaryFile() as stderr, warnings.catch_warnings():
        # Python warns about a fork with threads; the forked process starts no threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
        if child == 0:
            os.dup2(stderr.fileno(), 2)
            faulthandler.disable()
            try:
                step()
            except Exception as error:
                os.write(2, f"{type(error).__name__}: {error}".encode())
                os._exit(1)
            os._exit(0)
        deadline = time.monotonic() + _FORK_SECONDS
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                deadline = float("inf")
            time.sleep(1e-3)
        stderr.seek(0)
        if ended[1]:
            last = stderr.read().decode("utf-8", "replace").strip().splitlines()[-4:]
            raise ValueError("; ".join(last) or f"status {ended[1]}")


_STRIDE_INSTRUCTION = b"tensormap.replace.tile.global_stride"
_STRIDE_PATTERN = re.compile(
    rb"(@!?[%$]\w+\s+)?("
    + re.escape(_STRIDE_INSTRUCTION)
    + rb"[\w:.]*\s*\[[^\]]*\],\s*\w+,\s*)([%$]\w+);"
)
"""Matches PTX or LLIR. Groups: predicate, instruction without its last operand, last operand."""
_BLACKWELL = 100
"""From this architecture on, Triton 3.3 uses a ptxas later than CUDA 12.4."""


def with_strides_in_bytes(artefact: Artefact) -> bytes:
    """Return the text of ``artefact``, with strides of tensor descriptors converted to bytes.

    Triton up to 3.3 writes strides in units of 16 bytes, for ptxas of CUDA 12.4. ptxas of CUDA 12.8
    (Triton 3.4 and later) expects bytes, whatever version the PTX declares. Without the conversion,
    the kernel would run with strides that are 16 times too small.
    """
    text = artefact.data
    if _STRIDE_INSTRUCTION not in text or not _counts_in_16_bytes(artefact):
        return text
    text, count = _STRIDE_PATTERN.subn(
        rb"{ .reg .b64 %bytes; shl.b64 %bytes, \3, 4; \1\2%bytes; }", artefact.data
    )
    if count != artefact.data.count(_STRIDE_INSTRUCTION):
        why = f"this form of {_STRIDE_INSTRUCTION.decode()} cannot be converted. Run the cubin"
        where = "it is for CUDA 12.4, whose ptxas counts strides in units of 16 bytes"
        raise InvalidArtefact(artefact.location, f"{where}: {why}")
    return text


def _counts_in_16_bytes(artefact: Artefact) -> bool:
    triton = re.match(r"triton (\d+)\.(\d+)", artefact.metadata.compiler)
    if triton and (int(triton[1]), int(triton[2])) >= (3, 4):
        return False
    if artefact.level == "ptx":
        isa = re.search(rb"^\.version (\d+)\.(\d+)", artefact.data, re.MULTILINE)
        return isa is not None and (int(isa[1]), int(isa[2])) < (8, 5)
    return artefact.level == "llir" and triton is not None and artefact.metadata.arch < _BLACKWELL
