"""List the requirements in pyproject.toml, or check whether this Python meets them.

    requirements.py list  [EXTRA ...]           print the requirements, one per line
    requirements.py check [--cuda] [EXTRA ...]  status 0 if all are met; else 1 and what is missing
    requirements.py uv ARGUMENTS                run uv with the package indexes of pip

This Python may have no packages installed. Required packages are not imported, because torch alone
takes over a second. ``--cuda`` requires a torch that was built for CUDA.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def requirements(extras: list[str]) -> list[str]:
    """Return the requirement strings of the package and of ``extras``."""
    return [
        requirement for name in ["dependencies", *extras] for requirement in _requirement_list(name)
    ]


def _requirement_list(name: str) -> list[str]:
    """Return the strings of list ``name`` in pyproject.toml; Python 3.10 has no TOML parser."""
    text = PYPROJECT.read_text(encoding="utf-8")
    block = re.search(rf"^{re.escape(name)} = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    if block is None:
        raise SystemExit(f"{PYPROJECT} has no list of requirements named {name!r}")
    found: list[str] = []
    for requirement in re.findall(r'^\s*"([^"]+)"', block[1], re.MULTILINE):
        nested_extra = re.fullmatch(r"triton-dist-tuner\[(\w+)\]", requirement)
        found += _requirement_list(nested_extra[1]) if nested_extra else [requirement]
    return found


def unmet_reason(requirement: str) -> str | None:
    """Return why ``requirement`` is not met, or ``None``."""
    from packaging.requirements import Requirement

    requirement_spec = Requirement(requirement)
    module = requirement_spec.name.replace("-", "_")
    try:
        version = importlib.metadata.version(requirement_spec.name)
    except importlib.metadata.PackageNotFoundError:
        # In nightly builds and source trees the distribution may have a different name.
        if importlib.util.find_spec(module) is None:
            return f"{requirement_spec.name} is missing"
        version = importlib.import_module(module).__version__
    if requirement_spec.specifier.contains(version, prereleases=True):
        return None
    return f"{requirement_spec.name} {version} is not {requirement_spec.specifier}"


def torch_lacks_cuda() -> bool:
    """Read the CUDA version from torch/version.py without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return True
    return runpy.run_path(str(Path(spec.origin).with_name("version.py"))).get("cuda") is None


def check(extras: list[str], cuda: bool) -> list[str]:
    """Return all reasons why this Python cannot run the package with ``extras``."""
    if not (3, 10) <= sys.version_info[:2] < (3, 14):
        return [f"Python {sys.version.split()[0]} is not 3.10 to 3.13"]
    if importlib.util.find_spec("packaging") is None:  # versions cannot be compared without it
        names = [re.match(r"[\w-]+", requirement)[0] for requirement in requirements(extras)]  # type: ignore[index]
        missing = [
            name for name in names if importlib.util.find_spec(name.replace("-", "_")) is None
        ]
        return [f"{name} is missing" for name in missing]
    problems = [text for text in map(unmet_reason, requirements(extras)) if text is not None]
    if not problems and cuda and torch_lacks_cuda():
        return ["torch was built without CUDA"]
    return problems


UV_VARIABLES = {
    "index-url": "UV_INDEX_URL",
    "extra-index-url": "UV_EXTRA_INDEX_URL",
    "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT",
    "cert": "SSL_CERT_FILE",
}
"""Settings of pip, and the corresponding variables of uv."""


def run_uv(*arguments: str) -> NoReturn:
    """Replace this process by uv with the package indexes of pip's configuration.

    Variables of uv that are already set are not changed.
    """
    pip = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(
        pip, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ).stdout
    in_files = dict(re.findall(r"^(?:global|install)\.([\w-]+)=(.*)$", listed, re.MULTILINE))

    def setting(name: str) -> str:
        variable = os.environ.get(f"PIP_{name.upper().replace('-', '_')}", "")
        return variable or ast.literal_eval(in_files.get(name, "''"))

    # Like pip, use the best version of all indexes instead of the first index with the package.
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for name, variable in UV_VARIABLES.items():
        words = [os.path.abspath(w) if os.path.exists(w) else w for w in setting(name).split()]
        if words:
            variables[variable] = ("," if name == "find-links" else " ").join(words)
    no_index = setting("no-index").lower() in ("1", "true", "yes", "on")  # uv has no such variable
    options = ["--no-index"] if no_index and "install" in arguments else []
    os.execvpe("uv", ["uv", *arguments, *options], {**variables, **os.environ})


def main(subcommand: str, *arguments: str) -> int:
    if subcommand == "uv":
        run_uv(*arguments)
    extras = [argument for argument in arguments if argument != "--cuda"]
    if subcommand == "list":
        print("\n".join(requirements(extras)))
        return 0
    problems = check(extras, "--cuda" in arguments)
    print(", ".join(problems), end="")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
