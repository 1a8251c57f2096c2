"""Sum gradients over ranks and clip their norm, for a model after ``parallelize``."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from triton_dist._warn import warn
from triton_dist.errors import TritonDistWarning
from triton_dist.layers.nvidia.layer import TensorParallelLayer, owners_of_shards
from triton_dist.layers.nvidia.stock_weights import local_part
from triton_dist.layers.nvidia.tp_attn import TP_Attn


def sum_gradients(module: torch.nn.Module) -> None:
    """Sum each gradient over ranks if every rank computed only an addend of it. Collective.

    Call this function between backward and the optimiser step, also with FSDP2 or DDP over another
    dimension of the mesh. It always sums the gradients of q and k norms, and of key-value heads
    that several ranks have. With sequence-parallel layers, it sums the gradients of all parameters
    except sharded ones, because each rank computed them from its own tokens only.
    """
    layers = [each for each in module.modules() if isinstance(each, TensorParallelLayer)]
    done = set[torch.Tensor | None]()
    for layer in layers:
        done.update(getattr(layer, name) for name in layer.sharded_names)
        if isinstance(layer, TP_Attn):
            layer.sum_partial_gradients()
            done.update(layer.norm_parameters())
    torch_collectives = next(
        (layer.torch_collectives for layer in layers if layer.sequence_parallel), None
    )
    if torch_collectives is not None:
        for parameter in module.parameters():
            if parameter.grad is not None and parameter not in done:
                torch_collectives.all_reduce(local_part(parameter.grad))


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients in place if their norm over all ranks exceeds ``max_norm``. Collective.

    Call this function after ``sum_gradients``. The norm counts each shard once, and each parameter
    that is equal on all ranks once.

    Args:
        parameters: model after ``parallelize``, or its parameters; also with FSDP2 or DDP over
            another mesh dimension.
        max_norm: largest norm after the scaling.
        norm_type: p of the p-norm; ``math.inf``: the largest absolute value.
        error_if_nonfinite: raise if the norm is not finite.
        foreach: ignored; an argument of ``torch.nn.utils.clip_grad_norm_``.

    Returns:
        The norm before scaling, at least fp32, equal on all ranks.

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.
    """
    if isinstance(parameters, torch.nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    with_gradients = [(each, each.grad) for each in parameters if each.grad is not None]
    owners = owners_of_shards()
    layer = next((owners[id(each)] for each, _ in with_gradients if id(each) in owners), None)
    size = 1 if layer is None else layer.world_size
    is_max = norm_type == math.inf
    totals: dict[tuple[dist.ProcessGroup, ...], torch.Tensor] = {}
    """Sum of ``|gradient| ** p``, or the maximum for p = inf, by the groups that shard it."""
    for parameter, gradient in with_gradients:
        value = _norm_power(local_part(gradient), norm_type)
        owner = owners.get(id(parameter))
        if owner is None and not is_max:
            value = value / size  # the sum over ranks below counts the value ``size`` times
        elif isinstance(owner, TP_Attn) and parameter is not owner.wo and not is_max:
            replicated = _norm_power(owner.replicated_rows(gradient), norm_type)
            value = value - replicated * (1 - 1 / owner.kv_replicas)
        groups = _sharding_groups(gradient)
        before = totals.get(groups, torch.zeros_like(value))
        totals[groups] = torch.maximum(before, value) if is_max else before + value
    if not totals:
        return torch.zeros(())
    reduce = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
    for groups, value in totals.items():
        for group in groups:
            dist.all_reduce(value, reduce, group)
    values = torch.stack(list(totals.values()))
    norm = values.max() if is_max else values.sum()
    if layer is not None and size > 1:
        dist.all_reduce(norm, reduce, layer.group)
    if not is_max:
        norm = norm ** (1 / norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"clip_grad_norm_: the norm of order {norm_type} of the gradients is {norm.item()}. "
            "To scale the gradients nevertheless, pass error_if_nonfinite=False."
        )
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([local_part(gradient) for _, gradient in with_gradients], scale)
    return norm


def redirect_torch_clipping() -> None:
    """Make ``torch.nn.utils.clip_grad_norm_`` call ``clip_grad_norm_`` if a parameter is sharded.

    Trainers call torch's function, which would compute a different norm on each rank. Parameters
    that are equal on all ranks would then diverge without an error.
    """
    original = torch.nn.utils.clip_grad_norm_
    if hasattr(original, "_handles_shards"):
        return

    @functools.wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        all_parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if owners_of_shards().keys().isdisjoint(map(id, all_parameters)):
            return original(all_parameters, *args, **kwargs)
        warn(
            "torch.nn.utils.clip_grad_norm_ would scale the gradients of each rank by a different "
            "factor. triton_dist.layers.nvidia.clip_grad_norm_ was called instead; call it "
            "directly.",
            TritonDistWarning,
        )
        return clip_grad_norm_(all_parameters, *args, **kwargs)

    clip._handles_shards = True  # type: ignore[attr-defined]
    torch.nn.utils.clip_grad_norm_ = clip


def _norm_power(gradient: torch.Tensor, p: float) -> torch.Tensor:
    """Return the sum of ``|gradient| ** p``, or the maximum for p = inf; in fp32 or fp64."""
    if not gradient.numel():
        return torch.zeros((), device=gradient.device)
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, p, dtype=dtype)
    return norm if p == math.inf else norm**p


def _sharding_groups(tensor: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    return tuple(
        mesh.get_group(dim)
        for dim, placement in enumerate(tensor.placements)
        if not isinstance(placement, Replicate)
    )
