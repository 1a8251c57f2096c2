"""Subclasses of Triton's JIT functions whose launches accept an artefact.

An artefact is a kernel at one compilation level, with metadata. This module and ``build.py`` call
private parts of Triton: here ``run`` and ``_do_compile`` of ``JITFunction``. Both are equal in
Triton 3.6 to 3.9, except for the arguments of hooks. Triton itself is not patched, so other kernels
launch as fast as before.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, overload

import triton
from packaging.version import Version
from triton.runtime.errors import PTXASError
from triton.runtime.interpreter import GridExecutor, InterpretedFunction

from triton_dist._jit import Kernel, with_signature_and_doc
from triton_dist._jit import jit as triton_dist_jit
from triton_dist.errors import ArtefactRefused, InvalidArgument, InvalidArtefact
from triton_dist.runner import files, foreign, toolchains
from triton_dist.runner.artefact import LEVELS, Artefact
from triton_dist.runner.build import build
from triton_dist.runner.language import (
    DUMP_KEYWORD,
    KernelWithDump,
    jit_options,
    with_dump_argument,
)
from triton_dist.runner.specialisation import Specialisation, constant_tree
from triton_dist.runtime.triton_compat import triton_version

P = ParamSpec("P")
R = TypeVar("R")

_FOLDER_KEYWORDS = {f"{level}_dir": level for level in LEVELS} | {"autotune_cubin_dir": "cubin"}
_TEXT_KEYWORDS = {f"{level}_src": level for level in LEVELS if level != "cubin"}
_UNSUPPORTED_KEYWORDS = {
    "amdgcn_dir": "NVIDIA GPUs: a folder for ttir_dir, ttgir_dir, llir_dir, ptx_dir or cubin_dir",
    "hsaco_dir": "NVIDIA GPUs: a folder for ttir_dir, ttgir_dir, llir_dir, ptx_dir or cubin_dir",
    "start_pass": "a whole level: the passes in a level differ between versions of Triton",
    "dump_value": "runner.language.dump in the kernel's source: IR is not edited",
    "dump_grid": "the argument grid of runner.language.dump, in the kernel's source",
}
TOOLCHAIN_KEYWORD = "toolchain"
LAUNCH_KEYWORDS = frozenset(
    {
        "artefact",
        TOOLCHAIN_KEYWORD,
        DUMP_KEYWORD,
        *_FOLDER_KEYWORDS,
        *_TEXT_KEYWORDS,
        *_UNSUPPORTED_KEYWORDS,
    }
)


def resolve(function: str, keyword: str, value: Any, metadata: Any) -> Artefact:
    """Return the artefact that a launch of ``function`` selects by ``keyword``."""
    if keyword in _UNSUPPORTED_KEYWORDS:
        raise InvalidArgument(function, keyword, value, _UNSUPPORTED_KEYWORDS[keyword])
    if metadata is not None and keyword not in _TEXT_KEYWORDS:
        expected = "none: an artefact in a folder has its own <kernel>.json"
        raise InvalidArgument(function, "metadata_json", metadata, expected)
    if keyword == "artefact":
        if isinstance(value, Artefact):
            return value
        raise InvalidArgument(function, keyword, value, "an artefact, as runner.load returns it")
    level = _FOLDER_KEYWORDS.get(keyword) or _TEXT_KEYWORDS[keyword]
    if not isinstance(value, (str, os.PathLike)):
        text = f"the text of a kernel in {level}, or the path of a file with one"
        expected = "the path of a folder" if keyword in _FOLDER_KEYWORDS else text
        raise InvalidArgument(function, keyword, value, expected)
    if keyword in _FOLDER_KEYWORDS:
        return files.load(value, function, level)
    where, text = keyword, str(value)
    if isinstance(value, os.PathLike) or ("\n" not in text and text.endswith(f".{level}")):
        where, text = text, files.read_file(Path(text)).decode("utf-8", "replace")
    if metadata is not None:
        artefact_metadata = foreign.read_metadata(metadata, function, where)
    elif level in foreign.SELF_DESCRIBING:
        artefact_metadata = foreign.metadata_from_ir(function, text, where)
    else:
        why = "pass metadata_json: the text lacks launch facts such as shared memory"
        raise InvalidArtefact(where, why)
    return Artefact(level, text.encode(), artefact_metadata, where)


_HOOKS_GET_TARGET = Version("3.7")  # first Triton that passes the target to its launch hooks


class Runner:
    """Mixin for Triton's JIT functions: a launch with an artefact runs the artefact."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._artefacts: dict[str, Artefact] = {}
        """Artefacts of earlier launches, by their token in Triton's kernel cache key."""
        self._resolved: dict[Any, tuple[str | None, dict[str, Any]]] = {}
        """Results of ``_resolve``, by keyword, value and number of positional arguments."""
        self._dump_variant: KernelWithDump | None = None

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        """Return the launcher of ``grid``. It makes as few Python calls as Triton's launcher."""
        run = super().run  # type: ignore[misc]

        def launch(*args: Any, **kwargs: Any) -> Any:
            if not LAUNCH_KEYWORDS.isdisjoint(kwargs):
                if DUMP_KEYWORD in kwargs:
                    return self._variant_with_dump(kwargs).run(
                        *args, grid=grid, warmup=False, **kwargs
                    )
                self._replace_artefact_keyword(len(args), kwargs)
            return run(*args, grid=grid, warmup=False, **kwargs)

        return launch

    def run(self, /, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        """Launch or only compile; ``triton.autotune`` and ``warmup`` call this."""
        if DUMP_KEYWORD in kwargs:
            return self._variant_with_dump(kwargs).run(*args, grid=grid, warmup=warmup, **kwargs)
        try:
            if not LAUNCH_KEYWORDS.isdisjoint(kwargs):
                self._replace_artefact_keyword(len(args), kwargs)
            return super().run(*args, grid=grid, warmup=warmup, **kwargs)  # type: ignore[misc]
        except (ArtefactRefused, InvalidArtefact) as error:
            raise as_config_failure(error) from error

    def _variant_with_dump(self, kwargs: dict[str, Any]) -> Any:
        """Return the variant of this kernel that takes ``dump_tensor``."""
        others = LAUNCH_KEYWORDS.intersection(kwargs) - {DUMP_KEYWORD}
        if others or self.is_gluon():  # type: ignore[attr-defined]
            expected = (
                "a launch of a kernel in Triton's language, from its source: IR is not edited"
            )
            raise InvalidArgument(
                self._function_name, DUMP_KEYWORD, [DUMP_KEYWORD, *sorted(others)], expected
            )
        if self._dump_variant is None:
            self._dump_variant = KernelWithDump(self)
        return self._dump_variant

    def _replace_artefact_keyword(self, num_positional: int, kwargs: dict[str, Any]) -> None:
        """Replace the artefact keyword by a token that is part of Triton's kernel cache key."""
        keyword, *others = [name for name in kwargs if name in LAUNCH_KEYWORDS]
        if others:
            raise InvalidArgument(
                self._function_name, "keywords", [keyword, *others], "one artefact"
            )
        value = kwargs.pop(keyword)
        try:
            token, constants = self._resolved[keyword, value, num_positional]
        except (KeyError, TypeError):  # new, or not hashable; resolve() rejects wrong values
            token, constants = self._resolve(keyword, value, num_positional, kwargs)
        if token is not None:
            kwargs["ir_override"] = token
        for name, constant in constants.items():
            kwargs.setdefault(name, constant)

    def _resolve(
        self, keyword: str, value: Any, num_positional: int, kwargs: dict[str, Any]
    ) -> tuple[str | None, dict[str, Any]]:
        """Return the token of a launch (``None``: a plain Triton launch), and the artefact's
        constants that the launch may omit."""
        found: tuple[str | None, dict[str, Any]]
        if keyword == TOOLCHAIN_KEYWORD:
            if value is not None:
                toolchains.folder_of(value)
            found = None if value is None else f"{TOOLCHAIN_KEYWORD} {value}", {}
            self._resolved[keyword, value, num_positional] = found
            return found
        artefact = resolve(self._function_name, keyword, value, kwargs.pop("metadata_json", None))
        artefact.check()
        token = f"{artefact.digest}.{artefact.level}"
        self._artefacts[token] = artefact
        given = {parameter.name for parameter in self.params[:num_positional]}  # type: ignore[attr-defined]
        declared = {parameter.name for parameter in self.params if parameter.is_constexpr}  # type: ignore[attr-defined]
        left_out = declared - given
        found = token, {n: v for n, v in artefact.constants().items() if n in left_out}
        if not keyword.endswith("_src"):  # the next launch may pass a text with other metadata
            self._resolved[keyword, value, num_positional] = found
        return found

    @property
    def _function_name(self) -> str:
        return str(self.__name__)  # type: ignore[attr-defined]

    def _do_compile(
        self, key: Any, signature: Any, device: Any, constexprs: Any, options: Any, attrs: Any,
        warmup: bool,
    ) -> Any:  # fmt: skip
        token: str = options.ir_override or ""
        if token not in self._artefacts and not token.startswith(f"{TOOLCHAIN_KEYWORD} "):
            return super()._do_compile(  # type: ignore[misc]
                key, signature, device, constexprs, options, attrs, warmup
            )
        cache, _, target, backend, _ = self.device_caches[device]  # type: ignore[attr-defined]
        attributes = {path: dict(each) for path, each in attrs.items() if each}
        launch_specialisation = Specialisation(signature, _constant_trees(constexprs), attributes)
        targets = () if triton_version() < _HOOKS_GET_TARGET else (target,)
        hook_args_1 = (key, signature, *targets, device)
        hook_args_2 = (constexprs, options, [attrs], warmup)
        hooks = triton.knobs.runtime
        if self._call_hook(hooks.jit_cache_hook, *hook_args_1, *hook_args_2):  # type: ignore[attr-defined]
            return None
        if token in self._artefacts:
            artefact = foreign.with_specialisation(self._artefacts[token], launch_specialisation)
        else:
            artefact = toolchains.compile_with_toolchain(
                self,
                token.removeprefix(f"{TOOLCHAIN_KEYWORD} "),
                launch_specialisation,
                vars(options),
                target.arch,
            )
        specialisation = artefact.metadata.specialisation
        why = artefact.metadata.launch_mismatch(artefact.level, launch_specialisation, target.arch)
        if why is not None or specialisation is None:
            raise ArtefactRefused(
                self._function_name, artefact.location, why or "it has no metadata"
            )
        constants = {path: constexprs[path] for path in specialisation.constants}
        kernel = build(self, artefact, specialisation, constants, options, target, backend)
        cache[key] = kernel
        self._call_hook(hooks.jit_post_compile_hook, *hook_args_1, *hook_args_2)  # type: ignore[attr-defined]
        return kernel


def _constant_trees(constexprs: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the constants of a launch as JSON trees, by path. A constant without an exact text
    gets a unique tree, which equals no constant of an artefact."""
    trees = {}
    for path, value in constexprs.items():
        try:
            trees[path] = constant_tree(value)
        except TypeError:
            trees[path] = {"object": f"{type(value).__qualname__} at {id(value):#x}"}
    return trees


class TritonRunner(Runner, triton.JITFunction):
    """A kernel in Triton's language."""


@functools.cache
def _gluon_runner() -> type[Any]:
    """Return the class for Gluon kernels; raises ``ImportError`` if Triton has no Gluon."""
    from triton.experimental.gluon._runtime import GluonJITFunction

    return type("GluonRunner", (Runner, GluonJITFunction), {"__doc__": "A kernel in Gluon."})


class InterpretedRunner(InterpretedFunction):
    """An interpreted kernel, which only runs from its source."""

    def run(self, /, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        """Interpret, or do nothing if ``warmup``."""
        named = [
            keyword for keyword in kwargs if keyword in LAUNCH_KEYWORDS and keyword != DUMP_KEYWORD
        ]
        if named:
            raise InvalidArgument(
                self.__name__, named[0], kwargs[named[0]],
                "no artefact, because interpreted kernels (TRITON_INTERPRET=1) run from their "
                "source",
            )  # fmt: skip
        if DUMP_KEYWORD in kwargs and DUMP_KEYWORD not in self.arg_names:
            if not warmup:
                names = [*self.arg_names, DUMP_KEYWORD]
                GridExecutor(with_dump_argument(self.rewrite()), names, grid, self.pre_run_hooks)(
                    *args, **kwargs
                )
            return None
        return super().run(*args, grid=grid, warmup=warmup, **kwargs)


@overload
def jit(fn: Callable[P, R], **options: Any) -> Kernel[P, R]: ...
@overload
def jit(fn: None = None, **options: Any) -> Callable[[Callable[P, R]], Kernel[P, R]]: ...
def jit(fn: Any = None, **options: Any) -> Any:
    """Decorate a kernel so that it can run from an artefact; accepts the options of ``triton.jit``.

    ``fn`` may also be a kernel that ``triton.jit`` or ``gluon.jit`` created. A launch without an
    artefact is an ordinary Triton launch. A launch may pass one of these keywords:

    * ``artefact``: an :class:`Artefact`, as ``runner.load`` returns it;
    * ``ttir_dir``, ``ttgir_dir``, ``llir_dir``, ``ptx_dir``, ``cubin_dir``: a folder with
      ``<kernel>.<level>`` and ``<kernel>.json``, as ``runner.export`` writes it;
    * ``autotune_cubin_dir``: the same as ``cubin_dir``, for a ``triton.Config``;
    * ``ttir_src``, ``ttgir_src``, ``llir_src``, ``ptx_src``: text or path of a file, with
      ``metadata_json`` (dict, path, ``compiled.metadata`` or the compiled kernel itself);
    * ``dump_tensor``: the tensor that :mod:`triton_dist.runner.language` stores to;
    * ``toolchain``: name in ``TRITON_DIST_TOOLCHAINS`` of another installed Triton that compiles
      the kernel; ``None``: this process's Triton.

    ``tl.constexpr`` arguments that a launch omits are taken from the artefact. Those that a launch
    passes must equal the artefact's values. ``num_warps`` and other options of the launch are
    ignored. A folder is read once per process.

    Raises:
        InvalidArgument: an unsupported keyword, several keywords, or an interpreted kernel.
        InvalidArtefact: at the launch, if the file is missing, damaged or does not compile.
        ArtefactRefused: before the launch, if the artefact was compiled for other arguments.
    """
    if fn is None:
        return functools.partial(jit, **options)
    if isinstance(fn, (InterpretedFunction, triton.JITFunction)):
        if options:
            raise InvalidArgument("runner.jit", "options", options, "none for a decorated kernel")
        kernel = fn
    elif callable(fn) and hasattr(fn, "__code__"):
        kernel = triton_dist_jit(fn, **options)
    else:
        expected = "a function or a kernel; put other decorators, such as triton.autotune, above"
        raise InvalidArgument("runner.jit", "fn", fn, expected)
    if isinstance(kernel, InterpretedFunction):
        return with_signature_and_doc(InterpretedRunner(kernel.fn, **kernel.kwargs))
    runner_class = _gluon_runner() if kernel.is_gluon() else TritonRunner
    return with_signature_and_doc(runner_class(kernel.fn, **jit_options(kernel)))


# `triton.autotune` skips a config that raises PTXASError. Some cubins of a folder may be damaged or
# compiled for other arguments.
class RefusedConfig(ArtefactRefused, PTXASError):
    """An ``ArtefactRefused`` after which ``triton.autotune`` continues."""

    __str__ = Exception.__str__


class InvalidConfig(InvalidArtefact, PTXASError):
    """An ``InvalidArtefact`` after which ``triton.autotune`` continues."""

    __str__ = Exception.__str__


def as_config_failure(error: ArtefactRefused | InvalidArtefact) -> Exception:
    """Return ``error`` as an exception after which ``triton.autotune`` continues."""
    if isinstance(error, ArtefactRefused):
        return RefusedConfig(error.kernel, error.location, error.reason)
    return InvalidConfig(error.location, error.reason)
