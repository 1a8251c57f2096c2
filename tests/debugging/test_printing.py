"""What interpreted kernels print, and whose it is."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl

from triton_dist import jit
from triton_dist import language as dl
from triton_dist.debugging.checks import checking
from triton_dist.errors import InvalidArgument
from triton_dist.runtime import symmetric


@jit
def kernel_says(x_ptr, flag_ptr, N: tl.constexpr):
    program = tl.program_id(0)
    if program == 1:
        x = tl.load(x_ptr + tl.arange(0, N))
        dl.dump("x", x)  # here: x
        dl.dump("sum", tl.sum(x.to(tl.float32), 0), N, x.to(tl.bfloat16))
        dl.dump("tile", tl.reshape(x, (2, N // 2)))
        dl.dump("flags", flag_ptr, flag_ptr + tl.arange(0, 8))


@jit
def kernel_prints(n):
    print("n is", n)
    tl.device_print("n is", n)
    tl.device_print("n is", n, hex=True)
    tl.device_print("block", tl.arange(0, 4))


@jit
def kernel_dumps_without_a_label(n):
    dl.dump(n)


def line(text, file=__file__):
    with open(file, encoding="utf-8") as lines:
        return next(number for number, each in enumerate(lines, 1) if text in each)


def test_values_are_dumped_with_who_has_them(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    x = torch.tensor([1.0, 2.0, float("nan"), 4.0], dtype=torch.float16)
    with symmetric.allocate("said", {"flags": ((8,), torch.int32)}) as memory:
        kernel_says[(2,)](x, memory["flags"].local, 4)
    at = f"rank 3, program (1, 0, 0) of kernel_says, {__file__}"
    first = line("# here: x")
    assert capsys.readouterr().out.splitlines() == [
        f"{at}:{first}: x fp16[4], 1 of 4 not finite, [ 1.  2. nan  4.]",
        f"{at}:{first + 1}: sum fp32 nan",
        f"{at}:{first + 1}: sum 4",
        f"{at}:{first + 1}: sum bf16[4], 1 of 4 not finite, [ 1.  2. nan  4.]",
        f"{at}:{first + 2}: tile fp16[2, 2], 1 of 4 not finite,",
        "[[ 1.  2.]",
        " [nan  4.]]",
        f"{at}:{first + 3}: flags pointer<int32> said.flags[0]",
        f"{at}:{first + 3}: flags pointer<int32>[8] said.flags[0], said.flags[1], said.flags[2], "
        "said.flags[3], ... said.flags[7]",
    ]


def test_a_print_says_who_prints_where_kernels_are_checked(capsys):
    kernel_prints[(1,)](255)
    plain = capsys.readouterr().out.splitlines()
    assert plain[0] == "n is [255]"
    with checking("bounds"):
        kernel_prints[(1,)](255)
        print("not in a kernel")
    first = line('print("n is", n)')
    at = f"rank 0, program (0, 0, 0) of kernel_prints, {__file__}"
    assert capsys.readouterr().out.splitlines() == [
        f"{at}:{first}: {plain[0]}",
        f"{at}:{first + 1}: n is int32 255",
        f"{at}:{first + 2}: n is [0xff]",
        f"{at}:{first + 3}: block int32[4] [0 1 2 3]",
        "not in a kernel",
    ]


def test_a_dump_needs_a_label():
    with pytest.raises(InvalidArgument, match=r"dump: label is .*, expected a string"):
        kernel_dumps_without_a_label[(1,)](1)
