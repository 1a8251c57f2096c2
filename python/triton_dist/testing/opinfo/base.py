"""Base class of OpInfos: metadata of an op for tests, scripts and benchmarks.

Modelled on PyTorch's ``testing/_internal/opinfo``. One object per op has the op's inputs, reference
and tolerance, so that tests and benchmarks are written once for all ops.
"""

from __future__ import annotations

import copy
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Generator

from triton_dist.kernels.common.gemm.scales import FP8, Recipe
from triton_dist.kernels.common.libraries import LibraryAlgorithm
from triton_dist.kernels.nvidia.gemm_allreduce.algorithms import two_shot_all_reduce
from triton_dist.runtime.device import current_device
from triton_dist.runtime.peaks import RELATIVE_RATE, Peak
from triton_dist.testing.opinfo.scaled import scales_of
from triton_dist.tune import AutoTuner

if TYPE_CHECKING:
    from typing_extensions import Self

S = TypeVar("S", bound=Hashable)

Group: TypeAlias = dist.ProcessGroup | None

Operands: TypeAlias = dict[str, torch.Tensor]
"""Tensors of a call on this rank, by argument name."""
Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""
Kind = Literal["gemm", "transfer", "baseline", "library", "own"]
"""Kind of a measured call. ``gemm`` and ``transfer`` run one part of the op. ``baseline`` is other
code that computes the op's result. ``own`` and ``library`` are the op itself, with a config whose
algorithm is ours or a library's."""
Resource = Literal["arithmetic", "memory", "link"]
"""Resource whose peak limits a call."""
RECIPES = {f"fp8-{recipe.value}": recipe for recipe in Recipe}
"""Kinds of fp8 scales, by the dtype names that command lines accept, such as ``fp8-row``."""
ONE_SHOT, TWO_SHOT = "torch one-shot", "torch two-shot"
"""Names of torch's all-reduces in symmetric memory."""


@dataclass(frozen=True)
class Baseline:
    """A call to be timed: the op, a part of it, or other code for the same work; see ``Kind``."""

    kind: Kind
    call: Callable[[], torch.Tensor]
    """Queue the work and return its output."""
    expected: Callable[[], torch.Tensor] | None = None
    """Return the expected output for the current operands; ``None``: the output is not checked."""
    config: str = ""
    """Config of the op as text; empty for kinds other than ``own`` and ``library``."""


@dataclass(frozen=True)
class Cost:
    """Work of one rank in a call, independent of the algorithm.

    Attributes:
        dtype: dtype of the operands.
        flops: operations of GEMMs, without sums over ranks.
        read_bytes, written_bytes: bytes of operands and output in device memory, each counted once.
        link_bytes: bytes sent to the peers.
    """

    dtype: torch.dtype
    flops: float
    read_bytes: float
    written_bytes: float
    link_bytes: float

    @property
    def memory_bytes(self) -> float:
        """Bytes read and written."""
        return self.read_bytes + self.written_bytes

    def bounds_ms(self, peak: Peak) -> dict[Resource, float]:
        """Return the time in ms of arithmetic, memory and link, each alone at its peak."""
        # Ops on dtypes without a tensor-core rate have flops = 0, so any rate gives 0.
        tflops = peak.tflops * RELATIVE_RATE.get(self.dtype, 1.0)
        return {
            "arithmetic": self.flops / tflops / 1e9,
            "memory": self.memory_bytes / peak.memory_gbps / 1e6,
            "link": self.link_bytes / peak.link_gbps / 1e6,
        }

    def limit_ms(self, peak: Peak) -> float:
        """Return the lower bound of the time in ms: the largest of the three bounds."""
        return max(self.bounds_ms(peak).values())


# 16-bit dtypes: four unit roundoffs. Result and reference are fp32 sums in different orders, each
# rounded once, so they can be two roundoffs apart at a rounding boundary. The tolerance doubles
# this, for small sums of large addends.
# fp32 (roundoff 2**-24): the different summation orders dominate. The error of a sum of K random
# products grows with sqrt(K). At K = 28672, the largest of 1e8 errors was 2**-15 times
# the standard deviation of the sum; the tolerance is twice this.
# fp8 operands, bf16 results: Hopper's tensor cores add 128 products in 4 steps with 13 bits, then
# partial sums are added in fp32. If the whole sum has a standard deviation of 1, a partial sum has
# sqrt(128 / K), and its error is 4 * 2**-13 times this. The K / 128 errors have random signs, so
# the error of the whole sum is 4 * 2**-13 for any K. Three times this is a tenth of the tolerance.
_TOLERANCE = {torch.float16: 2**-9, torch.bfloat16: 2**-6, torch.float32: 2**-14}


def tolerance(dtype: torch.dtype, parts: int = 1) -> float:
    """Return the tolerance, as rtol and atol, of sums with a standard deviation of 1.

    ``parts`` is the number of addends, each of which is rounded to ``dtype`` before the sum.
    Rounding errors of addends, and of a library's intermediate sums, have random signs, so the
    error of the sum grows with sqrt(parts). For sums with a larger standard deviation, scale atol
    in proportion.
    """
    return float(_TOLERANCE[dtype] * math.sqrt(parts))


class OpInfo(ABC, Generic[S]):
    """Metadata of an op for tests, scripts and benchmarks.

    ``S`` is the type of its shapes: global sizes, over all ranks.

    Attributes:
        op: the tuned op.
        shape_type: the type ``S``, a dataclass of ints.
        shapes: shapes for which the op must be fast.
        positional_names: names of the operands, and ``ctx``, that a call passes by position.
        collective_name: name of the collective that the op contains.
        serial_name: name of the baseline that runs GEMM and collective in sequence.
        overlaps: the op overlaps a collective with compute. If not, ``serial_name`` is the name of
            a library's implementation of the op.
        library_algorithms: names of algorithms that call libraries, in addition to
            ``LibraryAlgorithm``.
        algorithm_tunables: tunables that, with ``algorithm``, distinguish algorithms in tables.
        recipe: kind of fp8 scales. Operands are then e4m3, results bf16. ``None``: no fp8.
    """

    shape_type: type[S]
    shapes: Sequence[S]
    positional_names: ClassVar[tuple[str, ...]]
    collective_name: ClassVar[str]
    serial_name: ClassVar[str]
    overlaps: ClassVar[bool] = True
    library_algorithms: ClassVar[tuple[str, ...]] = ()
    algorithm_tunables: ClassVar[tuple[str, ...]] = ()
    recipe: Recipe | None = None

    def __init__(self, op: AutoTuner[..., Any]) -> None:
        self.op = op  # an instance attribute: a tuned op on the class would become a method

    @property
    def name(self) -> str:
        return str(self.op.fn.__name__)

    def with_dtype(self, name: str) -> Self:
        """Return this OpInfo with the recipe of a dtype name, if the name is in ``RECIPES``."""
        info = copy.copy(self)
        info.recipe = RECIPES.get(name)
        return info

    def io_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes of operands and results: e4m3 and bf16 for fp8, else ``dtype``."""
        is_fp8 = self.recipe is not None or dtype in FP8
        return (torch.float8_e4m3fn, torch.bfloat16) if is_fp8 else (dtype, dtype)

    @abstractmethod
    def smaller(self, shape: S, divisor: int, num_ranks: int) -> S:
        """Return ``shape`` with sizes divided by ``divisor``, rounded to valid sizes."""

    @abstractmethod
    def context(self, shape: S, dtype: torch.dtype, group: Any = None, **options: Any) -> Any:
        """Create a context for calls of up to ``shape``. Collective over ``group``.

        ``options`` are passed to the function that creates the op's context.
        """

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
        """Return this rank's operands. Operands that ``refill`` writes are still uninitialised."""

    @abstractmethod
    def refill(
        self, operands: Operands, num_ranks: int, generator: Generator | None = None
    ) -> None:
        """Write new random values, in place, to the operands that change between calls."""

    def operands(
        self,
        shape: S,
        dtype: torch.dtype,
        num_ranks: int,
        generator: Generator | None = None,
        **options: Any,
    ) -> Operands:
        """Return this rank's random operands, whose results have a standard deviation of about 1.

        ``generator`` defaults to torch's; ``options`` are passed to ``allocate``.
        """
        operands = self.allocate(shape, dtype, num_ranks, generator, **options)
        self.refill(operands, num_ranks, generator)
        return operands

    @abstractmethod
    def shape_of(self, operands: Mapping[str, Any], num_ranks: int) -> S:
        """Return the global shape of a call with these operands of one rank."""

    def cost_of(self, /, *args: Any, **kwargs: Any) -> tuple[S, int, Cost]:
        """Return shape, number of ranks and cost of a call with these arguments."""
        given = inspect.signature(self.op.fn).bind_partial(*args, **kwargs).arguments
        num_ranks = int(getattr(given.get("ctx"), "num_ranks", 1))
        operand = next(value for value in given.values() if isinstance(value, torch.Tensor))
        shape = self.shape_of(given, num_ranks)
        return shape, num_ranks, self.cost(shape, operand.dtype, num_ranks)

    def arguments(self, operands: Operands, ctx: Any) -> Call:
        """Return the arguments of a call, without tunables."""
        named = {**operands, "ctx": ctx}
        return tuple(named[name] for name in self.positional_names), scales_of(operands)

    def output(self, result: Any) -> torch.Tensor:
        """Return the tensor to compare with ``reference``."""
        tensor: torch.Tensor = result
        return tensor

    @abstractmethod
    def reference(self, operands: Operands, group: Group = None) -> torch.Tensor:
        """Return the expected result for the current operands: computed in fp32, rounded once.

        Collective over ``group``.
        """

    def tolerance(self, dtype: torch.dtype, num_ranks: int) -> float:
        """Return the tolerance of a result, as rtol and atol."""
        return tolerance(dtype)

    @abstractmethod
    def baselines(self, operands: Operands, ctx: Any) -> dict[str, Baseline]:
        """Return other calls to measure, by name: parts of the op, and other implementations.

        Collective over the context's group. Each call reads the current values of ``operands``,
        unless the OpInfo documents otherwise.
        """

    def checked_baseline(
        self, call: Callable[[], torch.Tensor], operands: Operands, group: Group = None
    ) -> Baseline:
        """Return a baseline whose ``call`` computes the op's whole result, for comparison with
        ``reference``."""
        return Baseline("baseline", call, lambda: self.reference(operands, group))

    @abstractmethod
    def cost(self, shape: S, dtype: torch.dtype, num_ranks: int) -> Cost:
        """Return the work of a call on each rank."""

    def is_our_algorithm(self, config: Mapping[str, Any]) -> bool:
        """Return whether a config runs an algorithm of this package, not a library's."""
        libraries = (*(method.value for method in LibraryAlgorithm), *self.library_algorithms)
        return config["algorithm"] not in libraries

    def algorithm_and_tunables(self, config: Mapping[str, Any]) -> Hashable:
        """Return a config's values of ``algorithm`` and ``algorithm_tunables``."""
        return (config["algorithm"], *(config.get(name) for name in self.algorithm_tunables))

    def inputs_for(self, key: Any) -> Call:
        """Return the largest call with tuning key ``key``. For tests of shipped records, and for
        ``benchmarks/bench_prior.py``.

        Tensors are meta tensors. The context is an object that has only the attributes which the
        op's ``key_fn`` and ``prune_fn`` use.
        """
        raise NotImplementedError

    def recover(self, ctx: Any) -> None:
        """Reset the context after a call that failed on some rank. Collective."""
        ctx.reset()


def own_rows(total: torch.Tensor, group: Group) -> torch.Tensor:
    """Return this rank's share of the rows of ``total``, a sum over ranks."""
    if not dist.is_initialized():
        return total
    return total.chunk(dist.get_world_size(group))[dist.get_rank(group)]


def uniform(
    sizes: Sequence[int], dtype: torch.dtype, generator: Generator | None = None, scale: float = 1.0
) -> torch.Tensor:
    """Return random values in [-scale, scale) on this process's device."""
    # Scale in place, without a second fp32 tensor: expert weights are the largest tensors.
    values = torch.rand(tuple(sizes), generator=generator, device=current_device().torch_device)
    return values.mul_(2).sub_(1).mul_(scale).to(dtype)


def fill(
    a: torch.Tensor, operands: Operands, num_terms: int, generator: Generator | None = None
) -> None:
    """Write random values to the left operand ``a``, and to its scales if it is fp8.

    A sum of ``num_terms`` products of elements of ``a`` and uniform values from -1 to 1 then has a
    standard deviation of 1. If both operands have fp8 scales, it is between 0.25 and 1.
    """
    # A product of uniform values from (-s, s) and (-1, 1) has a standard deviation of s / 3.
    limit = 3 / num_terms**0.5
    if "A_scale" in operands:
        operands["A_scale"].uniform_(limit / 2, limit, generator=generator)
        limit = 1.0
    a.copy_(uniform(a.shape, a.dtype, generator, limit))


def symmetric_all_reduces(
    like: torch.Tensor, write: Callable[[torch.Tensor], object], group: Group
) -> dict[str, Callable[[], torch.Tensor]]:
    """Return calls of torch's all-reduces in symmetric memory, by name. Collective over ``group``.

    Each call first calls ``write`` to fill the input, a tensor with shape and dtype of ``like``.
    The result is empty on CPU ranks, and where torch has no kernel for the number of ranks.
    """
    if not current_device().has_async_tp or dist.get_world_size(group) not in (2, 4, 8):
        return {}
    import torch.distributed._symmetric_memory as symm_mem  # registers the operators

    members = group or dist.distributed_c10d._get_default_group()
    staged = symm_mem.empty(like.shape, dtype=like.dtype, device=like.device)
    symm_mem.rendezvous(staged, members)

    def one_shot() -> torch.Tensor:
        write(staged)
        out: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(
            staged, "sum", members.group_name
        )
        return out

    def two_shot() -> torch.Tensor:
        write(staged)
        return two_shot_all_reduce(staged, members)

    return {ONE_SHOT: one_shot, TWO_SHOT: two_shot}


def meta(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    """Return a meta tensor."""
    return torch.empty(sizes, dtype=dtype, device="meta")


def meta_with_layout(layout: str, dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    """Return a meta tensor whose last two dimensions have the given layout."""
    *batch, rows, columns = sizes
    if layout == "row-major":
        return meta(dtype, *sizes)
    if layout == "column-major":
        return meta(dtype, *batch, columns, rows).mT
    return meta(dtype, *batch, rows, 2 * columns)[..., ::2]
