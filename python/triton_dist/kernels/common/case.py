"""Facts of an op, said once: ``<op>/case.py`` has them; scripts, benchmarks and tests read them.

A case is no part of its op: the op, and its package's ``__init__``, never import it.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from triton_dist.kernels.common.symmetric_sums import two_shot_all_reduce
from triton_dist.kernels.common.vendor import VendorMethod
from triton_dist.runtime.device import current_device
from triton_dist.runtime.peaks import RELATIVE_RATE, Peak
from triton_dist.tune import AutoTuner

S = TypeVar("S", bound=Hashable)

Operands: TypeAlias = dict[str, torch.Tensor]
"""Tensors of a call on this rank, by the name of the argument."""
Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""
Kind = Literal["gemm", "transfer", "peer", "vendor", "own"]
"""``gemm`` and ``transfer``: one of the two parts alone. The others do the whole op: ``peer``,
others' code; ``own`` and ``vendor``, configs of ours that run an algorithm of this package or call
the vendor's libraries."""
Bound = Literal["arithmetic", "memory", "link"]
"""A resource whose peak limits a call."""
ONE_SHOT, TWO_SHOT = "torch one-shot", "torch two-shot"
"""Names of torch's all-reduces over symmetric memory."""


@dataclass(frozen=True)
class Peer:
    """Something to be timed beside others, and what it must give."""

    kind: Kind
    call: Callable[[], torch.Tensor]
    """Queues the work and returns its output."""
    expected: Callable[[], torch.Tensor] | None = None
    """Right output for the operands as they are now; ``None``: it cannot be told."""
    config: str = ""
    """As it would be typed, where there is one."""


@dataclass(frozen=True)
class Cost:
    """Work that a call makes for a rank in any case, whatever its algorithm.

    Attributes:
        dtype: of the operands.
        flops: of products; sums of what ranks exchange are left out.
        read_bytes, written_bytes: operands and output, each once, in device memory.
        link_bytes: one direction of the links to the peers.
    """

    dtype: torch.dtype
    flops: float
    read_bytes: float
    written_bytes: float
    link_bytes: float

    @property
    def memory_bytes(self) -> float:
        """Read and written together."""
        return self.read_bytes + self.written_bytes

    def bounds_ms(self, peak: Peak) -> dict[Bound, float]:
        """Milliseconds of arithmetic, memory and link, each at its peak, as if the other two took
        no time."""
        # dtypes that no matrix unit multiplies move alone
        tflops = peak.tflops * RELATIVE_RATE.get(self.dtype, 1.0)
        return {
            "arithmetic": self.flops / tflops / 1e9,
            "memory": self.memory_bytes / peak.memory_gbps / 1e6,
            "link": self.link_bytes / peak.link_gbps / 1e6,
        }

    def limit_ms(self, peak: Peak) -> float:
        """Milliseconds that no algorithm can go below: the largest of the three bounds."""
        return max(self.bounds_ms(peak).values())


# Four unit roundoffs of a 16-bit dtype. A result and its reference are fp32 sums in other orders,
# rounded once each: where the sums lie on two sides of a boundary, they are two roundoffs apart.
# As much again is for small values of a sum whose addends were large. Of fp32, whose roundoff is
# 2**-24, it is the order that matters: the error of a sum of K products of random sign grows with
# the root of K, to 2**-15 of the standard deviation in the worst of 1e8 values of K = 28672.
_TOLERANCE = {torch.float16: 2**-9, torch.bfloat16: 2**-6, torch.float32: 2**-14}


def tolerance(dtype: torch.dtype, parts: int = 1) -> float:
    """Largest error, as rtol and atol, of values that have a standard deviation of 1 and are the
    sum of ``parts`` addends, each rounded to ``dtype`` before it was added.

    A rounded sum of parts errs by their roundings, which are of random sign: with W parts by the
    root of W times that of one (libraries also round each sum on the way, which is as large as the
    result). atol is for a standard deviation of 1; data that deviate more need more, in proportion.
    """
    return float(_TOLERANCE[dtype] * math.sqrt(parts))


class Case(ABC, Generic[S]):
    """Facts of an op. ``S`` is the type of its shapes: global sizes, of all ranks together.

    Attributes:
        op: the tuned op.
        shape: the type ``S``, made of whole numbers.
        shapes: what the op has to be good at.
        transfer: its collective, for people.
        serial: the peer that does one part after the other.
        overlaps: it hides the collective behind arithmetic. Else it is a collective alone, and
            ``serial`` is the library's.
    """

    shape: type[S]
    shapes: Sequence[S]
    transfer: ClassVar[str]
    serial: ClassVar[str]
    overlaps: ClassVar[bool] = True

    def __init__(self, op: AutoTuner) -> None:
        self.op = op  # not of the class: a tuned op that is one becomes a method

    @property
    def name(self) -> str:
        return str(self.op.fn.__name__)

    @abstractmethod
    def scaled(self, shape: S, divisor: int, num_ranks: int) -> S:
        """``shape`` with its sizes divided, such that the ranks can share it."""

    @abstractmethod
    def context(self, shape: S, dtype: torch.dtype, group: Any = None, **options: Any) -> Any:
        """A context for calls of up to ``shape``; ``options``: of the op's ``create_…``.
        Collective over ``group``."""

    @abstractmethod
    def operands(
        self,
        shape: S,
        dtype: torch.dtype,
        num_ranks: int,
        generator: torch.Generator | None = None,
    ) -> Operands:
        """This rank's random operands, such that results have a standard deviation of about 1;
        ``generator``: default: torch's."""

    @abstractmethod
    def shape_of(self, operands: Mapping[str, Any], num_ranks: int) -> S:
        """Shape that ``operands`` would make such operands of."""

    def cost_of(self, /, *args: Any, **kwargs: Any) -> tuple[S, int, Cost]:
        """Shape, number of ranks and work of a call with these arguments, tunables or none."""
        given = inspect.signature(self.op.fn).bind_partial(*args, **kwargs).arguments
        num_ranks = int(getattr(given.get("ctx"), "num_ranks", 1))
        operand = next(value for value in given.values() if isinstance(value, torch.Tensor))
        shape = self.shape_of(given, num_ranks)
        return shape, num_ranks, self.cost(shape, operand.dtype, num_ranks)

    @abstractmethod
    def refill(
        self, operands: Operands, num_ranks: int, generator: torch.Generator | None = None
    ) -> None:
        """Give the operand that is new at each call other random values, in place."""

    @abstractmethod
    def arguments(self, operands: Operands, ctx: Any) -> Call:
        """Arguments of a call, without tunables."""

    @abstractmethod
    def expected(self, operands: Operands, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """Result for the operands as they are now: multiplied and added in fp32, rounded once.
        Collective over ``group``."""

    @abstractmethod
    def tolerance(self, dtype: torch.dtype, num_ranks: int) -> float:
        """Largest error of a result, as rtol and atol: ``tolerance`` of this module."""

    @abstractmethod
    def peers(self, operands: Operands, ctx: Any) -> dict[str, Peer]:
        """Measured beside the op, by name: its parts alone, and what others have for all of it.
        Collective over the context's group.

        All read the operands at each call, except where the case says otherwise.
        """

    @abstractmethod
    def cost(self, shape: S, dtype: torch.dtype, num_ranks: int) -> Cost:
        """Work of a call for each rank."""

    def is_own(self, config: Mapping[str, Any]) -> bool:
        """Tell if a config runs an algorithm of this package, instead of calling libraries."""
        return config["way"] not in {method.value for method in VendorMethod}

    def way(self, config: Mapping[str, Any]) -> Hashable:
        """Algorithm of a config, tiles and layouts aside."""
        return str(config["way"])

    @abstractmethod
    def bad_calls(self, good: Operands, num_ranks: int) -> dict[str, dict[str, Any]]:
        """Arguments of which the op refuses one, by its name, and more in brackets where there are
        several of a name; ``good``: the largest operands that the context takes, for the rest."""

    @abstractmethod
    def recorded_call(self, key: Any) -> Call:
        """A call that has ``key``, the largest one: tensors without memory, and in place of the
        context what ``key_fn`` and ``prune_fn`` ask of it."""

    @abstractmethod
    def sample_keys(self) -> Iterator[tuple[Any, ...]]:
        """Keys of calls of all kinds."""

    def recover(self, ctx: Any) -> None:
        """Bring all of the context, on all ranks, back to one state after a call that failed on
        some rank. Collective."""
        ctx.reset()


def uniform(
    sizes: Sequence[int],
    dtype: torch.dtype,
    generator: torch.Generator | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """Random values in [-scale, scale), on this process's device."""
    device = current_device().torch_device
    # In place: weights of experts are the largest of all that is there.
    values = torch.rand(tuple(sizes), generator=generator, device=device)
    return values.mul_(2).sub_(1).mul_(scale).to(dtype)


def symmetric_all_reduces(
    like: torch.Tensor,
    fill: Callable[[torch.Tensor], object],
    group: dist.ProcessGroup | None,
) -> dict[str, Callable[[], torch.Tensor]]:
    """torch's all-reduces of a tensor like ``like`` in symmetric memory, by name; ``fill`` writes
    it at each call. None on CPU ranks, and for one rank. Collective over ``group``."""
    if not current_device().has_async_tp or dist.get_world_size(group) == 1:
        return {}
    import torch.distributed._symmetric_memory as symm_mem  # registers the operators

    members = group or dist.distributed_c10d._get_default_group()
    staged = symm_mem.empty(like.shape, dtype=like.dtype, device=like.device)
    symm_mem.rendezvous(staged, members)

    def one_shot() -> torch.Tensor:
        fill(staged)
        out: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(
            staged, "sum", members.group_name
        )
        return out

    def two_shot() -> torch.Tensor:
        fill(staged)
        return two_shot_all_reduce(staged, members)

    return {ONE_SHOT: one_shot, TWO_SHOT: two_shot}
