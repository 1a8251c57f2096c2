"""What pyproject.toml asks for, listed, or checked against the Python that runs this.

    requirements.py list  [EXTRA ...]           the requirements, one a line
    requirements.py check [--cuda] [EXTRA ...]  status 0 if all are met; else 1 and what is missing
    requirements.py uv ARGUMENTS                run uv, which looks for packages where pip does

Runs in a Python that may have nothing installed, and imports none of what it looks for: torch alone
takes over a second. ``--cuda`` asks for a torch that was built for CUDA.
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
    """The requirement strings of the package and of ``extras``."""
    return [item for name in ["dependencies", *extras] for item in _listed(name)]


def _listed(name: str) -> list[str]:
    """The strings of list ``name`` in pyproject.toml, by pattern: Python 3.10 reads no TOML."""
    text = PYPROJECT.read_text(encoding="utf-8")
    block = re.search(rf"^{re.escape(name)} = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    if block is None:
        raise SystemExit(f"{PYPROJECT} has no list of requirements named {name!r}")
    found: list[str] = []
    for item in re.findall(r'^\s*"([^"]+)"', block[1], re.MULTILINE):
        own_extra = re.fullmatch(r"triton_dist\[(\w+)\]", item)
        found += _listed(own_extra[1]) if own_extra else [item]
    return found


def problem(requirement: str) -> str | None:
    """Why ``requirement`` is not met, or ``None``."""
    from packaging.requirements import Requirement

    wanted = Requirement(requirement)
    module = wanted.name.replace("-", "_")
    try:
        version = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        # Nightly builds and source trees may bring the module under another distribution's name.
        if importlib.util.find_spec(module) is None:
            return f"{wanted.name} is missing"
        version = importlib.import_module(module).__version__
    if wanted.specifier.contains(version, prereleases=True):
        return None
    return f"{wanted.name} {version} is not {wanted.specifier}"


def torch_lacks_cuda() -> bool:
    """Reads torch/version.py, which says so, without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return True
    return runpy.run_path(str(Path(spec.origin).with_name("version.py"))).get("cuda") is None


def check(extras: list[str], cuda: bool) -> list[str]:
    """Everything that keeps this Python from running the package with ``extras``."""
    if not (3, 10) <= sys.version_info[:2] < (3, 14):
        return [f"Python {sys.version.split()[0]} is not 3.10 to 3.13"]
    if importlib.util.find_spec("packaging") is None:  # versions cannot be compared without it
        names = [re.match(r"[\w-]+", item)[0] for item in requirements(extras)]  # type: ignore[index]
        missing = [
            name for name in names if importlib.util.find_spec(name.replace("-", "_")) is None
        ]
        return [f"{name} is missing" for name in missing]
    problems = [text for text in map(problem, requirements(extras)) if text is not None]
    if not problems and cuda and torch_lacks_cuda():
        return ["torch was built without CUDA"]
    return problems


UV = {
    "index-url": "UV_INDEX_URL",
    "extra-index-url": "UV_EXTRA_INDEX_URL",
    "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT",
    "cert": "SSL_CERT_FILE",
}
"""Settings of pip, and the variables by which uv has them."""


def run_uv(*arguments: str) -> NoReturn:
    """Replace this process by uv, which looks for packages where pip does, by pip's files and
    variables. Variables of uv that are set already stay."""
    pip = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(
        pip, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ).stdout
    in_files = dict(re.findall(r"^(?:global|install)\.([\w-]+)=(.*)$", listed, re.MULTILINE))

    def setting(name: str) -> str:
        variable = os.environ.get(f"PIP_{name.upper().replace('-', '_')}", "")
        return variable or ast.literal_eval(in_files.get(name, "''"))

    # As pip does, uv takes the best version of all indexes, not the first index that has any.
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for name, variable in UV.items():
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
