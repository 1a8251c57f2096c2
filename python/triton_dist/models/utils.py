"""Seeds, and a model to take layers from."""

from __future__ import annotations

import dataclasses
import random

import torch

from triton_dist.models.llama import Llama, LlamaConfig

__all__ = ["init_model_cpu", "seed_everything"]


def seed_everything(seed: int) -> None:
    """Seed Python's and torch's generators."""
    random.seed(seed)
    torch.manual_seed(seed)


def init_model_cpu(
    model_name: str, dtype: torch.dtype, num_layers: int | None = None, scale: int = 1
) -> Llama:
    """A model of that name or folder (``LlamaConfig.of``) on the CPU, with random weights that are
    the same on all ranks.

    Args:
        num_layers: default: all that it has.
        scale: divides hidden and intermediate sizes and the vocabulary: for the interpreter.
    """
    config = LlamaConfig.of(model_name)
    sizes = ("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size")
    few = {name: max(32, getattr(config, name) // scale) for name in sizes if scale > 1}
    if num_layers is not None:
        few["num_hidden_layers"] = num_layers
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Llama(dataclasses.replace(config, **few), dtype)
