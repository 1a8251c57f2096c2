"""Base class of the contexts of collectives without a GEMM, and checks of their tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.context import (
    DTYPE_NAMES,
    DTYPES,
    OpContext,
    agree_to_create,
    gradient_check,
    raise_first_error,
)
from triton_dist.kernels.common.exchange.buffer import VECTOR_BYTES, VECTOR_ELEMENTS, ExchangeBuffer
from triton_dist.runtime.ranks import Group, process_group_of


class CollectiveContext(OpContext[ExchangeBuffer], ABC):
    """Context manager that owns the symmetric memory of one kind of collective.

    Attributes:
        workspace_nbytes: bytes of the largest tensor of one launch. Larger tensors take several
            launches.
    """

    name: str

    def __init__(
        self, workspace_nbytes: int, local_world_size: int, group: dist.ProcessGroup | None
    ) -> None:
        super().__init__(self.name, group)
        self.workspace_nbytes = workspace_nbytes
        slot_bytes = self.slot_bytes(workspace_nbytes, self.num_ranks)
        packet_bytes = self.packet_bytes(workspace_nbytes, self.num_ranks)
        with self.allocating() as add:
            self.buffer = add(ExchangeBuffer(slot_bytes, group, self.name, packet_bytes))
        self.world_size = self.num_ranks
        self.local_world_size = min(local_world_size, self.num_ranks)

    @staticmethod
    @abstractmethod
    def slot_bytes(nbytes: int, num_ranks: int) -> int:
        """Return the bytes of a slot (one of two receive buffers), for tensors of ``nbytes``."""

    @staticmethod
    def packet_bytes(nbytes: int, num_ranks: int) -> int:
        """Return the maximum bytes of a tensor that is sent in packets. 0 disables packets."""
        return 0


_ContextT = TypeVar("_ContextT", bound=CollectiveContext)


def create(
    ctx_type: type[_ContextT],
    function: str,
    workspace_nbytes: int,
    rank: int,
    world_size: int,
    local_world_size: int,
    group: Group,
) -> _ContextT:
    """Create a context of class ``ctx_type`` for ``function``. Collective over ``group``.

    Raise the errors of ``agree_to_create`` and of the allocation.
    """
    group = process_group_of(group)
    agree_to_create(
        function, f"a {ctx_type.name}", group, rank,
        {"world_size": world_size, "local_world_size": local_world_size},
        {"workspace_nbytes": workspace_nbytes}, (),
    )  # fmt: skip
    return ctx_type(workspace_nbytes, local_world_size, group)


def size_text(x: torch.Tensor, *_: Any, **__: Any) -> str:
    """Return a text that, like the tuning key, must be equal on all ranks (``agree_fn``)."""
    return f"x of {x.numel()} elements"


def fits_vectors(x: torch.Tensor, elements: int) -> bool:
    """Return whether kernels can read x, in shards of ``elements`` elements, in 16-byte vectors."""
    return elements % VECTOR_ELEMENTS == 0 and x.data_ptr() % VECTOR_BYTES == 0


def check_tensor(function: str, argument: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raise ``InvalidArgument`` if our kernels cannot read and write a tensor."""
    try:
        is_known = tensor.dtype in DTYPES
    except (AttributeError, TypeError):
        is_known = False
    if not is_known:
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgument(function, argument, tensor, "a tensor")
        raise InvalidArgument(function, f"{argument}.dtype", tensor.dtype, DTYPE_NAMES)
    if tensor.device != device:
        expected = f"the context's {device}"
        raise InvalidArgument(function, f"{argument}.device", tensor.device, expected)
    if not tensor.is_contiguous():
        expected = f"a contiguous tensor; call {argument}.contiguous()"
        raise InvalidArgument(function, f"{argument}.stride()", tensor.stride(), expected)
    if tensor.numel() == 0:
        raise InvalidArgument(function, f"{argument}.shape", tuple(tensor.shape), "some elements")
    if tensor.requires_grad:
        raise_first_error(function, [gradient_check(argument, tensor)])


def check_output(
    function: str,
    output: torch.Tensor,
    x: torch.Tensor,
    numel: int,
    device: torch.device,
    allowed_offset: int | None = None,
) -> None:
    """Raise ``InvalidArgument`` if ``output`` cannot hold a result of ``numel`` elements.

    ``output`` must not share memory with x. Exception: x may begin ``allowed_offset`` bytes after
    the begin of ``output``.
    """
    check_tensor(function, "output", output, device)
    if output.dtype != x.dtype:
        raise InvalidArgument(function, "output.dtype", output.dtype, f"x's {x.dtype}")
    if output.numel() != numel:
        raise InvalidArgument(function, "output.shape", tuple(output.shape), f"{numel} elements")
    output_begin, x_begin = output.data_ptr(), x.data_ptr()
    # Fake tensors have address 0.
    overlaps = 0 < output_begin < x_begin + x.nbytes and x_begin < output_begin + output.nbytes
    if overlaps and x_begin - output_begin != allowed_offset:
        allowed = "" if allowed_offset is None else f", or x at its byte {allowed_offset}"
        expected = f"memory apart from x{allowed}"
        raise InvalidArgument(function, "output", "memory that x shares", expected)
