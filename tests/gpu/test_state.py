"""State of the process on a GPU after a tuning: random number generators and memory."""

from __future__ import annotations

import functools
import gc

import pytest
import torch
import triton
from torch.utils.checkpoint import checkpoint

from tests.contextual.kernels import autotuned, configs, scale, scale_kernel
from triton_dist.autotuner import contextual_autotune
from triton_dist.errors import NoValidConfig
from triton_dist.tune import autotune

pytestmark = [pytest.mark.timeout(600), pytest.mark.gpu]
SPACE = [{"chunks": 1}, {"chunks": 2}, {"chunks": 4}]
SIZE = 1 << 20


@pytest.fixture(autouse=True)
def logs(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_LOG_DIR", str(tmp_path))


def drop(x: torch.Tensor, chunks: int = 1, generator: torch.Generator | None = None):
    parts = [torch.nn.functional.dropout(part, 0.5) for part in x.chunk(chunks)]
    noise = torch.rand(4, device=x.device, generator=generator)
    return torch.cat(parts) + 0 * noise.sum()


def by_key(function=drop, **options):
    return autotune(SPACE, lambda x, **_: x.shape, scope="rank", **options)(function)


def contextual():
    kernel = autotuned(scale_kernel, configs(64, 128))

    @contextual_autotune(n_repeat=2, n_warmup=1)
    def function(x, generator=None):
        with torch.no_grad():
            scale(kernel, x)
        return drop(x, generator=generator)

    return function


FUNCTIONS = {
    "events": by_key,
    "graph": lambda: by_key(timing="graph"),
    "contextual": contextual,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_generators_are_as_without_tuning(name):
    function = FUNCTIONS[name]()
    own = {} if name == "graph" else {"generator": torch.Generator("cuda")}

    def states(size=SIZE, call=function):
        torch.manual_seed(7)
        if own:
            own["generator"].manual_seed(7)
        result = call(torch.ones(size, device="cuda"), **own)
        found = [torch.cuda.get_rng_state(), torch.get_rng_state(), result.cpu()]
        return [*found, *(each.get_state() for each in own.values())]

    def same(first, second):
        return all(map(torch.equal, first, second))

    tuned = states()
    assert same(states(), tuned)
    function.clear()
    assert same(states(), tuned)  # the record is found
    late = states(SIZE // 2)
    assert same(states(SIZE // 2), late)
    config = {} if name == "contextual" else function.best_config(torch.ones(SIZE, device="cuda"))
    assert same(states(call=functools.partial(function.fn, **config)), tuned)


@pytest.mark.parametrize(
    ("name", "reentrant"),
    [("events", False), ("events", True), ("graph", False), ("contextual", True)],
)
def test_checkpointed_dropout_has_the_gradient_of_its_output(name, reentrant):
    function = FUNCTIONS[name]()
    for size in (4096, 8192):
        x = torch.ones(size, device="cuda", requires_grad=True)
        y = checkpoint(function, x, use_reentrant=reentrant)
        y.sum().backward()
        assert torch.equal(y.detach(), x.grad)


def test_a_first_call_in_a_capture_leaves_the_generators_to_the_graph():
    function, x = by_key(), torch.ones(SIZE, device="cuda")
    function(x)
    function.clear()  # the first call of this process: the record is found in the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = function(x)
    torch.manual_seed(7)
    graph.replay()
    first = y.clone()
    graph.replay()
    assert not torch.equal(first, y)
    torch.manual_seed(7)
    graph.replay()
    assert torch.equal(first, y)


@pytest.mark.filterwarnings("ignore:.*configs failed:triton_dist.errors.TuningWarning")
@pytest.mark.parametrize("case", ["events", "graph", "contextual", "a config fails", "all fail"])
def test_memory_after_a_first_call_is_that_of_its_result(case):
    def fails(x, chunks):
        scratch = torch.empty_like(x)
        if case == "all fail" or chunks == 2:
            raise triton.runtime.errors.OutOfResources(2, 1, "shared memory")
        return drop(x + 0 * scratch.zero_(), chunks)

    function = FUNCTIONS[case]() if case in FUNCTIONS else by_key(fails)

    def call(size):
        """Bytes more than before, once the arguments are dropped; those of the result."""
        before = torch.cuda.memory_allocated()
        x = torch.ones(size, device="cuda")
        try:
            result = function(x)
        except NoValidConfig:
            result = torch.empty(0, device="cuda")
        del x
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated() - before, result.numel() * 4

    call(SIZE)  # what the tuner keeps for all tunings, such as the buffer that flushes the cache
    gc.collect()
    gc.disable()
    try:
        for size in (2 * SIZE, SIZE // 2):
            more, expected = call(size)
            assert more == expected
    finally:
        gc.enable()
