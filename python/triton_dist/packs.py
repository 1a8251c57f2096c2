"""Tuning records and compiled kernels in one file, for hosts that neither tune nor compile.

with packs.recording() as used:          # in a process that starts anew and finds its records
    step(x)
used.save("step.tdpack", [step])

packs.use("step.tdpack")                 # elsewhere, before the first call
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from triton_dist import _archive, knobs
from triton_dist._archive import SUFFIX, Contents, Pack
from triton_dist._tuning.engine.dispatch import AutoTuner
from triton_dist._tuning.shared import file_store, read_only_store
from triton_dist._tuning.store import LayeredStore
from triton_dist._tuning.store.archive import contents_of, merged, own_records
from triton_dist._tuning.values import Key
from triton_dist._warn import warn
from triton_dist.errors import InvalidArgument, NoSuchFunction, TuningWarning
from triton_dist.runtime import triton_compat
from triton_dist.runtime.compiling import shipped
from triton_dist.runtime.compiling.recorder import Recorder

__all__ = ["Recording", "recording", "use"]


class Recording:
    """Kernels that this process loaded within :func:`recording`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept: list[Contents] | None = None

    def save(self, path: str | Path, functions: Sequence[AutoTuner] = ()) -> Path:
        """Write a pack; returns its path. The same contents give the same bytes.

        Args:
            path: of the file, by custom ``<something>.tdpack``.
            functions: tuned functions whose records, of every key and model of GPU that is in the
                user's cache or a read-only folder, go into it; those that were made when a module
                had another name, under its present one.

        Raises:
            NoSuchFunction: a function has no record, or declares no ``version``.
            OSError: the file cannot be written.
        """
        read_only = map(read_only_store, knobs.autotune_readonly_dirs.get())
        store = LayeredStore([file_store(knobs.cache_dir.get()), *read_only])
        records = []
        for function in functions:
            key = Key.of(function.origin(), "", "")
            found = own_records(key, function.fingerprint(), store.records_of(key))
            if not found:
                raise NoSuchFunction(key.full_name, "it has no record", "Tune it first")
            records += found
        _archive.write(Path(path), merged([contents_of(records), *self._kernels()]))
        return Path(path)

    def _kernels(self) -> list[Contents]:
        if self._kept is not None:
            return self._kept
        return [Pack(each).contents() for each in sorted(self._folder.glob(f"*{SUFFIX}"))]

    def _close(self) -> None:
        self._kept = self._kernels()


@contextmanager
def recording() -> Iterator[Recording]:
    """Within, every kernel that Triton compiles or finds is kept, with the native modules by which
    it is launched, in all threads of this process; for :meth:`Recording.save`.

    Begin it before the first launch: what is loaded already is not seen, and there is a
    ``TuningWarning`` then. What a tuning inside tries is kept too, so let the process find its
    records. Interpreted kernels leave nothing to keep.
    """
    if not triton_compat.is_interpreting():
        shipped.look_here()
        if triton_compat.has_loaded_kernels():
            warn(
                "kernels that this process launched before are not recorded: begin recording "
                "before the first launch",
                TuningWarning,
            )
    with tempfile.TemporaryDirectory(prefix="triton_dist-recording-") as folder:
        recorder, found = Recorder(Path(folder)), Recording(Path(folder))
        recorder.begin()
        try:
            yield found
        finally:
            recorder.end()
            found._close()


def use(path: str | Path) -> None:
    """Look into the pack ``path`` before all other packs, in this process, for records and kernels.

    Packs in ``packs/`` of ``TRITON_DIST_CACHE_DIR`` and of each folder of
    ``TRITON_DIST_AUTOTUNE_READONLY_DIRS`` are used without it.

    Raises:
        InvalidArgument: ``path`` is no path.
        PackRefused: it is damaged, of a later format, or no pack.
        OSError: it cannot be read.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidArgument("packs.use", "path", path, "the path of a pack")
    _archive.use(Path(path))
    shipped.install()
    shipped.prepare()
