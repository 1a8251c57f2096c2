"""Imported by Python when it starts, in programs that ``triton-dist dump`` runs.

Waits until the program imports Triton, and then has each kernel that it compiles, or takes from
Triton's cache, exported. Programs that never do cost nothing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

_NAME = "sitecustomize"


class _AtTriton(MetaPathFinder):
    """Finds nothing, but sees when ``triton.knobs`` is looked for."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "triton.knobs":
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            module.compilation.listener = _dump

        spec.loader.exec_module = exec_module
        return spec


def _dump(**compiled: Any) -> None:
    from triton_dist.runner.dumping import dump  # by now the program has loaded what it needs

    dump(**compiled)


def _import_the_other() -> None:
    """The environment's own module of this name, which this one hides."""
    own = sys.modules.pop(_NAME, None)
    here = str(Path(__file__).parent)
    sys.path[:] = [folder for folder in sys.path if folder != here]
    with contextlib.suppress(ImportError):
        importlib.import_module(_NAME)
    if own is not None:
        sys.modules.setdefault(_NAME, own)


if __name__ == _NAME:
    sys.meta_path.insert(0, _AtTriton())
    _import_the_other()
