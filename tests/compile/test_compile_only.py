"""The compile-only driver: the JIT, the autotuner and their errors without a GPU."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.backends import backends
from triton.runtime.errors import OutOfResources

from triton_dist._jit import jit
from triton_dist.errors import DeviceUnavailable, InvalidArgument
from triton_dist.testing.compile_only import HARDWARE, compile_kernel, compile_only


@triton.jit
def matmul_pointers(
    a_ptr, b_ptr, c_ptr, M, N, K,
    BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
    cols = tl.program_id(1) * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    ks = tl.arange(0, BLOCK_SIZE_K)
    a_ptrs = a_ptr + rows[:, None] * K + ks[None, :]
    b_ptrs = b_ptr + ks[:, None] * N + cols[None, :]
    acc = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    for _ in range(tl.cdiv(K, BLOCK_SIZE_K)):
        acc = tl.dot(tl.load(a_ptrs), tl.load(b_ptrs), acc)
        a_ptrs += BLOCK_SIZE_K
        b_ptrs += BLOCK_SIZE_K * N
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], acc.to(c_ptr.dtype.element_ty))


@triton.jit
def wait_for_flag(flag_ptr, value):
    while tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") < value:
        pass


matmul_autotuned = triton.autotune(
    configs=[
        triton.Config({"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64}, num_stages=12),
        triton.Config({"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32}, num_stages=2),
    ],
    key=["M", "N", "K"],
)(matmul_pointers)
M, N, K = 1024, 512, 256


def operands(dtype=torch.float16, device="meta"):
    """A [M, K], B [N, K], C [M, N] that need no memory."""
    return tuple(
        torch.empty(shape, dtype=dtype, device=device) for shape in ((M, K), (N, K), (M, N))
    )


def blocks(m, n, k):
    return {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k}


@pytest.mark.parametrize("arch", sorted(HARDWARE))
def test_one_process_compiles_for_each_architecture_and_says_what_it_costs(arch):
    options = {"num_warps": 4, "num_stages": 3, **blocks(64, 64, 32)}
    with compile_only(arch):
        compiled = compile_kernel(matmul_pointers, *operands(), M, N, K, grid=(8, 4), **options)
    assert (compiled.name, compiled.arch) == ("matmul_pointers", arch)
    assert (compiled.num_warps, compiled.num_stages) == (4, 3)
    assert 32 <= compiled.registers <= 255
    assert compiled.stack_bytes == 0
    # Two of three stages are in flight at least, each an A and a B tile of 64 x 32 fp16.
    limit = HARDWARE[arch].shared_memory_bytes
    assert 2 * 2 * 64 * 32 * 2 <= compiled.shared_memory_bytes <= limit
    assert f".target sm_{arch}" in compiled.ptx


def test_too_many_accumulators_spill(sm90):
    options = {"num_warps": 1, "num_stages": 1, **blocks(64, 128, 16)}
    compiled = compile_kernel(matmul_pointers, *operands(), M, N, K, **options)
    assert compiled.registers == 255
    assert compiled.stack_bytes > 0


def test_the_shared_memory_limit_is_a_parameter():
    arguments = (matmul_pointers, *operands(), M, N, K)
    options = {"num_warps": 4, "num_stages": 3, **blocks(64, 64, 64)}
    with compile_only(90):
        needed = compile_kernel(*arguments, **options).shared_memory_bytes
    matmul_pointers.device_caches.clear()
    with compile_only(90, shared_memory_bytes=needed - 1), pytest.raises(OutOfResources) as error:
        compile_kernel(*arguments, **options)
    assert (error.value.required, error.value.limit) == (needed, needed - 1)
    matmul_pointers.device_caches.clear()


def test_a_launch_is_recorded_not_run(sm90):
    a, b, c = (tensor.fill_(7) for tensor in operands(device="cpu"))
    matmul_pointers[lambda meta: (triton.cdiv(M, meta["BLOCK_SIZE_M"]), 2)](
        a, b, c, M, N, K, **blocks(64, 64, 32)
    )
    assert (c == 7).all()
    (launch,) = sm90.launches
    assert (launch.name, launch.grid) == ("matmul_pointers", (16, 2, 1))
    assert launch.args[0] is a
    assert launch.args[3:] == (M, N, K, 64, 64, 32)


def test_the_autotuner_skips_what_does_not_fit(sm90):
    compiled = compile_kernel(matmul_autotuned, *operands(), M, N, K)
    assert matmul_autotuned.best_config.kwargs["BLOCK_SIZE_M"] == 64
    too_large, fits = matmul_autotuned.configs_timings.values()
    assert too_large[0] == float("inf")
    assert fits[0] < float("inf")
    assert compiled.num_stages == 2


def test_the_driver_before_is_active_again():
    before = triton.runtime.driver._active
    with compile_only(90) as driver:
        assert triton.runtime.driver.active is driver
    assert triton.runtime.driver._active is before
    with pytest.raises(DeviceUnavailable, match="compile_only"):
        compile_kernel(wait_for_flag, torch.empty(1, dtype=torch.int32), 1)
    unknown = r"arch is 75, expected one of \[80, 90, 100\]"
    with pytest.raises(InvalidArgument, match=unknown), compile_only(75):
        pass


@jit
def nothing(x_ptr):
    pass


def test_a_kernel_without_a_gpu_says_what_to_set(monkeypatch):
    for backend in backends.values():
        monkeypatch.setattr(backend.driver, "is_active", lambda: False)
    for known in ("_active", "_default"):
        monkeypatch.setattr(triton.runtime.driver, known, None)
    with pytest.raises(DeviceUnavailable, match="Set TRITON_INTERPRET=1 before"):
        nothing[(1,)](torch.empty(1))


def test_an_interpreted_kernel_is_refused(sm90, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    interpreted = triton.jit(wait_for_flag.fn)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(DeviceUnavailable, match="TRITON_INTERPRET"):
        compile_kernel(interpreted, torch.empty(1, dtype=torch.int32), 1)
