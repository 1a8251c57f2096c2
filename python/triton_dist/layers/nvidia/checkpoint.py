"""Save and load a model after ``parallelize``, under the weight names of the original model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from triton_dist.errors import InvalidArgument
from triton_dist.layers.nvidia.layer import TensorParallelLayer
from triton_dist.layers.nvidia.stock_weights import (
    StockWeight,
    distributed_like,
    saves_shards,
    undistributed,
)

_WRAPPER_NAMES = {"_checkpoint_wrapped_module", "_orig_mod"}
"""Parts of module paths that torch's wrappers add, and that names in state dicts do not have."""


def gather_state_dict(module: torch.nn.Module) -> dict[str, Any]:
    """Gather all weights of a model after ``parallelize``. Collective.

    ``module.state_dict()`` does the same, but parameters that FSDP2 shards remain ``DTensor``.
    Names and shapes are equal to the original model's, so ``original.load_state_dict`` and
    ``save_pretrained(folder, state_dict=...)`` accept the result.

    Returns:
        Tensors on the CPU, on every rank.

    Raises:
        RankTimeout: a rank did not call this function.
    """
    return {
        name: undistributed(value).detach().cpu() if isinstance(value, torch.Tensor) else value
        for name, value in _unwrapped(module).state_dict().items()
    }


class TrainingState(Stateful):
    """The state of a model and its optimiser for ``torch.distributed.checkpoint``.

    ``dcp.save({"app": TrainingState(model, optimizer)}, checkpoint_id=folder)`` writes each shard
    once. ``dcp.load`` reads the checkpoint, also on another number of ranks. Weights have the names
    of the original model. To load a checkpoint without optimiser state, pass no optimiser.

    Args:
        model: model after ``parallelize``, also with FSDP2 or DDP over another mesh dimension.
        optimizer: optimiser of the model's parameters; ``None``: save or load only weights. Before
            a load into an optimiser that has made no step, all gradients must be ``None``.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        self.model, self.optimizer = _unwrapped(model), optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return weights and optimiser state, as ``DTensor`` if sharded. Collective.

        Raises:
            InvalidArgument: the optimiser's state of a sharded parameter has neither the shape of
                this rank's shard nor one element.
        """
        with _saving_shards():
            state: dict[str, Any] = {"model": self.model.state_dict()}
        if self.optimizer is None:
            return state
        optimizer: Any = get_optimizer_state_dict(self.model, self.optimizer)
        for shard in _shards_of(self.model):
            weights = shard.weights(torch.empty(shard.parameter.shape, device="meta"))
            for group in optimizer["param_groups"]:
                if shard.name in group["params"]:
                    group["params"].remove(shard.name)
                    group["params"] += weights
            collectives = shard.layer.torch_collectives
            for key, value in optimizer["state"].pop(shard.name, {}).items():
                is_shard = shard.has_shape_of(value)
                weights = shard.weights(undistributed(value)) if is_shard else weights
                for name, weight in weights.items():
                    stock = weight.distributed(collectives, collectives.mesh) if is_shard else value
                    optimizer["state"].setdefault(name, {})[key] = stock
        return {**state, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of ``state_dict``, possibly of another number of ranks. Collective.

        Raises:
            RuntimeError: names or shapes of weights differ, or a weight is another rank's shard.
            InvalidArgument: shapes of the optimiser's state differ, the state is incomplete, or it
                has another rank's shard.
        """
        saved = state_dict.get("optimizer", {"state": {}, "param_groups": []})
        wanted = [] if self.optimizer is None else self.optimizer.param_groups
        if len(saved["param_groups"]) < len(wanted):
            raise _missing(f"param_groups[{len(saved['param_groups'])}]")
        with _saving_shards():
            self.model.load_state_dict(state_dict["model"])
        if self.optimizer is None:
            return
        optimizer: Any = get_optimizer_state_dict(self.model, self.optimizer)
        state_by_name = dict(saved["state"])
        for shard in _shards_of(self.model):
            weights = shard.weights(torch.empty(shard.parameter.shape, device="meta"))
            loaded = [state_by_name.pop(name, {}) for name in weights]
            own = optimizer["state"].get(shard.name, {})
            for key, value in own.items():
                for name, values in zip(weights, loaded, strict=True):
                    if key not in values:
                        raise _missing(f"state of {name}, {key}")
                if not shard.has_shape_of(value):
                    own[key] = loaded[0][key]
                    continue
                filled = torch.empty(value.shape, dtype=value.dtype, device=value.device)
                filling = shard.weights(filled).items()
                for (name, weight), values in zip(filling, loaded, strict=True):
                    weight.fill(values[key], shard.layer.torch_collectives, f"{name}.{key}")
                own[key] = distributed_like(filled, value)
            if own:
                state_by_name[shard.name] = own
        groups = [
            {**loaded, "params": own["params"]}
            for loaded, own in zip(saved["param_groups"], optimizer["param_groups"], strict=True)
        ]
        new_state: Any = {"state": state_by_name, "param_groups": groups}
        set_optimizer_state_dict(self.model, self.optimizer, new_state)


@dataclass(frozen=True)
class _Shard:
    """A parameter of a layer: ``name`` in the model, ``short_name`` in ``layer``."""

    layer: TensorParallelLayer
    prefix: str
    short_name: str
    parameter: torch.Tensor

    @property
    def name(self) -> str:
        return self.prefix + self.short_name

    def has_shape_of(self, value: object) -> bool:
        if not isinstance(value, torch.Tensor) or value.shape == self.parameter.shape:
            return isinstance(value, torch.Tensor)
        # Some optimiser state differs between ranks and is not sharded: Adafactor's factors.
        if value.numel() > 1:
            where, expected = f"optimizer's state of {self.name}", tuple(self.parameter.shape)
            raise InvalidArgument(
                "TrainingState", f"{where}.shape", tuple(value.shape), f"{expected} or one value"
            )
        return False

    def weights(self, tensor: torch.Tensor) -> dict[str, StockWeight]:
        """Return views of ``tensor``, one for each original weight, by names in the original model.

        ``tensor`` has the parameter's shape.
        """
        weights = self.layer._stock_weights(self.short_name, tensor)
        return {self.prefix + weight.name: weight for weight in weights}


def _unwrapped(model: torch.nn.Module) -> Any:
    """Return the model inside ``DistributedDataParallel`` and ``torch.compile``."""
    ddp = torch.nn.parallel.DistributedDataParallel
    while isinstance(model, ddp) or "_orig_mod" in model._modules:
        (model,) = model.children()
    return model


def _missing(what: str) -> InvalidArgument:
    expected = "the state of an equal optimiser. TrainingState(model) loads only the weights"
    return InvalidArgument("load_state_dict", f"optimizer's {what}", None, expected)


def _shards_of(model: torch.nn.Module) -> Iterator[_Shard]:
    for module_path, layer in model.named_modules():
        if isinstance(layer, TensorParallelLayer):
            parts = [part for part in module_path.split(".") if part and part not in _WRAPPER_NAMES]
            prefix = "".join(f"{part}." for part in parts)
            for name, parameter in layer.named_parameters(recurse=False):
                yield _Shard(layer, prefix, name, parameter)


@contextmanager
def _saving_shards() -> Iterator[None]:
    token = saves_shards.set(True)
    try:
        yield
    finally:
        saves_shards.reset(token)
