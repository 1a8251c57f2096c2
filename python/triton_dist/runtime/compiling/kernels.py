"""Kernels as values: found without compiling them, sent to another process, compiled there."""

from __future__ import annotations

import functools
import hashlib
import importlib
import io
import json
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_key, get_cache_manager
from triton.runtime.jit import JITCallable

_hook = threading.Lock()


@dataclass(frozen=True)
class Kernel:
    """One specialisation of a ``triton.jit`` function: all that Triton compiles it by."""

    name: str
    """The function's, for messages."""
    digest: str
    """Names it in Triton's disk cache: equal for equal source, specialisation, target, options and
    versions."""
    parts: bytes
    """What :func:`load` makes it of again; empty: it cannot be imported in another process."""


@dataclass(frozen=True)
class _Parts:
    function: Any
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: Any
    options: dict[str, Any]
    target: GPUTarget


def kernels_of(prepare: Callable[[], object]) -> dict[Kernel, Callable[[], None]]:
    """The kernels that ``prepare`` would compile now and that are not in the disk cache, each with
    what compiles it in this process.

    ``prepare`` is run, and each compilation in it skipped: its ``warmup`` returns ``None``. What it
    makes of that does not matter, nor do its exceptions: they come again when it is run in earnest.
    """
    found: dict[Kernel, Callable[[], None]] = {}
    with _compilations(lambda parts: _add(found, parts)), suppress(Exception):  # see above
        prepare()
    return found


def _add(found: dict[Kernel, Callable[[], None]], parts: _Parts) -> None:
    try:
        digest = _digest(parts)
    except Exception:  # then it does not compile either, and says so there
        return
    if not _is_cached(parts, digest):
        kernel = Kernel(parts.function.__name__, digest, _pack(parts))
        found[kernel] = functools.partial(_compile, parts)


@contextmanager
def _compilations(see: Callable[[_Parts], None]) -> Iterator[None]:
    """Within, ``warmup`` on this thread compiles nothing: ``see`` gets what it would compile."""
    knobs, thread = triton.knobs.runtime, threading.get_ident()

    def skip(**details: Any) -> bool:
        # The hook is the process's: what other threads compile, and launches, are left alone.
        if threading.get_ident() != thread or not details["is_manual_warmup"]:
            return bool(before and before(**details))
        compilation = details["compile"]
        options = json.loads(compilation["specialization_data"])["options"]
        see(
            _Parts(
                details["fn"].jit_function,
                compilation["signature"],
                compilation["constants"],
                compilation["configs"][0],
                {n: tuple(o) if isinstance(o, list) else o for n, o in options.items()},
                triton.runtime.driver.active.get_current_target(),
            )
        )
        return True

    with _hook:
        before = knobs.jit_cache_hook
        knobs.jit_cache_hook = skip
        try:
            yield
        finally:
            knobs.jit_cache_hook = before


def load(kernel: Kernel) -> Callable[[], None]:
    """What compiles ``kernel`` into the disk cache. Imports the modules that it comes from.

    Raises:
        LookupError: they hold another kernel here: their files have changed since.
        Exception: they cannot be imported, or lack it.
    """
    parts: _Parts = _Unpickler(io.BytesIO(kernel.parts)).load()
    triton.runtime.driver.set_active(_TargetOnly(parts.target))
    if _digest(parts) != kernel.digest:
        raise LookupError(f"{kernel.name} is another kernel in this process")

    return functools.partial(_compile, parts)


def _compile(parts: _Parts) -> None:
    triton.compile(_source(parts), target=parts.target, options=parts.options)


def _source(parts: _Parts) -> ASTSource:
    return ASTSource(parts.function, parts.signature, parts.constants, parts.attributes)


def _digest(parts: _Parts) -> str:
    """As ``triton.compile`` computes it, in 3.6 to 3.9."""
    if triton.knobs.runtime.add_stages_inspection_hook is not None:
        raise ValueError("the compiler's stages are changed by a hook of this process")
    backend = make_backend(parts.target)
    key = get_cache_key(
        _source(parts),
        backend,
        backend.parse_options(dict(parts.options)),
        env_vars=get_cache_invalidating_env_vars(),
    )
    return hashlib.sha256(key.encode()).hexdigest()


def _is_cached(parts: _Parts, digest: str) -> bool:
    if triton.knobs.compilation.always_compile:
        return False
    name = f"{parts.function.__name__[:150]}.json"
    return bool((get_cache_manager(digest).get_group(name) or {}).get(name))


def _pack(parts: _Parts) -> bytes:
    stream = io.BytesIO()
    try:
        _Pickler(stream).dump(parts)
    except Exception:  # of a script, a closure, or with constants that know no pickling
        return b""
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    """Triton functions, of which a kernel may get others as constants, go by name."""

    def persistent_id(self, value: Any) -> tuple[str, str] | None:
        if not isinstance(value, JITCallable):
            return None
        name = (value.fn.__module__, value.fn.__qualname__)
        if name[0] == "__main__" or _find(*name) is not value:
            raise pickle.PicklingError(f"{name} cannot be imported elsewhere")
        return name


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, name: Any) -> Any:
        return _find(*name)


def _find(module: str, qualified_name: str) -> Any:
    """The Triton function of that name, under the decorators that may be around it."""
    found: Any = importlib.import_module(module)
    for part in qualified_name.split("."):
        found = getattr(found, part)
    while not isinstance(found, JITCallable):
        found = found.fn
    return found


class _TargetOnly(triton.backends.driver.DriverBase):
    """Answers what the compiler asks of a driver; a kernel may ask for the target it is for."""

    def __init__(self, target: GPUTarget) -> None:
        super().__init__()
        self._target = target

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("nothing is launched here")

    def get_active_torch_device(self) -> Any:
        raise NotImplementedError("nothing is launched here")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("nothing is launched here")
