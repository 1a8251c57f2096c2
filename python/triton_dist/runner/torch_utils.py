"""Functions that scripts for triton-runner import: the device, and sizes of dumped tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton


def get_active_torch_device() -> Any:
    """Return the ``torch.device`` that Triton compiles for and launches on."""
    return triton.runtime.driver.active.get_active_torch_device()


def get_grid_dim(tensor_shape: Sequence[int], block_shape: Sequence[int]) -> tuple[int, ...]:
    """Return the number of blocks along each axis that cover a tensor."""
    return tuple(map(triton.cdiv, tensor_shape, block_shape))


def get_n_elements_with_grid(block_shape: Sequence[int], grid: Sequence[int]) -> int:
    """Return the number of elements in the blocks of all programs, padding included."""
    return math.prod(block_shape) * math.prod(grid)


def get_pad_n_elements(tensor: torch.Tensor, block_shape: Sequence[int]) -> int:
    """Return the number of elements of ``tensor`` with each axis padded to whole blocks."""
    return get_n_elements_with_grid(block_shape, get_grid_dim(tensor.shape, block_shape))


def pad_2d_to_block_shape(tensor: torch.Tensor, block_shape: Sequence[int]) -> torch.Tensor:
    """Return ``tensor`` in float32, with each axis zero-padded to whole blocks."""
    blocks = get_grid_dim(tensor.shape, block_shape)
    whole = [n * size for n, size in zip(blocks, block_shape, strict=True)]
    padded = tensor.new_zeros(whole, dtype=torch.float32)
    padded[: tensor.shape[0], : tensor.shape[1]] = tensor
    return padded
