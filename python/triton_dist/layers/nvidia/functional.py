"""Differentiable GEMMs across ranks, which ``torch.compile`` keeps in one graph.

Each product is a custom op (``torch.ops.triton_dist``) with a fake implementation for tracing and a
backward that uses the other products:

    product                                       gradient of A              gradient of B
    ag_gemm    C = all_gather(A) @ B              gemm_rs(dC, B.T)           all_gather(A).T @ dC
    gemm_rs    C = this rank's rows of the sum    ag_gemm(dC, B.T)           A.T @ all_gather(dC)
               over ranks of A @ B
    gemm       C = A @ B, A equal on all ranks    gemm_ar(dC, B.T)           A.T @ dC
    gemm_ar    C = sum over ranks of A @ B        dC @ B.T                   A.T @ dC

ag_gemm and gemm_rs are for sequence-parallel layers: rows are sharded over ranks, and the loss is
the sum of the ranks' losses. gemm and gemm_ar are for layers in which all ranks have the same rows
and the same loss. A layer calls ag_gemm, then gemm_rs; or gemm, then gemm_ar.

Tracing only computes shapes. When the graph first runs with a shape, contexts are created and the
op is tuned, as in eager mode. If neither a gradient nor a trace is needed, the op is called without
the custom op, which costs about 20 us of host time.

Shapes: M, N and K are whole sizes; m = M / ranks, n = N / ranks and k = K / ranks are the sizes of
this rank's shard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from triton_dist.errors import InvalidArgument
from triton_dist.layers.nvidia.tensor_parallel import (
    Collectives,
    check_operand,
    collectives_by_name,
)


def ag_gemm(
    A: torch.Tensor, B: torch.Tensor, collectives: Collectives, *, keep_gathered: bool = False
) -> torch.Tensor:
    """Return ``all_gather(A) @ B``. Differentiable.

    Args:
        A: [m, K], rows of this rank; fp16, bf16 or fp32. Under autocast, A and B are cast.
        B: [K, n], columns of this rank, any strides, dtype of A.
        collectives: ``TensorParallel`` or ``Collectives``.
        keep_gathered: keep the gathered A (M * K elements) until the backward pass, which otherwise
            gathers A again for the gradient of B.

    Returns:
        [M, n].

    Raises:
        InvalidArgument: shapes, dtypes or devices do not match.
        ContextFinalized: ``collectives`` was finalized.
    """
    A, B = _checked_operands("ag_gemm", A, B, collectives)
    if is_eager_inference(A, B):
        return collectives.ag_gemm(A, B)
    keep_rows = keep_gathered and B.requires_grad
    product: torch.Tensor = torch.ops.triton_dist.ag_gemm(A, B, collectives.name, keep_rows)[0]
    return product


def gemm_rs(A: torch.Tensor, B: torch.Tensor, collectives: Collectives) -> torch.Tensor:
    """Return this rank's rows of the sum over ranks of ``A @ B``. Differentiable.

    Args:
        A: [M, k], columns of this rank; M is a multiple of the number of ranks. For dtypes see
            ``ag_gemm``.
        B: [k, N], rows of this rank.
        collectives: ``TensorParallel`` or ``Collectives``.

    Returns:
        [m, N].

    Raises:
        InvalidArgument, ContextFinalized: see ``ag_gemm``.
    """
    operands = _checked_operands("gemm_rs", A, B, collectives)
    return call_method_or_custom_op("gemm_rs", operands, collectives)


def gemm(A: torch.Tensor, B: torch.Tensor, collectives: Collectives) -> torch.Tensor:
    """Return ``A @ B`` of this rank. Differentiable; the gradient of A is summed over ranks.

    Args:
        A: [M, K], equal on all ranks. For dtypes see ``ag_gemm``.
        B: [K, n], columns of this rank.
        collectives: ``TensorParallel`` or ``Collectives``.

    Returns:
        [M, n].

    Raises:
        InvalidArgument, ContextFinalized: see ``ag_gemm``.
    """
    operands = _checked_operands("gemm", A, B, collectives)
    return call_method_or_custom_op("gemm", operands, collectives)


def gemm_ar(A: torch.Tensor, B: torch.Tensor, collectives: Collectives) -> torch.Tensor:
    """Return the sum over ranks of ``A @ B`` on every rank. Differentiable.

    All ranks must compute the same loss, because the backward pass requires equal gradients.

    Args:
        A: [M, k], columns of this rank. For dtypes see ``ag_gemm``.
        B: [k, N], rows of this rank.
        collectives: ``TensorParallel`` or ``Collectives``.

    Returns:
        [M, N].

    Raises:
        InvalidArgument, ContextFinalized: see ``ag_gemm``.
    """
    operands = _checked_operands("gemm_ar", A, B, collectives)
    return call_method_or_custom_op("gemm_ar", operands, collectives)


def all_gather(shard: torch.Tensor, collectives: Collectives) -> torch.Tensor:
    """Concatenate the ranks' shards [m, …] to [M, …] by NCCL or Gloo. Differentiable; any dtype."""
    return call_method_or_custom_op("all_gather", (shard,), collectives)


def shard_rows(x: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
    """Return the rows of a rank for sequence-parallel layers. Differentiable.

    Args:
        x: [M, …], any number of rows, equal on all ranks.
        rank: the rank whose rows are returned.
        num_ranks: number of ranks.

    Returns:
        ``x[rank * rows : (rank + 1) * rows]`` with ``rows = ceil(M / num_ranks)``. Rows beyond the
        end of x are zero.
    """
    rows = -(-x.shape[0] // num_ranks)
    part = x[rank * rows : (rank + 1) * rows]
    return torch.cat([part, part.new_zeros(rows - part.shape[0], *x.shape[1:])])


def _checked_operands(
    function: str, A: torch.Tensor, B: torch.Tensor, collectives: Collectives
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check the operands and cast them for autocast."""
    A, B = cast_for_autocast(A, B, collectives)
    for name, operand in (("A", A), ("B", B)):
        if operand.ndim != 2:
            raise InvalidArgument(function, f"{name}.shape", tuple(operand.shape), "a matrix")
    check_operand(function, "A", A, B, collectives)
    return A, B


def cast_for_autocast(
    A: torch.Tensor, B: torch.Tensor, collectives: Collectives
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and B in autocast's dtype if autocast is on, else unchanged."""
    device_type = collectives.device.type
    if not torch.is_autocast_enabled(device_type):
        return A, B
    dtype = torch.get_autocast_dtype(device_type)
    return A.to(dtype), B.to(dtype)


def is_eager_inference(*operands: torch.Tensor) -> bool:
    """Return whether a call with ``operands`` needs neither a gradient nor a trace."""
    if torch.compiler.is_compiling():
        return False
    return not (torch.is_grad_enabled() and any(each.requires_grad for each in operands))


def call_method_or_custom_op(
    function: str, operands: tuple[torch.Tensor, ...], collectives: Collectives
) -> torch.Tensor:
    """Call a method of ``collectives``, or its custom op if a gradient or trace is needed."""
    if is_eager_inference(*operands):
        result: torch.Tensor = getattr(collectives, function)(*operands)
    else:
        result = getattr(torch.ops.triton_dist, function)(*operands, collectives.name)
    return result


# Custom ops for torch. ``collectives_name`` is the name of a ``Collectives``.


@torch.library.custom_op("triton_dist::ag_gemm", mutates_args=())
def _ag_gemm(
    A: torch.Tensor, B: torch.Tensor, collectives_name: str, keep_gathered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    collectives = collectives_by_name(collectives_name)
    gathered = A.new_empty((A.shape[0] * collectives.num_ranks, A.shape[1]) if keep_gathered else 0)
    return collectives.ag_gemm(A, B, gathered if keep_gathered else None), gathered


@_ag_gemm.register_fake
def _(A: Any, B: Any, collectives_name: str, keep_gathered: bool) -> Any:
    M = A.shape[0] * collectives_by_name(collectives_name).num_ranks
    return A.new_empty(M, B.shape[1]), A.new_empty((M, A.shape[1]) if keep_gathered else 0)


def _setup_ag_gemm(ctx: Any, inputs: Any, output: Any) -> None:
    A, B, ctx.collectives_name, ctx.keep_rows = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1] if ctx.keep_rows else A, B)


@once_differentiable
def _backward_ag_gemm(ctx: Any, dC: torch.Tensor | None, _: Any) -> Any:
    rows, B = ctx.saved_tensors
    if dC is None:
        return None, None, None, None
    ops, dA, dB = torch.ops.triton_dist, None, None
    if ctx.needs_input_grad[0]:
        dA = ops.gemm_rs(dC, B.T, ctx.collectives_name)
    if ctx.needs_input_grad[1]:
        dB = (rows if ctx.keep_rows else ops.all_gather(rows, ctx.collectives_name)).T @ dC
    return dA, dB, None, None


_ag_gemm.register_autograd(_backward_ag_gemm, setup_context=_setup_ag_gemm)


@torch.library.custom_op("triton_dist::all_gather", mutates_args=())
def _all_gather(shard: torch.Tensor, collectives_name: str) -> torch.Tensor:
    rows = collectives_by_name(collectives_name).all_gather(shard)
    return rows.clone() if rows is shard else rows  # a custom op must not return its argument


@_all_gather.register_fake
def _(shard: Any, collectives_name: str) -> Any:
    num_ranks = collectives_by_name(collectives_name).num_ranks
    return shard.new_empty(shard.shape[0] * num_ranks, *shard.shape[1:])


@torch.library.custom_op("triton_dist::reduce_scatter", mutates_args=())
def _reduce_scatter(addend: torch.Tensor, collectives_name: str) -> torch.Tensor:
    rows = collectives_by_name(collectives_name).reduce_scatter(addend)
    return rows.clone() if rows is addend else rows


@_reduce_scatter.register_fake
def _(addend: Any, collectives_name: str) -> Any:
    return addend.new_empty(
        addend.shape[0] // collectives_by_name(collectives_name).num_ranks, *addend.shape[1:]
    )


def _setup_all_gather(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.collectives_name = inputs


@once_differentiable
def _backward_all_gather(ctx: Any, grad: torch.Tensor) -> Any:
    return torch.ops.triton_dist.reduce_scatter(grad, ctx.collectives_name), None


_all_gather.register_autograd(_backward_all_gather, setup_context=_setup_all_gather)


@once_differentiable
def _backward_gemm_rs(ctx: Any, dC: torch.Tensor) -> Any:
    A, B = ctx.saved_tensors
    needs_A, needs_B, _ = ctx.needs_input_grad
    ops, dA = torch.ops.triton_dist, None
    if needs_A:  # ag_gemm also returns all_gather(dC), which the gradient of B needs
        dA, rows = ops.ag_gemm(dC, B.T, ctx.collectives_name, needs_B)
    elif needs_B:
        rows = ops.all_gather(dC, ctx.collectives_name)
    return dA, A.T @ rows if needs_B else None, None


@once_differentiable
def _backward_gemm(ctx: Any, dC: torch.Tensor) -> Any:
    A, B = ctx.saved_tensors
    needs_A, gemm_ar = ctx.needs_input_grad[0], torch.ops.triton_dist.gemm_ar
    dA = gemm_ar(dC, B.T, ctx.collectives_name) if needs_A else None
    return dA, A.T @ dC if ctx.needs_input_grad[1] else None, None


@once_differentiable
def _backward_gemm_ar(ctx: Any, dC: torch.Tensor) -> Any:
    A, B = ctx.saved_tensors
    needs_A, needs_B, _ = ctx.needs_input_grad
    return dC @ B.T if needs_A else None, A.T @ dC if needs_B else None, None


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    A, B, ctx.collectives_name = inputs
    ctx.save_for_backward(A, B)


def _define(name: str, backward: Callable[..., Any]) -> None:
    """Define the custom op of ``gemm``, ``gemm_rs`` or ``gemm_ar``."""

    def product(A: torch.Tensor, B: torch.Tensor, collectives_name: str) -> torch.Tensor:
        C: torch.Tensor = getattr(collectives_by_name(collectives_name), name)(A, B)
        return C

    def fake(A: Any, B: Any, collectives_name: str) -> Any:
        shards = collectives_by_name(collectives_name).num_ranks if name == "gemm_rs" else 1
        return A.new_empty(A.shape[0] // shards, B.shape[1])

    op = torch.library.custom_op(f"triton_dist::{name}", product, mutates_args=())
    op.register_fake(fake)
    op.register_autograd(backward, setup_context=_setup)


_define("gemm_rs", _backward_gemm_rs)
_define("gemm", _backward_gemm)
_define("gemm_ar", _backward_gemm_ar)
