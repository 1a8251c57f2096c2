"""Which kernel serves which tensors, and launches that are only prepared."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import triton

from triton_dist.kernels.common.gemm.launch import sharded_gemm
from triton_dist.kernels.common.gemm.sharded import (
    kernel_gemm_non_persistent,
    kernel_gemm_persistent,
)
from triton_dist.kernels.common.moe.topk_sum import topk_sum
from triton_dist.kernels.common.peers import GatheredShards
from triton_dist.runtime import launch as launch_module
from triton_dist.runtime.launch import (
    BoundedDict,
    Launch,
    Launcher,
    dot_precision,
    fits_descriptor,
)

TILES = triton.Config(
    {
        "BLOCK_SIZE_M": 32,
        "BLOCK_SIZE_N": 16,
        "BLOCK_SIZE_K": 32,
        "GROUP_SIZE_M": 2,
        "EPILOGUE_SUBTILE": True,
    },
    num_warps=8,
    num_stages=4,
)


def prepared(own, B, **options):
    C = torch.empty(own.shape[0], B.shape[1], dtype=own.dtype)
    return sharded_gemm(own, B, C, TILES, **({"num_sms": 3, "persistent": True} | options))


def test_a_launch_made_anew_is_repeated_if_only_addresses_differ(monkeypatch):
    keys = []
    monkeypatch.setattr(Launcher, "run", lambda _, key, make, tensors: keys.append((key, tensors)))
    launcher, number, dtypes = Launcher(), torch.float16, torch.float32
    for rows, columns, dtype in ((6, 8, number), (6, 8, number), (6, 16, number), (6, 8, dtypes)):
        x = torch.ones(rows, columns, dtype=dtype)
        ids, choices = torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2)
        out = torch.empty(3, columns, dtype=dtype)
        launcher.repeat(
            topk_sum(x, choices, ids, None, out, 2, rows_per_block=3, first_column=0, N=columns)
        )
        assert keys[-1][1]["products_ptr"] is x
        assert set(keys[-1][1]) == {"products_ptr", "weights_ptr", "ids_ptr", "out_ptr"}
    first, second, wider, other = (hash(key) for key, _ in keys)
    assert first == second
    assert len({first, wider, other}) == 3


def test_what_is_launched_while_somebody_watches_is_not_laid_out():
    did, watched = [], iter((True, False, False, True, False))
    launcher = Launcher()
    launcher._device = SimpleNamespace(
        must_launch_through_triton=lambda: next(watched),
        repeated_launch=lambda *_: lambda *_: did.append("repeated"),
        current_stream=lambda: 0,
    )
    kernel = SimpleNamespace(arg_names=())
    launch = SimpleNamespace(
        run=lambda: did.append("launched") or object(),
        grid=(1,),
        kernel=kernel,
        args=(),
        options={},
    )
    for _ in range(5):
        launcher.run("key", lambda: launch)
    assert did == ["launched", "launched", "repeated", "launched", "repeated"]


def half(rows, columns):
    return torch.ones(rows, columns, dtype=torch.float16)


@pytest.mark.parametrize(
    ("matrix", "fits"),
    [
        (lambda: half(5, 8), True),
        (lambda: half(5, 8).T, True),
        (lambda: half(5, 9), False),
        (lambda: half(5, 9).T, False),
        (lambda: half(5, 16)[:, :9], True),
        (lambda: half(5, 16)[:, 1:9], False),  # begins at 2 bytes
        (lambda: half(5, 16)[:, 8:], True),
        (lambda: half(5, 16)[:, ::2], False),
        (lambda: half(1, 1), False),
        (lambda: torch.ones(5, 4), True),
        (lambda: torch.ones(5, 6), False),
    ],
)
def test_descriptors_need_a_unit_stride_and_multiples_of_16_bytes(matrix, fits):
    assert fits_descriptor(matrix()) is fits
    assert fits_descriptor(half(8, 8), matrix()) is fits


def test_the_persistent_kernel_on_descriptors():
    launch = prepared(half(70, 32), half(32, 40))
    assert launch.kernel is kernel_gemm_persistent
    assert launch.grid == (3,)  # of 3 x 3 tiles
    assert launch.options["num_warps"] == 8
    assert launch.options["num_stages"] == 4
    assert launch.options["gemm_plan"].B_COLUMN_MAJOR is False
    assert launch.options["gemm_plan"].GATHERED is False
    assert launch.options["EPILOGUE_SUBTILE"] is True
    assert prepared(half(20, 32), half(32, 16)).grid == (1,)
    assert prepared(half(70, 32), half(40, 32).T).options["gemm_plan"].B_COLUMN_MAJOR is True


@pytest.mark.parametrize(
    ("own", "B"),
    [
        (lambda: half(70, 33), lambda: half(33, 40)),
        (lambda: half(70, 32), lambda: half(32, 41)),
        (lambda: half(70, 32), lambda: half(64, 80)[::2, ::2]),
        (lambda: half(32, 70).T, lambda: half(32, 40)),
        (lambda: half(70, 48)[:, :32], lambda: half(32, 40)),
        (lambda: half(71, 40)[1:, 1:33], lambda: half(32, 40)),
    ],
)
def test_the_kernel_on_pointers_serves_the_rest(own, B):
    launch = prepared(own(), B())
    assert launch.kernel is kernel_gemm_non_persistent
    assert launch.grid == (9,)
    assert "EPILOGUE_SUBTILE" not in launch.options
    assert launch.options["gemm_plan"].NUM_SMS == 0


def test_pointers_when_asked_for():
    assert (
        prepared(half(8, 32), half(32, 40), persistent=False).kernel is kernel_gemm_non_persistent
    )


def test_shards_of_others_decide_too():
    flags = torch.zeros(64, dtype=torch.int32)
    own, B, C = half(5, 32), half(32, 16), half(10, 16)
    options = {"num_sms": 3, "persistent": True, "rank": 1, "num_ranks": 2}
    aligned = GatheredShards(half(10, 32), flags, flags[:1], 2, 8)
    launch = sharded_gemm(own, B, C, TILES, gathered=aligned, **options)
    assert launch.kernel is kernel_gemm_persistent
    assert launch.options["gemm_plan"].GATHERED is True
    assert launch.options["gemm_plan"].FLAGS_PER_RANK == 8
    assert launch.grid == (2,)  # a tile of each shard
    misaligned = GatheredShards(half(11, 32).flatten()[1:321].view(10, 32), flags, flags[:1], 2, 8)
    launch = sharded_gemm(own, B, C, TILES, gathered=misaligned, **options)
    assert launch.kernel is kernel_gemm_non_persistent


def test_fp32_is_multiplied_as_torch_says():
    assert dot_precision(torch.float32) == "ieee"
    assert dot_precision(torch.float16) == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert dot_precision(torch.float32) == "tf32"
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


class Recorded:
    """A kernel that only records."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *args, **options: self.launches.append((grid, args, options))


def test_a_launch_runs_its_kernel(monkeypatch):
    set_allocators = []
    monkeypatch.setattr(launch_module, "has_allocator", lambda: bool(set_allocators))
    monkeypatch.setattr(triton, "set_allocator", set_allocators.append)
    kernel = Recorded()
    launch = Launch(kernel, (4, 2), (1, "a"), {"num_warps": 4})
    launch.run()
    launch.run()
    assert kernel.launches == [((4, 2), (1, "a"), {"num_warps": 4})] * 2
    assert len(set_allocators) == 1  # one of the user's would have stayed


def test_nothing_is_compiled_for_the_interpreter():
    Launch(Recorded(), (1,), (), {}).compile()


def test_a_cache_is_emptied_before_it_has_more_than_its_most():
    cache = BoundedDict()
    cache.max_entries = 3
    for number in range(3):
        cache[number] = number
    cache[2] = "again"
    assert cache == {0: 0, 1: 1, 2: "again"}
    cache[3] = 3
    assert cache == {3: 3}
