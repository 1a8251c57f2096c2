"""Record, save and use packs. A pack is a file with tuning records and compiled kernels.

A pack is recorded in one process and used in other processes.

    with packs.recording() as used:          # in a new process, after all keys are tuned
        step(x)
    used.save("step.tdpack", [step])

    packs.use("step.tdpack")                 # on another host, before the first call
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from triton_dist import _archive, knobs
from triton_dist._archive import PackContents
from triton_dist._tuning.engine.dispatch import AutoTuner
from triton_dist._tuning.shared import file_store, read_only_store
from triton_dist._tuning.store import LayeredStore
from triton_dist._tuning.store.packs import merge_packs, pack_contents, records_of_function
from triton_dist._tuning.values import Key
from triton_dist._warn import warn
from triton_dist.errors import InvalidArgument, NoSuchFunction, TuningWarning
from triton_dist.runtime import triton_compat
from triton_dist.runtime.compiling import shipped
from triton_dist.runtime.compiling.recorder import Recorder

__all__ = ["Recording", "recording", "use"]


class Recording:
    """Kernels that this process loaded inside :func:`recording`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept: list[PackContents] | None = None

    def save(self, path: str | Path, functions: Sequence[AutoTuner[..., Any]] = ()) -> Path:
        """Write a pack and return its path. Packs with equal contents have equal bytes.

        Args:
            path: path of the file, ``<name>.tdpack``.
            functions: tuned functions. The pack has all records of these functions in
                ``TRITON_DIST_CACHE_DIR`` and ``TRITON_DIST_AUTOTUNE_READONLY_DIRS``, of all keys
                and GPU models.

        Raises:
            NoSuchFunction: a function has no record, or declares no ``version``.
            OSError: the file cannot be written.
        """
        read_only = map(read_only_store, knobs.autotune_readonly_dirs.get())
        store = LayeredStore([file_store(knobs.cache_dir.get()), *read_only])
        records = []
        for function in functions:
            key = Key.of(function.identity(), "", "")
            own = records_of_function(key, function.fingerprint(), store.records(key.function_name))
            if not own:
                raise NoSuchFunction(key.full_name, "it has no record", "Tune it first")
            records += own
        _archive.write(Path(path), merge_packs([pack_contents(records), *self._kernels()]))
        return Path(path)

    def _kernels(self) -> list[PackContents]:
        return _archive.contents_of_folder(self._folder) if self._kept is None else self._kept

    def _close(self) -> None:
        self._kept = self._kernels()


@contextmanager
def recording() -> Iterator[Recording]:
    """Context manager that records every kernel that this process compiles or loads.

    Enter it before the first launch. Kernels that were loaded earlier are not recorded, and a
    ``TuningWarning`` reports this. If a function is tuned inside, all its candidates are recorded,
    so tune before. Interpreted kernels are not recorded.
    """
    if not triton_compat.is_interpreting():
        shipped.use_packs()
        if triton_compat.has_loaded_kernels():
            warn(
                "kernels that this process launched earlier are not recorded: enter recording() "
                "before the first launch",
                TuningWarning,
            )
    with tempfile.TemporaryDirectory(prefix="triton_dist-recording-") as folder:
        recorder, result = Recorder(Path(folder)), Recording(Path(folder))
        recorder.begin()
        try:
            yield result
        finally:
            recorder.end()
            result._close()


def use(path: str | Path) -> None:
    """Use the pack at ``path`` in this process. It has precedence over all other packs.

    Packs in the folder ``packs/`` of ``TRITON_DIST_CACHE_DIR``, and of each folder in
    ``TRITON_DIST_AUTOTUNE_READONLY_DIRS``, are used without this call.

    Raises:
        InvalidArgument: ``path`` is not a path.
        PackRefused: the file is damaged, of a later format, or not a pack.
        OSError: the file cannot be read.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidArgument("packs.use", "path", path, "the path of a pack")
    _archive.use(Path(path))
    shipped.install()
    shipped.start_background_jobs()
