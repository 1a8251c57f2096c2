"""Seeds, and a model to take layers from."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from triton_dist.errors import MissingExtra
from triton_dist.models.llama import Llama, LlamaConfig

__all__ = ["init_model_cpu", "seed_everything"]


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def init_model_cpu(
    model_name: str, dtype: torch.dtype, num_layers: int | None = None, scale: int = 1
) -> Any:
    """A model on the CPU: of a folder with weights, Hugging Face's; of a known name, or a folder
    with nothing but a ``config.json``, a ``Llama`` with random weights, the same on all ranks.

    Args:
        num_layers: default: all that it has. This and ``scale`` are of a ``Llama`` alone.
        scale: of ``few``.

    Raises:
        InvalidArgument: neither a folder with a ``config.json`` nor a known name.
        MissingExtra: weights, and no ``transformers`` to load them.
    """
    if any(Path(model_name).glob("*.safetensors")):
        try:
            from transformers import AutoModelForCausalLM
        except ModuleNotFoundError as error:
            raise MissingExtra(
                f"init_model_cpu({model_name!r})", "transformers", "models"
            ) from error
        return AutoModelForCausalLM.from_pretrained(model_name, dtype=dtype, local_files_only=True)
    config = LlamaConfig.of(model_name)
    if scale > 1:
        config = few(config, scale)
    if num_layers is not None:
        config = dataclasses.replace(config, num_hidden_layers=num_layers)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # ``torch.manual_seed`` would seed GPUs too
        return Llama(config, dtype)


def few(config: LlamaConfig, scale: int) -> LlamaConfig:
    """A model of the same kind for the interpreter: sizes divided by ``scale``, few heads and
    experts."""
    sizes = ("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size")
    divided = {name: max(32, getattr(config, name) // scale) for name in sizes}
    return dataclasses.replace(
        config, **divided, num_attention_heads=8, num_key_value_heads=4, head_dim=16,
        num_experts=min(8, config.num_experts),
        num_experts_per_tok=min(2, config.num_experts_per_tok),
    )  # fmt: skip
