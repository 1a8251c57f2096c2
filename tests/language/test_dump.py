"""Values that kernels write out, interpreted; tests/compile has the same kernel compiled."""

from __future__ import annotations

import torch

from tests.compile.runner_kernels import watched


def test_values_of_the_program_that_is_asked_for():
    x, block = torch.arange(64.0), 16
    dumped = torch.full((block + 1 + 64,), -1.0)
    watched[(4,)](x, 64, BLOCK=block, dump_tensor=dumped)
    assert dumped[:block].tolist() == x[48:].tolist()  # program 3
    assert dumped[block] == x[48:].sum()  # the last program
    assert dumped[block + 1 :].tolist() == x.tolist()  # all, one after another
    watched[(4,)](x, 64, BLOCK=block, WHERE=(1, 0), dump_tensor=dumped)
    assert dumped[:block].tolist() == x[16:32].tolist()
    watched[(4,)](x, 64, BLOCK=block)  # as if it were not there
    whole = torch.zeros(block + 1 + 64, dtype=torch.int32)
    watched[(4,)](x, 64, BLOCK=block, dump_tensor=whole)
    assert whole[block] == x[48:].sum()
