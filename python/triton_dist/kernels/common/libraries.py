"""GEMMs across ranks from torch: NCCL collectives and async tensor parallelism.

They compete with our algorithms during tuning. Benchmarks use them as baselines, tests as
references.
"""

from __future__ import annotations

import enum
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from triton_dist.errors import InvalidArgument
from triton_dist.runtime.device import current_device
from triton_dist.runtime.symmetric.cuda import group_name, has_operator

ALL_GATHER_MATMUL = "fused_all_gather_matmul"
MATMUL_REDUCE_SCATTER = "fused_matmul_reduce_scatter"
"""Operators of async tensor parallelism in ``torch.ops.symm_mem``. torch 2.9 and later also have
operators for fp8, with ``scaled_matmul`` instead of ``matmul`` in their names."""
RowScales: TypeAlias = tuple[torch.Tensor, torch.Tensor, bool]
"""Scales of fp8 A [M, 1] and B [1, N], contiguous, and ``use_fast_accum``."""


class LibraryAlgorithm(enum.Enum):
    """A library algorithm of a GEMM across ranks. It has no tunables."""

    COLLECTIVE = "collective"
    """The group's collective (NCCL; gloo on CPU ranks or shared GPUs) and ``torch.matmul``, without
    overlap."""
    ASYNC_TP = "async_tp"
    """PyTorch's async tensor parallelism; requires GPUs and a build of torch that has it."""

    __repr__ = enum.Enum.__str__


def supported_library_algorithms(operator: str) -> list[LibraryAlgorithm]:
    """Return the library algorithms that this device and torch support.

    ``operator`` is the name of the async tensor parallelism operator.
    """
    device = current_device()
    if device.has_async_tp and has_operator(operator):
        return [LibraryAlgorithm.COLLECTIVE, LibraryAlgorithm.ASYNC_TP]
    return [LibraryAlgorithm.COLLECTIVE]


def candidate_library_algorithms(operator: str) -> list[LibraryAlgorithm]:
    """Return the library algorithms to try during tuning on this device.

    Without NCCL, return an empty list. On CPU ranks interpreted kernels would never win; if ranks
    share a GPU, gloo copies through the host.
    """
    return supported_library_algorithms(operator) if current_device().has_nccl else []


def library_configs(method: LibraryAlgorithm, operator: str) -> list[tuple[()]]:
    """Return the candidates of ``method``: one without tunables, or none."""
    return [()] if method in candidate_library_algorithms(operator) else []


def check_async_tp(function: str, operator: str, num_ranks: int) -> None:
    """Raise ``InvalidArgument`` if async tensor parallelism is not available."""
    if num_ranks > 1 and LibraryAlgorithm.ASYNC_TP not in supported_library_algorithms(operator):
        expected = f"another algorithm: torch's {operator} requires GPUs and a build that has it"
        raise InvalidArgument(function, "algorithm", LibraryAlgorithm.ASYNC_TP.value, expected)


def has_async_tp(group: dist.ProcessGroup | None = None, operator: str = ALL_GATHER_MATMUL) -> bool:
    """Return whether ``operator`` can run over ``group``, which requires GPUs and several ranks."""
    return dist.get_world_size(
        group
    ) > 1 and LibraryAlgorithm.ASYNC_TP in supported_library_algorithms(operator)


def all_gather_into(
    rows: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup | None
) -> None:
    """Gather ``shard`` [m, …] of all ranks into ``rows`` [world size * m, …]."""
    _all_gather()(rows, shard, group=group)


def begin_all_gather(
    rows: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup | None
) -> Any:
    """Start ``all_gather_into`` asynchronously; ``wait()`` of the returned object completes it."""
    return _all_gather()(rows, shard, group=group, async_op=True)


def _all_gather() -> Any:
    # torch 2.13 renamed the collective and deprecates the old name.
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_gather_rows(
    shard: torch.Tensor, group: dist.ProcessGroup | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the shards [rows, …] of all ranks, concatenated to [world size * rows, …]."""
    if out is None:
        out = shard.new_empty((shard.shape[0] * dist.get_world_size(group), *shard.shape[1:]))
    all_gather_into(out, shard, group)
    return out


def reduce_scatter_into(
    out: torch.Tensor, addend: torch.Tensor, group: dist.ProcessGroup | None
) -> None:
    """Sum ``addend`` [world size * n, …] over ranks; store this rank's rows in ``out`` [n, …]."""
    # torch 2.13 renamed this collective, too.
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(out, addend, group=group)


def reduce_scatter(addend: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return this rank's rows [M / world size, …] of the sum of ``addend`` [M, …] over ranks."""
    out = addend.new_empty((addend.shape[0] // dist.get_world_size(group), *addend.shape[1:]))
    reduce_scatter_into(out, addend, group)
    return out


def all_reduce(addend: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Replace ``addend`` by its sum over all ranks and return it."""
    dist.all_reduce(addend, group=group)
    return addend


def all_gather_matmul(
    A: torch.Tensor, B: torch.Tensor, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return ``all_gather(A) @ B``: the collective, then the GEMM."""
    return torch.matmul(all_gather_rows(A, group), B)


def async_tp_matmul(
    A: torch.Tensor,
    B: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    gathered: torch.Tensor | None = None,
    scales: RowScales | None = None,
) -> torch.Tensor:
    """Return ``all_gather(A) @ B`` by torch's async tensor parallelism. GPUs only.

    The first call in a group, and the first call with a larger A, allocate memory. These calls
    cannot be captured in a CUDA graph.

    Args:
        A: [M_per_rank, K], contiguous.
        B: [K, N_per_rank].
        gathered: receives all_gather(A).
        scales: scales of this rank's A and B, which are then e4m3; the result is then bf16.
    """
    name, returns_gathered = group_name(group), gathered is not None
    if scales is None:
        rows, products = torch.ops.symm_mem.fused_all_gather_matmul(
            A, [B], 0, name, return_A=returns_gathered
        )
    else:
        A_scale, B_scale, use_fast_accum = scales
        rows, products = torch.ops.symm_mem.fused_all_gather_scaled_matmul(
            A, [B], A_scale, [B_scale], 0, name, [None], [None], [torch.bfloat16], [use_fast_accum]
        )
    if gathered is not None:
        gathered.copy_(rows)
    return products[0]  # type: ignore[no-any-return]


def async_tp_matmul_scatter(
    A: torch.Tensor,
    B: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    scales: RowScales | None = None,
) -> torch.Tensor:
    """Return this rank's rows of the sum of ``A @ B`` over ranks, by async tensor parallelism.

    ``scales``: see ``async_tp_matmul``.
    """
    name, operators = group_name(group), torch.ops.symm_mem
    rows: torch.Tensor
    if scales is None:
        rows = operators.fused_matmul_reduce_scatter(A, B, "sum", 0, name)
        return rows
    A_scale, B_scale, use_fast_accum = scales
    shape = [A.shape[0], B.shape[1]]
    rows = operators.fused_scaled_matmul_reduce_scatter(
        A, B, A_scale, B_scale, "sum", 0, 0, name, shape, None, None, torch.bfloat16, use_fast_accum
    )
    return rows
