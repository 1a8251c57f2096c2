"""Kernels compiled by another process, and found in Triton's cache by this one."""

from __future__ import annotations

import errno
import os
import select
import threading
import time
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from tests.compile import kernels
from triton_dist.errors import CandidateFailed, CompileTimeout
from triton_dist.runtime.compiling import CompilePool
from triton_dist.runtime.triton_compat import triton_version

X = torch.empty(128, device="meta")


@pytest.fixture
def pool(sm90, tmp_path, monkeypatch):
    """With a disk cache and no kernel in memory."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    for kernel in vars(kernels).values():
        if isinstance(kernel, triton.JITFunction):
            kernel.device_caches.clear()
    pool = CompilePool()
    yield pool
    pool.close()


def warm(kernel, *args, **options):
    return lambda: kernel.warmup(X, *args, grid=(1,), **options)


def compiled_files() -> list[str]:
    return sorted(path.name for path in Path(os.environ["TRITON_CACHE_DIR"]).glob("*/*.cubin"))


@pytest.fixture
def compilations(monkeypatch):
    """What this process compiled, and what it found in the disk cache."""
    seen = []

    def listen(*, src, cache_hit, **_):
        seen.append((src.name, "found" if cache_hit else "compiled"))

    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
    return seen


def test_what_another_process_compiled_is_found(pool, compilations):
    prepares = [warm(kernels.scale, 2.0, BLOCK=block) for block in (32, 64, 128)]
    digests = [digest for prepare in prepares for digest in pool.collect(prepare)]
    assert len(set(digests)) == 3
    assert compiled_files() == []
    pool.begin(digests, 1)
    for digest in digests:
        pool.wait(digest)
    assert compiled_files() == ["scale.cubin"] * 3
    for prepare in prepares:
        assert prepare().metadata.name == "scale"
        assert pool.collect(prepare) == []
    assert compilations == [("scale", "found")] * 3


def test_listing_compiles_nothing_and_forgives_what_prepare_makes_of_it(pool, compilations):
    def prepare():
        warm(kernels.scale, 2.0, BLOCK=32)()._init_handles()  # of None
        raise AssertionError("unreachable")

    assert len(pool.collect(prepare)) == 1
    assert compilations == []
    assert triton.knobs.runtime.jit_cache_hook is None


def test_other_threads_compile_while_kernels_are_listed(pool):
    compiled = []

    def prepare():
        other = threading.Thread(
            target=lambda: compiled.append(warm(kernels.scale, 5.0, BLOCK=16)())
        )
        other.start()
        other.join()
        warm(kernels.scale, 2.0, BLOCK=32)()

    assert len(pool.collect(prepare)) == 1
    assert compiled[0].metadata.name == "scale"


def test_the_other_process_knows_what_it_compiles_for(pool):
    (digest,) = pool.collect(warm(kernels.targeted))
    pool.begin([digest], 1)
    pool.wait(digest)
    assert "9.000000e+01" in warm(kernels.targeted)().asm["ttir"]


def test_a_function_may_be_a_constant(pool, compilations):
    digests = pool.collect(warm(kernels.apply, kernels.twice))
    # Triton 3.6 fails to describe such a constant to its hook: compiled by who needs it.
    assert len(digests) == 1 or triton_version().minor == 6
    pool.begin(digests, 1)
    for digest in digests:
        pool.wait(digest)
    warm(kernels.apply, kernels.twice)()
    assert compilations == [("apply", "found" if digests else "compiled")]


@pytest.fixture
def local():
    """No other process could import it."""

    @triton.jit
    def local(x_ptr):
        tl.store(x_ptr, 1.0)

    return local


@pytest.mark.parametrize("can_fork", [True, False])
def test_a_kernel_that_cannot_be_imported(pool, compilations, local, monkeypatch, can_fork):
    """Without another process it is compiled here, once it is needed."""

    def fork():
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    if not can_fork:
        monkeypatch.setattr(os, "fork", fork)
    (digest,) = pool.collect(warm(local))
    pool.begin([digest], 1)
    assert compilations == []
    pool.wait(digest)
    warm(local)()
    compiled_here = [] if can_fork else [("local", "compiled")]
    assert compilations == [*compiled_here, ("local", "found")]


def test_the_other_process_holds_nothing_open(pool):
    reader, writer = os.pipe()
    (hanging,) = pool.collect(warm(kernels.difficult, "hangs"))
    pool.begin([hanging], 1)
    until(lambda: children_of(server_of(pool)))
    os.close(writer)
    assert select.select([reader], [], [], 20)[0] == [reader]
    assert os.read(reader, 1) == b""
    os.close(reader)


@pytest.mark.parametrize(
    ("how", "said"), [("does not compile", "it does not compile"), ("crashes", "SIGSEGV")]
)
def test_a_failure_is_told_and_spoils_nothing(pool, how, said):
    (bad,) = pool.collect(warm(kernels.difficult, how))
    (good,) = pool.collect(warm(kernels.scale, 2.0, BLOCK=32))
    pool.begin([bad, good], 1)
    for _ in range(2):
        with pytest.raises(CandidateFailed, match=said):
            pool.wait(bad)
    pool.wait(good)
    assert "scale.cubin" in compiled_files()


def test_a_compiler_that_hangs_is_ended(pool, monkeypatch):
    monkeypatch.setenv("TRITON_DIST_COMPILE_TIMEOUT", "5")
    pool = CompilePool()
    (bad,) = pool.collect(warm(kernels.difficult, "hangs"))
    pool.begin([bad], 1)
    try:
        with pytest.raises(CompileTimeout, match=r"compiling difficult took more than 5 s"):
            pool.wait(bad)
    finally:
        pool.close()


def test_closing_ends_every_process(pool):
    (hanging,) = pool.collect(warm(kernels.difficult, "hangs"))
    (quick,) = pool.collect(warm(kernels.scale, 2.0, BLOCK=32))
    pool.begin([quick, hanging], 1)
    pool.wait(quick)
    server = server_of(pool)
    until(lambda: children_of(server))
    processes = [server, *children_of(server)]
    pool.close()
    pool.close()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes))


def server_of(pool):
    (pid,) = pool._servers.values()
    return pid


def children_of(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def until(happened):
    deadline = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.05)


def test_nothing_to_compile_starts_no_process(pool):
    pool.begin([], 1)
    assert not pool._servers
    pool.wait("a kernel of another rank")
