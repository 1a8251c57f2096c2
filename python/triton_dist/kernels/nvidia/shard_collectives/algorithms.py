"""Ways of all-gather and reduce-scatter, which differ in kernels alone.

Both move shards. A *shard* is what one rank owns, ``elements`` long: x of an all-gather, the result
of a reduce-scatter. The *whole* is the other tensor, the shards of all ranks one after the other.
"""

from __future__ import annotations

import enum
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from triton_dist import tune
from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common import libraries
from triton_dist.kernels.common.collective.context import check_output, check_tensor, fits_vectors
from triton_dist.kernels.common.collective.pushed import PushedShards
from triton_dist.kernels.common.context import buffer_of
from triton_dist.kernels.common.exchange.buffer import (
    LARGE_SHAPES,
    SMALL_SHAPES,
    TUNABLES,
    Exchange,
    ExchangeBuffer,
    Shape,
    is_worth_trying,
    shape_in,
    shape_of,
    untuned,
)
from triton_dist.kernels.common.exchange.protocol import kernel_all_gather, kernel_reduce_scatter
from triton_dist.kernels.common.exchange.pushed import kernel_add_pushed, kernel_copy_pushed
from triton_dist.kernels.common.op import Algorithms, NamedAlgorithm, OpCall, check_straggler
from triton_dist.kernels.common.peers import folded
from triton_dist.kernels.nvidia.shard_collectives.context import (
    AllGatherContext,
    PushingContext,
    ReduceScatterContext,
)
from triton_dist.runtime.device import current_device

# Bytes from which on copy engines are worth trying: each copy takes them some us to begin.
_PUSHED_FROM = 1 << 20
_PUSHED_SHAPES = tuple(Shape(ctas, 16384, chunks) for ctas in (16, 64) for chunks in (1, 2, 4))


class PushMethod(enum.Enum):
    """Base of both ops' enumerations, whose values are names of ways."""

    __repr__ = enum.Enum.__str__


class GatherMethod(PushMethod):
    """Ways for tensors to travel."""

    PUSH = "push"
    """Programs store into every peer's memory and copy out what they get: one launch."""
    COPY_ENGINE = "copy_engine"
    """Copy engines push them, and a kernel copies them out as they come: for many bytes."""
    COLLECTIVE = "collective"
    """The group's all-gather: NCCL, gloo on CPU ranks."""


class ReduceScatterMethod(PushMethod):
    """Ways to compute the shards of the sum."""

    PUSH = "push"
    """Programs store parts into their owners' memory, who add them: one launch."""
    COPY_ENGINE = "copy_engine"
    """Copy engines push them, and a kernel adds as they come: for many bytes."""
    COLLECTIVE = "collective"
    """The group's reduce-scatter: NCCL, gloo on CPU ranks."""


class Sizes(NamedTuple):
    """Sizes that decide which configs are worth trying."""

    shard_nbytes: int
    num_ranks: int
    asked: str | None
    """The way that the caller's keywords ask for."""


@dataclass(eq=False, repr=False)  # made at each call: freezing it would take a us
class ShardsCall(OpCall):
    """One call: the parameters of both ops. Each op has a subclass with its parts."""

    x: torch.Tensor
    ctx: Any
    output: torch.Tensor | None
    method: PushMethod | None
    num_ctas: int | None
    block_bytes: int | None
    num_chunks: int | None
    straggler_option: tuple[int, int] | None
    algorithm: str | None
    accepted_key: object = None

    algorithms: ClassVar[Algorithms[Any, Any]]
    kind: ClassVar[type[PushingContext]]
    gathers: ClassVar[bool]
    """The result is the whole, and x a shard; or the other way round."""
    push: ClassVar[Any]
    """The kernel that pushes shards, and copies or adds those that it gets."""
    take_pushed: ClassVar[Any]
    """The kernel that copies or adds those that copy engines push."""

    def __post_init__(self) -> None:
        if self.accepted_key is None:
            self.check(self.x, self.ctx, self.output)
        if self.straggler_option is not None:
            check_straggler(self.algorithms.function, self.straggler_option)
        if self.method is not None:
            self.algorithm = self.algorithms.asked(self.method)
        self.chosen = self.algorithms[self.algorithm or Push.name]
        self.shape = shape_of(
            self.algorithms.function, self.num_ctas, self.block_bytes, self.num_chunks
        )

    @classmethod
    def check(cls, x: torch.Tensor, ctx: PushingContext, output: torch.Tensor | None) -> None:
        """Raise ``InvalidArgument`` (or ``ContextFinalized``) unless the call can work."""
        function = cls.algorithms.function
        device = buffer_of(ctx, cls.kind, function, cls.kind.creator).device.torch_device
        check_tensor(function, "x", x, device)
        size, most = ctx.num_ranks, ctx.workspace_nbytes
        if x.ndim < 1 or not (cls.gathers or x.shape[0] % size == 0):
            expected = f"a first dimension that is a multiple of world_size = {size}"
            expected = "[M, …]" if cls.gathers else expected
            raise InvalidArgument(function, "x.shape", tuple(x.shape), expected)
        if x.nbytes * (size if cls.gathers else 1) > most:
            expected = f"at most the context's workspace_nbytes = {most}"
            expected += f", over world_size = {size}" if cls.gathers else ""
            raise InvalidArgument(function, "x.nbytes", x.nbytes, expected)
        if output is not None:
            numel = x.numel() * size if cls.gathers else x.numel() // size
            place = ctx.rank * x.nbytes if cls.gathers else None
            check_output(function, output, x, numel, device, place)

    @staticmethod
    @abstractmethod
    def collective(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup | None, /) -> None:
        """Do it by the group's own."""

    @classmethod
    def key_fn(
        cls,
        x: torch.Tensor,
        ctx: PushingContext,
        output: torch.Tensor | None = None,
        method: PushMethod | None = None,
        *_: Any,
        **__: Any,
    ) -> Any:
        """Name what a tuning is for. Elements of a shard count in buckets, and whether vectors fit.
        A way that the older keyword asks for is tuned by itself."""
        cls.check(x, ctx, output)
        elements = cls.elements(x, ctx)
        key = tune.bucket(elements), x.dtype, fits_vectors(x, elements), ctx.num_ranks
        return key if method is None else (*key, cls.algorithms.asked(method))

    @classmethod
    def sizes(
        cls,
        x: torch.Tensor,
        ctx: PushingContext,
        output: torch.Tensor | None = None,
        method: PushMethod | None = None,
        *_: Any,
        **__: Any,
    ) -> Sizes:
        """Say what decides which configs are worth trying for x."""
        shard_nbytes = cls.elements(x, ctx) * x.element_size()
        return Sizes(shard_nbytes, ctx.num_ranks, cls.algorithms.asked(method))

    @classmethod
    def elements(cls, x: torch.Tensor, ctx: PushingContext) -> int:
        """Count those of a shard."""
        return x.numel() if cls.gathers else x.numel() // ctx.num_ranks

    def rows(self, rows: int) -> int:
        """Count those of the result, where x has ``rows``."""
        size: int = self.ctx.num_ranks
        return rows * size if self.gathers else rows // size


class _Algorithm(NamedAlgorithm[ShardsCall, Sizes]):
    """A way of both ops."""

    def run(self, call: ShardsCall) -> torch.Tensor:
        x, ctx, output = call.x.detach(), call.ctx, call.output
        if output is None:
            output = x.new_empty((call.rows(x.shape[0]), *x.shape[1:]))
        ctx.sleep(call.straggler_option)
        flat, flat_output = x.view(-1), output.detach().view(-1)
        if ctx.num_ranks == 1:
            flat_output.copy_(flat)
        else:
            self.move(call, flat, flat_output)
        return output

    @abstractmethod
    def move(self, call: ShardsCall, x: torch.Tensor, out: torch.Tensor) -> None:
        """Launch it among several ranks, from x to out, which are flat."""


class Push(_Algorithm):
    """Programs store shards into every peer's memory, who copy or add what they get: one launch."""

    name = "push"
    tunables = TUNABLES

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        shapes = dict.fromkeys((untuned(), *SMALL_SHAPES, *LARGE_SHAPES))
        return (shape.values for shape in shapes)

    def fits_sizes(self, config: Mapping[str, Any], sizes: Sizes) -> bool:
        return is_worth_trying(shape_in(config), sizes.shard_nbytes)

    def compile(self, call: ShardsCall) -> None:
        if call.ctx.num_ranks > 1:
            x = call.x
            out = x.new_empty(call.rows(x.numel())) if call.output is None else call.output
            self.memory(call.ctx).launch(self._exchange(call), x, out).compile()

    def move(self, call: ShardsCall, x: torch.Tensor, out: torch.Tensor) -> None:
        self.memory(call.ctx).run(self._exchange(call), x, out)

    def memory(self, ctx: PushingContext) -> ExchangeBuffer | PushedShards:
        """Return where shards arrive."""
        return ctx.buffer

    def kernel(self, call: ShardsCall) -> Any:
        """Return what is launched."""
        return call.push

    def _exchange(self, call: ShardsCall) -> Exchange:
        elements, size = call.elements(call.x, call.ctx), folded(call.x.numel())
        total = elements * call.ctx.num_ranks
        return Exchange(self.kernel(call), elements, total, call.shape, size)


class CopyEngine(Push):
    """Copy engines push shards, and a kernel copies or adds them as they come: for many bytes."""

    name = "copy_engine"

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        return (shape.values for shape in _PUSHED_SHAPES)

    def fits_sizes(self, config: Mapping[str, Any], sizes: Sizes) -> bool:
        if sizes.num_ranks == 1 or sizes.shard_nbytes * sizes.num_ranks < _PUSHED_FROM:
            return False
        return super().fits_sizes(config, sizes)

    def memory(self, ctx: PushingContext) -> ExchangeBuffer | PushedShards:
        return ctx.pushed

    def kernel(self, call: ShardsCall) -> Any:
        return call.take_pushed


class Collective(_Algorithm):
    """The group's own: NCCL, gloo on CPU ranks."""

    name = "collective"

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        # CPU ranks are there to run our kernels.
        return [()] if current_device().has_nccl else []

    def fits_sizes(self, config: Mapping[str, Any], sizes: Sizes) -> bool:
        return sizes.num_ranks > 1

    def move(self, call: ShardsCall, x: torch.Tensor, out: torch.Tensor) -> None:
        call.collective(out, x, call.ctx.group)


class AllGatherCall(ShardsCall):
    """One call of ``all_gather``."""

    algorithms = Algorithms("all_gather", (Push(), CopyEngine(), Collective()))
    kind, gathers = AllGatherContext, True
    push, take_pushed = kernel_all_gather, kernel_copy_pushed
    collective = staticmethod(libraries.all_gather_into)


class ReduceScatterCall(ShardsCall):
    """One call of ``reduce_scatter``."""

    algorithms = Algorithms("reduce_scatter", (Push(), CopyEngine(), Collective()))
    kind, gathers = ReduceScatterContext, False
    push, take_pushed = kernel_reduce_scatter, kernel_add_pushed
    collective = staticmethod(libraries.reduce_scatter_into)
