"""Context of all-reduce, and its ways by name."""

from __future__ import annotations

import enum

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.collective import context as collective_context
from triton_dist.kernels.common.exchange import sums
from triton_dist.runtime.ranks import Group


class AllReduceMethod(enum.Enum):
    """Algorithm of an all-reduce."""

    ONE_SHOT = "one_shot"
    """Everything to everybody, who all add everything. In one launch up to 4 MB, of 2 ranks 32."""
    TWO_SHOT = "two_shot"
    """Every rank adds a shard and sends it to all."""
    COLLECTIVE = "collective"
    """The group's all-reduce: NCCL, gloo on CPU ranks."""
    # Names that scripts for Triton-distributed pass.
    OneShot = "one_shot"  # noqa: PIE796
    TwoShot = "two_shot"  # noqa: PIE796
    DoubleTree = "two_shot"  # noqa: PIE796
    # Those of scripts that need multicast, or another kernel: refused, with ``instead``.
    OneShot_TMA = "one_shot_tma"
    OneShot_Multimem = "one_shot_multimem"
    TwoShot_Multimem = "two_shot_multimem"
    TwoShot_Multimem_ST = "two_shot_multimem_st"

    __repr__ = enum.Enum.__str__

    @property
    def instead(self) -> AllReduceMethod | None:
        """The method to use in place of one that is not here."""
        if self.value.startswith("one_shot_"):
            return AllReduceMethod.ONE_SHOT
        return AllReduceMethod.TWO_SHOT if self.value.startswith("two_shot_") else None


_REPLACED = {"double_tree": AllReduceMethod.TWO_SHOT}
"""Names that scripts pass for an algorithm that another one replaces."""


def get_allreduce_methods() -> list[str]:
    """Return the names that ``to_allreduce_method`` accepts."""
    return [*(each.value for each in AllReduceMethod if each.instead is None), *_REPLACED]


def to_allreduce_method(name: str) -> AllReduceMethod:
    """Return ``AllReduceMethod.ONE_SHOT`` for ``"one_shot"``, for command lines.

    ``"double_tree"`` gives ``TWO_SHOT``, which replaces it.

    Raises:
        InvalidArgument: there is no such method here.
    """
    if name not in get_allreduce_methods():
        others = {method.value: method.instead for method in AllReduceMethod}
        known = others.get(name)
        expected = f"one of {', '.join(get_allreduce_methods())}"
        if known is not None:
            expected = f"{known.value!r}: multicast and TMA reductions are not used"
        raise InvalidArgument("to_allreduce_method", "name", name, expected)
    return _REPLACED[name] if name in _REPLACED else AllReduceMethod(name)


class AllReduceContext(collective_context.CollectiveContext):
    """Symmetric memory for all-reduces, of any dtype. A context manager."""

    name = "all_reduce"

    slot_bytes = staticmethod(sums.slot_bytes)
    packet_bytes = staticmethod(sums.packet_bytes)

    def chunk_elements(
        self, method: AllReduceMethod, item_bytes: int, in_packets: bool = False
    ) -> int:
        """Elements of ``item_bytes`` that one launch can sum."""
        one_shot = method is AllReduceMethod.ONE_SHOT
        return sums.most_elements(
            self.workspace_nbytes, item_bytes, self.num_ranks, one_shot, in_packets
        )


def create_allreduce_ctx(
    workspace_nbytes: int,
    rank: int,
    world_size: int,
    local_world_size: int,
    *,
    group: Group = None,
) -> AllReduceContext:
    """Allocate what ``all_reduce`` needs. Collective over ``group`` (default: the world, else this
    process).

    Takes about four times ``workspace_nbytes`` on each rank, or twice ``world_size`` times up to 4
    MB of it, whichever is more; and four times ``world_size`` times up to 256 KB for packets.

    Args:
        workspace_nbytes: the largest tensor that one launch sums; larger ones take several.
        rank, world_size: this rank in the group, and the group's size.
        local_world_size: ranks on one host; clamped to ``world_size``, which must lie on one host.

    Raises:
        InvalidArgument: on every rank, for a value that cannot work.
        RankDisagreement: ranks ask for different contexts.
        SymmetricMemoryFull: on every rank, if some rank has too little memory.
    """
    return collective_context.create(
        AllReduceContext, "create_allreduce_ctx", workspace_nbytes, rank, world_size,
        local_world_size, group,
    )  # fmt: skip
