"""Algorithms of all-reduce: their candidates, checks and launches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.collective import context as collective_context
from triton_dist.kernels.common.context import checked_buffer
from triton_dist.kernels.common.exchange.buffer import (
    DEFAULT_PARAMS,
    LARGE_PARAMS,
    SMALL_PARAMS,
    TUNABLES,
    Exchange,
    LaunchParams,
    checked_params,
    is_worth_trying,
    params_from_config,
)
from triton_dist.kernels.common.exchange.sums import (
    DEFAULT_MAX_PACKET_BYTES,
    DEFAULT_MIN_TWO_SHOT_BYTES,
    MAX_PACKET_BYTES,
    PACKET_PARAMS,
    TWO_SHOT_IN_PACKETS,
    TWO_SHOT_PACKET_CANDIDATES,
    max_one_shot_bytes,
    max_two_shot_packet_bytes,
    one_shot_exchange,
    two_shot_exchange,
)
from triton_dist.kernels.common.op import (
    Algorithm,
    Algorithms,
    OpCall,
    SelectableAlgorithm,
    check_straggler,
)
from triton_dist.kernels.common.peers import fold_to_tag
from triton_dist.kernels.nvidia.allreduce.context import AllReduceContext, AllReduceMethod
from triton_dist.runtime import waits
from triton_dist.runtime.device import current_device

PACKET_CANDIDATES = (
    *(LaunchParams(ctas, 2048) for ctas in (8, 16, 32, 64, 128)),
    LaunchParams(32, 512),
    LaunchParams(64, 1024),
    LaunchParams(64, 4096),
)
"""Launch parameters to try for packets. A thread sends two packets (8 bytes of data) at a time."""


@dataclass(eq=False, repr=False)  # not frozen, because that would take 1 us more per call
class Call(OpCall):
    """One call: the arguments of ``all_reduce``. If the tuner has already checked the tensors, it
    passes the call's key as ``validated_key``."""

    x: torch.Tensor
    ctx: AllReduceContext
    output: torch.Tensor | None = None
    method: AllReduceMethod | None = None
    straggler_option: tuple[int, int] | None = None
    num_ctas: int | None = None
    block_bytes: int | None = None
    num_chunks: int | None = None
    packets: bool | None = None
    algorithm: str | None = None
    validated_key: object = None

    def __post_init__(self) -> None:
        if self.validated_key is None:
            check_tensors(self.x, self.ctx, self.output)
        if self.straggler_option is not None:
            check_straggler("all_reduce", self.straggler_option)
        if self.method is not None:
            self.algorithm = algorithm_of(self.method)
        self.chosen_algorithm = ALGORITHMS[self.algorithm or BySize.name]
        self.params = DEFAULT_PARAMS
        self.chosen_algorithm.check(self)


def check_tensors(x: torch.Tensor, ctx: AllReduceContext, output: torch.Tensor | None) -> None:
    """Raise ``InvalidArgument`` for invalid tensors, or ``ContextFinalized``."""
    buffer = checked_buffer(ctx, AllReduceContext, "all_reduce", "create_allreduce_ctx")
    device = buffer.device.torch_device
    collective_context.check_tensor("all_reduce", "x", x, device)
    if output is not None:
        collective_context.check_output("all_reduce", output, x, x.numel(), device, 0)


def algorithm_of(method: object) -> str | None:
    """Return the name of the algorithm that ``method`` selects; ``None`` for ``None``."""
    if method is None:
        return None
    if not isinstance(method, AllReduceMethod):
        raise InvalidArgument("all_reduce", "method", method, "an AllReduceMethod, or None")
    if method.replacement is not None:
        expected = f"{method.replacement}: multicast and TMA reductions are not supported"
        raise InvalidArgument("all_reduce", "method", method, expected)
    name: str = method.value
    return name


class Sizes(NamedTuple):
    """Sizes that determine which configs are worth trying."""

    nbytes: int
    num_ranks: int
    requested_algorithm: str | None
    """Algorithm that the keyword ``method`` selects, or ``None``."""

    @classmethod
    def of(
        cls,
        x: torch.Tensor,
        ctx: AllReduceContext,
        output: torch.Tensor | None = None,
        method: AllReduceMethod | None = None,
        straggler_option: tuple[int, int] | None = None,
        *_: Any,
        **__: Any,
    ) -> Sizes:
        return cls(x.nbytes, ctx.num_ranks, algorithm_of(method))


class _Algorithm(SelectableAlgorithm[Call, Sizes]):
    """Base class of the algorithms."""

    def fits(self, config: Mapping[str, Any], sizes: Sizes) -> bool:
        return sizes.num_ranks > 1 and super().fits(config, sizes)

    def check(self, call: Call) -> None:
        if call.packets:
            expected = f"None or False for algorithm={self.name!r}"
            raise InvalidArgument("all_reduce", "packets", call.packets, expected)

    def run(self, call: Call) -> torch.Tensor:
        x, ctx, output = call.x.detach(), call.ctx, call.output
        in_place = output is not None and output.data_ptr() == x.data_ptr()
        # During tuning, do not overwrite x, because the next candidates and the call itself read x.
        preserves_x = in_place and waits.are_limited()
        sums = torch.empty_like(x) if output is None or preserves_x else output
        ctx.sleep(call.straggler_option)
        if ctx.num_ranks > 1:
            self.sum(call, x, sums.detach(), in_place)
        elif not in_place:
            sums.detach().view(-1).copy_(x.view(-1))
        return sums

    @abstractmethod
    def sum(self, call: Call, x: torch.Tensor, sums: torch.Tensor, in_place: bool) -> None:
        """Launch the all-reduce over several ranks. ``in_place``: the caller's output is x."""


class BySize(Algorithm[Call, Sizes]):
    """Default without tuning: one-shot or two-shot by size. The tuner does not try it."""

    name = "by_size"

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        return [()]

    def fits(self, config: Mapping[str, Any], sizes: Sizes) -> bool:
        return False

    def check(self, call: Call) -> None:
        is_small = call.x.nbytes < DEFAULT_MIN_TWO_SHOT_BYTES
        call.chosen_algorithm = ALGORITHMS[OneShot.name if is_small else TwoShot.name]
        call.chosen_algorithm.check(call)

    def run(self, call: Call) -> torch.Tensor:
        raise NotImplementedError  # ``check`` replaces ``call.chosen_algorithm``


class _ExchangeAlgorithm(_Algorithm):
    """All-reduce by our kernels. Tensors larger than the context's memory take several launches."""

    method: ClassVar[AllReduceMethod]
    tunables: ClassVar[tuple[str, ...]] = TUNABLES

    def fits_sizes(self, config: Mapping[str, Any], sizes: Sizes) -> bool:
        if sizes.requested_algorithm is None and not self.is_candidate(sizes):
            return False
        shard_bytes = -(-sizes.nbytes // self.num_shards(sizes.num_ranks))
        return is_worth_trying(params_from_config(config), shard_bytes)

    def is_candidate(self, sizes: Sizes) -> bool:
        """Return whether the algorithm is worth trying at these sizes."""
        return True

    def check(self, call: Call) -> None:
        super().check(call)
        call.params = checked_params("all_reduce", call.num_ctas, call.block_bytes, call.num_chunks)

    def compile(self, call: Call) -> None:
        """Compile the kernel of the first launch."""
        x = call.x
        if call.ctx.num_ranks > 1:
            exchange = self._exchange(call, min(x.numel(), self._max_elements(call)))
            out = torch.empty_like(x) if call.output is None else call.output
            call.ctx.buffer.launch(exchange, x, out).compile()

    def sum(self, call: Call, x: torch.Tensor, sums: torch.Tensor, in_place: bool) -> None:
        flat, flat_sums, step = x.view(-1), sums.view(-1), self._max_elements(call)
        for first in range(0, x.numel(), step):
            chunk, chunk_sums = flat[first : first + step], flat_sums[first : first + step]
            call.ctx.buffer.run(self._exchange(call, chunk.numel()), chunk, chunk_sums)

    @abstractmethod
    def num_shards(self, num_ranks: int) -> int:
        """Return the number of shards into which x is divided."""

    @abstractmethod
    def exchange(self, call: Call, elements: int, total: int, call_tag: int) -> Exchange:
        """Describe a launch that sums ``total`` elements, with shards of ``elements`` elements.

        Ranks compare ``call_tag`` to detect calls of different sizes.
        """

    def _max_elements(self, call: Call) -> int:
        """Return the number of elements that one launch can sum."""
        return call.ctx.chunk_elements(self.method, call.x.element_size(), bool(call.packets))

    def _exchange(self, call: Call, total: int) -> Exchange:
        elements = -(-total // self.num_shards(call.ctx.num_ranks))
        return self.exchange(call, elements, total, fold_to_tag(call.x.numel()))


class OneShot(_ExchangeAlgorithm):
    """Every rank sends x to all ranks and adds all tensors. For small tensors.

    The smallest tensors are sent in packets, words that contain their own flags.
    """

    name, method = AllReduceMethod.ONE_SHOT.value, AllReduceMethod.ONE_SHOT
    tunables = ("num_ctas", "block_bytes", "packets")

    def candidates(self) -> Iterator[tuple[Any, ...]]:
        for packets, candidates in ((True, PACKET_CANDIDATES), (False, SMALL_PARAMS)):
            for params in candidates:
                yield params.num_ctas, params.block_bytes, packets

    def fits(self, config: Mapping[str, Any], sizes: Sizes) -> bool:
        if sizes.num_ranks == 1:  # keep at least one candidate
            return not config["packets"]
        return super().fits(config, sizes)

    def fits_sizes(self, config: Mapping[str, Any], sizes: Sizes) -> bool:
        if config["packets"] and sizes.nbytes > MAX_PACKET_BYTES:
            return False
        return super().fits_sizes(config, sizes)

    def is_candidate(self, sizes: Sizes) -> bool:
        return sizes.nbytes <= max_one_shot_bytes(sizes.num_ranks)

    def check(self, call: Call) -> None:
        if call.packets is None:
            call.packets = call.x.nbytes <= DEFAULT_MAX_PACKET_BYTES
        default = PACKET_PARAMS if call.packets else DEFAULT_PARAMS
        call.params = checked_params("all_reduce", call.num_ctas, call.block_bytes, 1, default)

    def num_shards(self, num_ranks: int) -> int:
        return 1

    def exchange(self, call: Call, elements: int, total: int, call_tag: int) -> Exchange:
        return one_shot_exchange(total, call.params, call_tag, bool(call.packets))


class TwoShot(_ExchangeAlgorithm):
    """Every rank receives its shard of x from all ranks, adds, and sends the sum to all ranks."""

    name, method = AllReduceMethod.TWO_SHOT.value, AllReduceMethod.TWO_SHOT

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        return (params.tunable_values for params in SMALL_PARAMS + LARGE_PARAMS)

    def num_shards(self, num_ranks: int) -> int:
        return num_ranks

    def exchange(self, call: Call, elements: int, total: int, call_tag: int) -> Exchange:
        return two_shot_exchange(total, call.ctx.num_ranks, call.params, call_tag)


class TwoShotInPackets(TwoShot):
    """Two shots in packets, words that contain their own flags.

    For medium sizes on more than two ranks.
    """

    name, tunables = TWO_SHOT_IN_PACKETS, ("num_ctas", "block_bytes")

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        return ((params.num_ctas, params.block_bytes) for params in TWO_SHOT_PACKET_CANDIDATES)

    def check(self, call: Call) -> None:
        super().check(call)
        call.params = checked_params(
            "all_reduce", call.num_ctas, call.block_bytes, 1, PACKET_PARAMS
        )

    def is_candidate(self, sizes: Sizes) -> bool:
        return sizes.num_ranks > 2 and sizes.nbytes <= max_two_shot_packet_bytes(sizes.num_ranks)

    def exchange(self, call: Call, elements: int, total: int, call_tag: int) -> Exchange:
        return two_shot_exchange(total, call.ctx.num_ranks, call.params, call_tag, True)

    def _max_elements(self, call: Call) -> int:
        return call.ctx.chunk_elements(self.method, call.x.element_size(), in_packets=True)


class Collective(_Algorithm):
    """All-reduce by ``torch.distributed`` (NCCL; gloo on CPU ranks)."""

    name = AllReduceMethod.COLLECTIVE.value

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        return [()]

    def fits_sizes(self, config: Mapping[str, Any], sizes: Sizes) -> bool:
        # CPU ranks test our kernels, so the library is not a candidate there.
        return sizes.requested_algorithm == self.name or current_device().has_nccl

    def sum(self, call: Call, x: torch.Tensor, sums: torch.Tensor, in_place: bool) -> None:
        if not in_place:
            sums.view(-1).copy_(x.view(-1))
        dist.all_reduce(sums, group=call.ctx.group)


ALGORITHMS = Algorithms(
    "all_reduce", (BySize(), OneShot(), TwoShot(), TwoShotInPackets(), Collective())
)
