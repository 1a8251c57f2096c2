"""A tuning leaves the random number generators as a call leaves them that does not tune."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
import triton
from torch.utils.checkpoint import checkpoint

from tests.contextual.kernels import autotuned, configs, scale, scale_kernel
from triton_dist.autotuner import contextual_autotune
from triton_dist.errors import NoValidConfig
from triton_dist.tune import autotune

SPACE = [{"n": 1}, {"n": 2}, {"n": 3}]


@pytest.fixture(autouse=True)
def logs(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_LOG_DIR", str(tmp_path))


def seed() -> torch.Generator:
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    return torch.Generator().manual_seed(7)


def draw(generator: torch.Generator | None = None) -> list[float]:
    numbers = [random.random(), np.random.rand(), torch.rand(()).item()]
    return [*numbers, torch.rand((), generator=generator).item()]


def rewound(numbers: list[float]) -> tuple[float, ...]:
    """Those that are the same in each trial: NumPy's generator is rewound only at the end."""
    return numbers[0], numbers[2], numbers[3]


def draw_and_pass(*args, **kwargs):
    draw()
    return True


HOOKS = {
    "none": {},
    "prune_fn": {"prune_fn": draw_and_pass},
    "prepare_fn": {"prepare_fn": draw_and_pass},
    "reset_fn": {"reset_fn": draw_and_pass},
    "check_fn": {
        "check_fn": lambda *outputs: draw_and_pass() and len(set(map(rewound, outputs))) == 1
    },
    "agree_fn": {"agree_fn": draw_and_pass},
    "input_variants_fn": {"input_variants_fn": lambda x, generators: [{"x": draw()}]},
    "graph": {"timing": "graph"},
    "restore": {"restore": ("x",)},
}


@pytest.mark.parametrize("name", HOOKS)
def test_the_same_numbers_whether_it_tuned_or_knew(monkeypatch, name):
    hooks, trials = HOOKS[name], []

    @autotune(SPACE, lambda x, generators: 1, scope="rank", **hooks)
    def tuned(x, generators, n):
        trials.append(draw(generators["dropout"][0]))
        return trials[-1]

    def numbers():
        generator = seed()
        result = tuned(torch.zeros(1), {"dropout": [generator]})
        return result, draw(generator)

    first = numbers()
    assert tuned.num_tunings == 1
    assert len(trials) > 3
    if name in ("none", "check_fn", "graph", "restore"):  # each trial draws what the call draws
        assert len(set(map(rewound, trials))) == 1
    assert numbers() == first
    tuned.clear()  # the record is found
    assert numbers() == first
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE", "0")
    assert numbers() == first


def test_a_tuning_that_fails_leaves_them_as_they_were():
    @autotune(SPACE, lambda generator: 1, scope="rank")
    def tuned(generator, n):
        draw(generator)
        raise ValueError("mine")

    generator = seed()
    with pytest.raises(NoValidConfig):
        tuned(generator)
    assert draw(generator) == draw(seed())


@pytest.mark.filterwarnings("ignore:.*failed on rank 0:triton_dist.errors.TuningWarning")
def test_a_recorded_winner_that_fails_today_after_it_drew():
    broken = []

    @autotune(SPACE, lambda x: 1, scope="rank", max_trials=1)
    def tuned(x, n):
        numbers = draw()
        if broken and broken.pop():
            raise triton.runtime.errors.OutOfResources(2, 1, "shared memory")
        return numbers

    seed()
    first = tuned(1), draw()
    tuned.clear()
    broken.append(True)
    seed()
    assert (tuned(1), draw()) == first
    assert tuned.num_tunings == 2


@pytest.mark.parametrize(("contextual", "reentrant"), [(False, False), (False, True), (True, True)])
def test_checkpointed_dropout_has_the_gradient_of_its_output(reentrant, contextual):
    kernel = autotuned(scale_kernel, configs(16, 32))

    def drop(x, n=1):
        y = torch.nn.functional.dropout(x, 0.5)
        if contextual:
            with torch.no_grad():
                scale(kernel, y)
        return y

    by_key = autotune(SPACE, lambda x: x.shape, scope="rank")
    function = contextual_autotune(n_repeat=1, n_warmup=1)(drop) if contextual else by_key(drop)
    for size in (64, 50):  # of the contextual one, the second key comes in a settled call
        x = torch.ones(size, requires_grad=True)
        y = checkpoint(function, x, use_reentrant=reentrant)
        y.sum().backward()
        assert torch.equal(y.detach(), x.grad)


def test_a_contextual_tuning_draws_what_one_call_draws(monkeypatch):
    kernel = autotuned(scale_kernel, configs(16, 32))

    @contextual_autotune(n_repeat=1, n_warmup=1)
    def function(x, generator):
        numbers = draw(generator)
        scale(kernel, x)
        return numbers, draw(generator)

    def numbers(size):
        generator = seed()
        return function(torch.zeros(size), generator), draw(generator)

    first = numbers(64)
    assert function.num_tuning_calls == 4
    assert numbers(64) == first  # settled
    function.clear()
    assert numbers(64) == first
    assert function.num_tuning_calls == 4
    late = numbers(50)
    assert function.num_tuning_calls == 8
    for mine, own in zip([*late[0], late[1]], [*first[0], first[1]], strict=True):
        assert mine[2:] == own[2:]  # torch's: the others are not saved by each settled call
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE", "0")
    function.clear()
    assert numbers(64) == first


def numbers_after_a_tuning() -> list[tuple[int, list[float]]]:
    """The number of tunings on this rank, and what it draws in a call and afterwards: where only
    rank 1 tunes, and where all ranks do."""
    found = []
    rank = dist.get_rank()
    # The cache folder is shared: with one key, rank 1 might find the record of rank 0.
    for scope, key in (("rank", rank), ("world", None)):
        space = [{"n": 1}, {"n": 2}]
        op = autotune(space, lambda x, key=key: key, scope=scope)(lambda x, n: torch.rand(2))
        if scope == "rank" and rank == 0:
            op(1)
        before = op.num_tunings
        torch.manual_seed(7)
        numbers = [*op(1).tolist(), *torch.rand(2).tolist()]
        found.append((op.num_tunings - before, numbers))
    return found


def test_ranks_of_one_seed_draw_alike_whichever_of_them_tuned(spawn_ranks):
    torch.manual_seed(7)
    numbers = [*torch.rand(2).tolist(), *torch.rand(2).tolist()]
    first, second = spawn_ranks(2, numbers_after_a_tuning)
    assert first == [(0, numbers), (1, numbers)]
    assert second == [(1, numbers), (1, numbers)]
