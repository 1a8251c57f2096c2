"""Kernels from packs, where Triton looks for its own; and compiling forbidden."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
import triton
from triton._C.libtriton import get_cache_invalidating_env_vars

from tests.compile import packed
from triton_dist import _archive, packs, runner
from triton_dist._archive import Pack, PackContents, PackedKernel
from triton_dist._tuning import compose
from triton_dist._tuning.store.packs import merge_packs
from triton_dist.errors import CacheWarning, KernelNotShipped
from triton_dist.runtime.compiling import recorder, shipped
from triton_dist.testing.compile_only import compile_only

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parent / "data" / "triton-3.9.0"


@pytest.fixture(scope="module")
def pack(tmp_path_factory) -> Path:
    """Two kernels, a native module, and the record of a tuned function."""
    folder = tmp_path_factory.mktemp("packs")
    with pytest.MonkeyPatch.context() as patch, compile_only(90):
        patch.setattr(triton.knobs.cache, "manager_class", None)
        patch.setenv("TRITON_DIST_CACHE_DIR", str(folder / "own"))
        patch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))
        seen = []
        patch.setattr(triton.knobs.compilation, "listener", lambda **_: seen.append(1))
        with packs.recording() as used:
            packed.scaled(2.0)
            assert packed.native() == 42
        assert len(seen) == 2  # who listened before goes on to
        packed.scale.device_caches.clear()
        packed.scaled(2.0)  # no longer recorded
        return used.save(folder / "scaled.tdpack", [packed.scaled])


@pytest.fixture
def elsewhere(pack, sm90, tmp_path, monkeypatch):
    """A process that begins, on another host; compilations, as they come."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("TRITON_DIST_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setattr(triton.knobs.cache, "manager_class", None)
    for name, fresh in (("_extracted", {}), ("_warned", set())):
        monkeypatch.setattr(shipped, name, fresh)
    monkeypatch.setattr(_archive, "_explicit_packs", [])
    packed.scale.device_caches.clear()
    packed.scaled.clear()
    found = []
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda *, cache_hit, **_: found.append(cache_hit)
    )
    return found


def launch(BLOCK: int = 64, **options):
    packed.scale[(1,)](packed.X, 2.0, BLOCK=BLOCK, **options)


def test_a_pack_has_what_a_launch_needs_and_says_what_it_is(pack):
    there = Pack(pack)
    kernels = [entry for entry in there.kernels.values() if not entry.is_module]
    assert sorted(entry.facts["argument BLOCK"] for entry in kernels) == ["32", "64"]
    assert {entry.facts["argument factor"] for entry in kernels} == {"fp32"}
    assert {entry.facts["target"] for entry in kernels} == {"cuda 90"}
    assert {entry.facts["variable TRITON_DEFAULT_FP_FUSION"] for entry in kernels} == {"true"}
    assert [set(entry.files) for entry in kernels] == [{"scale.json", "scale.cubin"}] * 2
    (module,) = [entry for entry in there.kernels.values() if entry.is_module]
    assert module.name == "hello"
    assert len(there.records) == 1


def test_a_fresh_process_compiles_and_tunes_nothing_and_needs_no_compiler(pack, tmp_path):
    """Nor a home that it can write. Then it compiles, and begins at llir."""
    frozen = {"TRITON_DIST_COMPILE_FROZEN": "1", "TRITON_DIST_AUTOTUNE_FROZEN": "1"}
    closed = {"HOME": "/proc/1/none", "TRITON_CACHE_DIR": "/proc/1/none", "PATH": str(tmp_path)}
    ours = {"TRITON_DIST_CACHE_DIR": "/proc/1/none", "TRITON_DIST_DEVICE": "cpu"}
    inherited = os.environ.get("PYTHONPATH", "")
    paths = {"PYTHONPATH": f"{inherited}:{ROOT / 'python'}:{ROOT}", "TMPDIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.compile.packed", str(pack), str(DATA)],
        env=frozen | closed | ours | paths,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["42", "1", "0", "True", "add_one"]
    assert list(tmp_path.iterdir()) == []  # what was laid out is gone


def test_tritons_own_files_come_first(pack, elsewhere):
    launch()
    packs.use(pack)
    packed.scale.device_caches.clear()
    launch()
    launch(32)
    assert elsewhere == [False, True, True]
    assert len(shipped._extracted) == 1


def test_a_damaged_kernel_is_compiled_after_one_warning(pack, elsewhere, tmp_path):
    contents = Pack(pack).contents()
    damaged = {
        digest: PackedKernel(each.name, each.facts, {**each.files, "scale.cubin": b"none"})
        for digest, each in contents.kernels.items()
        if not each.entry.is_module
    }
    path = tmp_path / "damaged.tdpack"
    path.write_bytes(PackContents({}, damaged).to_bytes())
    packs.use(path)
    with pytest.warns(CacheWarning, match=r"damaged\.tdpack, member .*scale\.cubin.* not a cubin"):
        launch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        packed.scale.device_caches.clear()
        launch()
    assert elsewhere == [False, True]


FROZEN = {
    "another constant": (lambda: launch(128), "argument BLOCK: shipped (32|64), here 128"),
    "another option": (lambda: launch(num_warps=8), "option num_warps: shipped 4, here 8"),
    "another type": (
        lambda: packed.scale[(1,)](packed.X, 3, BLOCK=64),
        "argument factor: shipped fp32, here i32",
    ),
    "another alignment": (
        lambda: packed.scale[(1,)](torch.empty(130)[1:], 2.0, BLOCK=64),
        r"argument x_ptr: shipped \*fp32, divisibility 16, here \*fp32",
    ),
}


@pytest.mark.parametrize("what", FROZEN)
def test_compiling_forbidden_the_nearest_kernel_and_the_difference_are_named(
    what, pack, elsewhere, monkeypatch
):
    call, difference = FROZEN[what]
    packs.use(pack)
    monkeypatch.setenv("TRITON_DIST_COMPILE_FROZEN", "1")
    with pytest.raises(KernelNotShipped, match=f"{difference}. Compiling is forbidden") as caught:
        call()
    error = caught.value
    assert (error.kernel, len(error.differences)) == ("scale", 1)
    assert str(pack) in error.nearest
    assert set(error.specialisation) == {
        "x_ptr", "factor", "BLOCK", "num_warps", "num_stages",
    }  # fmt: skip
    assert "(x_ptr: *fp32" in str(error)
    launch()
    assert elsewhere == [True]


def test_compiling_forbidden_where_nothing_is_shipped(elsewhere, monkeypatch, pack):
    monkeypatch.setenv("TRITON_DIST_COMPILE_FROZEN", "1")
    shipped.install()
    with pytest.raises(KernelNotShipped, match="no such name is shipped"):
        launch()
    with pytest.raises(KernelNotShipped, match=r"kernel hello \(python: cpython.* no such name"):
        packed.native()
    packs.use(pack)
    launch()
    assert packed.native() == 42
    packed.scale.device_caches.clear()
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    with pytest.raises(KernelNotShipped, match="TRITON_ALWAYS_COMPILE is set"):
        launch()


def test_a_variable_that_triton_counts_is_named(pack, elsewhere, monkeypatch):
    packs.use(pack)
    monkeypatch.setenv("TRITON_DIST_COMPILE_FROZEN", "1")
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    with pytest.raises(KernelNotShipped, match="variable TRITON_DEFAULT_FP_FUSION: shipped true"):
        launch()


def test_what_first_calls_need_is_read_meanwhile(pack, elsewhere, monkeypatch):
    """Of the functions whose records are in a pack that is used."""
    join_what_prepares()  # since an earlier use
    read = []
    monkeypatch.setattr(compose, "source_of", lambda roots, *_: read.extend(roots))
    packs.use(pack)
    join_what_prepares()
    assert read == [packed.scaled.fn]


def join_what_prepares():
    for thread in threading.enumerate():
        if thread.name == "triton_dist prepares":
            thread.join()


def test_a_process_that_is_told_to_records_what_it_loads(pack, elsewhere, monkeypatch, tmp_path):
    folder = tmp_path / "recorded"
    monkeypatch.setenv("TRITON_DIST_RECORD_KERNELS", str(folder))
    monkeypatch.setattr(recorder, "_active_recorders", [])
    shipped.install()
    shipped.install()  # at each first use of something
    launch()
    packed.native()
    parts = [Pack(path).contents() for path in folder.iterdir()]
    assert sorted(each.name for part in parts for each in part.kernels.values()) == [
        "hello", "scale",
    ]  # fmt: skip
    whole = merge_packs(parts)
    assert whole.kernels.items() <= Pack(pack).contents().kernels.items()  # compiled alike
    assert elsewhere == [False]


def test_what_runner_makes_of_an_artefact_is_not_recorded(elsewhere, tmp_path):
    """Triton would never look for it: a pack with it would say what is not so."""
    kernel = runner.jit(packed.scale)
    runner.export(kernel[(1,)](packed.X, 2.0, BLOCK=64), tmp_path)
    with packs.recording() as used:
        kernel[(1,)](packed.X, 2.0, ttgir_dir=tmp_path)
    assert Pack(used.save(tmp_path / "empty.tdpack")).kernels == {}
    assert elsewhere == [False, True]


def test_the_page_names_variables_that_triton_counts(monkeypatch):
    page = (ROOT / "docs" / "how-to" / "ship-kernels.md").read_text(encoding="utf-8")
    section = page.partition("### Variables in Triton's key")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([A-Z0-9_]+)(?:=1)?`", section))
    assert len(named) == 4
    for variable in named:
        monkeypatch.setenv(variable, "1")
    assert named <= get_cache_invalidating_env_vars().keys()


def test_nothing_is_changed_in_triton_where_there_is_no_pack(elsewhere):
    shipped.install()
    assert triton.knobs.cache.manager_class is None


def test_packs_in_the_users_folder_are_found_without_a_word(pack, elsewhere):
    folder = Path(os.environ["TRITON_DIST_CACHE_DIR"]) / "packs"
    folder.mkdir(parents=True)
    shutil.copy(pack, folder)
    packed.scaled(2.0)
    assert elsewhere == [True]
    assert packed.scaled.num_tunings == 1  # that of the fixture


def test_a_kernel_that_cannot_be_recorded_does_not_end_the_program(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder.triton_compat, "running_compilation", object)
    monkeypatch.setattr(recorder, "compilation_facts", lambda compilation: 1 / 0)
    with pytest.warns(CacheWarning, match="kernel scale is not recorded: ZeroDivisionError"):
        recorder.Recorder(tmp_path)(metadata={"name": "scale"}, metadata_group={})
