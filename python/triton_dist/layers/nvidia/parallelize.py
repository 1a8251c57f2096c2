"""Replace the layers of a stock model by tensor-parallel layers."""

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

_KINDS: tuple[tuple[type[TensorParallelLayer], tuple[str, ...]], ...] = (
    (TP_Attn, ("q_proj", "k_proj", "v_proj", "o_proj")),
    (TP_MoE, ("gate", "experts")),
    (TP_MLP, ("gate_proj", "up_proj", "down_proj")),
)
"""Layers, and the members that identify the modules they replace."""
_FAMILIES = (
    "deepseek_v3", "gemma", "granite", "llama", "minimax", "mistral", "mixtral", "olmo", "qwen2",
    "qwen3", "qwen3_moe", "seed_oss",
)  # fmt: skip
"""Families of transformers whose logits were compared with the stock model."""
_UNSUPPORTED_OUTPUTS = ("output_router_logits", "output_attentions")
"""Settings of transformers' models that request more outputs of a layer than its result."""


def parallelize(
    module: torch.nn.Module,
    group: Group = None,
    *,
    max_M: int,
    sequence_parallel: bool = False,
    keep_gathered: bool = False,
    expert_parallel: bool = False,
    ranks: Collectives | None = None,
) -> Collectives:
    """Replace attention, feed-forward and expert layers of a Llama-like model in place.

    ``TP_Attn``, ``TP_MLP``, and ``TP_MoE`` or ``EP_MoE`` replace the layers wherever they are in
    ``module``. The other submodules are kept whole on each rank. Everything moves to this rank's
    device.

    Args:
        module: model with equal weights on all ranks, on any device.
        group: process group or 1-D mesh; ``None``: the world, or this process alone.
        max_M: largest number of tokens of a call, over all ranks.
        sequence_parallel: each layer takes this rank's rows of the tokens. The model itself must
            distribute the tokens.
        keep_gathered: keep gathered tokens for the backward instead of gathering them again.
        expert_parallel: distribute the experts over the ranks (``EP_MoE``), instead of sharding
            each expert (``TP_MoE``).
        ranks: ``TensorParallel`` or ``Collectives`` of this group to use instead of a new
            ``TensorParallel``.

    Returns:
        ``ranks``, or a new ``TensorParallel``, which is a context manager. The layers share it.
        Call ``finalize`` after the last call.

    Raises:
        InvalidArgument: ``module`` contains no supported layer or is one itself, or a layer cannot
            be sharded, or its ``config`` requests outputs that the layers do not return. ``module``
            is then unchanged. A later call of the module that requests these outputs raises too.
    """
    if kind := _kind_of(module):
        expected = "a module that contains this layer, which is replaced in its parent. For the "
        expected += f"layer alone, call _init_parameters(module) of a new {kind.__name__}"
        raise InvalidArgument("parallelize", "module", type(module), expected)
    _check_outputs(module)
    of_experts = EP_MoE if expert_parallel else TP_MoE
    ranks = TensorParallel(max_M, group) if ranks is None else ranks
    replacements: list[tuple[torch.nn.Module, str, TensorParallelLayer]] = []
    layers: dict[torch.nn.Module, TensorParallelLayer] = {}  # a module may be in several places
    modules_to_search, seen = [module], {module}
    while modules_to_search:
        parent = modules_to_search.pop(0)
        for name, child in parent._modules.items():
            kind = None if child is None else _kind_of(child)
            if child is None or kind is None:
                if child is not None and child not in seen:
                    seen.add(child)
                    modules_to_search.append(child)
                continue  # do not search inside a replaced layer, for example its experts
            if child not in layers:
                kind = of_experts if kind is TP_MoE else kind
                layer = layers[child] = kind(
                    ranks=ranks, sequence_parallel=sequence_parallel, keep_gathered=keep_gathered
                )
                layer._init_parameters(child)
                _check_hooks(name, child)
            replacements.append((parent, name, layers[child]))
    for family in sorted({_family_of(each) for each in layers} - {"", *_FAMILIES}):
        warn(
            f"parallelize: transformers' {family} was not tested. Layers are recognised by their "
            "member names, and a layer that computes more than the replacement would give wrong "
            "results. Compare the results with the stock model.",
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
    module._ddp_params_and_buffers_to_ignore = _ShardsToIgnore(module, ranks)  # type: ignore[assignment]
    redirect_torch_clipping()
    module.to(ranks.device)
    return ranks


class _ShardsToIgnore(list[str]):
    """Names of shards, for ``DistributedDataParallel``.

    If its process group contains several tensor-parallel ranks of the model, it would replace their
    shards by the shards of one rank. Iteration yields the names only in this case, and DDP then
    ignores the shards.
    """

    def __init__(self, module: torch.nn.Module, ranks: Collectives) -> None:
        shards = owners_of_shards()
        super().__init__(name for name, each in module.named_parameters() if id(each) in shards)
        self._ranks = ranks

    def __iter__(self) -> Iterator[str]:
        # DistributedDataParallel.__init__ reads these names without passing its group.
        group = getattr(sys._getframe(1).f_locals.get("self"), "process_group", None)
        if group is None or self._ranks.group is None:
            return iter(())
        common = set(dist.get_process_group_ranks(group))
        common &= set(dist.get_process_group_ranks(self._ranks.group))
        if len(common) < 2:
            return iter(())
        warn(
            f"DistributedDataParallel: its process group has the tensor-parallel ranks "
            f"{sorted(common)}. It ignores their {len(self)} shards. Pass the process group of the "
            "data-parallel dimension.",
            TritonDistWarning,
        )
        return super().__iter__()


def _check_outputs(module: torch.nn.Module) -> None:
    """Raise if the model requests outputs that would silently be missing, such as a router loss."""
    for each in module.modules():
        for name in _UNSUPPORTED_OUTPUTS:
            if getattr(vars(each).get("config"), name, False):
                raise _unsupported_output("parallelize", f"module.config.{name}")


def _check_hooks(name: str, module: torch.nn.Module) -> None:
    """Raise if a replaced module has forward hooks, which would be lost."""
    for within, each in module.named_modules(prefix=name):
        if each._forward_hooks or each._forward_pre_hooks:
            expected = "no hooks: the replacement layer would not call them"
            raise InvalidArgument("parallelize", f"forward hooks of {within}", "there", expected)


def _check_call(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if a call requests outputs that the layers do not return."""
    for name in _UNSUPPORTED_OUTPUTS:
        if kwargs.get(name):
            raise _unsupported_output(type(module).__name__, name)


def _unsupported_output(function: str, argument: str) -> InvalidArgument:
    return InvalidArgument(function, argument, True, "False: the layers return only their result")


def _family_of(module: torch.nn.Module) -> str:
    """Return the transformers model family of a module; empty for other modules."""
    _, found, rest = type(module).__module__.partition("transformers.models.")
    return rest.partition(".")[0] if found else ""


def _kind_of(module: torch.nn.Module) -> type[TensorParallelLayer] | None:
    for kind, members in _KINDS:
        if all(hasattr(module, member) for member in members):
            return kind
    return None
