"""Kernels, and the functions for kernels, show their parameters."""

from __future__ import annotations

import inspect
import pydoc

import pytest
import triton.language as tl

import triton_dist
from triton_dist import language as dl
from triton_dist import runner

PARAMETERS = {
    "breakpoint": "condition",
    "consume_token": "value token",
    "give_turn": "",
    "mark": "name pipelined",
    "notify": "ptr value op mask",
    "only_rows": "desc begin end",
    "publish_tile": "",
    "symm_at": "ptr table peer",
    "wait": "ptr count value timeout_words TAGGED",
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_function_shows_its_parameters(name: str) -> None:
    shown = inspect.signature(getattr(dl, name)).parameters
    assert [each for each in shown if not each.startswith("_")] == PARAMETERS[name].split()


def kernel_copy(x_ptr, y_ptr, n, BLOCK: tl.constexpr = 64):
    """Copy x to y."""


DECORATORS = [triton_dist.jit, triton_dist.jit(do_not_specialize=["n"]), runner.jit]


@pytest.mark.parametrize("jit", DECORATORS)
def test_kernel_shows_its_function(jit) -> None:
    kernel = jit(kernel_copy)
    assert inspect.signature(kernel) == inspect.signature(kernel_copy)
    assert kernel.__module__ == __name__
    text = pydoc.plain(pydoc.render_doc(kernel))
    assert "kernel_copy(x_ptr, y_ptr, n, BLOCK" in text
    assert "Copy x to y." in text
