"""Algorithms of all-gather and reduce-scatter, which differ only in their kernels.

A *shard* is the part that one rank owns: x of an all-gather, the result of a reduce-scatter.
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
from triton_dist.kernels.common.context import checked_buffer
from triton_dist.kernels.common.exchange.buffer import (
    LARGE_PARAMS,
    SMALL_PARAMS,
    TUNABLES,
    Exchange,
    ExchangeBuffer,
    LaunchParams,
    checked_params,
    is_worth_trying,
    params_for_device,
    params_from_config,
)
from triton_dist.kernels.common.exchange.protocol import kernel_all_gather, kernel_reduce_scatter
from triton_dist.kernels.common.exchange.pushed import kernel_add_pushed, kernel_copy_pushed
from triton_dist.kernels.common.op import Algorithms, OpCall, SelectableAlgorithm, check_straggler
from triton_dist.kernels.common.peers import fold_to_tag
from triton_dist.kernels.nvidia.shard_collectives.context import (
    AllGatherContext,
    ReduceScatterContext,
    ShardContext,
)
from triton_dist.runtime.device import current_device

# Minimum bytes of all shards for copy engines, because a copy takes some us to start.
_MIN_COPY_ENGINE_BYTES = 1 << 20
_COPY_ENGINE_PARAMS = tuple(
    LaunchParams(ctas, 16384, chunks) for ctas in (16, 64) for chunks in (1, 2, 4)
)


class ShardMethod(enum.Enum):
    """Base class of the enums of both ops, whose values are names of algorithms."""

    __repr__ = enum.Enum.__str__


class GatherMethod(ShardMethod):
    """Algorithm of an all-gather."""

    PUSH = "push"
    """In one launch, programs store x into every peer's memory and copy received shards to the
    output."""
    COPY_ENGINE = "copy_engine"
    """Copy engines push shards; a kernel copies them to the output. For large tensors."""
    COLLECTIVE = "collective"
    """All-gather by ``torch.distributed`` (NCCL; gloo on CPU ranks)."""


class ReduceScatterMethod(ShardMethod):
    """Algorithm of a reduce-scatter."""

    PUSH = "push"
    """In one launch, programs store each shard of x into its owner's memory, and the owner adds."""
    COPY_ENGINE = "copy_engine"
    """Copy engines push the addends, and a kernel adds them as they arrive. For large tensors."""
    COLLECTIVE = "collective"
    """Reduce-scatter by ``torch.distributed`` (NCCL; gloo on CPU ranks)."""


class Sizes(NamedTuple):
    """Sizes that determine which configs are worth trying."""

    shard_nbytes: int
    num_ranks: int
    requested_algorithm: str | None
    """Algorithm that the keyword ``method`` selects, or ``None``."""


@dataclass(eq=False, repr=False)  # not frozen, because that would take 1 us more per call
class ShardsCall(OpCall):
    """One call: the arguments of both ops. Each op has a subclass with its kernels."""

    x: torch.Tensor
    ctx: Any
    output: torch.Tensor | None
    method: ShardMethod | None
    num_ctas: int | None
    block_bytes: int | None
    num_chunks: int | None
    straggler_option: tuple[int, int] | None
    algorithm: str | None
    validated_key: object = None

    algorithms: ClassVar[Algorithms[Any, Any]]
    ctx_type: ClassVar[type[ShardContext]]
    is_x_shard: ClassVar[bool]
    """True if x is a shard (all-gather), false if the result is a shard (reduce-scatter)."""
    push_kernel: ClassVar[Any]
    """Kernel that pushes shards to peers, and copies or adds received shards."""
    copy_engine_kernel: ClassVar[Any]
    """Kernel that copies or adds the shards that copy engines push."""

    def __post_init__(self) -> None:
        if self.validated_key is None:
            self.check(self.x, self.ctx, self.output)
        if self.straggler_option is not None:
            check_straggler(self.algorithms.function, self.straggler_option)
        if self.method is not None:
            self.algorithm = self.algorithms.requested_algorithm(self.method)
        self.chosen_algorithm = self.algorithms[self.algorithm or Push.name]
        self.params = checked_params(
            self.algorithms.function, self.num_ctas, self.block_bytes, self.num_chunks
        )

    @classmethod
    def check(cls, x: torch.Tensor, ctx: ShardContext, output: torch.Tensor | None) -> None:
        """Raise ``InvalidArgument`` for invalid tensors, or ``ContextFinalized``."""
        function = cls.algorithms.function
        device = checked_buffer(
            ctx, cls.ctx_type, function, cls.ctx_type.creator
        ).device.torch_device
        check_tensor(function, "x", x, device)
        num_ranks, max_nbytes = ctx.num_ranks, ctx.workspace_nbytes
        if x.ndim < 1 or not (cls.is_x_shard or x.shape[0] % num_ranks == 0):
            expected = f"a first dimension that is a multiple of world_size = {num_ranks}"
            expected = "[M, …]" if cls.is_x_shard else expected
            raise InvalidArgument(function, "x.shape", tuple(x.shape), expected)
        if x.nbytes * (num_ranks if cls.is_x_shard else 1) > max_nbytes:
            expected = f"at most the context's workspace_nbytes = {max_nbytes}"
            expected += f", over world_size = {num_ranks}" if cls.is_x_shard else ""
            raise InvalidArgument(function, "x.nbytes", x.nbytes, expected)
        if output is not None:
            numel = x.numel() * num_ranks if cls.is_x_shard else x.numel() // num_ranks
            own_offset = ctx.rank * x.nbytes if cls.is_x_shard else None
            check_output(function, output, x, numel, device, own_offset)

    @staticmethod
    @abstractmethod
    def collective(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup | None, /) -> None:
        """Run the collective of ``torch.distributed``."""

    @classmethod
    def key_fn(
        cls,
        x: torch.Tensor,
        ctx: ShardContext,
        output: torch.Tensor | None = None,
        method: ShardMethod | None = None,
        *_: Any,
        **__: Any,
    ) -> Any:
        """Return the tuning key.

        The key contains a shard's number of elements, rounded to a range, whether kernels can use
        16-byte vectors, and the algorithm that ``method`` selects.
        """
        cls.check(x, ctx, output)
        shard_numel = cls.shard_elements(x, ctx)
        key = tune.bucket(shard_numel), x.dtype, fits_vectors(x, shard_numel), ctx.num_ranks
        return key if method is None else (*key, cls.algorithms.requested_algorithm(method))

    @classmethod
    def sizes(
        cls,
        x: torch.Tensor,
        ctx: ShardContext,
        output: torch.Tensor | None = None,
        method: ShardMethod | None = None,
        *_: Any,
        **__: Any,
    ) -> Sizes:
        """Return the sizes that determine which configs are worth trying."""
        shard_nbytes = cls.shard_elements(x, ctx) * x.element_size()
        return Sizes(shard_nbytes, ctx.num_ranks, cls.algorithms.requested_algorithm(method))

    @classmethod
    def shard_elements(cls, x: torch.Tensor, ctx: ShardContext) -> int:
        """Return the number of elements of a shard."""
        return x.numel() if cls.is_x_shard else x.numel() // ctx.num_ranks

    def output_rows(self, x_rows: int) -> int:
        num_ranks: int = self.ctx.num_ranks
        return x_rows * num_ranks if self.is_x_shard else x_rows // num_ranks


class _Algorithm(SelectableAlgorithm[ShardsCall, Sizes]):
    """Base class of the algorithms of both ops."""

    def run(self, call: ShardsCall) -> torch.Tensor:
        x, ctx, output = call.x.detach(), call.ctx, call.output
        if output is None:
            output = x.new_empty((call.output_rows(x.shape[0]), *x.shape[1:]))
        ctx.sleep(call.straggler_option)
        flat_x, flat_output = x.view(-1), output.detach().view(-1)
        if ctx.num_ranks == 1:
            flat_output.copy_(flat_x)
        else:
            self.launch(call, flat_x, flat_output)
        return output

    @abstractmethod
    def launch(self, call: ShardsCall, x: torch.Tensor, out: torch.Tensor) -> None:
        """Launch the op over several ranks, from x to ``out``, which are both 1-D."""


class Push(_Algorithm):
    """In one launch, programs store shards into peers' memory and copy or add received shards."""

    name = "push"
    tunables = TUNABLES

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        candidates = dict.fromkeys((params_for_device(), *SMALL_PARAMS, *LARGE_PARAMS))
        return (params.tunable_values for params in candidates)

    def fits_sizes(self, config: Mapping[str, Any], sizes: Sizes) -> bool:
        return is_worth_trying(params_from_config(config), sizes.shard_nbytes)

    def compile(self, call: ShardsCall) -> None:
        if call.ctx.num_ranks > 1:
            x = call.x
            out = x.new_empty(call.output_rows(x.numel())) if call.output is None else call.output
            self.memory(call.ctx).launch(self._exchange(call), x, out).compile()

    def launch(self, call: ShardsCall, x: torch.Tensor, out: torch.Tensor) -> None:
        self.memory(call.ctx).run(self._exchange(call), x, out)

    def memory(self, ctx: ShardContext) -> ExchangeBuffer | PushedShards:
        """Return the memory in which shards arrive."""
        return ctx.buffer

    def kernel(self, call: ShardsCall) -> Any:
        """Return the kernel to launch."""
        return call.push_kernel

    def _exchange(self, call: ShardsCall) -> Exchange:
        shard_numel, call_tag = call.shard_elements(call.x, call.ctx), fold_to_tag(call.x.numel())
        total = shard_numel * call.ctx.num_ranks
        return Exchange(self.kernel(call), shard_numel, total, call.params, call_tag)


class CopyEngine(Push):
    """Copy engines push shards; a kernel copies or adds them as they arrive. For large tensors."""

    name = "copy_engine"

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        return (params.tunable_values for params in _COPY_ENGINE_PARAMS)

    def fits_sizes(self, config: Mapping[str, Any], sizes: Sizes) -> bool:
        if sizes.num_ranks == 1 or sizes.shard_nbytes * sizes.num_ranks < _MIN_COPY_ENGINE_BYTES:
            return False
        return super().fits_sizes(config, sizes)

    def memory(self, ctx: ShardContext) -> ExchangeBuffer | PushedShards:
        return ctx.pushed_shards

    def kernel(self, call: ShardsCall) -> Any:
        return call.copy_engine_kernel


class Collective(_Algorithm):
    """The collective of ``torch.distributed`` (NCCL; gloo on CPU ranks)."""

    name = "collective"

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        # CPU ranks test our kernels, so the library is not a candidate there.
        return [()] if current_device().has_nccl else []

    def fits_sizes(self, config: Mapping[str, Any], sizes: Sizes) -> bool:
        return sizes.num_ranks > 1

    def launch(self, call: ShardsCall, x: torch.Tensor, out: torch.Tensor) -> None:
        call.collective(out, x, call.ctx.group)


class AllGatherCall(ShardsCall):
    """One call of ``all_gather``."""

    algorithms = Algorithms("all_gather", (Push(), CopyEngine(), Collective()))
    ctx_type, is_x_shard = AllGatherContext, True
    push_kernel, copy_engine_kernel = kernel_all_gather, kernel_copy_pushed
    collective = staticmethod(libraries.all_gather_into)


class ReduceScatterCall(ShardsCall):
    """One call of ``reduce_scatter``."""

    algorithms = Algorithms("reduce_scatter", (Push(), CopyEngine(), Collective()))
    ctx_type, is_x_shard = ReduceScatterContext, False
    push_kernel, copy_engine_kernel = kernel_reduce_scatter, kernel_add_pushed
    collective = staticmethod(libraries.reduce_scatter_into)
