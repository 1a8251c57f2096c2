"""Contextual tuning where kernels are compiled: what does not fit is dropped before it is
launched."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

from triton_dist._tuning.engine.contextual.launch import Launch
from triton_dist.autotuner import contextual_autotune
from triton_dist.errors import NoValidConfig, TuningWarning
from triton_dist.runtime.compiling import CompilePool

TOO_MUCH = triton.Config({"BLOCK": 64}, num_stages=16)
BROKEN = triton.Config({"BLOCK": 24})  # not a power of two
SMALL, LARGE = triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64})


@triton.jit
def square(a_ptr, c_ptr, n, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ks = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in range(tl.cdiv(n, BLOCK)):
        a = tl.load(a_ptr + rows[:, None] * n + k * BLOCK + ks[None, :])
        b = tl.load(a_ptr + (k * BLOCK + ks[:, None]) * n + rows[None, :])
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + rows[:, None] * n + rows[None, :], acc.to(c_ptr.dtype.element_ty))


@pytest.fixture(autouse=True)
def _own_logs(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_LOG_DIR", str(tmp_path / "logs"))


def tuned(candidates, pre_hook=None):
    kernel = triton.autotune(candidates, ["n"], pre_hook=pre_hook)(square)
    a = torch.empty(512, 512, dtype=torch.float16)

    @contextual_autotune(n_repeat=2, n_warmup=1)
    def function():
        kernel[lambda meta: (triton.cdiv(512, meta["BLOCK"]),)](a, a, 512)

    return kernel, function


@pytest.mark.parametrize(
    "candidates",
    [
        [TOO_MUCH, SMALL, LARGE],
        [SMALL, TOO_MUCH, LARGE],
        [SMALL, LARGE, BROKEN],
        [BROKEN, SMALL, LARGE, TOO_MUCH],
    ],
)
def test_what_does_not_compile_or_fit_is_never_launched(sm90, candidates):
    launched = []

    def note(arguments, reset_only=False):
        launched.append(arguments["BLOCK"])

    kernel, function = tuned(candidates, note)
    function()
    assert function.num_tuning_calls == 2 * 3
    assert launched[:6] == [32] * 3 + [64] * 3
    assert len(sm90.launches) == 7
    (winner,) = kernel.cache.values()
    assert winner in (SMALL, LARGE)
    function()
    assert len(sm90.launches) == 8


def test_a_recorded_winner_that_does_not_fit_today_is_replaced(sm90, monkeypatch):
    kernel, function = tuned([SMALL, LARGE])
    function()
    (before,) = kernel.cache.values()
    compile_it = Launch.compile

    def today(self, config):
        if config == before:
            raise OutOfResources(300000, 232448, "shared memory")
        compile_it(self, config)

    monkeypatch.setattr(Launch, "compile", today)
    said = r"config BLOCK: .* of the tuning record .*json fails on rank 0: OutOfResources"
    function.clear()
    with pytest.warns(TuningWarning, match=said):
        function()
    (after,) = kernel.cache.values()
    assert after != before
    calls = function.num_tuning_calls
    function.clear()
    function()
    assert function.num_tuning_calls == calls
    assert list(kernel.cache.values()) == [after]


def test_nothing_compiles(sm90):
    _, function = tuned([TOO_MUCH, BROKEN])
    for _ in range(2):
        with pytest.raises(NoValidConfig) as failure:
            function()
        first, second = failure.value.causes.values()
        assert first.startswith("resources on rank 0: OutOfResources")
        assert second.startswith("compile on rank 0: ")
    assert not sm90.launches


def test_cache_results_are_read_and_written(sm90):
    kernel = triton.autotune([SMALL, LARGE], ["n"], cache_results=True)(square)
    a = torch.empty(256, 256, dtype=torch.float16)

    def function():
        kernel[(4,)](a, a, 256)

    tuning = contextual_autotune(n_repeat=1, n_warmup=0)(function)
    tuning()
    assert tuning.num_tuning_calls == 2
    winner = dict(kernel.cache)
    kernel.cache.clear()
    function()  # plain Triton finds it on disk
    assert kernel.cache == winner


def test_what_triton_has_on_disk_is_used(sm90, tmp_path, monkeypatch):
    kernel = triton.autotune([SMALL, LARGE], ["n"], cache_results=True)(square)
    a = torch.empty(128, 128, dtype=torch.float16)

    def function():
        kernel[(4,)](a, a, 128)

    function()
    kernel.cache.clear()
    tuning = contextual_autotune()(function)
    tuning()
    assert tuning.num_tuning_calls == 0
    assert len(kernel.cache) == 1


def test_configs_are_compiled_ahead_by_other_processes(sm90, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    square.device_caches.clear()
    compiled = []

    def listen(*, cache_hit, **_):
        compiled.append("found" if cache_hit else "compiled")

    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
    kernel, function = tuned([SMALL, BROKEN, LARGE])
    compose = function._create_components
    function._create_components = lambda: dataclasses.replace(compose(), compiler=CompilePool)
    function()
    assert function.num_tuning_calls == 2 * 3
    assert compiled == ["found"] * 2
    assert next(iter(kernel.cache.values())) in (SMALL, LARGE)
