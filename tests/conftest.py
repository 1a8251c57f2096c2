"""What every test runs under: poisoned buffers, a cache folder of its own, a decided device."""

from __future__ import annotations

import fcntl
import functools
import gc
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

# torch and what imports it are imported where they are needed: the process that only hands tests to
# workers starts two seconds earlier.

LAST_FOLDERS = ("layers", "distributed", "benchmarks", "docs", "examples")
"""Folders whose tests run several ranks. Workers of pytest-xdist take files in this order. Other
tests often wait and leave a core to tests/compile, which runs at the same time. When one worker has
no more files, the ranks of the last file still use all cores."""
COMPILE_ONLY = Path(__file__).parent / "compile"


def interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def pytest_configure(config: pytest.Config) -> None:
    """Without a GPU, kernels are interpreted, unless tests/compile alone is run.

    Triton decides at decoration, so this comes before any test module is imported. Workers of
    pytest-xdist are started later and inherit it.
    """
    gc.disable()  # until tests are collected: imports make objects that stay
    if "TRITON_INTERPRET" in os.environ or all(map(is_compile_only, asked_for(config))):
        return
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"


def asked_for(config: pytest.Config) -> list[Path]:
    """The files and folders of the command line, or testpaths."""
    return [Path(config.invocation_params.dir, item.split("::")[0]) for item in config.args]


@functools.cache
def is_compile_only(path: Path) -> bool:
    return path.resolve().is_relative_to(COMPILE_ONLY)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let one worker rewrite the assertions of a file, and the others read its bytecode."""
    if not isinstance(collector, pytest.Module):
        return (yield)
    with collector.path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files that use all cores last; skip, with the reason, what this process cannot run."""

    def position(item: pytest.Item) -> int:
        folder = item.path.parent.name
        return LAST_FOLDERS.index(folder) if folder in LAST_FOLDERS else -1

    items.sort(key=position)
    for item in items:
        reason = reason_to_skip(item)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Enable garbage collections, which would take 2 s per process during imports. Exclude modules
    and test items from them, which would take 3 s per worker."""
    gc.collect()
    gc.freeze()
    gc.enable()


def reason_to_skip(item: pytest.Item) -> str | None:
    import torch

    marker = item.get_closest_marker("gpu")
    if marker is not None:
        needed = marker.kwargs.get("count", marker.args[0] if marker.args else 1)
        if torch.cuda.device_count() < needed:
            return "needs an NVIDIA GPU" if needed == 1 else f"needs {needed} NVIDIA GPUs"
        if interpreting():
            return "needs a process without TRITON_INTERPRET: make gpu"
    elif interpreting() and is_compile_only(item.path):
        return "needs a process without TRITON_INTERPRET: scripts/test.sh starts one"
    return None


@pytest.fixture(autouse=True)
def _poisoned_empty() -> Iterator[None]:
    from triton_dist import testing

    with testing.poisoned_empty():
        yield


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's tuning records; ranks inherit the folder."""
    monkeypatch.setenv("TRITON_DIST_CACHE_DIR", str(tmp_path / "triton_dist"))
    monkeypatch.setattr(os, "fsync", lambda file: None)  # 4 ms each; no test cuts the power


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[int, Any]]:
    """Ranks that serve many tests, by their number."""
    pools: dict[int, Any] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def on_ranks(_pools: dict[int, Any]) -> Callable[[int], Callable[..., list[Any]]]:
    """``on_ranks(num_ranks)``: ``run(fn, *args, env={})`` that returns the results by rank.

    ``fn`` must leave no state behind: the ranks serve other tests too.
    """
    from triton_dist.testing.rank_pool import RankPool

    def run(num_ranks: int, fn: Callable[..., Any], *args: Any, env: Any = None) -> list[Any]:
        pool = _pools.setdefault(num_ranks, RankPool(num_ranks))
        pool.env = env or {}
        return pool.run(fn, *args, timeout=200.0)

    return lambda num_ranks: functools.partial(run, num_ranks)


@pytest.fixture
def spawn_ranks() -> Callable[..., list[Any]]:
    """:func:`triton_dist.testing.spawn_ranks`, with time for a machine that does much else."""
    from triton_dist import testing

    return functools.partial(testing.spawn_ranks, timeout=180.0)
