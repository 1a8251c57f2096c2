"""Tuned functions in a backward pass, which torch runs on a thread of its own for each GPU."""

from __future__ import annotations

import threading

import pytest
import torch

from triton_dist import tune

pytestmark = [pytest.mark.timeout(300), pytest.mark.gpu]


def trained() -> tuple[list[float], int, int, bool]:
    """Tune a step whose backward pass calls a function that is not tuned yet."""
    threads = set()

    @tune.autotune([{"n": 1}, {"n": 2}], key_fn=len, scope="rank")
    def double(gradient, n):
        threads.add(threading.get_ident())
        return 2 * gradient

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return double(gradient)

    @tune.autotune([{"n": 1}, {"n": 2}], key_fn=len, scope="rank")
    @torch.enable_grad()
    def step(x, n):
        x = x.detach().requires_grad_()
        Doubled.apply(x).sum().backward()
        return x.grad

    found = step(torch.ones(3, device="cuda")).tolist()
    elsewhere = threading.get_ident() not in threads
    return found, step.num_tunings, double.num_tunings, elsewhere


def test_a_step_is_tuned_whose_backward_pass_tunes(on_ranks):
    assert on_ranks(1)(trained) == [([2.0, 2.0, 2.0], 1, 1, True)]
