"""Differentiable products across ranks, which ``torch.compile`` keeps in one graph.

Each product is a custom op (``torch.ops.triton_dist``) with a fake implementation for tracing and a
backward that uses the other products:

    product                                       gradient of A              gradient of B
    ag_gemm    C = all_gather(A) @ B              gemm_rs(dC, B.T)           all_gather(A).T @ dC
    gemm_rs    C = local rows of sum of A @ B     ag_gemm(dC, B.T)           A.T @ gathered dC
    gemm       C = A @ B, A equal on all ranks    gemm_ar(dC, B.T)           A.T @ dC
    gemm_ar    C = sum of A @ B, on all ranks     dC @ B.T                   A.T @ dC

The first pair is sequence-parallel: rows are spread over ranks, and the loss is the sum of the
ranks' losses. In the second pair, all ranks have the same rows and the same loss. A layer calls the
first product of a pair, then the second one.

Tracing only computes shapes. Contexts are created and calls are tuned when the graph first runs
with a shape, as in eager mode. Without gradient or tracing, the op is called directly, because a
custom op costs about 20 us of host time.

Shapes: lower-case m, n and k are the parts of M, N and K on this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from triton_dist.errors import InvalidArgument
from triton_dist.layers.nvidia.tensor_parallel import Collectives, check_operand, ranks_by_name


def ag_gemm(
    A: torch.Tensor, B: torch.Tensor, ranks: Collectives, *, keep_gathered: bool = False
) -> torch.Tensor:
    """Return ``all_gather(A) @ B``. Differentiable.

    Args:
        A: [m, K], rows of this rank; fp16, bf16 or fp32. Autocast's dtype applies.
        B: [K, n], columns of this rank, any strides, dtype of A.
        ranks: ``TensorParallel`` or ``Collectives``.
        keep_gathered: keep all rows of A (M * K elements) for the backward instead of gathering
            them again for the gradient of B.

    Returns:
        [M, n].

    Raises:
        InvalidArgument: shapes, dtypes or devices do not match.
        ContextFinalized: ``ranks`` was finalized.
    """
    A, B = _checked_operands("ag_gemm", A, B, ranks)
    if is_eager_inference(A, B):
        return ranks.ag_gemm(A, B)
    keeps = keep_gathered and B.requires_grad
    product: torch.Tensor = torch.ops.triton_dist.ag_gemm(A, B, ranks.name, keeps)[0]
    return product


def gemm_rs(A: torch.Tensor, B: torch.Tensor, ranks: Collectives) -> torch.Tensor:
    """Return this rank's rows of the sum over ranks of ``A @ B``. Differentiable.

    Args:
        A: [M, k], M a multiple of the number of ranks; otherwise like ``ag_gemm``.
        B: [k, N].
        ranks: ``TensorParallel`` or ``Collectives``.

    Returns:
        [m, N].

    Raises:
        InvalidArgument, ContextFinalized: see ``ag_gemm``.
    """
    return dispatch("gemm_rs", _checked_operands("gemm_rs", A, B, ranks), ranks)


def gemm(A: torch.Tensor, B: torch.Tensor, ranks: Collectives) -> torch.Tensor:
    """Return ``A @ B`` of this rank. Differentiable; the gradient of A is summed over ranks.

    Args:
        A: [M, K], equal on all ranks; otherwise like ``ag_gemm``.
        B: [K, n], columns of this rank.
        ranks: ``TensorParallel`` or ``Collectives``.

    Returns:
        [M, n].

    Raises:
        InvalidArgument, ContextFinalized: see ``ag_gemm``.
    """
    A, B = _checked_operands("gemm", A, B, ranks)
    if is_eager_inference(A, B):
        return A @ B
    product: torch.Tensor = torch.ops.triton_dist.gemm(A, B, ranks.name)
    return product


def gemm_ar(A: torch.Tensor, B: torch.Tensor, ranks: Collectives) -> torch.Tensor:
    """Return the sum over ranks of ``A @ B`` on every rank. Differentiable.

    All ranks must compute the same loss, so that the incoming gradients are equal.

    Args:
        A: [M, k]; otherwise like ``ag_gemm``.
        B: [k, N].
        ranks: ``TensorParallel`` or ``Collectives``.

    Returns:
        [M, N].

    Raises:
        InvalidArgument, ContextFinalized: see ``ag_gemm``.
    """
    return dispatch("gemm_ar", _checked_operands("gemm_ar", A, B, ranks), ranks)


def all_gather(shard: torch.Tensor, ranks: Collectives) -> torch.Tensor:
    """Gather [m, …] of each rank to [M, …] with NCCL or Gloo. Differentiable; any dtype."""
    return dispatch("all_gather", (shard,), ranks)


def shard_rows(x: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
    """Return the rows of a rank for sequence-parallel layers. Differentiable.

    Args:
        x: [M, …], any number of rows, equal on all ranks.
        rank: the rank.
        num_ranks: number of ranks.

    Returns:
        ``rows`` = ceil(M / num_ranks) rows: ``x[rank * rows : (rank + 1) * rows]``. Rows beyond
        the end of x are zero.
    """
    rows = -(-x.shape[0] // num_ranks)
    part = x[rank * rows : (rank + 1) * rows]
    return torch.cat([part, part.new_zeros(rows - part.shape[0], *x.shape[1:])])


def _checked_operands(
    function: str, A: torch.Tensor, B: torch.Tensor, ranks: Collectives
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check the operands and cast them for autocast."""
    A, B = cast_for_autocast(A, B, ranks)
    for name, operand in (("A", A), ("B", B)):
        if operand.ndim != 2:
            raise InvalidArgument(function, f"{name}.shape", tuple(operand.shape), "a matrix")
    check_operand(function, "A", A, B, ranks)
    return A, B


def cast_for_autocast(
    A: torch.Tensor, B: torch.Tensor, ranks: Collectives
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and B in autocast's dtype if autocast is on, else unchanged."""
    kind = ranks.device.type
    if not torch.is_autocast_enabled(kind):
        return A, B
    dtype = torch.get_autocast_dtype(kind)
    return A.to(dtype), B.to(dtype)


def is_eager_inference(*operands: torch.Tensor) -> bool:
    """Return whether neither a gradient nor a trace of the call is needed."""
    if torch.compiler.is_compiling():
        return False
    return not (torch.is_grad_enabled() and any(each.requires_grad for each in operands))


def dispatch(function: str, operands: tuple[torch.Tensor, ...], ranks: Collectives) -> torch.Tensor:
    """Call the method of ``ranks``, or the custom op if a gradient or a trace is needed."""
    if is_eager_inference(*operands):
        result: torch.Tensor = getattr(ranks, function)(*operands)
    else:
        result = getattr(torch.ops.triton_dist, function)(*operands, ranks.name)
    return result


# Custom ops for torch. ``ranks`` is the name of a ``Collectives``.


@torch.library.custom_op("triton_dist::ag_gemm", mutates_args=())
def _ag_gemm(
    A: torch.Tensor, B: torch.Tensor, ranks: str, keep_gathered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    group = ranks_by_name(ranks)
    gathered = A.new_empty((A.shape[0] * group.num_ranks, A.shape[1]) if keep_gathered else 0)
    return group.ag_gemm(A, B, gathered if keep_gathered else None), gathered


@_ag_gemm.register_fake
def _(A: Any, B: Any, ranks: str, keep_gathered: bool) -> Any:
    M = A.shape[0] * ranks_by_name(ranks).num_ranks
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
    rows = ranks_by_name(ranks).all_gather(shard)
    return rows.clone() if rows is shard else rows  # a custom op must not return its argument


@_all_gather.register_fake
def _(shard: Any, ranks: str) -> Any:
    return shard.new_empty(shard.shape[0] * ranks_by_name(ranks).num_ranks, *shard.shape[1:])


@torch.library.custom_op("triton_dist::reduce_scatter", mutates_args=())
def _reduce_scatter(addend: torch.Tensor, ranks: str) -> torch.Tensor:
    rows = ranks_by_name(ranks).reduce_scatter(addend)
    return rows.clone() if rows is addend else rows


@_reduce_scatter.register_fake
def _(addend: Any, ranks: str) -> Any:
    return addend.new_empty(addend.shape[0] // ranks_by_name(ranks).num_ranks, *addend.shape[1:])


def _setup_all_gather(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.ranks = inputs


@once_differentiable
def _backward_all_gather(ctx: Any, grad: torch.Tensor) -> Any:
    return torch.ops.triton_dist.reduce_scatter(grad, ctx.ranks), None


_all_gather.register_autograd(_backward_all_gather, setup_context=_setup_all_gather)


@once_differentiable
def _backward_gemm_rs(ctx: Any, dC: torch.Tensor) -> Any:
    A, B = ctx.saved_tensors
    needs_A, needs_B, _ = ctx.needs_input_grad
    ops, dA = torch.ops.triton_dist, None
    if needs_A:  # ag_gemm also returns the gathered rows of dC, which the gradient of B needs
        dA, rows = ops.ag_gemm(dC, B.T, ctx.ranks, needs_B)
    elif needs_B:
        rows = ops.all_gather(dC, ctx.ranks)
    return dA, A.T @ rows if needs_B else None, None


@once_differentiable
def _backward_gemm(ctx: Any, dC: torch.Tensor) -> Any:
    A, B = ctx.saved_tensors
    dA = torch.ops.triton_dist.gemm_ar(dC, B.T, ctx.ranks) if ctx.needs_input_grad[0] else None
    return dA, A.T @ dC if ctx.needs_input_grad[1] else None, None


@once_differentiable
def _backward_gemm_ar(ctx: Any, dC: torch.Tensor) -> Any:
    A, B = ctx.saved_tensors
    needs_A, needs_B, _ = ctx.needs_input_grad
    return dC @ B.T if needs_A else None, A.T @ dC if needs_B else None, None


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    A, B, ctx.ranks = inputs
    ctx.save_for_backward(A, B)


def _define(name: str, backward: Callable[..., Any]) -> None:
    """Define the custom op of ``gemm``, ``gemm_rs`` or ``gemm_ar``."""

    def product(A: torch.Tensor, B: torch.Tensor, ranks: str) -> torch.Tensor:
        if name == "gemm":
            return A @ B
        C: torch.Tensor = getattr(ranks_by_name(ranks), name)(A, B)
        return C

    def fake(A: Any, B: Any, ranks: str) -> Any:
        shards = ranks_by_name(ranks).num_ranks if name == "gemm_rs" else 1
        return A.new_empty(A.shape[0] // shards, B.shape[1])

    op = torch.library.custom_op(f"triton_dist::{name}", product, mutates_args=())
    op.register_fake(fake)
    op.register_autograd(backward, setup_context=_setup)


_define("gemm_rs", _backward_gemm_rs)
_define("gemm", _backward_gemm)
_define("gemm_ar", _backward_gemm_ar)
