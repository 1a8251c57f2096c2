"""Record the kernels that a process compiles or loads, in a pack (``.tdpack`` file) per kernel.

With separate files, nothing is lost if the process is killed, and several ranks can write to one
folder. ``triton-dist pack`` merges the files.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton

from triton_dist._archive import SUFFIX, PackContents, PackedKernel, write
from triton_dist._warn import warn_without_raising
from triton_dist.errors import CacheWarning
from triton_dist.runtime import triton_compat
from triton_dist.runtime.compiling.facts import compilation_facts

MODULE_SUFFIX: str = sysconfig.get_config_var("EXT_SUFFIX")
"""File name suffix of a native module. It contains the Python version."""

_RECORDED_SUFFIXES = (".json", ".cubin")
"""Files that a launch needs. Files of the earlier compilation stages are several times larger."""

_active_recorders: list[Recorder] = []


class Recorder:
    """Write each kernel and native module that Triton compiles or loads to ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._previous_listener: Any = None

    def begin(self) -> None:
        knobs = triton.knobs.compilation
        self._previous_listener, knobs.listener = knobs.listener, self
        _active_recorders.append(self)

    def end(self) -> None:
        _active_recorders.remove(self)
        if triton.knobs.compilation.listener is self:
            triton.knobs.compilation.listener = self._previous_listener

    def __call__(self, *, metadata: Mapping[str, Any], **details: Any) -> None:
        """Record a kernel that Triton has compiled or loaded. Kernels that ``triton_dist.runner``
        built are not recorded."""
        try:
            compilation = triton_compat.running_compilation()
            if compilation:
                paths: Mapping[str, str] = details["metadata_group"]
                files = {
                    name: Path(path)
                    for name, path in paths.items()
                    if name.endswith(_RECORDED_SUFFIXES)
                }
                facts = compilation_facts(compilation)
                self.write(str(metadata["hash"]), str(metadata["name"]), facts, files)
        except Exception as error:
            warn_without_raising(
                f"kernel {metadata.get('name')} is not recorded: {error!r}", CacheWarning
            )
        if self._previous_listener is not None:
            self._previous_listener(metadata=metadata, **details)

    def write(
        self, digest: str, name: str, facts: Mapping[str, str], paths: Mapping[str, Path]
    ) -> None:
        """Write a kernel to the folder. If that fails, warn: recording must not fail a launch."""
        try:
            files = {each: path.read_bytes() for each, path in paths.items()}
            kernels = {digest: PackedKernel(name, facts, files)}
            write(self.folder / f"{digest}{SUFFIX}", PackContents({}, kernels))
        except OSError as error:
            warn_without_raising(f"kernel {name} is not recorded: {error}", CacheWarning)


def is_recording(folder: Path) -> bool:
    return any(each.folder == folder for each in _active_recorders)


def record_module(digest: str, filename: str, path: str) -> None:
    """Record a native module that Triton built or loaded."""
    name = filename.removesuffix(MODULE_SUFFIX)
    for recorder in _active_recorders:
        recorder.write(digest, name, module_facts(), {filename: Path(path)})


def module_facts() -> dict[str, str]:
    """Return the versions of Python and Triton for which native modules are built here."""
    return {"python": MODULE_SUFFIX.split(".")[1], "triton": triton.__version__}
