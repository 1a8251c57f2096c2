"""What is kept on disk, and when it counts. A process that starts anew is a kernel made anew."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import triton_dist
from tests.contextual.kernels import autotuned, configs, scale, scale_kernel, scaling
from triton_dist._tuning.store.layout import with_checksum
from triton_dist.autotuner import contextual_autotune
from triton_dist.errors import TuningFrozen

X = torch.arange(64.0)


def start(*blocks, kernel=scale_kernel, x=X, **options):
    """(extra calls, blocks launched) of a first call in what stands for a new process."""
    function = scaling(*blocks, kernel=kernel, **options)
    assert torch.equal(function(x), 2 * x)
    return function.num_tuning_calls, function.spy.blocks


def records() -> list[Path]:
    return sorted(Path(os.environ["TRITON_DIST_CACHE_DIR"], "autotune").glob("*/*.json"))


def test_a_later_process_calls_once():
    assert start(16, 32)[0] == 4
    calls, blocks = start(16, 32)
    assert calls == 0
    assert len(blocks) == 1
    assert start(16, 32, x=X[:50])[0] == 4
    assert len(records()) == 2


def test_other_configs_or_counts_are_another_tuning():
    start(16, 32)
    assert start(16, 64)[0] == 4
    assert start(16, 64, n_repeat=2)[0] == 6


def test_always_tune(monkeypatch):
    start(16, 32)
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_ALWAYS_TUNE", "1")
    assert start(16, 32)[0] == 4


def test_a_patch_level_counts_only_if_versions_are_checked(monkeypatch):
    start(16, 32)
    (path,) = records()
    record = json.loads(path.read_text())
    record["fingerprint"]["software"]["triton"] += ".1"
    path.write_text(with_checksum(record))
    assert start(16, 32)[0] == 0
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_VERSION_CHECK", "1")
    assert start(16, 32)[0] == 4


def test_the_source_of_a_callee_counts(monkeypatch):
    assert start(16, 32, kernel=calling)[0] == 4
    assert start(16, 32, kernel=calling)[0] == 0
    monkeypatch.setitem(globals(), "callee", other_callee)
    assert start(16, 32, kernel=calling)[0] == 4


@triton_dist.jit
def callee(x):
    return x * 2


@triton_dist.jit
def other_callee(x):
    return x + x


@triton_dist.jit
def calling(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + index, callee(tl.load(x_ptr + index, mask=index < n)), mask=index < n)


def test_keys_of_triton_types():
    """Dtypes of Triton as arguments have a text; another process finds the record."""

    def begin():
        tuner = triton.autotune(configs(16, 32), ["TYPE"])(typed_kernel)
        function = contextual_autotune(n_repeat=1, n_warmup=0)(
            lambda: tuner[(4,)](X, torch.empty_like(X), 64, TYPE=tl.float32)
        )
        function()
        return function.num_tuning_calls

    assert (begin(), begin()) == (2, 0)


def test_keys_that_mean_nothing_elsewhere_stay_in_memory():
    tuner = triton.autotune(configs(16, 32), ["FLAG"])(flag_kernel)
    function = contextual_autotune(n_repeat=1, n_warmup=0)(
        lambda flag: tuner[(4,)](X, torch.empty_like(X), 64, FLAG=flag)
    )
    function(Opaque())
    assert function.num_tuning_calls == 2
    assert not records()


class Opaque:
    pass


@triton_dist.jit
def typed_kernel(x_ptr, y_ptr, n, TYPE: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + index, tl.load(x_ptr + index, mask=index < n).to(TYPE), mask=index < n)


@triton_dist.jit
def flag_kernel(x_ptr, y_ptr, n, FLAG: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + index, tl.load(x_ptr + index, mask=index < n), mask=index < n)


def test_a_log_that_cannot_be_written_is_a_warning(monkeypatch, tmp_path, recwarn):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_LOG_DIR", str(tmp_path / "file"))
    assert start(16, 32)[0] == 4
    assert [
        str(warning.message) for warning in recwarn if "cannot be written" in str(warning.message)
    ]


def test_verbose_prints_what_is_chosen(capsys, monkeypatch):
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_PRINT", "1")
    start(16, 32)
    printed = capsys.readouterr().err
    assert "tuning 2 configs (0 pruned) on 1 rank" in printed
    assert "5 calls of the function" in printed
    start(16, 32)
    assert "known, BLOCK: " in capsys.readouterr().err


@pytest.mark.parametrize("always", [False, True])
def test_frozen_a_record_is_used_and_without_one_nothing_is_launched(monkeypatch, always):
    function = scaling(16, 32)
    blocks = function.spy.blocks
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_FROZEN", "1")
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_ALWAYS_TUNE", str(int(always)))
    with pytest.raises(TuningFrozen, match=r"scale_kernel, key \(64, .*no record"):
        function(X)
    assert blocks == []
    monkeypatch.delenv("TRITON_DIST_AUTOTUNE_FROZEN")
    function(X)
    function.clear()
    blocks.clear()
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_FROZEN", "1")
    assert torch.equal(function(X), 2 * X)
    assert len(blocks) == 1


def keep_up_to(candidates, nargs, limit, **_):
    return [config for config in candidates if config.kwargs["BLOCK"] <= limit]


def predicted(weight, BLOCK, **_):
    return weight * BLOCK


def prunes(limit):
    return {"prune_configs_by": {"early_config_prune": functools.partial(keep_up_to, limit=limit)}}


def models(weight):
    model = functools.partial(predicted, weight)
    return {"prune_configs_by": {"perf_model": model, "top_k": 2}}


def tuners_hook(value):
    return {"post_hook": functools.partial(after, value)}


def configs_hook(value):
    return {"pre_hook": functools.partial(after, value, exception=None)}


def after(value, arguments, exception):
    pass


@pytest.mark.parametrize(
    ("options", "first", "second"),
    [(prunes, 64, 32), (models, 1, -1), (tuners_hook, 1, 2), (configs_hook, 1, 2)],
)
def test_what_a_partial_binds_counts(options, first, second):
    """In pruning and in hooks: changed, the kernel is tuned anew; unchanged, it is not."""

    def begin(value):
        given = options(value)
        candidates = configs(16, 32, 64, pre_hook=given.pop("pre_hook", None))
        kernel = autotuned(scale_kernel, candidates, **given)
        function = contextual_autotune(n_repeat=1, n_warmup=0)(lambda: scale(kernel, X))
        function()
        return function.num_tuning_calls

    tuned = begin(first)
    assert tuned > 0
    assert begin(first) == 0
    assert begin(second) > 0
