"""Plain GEMMs, their config space and what prunes it."""

from __future__ import annotations

from itertools import cycle
from types import SimpleNamespace

import pytest
import torch
import triton

from tests.distributed.gemm_calls import (
    LAYOUTS,
    AllGatherGEMM,
    GEMMAllReduce,
    GEMMReduceScatter,
    default_tiles,
    uniform,
)
from triton_dist.errors import InvalidArgument, NoValidConfig
from triton_dist.kernels.common.gemm.spaces import PERSISTENT_TILES, POINTER_TILES
from triton_dist.kernels.nvidia import gemm_non_persistent, gemm_persistent, matmul
from triton_dist.kernels.nvidia.gemm import (
    get_config_space,
    prune_fn_by_group_size_m,
    prune_fn_by_shared_memory,
)
from triton_dist.runtime.device import current_device
from triton_dist.testing import assert_allclose
from triton_dist.testing.opinfo.base import tolerance

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SIZES = ((37, 72, 72), (1, 24, 16), (65, 33, 33), (1, 1, 1), (8, 128, 64))


def check(C, A, B):
    limit = tolerance(A.dtype)
    expected = (A.double() @ B.double()).to(A.dtype)
    assert_allclose(C, expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [gemm_persistent, gemm_non_persistent])
def test_every_size_and_layout(op, dtype):
    for M, N, K in SIZES:
        for b_layout in LAYOUTS.values():
            A = (
                LAYOUTS["every second"](uniform(1, (M, K), dtype))
                if M == 8
                else uniform(1, (M, K), dtype)
            )
            B = b_layout(uniform(2, (K, N), dtype))
            check(op(A, B, autotune=False), A, B)


@pytest.mark.parametrize("kind", [AllGatherGEMM, GEMMReduceScatter, GEMMAllReduce])
def test_ops_in_a_world_of_one_are_plain_products(kind):
    calls, most = kind(37, 40, 72, **kind.context_options), max(len(LAYOUTS), len(kind.algorithms))
    for _, layout, algorithm in zip(range(most), cycle(LAYOUTS), cycle(kind.algorithms)):
        calls(37, layout, **algorithm)
    calls(5, persistent=False)
    calls(5, algorithm="collective", gemm_config=None)
    calls(11, op=kind.op)
    calls(11, op=kind.op, autotune=False)
    calls(1, **({"has_bias": True} if kind.bias else {"local_copy": False}))
    assert calls.finish() == most + 5


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [(AllGatherGEMM, "full_mesh_push"), (GEMMReduceScatter, "fused"), (GEMMAllReduce, "by_size")],
)
def test_the_first_config_is_the_default_of_all_arguments(kind, algorithm):
    first = kind.op.config_space[0]
    assert first["algorithm"] == algorithm
    assert first["persistent"] is current_device().prefers_descriptors
    assert str(first["gemm_config"]) == str(default_tiles())
    assert (first.get("num_streams", 1), first.get("num_chunks", 1)) == (1, 1)


@pytest.mark.parametrize("a_layout", list(LAYOUTS))
def test_any_strides_of_a(a_layout):
    A, B = (
        LAYOUTS[a_layout](uniform(1, (37, 40), torch.float16)),
        uniform(2, (40, 72), torch.float16),
    )
    check(matmul(A, B, autotune=False), A, B)


@pytest.mark.parametrize("persistent", [True, False])
def test_every_config(persistent):
    A, B = uniform(1, (70, 96), torch.float16), uniform(2, (96, 136), torch.float16)
    op = gemm_persistent if persistent else gemm_non_persistent
    for number, config in enumerate(get_config_space(persistent)):
        if number % 3:
            check(op.fn(A, B, gemm_config=config), A, B)
        else:  # the same launch
            check(matmul.fn(A, B, config, persistent=persistent), A, B)


@pytest.mark.parametrize("op", [matmul, gemm_persistent, gemm_non_persistent])
def test_tuned(op):
    A, B = uniform(1, (20, 40), torch.float16), uniform(2, (40, 24), torch.float16)
    op.clear()
    before = op.num_tunings
    for _ in range(2):
        check(op(A, B), A, B)
    assert op.num_tunings == before + 1


def test_ctx_is_not_looked_at():
    A, B = uniform(1, (20, 40), torch.float16), uniform(2, (40, 24), torch.float16)
    check(gemm_persistent(A, B, object(), autotune=False), A, B)
    check(gemm_non_persistent(A, B, object(), autotune=False), A, B)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (((4, 8), torch.float16), ((9, 4), torch.float16), r"B is \(9, 4\), expected \[K, N\]"),
        (((8,), torch.float16), ((8, 4), torch.float16), r"B is \(8, 4\), expected \[K, N\]"),
        (((4, 8), torch.float16), ((8, 4), torch.float32), "B.dtype is torch.float32"),
        (((4, 8), torch.float64), ((8, 4), torch.float64), "B.dtype is torch.float64"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"autotune": False}])
def test_operands_that_do_not_go_together_are_refused(a, b, message, options):
    A, B = (torch.ones(shape, dtype=dtype) for shape, dtype in (a, b))
    with pytest.raises(InvalidArgument, match=message):
        matmul(A, B, **options)


def test_what_is_no_tensor_and_no_tiles_is_refused():
    good = torch.ones(4, 4)
    for bad in (None, 5, [1.0]):
        for call in (matmul, matmul.fn):
            with pytest.raises(InvalidArgument, match=r"A is .* expected a tensor"):
                call(bad, good, **({} if call is matmul else {"gemm_config": tiles()}))
    for bad in (None, triton.Config({}), {"BLOCK_SIZE_K": 64}):
        with pytest.raises(InvalidArgument, match="gemm_config is"):
            matmul.fn(good, good, bad)


def test_operands_on_another_device_are_refused():
    A, B = torch.ones(4, 8), torch.ones(8, 4, device="meta")
    with pytest.raises(InvalidArgument, match=r"B\.device is"):
        matmul(A, B, autotune=False)
    with pytest.raises(InvalidArgument, match=r"B\.device is"):
        matmul(A.to("meta"), B, autotune=False)


@pytest.mark.parametrize("persistent", [True, False])
def test_spaces_hold_each_tile_once(persistent):
    for space in (get_config_space(persistent), PERSISTENT_TILES if persistent else POINTER_TILES):
        assert len({str(config.all_kwargs()) for config in space}) == len(space) > 1
        assert all(isinstance(config, triton.Config) for config in space)


def tiles(m=128, n=256, k=64, stages=3, group=8):
    return triton.Config(
        {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k, "GROUP_SIZE_M": group},
        num_stages=stages,
    )


@pytest.mark.parametrize("name", ["gemm_config", "config", "anything"])
def test_shared_memory_prunes_what_cannot_fit(name):
    A = torch.empty(1, 1, dtype=torch.float16)
    assert prune_fn_by_shared_memory({name: tiles(stages=4), "method": "push"}, A)  # 196,608
    assert not prune_fn_by_shared_memory({name: tiles(stages=5)}, A)  # 245,760 > 232,448
    assert not prune_fn_by_shared_memory({name: tiles(stages=4)}, A.float())


@pytest.mark.parametrize("config", [{}, {"method": "push"}, {"a": tiles(), "b": tiles()}])
def test_pruning_needs_one_triton_config(config):
    with pytest.raises(InvalidArgument, match=r"exactly one triton\.Config"):
        prune_fn_by_shared_memory(config, torch.empty(1, 1))


def matrices(M, N, K):
    return (torch.empty(shape, dtype=torch.float16, device="meta") for shape in ((M, K), (K, N)))


def test_no_grouping_is_pruned_where_the_gemm_is_compute_bound():
    ungrouped, grouped = {"c": tiles(group=1)}, {"c": tiles(group=8)}
    large, thin = tuple(matrices(8192, 8192, 8192)), tuple(matrices(16, 8192, 8192))
    assert not prune_fn_by_group_size_m(ungrouped, *large)
    assert prune_fn_by_group_size_m(ungrouped, *thin)
    assert prune_fn_by_group_size_m(grouped, *large)
    assert prune_fn_by_group_size_m(grouped, *thin)


def test_the_gathered_m_counts():
    """A shard of 256 rows is memory-bound alone, and compute-bound gathered from 8 ranks."""
    A, B = matrices(256, 8192, 8192)
    context, config = SimpleNamespace(num_ranks=8), {"c": tiles(group=1)}
    assert prune_fn_by_group_size_m(config, A, B)
    assert not prune_fn_by_group_size_m(config, A, B, context)
    assert not prune_fn_by_group_size_m(config, A, B, ctx=context)


def test_no_config_left_is_an_error(monkeypatch):
    A, B = uniform(1, (20, 48), torch.float16), uniform(2, (48, 24), torch.float16)
    monkeypatch.setattr(type(current_device()), "shared_memory_bytes", lambda self: 16)
    matmul.clear()
    with pytest.raises(NoValidConfig):
        matmul(A, B)
