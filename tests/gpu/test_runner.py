"""Kernels from every level on a GPU: results, edits, cubins that a driver refuses, and tuning."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from tests.compile.runner_kernels import add_one, gluon_copy, product, scale
from triton_dist import runner, tune
from triton_dist.errors import ArtefactRefused, TuningWarning
from triton_dist.kernels.common.gemm.launch import sharded_gemm
from triton_dist.kernels.common.gemm.spaces import WARP_SPECIALIZED_TILES
from triton_dist.runner import files
from triton_dist.runtime.device import current_device
from triton_dist.testing import assert_allclose
from triton_dist.testing.compile_only import compile_only
from triton_dist.testing.opinfo.base import tolerance

pytestmark = [pytest.mark.timeout(300), pytest.mark.gpu]
N = 1000


def fresh(kernel):
    """Without what it has compiled so far."""
    return runner.jit(triton.jit(kernel.fn))


def vectors():
    """x and an output that nobody has written."""
    x = torch.randn(N + 8, device="cuda")
    return x, torch.full_like(x, float("nan"))


@pytest.fixture
def blocks(tmp_path) -> Path:
    """A folder of ``add_one`` with three values of BLOCK."""
    x, y = vectors()
    for block in (64, 256, 1024):
        runner.export(add_one[(16,)](x, y, N, BLOCK=block), tmp_path / "blocks" / f"{block:04}")
    return tmp_path / "blocks"


@pytest.mark.parametrize("level", runner.LEVELS)
def test_every_level_runs(level, tmp_path):
    M, columns, K, tile = 256, 64, 192, {"BM": 64, "BK": 32}
    a = torch.randn(M, K, device="cuda", dtype=torch.float16)
    b = torch.randn(K, columns, device="cuda", dtype=torch.float16)
    c = torch.full((M, columns), float("nan"), device="cuda", dtype=torch.float16)
    sizes = (M, columns, K, 1)
    kernel = fresh(product)
    runner.export(kernel[(4,)](a, b, c, *sizes, **tile, num_warps=8, num_stages=2), tmp_path)
    c.fill_(float("nan"))
    again = fresh(product)[lambda given: (M // given["BM"],)](
        a, b, c, *sizes, **{f"{level}_dir": tmp_path}
    )
    assert again.metadata.num_warps == 8
    assert_allclose(c, a @ b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("level", runner.LEVELS[1:])
def test_every_level_of_gluon_runs(level, tmp_path):
    x, y = vectors()
    runner.export(gluon_copy[(16,)](x, y, N, 64, num_warps=2), tmp_path)
    y.fill_(float("nan"))
    gluon_copy[(16,)](x, y, N, **{f"{level}_dir": tmp_path})
    assert torch.equal(y[:N], x[:N])
    assert y[N:].isnan().all()


@pytest.mark.parametrize("level", runner.LEVELS[1:])
def test_a_kernel_with_specialised_warps(level, tmp_path):
    """It is compiled for 4 warps and launched with 12."""
    if current_device().facts()["capability"] != "9.0":
        pytest.skip("specialised warps are for compute capability 9.0")
    A, B = (torch.randn(512, 512, device="cuda", dtype=torch.bfloat16) / 22 for _ in "AB")
    C = torch.empty_like(A)
    tile = WARP_SPECIALIZED_TILES[0]
    launch = sharded_gemm(A, B.T, C, tile, num_sms=132, persistent=True)
    runner.export(launch.run(), tmp_path)
    C.fill_(float("nan"))
    kernel = runner.jit(launch.kernel)
    again = kernel[launch.grid](*launch.args, **launch.options, **{f"{level}_dir": tmp_path})
    assert again.metadata.num_warps == 12
    limit = tolerance(C.dtype)
    assert_allclose(C, A @ B.T, rtol=limit, atol=limit)


def test_an_edit_of_the_ptx_is_what_runs(blocks):
    x, y = vectors()
    path = blocks / "0064" / "add_one.ptx"
    one, two = "0f3F800000", "0f40000000"
    assert one in path.read_text()
    path.write_text(path.read_text().replace(one, two))
    add_one[(16,)](x, y, N, ptx_dir=blocks / "0064")
    assert torch.equal(y[:N], x[:N] + 2)
    add_one[(16,)](x, y, N, cubin_dir=blocks / "0064")
    assert torch.equal(y[:N], x[:N] + 1)


def test_a_more_general_artefact_gets_its_own_arguments(tmp_path):
    """Constants of the call are passed at run time, and as wide as the artefact takes them."""
    x = torch.arange(64, dtype=torch.float16, device="cuda")
    out = torch.full((2, 64), float("nan"), dtype=torch.float16, device="cuda")
    rest = {"alpha": 0.5, "BLOCK": 64, "DTYPE": tl.float16}
    general = scale.warmup(
        x[1:], out[0], 2**40 + 1, 3, rest["alpha"], (out[1, 1:], 7), 64, tl.float16, grid=(1,)
    )
    runner.export(general, tmp_path)
    for n, stride, most in ((16, 1, 16), (1, 1, 1), (20, 3, 7)):
        out.fill_(float("nan"))
        scale[(1,)](x, out[0], n, stride, pair=(out[1], most), **rest, cubin_dir=tmp_path)
        expected = x[: n * stride : stride] * 0.5
        assert torch.equal(out[0, :n], expected)
        assert torch.equal(out[1, : min(most, n)], expected[:most])
        assert out[0, n:].isnan().all()


def test_refused_before_anything_runs(blocks):
    x, y = vectors()
    with pytest.raises(ArtefactRefused, match="it requires x_ptr at an address divisible by 16"):
        add_one[(16,)](x[1:], y, N, cubin_dir=blocks / "0064")
    torch.cuda.synchronize()
    assert y.isnan().all()


def spoil(blocks: Path) -> None:
    """Make of the first cubin half a one, and of the second one for another GPU."""
    first, second, _ = sorted(blocks.iterdir())
    path = first / "add_one.cubin"
    path.write_bytes(path.read_bytes()[:1500])
    kernel = fresh(add_one)
    with compile_only(80):
        x = torch.empty(N, device="cpu")
        other = kernel.warmup(x, x, N, BLOCK=256, grid=(1,))
    metadata = dataclasses.replace(runner.load(second, "add_one").metadata)
    files.write(second, metadata, {"cubin": other.asm["cubin"]})


def tuned(folder: Path, kernel):
    def run(x, y, artefact):
        kernel[lambda given: (triton.cdiv(N, given["BLOCK"]),)](x, y, N, artefact=artefact)

    space = runner.tuning.cubin_space(folder, kernel)
    return tune.autotune(space, lambda x, y: tune.to_hashable(x), scope="rank")(run)


def test_a_cubin_that_the_driver_refuses_is_a_failed_candidate(blocks):
    spoil(blocks)
    x, y = vectors()
    function = tuned(blocks, fresh(add_one))
    with pytest.warns(TuningWarning, match="2 of 3 configs failed"):
        function(x, y)
    assert torch.equal(y[:N], x[:N] + 1)
    record = function.tune(x, y)
    failed = [trial for trial in record.trials if not hasattr(trial.outcome, "median")]
    assert len(failed) == 2
    assert function.best_config(x, y)["artefact"].constants()["BLOCK"] == 1024


def test_triton_autotune_among_folders(blocks):
    configs = [triton.Config({"autotune_cubin_dir": str(p)}) for p in sorted(blocks.iterdir())]
    by_triton = triton.autotune(configs, key=["n"])(fresh(add_one))
    x, y = vectors()
    by_triton[lambda given: (triton.cdiv(N, given["BLOCK"]),)](x, y, N)
    assert torch.equal(y[:N], x[:N] + 1)


def test_a_kernel_of_another_process_compiler(tmp_path, monkeypatch):
    """By this Triton, as if it were another one."""
    monkeypatch.setenv("TRITON_DIST_TOOLCHAINS", f"here={Path(triton.__file__).parents[1]}")
    x, y = vectors()
    kernel = fresh(add_one)[(16,)](x, y, N, BLOCK=64, toolchain="here")
    assert set(kernel.asm) == {"cubin"}
    assert torch.equal(y[:N], x[:N] + 1)


def tuned_by_all(folder: str):
    """In a rank: what was chosen, how often it was tuned, and whether the result is right."""
    kernel = fresh(add_one)

    @tune.autotune(runner.tuning.cubin_space(folder, kernel), lambda x, y: x.numel())
    def run(x, y, artefact):
        kernel[lambda given: (triton.cdiv(N, given["BLOCK"]),)](x, y, N, artefact=artefact)

    x, y = vectors()
    run(x, y)
    right = torch.equal(y[:N], x[:N] + 1)
    return str(run.best_config(x, y)), run.num_tunings, right


@pytest.mark.parametrize("spoiled", [False, True])
def test_ranks_agree_on_a_cubin(spoiled, blocks, tmp_path, on_ranks):
    if spoiled:
        spoil(blocks)
    first, second = on_ranks(2)(tuned_by_all, str(blocks))
    assert first == second
    assert first[1:] == (1, True)
    moved = shutil.copytree(blocks, tmp_path / "moved")
    again = on_ranks(2)(tuned_by_all, str(moved))
    assert again == [(first[0], 0, True)] * 2
