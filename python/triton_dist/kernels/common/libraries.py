"""Ops by what torch brings: candidates beside our own algorithms, never a fall-back that is taken
unmeasured; peers of benchmarks; and the unfused references that results are held to."""

from __future__ import annotations

import enum
from typing import Any

import torch
import torch.distributed as dist

from triton_dist.errors import InvalidArgument
from triton_dist.runtime.device import current_device
from triton_dist.runtime.symmetric.cuda import group_name, has_operator

ALL_GATHER_MATMUL = "fused_all_gather_matmul"
MATMUL_REDUCE_SCATTER = "fused_matmul_reduce_scatter"
"""Operators of torch's async tensor parallelism, in ``torch.ops.symm_mem``."""


class LibraryAlgorithm(enum.Enum):
    """A GEMM across ranks by libraries of others; has no tiles, streams or chunks."""

    COLLECTIVE = "collective"
    """The group's collective (NCCL; gloo on CPU ranks and on shared GPUs) and ``torch.matmul``, one
    after the other: no overlap."""
    ASYNC_TP = "async_tp"
    """The op's operator of async tensor parallelism; on GPUs, in builds of torch that have it."""

    __repr__ = enum.Enum.__str__


def methods_here(operator: str) -> list[LibraryAlgorithm]:
    """Methods that work on this process's device with this torch; ``operator``: the op's own."""
    device = current_device()
    if device.has_async_tp and has_operator(operator):
        return [LibraryAlgorithm.COLLECTIVE, LibraryAlgorithm.ASYNC_TP]
    return [LibraryAlgorithm.COLLECTIVE]


def candidates_here(operator: str) -> list[LibraryAlgorithm]:
    """Candidates of a tuning: on GPUs all that works there. None on CPU ranks, which are there to
    run our kernels, and where an interpreted kernel would never win; nor where ranks share a GPU,
    and the collective would go through the host."""
    return methods_here(operator) if current_device().has_nccl else []


def check_async_tp(function: str, operator: str, num_ranks: int) -> None:
    """Refuse a call over several ranks that only ``operator`` could make, where it is not.

    Raises:
        InvalidArgument: of the argument ``algorithm``.
    """
    if num_ranks > 1 and LibraryAlgorithm.ASYNC_TP not in methods_here(operator):
        expected = f"another one here: torch's {operator} is on GPUs alone, in builds that have it"
        raise InvalidArgument(function, "algorithm", LibraryAlgorithm.ASYNC_TP.value, expected)


def has_async_tp(group: dist.ProcessGroup | None = None, operator: str = ALL_GATHER_MATMUL) -> bool:
    """Tell if ``operator`` can run over ``group``: not on CPU ranks, and not alone."""
    return dist.get_world_size(group) > 1 and LibraryAlgorithm.ASYNC_TP in methods_here(operator)


def all_gather_into(
    rows: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup | None
) -> None:
    """Gather ``shard`` [m, …] of all ranks into ``rows`` [world size * m, …]."""
    _all_gather()(rows, shard, group=group)


def begin_all_gather(
    rows: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup | None
) -> Any:
    """The same beside what is queued until ``wait()`` of what this returns."""
    return _all_gather()(rows, shard, group=group, async_op=True)


def _all_gather() -> Any:
    # torch 2.13 gave the collective a new name and deprecates the old one.
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_gather_rows(
    shard: torch.Tensor, group: dist.ProcessGroup | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Shards [rows, …] of all ranks on top of one another, [world size * rows, …]."""
    if out is None:
        out = shard.new_empty((shard.shape[0] * dist.get_world_size(group), *shard.shape[1:]))
    all_gather_into(out, shard, group)
    return out


def reduce_scatter_into(
    out: torch.Tensor, addend: torch.Tensor, group: dist.ProcessGroup | None
) -> None:
    """Sum ``addend`` [world size * n, …] over all ranks; this rank's rows go to ``out`` [n, …]."""
    # Renamed along with the all-gather.
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(out, addend, group=group)


def reduce_scatter(addend: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """This rank's rows of the sum over all ranks of ``addend`` [M, …]: [M / world size, …]."""
    out = addend.new_empty((addend.shape[0] // dist.get_world_size(group), *addend.shape[1:]))
    reduce_scatter_into(out, addend, group)
    return out


def all_reduce(addend: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """``addend``, which becomes its sum over all ranks."""
    dist.all_reduce(addend, group=group)
    return addend


def all_gather_matmul(
    A: torch.Tensor, B: torch.Tensor, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """``all_gather(A) @ B``: collective, then product."""
    return torch.matmul(all_gather_rows(A, group), B)


def async_tp_matmul(
    A: torch.Tensor,
    B: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    gathered: torch.Tensor | None = None,
) -> torch.Tensor:
    """``all_gather(A) @ B`` by torch's async tensor parallelism; GPUs only.

    A: [M_per_rank, K], contiguous, B: [K, N_per_rank]; ``gathered``: for all_gather(A). Its
    first call in a group, and one with a larger A, are collective and allocate: no capture.
    """
    name, keeps = group_name(group), gathered is not None
    rows, products = torch.ops.symm_mem.fused_all_gather_matmul(A, [B], 0, name, return_A=keeps)
    if gathered is not None:
        gathered.copy_(rows)
    return products[0]  # type: ignore[no-any-return]


def async_tp_matmul_scatter(
    A: torch.Tensor, B: torch.Tensor, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """This rank's rows of the sum over ranks of ``A @ B``, in the same way."""
    name = group_name(group)
    rows: torch.Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(A, B, "sum", 0, name)
    return rows
