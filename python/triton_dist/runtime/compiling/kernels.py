"""Find the kernels that a call would compile, in a form that another process can compile."""

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

_hook_lock = threading.Lock()


@dataclass(frozen=True)
class Kernel:
    """One specialisation of a ``triton.jit`` function: all inputs of its compilation."""

    function: Any
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: Any
    options: dict[str, Any]
    target: GPUTarget

    @property
    def name(self) -> str:
        return str(self.function.__name__)

    @property
    def digest(self) -> str:
        """Return the kernel's key in Triton's disk cache, as Triton 3.6 to 3.9 compute it."""
        if triton.knobs.runtime.add_stages_inspection_hook is not None:
            raise ValueError("a hook of this process changes the compiler's stages")
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
        """Compile into the disk cache."""
        triton.compile(self._source(), target=self.target, options=self.options)

    def _source(self) -> Any:
        source_class = triton_compat.source_class(self.function)
        return source_class(self.function, self.signature, self.constants, self.attributes)


def kernels_to_compile(prepare: Callable[[], object]) -> dict[str, Kernel]:
    """Return the kernels, by digest, that ``prepare`` would compile, except cached kernels.

    Runs ``prepare``, but the ``warmup`` calls of kernels compile nothing and return ``None``.
    Exceptions of ``prepare`` are ignored, because a later run without this function raises them.
    """
    found: dict[str, Kernel] = {}

    def on_kernel(kernel: Kernel) -> None:
        with suppress(Exception):  # the later compilation raises the error again
            digest = kernel.digest
            if not kernel.is_cached(digest):
                found[digest] = kernel

    with _intercept_warmups(on_kernel), suppress(Exception):
        prepare()
    return found


@contextmanager
def _intercept_warmups(on_kernel: Callable[[Kernel], None]) -> Iterator[None]:
    """Context manager in which ``warmup`` calls of this thread only report to ``on_kernel``."""
    knobs, thread = triton.knobs.runtime, threading.get_ident()

    def skip(**details: Any) -> bool:
        # The hook is global. Let launches and the compilations of other threads proceed.
        if threading.get_ident() != thread or not details["is_manual_warmup"]:
            return bool(previous_hook and previous_hook(**details))
        compilation = details["compile"]
        options = json.loads(compilation["specialization_data"])["options"]
        if options.get("ir_override"):  # ``triton_dist.runner`` has already compiled this kernel
            return True
        on_kernel(
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

    with _hook_lock:
        previous_hook = knobs.jit_cache_hook
        knobs.jit_cache_hook = skip
        try:
            yield
        finally:
            knobs.jit_cache_hook = previous_hook


def use_target(target: GPUTarget) -> None:
    """Make Triton compile for ``target`` in this process, which must not query a GPU."""
    triton.runtime.driver.set_active(triton_compat.HostDriver(target))
