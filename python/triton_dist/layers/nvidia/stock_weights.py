"""Map the parameters of a tensor-parallel layer to the weights of the module that it replaced.

The replaced module is the stock module. A parameter of a layer holds this rank's shards of one or
more stock weights: ``wqkv`` holds shards of the weights of ``q_proj``, ``k_proj`` and ``v_proj``.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from triton_dist.errors import InvalidArgument
from triton_dist.layers.nvidia.tensor_parallel import Collectives

E4M3 = torch.float8_e4m3fn

saves_shards: ContextVar[bool] = ContextVar("saves_shards", default=False)
"""Whether ``state_dict`` of a layer returns weights as ``DTensor`` instead of gathered tensors."""


@dataclass(frozen=True)
class StockWeight:
    """This rank's shard of a stock weight, as a view of a parameter.

    Attributes:
        name: name in the stock module, such as ``q_proj.weight``.
        shard: view of the parameter, or of a tensor with its shape.
        dim: dimension in which the weight is sharded; ``None``: the weight is equal on all ranks.
        replicas: number of consecutive ranks that have the same part of ``dim``: the same shard, or
            different parts of ``column_dim``.
        is_pair: dimension ``dim - 1`` of ``shard`` has length 2. The stock weight has one dimension
            for ``dim - 1`` and ``dim``: gate, then up of stacked experts.
        unpadded_size: length of ``dim`` in the stock weight if the last shards are padded with
            zeros, else ``None``.
        scalar_shape: shape of a stock weight with one element, else ``None``. All elements of
            ``shard`` are equal to this element.
        owner: the only rank that has the weight, or the first of ``column_shards`` ranks; ``None``:
            all ranks have a shard. On other ranks, ``shard`` is on the meta device.
        column_shards: number of consecutive ranks over which ``column_dim`` is sharded.
        column_dim: second dimension in which the weight is sharded, or ``None``.
    """

    name: str
    shard: torch.Tensor
    dim: int | None
    replicas: int = 1
    is_pair: bool = False
    unpadded_size: int | None = None
    scalar_shape: torch.Size | None = None
    owner: int | None = None
    column_shards: int = 1
    column_dim: int | None = None

    def gathered(self, collectives: Collectives) -> torch.Tensor:
        """Return the stock weight on this rank's device. Collective."""
        return self._without_pair(self._gathered_shards(collectives))

    def distributed(self, collectives: Collectives, mesh: DeviceMesh | None) -> torch.Tensor:
        """Return the weight as a ``DTensor`` over ``mesh``. Collective.

        A pair keeps its two dimensions. Without a mesh, and for replicated, padded or unsharded
        weights, return the gathered tensor.
        """
        if mesh is None or self.dim is None or self.replicas > 1 or self.unpadded_size is not None:
            return self._gathered_shards(collectives)
        return DTensor.from_local(self.shard.detach(), mesh, [Shard(self.dim)], run_check=False)

    def fill(self, weight: torch.Tensor, collectives: Collectives, where: str) -> None:
        """Copy this rank's shard of ``weight`` to ``shard``.

        ``weight`` is a result of ``gathered`` or ``distributed``; ``where`` is its name in errors.

        Raises:
            InvalidArgument: ``weight`` has a wrong shape, or is the shard of another rank.
        """
        shards = collectives.num_ranks // self.replicas
        shape = list(self.shard.shape if self.scalar_shape is None else self.scalar_shape)
        if self.dim is not None:
            shape[self.dim] = self.unpadded_size or shape[self.dim] * shards
        if self.column_dim is not None:
            shape[self.column_dim] *= self.column_shards
        whole = self._without_pair(torch.empty(shape, device="meta"))
        if weight.shape not in (whole.shape, torch.Size(shape)):
            expected = f"{tuple(whole.shape)}"
            raise InvalidArgument(
                "load_state_dict", f"{where}.shape", tuple(weight.shape), expected
            )
        if weight.dtype != self.shard.dtype and E4M3 in (weight.dtype, self.shard.dtype):
            expected = f"{self.shard.dtype}: fp8 weights are not converted"
            raise InvalidArgument("load_state_dict", f"{where}.dtype", weight.dtype, expected)
        if isinstance(weight, DTensor):
            # After torch.load, a DTensor's mesh coordinate is the coordinate of the saving rank.
            mesh = weight.device_mesh
            dims = [getattr(each, "dim", None) for each in weight.placements]
            found = [*(mesh.get_coordinate() or ()), mesh.size(), *dims]
            expected_shard = [collectives.rank, collectives.num_ranks, self.dim]
            if found != expected_shard:
                argument = f"[rank, number of ranks, dimension] of the shard of {where}"
                raise InvalidArgument("load_state_dict", argument, found, f"{expected_shard}")
            part = weight.to_local()
        else:
            part = weight.reshape(shape)
            column_index = collectives.rank % self.column_shards
            for dim, index in (
                (self.column_dim, column_index),
                (self.dim, collectives.rank // self.replicas),
            ):
                if dim is not None:
                    size = self.shard.shape[dim]
                    part = part.movedim(dim, 0)[size * index : size * (index + 1)].movedim(0, dim)
        if part.shape != self.shard.shape and self.dim is not None:
            self.shard.zero_()
            self.shard.narrow(self.dim, 0, part.shape[self.dim]).copy_(part)
        else:
            self.shard.copy_(part)

    def _without_pair(self, whole: torch.Tensor) -> torch.Tensor:
        dim = self.dim if self.column_dim is None else self.column_dim
        return whole.flatten(dim - 1, dim) if self.is_pair and dim else whole

    def _gathered_shards(self, collectives: Collectives) -> torch.Tensor:
        shard = self.shard.detach()
        if self.scalar_shape is not None:
            shard = shard.flatten()[:1].view(self.scalar_shape)
        elif self.owner is not None and self.dim is not None:
            shard = shard.narrow(self.dim, 0, self.unpadded_size or shard.shape[self.dim])
        if self.owner is not None:
            if self.column_dim is None:
                return collectives.broadcast(shard, self.owner)
            owners = range(self.owner, self.owner + self.column_shards)
            return torch.cat(
                [collectives.broadcast(shard, each) for each in owners], self.column_dim
            )
        if self.dim is None or self.scalar_shape is not None:
            return shard
        if collectives.num_ranks == 1:
            return shard.narrow(self.dim, 0, self.unpadded_size or shard.shape[self.dim])
        # gloo has no fp8.
        as_bytes = shard.view(torch.uint8) if shard.itemsize == 1 else shard
        gathered = collectives.all_gather(as_bytes.movedim(self.dim, 0)).chunk(
            collectives.num_ranks
        )
        shards = [each.movedim(0, self.dim) for each in gathered]
        if self.column_dim is not None:
            for first in range(0, collectives.num_ranks, self.replicas):
                columns = shards[first : first + self.column_shards]
                shards[first] = torch.cat(columns, self.column_dim)
        whole = torch.cat(shards[:: self.replicas], self.dim)
        return whole.narrow(self.dim, 0, self.unpadded_size or whole.shape[self.dim]).view(
            shard.dtype
        )


def undistributed(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a ``DTensor``, such as a parameter that FSDP2 shards; return other tensors."""
    whole: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole


def distributed_like(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return ``whole`` with the mesh and placements of ``like``, if ``like`` is a ``DTensor``.

    ``whole`` must be equal on all ranks of the mesh.
    """
    if not isinstance(like, DTensor):
        return whole
    # src_data_rank=None: each rank takes its shard of its own copy, without communication.
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of this rank's part of a ``DTensor``; return other tensors unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
