"""Imported by Python when it starts, in programs that ``triton-dist dump`` and ``profile`` run.

Waits until the program imports Triton, and then has each kernel that it compiles, or takes from
Triton's cache, exported; or until it imports the tuner, and then has calls of tuned functions
recorded. Programs that never do cost nothing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

_NAME = "sitecustomize"


class _After(MetaPathFinder):
    """Finds nothing, but sees when a module is looked for, and calls ``then`` with it once it has
    been imported."""

    def __init__(self, name: str, then: Callable[[Any], object]) -> None:
        self._name, self._then = name, then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            try:
                self._then(module)
            except Exception as error:  # the program has to go on
                print(f"triton_dist: nothing is recorded: {error!r}", file=sys.stderr)

        spec.loader.exec_module = exec_module
        return spec


def _dump_of(triton_knobs: Any) -> None:
    from triton_dist import knobs

    if knobs.dump_dir.get() is not None:
        triton_knobs.compilation.listener = _dump


def _dump(**compiled: Any) -> None:
    from triton_dist.runner.files import dump  # by now the program has loaded what it needs

    dump(**compiled)


def _record(_: Any) -> None:
    from triton_dist.timelines.recording import install

    install()


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
    sys.meta_path.insert(0, _After("triton.knobs", _dump_of))
    sys.meta_path.insert(0, _After("triton_dist.tune", _record))
    _import_the_other()
