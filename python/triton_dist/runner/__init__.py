"""Run a kernel from any compilation level: ``ttir``, ``ttgir``, ``llir``, ``ptx``, ``cubin``.

An artefact is a kernel at one of these levels, with the metadata that a launch requires.
``export`` writes a compiled kernel to a folder; a later launch can run an artefact of the folder.

    from triton_dist import runner

    @runner.jit
    def kernel(x_ptr, n, BLOCK: tl.constexpr): ...

    compiled = kernel[(1,)](x, n, BLOCK=64)
    runner.export(compiled, "folder")          # folder/kernel.ttir ... folder/kernel.cubin, .json
    kernel[(1,)](x, n, cubin_dir="folder")     # BLOCK is 64, as in the artefact
"""

from triton_dist.runner import color_print, gluon_runner, language, testing, torch_utils, tuning
from triton_dist.runner.artefact import LEVELS, Artefact, ArtefactMetadata
from triton_dist.runner.files import export, load
from triton_dist.runner.function import jit
from triton_dist.runner.scripts import (
    autotune,
    configure_autotune_backend,
    configure_jit_backend,
    get_file_dir,
    restore_autotune_backend,
    restore_jit_backend,
)

__all__ = [
    "LEVELS",
    "Artefact",
    "ArtefactMetadata",
    "autotune",
    "color_print",
    "configure_autotune_backend",
    "configure_jit_backend",
    "export",
    "get_file_dir",
    "gluon_runner",
    "jit",
    "language",
    "load",
    "restore_autotune_backend",
    "restore_jit_backend",
    "testing",
    "torch_utils",
    "tuning",
]
