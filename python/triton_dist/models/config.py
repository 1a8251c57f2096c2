"""Parameters by which a model is asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["ModelConfig"]


@dataclass
class ModelConfig:
    """A model, and how it is to run.

    Attributes:
        model_name: as of ``init_model_cpu``.
        max_length: tokens of a sequence, at most.
        dtype: of weights and activations.
        local_only: no effect: nothing is downloaded.
        rank, world_size: this rank in the group, and its size.
    """

    model_name: str = "Qwen/Qwen3-32B"
    max_length: int = 4096
    dtype: torch.dtype = torch.bfloat16
    local_only: bool = False
    rank: int = 0
    world_size: int = 8
