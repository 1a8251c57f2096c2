"""Tuned functions inside ``torch.compile``: right results; a hit is traced, a first call breaks the
graph once."""

from __future__ import annotations

import pytest
import torch

from triton_dist.tune import autotune, to_hashable

pytestmark = pytest.mark.filterwarnings(
    # torch's own, of some versions
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore::UserWarning:torch.*",
)

A, B = torch.arange(3.0), torch.ones(3)


class Layer(torch.nn.Module):
    @autotune([{"n": 3}], lambda self, x: to_hashable(x))
    def forward(self, x, n):
        return x * n


def make():
    @autotune([{"n": 3}, {"n": 3, "m": 0}], lambda a, b: to_hashable(a))
    def scaled(a, b, n, m=0):
        return a * n + b + m

    return scaled


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(function, **options):
    return torch.compile(function, backend="eager", **options)


def graph_counter():
    """A backend that counts the graphs it is given. Imported here: other tests are about processes
    in which nothing has imported what compiles."""
    from torch._dynamo.testing import CompileCounter

    return CompileCounter()


def breaks(function, *args) -> int:
    """Graph breaks in the frame of ``function``, counted at its first run."""
    from torch._dynamo.utils import counters

    counters.clear()
    compiled(function)(*args)
    return sum(counters["graph_break"].values())


def test_a_first_call_breaks_the_graph_once_and_is_right():
    scaled = make()

    def model(a, b):
        return scaled(a.sin(), b).cos()

    torch.testing.assert_close(compiled(model)(A, B), (A.sin() * 3 + B).cos())
    assert scaled.num_tunings == 1
    scaled = make()
    graphs = graph_counter()
    torch.compile(model, backend=graphs)(A, B)
    assert graphs.frame_count == 2  # before the call, and after it


def test_a_hit_is_part_of_the_graph():
    scaled = make()

    def model(a, b):
        return scaled(a.sin(), b=b).cos()

    expected = model(A, B)
    assert breaks(model, A, B) == 0
    torch.testing.assert_close(compiled(model, fullgraph=True)(A, B), expected)
    assert scaled.num_tunings == 1


def test_a_method_breaks_the_graph_once():
    layer = Layer()

    def model(a):
        return layer(a.sin()).cos()

    expected = model(A)
    graphs = graph_counter()
    torch.testing.assert_close(torch.compile(model, backend=graphs)(A), expected)
    assert graphs.frame_count == 3  # before the call, the layer, and after it


def test_new_shapes_are_new_keys():
    scaled = make()

    @compiled
    def model(a, b):
        return scaled(a, b)

    for size in (3, 4, 3):
        a, b = torch.randn(size), torch.randn(size)
        torch.testing.assert_close(model(a, b), a * 3 + b)
    assert scaled.num_tunings == 2


def test_gradients():
    scaled = make()
    a = A.clone().requires_grad_()
    compiled(lambda a: scaled(a, B).sum())(a).backward()
    assert a.grad.tolist() == [3.0, 3.0, 3.0]


def test_clearing_is_seen_by_what_was_compiled():
    scaled = make()
    scaled(A, B)
    model = compiled(lambda a: scaled(a, B))
    torch.testing.assert_close(model(A), A * 3 + B)
    scaled.clear()
    torch.testing.assert_close(model(A), A * 3 + B)
    assert len(scaled._cached_arguments) == 1
