"""A kernel that writes to a neighbour's memory: bash scripts/launch.sh examples/wait_for_a_peer.py

Each rank's kernel writes to the right neighbour's memory and sets a flag there. Then it waits for
the flag that the left neighbour sets. The exchange needs neither a barrier nor the host.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton.language as tl

import triton_dist
from triton_dist import language as dl
from triton_dist.runtime import symmetric
from triton_dist.utils import dist_print, finalize_distributed, initialize_distributed, is_cuda

LENGTH = 256


@triton_dist.jit(do_not_specialize=["rank", "num_ranks"])
def kernel_pass_right(
    source_ptr, inbox_ptr, inbox_table, flag_ptr, flag_table, out_ptr, rank, num_ranks,
    LENGTH: tl.constexpr,
):  # fmt: skip
    """Copy the left neighbour's source to out. All tensors are fp32 [LENGTH]; the grid is (1,)."""
    offset = tl.arange(0, LENGTH)
    right = (rank + 1) % num_ranks
    tl.store(dl.symm_at(inbox_ptr, inbox_table, right) + offset, tl.load(source_ptr + offset))
    dl.notify(dl.symm_at(flag_ptr, flag_table, right), 1)
    token = dl.wait(flag_ptr, 1, 1)
    tl.store(out_ptr + offset, tl.load(inbox_ptr + dl.consume_token(offset, token)))


def main() -> None:
    initialize_distributed()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda() else "cpu"
    regions = {"inbox": ((LENGTH,), torch.float32), "flag": ((1,), torch.int32)}
    with symmetric.allocate("wait_for_a_peer", regions) as memory:
        inbox, flag = memory["inbox"], memory["flag"]
        source = torch.full((LENGTH,), float(rank), device=device)
        out = torch.empty_like(source)
        kernel_pass_right[(1,)](
            source, inbox.local, inbox.pointers, flag.local, flag.pointers, out, rank, num_ranks,
            LENGTH=LENGTH,
        )  # fmt: skip
        left = (rank - 1) % num_ranks
        assert torch.equal(out, torch.full_like(out, left)), out
        dist_print(
            f"rank {rank} received the data of rank {left}", allowed_ranks="all", need_sync=True
        )
        memory.barrier()  # a neighbour may still write to this memory
    finalize_distributed()


if __name__ == "__main__":
    main()
