"""Differences between the supported Triton versions, each with the version and the reason.

:mod:`triton_dist.runtime.interpreter` fixes faults that only the interpreter has.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from types import FrameType
from typing import Any

import torch
import triton
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from triton_dist import knobs
from triton_dist.errors import DeviceUnavailable, UnsupportedVersion


class HostDriver(DriverBase):
    """A Triton driver for a process that launches no kernel on a GPU."""

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

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("this process launches no kernel")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("this process launches no kernel")


SUPPORTED = {"torch": ">=2.9", "triton": ">=3.6,<3.10"}
_NEWER_TORCH = "Install torch 2.10 or later, which includes triton 3.6: pip install 'torch>=2.10'"


@functools.cache
def triton_version() -> Version:
    """Return the version of the imported Triton, without a local part such as ``+git1234``."""
    return Version(Version(triton.__version__).base_version)


@functools.cache
def check_versions() -> None:
    """Raise :class:`UnsupportedVersion` unless torch and triton match ``SUPPORTED``. Callers check
    at first use, not at import. A success is cached, an error is raised again. A pre-release or
    local build (``2.11.0a0+git``, ``2.13.0+cpu``) counts as its release."""
    for package, found in (("torch", torch.__version__), ("triton", triton.__version__)):
        release = Version(Version(str(found)).base_version)
        if release not in SpecifierSet(SUPPORTED[package]):
            # GPU builds of torch require one exact triton, so suggest a newer torch instead.
            remedy = _NEWER_TORCH if package == "triton" and release < Version("3.6") else ""
            raise UnsupportedVersion(package, str(found), SUPPORTED[package], remedy)


_FINGERPRINTED_VARIABLES = (
    "CUDA_LAUNCH_BLOCKING", "NCCL_ALGO", "NCCL_PROTO", "TRITON_F32_DEFAULT", "TRITON_PTXAS_PATH",
)  # fmt: skip


def software_versions() -> dict[str, str]:
    """Return the versions and settings that can change generated code or its speed. Tuning records
    store them; a record with other versions is not used."""
    try:
        own = metadata.version("triton-dist-tuner")
    except metadata.PackageNotFoundError:  # a source tree on PYTHONPATH
        own = "source"
    return {
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "cuda": torch.version.cuda or "none",
        "triton_dist": own,
        **({"settings": settings} if (settings := _settings()) else {}),
    }


def _settings() -> str:
    """Return, as text, the environment variables that are set and change generated code or its
    speed: Triton's cache-invalidating variables, ``_FINGERPRINTED_VARIABLES``, and the
    interpreter's checks in ``TRITON_DIST_DEBUG``."""
    found: dict[str, str] = {}
    with suppress(ImportError):  # an internal name of Triton
        from triton._C.libtriton import get_cache_invalidating_env_vars

        found.update(get_cache_invalidating_env_vars())
    environment = knobs.environment()
    found.update(
        {name: environment[name] for name in _FINGERPRINTED_VARIABLES if name in environment}
    )
    if modes := [mode for mode in knobs.debug.get() if mode.startswith("interp")]:
        found["TRITON_DIST_DEBUG"] = ",".join(modes)
    return ", ".join(f"{name}={value}" for name, value in sorted(found.items()))


def is_interpreting() -> bool:
    """Return True if Triton would interpret a kernel decorated now (``TRITON_INTERPRET``)."""
    return bool(triton.knobs.runtime.interpret)


def missing_gpu_error() -> DeviceUnavailable:
    """Return the error for a kernel that is compiled, not interpreted, on a host without a GPU."""
    return DeviceUnavailable(
        "cuda",
        "there is no GPU, and kernels are not interpreted",
        "Set TRITON_INTERPRET=1 before the first kernel is imported, or start the script with "
        "scripts/launch.sh, which does.",
    )


@functools.cache
def explain_missing_driver() -> None:
    """Replace Triton's error for a missing GPU by an error with instructions. Triton 3.6 to 3.9
    raise "0 active drivers ([]). There should only be one."."""
    module = importlib.import_module("triton.runtime.driver")
    create = getattr(module, "_create_driver", None)
    if create is None:
        return

    def create_or_explain() -> Any:
        try:
            return create()
        except RuntimeError as failure:
            if "0 active drivers" not in str(failure):
                raise
            raise missing_gpu_error() from failure

    module._create_driver = create_or_explain  # type: ignore[attr-defined]


def pin_defaults() -> None:
    """Turn on floating-point fusion in Triton, unless ``TRITON_DEFAULT_FP_FUSION`` is set.

    Floating-point fusion (``a * b + c`` with one rounding) is on by default in Triton 3.6 to 3.9,
    and off in 3.10. Triton 3.9 warns about the change in each process that compiles. An explicit
    setting keeps results and times equal across versions, and avoids the warning.
    """
    if not knobs.is_set("TRITON_DEFAULT_FP_FUSION"):
        knobs.put("TRITON_DEFAULT_FP_FUSION", "1")


def has_allocator() -> bool:
    """Return True if ``triton.set_allocator`` was called in this thread's context. Triton has no
    getter; this reads an internal variable of Triton 3.6 to 3.9."""
    from triton.runtime import _allocation

    return _allocation._allocator.get() is not _allocation._NULL_ALLOCATOR


def running_compilation() -> Mapping[str, Any]:
    """Return the local variables of this thread's running ``triton.compile``; empty if none runs.

    They include ``src``, ``target`` and ``options``. Triton passes only a key to a cache manager,
    so the variables are read from the stack frame. Their names are equal in Triton 3.6 to 3.9. The
    values are only used in messages and in the manifests of packs.
    """
    return _locals_of(triton.compiler.compiler.compile)


def native_module_source() -> str:
    """Return the C source of the native module that this thread's call of Triton looks up or
    builds; "" if there is no such call. The source identifies a module on all hosts. Triton's own
    key depends on whether the host has the command ``file`` (``platform.architecture``)."""
    return str(_locals_of(triton.runtime.build.compile_module_from_src).get("src", ""))


def _locals_of(function: Any) -> Mapping[str, Any]:
    """Return the local variables of this thread's innermost call of ``function``; empty if none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return {} if frame is None else frame.f_locals


def has_loaded_kernels() -> bool:
    """Return True if Triton has loaded or launched a kernel in this process."""
    from triton.backends.nvidia.driver import CudaUtils

    return hasattr(CudaUtils, "instance")


def source_class(function: Any) -> Any:
    """Return Triton's class for the source of the kernel ``function``. ``GluonASTSource`` is
    imported only for a Gluon kernel."""
    if function.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    return triton.compiler.ASTSource


@functools.cache
def has_gluon_for_hopper() -> bool:
    """Return True if Triton has Gluon functions for TMA, shared-memory barriers and warpgroup MMA.
    Triton 3.6 to 3.9 have them. Gluon is experimental, so check for each name."""
    try:
        from triton.experimental.gluon.language import warp_specialize  # noqa: F401
        from triton.experimental.gluon.language.nvidia import hopper
    except ImportError:
        return False
    return all(hasattr(hopper, name) for name in ("tma", "mbarrier", "warpgroup_mma"))


def compiles_for_hopper() -> bool:
    """Return True if a kernel launched now would be compiled for compute capability 9.x."""
    if is_interpreting():
        return False
    try:
        target = triton.runtime.driver.active.get_current_target()
    except RuntimeError:  # Triton finds no GPU
        return False
    return bool(target.backend == "cuda" and target.arch // 10 == 9)


def gluon_tma_copies() -> tuple[Any, Any]:
    """Return Gluon's functions that load and store a tile by TMA. Triton 3.6 has other names."""
    from triton.experimental.gluon.language.nvidia.hopper import tma

    if hasattr(tma, "async_load"):
        return tma.async_load, tma.async_store
    return tma.async_copy_global_to_shared, tma.async_copy_shared_to_global
