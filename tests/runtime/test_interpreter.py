"""Each mend of Triton's interpreter: it works, and the versions that it is declared for still need
it. What makes the interpreter faster changes no bit of a result."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as upstream
from triton.runtime.errors import InterpreterError
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.commands import python
from tests.runtime import interpreter_probes as probes
from tests.tuning.fakes import in_threads
from triton_dist.errors import WaitTimeout
from triton_dist.runtime import interpreter
from triton_dist.runtime.interpreter import WORKAROUNDS, pause
from triton_dist.runtime.interpreter_operators import Operators, from_float32, to_float32
from triton_dist.runtime.interpreter_program import current_program


@pytest.fixture(autouse=True, scope="module")
def _mended():
    interpreter.install()


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.fixture(scope="module")
def in_triton_as_it_is():
    """Which probes hold there, and digests of results where it is not made faster."""
    run = python("-W", "ignore", probes.__file__, CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


WORKAROUND_IDS = [workaround.name for workaround in WORKAROUNDS]


def test_every_mend_has_a_probe_and_a_reason():
    assert sorted(WORKAROUND_IDS) == sorted(probes.PROBES)
    assert all(workaround.apply.__doc__ for workaround in WORKAROUNDS)


@pytest.mark.parametrize("workaround", WORKAROUNDS, ids=WORKAROUND_IDS)
def test_with_the_mend_it_is_right(workaround):
    assert probes.PROBES[workaround.name]()


@pytest.mark.parametrize("workaround", WORKAROUNDS, ids=WORKAROUND_IDS)
def test_without_the_mend_it_is_wrong_exactly_in_the_declared_versions(
    workaround, in_triton_as_it_is
):
    """Fails when a new Triton no longer needs the mend, and when one outside the range does."""
    if in_triton_as_it_is["right"][workaround.name]:
        assert not workaround.is_needed, (
            f"{workaround.name} is right in Triton {triton.__version__}: narrow its versions"
        )
    else:
        assert workaround.is_needed, (
            f"{workaround.name} is wrong in Triton {triton.__version__}: widen its versions"
        )


def test_install_is_idempotent():
    launch = upstream.GridExecutor.__call__
    interpreter.install()
    assert upstream.GridExecutor.__call__ is launch


@triton.jit
def elementwise(a_ptr, b_ptr, out_ptr, B: tl.constexpr, OP: tl.constexpr):
    offsets = tl.arange(0, B)
    a, b = tl.load(a_ptr + offsets), tl.load(b_ptr + offsets)
    if OP == "add":
        out = a + b
    elif OP == "div":
        out = a / b
    elif OP == "abs":
        out = tl.abs(a)
    elif OP == "fma":
        out = tl.fma(a, b, a)
    elif OP == "max":
        out = tl.maximum(a, b)
    elif OP == "between":
        out = (a < b) & (a > -b)
    elif OP == "where":
        out = tl.where(a < b, a, b)
    elif OP == "scale":
        out = a * 0.5 + 1
    elif OP == "constant":
        out = tl.full((B,), 1.7, tl.bfloat16)
    elif OP == "cumsum":
        out = tl.cumsum(a, 0)
    else:
        out = a.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offsets, out)


REFERENCES = {
    "add": lambda a, b: a + b,
    "div": lambda a, b: a / b,
    "abs": lambda a, b: a.abs(),
    "fma": lambda a, b: (a.double() * b.double() + a.double()).float().bfloat16(),
    "max": torch.maximum,
    "between": lambda a, b: (a < b) & (a > -b),
    "where": lambda a, b: torch.where(a < b, a, b),
    "scale": lambda a, b: a * 0.5 + 1,
    "constant": lambda a, b: torch.full_like(a, 1.7),
}


def pair(n=1024):
    torch.manual_seed(0)
    return torch.randn(n).bfloat16(), torch.randn(n).bfloat16()


@pytest.mark.parametrize("op", REFERENCES)
def test_bfloat16_operation_is_bitwise_that_of_torch(op):
    a, b = pair()
    expected = REFERENCES[op](a, b)
    out = torch.empty_like(expected)
    elementwise[(1,)](a, b, out, B=1024, OP=op)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.float32, torch.int32, torch.int64, torch.float64]
)
def test_bfloat16_casts_there_and_back(dtype):
    a = (pair()[0] * 100).bfloat16()
    there = torch.empty(1024, dtype=dtype)
    elementwise[(1,)](a, a, there, B=1024, OP="cast")
    assert torch.equal(there, a.to(dtype))
    back = torch.empty_like(a)
    elementwise[(1,)](there, there, back, B=1024, OP="cast")
    assert torch.equal(back, there.to(torch.bfloat16))


def test_float32_to_bfloat16_rounds_to_nearest_even():
    values = torch.randint(-(2**31), 2**31 - 1, (1 << 16,), dtype=torch.int32).view(torch.float32)
    values[:4] = torch.tensor([float("nan"), float("inf"), -0.0, 3.3895e38])
    ours = torch.from_numpy(from_float32(values.numpy())).view(torch.bfloat16)
    expected = values.bfloat16()
    assert torch.equal(ours.isnan(), expected.isnan())
    assert torch.equal(ours.nan_to_num(7), expected.nan_to_num(7))


def test_every_bfloat16_survives_the_way_through_float32():
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    values = torch.from_numpy(to_float32(bits.numpy()))
    assert torch.equal(
        values.view(torch.int32), bits.view(torch.bfloat16).float().view(torch.int32)
    )


@triton.jit
def copy_block(source, target, block, row, BM: tl.constexpr, BN: tl.constexpr):
    target.store([block, row, 0], source.load([block, row, 0]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int32, torch.uint8])
@pytest.mark.parametrize("row", [-3, 0, 4, 6, 9])
def test_a_descriptor_block_is_clipped_in_its_own_slab(dtype, row):
    """Rows outside a slab are neither read nor written, although memory of the next slab is
    there."""
    source = torch.arange(3 * 7 * 16).reshape(3, 7, 16).to(dtype)
    target = torch.full((3, 7, 16), 99).to(dtype)
    expected = target.clone()
    inside = slice(max(row, 0), min(row + 4, 7))
    expected[1, inside] = source[1, inside]
    copy_block[(1,)](
        *(TensorDescriptor.from_tensor(tensor, [1, 4, 16]) for tensor in (source, target)),
        1,
        row,
        BM=4,
        BN=16,
    )
    assert torch.equal(target, expected)


@triton.jit
def load_at(source, out_ptr, column):
    block = source.load([0, column])
    tl.store(out_ptr + tl.arange(0, 4)[:, None] * 16 + tl.arange(0, 16)[None, :], block)


@pytest.mark.parametrize(("padding", "filled"), [("zero", 0.0), ("nan", float("nan"))])
def test_what_lies_outside_is_padding(padding, filled):
    source, out = torch.ones(2, 24).half(), torch.empty(4, 16).half()
    load_at[(1,)](TensorDescriptor.from_tensor(source, [4, 16], padding=padding), out, 16)
    expected = torch.full((4, 16), filled).half()
    expected[:2, :8] = 1
    torch.testing.assert_close(out, expected, equal_nan=True, rtol=0, atol=0)


def test_a_block_start_that_hardware_does_not_take_is_an_error():
    source, out = torch.ones(4, 32).half(), torch.empty(4, 16).half()
    with pytest.raises(InterpreterError, match="multiple of 16 bytes"):
        load_at[(1,)](TensorDescriptor.from_tensor(source, [4, 16]), out, 1)


@triton.jit
def reduce_block(target, value_ptr, OP: tl.constexpr):
    index = tl.arange(0, 4)[:, None] * 16 + tl.arange(0, 16)[None, :]
    value = tl.load(value_ptr + index)
    if OP == "add":
        target.atomic_add([2, 0], value)
    elif OP == "max":
        target.atomic_max([2, 0], value)
    elif OP == "min":
        target.atomic_min([2, 0], value)
    else:
        target.atomic_xor([2, 0], value)


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        ("add", torch.float32), ("add", torch.float16), ("add", torch.bfloat16), ("add",
        torch.int32), ("max", torch.int32), ("min", torch.int32), ("max", torch.uint32), ("xor",
        torch.int32),
    ],
)  # fmt: skip
def test_descriptor_reduce(op, dtype):
    torch.manual_seed(2)
    low = 0 if dtype == torch.uint32 else -100
    value = torch.randint(low, 100, (4, 16))
    target = torch.randint(low, 100, (5, 16))
    expected = target.clone()
    reference = {
        "add": torch.add,
        "max": torch.maximum,
        "min": torch.minimum,
        "xor": torch.bitwise_xor,
    }[op]
    expected[2:] = reference(target[2:], value[:3])
    stored = target.to(dtype)
    reduce_block[(1,)](TensorDescriptor.from_tensor(stored, [4, 16]), value.to(dtype), OP=op)
    assert torch.equal(stored.to(torch.int64), expected)


@triton.jit
def hash_step(x_ptr):
    tl.store(x_ptr, tl.load(x_ptr) * 1664525 + 1013904223)


def test_integers_wrap_around_as_on_a_gpu():
    x = torch.tensor([2**31 - 1], dtype=torch.int32)
    hash_step[(1,)](x)
    assert x.item() == ((2**31 - 1) * 1664525 + 1013904223 + 2**31) % 2**32 - 2**31


def test_a_failed_assert_names_the_program_and_the_message():
    kinds = InterpreterError, AssertionError  # the latter under TRITON_DIST_DEBUG
    with pytest.raises(kinds, match=r"program \(0, 0, 0\).*x must be positive"):
        probes.assert_positive[(1,)](-torch.ones(1))


@triton.jit
def grid_barrier(count_ptr, ids_ptr, ROUNDS: tl.constexpr):
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    programs = tl.num_programs(0) * tl.num_programs(1)
    for i in tl.static_range(ROUNDS):
        tl.atomic_add(count_ptr, 1, sem="release", scope="sys")
        while tl.atomic_add(count_ptr, 0, sem="acquire", scope="sys") < programs * (i + 1):
            pause()
        tl.store(ids_ptr + i * programs + program, tl.program_id(0) * 100 + tl.program_id(1))


def test_programs_pass_a_barrier_and_keep_their_ids():
    count, ids = torch.zeros(1, dtype=torch.int32), torch.full((3, 6, 4), -1, dtype=torch.int32)
    grid_barrier[(6, 4)](count, ids, ROUNDS=3)
    expected = torch.arange(6)[:, None] * 100 + torch.arange(4)
    assert count.item() == 72
    assert torch.equal(ids, expected.expand(3, 6, 4).int())


def note_program(notes=[]):  # noqa: B006 (a kernel cannot take a Python list; the default is the list)
    notes.append((*current_program(), threading.get_ident()))
    return notes


@triton.jit
def note(x_ptr):
    note_program()


def test_programs_that_do_not_wait_run_in_order_on_the_calling_thread():
    note_program().clear()
    note[(2, 2, 2)](torch.zeros(1))
    me = threading.get_ident()
    expected = [(x, y, z, me) for x in range(2) for y in range(2) for z in range(2)]
    assert note_program()[:-1] == expected


@triton.jit
def last_fails(flag_ptr):
    if tl.program_id(0) == tl.num_programs(0) - 1:
        probes.give_up()
    while tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") == 0:
        pause()


def test_a_programs_exception_ends_the_launch_as_itself():
    with pytest.raises(WaitTimeout, match=r"ready\[1\]"):
        last_fails[(5,)](torch.zeros(1, dtype=torch.int32))
    probes.cooperative_grid()  # and the next launch is not affected


@triton.jit
def divide_by_zero(x_ptr):
    if tl.program_id(1) == 2:
        raise ZeroDivisionError("no")


def test_another_exception_names_its_program():
    with pytest.raises(
        InterpreterError, match=r"program \(0, 2, 0\): ZeroDivisionError\('no'\)"
    ) as error:
        divide_by_zero[(1, 3)](torch.zeros(1))
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_the_language_is_as_before_after_a_launch_and_after_a_failed_one():
    before = tl.arange, tl.range, tl.core.arange, tl.core.reduce
    probes.runtime_range()
    with pytest.raises(WaitTimeout):
        probes.calls_wait_too_long[(1,)](torch.zeros(1))
    assert (tl.arange, tl.range, tl.core.arange, tl.core.reduce) == before


@triton.jit
def add_one(x_ptr, B: tl.constexpr):
    offsets = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x_ptr + offsets, tl.load(x_ptr + offsets) + 1)


def test_launches_from_several_threads_do_not_mix():
    tensors = [torch.full((64,), float(i)) for i in range(4)]

    def work(tensor):
        for _ in range(5):
            add_one[(4,)](tensor, B=16)

    in_threads([lambda tensor=tensor: work(tensor) for tensor in tensors])
    for i, tensor in enumerate(tensors):
        assert (tensor == i + 5).all()


def test_launch_options_and_hooks_reach_their_places():
    x, seen = torch.zeros(16), []
    add_one.add_pre_run_hook(lambda *args, **kwargs: seen.append(kwargs))
    try:
        add_one[lambda meta: (16 // meta["B"],)](x, B=8, num_warps=4, num_stages=3)
    finally:
        add_one.pre_run_hooks.clear()
    assert (x == 1).all()
    assert seen == [{"B": 8}]


def test_values_of_one_shape_share_it_and_have_their_own_type():
    def value(dtype, *shape):
        handle = upstream.TensorHandle(
            np.zeros(shape or (1,), upstream._get_np_dtype(dtype)), dtype
        )
        return tl.tensor(handle, tl.block_type(dtype, list(shape)) if shape else dtype)

    one, other, scalar = value(tl.float16, 4, 8), value(tl.int64, 4, 8), value(tl.int64)
    assert one.shape is other.shape
    assert ([size.value for size in one.shape], one.numel.value) == ([4, 8], 32)
    assert (len(scalar.shape), scalar.numel.value) == (0, 1)
    assert (one.dtype, other.dtype) == (tl.float16, tl.int64)
    kinds = (tl.int1, tl.uint8, tl.bfloat16, tl.float8e5, tl.pointer_type(tl.float32))
    sizes = [upstream._get_np_dtype(kind).itemsize for kind in kinds]
    assert sizes == [1, 1, 2, 1, 8]


def test_results_are_those_of_the_interpreter_as_it_is(in_triton_as_it_is):
    slow = dict(in_triton_as_it_is["slow"])
    refusal = slow.pop("refusal")
    assert refusal != "none"
    assert probes.refusal() == refusal
    ours = probes.digests()
    assert ours == slow
    assert len(set(ours.values())) > len(ours) // 2, "inputs that show nothing"


def block(dtype, shape, data=1):
    kind = tl.block_type(dtype, list(shape)) if shape else dtype
    numpy_type = np.int64 if dtype == tl.int64 else np.int32 if dtype == tl.int32 else np.float32
    return tl.tensor(upstream.TensorHandle(np.full(shape or (1,), data, numpy_type), dtype), kind)


def test_only_what_types_leave_open_goes_the_slow_way():
    operators = Operators(upstream, TritonSemantic(upstream.interpreter_builder))
    add = operators.operator_for("__add__", lambda left, right: "slow")
    rsub = operators.operator_for("__rsub__", lambda left, right: "slow")
    integers, floats = block(tl.int32, (4, 1), 3), block(tl.float32, (4, 8))
    for right in (integers, block(tl.int64, (1, 8)), block(tl.int32, ()), 7, tl.constexpr(-1)):
        total = add(integers, right)
        other = right if isinstance(right, (int, tl.constexpr)) else right.handle.data.flat[0]
        assert (total.handle.data == 3 + getattr(other, "value", other)).all()
    assert str(add(integers, block(tl.int64, (1, 8))).type) == str(tl.block_type(tl.int64, [4, 8]))
    assert (rsub(integers, 10).handle.data == 7).all()
    for right in (floats, 2.5, True, 2**31, block(tl.int32, (2, 1)), block(tl.int32, (1, 4, 1))):
        assert add(integers, right) == "slow"
    for right in (1, 1e-300, float("inf")):
        assert add(floats, right) == "slow"
    shift = operators.operator_for("__lshift__", lambda left, right: "slow")
    assert (shift(integers, 2).handle.data == 12).all()
    assert shift(integers, 32) == shift(integers, -1) == "slow"


def test_types_of_blocks_are_shared_and_keep_pointers_apart():
    block = tl.block_type(tl.int32, [4, 8])
    wide = block.with_element_ty(tl.int64)
    assert wide is block.with_element_ty(tl.int64)
    assert (wide, wide.numel, str(wide)) == (
        tl.block_type(tl.int64, [4, 8]),
        32,
        str(tl.block_type(tl.int64, [4, 8])),
    )
    assert upstream.interpreter_builder.get_block_ty(tl.int64, [4, 8]) is wide
    pointers = [tl.pointer_type(tl.int32, *kind) for kind in ((1,), (3,), (1, True))]
    assert [block.with_element_ty(pointer).element_ty for pointer in pointers] == pointers
    assert block.with_element_ty(tl.float32).shape.values == [4, 8]
