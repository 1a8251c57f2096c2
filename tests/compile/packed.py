"""A tuned op, its kernel and a native module: what a pack is made of.

As a program, with the paths of a pack and of an artefact of ``add_one``: runs them, and prints what
was compiled and tuned. Then compiles ``add_one`` from llir."""

from __future__ import annotations

import os
import sys

import torch
import triton
import triton.language as tl
from triton.runtime.build import compile_module_from_src

from triton_dist import packs, tune
from triton_dist.testing.compile_only import install

HELLO = """
#include <Python.h>
static PyObject *answer(PyObject *self, PyObject *none) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "hello", "", -1, methods};
PyMODINIT_FUNC PyInit_hello(void) { return PyModule_Create(&module); }
"""
X = torch.empty(128, device="meta")


@triton.jit
def scale(x_ptr, factor, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(x_ptr + offsets, tl.load(x_ptr + offsets) * factor)


def key(factor):
    return type(factor).__name__


@tune.autotune([{"BLOCK": 32}, {"BLOCK": 64}], key_fn=key, version="1")
def scaled(factor, BLOCK):
    scale[(1,)](X, factor, BLOCK=BLOCK)
    return BLOCK


def native():
    """As Triton loads its launchers."""
    return compile_module_from_src(HELLO, "hello").answer()


if __name__ == "__main__":
    from tests.compile import packed  # under the name that the records have
    from tests.compile.runner_kernels import add_one

    found = []
    driver = install(90)
    packs.use(sys.argv[1])
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)
    packed.scaled(2.0)
    answers = [packed.native(), len(driver.launches), packed.scaled.num_tunings, *found]
    # Nothing has initialised LLVM here: stages above llir do it.
    del os.environ["TRITON_DIST_COMPILE_FROZEN"]
    x = torch.zeros(1024)
    kernel = add_one[(16,)](x, x, 1024, llir_dir=sys.argv[2])
    print(*answers, kernel.metadata.name)
