"""Context of all-reduce, and its algorithms as an enum."""

from __future__ import annotations

import enum

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.collective import context as collective_context
from triton_dist.kernels.common.exchange import sums
from triton_dist.runtime.ranks import Group


class AllReduceMethod(enum.Enum):
    """Algorithm of an all-reduce."""

    ONE_SHOT = "one_shot"
    """Every rank sends x to all ranks and adds all tensors. One launch sums up to 4 MB, or 32 MB on
    2 ranks."""
    TWO_SHOT = "two_shot"
    """Every rank adds one shard and sends the sum to all ranks."""
    COLLECTIVE = "collective"
    """All-reduce by ``torch.distributed`` (NCCL; gloo on CPU ranks)."""
    # Member names of Triton-distributed.
    OneShot = "one_shot"  # noqa: PIE796
    TwoShot = "two_shot"  # noqa: PIE796
    DoubleTree = "two_shot"  # noqa: PIE796
    # Members that would need multicast or TMA reductions. They are not supported; ``replacement``
    # returns a supported member.
    OneShot_TMA = "one_shot_tma"
    OneShot_Multimem = "one_shot_multimem"
    TwoShot_Multimem = "two_shot_multimem"
    TwoShot_Multimem_ST = "two_shot_multimem_st"

    __repr__ = enum.Enum.__str__

    @property
    def replacement(self) -> AllReduceMethod | None:
        """Replacement of a method that is not supported; ``None`` if the method is supported."""
        if self.value.startswith("one_shot_"):
            return AllReduceMethod.ONE_SHOT
        return AllReduceMethod.TWO_SHOT if self.value.startswith("two_shot_") else None


_REPLACED_NAMES = {"double_tree": AllReduceMethod.TWO_SHOT}
"""Names of removed algorithms that scripts still pass, and their replacements."""


def get_allreduce_methods() -> list[str]:
    """Return the names that ``to_allreduce_method`` accepts."""
    return [*(each.value for each in AllReduceMethod if each.replacement is None), *_REPLACED_NAMES]


def to_allreduce_method(name: str) -> AllReduceMethod:
    """Return the ``AllReduceMethod`` with this name, for command lines.

    ``"double_tree"`` gives ``TWO_SHOT``, which replaces it.

    Raises:
        InvalidArgument: the name is unknown, or its method is not supported.
    """
    if name not in get_allreduce_methods():
        others = {method.value: method.replacement for method in AllReduceMethod}
        replacement = others.get(name)
        expected = f"one of {', '.join(get_allreduce_methods())}"
        if replacement is not None:
            expected = f"{replacement.value!r}: multicast and TMA reductions are not supported"
        raise InvalidArgument("to_allreduce_method", "name", name, expected)
    return _REPLACED_NAMES[name] if name in _REPLACED_NAMES else AllReduceMethod(name)


class AllReduceContext(collective_context.CollectiveContext):
    """Symmetric memory of ``all_reduce``, for any dtype. A context manager."""

    name = "all_reduce"

    slot_bytes = staticmethod(sums.slot_bytes)
    packet_bytes = staticmethod(sums.packet_bytes)

    def chunk_elements(
        self, method: AllReduceMethod, item_bytes: int, in_packets: bool = False
    ) -> int:
        """Return the number of elements of ``item_bytes`` that one launch can sum."""
        one_shot = method is AllReduceMethod.ONE_SHOT
        return sums.max_elements(
            self.workspace_nbytes, item_bytes, self.num_ranks, one_shot, in_packets
        )


def create_allreduce_ctx(
    workspace_nbytes: int, rank: int, world_size: int, local_world_size: int, *, group: Group = None
) -> AllReduceContext:
    """Create the context of ``all_reduce``. Collective over ``group``.

    Allocates per rank about max(4 * P, 2 * ``world_size`` * min(P, 4 MB)) bytes, where P is
    ``workspace_nbytes``. Packets need another 4 * ``world_size`` * min(P, 256 KB) bytes; with three
    or more ranks at least 8 * min(P, 2 MB) bytes.

    Args:
        workspace_nbytes: bytes of the largest tensor that one launch sums. Larger tensors take
            several launches.
        rank, world_size, local_world_size: this rank in the group, and the numbers of ranks of the
            group and of one host.
        group: process group; default: the world, or this process alone.

    Returns:
        The context. Call ``finalize()`` or use ``with`` to free it.

    Raises:
        InvalidArgument, RankDisagreement, SymmetricMemoryFull: see ``create_ag_gemm_context``.
    """
    return collective_context.create(
        AllReduceContext, "create_allreduce_ctx", workspace_nbytes, rank, world_size,
        local_world_size, group,
    )  # fmt: skip
