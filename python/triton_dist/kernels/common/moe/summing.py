"""Contexts and calls of the ops that end a mixture-of-experts layer.

The ops compute ``sum over ranks and choices of weight * (x @ expert)``. Choices are the topk
experts of a token; a route is a pair of token and choice. The ops differ in the rows of the sum
that each rank gets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import triton

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.agreement import (
    check_equal_on_ranks,
    digest_text,
    must_compare_calls,
)
from triton_dist.kernels.common.context import (
    DTYPE_NAMES,
    DTYPES,
    Check,
    GEMMContext,
    agree_to_create,
    cached_after_checks,
    checked_buffer,
    dtype_checks,
    gradient_check,
    operand_checks,
    operand_signature,
    raise_first_error,
    range_check,
    tensor_checks,
)
from triton_dist.kernels.common.exchange.buffer import ExchangeBuffer
from triton_dist.kernels.common.gemm.scales import (
    BLOCK_ELEMENTS,
    FP8,
    NO_SCALING,
    ScaledKey,
    Scaling,
    scaling_of,
)
from triton_dist.kernels.common.moe.columns import ColumnChunks, PushedColumns, divide_columns
from triton_dist.kernels.common.moe.product import weights_layout
from triton_dist.kernels.common.moe.routing import (
    MAX_EXPERTS,
    MAX_TOPK,
)
from triton_dist.kernels.common.moe.scales import OperandScales
from triton_dist.kernels.common.moe.skew import SkewedKey
from triton_dist.kernels.common.moe.spaces import other_batches
from triton_dist.kernels.common.moe.topk_sum import (
    TOPK_EXCHANGE,
    TOPK_EXCHANGE_BYTES,
    topk_sum,
)
from triton_dist.kernels.common.op import Algorithms, GEMMCall
from triton_dist.runtime.ranks import Group, process_group_of

COLLECTIVE = "collective"
"""Name of the reduction by ``torch.distributed``: NCCL, or gloo on CPU ranks."""
MAX_COLUMN_CHUNKS = 64
_LIBRARY_WIDTH = 128
_OPERAND_NAMES = ("x", "weights", "chosen_experts", "expert_weight", "ctx")
_CALLER_OPTION_NAMES = ("n_chunks", "persistent", "config")


class MoEContextLimits(NamedTuple):
    """Largest sizes that a context supports, and the context's ranks."""

    max_tokens: int
    N: int
    E: int
    topk: int
    dtype: torch.dtype
    n_chunks_max: int
    local_world_size: int
    group: dist.ProcessGroup | None


class MoESumContext(GEMMContext[PushedColumns], ABC):
    """Context manager that owns the symmetric memory of an op.

    Attributes:
        max_routes, max_tokens: maximum number of routes and of tokens of a call.
        N: columns of the result.
        E, topk: number of experts, and number of experts per token.
        dtype: dtype of the result, and of x and weights unless they are fp8.
        n_chunks_max: maximum number of chunks of columns.
    """

    function: ClassVar[str]
    creator: ClassVar[str]
    """Names of the op and of the function that creates its contexts, for errors."""
    reductions: ClassVar[tuple[str, ...]]
    """Names of the reductions except ``COLLECTIVE``, the most general first."""
    returns_all_rows: ClassVar[bool]
    """True if each rank gets all rows of the sum, False if it gets its share of the rows."""
    exchange: ExchangeBuffer

    def __init__(self, limits: MoEContextLimits) -> None:
        super().__init__(limits.group)
        self.max_tokens, self.max_routes = limits.max_tokens, limits.max_tokens * limits.topk
        self.N, self.E, self.topk = limits.N, limits.E, limits.topk
        self.dtype, self.n_chunks_max = limits.dtype, limits.n_chunks_max
        self.world_size = self.num_ranks
        self.local_world_size = min(limits.local_world_size, self.num_ranks)
        self.compares_ids = must_compare_calls()

    @staticmethod
    @abstractmethod
    def tokens_check(argument: str, tokens: int, num_ranks: int) -> Check:
        """Return the check of the number of tokens of a context or of a call."""

    @classmethod
    @abstractmethod
    def fits(cls, reduction: str, nbytes: int) -> bool:
        """Return whether a reduction over ranks is worth trying for an addend of ``nbytes``."""

    @classmethod
    def fits_sum(cls, reduction: str, nbytes: int) -> bool:
        """Like ``fits``, for a reduction that may also be ``TOPK_EXCHANGE``."""
        if reduction == TOPK_EXCHANGE:
            return nbytes <= TOPK_EXCHANGE_BYTES
        return cls.fits(reduction, nbytes)

    @abstractmethod
    def sum_over_ranks(self, total: torch.Tensor, reduction: str) -> torch.Tensor:
        """Return this rank's rows of the sum of ``total`` [M, N] over several ranks."""

    @abstractmethod
    def compile_sum_over_ranks(self, total: torch.Tensor, reduction: str) -> None:
        pass

    def finish_chunks(self, rows: torch.Tensor, M: int) -> torch.Tensor:
        """Return this rank's result for M tokens, from the rows that this rank has added."""
        return rows

    def compile_finish(self, rows: torch.Tensor, M: int) -> None:
        pass

    def rows_per_rank(self, M: int) -> int:
        """Return the number of rows that a rank adds, for M tokens."""
        return -(-M // self.num_ranks)


_Context = TypeVar("_Context", bound=MoESumContext)


def create(
    ctx_type: type[_Context],
    rank: int,
    world_size: int,
    local_world_size: int,
    max_token_num: int,
    hidden_dim: int,
    num_experts: int,
    topk: int,
    input_dtype: torch.dtype,
    n_chunks_max: int,
    group: Group,
) -> _Context:
    """Create a context of class ``ctx_type``. Collective over ``group``.

    Raise the errors of ``agree_to_create`` and of the allocation.
    """
    members = process_group_of(group)

    def checks() -> Iterator[Check]:
        yield range_check(MAX_TOPK, "topk", topk)
        expected = f"a positive multiple of topk = {topk}: routes, not tokens"
        is_valid = max_token_num >= 1 and max_token_num % topk == 0
        yield "max_token_num", max_token_num, is_valid, expected
        tokens = ctx_type.tokens_check("", max_token_num // topk, world_size)
        yield "max_token_num", max_token_num, tokens[2], f"topk = {topk} times {tokens[3]}"
        yield range_check(MAX_EXPERTS, "num_experts", num_experts)
        yield from dtype_checks("input_dtype", input_dtype)
        yield range_check(MAX_COLUMN_CHUNKS, "n_chunks_max", n_chunks_max)

    sizes = {
        "max_token_num": max_token_num, "hidden_dim": hidden_dim, "num_experts": num_experts,
        "topk": topk, "n_chunks_max": n_chunks_max,
    }  # fmt: skip
    agree_to_create(
        ctx_type.creator, f"a {ctx_type.op_name}", members, rank,
        {"world_size": world_size, "local_world_size": local_world_size}, sizes, checks(),
        input_dtype=input_dtype, **{"comparison of ids": must_compare_calls()},
    )  # fmt: skip
    limits = MoEContextLimits(
        max_token_num // topk, hidden_dim, num_experts, topk, input_dtype, n_chunks_max,
        local_world_size, members,
    )  # fmt: skip
    return ctx_type(limits)


class SumKey(NamedTuple):
    """Tuning key, without the options that the caller fixes."""

    M: int
    """Number of tokens. The tuner rounds it up, because one tuning serves a range of M."""
    N: int
    K: int
    E: int
    topk: int
    dtype: torch.dtype
    layout: str
    num_ranks: int
    n_chunks_max: int


class SumSizes(NamedTuple):
    """Sizes and options that the caller fixes, which are equal for all calls of a tuning key."""

    key: SumKey
    n_chunks: int | None
    config: triton.Config | None

    @property
    def nbytes(self) -> int:
        """Bytes of one rank's addend."""
        dtype = getattr(self.key, "out_dtype", self.key.dtype)
        return int(self.key.M * self.key.N * dtype.itemsize)


def route_checks(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen_experts: torch.Tensor,
    expert_weight: torch.Tensor,
    E: int,
    topk: int | None,
) -> Iterator[Check]:
    """Yield the checks of operands that need no context. ``topk=None`` accepts any topk."""
    yield from tensor_checks(
        x=x, weights=weights, chosen_experts=chosen_experts, expert_weight=expert_weight
    )
    ids = tuple(chosen_experts.shape)
    expected = f"[M, topk{'' if topk is None else f' = {topk}'}], at least one token"
    is_valid = len(ids) == 2 and ids[0] >= 1 and 1 <= ids[1] <= MAX_TOPK and topk in (None, ids[1])
    yield "chosen_experts.shape", ids, is_valid, expected
    ids_dtype = chosen_experts.dtype
    is_valid = ids_dtype in (torch.int32, torch.int64)
    yield "chosen_experts.dtype", ids_dtype, is_valid, "torch.int32 or torch.int64"
    shape = tuple(weights.shape)
    is_valid = len(shape) == 3 and min(shape) > 0 and shape[0] == E
    yield "weights.shape", shape, is_valid, f"[E = {E}, K_per_rank, N]"
    expected = f"a row for each of {ids[0] * ids[1]} routes, of K_per_rank = {shape[1]}"
    rows = tuple(x.shape)
    yield (
        "x.shape",
        rows,
        rows == (ids[0] * ids[1], shape[1]),
        f"[M * topk, K_per_rank]: {expected}",
    )
    expected = "unit stride along K; call x.contiguous()"
    yield "x.stride()", x.stride(), x.stride(1) == 1 or x.shape[1] == 1, expected
    choices = tuple(expert_weight.shape)
    yield "expert_weight.shape", choices, choices == ids, f"the shape of chosen_experts, {ids}"
    yield "expert_weight.dtype", expert_weight.dtype, expert_weight.dtype in DTYPES, DTYPE_NAMES
    for name, tensor in (("chosen_experts", chosen_experts), ("expert_weight", expert_weight)):
        expected = f"contiguous; call {name}.contiguous()"
        yield f"{name}.stride()", tensor.stride(), tensor.is_contiguous(), expected
        expected = f"the device of x, {x.device}"
        yield f"{name}.device", tensor.device, tensor.device == x.device, expected
    yield gradient_check("expert_weight", expert_weight)


@dataclass(eq=False, repr=False)  # Not frozen, because that would take 1 us more per call.
class SumCall(GEMMCall):
    """Arguments of one call. Each op has a subclass with its context class and algorithms."""

    x: torch.Tensor
    weights: torch.Tensor
    chosen_experts: torch.Tensor
    expert_weight: torch.Tensor
    ctx: Any
    n_chunks: int | None
    persistent: bool | None
    config: triton.Config | None
    num_chunks: int | None
    reduction: str | None
    routing_skew: str | None

    ctx_type: ClassVar[type[MoESumContext]]
    algorithms: ClassVar[Algorithms[Any, Any]]

    def __post_init__(self) -> None:
        key = self.validated_key  # includes the options that the caller fixes
        scaling = scaling_of(self.A_scale, self.B_scale, None, None, self.use_fast_accum)
        if key is None:
            key = self.key_fn(
                self.x, self.weights, self.chosen_experts, self.expert_weight, self.ctx,
                self.n_chunks, self.persistent, self.config, routing_skew=self.routing_skew,
                **scaling._asdict(),
            )  # fmt: skip
        key = SkewedKey.without_skew(key)
        self.key: Any = key if isinstance(key, SumKey | ScaledKey) else key[0]
        self.scales = OperandScales.of(self.x, self.weights, scaling)
        self.tile_config = self.config or self.gemm_config
        """Tile config of our grouped GEMM; ``None`` for the library."""
        num_chunks = self.num_chunks if self.n_chunks is None else self.n_chunks
        self.num_column_chunks = 1 if num_chunks is None else num_chunks
        self.chosen_algorithm = self.algorithms[self.algorithm or next(iter(self.algorithms))]
        self.chosen_algorithm.check(self)

    def run(self) -> torch.Tensor:
        if self.ctx.compares_ids:
            check_equal_on_ranks(self.ctx_type.function, "ids", self.chosen_experts, self.ctx.group)
        return self.chosen_algorithm.run(self)

    @classmethod
    def check_operands(
        cls,
        x: torch.Tensor,
        weights: torch.Tensor,
        chosen_experts: torch.Tensor,
        expert_weight: torch.Tensor,
        ctx: MoESumContext,
        scaling: Scaling = NO_SCALING,
    ) -> SumKey:
        """Check the operands and return their tuning key, for fp8 operands a ``ScaledKey``.

        Equal calls get the same object.
        """
        function = cls.ctx_type.function
        device = checked_buffer(
            ctx, cls.ctx_type, function, cls.ctx_type.creator
        ).slots.epoch.device
        routing = chosen_experts, expert_weight

        def checks() -> Iterator[Check]:
            yield from route_checks(x, weights, *routing, ctx.E, ctx.topk)
            M, N = len(chosen_experts), weights.shape[2]
            yield "weights.shape", tuple(weights.shape), ctx.N == N, f"[E, K_per_rank, N = {ctx.N}]"
            yield cls.ctx_type.tokens_check("M", M, ctx.num_ranks)
            expected = f"at most {ctx.max_tokens}, the context's {ctx.max_routes} routes"
            yield "M", M, ctx.max_tokens >= M, expected
            yield from scaling.checks(x, weights, "x", "weights")
            if x.dtype in FP8:
                yield from operand_checks(x.dtype, device, x=x)
                yield from operand_checks(weights.dtype, device, weights=weights)
            else:
                yield from operand_checks(ctx.dtype, device, x=x, weights=weights)

        def make_key() -> SumKey:
            (M, topk), (E, K, N) = chosen_experts.shape, weights.shape
            layout = weights_layout(weights)
            unscaled_key = SumKey(
                M, N, K, E, topk, x.dtype, layout, ctx.num_ranks, ctx.n_chunks_max
            )
            key: SumKey = scaling._replace(out_dtype=ctx.dtype).extend_key(unscaled_key, x, weights)
            return key

        signature = operand_signature(weights, x, weights, *routing)
        signature = (*signature, *scaling.signature(weights))
        return cached_after_checks(ctx.checked_keys, signature, function, checks, make_key)

    @classmethod
    def key_fn(
        cls,
        x: torch.Tensor,
        weights: torch.Tensor,
        chosen_experts: torch.Tensor,
        expert_weight: torch.Tensor,
        ctx: MoESumContext,
        n_chunks: int | None = None,
        persistent: bool | None = None,
        config: triton.Config | None = None,
        *,
        routing_skew: str | None = None,
        **options: Any,
    ) -> Any:
        """Return the tuning key, which includes the options that the caller fixes."""
        scaling = scaling_of(**options)
        key: Any = cls.check_operands(x, weights, chosen_experts, expert_weight, ctx, scaling)
        if n_chunks is None and config is None:
            return SkewedKey.of(ctx.function, key, routing_skew)
        max_chunks = ctx.n_chunks_max
        if n_chunks is not None and not (isinstance(n_chunks, int) and 1 <= n_chunks <= max_chunks):
            expected = f"None, or 1 to the context's n_chunks_max = {max_chunks}"
            raise InvalidArgument(ctx.function, "n_chunks", n_chunks, expected)
        check_config(ctx.function, config)
        key = key, n_chunks, None if config is None else str(config)
        return SkewedKey.of(ctx.function, key, routing_skew)

    @classmethod
    def sizes(cls, *args: Any, **kwargs: Any) -> SumSizes:
        """Return the sizes that determine which configs are worth trying for a call."""
        arguments = dict(zip(_OPERAND_NAMES + _CALLER_OPTION_NAMES, args, strict=False)) | kwargs
        x, weights, ids, choices, ctx = (arguments[name] for name in _OPERAND_NAMES)
        key = cls.check_operands(x, weights, ids, choices, ctx, scaling_of(**arguments))
        key = SkewedKey.of(ctx.function, key, arguments.get("routing_skew"))
        return SumSizes(key, arguments.get("n_chunks"), arguments.get("config"))

    def new_empty(self, *shape: int) -> torch.Tensor:
        """Return uninitialised memory with the dtype of the context."""
        return self.x.new_empty(shape, dtype=self.ctx.dtype)

    @property
    def column_chunks(self) -> ColumnChunks:
        """Chunks of columns of this call. Their width is a multiple of the tile width."""
        tiles = self.tile_config
        width = _LIBRARY_WIDTH if tiles is None else tiles.kwargs["BLOCK_SIZE_N"]
        if self.scales is not None and self.scales.is_block:
            width = max(width, BLOCK_ELEMENTS)  # both are powers of two
        rows = self.ctx.rows_per_rank(self.key.M)
        return divide_columns(rows, self.key.N, self.num_column_chunks, width)


def check_config(function: str, config: object) -> None:
    """Raise ``InvalidArgument`` unless ``config`` is ``None`` or contains tile sizes."""
    if config is None:
        return
    if not isinstance(config, triton.Config):
        raise InvalidArgument(function, "config", config, "a triton.Config, or None")
    missing = {f"BLOCK_SIZE_{axis}" for axis in "MNK"} - set(config.kwargs)
    if missing:
        expected = f"a config that sets {', '.join(sorted(missing))}"
        raise InvalidArgument(function, "config", str(config), expected)


def ids_digest_text(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen_experts: torch.Tensor,
    *_: Any,
    **__: Any,
) -> str:
    """Return a text with a digest of the ids, for the tuner's comparison of ranks (``agree_fn``).

    Waits for the device.
    """
    return digest_text("ids", chosen_experts)


def id_variants(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen_experts: torch.Tensor,
    *_: Any,
    routing_skew: str | None = None,
    **__: Any,
) -> list[dict[str, torch.Tensor]]:
    """Return replaced arguments with other expert ids, for the tuner (``input_variants_fn``)."""
    batches = other_batches(chosen_experts, len(weights), routing_skew)
    return [{"chosen_experts": ids} for ids in batches]


def sum_routes(
    function: str,
    multiply: Any,
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen_experts: torch.Tensor,
    expert_weight: torch.Tensor,
    config: triton.Config | None,
    **scales: torch.Tensor,
) -> torch.Tensor:
    """Return this rank's sum over choices [M, N], without a context.

    ``multiply`` is the function ``grouped_gemm``, which gets ``scales``. ``function`` is the name
    of the caller, for errors.
    """
    E = len(weights) if isinstance(weights, torch.Tensor) and weights.ndim else 0
    raise_first_error(function, route_checks(x, weights, chosen_experts, expert_weight, E, None))
    check_config(function, config)
    if config is None:
        products = multiply(x, weights, chosen_experts, **scales)
    else:
        products = multiply.fn(x, weights, chosen_experts, gemm_config=config, **scales)
    M, N = len(chosen_experts), weights.shape[2]
    total: torch.Tensor = products.new_empty(M, N)
    routing = expert_weight.detach(), chosen_experts
    topk_sum(products, *routing, None, total, E, rows_per_block=M, first_column=0, N=N).run()
    return total
