"""Load kernels from packs (``.tdpack`` files of records and kernels) through Triton's cache.

Triton looks up compiled files by the kernel's digest, in a cache manager whose class is set in
``triton.knobs``. :class:`ShippedCache` queries the previous cache manager first, then the packs. It
extracts files of a pack to a temporary folder, so no writable home folder is needed.
"""

from __future__ import annotations

import atexit
import base64
import functools
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import triton
from triton.runtime.cache import CacheManager, FileCacheManager, triton_key

from triton_dist import knobs
from triton_dist._archive import Pack, pack_locations, packs_in, sha256
from triton_dist._warn import warn
from triton_dist.errors import CacheWarning, KernelNotShipped, PackRefused
from triton_dist.runtime import triton_compat
from triton_dist.runtime.compiling.facts import compilation_facts, differences, main_facts
from triton_dist.runtime.compiling.recorder import (
    MODULE_SUFFIX,
    Recorder,
    is_recording,
    module_facts,
    record_module,
)

_MAX_NAME_LENGTH = 150
"""Triton truncates a kernel's name to this length in file names."""

_previous_class: Any = None  # Triton's cache manager before ``use_packs``
_lock = threading.Lock()
# Paths of extracted files by name, by digest of the kernel
_extracted: dict[str, dict[str, str]] = {}
_warned: set[str] = set()  # texts of errors that were reported


class ShippedCache(CacheManager):
    """Triton cache manager that reads packs if the previous cache manager has no entry."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self._digest = base64.b32decode(key + "=" * (-len(key) % 8)).hex()
        # Triton also uses this class for its folders of overrides and dumps.
        self._is_cache = not (override or dump)
        self._previous, self._creation_error = None, None
        try:
            self._previous = (_previous_class or FileCacheManager)(
                key, override=override, dump=dump
            )
        except OSError as error:  # it creates a folder even for reads, and home may be read-only
            if not self._is_cache:
                raise
            self._creation_error = error

    def get_group(self, filename: str) -> dict[str, str] | None:
        found = None if self._previous is None else self._previous.get_group(filename)
        if not self._is_cache:
            return found
        frozen = knobs.compile_frozen.get()
        if frozen and triton.knobs.compilation.always_compile:
            raise _not_shipped(filename, "TRITON_ALWAYS_COMPILE is set")
        if not (found and filename in found):
            found = extracted_files(self._digest)
            if frozen and not (found and filename in found):
                raise _not_shipped(filename)
        return found

    def get_file(self, filename: str) -> str | None:
        found = None if self._previous is None else self._previous.get_file(filename)
        if not (self._is_cache and filename.endswith(MODULE_SUFFIX)):
            return found
        if found is None:
            found = (extracted_files(self._module_digest()) or {}).get(filename)
        if found is not None:
            record_module(self._module_digest(), filename, found)
        elif knobs.compile_frozen.get():
            raise _not_shipped(filename)
        return found

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        path = str(self._writable().put(data, filename, binary))
        if self._is_cache and filename.endswith(MODULE_SUFFIX):
            record_module(self._module_digest(), filename, path)
        return path

    def put_group(self, filename: str, group: dict[str, str]) -> Any:
        return self._writable().put_group(filename, group)

    def _writable(self) -> Any:
        if self._creation_error is not None:
            raise self._creation_error
        return self._previous

    def _module_digest(self) -> str:
        """Return the digest of a native module: of its C source, if Triton's call has one."""
        source = triton_compat.native_module_source()
        return sha256(source.encode()) if source else self._digest


def install() -> None:
    """Use packs if there are any. Record or refuse compilations if the environment requests it.

    The modules of the public interface call this when a program starts to use them.
    """
    if triton_compat.is_interpreting():
        return
    folder = knobs.record_kernels.get()
    if folder is not None and not is_recording(folder):
        use_packs()
        Recorder(folder).begin()
    if knobs.compile_frozen.get():
        use_packs()
    if any(packs_in(pack_locations())):
        use_packs()
        _hash_triton()


def use_packs() -> None:
    """Make :class:`ShippedCache` Triton's cache manager. Idempotent."""
    global _previous_class
    triton_compat.pin_defaults()
    if triton.knobs.cache.manager_class is not ShippedCache:
        _previous_class = triton.knobs.cache.manager_class
        triton.knobs.cache.manager_class = ShippedCache


def extracted_files(digest: str) -> dict[str, str] | None:
    """Extract the kernel with this digest from a pack. Return the paths of its files by name, or
    ``None`` if no pack has the kernel."""
    with _lock:
        if digest not in _extracted:
            for pack in packs_in(pack_locations()):
                if digest in pack.kernels and (paths := _extract(pack, digest)):
                    _extracted[digest] = paths
                    break
        return _extracted.get(digest)


def _extract(pack: Pack, digest: str) -> dict[str, str] | None:
    try:
        folder = _folder(os.getpid()) / digest
        folder.mkdir(exist_ok=True)
        paths = {}
        for name, data in pack.kernel(digest).files.items():
            (folder / name).write_bytes(data)
            paths[name] = str(folder / name)
    except (PackRefused, OSError) as error:
        if str(error) not in _warned:
            _warned.add(str(error))
            warn(str(error), CacheWarning)
        return None
    return paths


@functools.cache
def _folder(pid: int) -> Path:
    """Return the temporary folder of process ``pid``, which deletes it at exit."""
    folder = Path(tempfile.mkdtemp(prefix="triton_dist-kernels-"))

    def remove() -> None:
        if os.getpid() == pid:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


@functools.cache
def _hash_triton() -> None:
    """Hash Triton's source files in the background: 0.3 to 0.9 s, mostly without the GIL."""
    _start_thread(triton_key)


def start_background_jobs() -> None:
    """Run each of ``background_jobs`` in a thread if packs are in use."""
    if triton.knobs.cache.manager_class is ShippedCache and any(packs_in(pack_locations())):
        for job in background_jobs:
            _start_thread(job)


background_jobs: list[Callable[[], object]] = []
"""Functions to run while the program creates its process group and loads its model."""


def _start_thread(job: Callable[[], object]) -> None:
    def run() -> None:
        with suppress(Exception):  # the code that needs the result raises the error again
            job()

    threading.Thread(target=run, name="triton_dist prepares", daemon=True).start()


def _not_shipped(filename: str, reason: str = "") -> KernelNotShipped:
    """Return the error for a kernel or native module that must be compiled, although
    ``TRITON_DIST_COMPILE_FROZEN`` is set. It names the most similar kernel in a pack."""
    is_module = filename.endswith(MODULE_SUFFIX)
    if is_module:
        name, here = filename.removesuffix(MODULE_SUFFIX), module_facts()
        known, unlisted = here, "its C source, such as types of arguments,"
    else:
        name = filename.removesuffix(".json")
        here = compilation_facts(triton_compat.running_compilation())
        known, unlisted = main_facts(here), "Triton's own files"
    candidates = [
        (differences(entry.facts, here), digest, pack)
        for pack in packs_in(pack_locations())
        for digest, entry in pack.kernels.items()
        if entry.name[:_MAX_NAME_LENGTH] == name and entry.is_module == is_module
    ]
    if not candidates:
        return KernelNotShipped(name, known, "", (), reason)
    differ, digest, pack = min(candidates, key=lambda each: (len(each[0]), each[1]))
    nearest = f"{digest[:12]} in {pack.path}"
    return KernelNotShipped(name, known, nearest, differ or [f"{unlisted} differ"], reason)
