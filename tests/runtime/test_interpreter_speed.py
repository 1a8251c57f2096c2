"""What makes the interpreter faster changes no bit of a result."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle, interpreter_builder

from tests.runtime import speed_probes
from triton_dist.runtime.interpreter_operators import Operators


def test_results_are_those_of_the_interpreter_as_it_is():
    run = subprocess.run(
        [sys.executable, "-W", "ignore", speed_probes.__file__],
        env={
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join(sys.path),
            "TRITON_INTERPRET": "1",
        },
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    upstream = json.loads(run.stdout)
    refusal = upstream.pop("refusal")
    assert refusal != "none"
    assert speed_probes.refusal() == refusal
    ours = speed_probes.digests()
    assert ours == upstream
    assert len(set(ours.values())) > len(ours) // 2, "inputs that show nothing"


def block(dtype, shape, data=1):
    kind = tl.block_type(dtype, list(shape)) if shape else dtype
    numpy_type = np.int64 if dtype == tl.int64 else np.int32 if dtype == tl.int32 else np.float32
    return tl.tensor(TensorHandle(np.full(shape or (1,), data, numpy_type), dtype), kind)


def test_only_what_types_leave_open_goes_the_slow_way():
    operators = Operators(interpreter, TritonSemantic(interpreter_builder))
    add = operators.of("__add__", lambda left, right: "slow")
    rsub = operators.of("__rsub__", lambda left, right: "slow")
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
    shift = operators.of("__lshift__", lambda left, right: "slow")
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
    assert interpreter_builder.get_block_ty(tl.int64, [4, 8]) is wide
    pointers = [tl.pointer_type(tl.int32, *kind) for kind in ((1,), (3,), (1, True))]
    assert [block.with_element_ty(pointer).element_ty for pointer in pointers] == pointers
    assert block.with_element_ty(tl.float32).shape.values == [4, 8]


def test_values_too_wide_for_their_type_are_still_refused():
    TensorHandle(np.zeros(1, np.uint64), tl.pointer_type(tl.int8))
    TensorHandle(np.zeros(1, np.bool_), tl.int1)
    with pytest.raises(ValueError, match="itemsize"):
        TensorHandle(np.zeros(1, np.int64), tl.int32)
