"""The grouped GEMM, interpreted, against a product route by route."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.distributed.gemm_calls import uniform
from tests.distributed.group_gemm_calls import LAYOUTS
from tests.error_inputs import error_inputs
from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.moe import rows as moe_rows
from triton_dist.kernels.common.moe import spaces
from triton_dist.kernels.common.moe.product import fits_weights_descriptor, weights_layout
from triton_dist.kernels.common.moe.spaces import GROUPED_TILES, fits_grouped, grouped_tiles
from triton_dist.kernels.nvidia import grouped_gemm
from triton_dist.kernels.nvidia.grouped_gemm import algorithms
from triton_dist.runtime.device import current_device
from triton_dist.runtime.device.cpu import CpuDevice
from triton_dist.testing import assert_allclose, poisoned_empty
from triton_dist.testing.opinfo.base import tolerance
from triton_dist.testing.opinfo.grouped_gemm import GROUPED_GEMM, GroupedShape
from triton_dist.testing.opinfo.moe import routed_product

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# (M, topk, E, K, N): several tiles an expert; one route; more experts than routes; sizes that are
# no multiple of 16 bytes, nor of tiles.
SIZES = ((37, 3, 4, 40, 72), (1, 1, 1, 16, 8), (2, 2, 60, 48, 24), (29, 2, 3, 33, 31))


def ids_of(M, topk, E, low=-1, high=None, dtype=torch.int32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, E + 1 if high is None else high, (M, topk), generator=generator).to(
        dtype
    )


def operands(M, topk, E, K, N, dtype, layout="row-major", per_route=False):
    """A such that results have a standard deviation of about 1."""
    A = uniform(1, (M * topk if per_route else M, K), torch.float32) * (3 / K**0.5)
    return A.to(dtype), LAYOUTS[layout](uniform(2, (E, K, N), dtype))


def check(C, A, B, ids, activation=None):
    """Compare with ``routed_product``, in the order of routes; it is zero for dropped tokens."""
    expected = routed_product(A.float(), B.float(), ids)
    if activation is not None:
        gate, up = expected.chunk(2, dim=1)
        expected = gate * torch.sigmoid(gate) * up
    limit = tolerance(A.dtype)
    assert_allclose(C, expected.to(A.dtype), rtol=limit, atol=limit)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        *((layout, torch.float16) for layout in LAYOUTS),
        *(("row-major", each) for each in DTYPES[1:]),
    ],
)
def test_every_size_layout_and_dtype(layout, dtype):
    for sizes in SIZES:
        A, B = operands(*sizes, dtype, layout)
        ids = ids_of(*sizes[:3])
        check(grouped_gemm(A, B, ids, autotune=False), A, B, ids)


@pytest.mark.parametrize("number", range(len(grouped_tiles())))
@pytest.mark.parametrize("layout", ["row-major", "column-major"])
def test_every_config(number, layout):
    sizes = 70, 2, 3, 72, 88
    A, B = operands(*sizes, torch.float16, layout)
    for high in (None, 1):  # spread, then all with one expert or nobody
        ids = ids_of(*sizes[:3], high=high)
        check(grouped_gemm.fn(A, B, ids, gemm_config=grouped_tiles()[number]), A, B, ids)


@settings(max_examples=15, deadline=None)
@given(
    M=st.integers(1, 40),
    topk=st.integers(1, 10),
    E=st.sampled_from([1, 2, 7, 64]),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_any_routing(M, topk, E, seed, dtype):
    A, B = operands(M, topk, E, 16, 24, torch.float32)
    ids = ids_of(M, topk, E, dtype=dtype, seed=seed)
    with poisoned_empty():
        check(grouped_gemm(A, B, ids, autotune=False), A, B, ids)


@pytest.mark.parametrize("algorithm", ["tiled", "library"])
@pytest.mark.parametrize("per_route", [False, True])
@pytest.mark.parametrize("activation", [None, "silu_mul"])
def test_orders_rows_and_activation(algorithm, per_route, activation):
    sizes = 21, 3, 4, 40, 48
    A, B = operands(*sizes, torch.bfloat16, per_route=per_route)
    ids = ids_of(*sizes[:3])
    tiles = {"gemm_config": grouped_tiles()[0]} if algorithm == "tiled" else {}
    options = {"activation": activation, "algorithm": algorithm, **tiles}
    in_order = grouped_gemm.fn(A, B, ids, **options)
    check(in_order, A, B, ids, activation)
    by_expert = grouped_gemm.fn(A, B, ids, order="sorted", **options)
    named = torch.where((ids < 0) | (ids >= sizes[2]), sizes[2], ids).flatten()
    assert torch.equal(by_expert, in_order[named.argsort(stable=True)])


@pytest.mark.parametrize("algorithm", ["tiled", "library"])
def test_nobody_has_any_rows(algorithm):
    A, B = operands(5, 2, 3, 16, 24, torch.float16)
    ids = torch.full((5, 2), -1)
    tiles = {"gemm_config": grouped_tiles()[0]} if algorithm == "tiled" else {}
    for order in algorithms.ORDERS:
        assert not grouped_gemm.fn(A, B, ids, algorithm=algorithm, order=order, **tiles).any()


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_nothing_is_read_of_other_experts(layout):
    """What lies behind an expert's last row of weights, and what nobody's rows hold, is NaN."""
    A, B = operands(9, 2, 4, 40, 24, torch.float16)
    B[1::2] = float("nan")
    B = LAYOUTS[layout](B)
    ids = ids_of(9, 2, 2, low=0, high=2) * 2
    ids[-1] = -1
    A[-1] = float("nan")
    check(grouped_gemm(A, B, ids, autotune=False), A, B, ids)


def test_rows_of_a_with_gaps_and_odd_places():
    A, B = operands(12, 2, 3, 40, 24, torch.float16)
    ids = ids_of(12, 2, 3)
    wide = torch.zeros(12, 51, dtype=torch.float16)
    wide[:, 3:43] = A
    check(grouped_gemm(wide[:, 3:43], B, ids, autotune=False), A, B, ids)
    check(grouped_gemm.fn(wide[:, 3:43], B, ids, algorithm="library"), A, B, ids)


def test_gate_and_up_whose_halves_are_not_aligned():
    A, B = operands(12, 2, 3, 40, 56, torch.float16)
    ids = ids_of(12, 2, 3)
    for layout in LAYOUTS.values():
        C = grouped_gemm(A, layout(B), ids, activation="silu_mul", autotune=False)
        check(C, A, B, ids, "silu_mul")


def test_tuned_for_a_range_of_tokens():
    A, B = operands(20, 2, 3, 40, 24, torch.float16)
    ids = ids_of(20, 2, 3)
    grouped_gemm.clear()
    before = grouped_gemm.num_tunings
    for rows in (20, 20, 19):
        C = grouped_gemm(A[:rows], B, ids[:rows])
        check(C, A[:rows], B, ids[:rows])
    assert grouped_gemm.num_tunings == before + 1
    record = grouped_gemm.tune(A, B, ids)
    assert len(record.trials) == len(grouped_tiles())  # and no library, interpreted


def test_the_case_describes_the_op():
    shape = GroupedShape(24, 48, 40, 5, 2)
    data = GROUPED_GEMM.operands(shape, torch.bfloat16, 1, torch.Generator().manual_seed(1))
    args, options = GROUPED_GEMM.arguments(data, None)
    C = grouped_gemm(*args, **options, autotune=False)
    limit = GROUPED_GEMM.tolerance(torch.bfloat16, 1)
    assert_allclose(C, GROUPED_GEMM.reference(data), rtol=limit, atol=limit)
    assert 0.5 < C.float().std() < 2
    for peer in GROUPED_GEMM.baselines(data, None).values():
        if peer.expected is not None:
            assert_allclose(peer.call(), peer.expected(), rtol=limit, atol=limit)
    before = data["topk_ids"].clone()
    GROUPED_GEMM.refill(data, 1)
    assert not torch.equal(before, data["topk_ids"])


BAD = error_inputs(
    GROUPED_GEMM, GROUPED_GEMM.operands(GroupedShape(6, 24, 16, 3, 2), torch.float16, 1), 1
)  # names and arguments


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("tuned", [True, False])
def test_bad_calls_are_refused_before_any_launch(name, tuned, monkeypatch):
    def launched(*_):
        raise AssertionError("launched")

    monkeypatch.setattr("triton_dist.runtime.launch.Launch.run", launched)
    good = GROUPED_GEMM.operands(GroupedShape(6, 24, 16, 3, 2), torch.float16, 1)
    arguments = good | BAD[name]
    call, options = grouped_gemm.fn, {"gemm_config": grouped_tiles()[0]}
    if tuned and not {"algorithm", "gemm_config"} & set(BAD[name]):
        # Tensors without memory are for tracers, who never tune.
        call, options = grouped_gemm, {"autotune": not name.endswith(".device")}
    with pytest.raises(InvalidArgument) as refusal:
        call(**options | arguments)
    assert refusal.value.argument == name.split(" (")[0]
    assert refusal.value.function == "grouped_gemm"


def test_the_library_is_tried_where_it_has_a_kernel(monkeypatch):
    library = algorithms.ALGORITHMS["library"]
    assert not library.candidates()  # interpreted

    def on(capability):
        device = CpuDevice()
        device.interprets = False
        device.facts = lambda: {"capability": capability}
        monkeypatch.setattr(moe_rows, "current_device", lambda: device)
        return list(library.candidates())

    assert on("9.0") == [()]
    assert on("8.0") == on("10.0") == []
    key = algorithms.GroupedKey(
        64, 48, 40, 8, 2, torch.bfloat16, "row-major", "token", "route", None
    )
    assert library.fits({}, key)
    assert not library.fits({}, key._replace(dtype=torch.float16))
    assert not library.fits({}, key._replace(N=50))
    assert not library.fits({}, key._replace(K=50))
    assert not library.fits({}, key._replace(layout="strided"))
    assert library.is_fallback
    assert not algorithms.ALGORITHMS["tiled"].is_fallback


def heights(tokens, E, topk, columns=1536, dtype=torch.bfloat16):
    kept = (
        tiles.kwargs["BLOCK_SIZE_M"]
        for tiles in GROUPED_TILES
        if fits_grouped({"gemm_config": tiles}, dtype, E, columns, tokens, topk)
    )
    return {height for height, _ in itertools.groupby(sorted(kept))}


def test_tiles_are_as_high_as_experts_have_rows(monkeypatch):
    device = SimpleNamespace(
        interprets=False, shared_memory_bytes=current_device().shared_memory_bytes
    )
    monkeypatch.setattr(spaces, "current_device", lambda: device)
    assert heights(1, 8, 2) == {16, 32}
    assert heights(1024, 128, 8) == {16, 32, 64, 128}
    assert heights(8192, 128, 8) == {32, 64, 128}
    assert heights(16384, 8, 2) == {128}
    widths = {
        tiles.kwargs["BLOCK_SIZE_N"]
        for tiles in GROUPED_TILES
        if fits_grouped({"gemm_config": tiles}, torch.bfloat16, 8, 100, 64, 2)
    }
    assert widths == {32, 64, 128}


@pytest.mark.parametrize(
    ("B", "layout"),
    [
        (torch.ones(3, 8, 16, dtype=torch.float16), "row-major"),
        (torch.ones(3, 16, 8, dtype=torch.float16).transpose(1, 2), "column-major"),
        (torch.ones(3, 8, 12, dtype=torch.float16), "strided"),
        (torch.ones(3, 8, 20, dtype=torch.float16)[:, :, 4:], "strided"),
        (torch.ones(3, 8, 24, dtype=torch.float16)[:, :, 8:], "row-major"),
        (torch.ones(3 * 132, dtype=torch.float16).as_strided((3, 8, 16), (132, 16, 1)), "strided"),
        (torch.ones(1, 8, 16, dtype=torch.float16).as_strided((1, 8, 16), (3, 16, 1)), "row-major"),
        (torch.ones(1, 8, 16, dtype=torch.float16).expand(3, 8, 16), "strided"),
    ],
)
def test_layouts_of_weights(B, layout):
    assert weights_layout(B) == layout
    assert fits_weights_descriptor(B) is (layout != "strided")
