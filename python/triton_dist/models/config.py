"""Configuration of a model run, with the field names of Triton-distributed's scripts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["ModelConfig"]


@dataclass
class ModelConfig:
    """Name and run-time settings of a model.

    Attributes:
        model_name: name or folder for ``init_model_cpu``.
        max_length: largest number of tokens of a sequence.
        dtype: dtype of weights and activations.
        local_only: ignored; nothing is ever downloaded.
        rank: this rank in the group.
        world_size: number of ranks in the group.
    """

    model_name: str = "Qwen/Qwen3-32B"
    max_length: int = 4096
    dtype: torch.dtype = torch.bfloat16
    local_only: bool = False
    rank: int = 0
    world_size: int = 8
