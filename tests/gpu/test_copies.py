"""Copies on side streams, on GPUs whose every thread waits for what they bring."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import triton.language as tl

from tests.gpu.ranks import few_ranks
from triton_dist._jit import jit
from triton_dist.runtime import symmetric
from triton_dist.runtime.device import current_device
from triton_dist.runtime.device.transfer import Copy, InputRows

_ROWS, _COLUMNS = 1025, 1024
_WARPS, _THREADS_OF_MULTIPROCESSOR = 32, 2048
_MOST_POLLS = 1_000_000  # seconds
_LATE_CYCLES = 10_000_000


@jit
def kernel_poll(flag_ptr, polls_ptr, MAX_POLLS: tl.constexpr):
    """Poll until the flag is set, ``MAX_POLLS`` times at most; programs of 1024 threads."""
    polls = 0
    seen = tl.load(flag_ptr, volatile=True)
    while (seen == 0) & (polls < MAX_POLLS):
        seen = tl.load(flag_ptr, volatile=True)
        polls += 1
    tl.store(polls_ptr + tl.program_id(0), polls)


def overdue_polls(in_graph: bool) -> tuple[int, int]:
    """Programs that polled in vain for the flag behind a peer's copy of 4 MB, and values that the
    copy did not bring. Of as many programs as the GPU holds."""
    device, rank, size = current_device(), dist.get_rank(), dist.get_world_size()
    regions = {"rows": ((_ROWS * _COLUMNS,), torch.float32), "flag": ((2,), torch.int32)}
    programs = device.num_sms * _THREADS_OF_MULTIPROCESSOR // (32 * _WARPS)
    polls = torch.zeros(programs, dtype=torch.int32, device=device.torch_device)
    own = torch.full((_ROWS, _COLUMNS), float(rank), device=device.torch_device)
    with symmetric.allocate("copies", regions) as memory:
        peer, flag = (rank + 1) % size, memory["flag"]
        flag.local.zero_()
        one = torch.ones(1, dtype=torch.int32, device=device.torch_device)
        target = memory["rows"].peers[peer].view(_ROWS, _COLUMNS)
        steps = [Copy(0, target, InputRows(0, _ROWS)), Copy(0, flag.peers[peer][1:], one)]
        transfer = device.transfer(steps, [device.copy_stream()])
        dist.barrier()

        def call() -> None:
            device.sleep(_LATE_CYCLES)  # so that all is queued when copies and kernel may begin
            transfer.start(own, device.current_stream())
            kernel_poll[(programs,)](flag.local[1:], polls, _MOST_POLLS, num_warps=_WARPS)
            transfer.join(device.current_stream())

        if in_graph:
            replay = device.capture(call, seconds=60.0)  # which calls once
            dist.barrier()
            flag.local.zero_()
            memory["rows"].local.zero_()
            device.synchronize()
            dist.barrier()
            replay()
        else:
            call()
        device.synchronize()
        wrong = memory["rows"].local != (rank - 1) % size
        return int((polls == _MOST_POLLS).sum()), int(wrong.sum())


pytestmark = [pytest.mark.timeout(600), pytest.mark.gpu]


@few_ranks
@pytest.mark.parametrize("in_graph", [False, True])
def test_a_copy_needs_no_multiprocessor(on_gpus, in_graph):
    assert set(on_gpus(overdue_polls, in_graph)) == {(0, 0)}
