"""Kernels as values, so that another process can compile them ahead."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.cache import get_cache_key, get_cache_manager

from triton_dist.runtime import triton_compat

_hook = threading.Lock()


@dataclass(frozen=True)
class Kernel:
    """One specialisation of a ``triton.jit`` function: all that Triton compiles it by."""

    function: Any
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: Any
    options: dict[str, Any]
    target: GPUTarget

    @property
    def name(self) -> str:
        """The function's, for messages."""
        return str(self.function.__name__)

    @property
    def digest(self) -> str:
        """Names it in Triton's disk cache: equal for equal source, specialisation, target, options
        and versions. As ``triton.compile`` computes it, in 3.6 to 3.9."""
        if triton.knobs.runtime.add_stages_inspection_hook is not None:
            raise ValueError("the compiler's stages are changed by a hook of this process")
        backend = make_backend(self.target)
        key = get_cache_key(
            self._source(),
            backend,
            backend.parse_options(dict(self.options)),
            env_vars=get_cache_invalidating_env_vars(),
        )
        return hashlib.sha256(key.encode()).hexdigest()

    def is_cached(self, digest: str) -> bool:
        if triton.knobs.compilation.always_compile:
            return False
        name = f"{self.name[:150]}.json"
        return bool((get_cache_manager(digest).get_group(name) or {}).get(name))

    def compile(self) -> None:
        """Into the disk cache; nothing is loaded."""
        triton.compile(self._source(), target=self.target, options=self.options)

    def _source(self) -> Any:
        source_class = triton_compat.source_class(self.function)
        return source_class(self.function, self.signature, self.constants, self.attributes)


def kernels_of(prepare: Callable[[], object]) -> dict[str, Kernel]:
    """The kernels that ``prepare`` would compile now and that are not in the disk cache, by digest.

    ``prepare`` is run, and each compilation in it skipped: its ``warmup`` returns ``None``. What it
    makes of that does not matter, nor do its exceptions: they come again when it is run in earnest.
    """
    found: dict[str, Kernel] = {}

    def see(kernel: Kernel) -> None:
        with suppress(Exception):  # then it does not compile either, and says so there
            digest = kernel.digest
            if not kernel.is_cached(digest):
                found[digest] = kernel

    with _compilations(see), suppress(Exception):  # as said above
        prepare()
    return found


@contextmanager
def _compilations(see: Callable[[Kernel], None]) -> Iterator[None]:
    """Within, ``warmup`` on this thread compiles nothing: ``see`` gets what it would compile."""
    knobs, thread = triton.knobs.runtime, threading.get_ident()

    def skip(**details: Any) -> bool:
        # The hook is the process's: what other threads compile, and launches, are left alone.
        if threading.get_ident() != thread or not details["is_manual_warmup"]:
            return bool(before and before(**details))
        compilation = details["compile"]
        options = json.loads(compilation["specialization_data"])["options"]
        if options.get("ir_override"):  # an artefact of the runner: it is there already
            return True
        see(
            Kernel(
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


def without_gpu(target: GPUTarget) -> None:
    """From now on this process compiles for ``target`` and asks no GPU what it is: a kernel may
    ask what it is compiled for."""
    triton.runtime.driver.set_active(triton_compat.HostDriver(target))
