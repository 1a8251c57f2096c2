"""Describe a kernel by name-value pairs ("facts"), its register usage and its machine code."""

from __future__ import annotations

import functools
import hashlib
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.compiler import make_backend

_MAX_TEXT_LENGTH = 200
_PATH_OPTIONS = ("extern_libs",)
"""Options whose values are paths, which differ between hosts."""


def compilation_facts(compilation: Mapping[str, Any]) -> dict[str, str]:
    """Return the inputs of a compilation as text, by a readable name such as ``argument x_ptr``.

    Args:
        compilation: ``src``, ``target`` and ``options`` of ``triton.compile``. Each may be missing.
    """
    facts = {"triton": triton.__version__}
    source, target = compilation.get("src"), compilation.get("target")
    if target is not None:
        version = str(make_backend(target).hash())
        found = re.search(r"\bV\d[\d.]+", version)
        facts |= {
            "target": f"{target.backend} {target.arch}",
            "ptxas": (found[0] if found else hashlib.sha256(version.encode()).hexdigest()[:16]),
        }
    if source is not None and hasattr(source, "fn"):
        facts["source"] = str(source.fn.cache_key)[:16]
        facts |= {f"argument {name}": text for name, text in _arguments(source)}
    options = compilation.get("options")
    options = options if isinstance(options, Mapping) else getattr(options, "__dict__", {})
    for name in sorted(options.keys() - {*_PATH_OPTIONS, "arch", "backend_name"}):
        facts[f"option {name}"] = _text(options[name])
    for name, value in sorted(get_cache_invalidating_env_vars().items()):
        facts[f"variable {name}"] = str(value)
    return facts


def main_facts(facts: Mapping[str, str]) -> dict[str, str]:
    """Return arguments, ``num_warps`` and ``num_stages``, which usually identify a kernel."""
    usual = ("option num_warps", "option num_stages")
    return {
        name.removeprefix("argument ").removeprefix("option "): text
        for name, text in facts.items()
        if name.startswith("argument ") or name in usual
    }


def differences(shipped: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Return a line for each fact that differs between a kernel in a pack and this process."""
    return [
        f"{name}: shipped {shipped.get(name, 'none')}, here {here.get(name, 'none')}"
        for name in sorted(shipped.keys() | here.keys())
        if shipped.get(name) != here.get(name)
    ]


def _arguments(source: Any) -> Iterator[tuple[str, str]]:
    """Yield each argument's name and its type, alignment and constant value as text."""
    names = list(source.signature)
    constants: dict[str, list[str]] = {}
    for path, value in source.constants.items():
        member = "".join(f"[{index}]" for index in path[1:])
        constants.setdefault(names[path[0]], []).append(f"{member}={_text(value)}".lstrip("="))
    for position, (name, arg_type) in enumerate(source.signature.items()):
        attributes = [
            f"{attribute.removeprefix('tt.')} {number}"
            for path, pairs in source.attrs.items()
            if path[0] == position
            for attribute, number in pairs
        ]
        types = [_text(arg_type) if isinstance(arg_type, tuple) else arg_type]
        types = [] if arg_type == "constexpr" else types
        yield name, ", ".join([*types, *attributes, *constants.get(name, [])])


def _text(value: Any) -> str:
    """Return ``repr(value)`` without memory addresses, or the name of a function or class."""
    named = getattr(value, "__name__", None)
    text = str(named) if callable(value) and named else repr(value)
    return re.sub(r" at 0x[0-9a-f]+", "", text)[:_MAX_TEXT_LENGTH]


@functools.lru_cache(maxsize=256)
def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Return registers and bytes of local memory per thread of a kernel. Takes about 5 ms."""
    report = _cuobjdump("-res-usage", cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    if found is None:
        raise RuntimeError(f"cuobjdump -res-usage printed no register count, but:\n{report}")
    return int(found[1]), int(found[2])


@functools.lru_cache(maxsize=16)
def sass(cubin: bytes) -> str:
    """Return the machine code in ``cubin`` as text. Takes about 0.3 s."""
    return _cuobjdump("-sass", cubin)


def _cuobjdump(option: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
