"""Import hooks in programs that ``triton-dist dump`` and ``triton-dist profile`` run.

Python imports this module when it starts.

When the program imports Triton, the hook of ``dump`` makes Triton report each kernel that the
program compiles or loads from Triton's cache. When the program imports the tuner, the hook of
``profile`` starts to record calls of tuned functions. Other programs run unchanged.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

_MODULE_NAME = "sitecustomize"


class _ImportHook(MetaPathFinder):
    """A finder that calls ``on_import(module)`` after the module ``name`` has been imported."""

    def __init__(self, name: str, on_import: Callable[[Any], object]) -> None:
        self._name, self._on_import = name, on_import

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            try:
                self._on_import(module)
            except Exception as error:  # an error here must not end the program
                print(f"triton_dist: nothing is recorded: {error!r}", file=sys.stderr)

        spec.loader.exec_module = exec_module
        return spec


def _install_dump(triton_knobs: Any) -> None:
    from triton_dist import knobs

    if knobs.dump_dir.get() is not None:
        triton_knobs.compilation.listener = _dump


def _dump(**compiled: Any) -> None:
    from triton_dist.runner.files import dump  # imports Triton, so not at the top of this module

    dump(**compiled)


def _install_recording(_: Any) -> None:
    from triton_dist.timelines.recording import install

    install()


def _import_hidden_sitecustomize() -> None:
    """Import another module ``sitecustomize`` of the environment, which this module hides."""
    own = sys.modules.pop(_MODULE_NAME, None)
    here = str(Path(__file__).parent)
    sys.path[:] = [folder for folder in sys.path if folder != here]
    with contextlib.suppress(ImportError):
        importlib.import_module(_MODULE_NAME)
    if own is not None:
        sys.modules.setdefault(_MODULE_NAME, own)


if __name__ == _MODULE_NAME:
    sys.meta_path.insert(0, _ImportHook("triton.knobs", _install_dump))
    sys.meta_path.insert(0, _ImportHook("triton_dist.tune", _install_recording))
    _import_hidden_sitecustomize()
