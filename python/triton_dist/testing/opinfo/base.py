"""Base of all OpInfos, the facts about an op that tests, scripts and benchmarks need.

As in PyTorch's ``testing/_internal/opinfo``: one object for each op has its inputs, its reference
and how far a result may be off, so that tests and benchmarks are written once for all ops.
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
from torch import Generator

from triton_dist.kernels.common.libraries import LibraryAlgorithm
from triton_dist.kernels.nvidia.gemm_allreduce.algorithms import two_shot_all_reduce
from triton_dist.runtime.device import current_device
from triton_dist.runtime.peaks import RELATIVE_RATE, Peak
from triton_dist.tune import AutoTuner

S = TypeVar("S", bound=Hashable)

Group: TypeAlias = dist.ProcessGroup | None

Operands: TypeAlias = dict[str, torch.Tensor]
"""Tensors of a call on this rank, by the name of the argument."""
Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""
Kind = Literal["gemm", "transfer", "baseline", "library", "own"]
"""``gemm`` and ``transfer``: one of the two parts alone. The others do the whole op: ``baseline``,
code of others; ``own`` and ``libraries``, configs of ours that run an algorithm of this package or
call libraries."""
Bound = Literal["arithmetic", "memory", "link"]
"""A resource whose peak limits a call."""
LAYOUTS = ("row-major", "column-major", "strided")
"""Layouts of B and of weights."""
ONE_SHOT, TWO_SHOT = "torch one-shot", "torch two-shot"
"""Names of torch's all-reduces over symmetric memory."""


@dataclass(frozen=True)
class Baseline:
    """A call that is timed next to others."""

    kind: Kind
    call: Callable[[], torch.Tensor]
    """Queue the work and return its output."""
    expected: Callable[[], torch.Tensor] | None = None
    """Return the right output for the operands as they are now; ``None``: it is not known."""
    config: str = ""
    """The config as a user would type it, if there is one."""


@dataclass(frozen=True)
class Cost:
    """Work of a rank in a call, whatever the algorithm.

    Attributes:
        dtype: of the operands.
        flops: of products; sums of exchanged data do not count.
        read_bytes, written_bytes: operands and output, each once, in device memory.
        link_bytes: sent to the peers.
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


class OpInfo(ABC, Generic[S]):
    """Facts about an op, for tests, scripts and benchmarks.

    ``S`` is the type of its shapes: global sizes, over all ranks.

    Attributes:
        op: the tuned op.
        shape: the type ``S``, made of whole numbers.
        shapes: what the op has to be fast at.
        transfer: its collective, as a text.
        serial: the baseline that does one part after the other.
        overlaps: it hides the collective behind arithmetic. Else it is a collective alone, and
            ``serial`` is the library's.
        library_algorithms: algorithms that call libraries, beside those of ``LibraryAlgorithm``.
        choices: names of tunables that count as part of a config's algorithm.
    """

    shape: type[S]
    shapes: Sequence[S]
    transfer: ClassVar[str]
    serial: ClassVar[str]
    overlaps: ClassVar[bool] = True
    library_algorithms: ClassVar[tuple[str, ...]] = ()
    choices: ClassVar[tuple[str, ...]] = ()

    def __init__(self, op: AutoTuner) -> None:
        self.op = op  # not of the class: a tuned op that is one becomes a method

    @property
    def name(self) -> str:
        return str(self.op.fn.__name__)

    @abstractmethod
    def scaled(self, shape: S, divisor: int, num_ranks: int) -> S:
        """Return ``shape`` with its sizes divided, such that the ranks can share it."""

    @abstractmethod
    def context(self, shape: S, dtype: torch.dtype, group: Any = None, **options: Any) -> Any:
        """Create a context for calls of up to ``shape``; ``options``: of the op's ``create_…``.
        Collective over ``group``."""

    @abstractmethod
    def allocate(
        self,
        shape: S,
        dtype: torch.dtype,
        num_ranks: int,
        generator: Generator | None,
        *_: Any,
        **__: Any,
    ) -> Operands:
        """Return this rank's operands; those that ``refill`` writes are not initialised."""

    @abstractmethod
    def refill(
        self, operands: Operands, num_ranks: int, generator: Generator | None = None
    ) -> None:
        """Give the operands that change from call to call new random values, in place."""

    def operands(
        self,
        shape: S,
        dtype: torch.dtype,
        num_ranks: int,
        generator: Generator | None = None,
        **options: Any,
    ) -> Operands:
        """Return this rank's random operands, whose results have a standard deviation of about 1.

        generator: default: torch's. options: of ``allocate``.
        """
        operands = self.allocate(shape, dtype, num_ranks, generator, **options)
        self.refill(operands, num_ranks, generator)
        return operands

    @abstractmethod
    def shape_of(self, operands: Mapping[str, Any], num_ranks: int) -> S:
        """Return the shape that has such ``operands``."""

    def cost_of(self, /, *args: Any, **kwargs: Any) -> tuple[S, int, Cost]:
        """Return shape, number of ranks and cost of a call with these arguments."""
        given = inspect.signature(self.op.fn).bind_partial(*args, **kwargs).arguments
        num_ranks = int(getattr(given.get("ctx"), "num_ranks", 1))
        operand = next(value for value in given.values() if isinstance(value, torch.Tensor))
        shape = self.shape_of(given, num_ranks)
        return shape, num_ranks, self.cost(shape, operand.dtype, num_ranks)

    @abstractmethod
    def arguments(self, operands: Operands, ctx: Any) -> Call:
        """Return the arguments of a call, without tunables."""

    @abstractmethod
    def reference(self, operands: Operands, group: Group = None) -> torch.Tensor:
        """Return the result for the operands as they are now: multiplied and added in fp32, rounded
        once. Collective over ``group``."""

    def tolerance(self, dtype: torch.dtype, num_ranks: int) -> float:
        """Return the largest error of a result, as rtol and atol."""
        return tolerance(dtype)

    @abstractmethod
    def baselines(self, operands: Operands, ctx: Any) -> dict[str, Baseline]:
        """Return what is measured next to the op: its parts alone, and other code for all of it.
        Collective over the context's group.

        All read the operands at each call, unless the OpInfo says otherwise.
        """

    @abstractmethod
    def cost(self, shape: S, dtype: torch.dtype, num_ranks: int) -> Cost:
        """Return the work of a call for each rank: flops and bytes."""

    def is_own(self, config: Mapping[str, Any]) -> bool:
        """Return whether a config runs an algorithm of this package instead of a library's."""
        libraries = (*(method.value for method in LibraryAlgorithm), *self.library_algorithms)
        return config["algorithm"] not in libraries

    def algorithm(self, config: Mapping[str, Any]) -> Hashable:
        """Return the algorithm of a config, without its tiles and layouts."""
        return (config["algorithm"], *(config.get(name) for name in self.choices))

    @abstractmethod
    def error_inputs(self, good: Operands, num_ranks: int) -> dict[str, dict[str, Any]]:
        """Return arguments that the op refuses, by the name of the argument in its error.

        Text in brackets tells several of one name apart. ``good``: the largest operands that the
        context accepts, for the other arguments.
        """

    @abstractmethod
    def inputs_for(self, key: Any) -> Call:
        """Return the largest call that has ``key``: tensors without memory, and in place of the
        context the attributes that ``key_fn`` and ``prune_fn`` read."""

    @abstractmethod
    def example_keys(self) -> Iterator[Any]:
        """Yield keys of calls of all kinds."""

    def sample_inputs(self) -> Iterator[Call]:
        """Yield calls of all kinds, of tensors without memory."""
        return map(self.inputs_for, self.example_keys())

    def recover(self, ctx: Any) -> None:
        """Bring the context of all ranks back to one state after a call that failed on some rank.
        Collective."""
        ctx.reset()


def uniform(
    sizes: Sequence[int],
    dtype: torch.dtype,
    generator: Generator | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """Return random values in [-scale, scale), on this process's device."""
    device = current_device().torch_device
    # In place: weights of experts are the largest of all that is there.
    values = torch.rand(tuple(sizes), generator=generator, device=device)
    return values.mul_(2).sub_(1).mul_(scale).to(dtype)


def symmetric_all_reduces(
    like: torch.Tensor,
    fill: Callable[[torch.Tensor], object],
    group: Group,
) -> dict[str, Callable[[], torch.Tensor]]:
    """Return torch's all-reduces in symmetric memory, by name. Collective over ``group``.

    ``fill`` writes a tensor like ``like`` at each call. Empty on CPU ranks, and for one rank.
    """
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


def other_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return a 16-bit floating dtype that is not ``dtype``."""
    return torch.float16 if dtype is torch.bfloat16 else torch.bfloat16


def meta(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    """Return a tensor without memory."""
    return torch.empty(sizes, dtype=dtype, device="meta")


def laid_out(layout: str, dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    """Return a tensor without memory whose last two dimensions are laid out as ``layout``."""
    *batch, rows, columns = sizes
    if layout == "row-major":
        return meta(dtype, *sizes)
    if layout == "column-major":
        return meta(dtype, *batch, columns, rows).mT
    return meta(dtype, *batch, rows, 2 * columns)[..., ::2]
