"""Key-value cache with fixed addresses, for decoding in CUDA graphs."""

from __future__ import annotations

import torch

from triton_dist.errors import InvalidArgument
from triton_dist.runtime.device import current_device

__all__ = ["KV_Cache"]


class KV_Cache:
    """Keys and values of this rank's heads.

    Layers write to the tensors in place, so one CUDA graph of a decode step serves all steps.

    Attributes:
        k_cache, v_cache: [num_layers, batch_size, max_length, kv heads of this rank, head_dim].
        kv_offset: int32 [batch_size], number of cached tokens of each sequence. Layers write new
            tokens from this position on and mask later positions. ``kv_offset`` plus the new
            tokens must not exceed ``max_length``.

    Args:
        num_layers: number of layers of the model.
        batch_size: largest number of sequences.
        max_length: largest number of tokens of a sequence.
        kv_heads: number of key-value heads over all ranks. With fewer heads than ``world_size``,
            each rank has one head.
        head_dim: elements of a head.
        dtype: dtype of keys and values.
        world_size: number of ranks.

    Raises:
        InvalidArgument: ``kv_heads`` is neither a multiple nor a divisor of ``world_size``.
    """

    def __init__(
        self,
        num_layers: int = 32,
        batch_size: int = 1,
        max_length: int = 32 * 1024,
        kv_heads: int = 8,
        head_dim: int = 128,
        dtype: torch.dtype = torch.bfloat16,
        world_size: int = 8,
    ) -> None:
        if kv_heads % world_size and world_size % kv_heads:
            expected = f"a multiple or a divisor of world_size = {world_size}"
            raise InvalidArgument("KV_Cache", "kv_heads", kv_heads, expected)
        self.num_layers, self.batch_size, self.max_length = num_layers, batch_size, max_length
        self.kv_heads, self.head_dim, self.dtype = kv_heads, head_dim, dtype
        self.world_size, device = world_size, current_device().torch_device
        shape = (num_layers, batch_size, max_length, max(1, kv_heads // world_size), head_dim)
        self.k_cache = torch.zeros(shape, dtype=dtype, device=device)
        self.v_cache = torch.zeros(shape, dtype=dtype, device=device)
        self.kv_offset = torch.zeros(batch_size, dtype=torch.int32, device=device)

    def update_kv_cache(
        self, new_k_cache: object, new_v_cache: object, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return k and v of layer ``layer_idx``, and ``kv_offset``.

        ``new_k_cache`` and ``new_v_cache`` are ignored: layers write new tokens themselves.
        """
        return self.k_cache[layer_idx], self.v_cache[layer_idx], self.kv_offset

    def rand_fill_kv_cache(self, offset: int) -> None:
        """Fill the first ``offset`` tokens with uniform random values from 0 to 0.1."""
        for cache in (self.k_cache, self.v_cache):
            cache[:, :, :offset].uniform_(0, 0.1)

    def inc_offset(self, tokens: int = 1) -> None:
        self.kv_offset += tokens

    def clear(self) -> None:
        self.kv_offset.zero_()

    def get_kv_len(self) -> torch.Tensor:
        return self.kv_offset
