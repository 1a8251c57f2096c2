"""Replace the layers of an existing model by tensor-parallel layers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from triton_dist._warn import warn
from triton_dist.errors import InvalidArgument, TritonDistWarning
from triton_dist.layers.nvidia.ep_moe import EP_MoE
from triton_dist.layers.nvidia.layer import TensorParallelLayer, owners_of_shards
from triton_dist.layers.nvidia.tensor_parallel import Collectives, TensorParallel
from triton_dist.layers.nvidia.tp_attn import TP_Attn
from triton_dist.layers.nvidia.tp_mlp import TP_MLP
from triton_dist.layers.nvidia.tp_moe import TP_MoE
from triton_dist.layers.nvidia.training import redirect_torch_clipping
from triton_dist.runtime.ranks import Group

_LAYER_CLASSES: tuple[tuple[type[TensorParallelLayer], tuple[str, ...]], ...] = (
    (TP_Attn, ("q_proj", "k_proj", "v_proj", "o_proj")),
    (TP_MoE, ("gate", "experts")),
    (TP_MLP, ("gate_proj", "up_proj", "down_proj")),
)
"""Layer classes, and the members by which a module that they replace is recognised."""
_FAMILIES = (
    "deepseek_v3", "gemma", "granite", "llama", "minimax", "mistral", "mixtral", "olmo", "qwen2",
    "qwen3", "qwen3_moe", "seed_oss",
)  # fmt: skip
"""Model families of transformers that were tested: parallelized and original logits are equal."""
_UNSUPPORTED_OUTPUTS = ("output_router_logits", "output_attentions")
"""Settings of transformers' models that request outputs which the layers do not return."""


def parallelize(
    module: torch.nn.Module,
    group: Group = None,
    *,
    max_M: int,
    sequence_parallel: bool = False,
    keep_gathered: bool = False,
    expert_parallel: bool = False,
    collectives: Collectives | None = None,
) -> Collectives:
    """Replace attention, feed-forward and expert layers of a Llama-like model in place.

    ``TP_Attn``, ``TP_MLP``, and ``TP_MoE`` or ``EP_MoE`` replace the layers wherever they are in
    ``module``. Each rank keeps the other submodules whole. The model moves to this rank's device.

    Args:
        module: model with equal weights on all ranks, on any device.
        group: process group or 1-D mesh; ``None``: the world, or this process alone without
            ``torch.distributed``.
        max_M: largest number of tokens of a call, over all ranks.
        sequence_parallel: each layer takes only this rank's rows of the tokens. The calling model
            must distribute the tokens.
        keep_gathered: keep the tokens that the forward pass gathers. Otherwise the backward pass
            gathers them again.
        expert_parallel: distribute the experts over the ranks (``EP_MoE``), instead of sharding
            each expert (``TP_MoE``).
        collectives: ``TensorParallel`` or ``Collectives`` of this group to use instead of a new
            ``TensorParallel``.

    Returns:
        ``collectives``, or a new ``TensorParallel``. The layers share this object. Call its
        ``finalize`` after the last call of the model, or use it as a context manager.

    Raises:
        InvalidArgument: ``module`` contains no supported layer, is itself a supported layer, or has
            a layer that cannot be sharded; or its ``config`` requests outputs that the layers do
            not return. ``module`` is then unchanged. A later call of ``module`` that requests such
            outputs raises too.
    """
    if layer_class := _layer_class_of(module):
        expected = "a module that contains this layer, which is replaced in its parent. For the "
        expected += f"layer alone, call _init_parameters(module) of a new {layer_class.__name__}"
        raise InvalidArgument("parallelize", "module", type(module), expected)
    _check_outputs(module)
    moe_class = EP_MoE if expert_parallel else TP_MoE
    collectives = TensorParallel(max_M, group) if collectives is None else collectives
    replacements: list[tuple[torch.nn.Module, str, TensorParallelLayer]] = []
    layers: dict[torch.nn.Module, TensorParallelLayer] = {}  # several parents may share a module
    modules_to_search, seen = [module], {module}
    while modules_to_search:
        parent = modules_to_search.pop(0)
        for name, child in parent._modules.items():
            layer_class = None if child is None else _layer_class_of(child)
            if child is None or layer_class is None:
                if child is not None and child not in seen:
                    seen.add(child)
                    modules_to_search.append(child)
                continue  # do not search inside a replaced layer, for example its experts
            if child not in layers:
                layer_class = moe_class if layer_class is TP_MoE else layer_class
                layer = layers[child] = layer_class(
                    collectives=collectives,
                    sequence_parallel=sequence_parallel,
                    keep_gathered=keep_gathered,
                )
                layer._init_parameters(child)
                _check_hooks(name, child)
            replacements.append((parent, name, layers[child]))
    for family in sorted({_family_of(each) for each in layers} - {"", *_FAMILIES}):
        warn(
            f"parallelize: transformers' {family} was not tested. Layers are recognised by their "
            "member names, and a layer that computes more than the replacement would give wrong "
            "results. Compare the results with the original model.",
            TritonDistWarning,
        )
    if not replacements:
        expected = (
            "a module that contains attention (q_proj, k_proj, v_proj, o_proj), feed-forward "
            "(gate_proj, up_proj, down_proj) or expert (gate, experts) layers"
        )
        raise InvalidArgument("parallelize", "module", type(module), expected)
    for parent, name, layer in replacements:
        setattr(parent, name, layer)
    module.register_forward_pre_hook(_check_call, with_kwargs=True)
    module._ddp_params_and_buffers_to_ignore = _ShardsToIgnore(module, collectives)  # type: ignore[assignment]
    redirect_torch_clipping()
    module.to(collectives.device)
    return collectives


class _ShardsToIgnore(list[str]):
    """Names of sharded parameters that ``DistributedDataParallel`` (DDP) must not synchronise.

    If DDP's process group contains several tensor-parallel ranks of the model, DDP would replace
    their shards by the shards of one rank. Iteration yields the names only in this case.
    """

    def __init__(self, module: torch.nn.Module, collectives: Collectives) -> None:
        shards = owners_of_shards()
        super().__init__(name for name, each in module.named_parameters() if id(each) in shards)
        self._collectives = collectives

    def __iter__(self) -> Iterator[str]:
        # DistributedDataParallel.__init__ reads these names without passing its group.
        group = getattr(sys._getframe(1).f_locals.get("self"), "process_group", None)
        if group is None or self._collectives.group is None:
            return iter(())
        shared_ranks = set(dist.get_process_group_ranks(group))
        shared_ranks &= set(dist.get_process_group_ranks(self._collectives.group))
        if len(shared_ranks) < 2:
            return iter(())
        warn(
            f"DistributedDataParallel: its process group has the tensor-parallel ranks "
            f"{sorted(shared_ranks)}. It ignores their {len(self)} shards. Pass the process group "
            "of the data-parallel dimension.",
            TritonDistWarning,
        )
        return super().__iter__()


def _check_outputs(module: torch.nn.Module) -> None:
    """Raise if a config in the model requests outputs that the layers do not return."""
    for each in module.modules():
        for name in _UNSUPPORTED_OUTPUTS:
            if getattr(vars(each).get("config"), name, False):
                raise _unsupported_output("parallelize", f"module.config.{name}")


def _check_hooks(name: str, module: torch.nn.Module) -> None:
    """Raise if a replaced module has forward hooks, which would be lost."""
    for within, each in module.named_modules(prefix=name):
        if each._forward_hooks or each._forward_pre_hooks:
            expected = "no hooks: the replacement layer would not call them"
            raise InvalidArgument("parallelize", f"forward hooks of {within}", "present", expected)


def _check_call(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if a call requests outputs that the layers do not return."""
    for name in _UNSUPPORTED_OUTPUTS:
        if kwargs.get(name):
            raise _unsupported_output(type(module).__name__, name)


def _unsupported_output(function: str, argument: str) -> InvalidArgument:
    return InvalidArgument(function, argument, True, "False: the layers return only their result")


def _family_of(module: torch.nn.Module) -> str:
    """Return the model family of a module of transformers; an empty string for other modules."""
    _, found, rest = type(module).__module__.partition("transformers.models.")
    return rest.partition(".")[0] if found else ""


def _layer_class_of(module: torch.nn.Module) -> type[TensorParallelLayer] | None:
    for layer_class, members in _LAYER_CLASSES:
        if all(hasattr(module, member) for member in members):
            return layer_class
    return None
