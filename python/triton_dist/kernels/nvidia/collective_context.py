"""What a plain collective keeps between calls, and what it refuses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from triton_dist.errors import ContextFinalized, InvalidArgument, RankDisagreement
from triton_dist.kernels.nvidia.exchange import ExchangeBuffer, shard_elements
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for
from triton_dist.runtime.triton_compat import is_interpreting

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class CollectiveContext(ABC):
    """Symmetric memory for one kind of collective. A context manager.

    Attributes:
        workspace_nbytes: the largest tensor that one launch serves; larger ones take several.
    """

    name: str
    """Of the collective, for errors."""

    def __init__(
        self, workspace_nbytes: int, local_world_size: int, group: dist.ProcessGroup | None
    ) -> None:
        self.workspace_nbytes, self.group = workspace_nbytes, group
        size = dist.get_world_size(group) if dist.is_initialized() else 1
        self._buffer: ExchangeBuffer | None = ExchangeBuffer(
            self.slot_bytes(workspace_nbytes, size),
            group,
            self.name,
            self.packet_bytes(workspace_nbytes, size),
        )
        self.rank, self.num_ranks = self._buffer.rank, self._buffer.num_ranks
        self.world_size = self.num_ranks
        self.local_world_size = min(local_world_size, self.num_ranks)
        self.device = current_device()

    @classmethod
    @abstractmethod
    def slot_bytes(cls, workspace_nbytes: int, num_ranks: int) -> int:
        """What a slot has to hold."""

    @classmethod
    def packet_bytes(cls, workspace_nbytes: int, num_ranks: int) -> int:
        """The largest tensor that travels in packets; 0: none does."""
        return 0

    @property
    def buffer(self) -> ExchangeBuffer:
        if self._buffer is None:
            raise ContextFinalized(type(self).__name__)
        return self._buffer

    def reset(self) -> None:
        """Bring the flags of all ranks back to one state after a call that failed on some rank.
        Collective."""
        self.buffer.reset()

    def barrier_all(self) -> None:
        """Line up all ranks on their current streams."""
        group_for(self.group).align()

    def sleep(self, straggler_option: tuple[int, int] | None) -> None:
        """``(rank, cycles)``: if this is that rank, keep the stream busy for so long."""
        if straggler_option is not None and straggler_option[0] == self.rank:
            self.device.sleep(straggler_option[1])

    def finalize(self) -> None:
        """Free the symmetric memory; idempotent. Collective: it waits until every rank has
        come here."""
        if self._buffer is None:
            return
        self.device.synchronize()
        group_for(self.group).barrier(f"finalize of the {self.name} context")
        self.free()

    def __enter__(self: _C) -> _C:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if failure is None:
            self.finalize()
        elif self._buffer is not None:  # peers may never come: free without them
            self.free()

    def free(self) -> None:
        """The same without waiting for anybody."""
        if self._buffer is not None:
            self._buffer.free()
        self._buffer = None


_C = TypeVar("_C", bound=CollectiveContext)


def create(
    kind: type[_C],
    function: str,
    workspace_nbytes: int,
    rank: int,
    world_size: int,
    local_world_size: int,
    group: dist.ProcessGroup | None,
) -> _C:
    """A context of ``kind``. Collective over ``group``; ``function`` is who asks, for errors.

    Raises:
        InvalidArgument: on every rank, for a value that cannot work.
        RankDisagreement: ranks ask for different contexts.
        SymmetricMemoryFull: on every rank, if some rank has too little memory.
    """
    ranks = group_for(group)
    refusal = _refusal(
        function, workspace_nbytes, rank, world_size, local_world_size, ranks.rank, ranks.size
    )
    asked = ranks.gather(
        f"creation of a {kind.name} context", (workspace_nbytes, str(refusal or ""))
    )
    if refusal is not None:
        raise refusal
    if len(set(asked)) > 1:
        raise RankDisagreement(
            f"workspace_nbytes, or validity, of a {kind.name} context", dict(enumerate(asked))
        )
    return kind(workspace_nbytes, local_world_size, group)


def _refusal(
    function: str,
    workspace_nbytes: int,
    rank: int,
    world_size: int,
    local_world_size: int,
    own_rank: int,
    size: int,
) -> InvalidArgument | None:
    def refuse(argument: str, value: object, expected: str) -> InvalidArgument:
        return InvalidArgument(function, argument, value, expected)

    if world_size != size:
        return refuse("world_size", world_size, f"{size}, the size of the group")
    if rank != own_rank:
        return refuse("rank", rank, f"{own_rank}, this process's rank in the group")
    if local_world_size < 1:
        return refuse("local_world_size", local_world_size, "at least 1")
    if workspace_nbytes < 1:
        return refuse("workspace_nbytes", workspace_nbytes, "at least 1")
    if current_device().name == "cpu" and not is_interpreting():
        return refuse(
            "TRITON_INTERPRET", "unset", "1, set before kernels are imported, to run on CPU ranks"
        )
    return None


def recover(x: torch.Tensor, ctx: CollectiveContext, *_: Any, **__: Any) -> None:
    """``recover_fn`` of a collective: bring the context of all ranks back to one state after a
    candidate failed on some rank."""
    ctx.reset()


def exact_size(x: torch.Tensor, *_: Any, **__: Any) -> str:
    """``agree_fn`` of a collective: what ranks have to agree about besides the key."""
    return f"x of {x.numel()} elements"


def shard_bytes(nbytes: int, num_ranks: int) -> int:
    """Most bytes that a shard of ``nbytes`` bytes takes in a slot, whatever the dtype."""
    return max(shard_elements(-(-nbytes // (item * num_ranks))) * item for item in (2, 4))


def check_tensor(function: str, argument: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Refuse what no kernel here can read or write.

    Raises:
        InvalidArgument: the call cannot work.
    """
    if tensor.dtype not in DTYPES:
        expected = "torch.float16, torch.bfloat16 or torch.float32"
        raise InvalidArgument(function, f"{argument}.dtype", tensor.dtype, expected)
    if tensor.device != device:
        expected = f"the context's {device}"
        raise InvalidArgument(function, f"{argument}.device", tensor.device, expected)
    if not tensor.is_contiguous():
        expected = f"a contiguous tensor; call {argument}.contiguous()"
        raise InvalidArgument(function, f"{argument}.stride()", tensor.stride(), expected)
    if tensor.numel() == 0:
        raise InvalidArgument(function, f"{argument}.shape", tuple(tensor.shape), "some elements")


def check_output(
    function: str, output: torch.Tensor, x: torch.Tensor, numel: int, device: torch.device
) -> None:
    """The same for a tensor that the caller gives for the result of ``numel`` elements.

    Raises:
        InvalidArgument: the call cannot work.
    """
    check_tensor(function, "output", output, device)
    if output.dtype != x.dtype:
        raise InvalidArgument(function, "output.dtype", output.dtype, f"x's {x.dtype}")
    if output.numel() != numel:
        raise InvalidArgument(function, "output.shape", tuple(output.shape), f"{numel} elements")
