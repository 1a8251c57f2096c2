"""Operands of a call whose config is known are checked once, by ``key_fn``."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import nullcontext

import pytest
import torch

from tests.distributed.calls import some_configs
from triton_dist.testing.opinfo import OPINFOS

CHECKS = {"checked_buffer", "operand_signature", "check_tensor"}


@pytest.mark.parametrize("name", OPINFOS)
def test_operands_are_checked_once_a_call(name):
    info = OPINFOS[name]
    shape = info.smaller(info.shapes[0], 1 << 10, 1)
    seen = Counter()

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_name in CHECKS and "kernels" in code.co_filename:
            seen[code.co_name] += 1

    # Alone, a collective copies, which is quick in every config.
    few = (
        some_configs(info.op)
        if info.overlaps
        or name.startswith(("ep_", "grouped_", "sp_"))
        or name.endswith(("_gemm", "gemm_pre_attn"))
        else nullcontext()
    )
    with info.context(shape, torch.float16) as ctx, few:
        args, kwargs = info.arguments(info.operands(shape, torch.float16, 1), ctx)
        for _ in range(3):  # the first tunes, the next may have yet to keep its result
            info.op(*args, **kwargs)
        sys.setprofile(note)
        try:
            info.op(*args, **kwargs)
        finally:
            sys.setprofile(None)
    assert seen
    # In "serial", the tuned ep_dispatch inside of the op checks its operands itself.
    assert max(seen.values()) <= (2 if name == "ep_dispatch_group_gemm" else 1)
