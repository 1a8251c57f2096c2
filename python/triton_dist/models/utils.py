"""Create models on the CPU for ``parallelize``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from triton_dist.errors import InvalidArgument, MissingExtra
from triton_dist.models.llama import Llama, LlamaConfig, RotaryEmbedding
from triton_dist.runtime.random import seed_everything

_FP8_FAMILIES = ("llama", "qwen3", "qwen3_moe")
__all__ = ["init_model_cpu", "seed_everything"]


def init_model_cpu(
    model_name: str, dtype: torch.dtype, num_layers: int | None = None, size_divisor: int = 1
) -> Any:
    """Return a model on the CPU.

    The result depends on ``model_name``:

    * a folder with weights: Hugging Face's model;
    * a folder with fp8 weights (``layers/nvidia/fp8.py``): a ``Llama`` with these weights and their
      scales. It cannot run itself; ``parallelize`` must replace its layers;
    * a folder with only a ``config.json``, or a name in ``models.llama.KNOWN_CONFIGS``: a ``Llama``
      with random weights, equal on all ranks.

    Args:
        model_name: name or folder.
        dtype: dtype of weights that are not fp8.
        num_layers: number of layers of a ``Llama`` with random weights; default: all.
        size_divisor: divisor of the sizes of a ``Llama`` with random weights; see ``scaled_down``.

    Raises:
        InvalidArgument: ``model_name`` is neither a known name nor a folder with a
            ``config.json``, or a ``Llama`` does not have the architecture of the fp8 weights.
        MissingExtra: the folder has weights, but ``transformers`` is not installed.
    """
    if any(Path(model_name).glob("*.safetensors")):
        settings = json.loads(Path(model_name, "config.json").read_text(encoding="utf-8"))
        if settings.get("quantization_config"):
            return _fp8_model(model_name, settings, dtype)
        try:
            from transformers import AutoModelForCausalLM
        except ModuleNotFoundError as error:
            raise MissingExtra(
                f"init_model_cpu({model_name!r})", "transformers", "models"
            ) from error
        return AutoModelForCausalLM.from_pretrained(model_name, dtype=dtype, local_files_only=True)
    config = LlamaConfig.of(model_name)
    if size_divisor > 1:
        config = scaled_down(config, size_divisor)
    if num_layers is not None:
        config = dataclasses.replace(config, num_hidden_layers=num_layers)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # ``torch.manual_seed`` would also seed the GPUs
        return Llama(config, dtype)


def _fp8_model(folder: str, settings: dict[str, Any], dtype: torch.dtype) -> Llama:
    """Return a ``Llama`` with the fp8 weights of a folder; cast other weights to ``dtype``."""
    try:
        from safetensors.torch import load_file
    except ModuleNotFoundError as error:
        raise MissingExtra(f"init_model_cpu({folder!r})", "safetensors", "models") from error
    rope = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    for name, value, supported in (
        ("model_type", settings.get("model_type"), _FP8_FAMILIES),
        ("rope_type", rope.get("rope_type", rope.get("type", "default")), ("default",)),
        ("norm_topk_prob", settings.get("norm_topk_prob", True), (True,)),
    ):
        if value not in supported:
            raise InvalidArgument(
                "init_model_cpu", name, value, f"one of {supported} for fp8 weights"
            )
    with torch.device("meta"):
        model = Llama(LlamaConfig.of(folder), dtype)
    missing = {name for name, _ in model.named_parameters()}
    for path in sorted(Path(folder).glob("*.safetensors")):
        for name, weight in load_file(path).items():
            where, _, member = name.rpartition(".")
            must_cast = (
                weight.is_floating_point() and weight.itemsize > 1 and "_scale" not in member
            )
            parameter = torch.nn.Parameter(weight.to(dtype) if must_cast else weight, False)
            model.get_submodule(where).register_parameter(member, parameter)
            missing.discard(name)
    if missing == {"lm_head.weight"}:  # tied
        model.lm_head.weight = model.model.embed_tokens.weight
    elif missing:
        raise InvalidArgument("init_model_cpu", "weights", sorted(missing), "no missing weights")
    model.model.rotary_emb = RotaryEmbedding(model.config.head_dim, model.config.rope_theta)
    return model


def scaled_down(config: LlamaConfig, size_divisor: int) -> LlamaConfig:
    """Return a smaller config for runs in the interpreter.

    Hidden, intermediate and vocabulary sizes are divided by ``size_divisor``. There are 8 query
    heads, 4 key-value heads, and at most 8 experts.
    """
    sizes = ("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size")
    divided = {name: max(32, getattr(config, name) // size_divisor) for name in sizes}
    return dataclasses.replace(
        config, **divided, num_attention_heads=8, num_key_value_heads=4, head_dim=16,
        num_experts=min(8, config.num_experts),
        num_experts_per_tok=min(2, config.num_experts_per_tok),
    )  # fmt: skip
