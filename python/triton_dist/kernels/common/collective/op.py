"""What all-gather and reduce-scatter have in common: contexts, config space, tuning, the call.

Both move shards. A *shard* is what one rank owns, ``elements`` long: x of an all-gather, the result
of a reduce-scatter. The *whole* is the other tensor, the shards of all ranks one after the other.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from triton_dist import tune
from triton_dist.errors import ContextFinalized, InvalidArgument
from triton_dist.kernels.common.collective.context import (
    CollectiveContext,
    exact_size,
    recover,
    shard_bytes,
)
from triton_dist.kernels.common.collective.pushed import PushedShards
from triton_dist.kernels.common.exchange.buffer import (
    PUSHED_FROM,
    Exchange,
    ExchangeBuffer,
    fits_vectors,
)
from triton_dist.kernels.common.exchange.shapes import (
    DEFAULT_SHAPE,
    LARGE_SHAPES,
    SMALL_SHAPES,
    Shape,
    is_worth_trying,
    shape_in,
    shape_of,
    tunables_of,
)
from triton_dist.kernels.common.flags import folded
from triton_dist.kernels.common.op import tuned
from triton_dist.runtime.device import current_device


class PushMethod(enum.Enum):
    """How shards travel: what the enumerations of both ops have in common. Each has the members
    ``PUSH``, ``COPY_ENGINE`` and ``COLLECTIVE``, and says what they do."""

    def __repr__(self) -> str:
        return str(self)

    @property
    def by_copy_engine(self) -> bool:
        return self.name == "COPY_ENGINE"

    @property
    def by_collective(self) -> bool:
        return self.name == "COLLECTIVE"


class PushingContext(CollectiveContext):
    """Also with memory for shards that copy engines push."""

    def __init__(
        self, workspace_nbytes: int, local_world_size: int, group: dist.ProcessGroup | None
    ) -> None:
        super().__init__(workspace_nbytes, local_world_size, group)
        shard_nbytes = shard_bytes(workspace_nbytes, self.num_ranks)
        with self._allocating() as own:
            found = self.buffer.disagreements
            self._pushed = own(PushedShards(shard_nbytes, group, self.name, found))

    @classmethod
    def slot_bytes(cls, workspace_nbytes: int, num_ranks: int) -> int:
        """A shard, or a part of one, from each rank."""
        return num_ranks * shard_bytes(workspace_nbytes, num_ranks)

    @property
    def pushed(self) -> PushedShards:
        if self._buffer is None:
            raise ContextFinalized(type(self).__name__)
        return self._pushed

    def memory(self, method: PushMethod) -> ExchangeBuffer | PushedShards:
        """Where shards arrive that travel by ``method``."""
        return self.pushed if method.by_copy_engine else self.buffer


@dataclass(frozen=True)
class PushedCollective:
    """One of the two ops; its methods are what ``tune.autotune`` asks for, and the op itself.

    Attributes:
        methods: its ``PushMethod``.
        gathers: the result is the whole, and x a shard; or the other way round.
        push: the kernel that pushes shards, and copies or adds those that it gets.
        take_pushed: the kernel that copies or adds those that copy engines push.
        collective: ``collective(out, x, group)``, the group's own.
        check: ``check(x, ctx, output)`` raises for a call that cannot work.
    """

    methods: type[PushMethod]
    gathers: bool
    push: Any
    take_pushed: Any
    collective: Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup | None], None]
    check: Callable[[torch.Tensor, Any, torch.Tensor | None], None]

    def tuned(self, version: str) -> Callable[[Callable[..., Any]], tune.AutoTuner]:
        """Decorator of the op: what ``tune.autotune`` makes of it. ``version``: see there."""
        return tuned(
            config_space=self.config_space,
            key_fn=self.key_fn,
            prune_fn=self.prune_fn,
            prepare_fn=self.prepare,
            recover_fn=recover,
            agree_fn=exact_size,
            version=version,
        )

    def key_fn(
        self,
        x: torch.Tensor,
        ctx: PushingContext,
        output: torch.Tensor | None = None,
        *_: Any,
        **__: Any,
    ) -> Any:
        """What a tuning is for. Elements of a shard count in buckets, and whether vectors fit."""
        self.check(x, ctx, output)
        elements = self._elements(x, ctx)
        return tune.bucket(elements), x.dtype, fits_vectors(x, elements), ctx.num_ranks

    def prune_fn(
        self, config: Mapping[str, Any], x: torch.Tensor, ctx: PushingContext, *_: Any, **__: Any
    ) -> bool:
        """Whether a config is worth trying for x."""
        method, shard_nbytes = config["method"], self._elements(x, ctx) * x.element_size()
        if method.by_collective:
            return ctx.num_ranks > 1
        whole_nbytes = shard_nbytes * ctx.num_ranks
        if method.by_copy_engine and (ctx.num_ranks == 1 or whole_nbytes < PUSHED_FROM):
            return False
        return is_worth_trying(shape_in(config), shard_nbytes)

    def config_space(self) -> list[dict[str, Any]]:
        """The default; every other shape; on GPUs also what torch brings (CPU ranks are there to
        run our kernels)."""
        shapes = dict.fromkeys((DEFAULT_SHAPE, *SMALL_SHAPES, *LARGE_SHAPES))
        pushed = [Shape(ctas, 16384, pieces) for ctas in (16, 64) for pieces in (1, 2, 4)]
        space = [self._config("PUSH", shape) for shape in shapes]
        space += [self._config("COPY_ENGINE", shape) for shape in pushed]
        if current_device().has_libraries:
            space.append(self._config("COLLECTIVE", None))
        return space

    def _config(self, method: str, shape: Shape | None) -> dict[str, Any]:
        return {"method": self.methods[method], **tunables_of(shape)}

    def prepare(
        self,
        x: torch.Tensor,
        ctx: PushingContext,
        output: torch.Tensor | None = None,
        *,
        method: PushMethod,
        num_ctas: int | None = None,
        block_bytes: int | None = None,
        num_pieces: int | None = None,
        **_: Any,
    ) -> None:
        """Compile a candidate's kernel without launching anything."""
        if method.by_collective or ctx.num_ranks == 1:
            return
        shape = shape_of(num_ctas, block_bytes, num_pieces)
        out = x.new_empty(self._rows(x.numel(), ctx)) if output is None else output
        ctx.memory(method).launch(self._exchange(method, x, ctx, shape), x, out).compile()

    def call(
        self,
        x: torch.Tensor,
        ctx: PushingContext,
        output: torch.Tensor | None,
        method: PushMethod,
        shape: tuple[int | None, int | None, int | None],
        straggler_option: tuple[int, int] | None,
    ) -> torch.Tensor:
        """The op; ``shape``: num_ctas, block_bytes and num_pieces, as ``shape_of`` takes them.

        Raises:
            InvalidArgument, ContextFinalized: before anything is launched.
        """
        self.check(x, ctx, output)
        if not isinstance(method, self.methods):
            raise InvalidArgument(ctx.name, "method", method, f"a {self.methods.__name__}")
        launch_shape = shape_of(*shape)
        x = x.detach()
        if output is None:
            output = x.new_empty((self._rows(x.shape[0], ctx), *x.shape[1:]))
        ctx.sleep(straggler_option)
        flat, flat_output = x.view(-1), output.detach().view(-1)
        if ctx.num_ranks == 1:
            flat_output.copy_(flat)
        elif method.by_collective:
            self.collective(flat_output, flat, ctx.group)
        else:
            exchange = self._exchange(method, flat, ctx, launch_shape)
            ctx.memory(method).run(exchange, flat, flat_output)
        return output

    def _elements(self, x: torch.Tensor, ctx: PushingContext) -> int:
        """Of a shard."""
        return x.numel() if self.gathers else x.numel() // ctx.num_ranks

    def _rows(self, rows: int, ctx: PushingContext) -> int:
        """Of the result, where x has ``rows``."""
        return rows * ctx.num_ranks if self.gathers else rows // ctx.num_ranks

    def _exchange(
        self, method: PushMethod, x: torch.Tensor, ctx: PushingContext, shape: Shape
    ) -> Exchange:
        kernel = self.take_pushed if method.by_copy_engine else self.push
        elements = self._elements(x, ctx)
        return Exchange(kernel, elements, elements * ctx.num_ranks, shape, folded(x.numel()))
