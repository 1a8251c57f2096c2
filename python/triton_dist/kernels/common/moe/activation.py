"""Compute silu(gate) * up for rows that are sorted by expert, and its backward.

A row holds gate and up side by side. The buffers have rows for the worst routing. The kernels stop
at the last used row, so their time depends only on the used rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from triton_dist._jit import jit
from triton_dist.kernels.common.moe.positions import Positions
from triton_dist.runtime.device import current_device
from triton_dist.runtime.launch import Launch

_MAX_BLOCK_COLUMNS = 2048


@jit
def kernel_silu_mul(
    products_ptr, out_ptr, ends_ptr, columns, EXPERTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute out [positions, columns] from gate and up [positions, 2 * columns]. Any grid."""
    num_used = tl.load(ends_ptr + EXPERTS - 1)
    for position in range(tl.program_id(0), num_used, tl.num_programs(0)):
        row = tl.cast(position, tl.int64) * columns
        for first_column in range(0, columns, BLOCK):
            column = first_column + tl.arange(0, BLOCK)
            mask = column < columns
            gate = tl.load(products_ptr + 2 * row + column, mask=mask).to(tl.float32)
            up = tl.load(products_ptr + 2 * row + columns + column, mask=mask).to(tl.float32)
            value = gate / (1.0 + tl.exp(-gate)) * up
            tl.store(out_ptr + row + column, value.to(out_ptr.dtype.element_ty), mask=mask)


@jit
def kernel_silu_mul_backward(
    products_ptr, grads_ptr, weights_ptr, weighted_ptr, d_products_ptr, d_weights_ptr, ends_ptr,
    columns, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute ``weight * silu(gate) * up`` and the gradients of gate, up and weight. Any grid.

    grads: [positions, columns], gradients of ``weight * silu(gate) * up``, which is stored in
    ``weighted``.
    """
    num_used = tl.load(ends_ptr + EXPERTS - 1)
    for position in range(tl.program_id(0), num_used, tl.num_programs(0)):
        row = tl.cast(position, tl.int64) * columns
        weight = tl.load(weights_ptr + position)
        d_weight = tl.zeros((BLOCK,), tl.float32)
        for first_column in range(0, columns, BLOCK):
            column = first_column + tl.arange(0, BLOCK)
            mask = column < columns
            gate_offset = 2 * row + column
            gate = tl.load(products_ptr + gate_offset, mask=mask, other=0.0).to(tl.float32)
            up = tl.load(products_ptr + gate_offset + columns, mask=mask, other=0.0).to(tl.float32)
            grad = tl.load(grads_ptr + row + column, mask=mask, other=0.0).to(tl.float32)
            sigmoid = 1.0 / (1.0 + tl.exp(-gate))
            silu = gate * sigmoid
            d_weight += grad * silu * up
            grad *= weight
            d_gate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
            dtype = weighted_ptr.dtype.element_ty
            tl.store(weighted_ptr + row + column, (weight * silu * up).to(dtype), mask=mask)
            tl.store(d_products_ptr + gate_offset, d_gate.to(dtype), mask=mask)
            tl.store(d_products_ptr + gate_offset + columns, (grad * silu).to(dtype), mask=mask)
        tl.store(d_weights_ptr + position, tl.sum(d_weight, 0))


def silu_mul(products: torch.Tensor, positions: Positions) -> torch.Tensor:
    """Return silu(left half) * right half of ``products`` for the used positions."""
    out = products.new_empty(len(products), products.shape[1] // 2)
    activation_launch(kernel_silu_mul, positions, products, out).run()
    return out


def silu_mul_backward(
    products: torch.Tensor, grads: torch.Tensor, weights: torch.Tensor, positions: Positions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (weighted rows, gradients of ``products``, gradients of ``weights``).

    Weighted rows are ``weights * silu(gate) * up``.

    Args:
        products: [positions, 2 * columns], gate and up.
        grads: [positions, columns], gradients of the weighted rows.
        weights: fp32 [positions].
        positions: has the number of used rows.
    """
    outputs = torch.empty_like(grads), torch.empty_like(products), torch.empty_like(weights)
    activation_launch(kernel_silu_mul_backward, positions, products, grads, weights, *outputs).run()
    return outputs


def activation_launch(
    kernel: Any, positions: Positions, products: torch.Tensor, *tensors: torch.Tensor
) -> Launch:
    """Return the launch of ``kernel`` of this module for ``products`` [positions, 2 * columns]."""
    rows, columns = len(products), products.shape[1] // 2
    block = min(_MAX_BLOCK_COLUMNS, triton.next_power_of_2(columns))
    return Launch(
        kernel,
        (min(rows, 8 * current_device().num_sms),),
        (products, *tensors, positions.ends, columns),
        {"EXPERTS": len(positions.ends), "BLOCK": block, "num_warps": 4},
    )
