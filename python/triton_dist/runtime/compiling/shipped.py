"""Kernels that were compiled elsewhere, where Triton looks for its own.

Triton asks its cache manager, a class in ``triton.knobs``, for the files under a digest of source,
specialisation, target, options, versions and some environment variables. Ours asks the manager that
was there before, then packs, so the worst that can happen is a miss. What is found in a pack is
written to a temporary folder of the process, where Triton reads it at once: nothing is left behind,
and no home folder need be writable.
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
from triton_dist._archive import Pack, pack_places, packs_in, sha256
from triton_dist._warn import warn
from triton_dist.errors import CacheWarning, KernelNotShipped, PackRefused
from triton_dist.runtime import triton_compat
from triton_dist.runtime.compiling.facts import differences, facts_of, shown
from triton_dist.runtime.compiling.recorder import (
    MODULE_SUFFIX,
    Recorder,
    is_recording,
    module_facts,
    saw_module,
)

_LONGEST_NAME = 150
"""Letters of a kernel's name that Triton puts into names of files."""

_before: Any = None
_lock = threading.Lock()
_laid_out: dict[str, dict[str, str]] = {}
_warned: set[str] = set()


class ShippedCache(CacheManager):
    """Files of one digest: of the cache manager that was there before, else of a pack."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self._digest = base64.b32decode(key + "=" * (-len(key) % 8)).hex()
        self._is_cache = not (override or dump)  # else a folder in which people edit and look
        self._own, self._refusal = None, None
        try:
            self._own = (_before or FileCacheManager)(key, override=override, dump=dump)
        except OSError as error:  # it makes folders even to read, and a home may be read-only
            if not self._is_cache:
                raise
            self._refusal = error

    def get_group(self, filename: str) -> dict[str, str] | None:
        found = None if self._own is None else self._own.get_group(filename)
        if not self._is_cache:
            return found
        frozen = knobs.compile_frozen.get()
        if frozen and triton.knobs.compilation.always_compile:
            raise _not_shipped(filename, "TRITON_ALWAYS_COMPILE is set")
        if not (found and filename in found):
            found = files_of(self._digest)
            if frozen and not (found and filename in found):
                raise _not_shipped(filename)
        return found

    def get_file(self, filename: str) -> str | None:
        found = None if self._own is None else self._own.get_file(filename)
        if not (self._is_cache and filename.endswith(MODULE_SUFFIX)):
            return found
        if found is None:
            found = (files_of(self._module_digest()) or {}).get(filename)
        if found is not None:
            saw_module(self._module_digest(), filename, found)
        elif knobs.compile_frozen.get():
            raise _not_shipped(filename)
        return found

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        path = str(self._writable().put(data, filename, binary))
        if self._is_cache and filename.endswith(MODULE_SUFFIX):
            saw_module(self._module_digest(), filename, path)
        return path

    def put_group(self, filename: str, group: dict[str, str]) -> Any:
        return self._writable().put_group(filename, group)

    def _writable(self) -> Any:
        if self._refusal is not None:
            raise self._refusal
        return self._own

    def _module_digest(self) -> str:
        """The digest of the C source alone: the file's name says for which Python it is."""
        source = triton_compat.module_source()
        return sha256(source.encode()) if source else self._digest


def install() -> None:
    """Have Triton look into packs, if there are any; and refuse to compile, or record, if the
    environment says so. Called wherever a program begins to use triton_dist."""
    if triton_compat.is_interpreting():
        return
    folder = knobs.record_kernels.get()
    if folder is not None and not is_recording(folder):
        look_here()
        Recorder(folder).begin()
    if knobs.compile_frozen.get():
        look_here()
    if any(packs_in(pack_places())):
        look_here()
        _hash_triton()


def look_here() -> None:
    """Make :class:`ShippedCache` Triton's cache manager. Idempotent."""
    global _before
    triton_compat.pin_defaults()
    if triton.knobs.cache.manager_class is not ShippedCache:
        _before = triton.knobs.cache.manager_class
        triton.knobs.cache.manager_class = ShippedCache


def files_of(digest: str) -> dict[str, str] | None:
    """Paths of the files under ``digest`` by name, written where Triton can read them; ``None`` if
    no pack has them whole."""
    with _lock:
        if digest not in _laid_out:
            for pack in packs_in(pack_places()):
                if digest in pack.kernels and (paths := _lay_out(pack, digest)):
                    _laid_out[digest] = paths
                    break
        return _laid_out.get(digest)


def _lay_out(pack: Pack, digest: str) -> dict[str, str] | None:
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
def _folder(process: int) -> Path:
    """A folder of this process; a fork has another, since each removes its own."""
    folder = Path(tempfile.mkdtemp(prefix="triton_dist-kernels-"))

    def remove() -> None:
        if os.getpid() == process:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


@functools.cache
def _hash_triton() -> None:
    """Hash Triton's own files, a part of every digest, while the program does something else: it
    takes 0.3 to 0.9 s at the first look-up, most of it without Python's lock."""
    _in_a_thread(triton_key)


def prepare() -> None:
    """Do what first calls need, where packs are used, while the program joins its group and loads
    what it serves. Called when its imports are done."""
    if triton.knobs.cache.manager_class is ShippedCache and any(packs_in(pack_places())):
        for job in meanwhile:
            _in_a_thread(job)


meanwhile: list[Callable[[], object]] = []
"""Jobs of :func:`prepare`, of those that import this; what they raise is let be."""


def _in_a_thread(job: Callable[[], object]) -> None:
    def run() -> None:
        with suppress(Exception):  # it comes again where the result is needed
            job()

    threading.Thread(target=run, name="triton_dist prepares", daemon=True).start()


def _not_shipped(filename: str, reason: str = "") -> KernelNotShipped:
    """The error of the kernel that Triton is about to compile, or of a native module."""
    is_module = filename.endswith(MODULE_SUFFIX)
    if is_module:
        name, here = filename.removesuffix(MODULE_SUFFIX), module_facts()
        known, hidden = here, "its C source, such as types of arguments,"
    else:
        name, here = filename.removesuffix(".json"), facts_of(triton_compat.compilation())
        known, hidden = shown(here), "Triton's own files"
    alike = [
        (differences(entry.facts, here), digest, pack)
        for pack in packs_in(pack_places())
        for digest, entry in pack.kernels.items()
        if entry.name[:_LONGEST_NAME] == name and entry.is_module == is_module
    ]
    if not alike:
        return KernelNotShipped(name, known, "", (), reason)
    differ, digest, pack = min(alike, key=lambda each: (len(each[0]), each[1]))
    nearest = f"{digest[:12]} in {pack.path}"
    return KernelNotShipped(name, known, nearest, differ or [f"{hidden} differ"], reason)
