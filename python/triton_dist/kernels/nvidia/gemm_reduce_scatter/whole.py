"""GEMM-ReduceScatter of a whole product by torch: our reduce-scatter behind it, or a library's."""

from __future__ import annotations

from typing import Any

import torch

from triton_dist.kernels.common import vendor_reduce_scatter as vendor
from triton_dist.kernels.common.exchange.buffer import Exchange
from triton_dist.kernels.common.exchange.kernels import kernel_reduce_scatter
from triton_dist.kernels.common.exchange.shapes import Shape
from triton_dist.kernels.common.launch import Launch
from triton_dist.kernels.common.vendor import VendorMethod


def multiply_then_scatter(
    A: torch.Tensor,
    B: torch.Tensor,
    ctx: Any,
    bias: torch.Tensor | None,
    how: Shape | VendorMethod,
) -> torch.Tensor:
    """This rank's rows of ``sum over ranks of A @ B``; the bias is added to the rounded sum.
    ``how``: our reduce-scatter is launched, or the vendor's way."""
    A, B = A.detach(), B.detach()  # like ours, without a history for autograd

    def call() -> torch.Tensor:
        if how is VendorMethod.ASYNC_TP and ctx.num_ranks > 1:
            return vendor.fused_matmul_reduce_scatter(A, B, ctx.group)
        product = torch.matmul(A, B)
        if ctx.num_ranks == 1:
            return product
        if isinstance(how, VendorMethod):
            return vendor.reduce_scatter(product, ctx.group)
        flat, rows = product.view(-1), _own_rows(product, ctx)
        ctx.exchange.run(_exchange(product, ctx, how), flat, rows.view(-1))
        return rows

    rows: torch.Tensor = ctx.buffer.slots.beside(call)
    return rows if bias is None else rows.add_(bias.detach())


def scatter_launch(A: torch.Tensor, B: torch.Tensor, ctx: Any, shape: Shape) -> Launch:
    """The launch of our reduce-scatter behind ``A @ B``."""
    product = A.new_empty((A.shape[0], B.shape[1]))
    flat, rows = product.view(-1), _own_rows(product, ctx)
    launch: Launch = ctx.exchange.launch(_exchange(product, ctx, shape), flat, rows.view(-1))
    return launch


def _own_rows(product: torch.Tensor, ctx: Any) -> torch.Tensor:
    return product.new_empty((product.shape[0] // ctx.num_ranks, product.shape[1]))


def _exchange(product: torch.Tensor, ctx: Any, shape: Shape) -> Exchange:
    elements = product.numel()
    size = product.shape[0]
    return Exchange(kernel_reduce_scatter, elements // ctx.num_ranks, elements, shape, size)
