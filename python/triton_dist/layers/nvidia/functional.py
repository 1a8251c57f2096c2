"""Products across ranks that have gradients, and that ``torch.compile`` keeps in one graph.

Each is a custom op of torch (``torch.ops.triton_dist``), with a shape for tracing and a backward
that is made of the others:

    product                                       gradient of A              gradient of B
    ag_gemm    C = all_gather(A) @ B              gemm_rs(dC, B.T)           all_gather(A).T @ dC
    gemm_rs    C = own rows of sum of A @ B       ag_gemm(dC, B.T)           A.T @ what it gathered
    gemm       C = A @ B, A the same on all       gemm_ar(dC, B.T)           A.T @ dC
    gemm_ar    C = sum of A @ B, on all           dC @ B.T                   A.T @ dC

The first two are sequence-parallel: rows are spread over ranks, and a loss is the sum of what ranks
compute of their own. The last two have the same rows on all ranks, and the same loss. A layer is
one of the pair's first, then one of its second.

Traced is what happens to shapes alone; contexts are made and calls are tuned when a graph runs, as
in eager mode: at the first call of a shape. Where nobody asks for a gradient, nor traces, the op is
called as it is: a custom op takes the host some 20 us more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from triton_dist.errors import InvalidArgument
from triton_dist.layers.nvidia.tensor_parallel import Collectives, check_operand, named


def ag_gemm(
    A: torch.Tensor, B: torch.Tensor, ranks: Collectives, *, keep_gathered: bool = False
) -> torch.Tensor:
    """``all_gather(A) @ B``, differentiable.

    Args:
        A: [m, K], this rank's rows. B: [K, n], this rank's columns, any strides. One dtype: fp16,
            bf16 or fp32; autocast's, where that is on.
        ranks: a ``TensorParallel``, or ``Collectives``.
        keep_gathered: keep all rows of A until the backward, M * K elements, instead of gathering
            them again for the gradient of B.

    Returns:
        [M, n].

    Raises:
        InvalidArgument, ContextFinalized: before anything is launched.
    """
    A, B = _accepted("ag_gemm", A, B, ranks)
    if is_plain(A, B):
        return ranks.ag_gemm(A, B)
    keeps = keep_gathered and B.requires_grad
    product: torch.Tensor = torch.ops.triton_dist.ag_gemm(A, B, ranks.name, keeps)[0]
    return product


def gemm_rs(A: torch.Tensor, B: torch.Tensor, ranks: Collectives) -> torch.Tensor:
    """This rank's rows of the sum over ranks of ``A @ B``, differentiable: [M, k] and [k, N] to
    [m, N]. Arguments and errors: as of ``ag_gemm``; M is a multiple of the ranks."""
    return dispatched("gemm_rs", _accepted("gemm_rs", A, B, ranks), ranks)


def gemm(A: torch.Tensor, B: torch.Tensor, ranks: Collectives) -> torch.Tensor:
    """``A @ B`` for an A [M, K] that all ranks have, and the columns B [K, n] of this one,
    differentiable: the gradient of A is summed over ranks. Returns [M, n]. Arguments and errors: as
    of ``ag_gemm``."""
    A, B = _accepted("gemm", A, B, ranks)
    if is_plain(A, B):
        return A @ B
    product: torch.Tensor = torch.ops.triton_dist.gemm(A, B, ranks.name)
    return product


def gemm_ar(A: torch.Tensor, B: torch.Tensor, ranks: Collectives) -> torch.Tensor:
    """The sum over ranks of ``A @ B``, on every rank, differentiable: [M, k] and [k, N] to [M, N].
    All ranks must have the same loss, so the same gradient comes back. Arguments and errors: as of
    ``ag_gemm``."""
    return dispatched("gemm_ar", _accepted("gemm_ar", A, B, ranks), ranks)


def all_gather(shard: torch.Tensor, ranks: Collectives) -> torch.Tensor:
    """[m, …] of each rank to [M, …], by the group's library, differentiable; also for integers."""
    return dispatched("all_gather", (shard,), ranks)


def _accepted(
    function: str, A: torch.Tensor, B: torch.Tensor, ranks: Collectives
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operands, in autocast's dtype where it is on."""
    A, B = in_autocast(A, B, ranks)
    for name, operand in (("A", A), ("B", B)):
        if operand.ndim != 2:
            raise InvalidArgument(function, f"{name}.shape", tuple(operand.shape), "a matrix")
    check_operand(function, "A", A, B, ranks)
    return A, B


def in_autocast(
    A: torch.Tensor, B: torch.Tensor, ranks: Collectives
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in autocast's dtype where it is on."""
    kind = ranks.device.type
    if not torch.is_autocast_enabled(kind):
        return A, B
    dtype = torch.get_autocast_dtype(kind)
    return A.to(dtype), B.to(dtype)


def is_plain(*operands: torch.Tensor) -> bool:
    """Tell whether nobody asks for a gradient or traces."""
    if torch.compiler.is_compiling():
        return False
    return not (torch.is_grad_enabled() and any(each.requires_grad for each in operands))


def dispatched(
    function: str, operands: tuple[torch.Tensor, ...], ranks: Collectives
) -> torch.Tensor:
    """Call the method of ``ranks``, or the custom op where a gradient or a graph needs it."""
    if is_plain(*operands):
        result: torch.Tensor = getattr(ranks, function)(*operands)
    else:
        result = getattr(torch.ops.triton_dist, function)(*operands, ranks.name)
    return result


# What torch sees. ``ranks`` is the name of a ``Collectives``.


@torch.library.custom_op("triton_dist::ag_gemm", mutates_args=())
def _ag_gemm(
    A: torch.Tensor, B: torch.Tensor, ranks: str, keep_gathered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    across = named(ranks)
    gathered = A.new_empty((A.shape[0] * across.num_ranks, A.shape[1]) if keep_gathered else 0)
    return across.ag_gemm(A, B, gathered if keep_gathered else None), gathered


@_ag_gemm.register_fake
def _(A: Any, B: Any, ranks: str, keep_gathered: bool) -> Any:
    M = A.shape[0] * named(ranks).num_ranks
    return A.new_empty(M, B.shape[1]), A.new_empty((M, A.shape[1]) if keep_gathered else 0)


def _setup_ag_gemm(ctx: Any, inputs: Any, output: Any) -> None:
    A, B, ctx.ranks, ctx.keeps = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1] if ctx.keeps else A, B)


@once_differentiable
def _backward_ag_gemm(ctx: Any, dC: torch.Tensor | None, _: Any) -> Any:
    rows, B = ctx.saved_tensors
    if dC is None:
        return None, None, None, None
    ops, dA, dB = torch.ops.triton_dist, None, None
    if ctx.needs_input_grad[0]:
        dA = ops.gemm_rs(dC, B.T, ctx.ranks)
    if ctx.needs_input_grad[1]:
        dB = (rows if ctx.keeps else ops.all_gather(rows, ctx.ranks)).T @ dC
    return dA, dB, None, None


_ag_gemm.register_autograd(_backward_ag_gemm, setup_context=_setup_ag_gemm)


@torch.library.custom_op("triton_dist::all_gather", mutates_args=())
def _all_gather(shard: torch.Tensor, ranks: str) -> torch.Tensor:
    rows = named(ranks).all_gather(shard)
    return rows.clone() if rows is shard else rows  # a custom op returns no argument


@_all_gather.register_fake
def _(shard: Any, ranks: str) -> Any:
    return shard.new_empty(shard.shape[0] * named(ranks).num_ranks, *shard.shape[1:])


@torch.library.custom_op("triton_dist::reduce_scatter", mutates_args=())
def _reduce_scatter(addend: torch.Tensor, ranks: str) -> torch.Tensor:
    rows = named(ranks).reduce_scatter(addend)
    return rows.clone() if rows is addend else rows


@_reduce_scatter.register_fake
def _(addend: Any, ranks: str) -> Any:
    return addend.new_empty(addend.shape[0] // named(ranks).num_ranks, *addend.shape[1:])


def _setup_all_gather(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.ranks = inputs


@once_differentiable
def _backward_all_gather(ctx: Any, grad: torch.Tensor) -> Any:
    return torch.ops.triton_dist.reduce_scatter(grad, ctx.ranks), None


_all_gather.register_autograd(_backward_all_gather, setup_context=_setup_all_gather)


@torch.library.custom_op("triton_dist::gemm_rs", mutates_args=())
def _gemm_rs(A: torch.Tensor, B: torch.Tensor, ranks: str) -> torch.Tensor:
    return named(ranks).gemm_rs(A, B)


@_gemm_rs.register_fake
def _(A: Any, B: Any, ranks: str) -> Any:
    return A.new_empty(A.shape[0] // named(ranks).num_ranks, B.shape[1])


@once_differentiable
def _backward_gemm_rs(ctx: Any, dC: torch.Tensor) -> Any:
    A, B = ctx.saved_tensors
    needs_A, needs_B, _ = ctx.needs_input_grad
    ops, dA = torch.ops.triton_dist, None
    if needs_A:  # with the rows that the other gradient takes: they travel once, beside a product
        dA, rows = ops.ag_gemm(dC, B.T, ctx.ranks, needs_B)
    elif needs_B:
        rows = ops.all_gather(dC, ctx.ranks)
    return dA, A.T @ rows if needs_B else None, None


@torch.library.custom_op("triton_dist::gemm", mutates_args=())
def _gemm(A: torch.Tensor, B: torch.Tensor, ranks: str) -> torch.Tensor:
    return A @ B


@once_differentiable
def _backward_gemm(ctx: Any, dC: torch.Tensor) -> Any:
    A, B = ctx.saved_tensors
    dA = torch.ops.triton_dist.gemm_ar(dC, B.T, ctx.ranks) if ctx.needs_input_grad[0] else None
    return dA, A.T @ dC if ctx.needs_input_grad[1] else None, None


@torch.library.custom_op("triton_dist::gemm_ar", mutates_args=())
def _gemm_ar(A: torch.Tensor, B: torch.Tensor, ranks: str) -> torch.Tensor:
    return named(ranks).gemm_ar(A, B)


@_gemm.register_fake
@_gemm_ar.register_fake
def _(A: Any, B: Any, ranks: str) -> Any:
    return A.new_empty(A.shape[0], B.shape[1])


@once_differentiable
def _backward_gemm_ar(ctx: Any, dC: torch.Tensor) -> Any:
    A, B = ctx.saved_tensors
    needs_A, needs_B, _ = ctx.needs_input_grad
    return dC @ B.T if needs_A else None, A.T @ dC if needs_B else None, None


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    A, B, ctx.ranks = inputs
    ctx.save_for_backward(A, B)


_gemm_rs.register_autograd(_backward_gemm_rs, setup_context=_setup)
_gemm.register_autograd(_backward_gemm, setup_context=_setup)
_gemm_ar.register_autograd(_backward_gemm_ar, setup_context=_setup)
