"""AllGather-GEMM: ``C = all_gather(A) @ B`` with the transfer hidden behind the product.

Abstraction
    A tensor-parallel layer holds A sharded by rows, [M / W, K] on each of W ranks, and B by
    columns, [K, N / W]. Every rank needs all rows of A. Serial code gathers, then multiplies. Here
    a *producer* gathers shards by copy engine and sets a flag for each chunk of rows, while one
    *consumer* kernel, a GEMM over all tiles, waits for a tile's flags before it reads the tile's
    rows. The consumer begins with the own shard, which needs no transfer, and goes on in the order
    in which shards arrive.

    Other ways than by copy engine: ``algorithms.py``.

Stream timeline of one call (W = 4, push)
    main stream   ─┬─ GEMM: own shard │ rank+1's │ rank+2's │ rank+3's ─┬─ finish
    copy stream    └─ shard → rank-1, flag │ → rank-2, flag │ → rank-3 ─┘
    ``finish`` is one block: it tells the peers that this rank has consumed their shards, and
    advances the epoch. There is no barrier, no flag reset and no copy of the own shard. In CUDA
    graphs, and where a call does not simply follow another, a block before the GEMM sees that the
    peers have consumed what the slot held last.

Physics
    limit = max(GEMM alone, all-gather alone) + the time until the first flag. Copy engines use no
    SM, so the GEMM keeps all of them; they share memory bandwidth, which at K >= 4096 the GEMM
    leaves free. From the second call on, launches and copies lie ready as calls of the driver.

Built this way because (more, and terms: docs/explanation/allgather_gemm.md)
    * tiles that straddle two shards would need two sources: every shard is tiled on its own, and
      stores are clipped at its end;
    * a flattened tile loop loses its pipelining once a wait stands in it: loops are nested;
    * flags that are reset need a barrier between calls: epochs count up instead;
    * whatever a waiting full grid depends on must need no SM: flags are written by copy engine too;
      or it must be on an SM first: in a fused method, programs of the lowest numbers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from triton_dist.kernels.common.gemm.launch import sharded_gemm
from triton_dist.kernels.common.libraries import LibraryAlgorithm
from triton_dist.kernels.common.op import op
from triton_dist.kernels.common.peers import GatheredShards
from triton_dist.kernels.common.slots.gathered import AllGatherMethod
from triton_dist.kernels.nvidia.allgather_gemm.algorithms import ALGORITHMS, Call, Sizes
from triton_dist.kernels.nvidia.allgather_gemm.context import (
    AllGatherGEMMTensorParallelContext,
    check_operands,
)
from triton_dist.runtime.device import current_device


def key_fn(
    A: torch.Tensor,
    B: torch.Tensor,
    ctx: AllGatherGEMMTensorParallelContext,
    *_: Any,
    local_copy: bool = True,
    method: AllGatherMethod | LibraryAlgorithm | None = None,
    gathered: torch.Tensor | None = None,
    **__: Any,
) -> Any:
    """Name what a tuning is for. The tuner adds the ranks that tune together, which may be
    more than those of the context. A way that the older keyword asks for is tuned by itself."""
    key = (check_operands(A, B, ctx, local_copy, gathered), local_copy)
    return key if method is None else (*key, ALGORITHMS.asked(method))


@op(
    algorithms=ALGORITHMS,
    call=Call,
    sizes=Sizes.of,
    key_fn=key_fn,
    key_sizes=("M",),
    agree_fn=lambda A, *_, **__: f"A of {A.shape[0]} rows",
    version="2",  # another one when results that are shipped (records/) should not be used any more
)
def ag_gemm(
    A: torch.Tensor,
    B: torch.Tensor,
    ctx: AllGatherGEMMTensorParallelContext,
    gemm_config: triton.Config | None = None,
    persistent: bool | None = True,
    method: AllGatherMethod | LibraryAlgorithm | None = None,
    num_streams: int = 1,
    num_chunks: int = 1,
    local_copy: bool = True,
    straggler_option: tuple[int, int] | None = None,
    num_comm_sms: int | None = None,
    algorithm: str | None = None,
    gathered: torch.Tensor | None = None,
    accepted_key: tuple[Any, ...] | None = None,
) -> torch.Tensor:
    """``all_gather(A) @ B`` over the ranks of ``ctx``; tuned over all ranks. Returns [M,
    N_per_rank].

    About calls, and arguments that are not here: the docstring of ``triton_dist.kernels.nvidia``.

    Args:
        A: [M_per_rank, K], contiguous; not to be overwritten on other streams before the call is
            done.
        B: [K, N_per_rank], any strides.
        way: ``"full_mesh_push"``, ``"ring_push_1d"``, ``"fused_push"``, ``"serial"`` (for an M of
            up to the context's ``exchanged_rows``), ``"collective"`` or ``"async_tp"``; default:
            the context's ``all_gather_method``.
        num_streams, num_chunks: how copy engines bring shards (tuned); chunks of ``"fused_push"``
            are along K, those of ``"serial"`` pieces of a program's share.
        local_copy: False: the own rows are in ``ctx.symm_workspace``, A only says how many.
        num_comm_sms: SMs that send in ``"fused_push"`` (tuned); default 16. Programs of the
            all-gather in ``"serial"`` (tuned); default: by size. No other way takes SMs.
        method: older name of the way, which is that of its value.
        gathered: [M, K], contiguous, to be given ``all_gather(A)`` too: a copy on this rank, in
            memory apart from the own rows. On all ranks or on none.
    """
    return Call(
        A, B, ctx, gemm_config, persistent, method, num_streams, num_chunks, local_copy,
        straggler_option, num_comm_sms, algorithm, gathered, accepted_key,
    ).run()  # fmt: skip


def ag_gemm_persistent(
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    rank: int,
    num_ranks: int,
    gathered: GatheredShards,
    gemm_config: triton.Config,
) -> torch.Tensor:
    """Launch the persistent consumer alone: ``C = concat(shards) @ B`` into C [M, N_per_rank].

    A: [M_per_rank, K], this rank's shard; ``gathered``: the others' rows and their flags.
    """
    launch = sharded_gemm(
        A, B, C, gemm_config, num_sms=current_device().num_sms, persistent=True,
        rank=rank, num_ranks=num_ranks, gathered=gathered,
    )  # fmt: skip
    launch.run()
    return C


def local_copy_and_barrier_all(A: torch.Tensor, ctx: AllGatherGEMMTensorParallelContext) -> None:
    """Copy A [M_per_rank, K] to the own rows of ``ctx.symm_workspace``, then line up all ranks."""
    ctx.own_rows(A.shape[0]).copy_(A.detach())
    ctx.barrier_all()
