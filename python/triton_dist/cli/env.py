"""``env``: versions, hardware, variables and paths, for bug reports."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import triton_dist
from triton_dist import knobs
from triton_dist._archive import pack_locations
from triton_dist._tuning.store import without_secrets
from triton_dist.cli.subcommand import add_subcommand

_DISTRIBUTION = "triton-dist-tuner"
_PACKAGES = ("torch", "triton", "numpy", "filelock", "rich")
_PREFIXES = ("TRITON_", "CUDA_", "NCCL_", "TORCH_", "PYTORCH_", "OMP_")
_OTHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PYTHONPATH")
_OUR_PREFIX = "TRITON_DIST_"
_TIMEOUT_SECONDS = 20
_ANSI_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def add_to(subcommands: Any) -> None:
    parser = add_subcommand(
        subcommands,
        "env",
        _run,
        help="versions, GPUs, variables and paths, for bug reports",
        description="Prints the facts for a bug report: versions, the selected device, GPUs and "
        "their links, environment variables, and paths.",
        examples=["env", "env --json"],
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run(arguments: argparse.Namespace) -> int:
    known = {each.variable: each for each in vars(knobs).values() if isinstance(each, knobs.Knob)}
    shown = {}
    for name, value in sorted(knobs.environment().items()):
        if not (name in known or name in _OTHER_VARIABLES or name.startswith(_PREFIXES)):
            continue
        if name == knobs.autotune_remote.variable:
            value = without_secrets(value, value)
        shown[name] = "***" if name == knobs.autotune_remote_key.variable else value
        if name in known:
            try:
                known[name].get()
            except knobs.InvalidKnob as error:
                shown[name] += f"  (wrong: {error})"
        elif name.startswith(_OUR_PREFIX):
            shown[name] += "  (unknown variable: it has no effect)"
    facts = {
        "versions": {
            "triton_dist": f"{triton_dist.__version__} in {Path(triton_dist.__file__).parent}",
            "python": f"{platform.python_version()} at {sys.executable}",
            "system": platform.platform(),
            **{package: _version(package) for package in _PACKAGES},
        },
        "distributions": _result_or_error(_distributions),
        "device": _result_or_error(_device),
        "GPUs": _result_or_error(_gpus),
        "links": _result_or_error(lambda: _nvidia_smi("topo", "-m") if len(_gpus()) > 1 else []),
        "variables": shown,
        "paths": {
            "cache": _path(knobs.cache_dir.get()),
            "read-only": [*map(_path, knobs.autotune_readonly_dirs.get())],
            "packs": _result_or_error(lambda: [*map(_path, pack_locations())]),
            "logs of contextual_autotune": str(knobs.autotune_log_dir.get()),
        },
    }
    print(json.dumps(facts, indent=2) if arguments.json else "\n".join(_lines(facts)))
    return 0


def _result_or_error(function: Callable[[], Any]) -> Any:
    """Return the result of ``function()``, or its error as text. An error must not end the report,
    because broken installations need it most."""
    try:
        return function()
    except Exception as error:
        return f"not known: {type(error).__name__}: {error}"


def _version(package: str) -> str:
    """Return the version of ``package``: its ``__version__``, or the version in pip's metadata.
    ``torch.__version__`` contains the CUDA version (``+cu130``); pip's metadata may not."""
    with contextlib.suppress(Exception):
        return str(importlib.import_module(package).__version__)
    return installed_version(package)


def installed_version(package: str) -> str:
    """Return the version of ``package`` from its metadata, without importing it."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return "not installed"


def _distributions() -> list[str]:
    """Return the installed distributions (as of pip) that contain a package ``triton_dist``."""
    names = set(metadata.packages_distributions().get("triton_dist", []))
    found = [
        f"{each.metadata['Name']} {each.version} in {each.locate_file('')}"
        for name in sorted(names)
        for each in metadata.distributions(name=name)
    ]
    if names - {_DISTRIBUTION}:
        found.append(f"(uninstall all but {_DISTRIBUTION}: each has a package triton_dist)")
    return found


def _device() -> dict[str, str]:
    from triton_dist.runtime.device import current_device, interprets_kernels
    from triton_dist.runtime.triton_compat import software_versions

    device = current_device()
    interprets, why = interprets_kernels()
    kernels = f"{'interpreted' if interprets else 'compiled'}, because {why}"
    cuda = software_versions()["cuda"]
    return {"name": device.name, **device.facts(), "cuda": cuda, "kernels": kernels}


def _gpus() -> list[str]:
    query = "index,name,driver_version,compute_cap,memory.total"
    return _nvidia_smi(f"--query-gpu={query}", "--format=csv,noheader")


def _nvidia_smi(*arguments: str) -> list[str]:
    """Return the lines that ``nvidia-smi`` prints; none if it is not installed."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments],
            capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        return []
    if done.returncode:
        raise OSError(f"nvidia-smi {' '.join(arguments)}: {(done.stdout + done.stderr).strip()}")
    plain = _ANSI_ESCAPES.sub("", done.stdout)  # nvidia-smi underlines headings even in a pipe
    return [line.rstrip() for line in plain.splitlines() if line.strip()]


def _path(path: Path) -> str:
    try:
        path = path.expanduser()
        reached = path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        return f"{path}  (cannot be reached: {error})"
    if not reached:
        return f"{path}  (does not exist yet)"
    return f"{path}" + "  (cannot be written)" * (not os.access(path, os.W_OK))


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    for name, fact in facts.items():
        if isinstance(fact, dict):
            yield f"{name}:"
            for each, value in fact.items():
                has_several = isinstance(value, list) and len(value) > 1
                single = (value or ["none"])[0] if isinstance(value, list) else value
                yield f"  {each}:" if has_several else f"  {each}: {single}"
                yield from (f"    {item}" for item in value if has_several)
        elif isinstance(fact, list):
            yield f"{name}:" + " none" * (not fact)
            yield from (f"  {line}" for line in fact)
        else:
            yield f"{name}: {fact}"
