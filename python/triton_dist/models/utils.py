"""Random seeds, and models on the CPU from which layers are built."""

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
    """Seed the generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def init_model_cpu(
    model_name: str, dtype: torch.dtype, num_layers: int | None = None, scale: int = 1
) -> Any:
    """Return a model on the CPU.

    A folder with weights gives Hugging Face's model. A known name, or a folder with only a
    ``config.json``, gives a ``Llama`` with random weights, equal on all ranks.

    Args:
        model_name: name or folder.
        dtype: dtype of the weights.
        num_layers: number of layers of a ``Llama``; default: all.
        scale: divisor of the sizes of a ``Llama``; see ``scaled_down``.

    Raises:
        InvalidArgument: ``model_name`` is neither a known name nor a folder with a
            ``config.json``.
        MissingExtra: the folder has weights, but ``transformers`` is not installed.
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
        config = scaled_down(config, scale)
    if num_layers is not None:
        config = dataclasses.replace(config, num_hidden_layers=num_layers)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # ``torch.manual_seed`` would also seed the GPUs
        return Llama(config, dtype)


def scaled_down(config: LlamaConfig, scale: int) -> LlamaConfig:
    """Return a smaller config of the same kind, for the interpreter.

    Sizes are divided by ``scale``; heads and experts are few.
    """
    sizes = ("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size")
    divided = {name: max(32, getattr(config, name) // scale) for name in sizes}
    return dataclasses.replace(
        config, **divided, num_attention_heads=8, num_key_value_heads=4, head_dim=16,
        num_experts=min(8, config.num_experts),
        num_experts_per_tok=min(2, config.num_experts_per_tok),
    )  # fmt: skip
