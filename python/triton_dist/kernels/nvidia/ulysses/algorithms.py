"""Algorithms of the two Ulysses ops, which differ only in the direction of the exchange."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
import triton

from triton_dist.kernels.common.collective.pushed import heads_check, row_stride
from triton_dist.kernels.common.context import (
    Check,
    checked_buffer,
    is_int,
    operand_checks,
    raise_first_error,
    tensor_checks,
)
from triton_dist.kernels.common.exchange.buffer import (
    MAX_CTAS,
    LaunchParams,
    checked_params,
    params_for_device,
)
from triton_dist.kernels.common.op import Algorithm, Algorithms, OpCall
from triton_dist.kernels.common.peers import digest_of
from triton_dist.kernels.nvidia.ulysses import kernel
from triton_dist.kernels.nvidia.ulysses.context import UlyssesContext
from triton_dist.runtime.device import current_device
from triton_dist.runtime.launch import Launch

_DEFAULT_PARAMS = LaunchParams(64, 16384, 4)
_PUSH_PARAMS = tuple(
    LaunchParams(ctas, nbytes, chunks)
    for ctas, nbytes, every in (
        (16, 8192, (1, 4)), (64, 8192, (1, 4)), (32, 16384, (4, 8)), (128, 8192, (4, 8, 16)),
        (64, 16384, (1, 4, 8, 16)),
    )
    for chunks in every
)  # fmt: skip


class UlyssesKey(NamedTuple):
    """Tuning key of a call. The algorithms also use it as the call's sizes."""

    M: int
    """Batch size times tokens of all ranks."""
    widths: tuple[int, ...]
    """Number of elements per token of q, k and v on a rank after ``ulysses_pre_attn``. 0 for a
    tensor that is ``None``."""
    dtype: torch.dtype
    ranks_per_head: int
    """Number of ranks that share a KV head."""
    is_batched: bool
    has_lengths: bool
    num_ranks: int


@dataclass(eq=False, repr=False)  # not frozen, because that would take 1 us more per call
class UlyssesCall(OpCall):
    """The arguments of one call, and values derived from them.

    The call is of ``ulysses_pre_attn`` if ``is_pre_attn`` is true, else of ``ulysses_post_attn``.
    """

    is_pre_attn: bool
    tensors: dict[str, Any]
    """Tensors by argument name, in the order q (or o), k, v."""
    ctx: UlyssesContext
    seq_lens: Sequence[int] | None = None
    num_ctas: int | None = None
    block_bytes: int | None = None
    num_chunks: int | None = None
    algorithm: str | None = None
    validated_key: Any = None
    function: str | None = None
    """Name of the op in errors, if another op contains this call."""

    def __post_init__(self) -> None:
        algorithms = PRE_ATTN if self.is_pre_attn else POST_ATTN
        function, ctx, lengths = self.function or algorithms.function, self.ctx, self.seq_lens
        if self.validated_key is None:
            checked_buffer(ctx, UlyssesContext, function, "create_ulysses_context")
            raise_first_error(
                function, call_checks(self.is_pre_attn, self.tensors, ctx, lengths)
            )  # fmt: skip
        self.x = list(self.tensors.values())
        first, size = self.x[0], ctx.num_ranks
        self.batch, tokens = int(first.shape[0]), int(first.shape[1])
        equal = tokens if self.is_pre_attn else tokens // size
        self.lengths = (equal,) * size if lengths is None else tuple(map(int, lengths))
        self.total, self.own_tokens = sum(self.lengths), self.lengths[ctx.rank]
        self.ranks_per_head = 1, ctx.ranks_per_kv_head, ctx.ranks_per_kv_head
        self.widths: tuple[int, ...] = tuple(
            0 if x is None
            else x.shape[2] * x.shape[3] // (size // ranks_per_head if self.is_pre_attn else 1)
            for x, ranks_per_head in zip(self.x, self.ranks_per_head, strict=True)
        )  # fmt: skip
        self.key: UlyssesKey = self.validated_key or UlyssesKey(
            self.batch * self.total, self.widths, first.dtype, ctx.ranks_per_kv_head,
            self.batch > 1, lengths is not None, size,
        )  # fmt: skip
        self.chosen_algorithm = algorithms[self.algorithm or Push.name]
        self.params = checked_params(
            function, self.num_ctas, self.block_bytes, self.num_chunks, _DEFAULT_PARAMS,
            MAX_CTAS // 2,
        )  # fmt: skip

    @property
    def agreement(self) -> str:
        """Text that, like the tuning key, must be equal on all ranks."""
        return f"{self.batch} batches, seq_lens {self.lengths}"

    def outputs(self) -> list[Any]:
        """Return uninitialised memory for the results, ``None`` for absent tensors."""
        tokens, size = (
            (self.total, 1) if self.is_pre_attn else (self.own_tokens, self.ctx.num_ranks)
        )
        out: list[Any] = []
        for x, width, ranks_per_head in zip(self.x, self.widths, self.ranks_per_head, strict=True):
            if x is None:
                out.append(None)
            else:
                heads = max(1, size // ranks_per_head) * width // x.shape[3]
                out.append(x.new_empty(self.batch, tokens, heads, x.shape[3]))
        return out

    @property
    def device_lengths(self) -> torch.Tensor | None:
        """``UlyssesContext.lengths`` of the call, ``None`` without ``seq_lens``."""
        return self.ctx.lengths(self.lengths) if self.key.has_lengths else None

    @property
    def digest(self) -> int:
        """Call tag, a digest of the arguments that must be equal on all ranks."""
        return digest_of(
            self.is_pre_attn, self.batch, self.lengths, self.widths, self.params.tunable_values
        )

    @property
    def plan(self) -> kernel.UlyssesPlan:
        params, size, (q, k, v) = self.params, self.ctx.num_ranks, self.widths
        return kernel.UlyssesPlan(
            size, triton.next_power_of_2(size), params.block_bytes // self.key.dtype.itemsize,
            params.num_chunks, params.num_ctas, self.is_pre_attn, self.batch > 1, self.widths,
            (0, q, q + k), self.ranks_per_head, q + k + v,
        )  # fmt: skip


def call_checks(
    is_pre_attn: bool,
    tensors: Mapping[str, Any],
    ctx: UlyssesContext,
    seq_lens: Sequence[int] | None,
) -> Iterator[Check]:
    """Yield checks of the arguments of ``UlyssesCall``."""
    (main, first), *_ = tensors.items()
    given = {name: x for name, x in tensors.items() if x is not None or name == main}
    yield from tensor_checks(**given)
    dims_of_k_and_v = ctx.head_dims[:1], ctx.head_dims[1:]
    # The first tensor has the dimension of v if it is the output of the attention.
    dims_of_first = ctx.head_dims[:1] if is_pre_attn and len(given) > 1 else ctx.head_dims
    for (name, x), dims in zip(tensors.items(), (dims_of_first, *dims_of_k_and_v), strict=True):
        if x is None:
            continue
        heads, ranks_per_head = (
            (ctx.q_heads, 1) if name == main else (ctx.kv_heads, ctx.ranks_per_kv_head)
        )
        heads = heads if is_pre_attn else heads * ranks_per_head // ctx.num_ranks
        fits = x.ndim == 4 and x.shape[2] == heads and x.shape[3] in dims
        dim = " or ".join(map(str, dict.fromkeys(dims)))
        yield f"{name}.shape", tuple(x.shape), fits, f"[batch, tokens, {heads}, {dim}]"
        expected = f"batch and tokens of {main}, {tuple(first.shape[:2])}"
        yield f"{name}.shape", tuple(x.shape), x.shape[:2] == first.shape[:2], expected
        yield from operand_checks(ctx.dtype, ctx.device.torch_device, **{name: x})
        if is_pre_attn:
            yield from heads_check(name, x)
        else:
            yield f"{name}.stride()", x.stride(), x.is_contiguous(), "a contiguous tensor"
    yield from token_checks(ctx, main, first.shape, seq_lens, is_pre_attn)
    yield "v", "a tensor", "v" not in given or "k" in given, "None if k is None"


def token_checks(
    ctx: UlyssesContext, name: str, shape: Sequence[int], lengths: Sequence[int] | None, local: bool
) -> Iterator[Check]:
    """Yield checks of ``seq_lens`` and of the tensor ``name``, whose ``shape`` begins with batch
    and tokens: of this rank if ``local`` is true, else of all ranks."""
    size, (batch, tokens, *_) = ctx.num_ranks, shape
    if lengths is not None:
        fits = isinstance(lengths, Sequence) and len(lengths) == size
        fits = fits and all(is_int(n) and n >= 0 for n in lengths)
        yield "seq_lens", lengths, fits, f"None, or the tokens of each of the {size} ranks"
        required = lengths[ctx.rank] if local else sum(lengths)
        fits, expected = tokens == required, f"{required} tokens, as seq_lens = {lengths} require"
    else:
        fits = local or tokens % size == 0
        expected = f"tokens that are a multiple of world_size = {size}, or seq_lens"
        lengths = [tokens if local else tokens // size] * size
    yield f"{name}.shape", tuple(shape), fits, expected
    expected = f"1 to {ctx.max_tokens} tokens of all ranks, the max_tokens of the context"
    fits = 1 <= batch * sum(lengths) <= ctx.max_tokens
    yield f"{name}.shape", tuple(shape), fits, expected
    expected = f"at most {ctx.max_local_tokens} tokens of a rank (max_local_tokens)"
    yield f"{name}.shape", tuple(shape), batch * max(lengths) <= ctx.max_local_tokens, expected


def pre_attn_call(
    q: Any, k: Any, v: Any, ctx: UlyssesContext, *options: Any, **others: Any
) -> UlyssesCall:
    """Return the call of ``ulysses_pre_attn`` with the given arguments."""
    return UlyssesCall(True, {"q": q, "k": k, "v": v}, ctx, *options, **others)


def post_attn_call(
    o: Any, ctx: UlyssesContext, k: Any = None, v: Any = None, *options: Any, **others: Any
) -> UlyssesCall:
    """Return the call of ``ulysses_post_attn`` with the given arguments."""
    return UlyssesCall(False, {"o": o, "k": k, "v": v}, ctx, *options, **others)


class _Algorithm(Algorithm[UlyssesCall, UlyssesKey]):
    """Base class of the algorithms of both ops."""

    def run(self, call: UlyssesCall) -> Any:
        out = call.outputs()
        if call.ctx.num_ranks > 1:
            self.move(call, out)
        else:
            for result, x in zip(out, call.x, strict=True):
                if x is not None:
                    result.copy_(x)
        return tuple(each for each in out if each is not None)

    @abstractmethod
    def move(self, call: UlyssesCall, out: list[Any]) -> None:
        """Exchange blocks between several ranks, and store the results in ``out``."""


class Push(_Algorithm):
    """Programs store blocks in the slots of other ranks, and copy received blocks to ``out``."""

    name = "push"
    tunables = "num_ctas", "block_bytes", "num_chunks"
    programs_per_worker: ClassVar[int] = 2  # one sends and one receives
    kernel: ClassVar[Any] = kernel.kernel_exchange_heads

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        candidates = dict.fromkeys((params_for_device(_DEFAULT_PARAMS), *_PUSH_PARAMS))
        return (params.tunable_values for params in candidates)

    def fits(self, config: Mapping[str, Any], sizes: UlyssesKey) -> bool:
        # Each program must have a block of q to send per chunk, or the config must be the smallest.
        nbytes = sizes.M // sizes.num_ranks * sizes.widths[0] * sizes.dtype.itemsize
        ctas, block_bytes, chunks = (config[name] for name in self.tunables)
        smallest = _PUSH_PARAMS[0].tunable_values
        return nbytes >= ctas * block_bytes * chunks or (ctas, block_bytes, chunks) == smallest

    def compile(self, call: UlyssesCall) -> None:
        if call.ctx.num_ranks > 1:
            self.launch(call, call.outputs()).compile()

    def move(self, call: UlyssesCall, out: list[Any]) -> None:
        buffer, params = call.ctx.buffer, call.params
        buffer.begin(1, params.num_ctas, params.num_chunks)
        self.repeat(buffer.launcher, call, out)
        buffer.timeout_words.end_call()

    def repeat(self, launcher: Any, call: UlyssesCall, out: Sequence[Any]) -> None:
        """Launch the kernel, or repeat the launch of an earlier call with other addresses."""
        tensors = {
            f"{name}.{head}": each
            for name, each_of in (("x", call.x), ("results", out))
            for head, each in zip("qkv", each_of, strict=True)
            if each is not None
        }
        if call.key.has_lengths:
            tensors["lengths_ptr"] = call.device_lengths
        key = (
            self.name, call.ctx.pushed.slots.index, call.key, call.batch, call.lengths,
            call.params, tuple(map(stride_of, call.x)), call.is_pre_attn,
        )  # fmt: skip
        launcher.run(key, lambda: self.launch(call, out), tensors)

    def launch(self, call: UlyssesCall, out: Sequence[Any]) -> Launch:
        params, lengths = call.params, call.device_lengths
        x = [None if each is None else each.detach() for each in call.x]
        arguments = (
            kernel.Heads(*x), kernel.Heads(*map(stride_of, x)), kernel.Heads(*out), lengths,
            *self.memory(call), call.lengths[0] if lengths is None else 0, call.total, call.batch,
            call.digest, call.ctx.rank,
        )  # fmt: skip
        grid = (self.programs_per_worker * params.num_ctas,)
        options = {"plan": call.plan, "num_warps": params.num_warps}
        return Launch(self.kernel, grid, arguments, options)

    def memory(self, call: UlyssesCall) -> tuple[Any, ...]:
        """Return the arguments of the kernel that describe the memory of the context."""
        return call.ctx.buffer.regions(call.key.dtype)


def stride_of(x: torch.Tensor | None) -> int | None:
    return None if x is None else row_stride(x)


class Collective(_Algorithm):
    """All-to-all by ``torch.distributed`` (NCCL, or gloo on CPU ranks) between two permutations."""

    name = "collective"
    is_fallback = True

    def candidates(self) -> Iterable[tuple[Any, ...]]:
        # CPU ranks test the kernels of this package, so libraries are no candidates there.
        return [()] if current_device().has_nccl else []

    def fits(self, config: Mapping[str, Any], sizes: UlyssesKey) -> bool:
        return sizes.num_ranks > 1

    def move(self, call: UlyssesCall, out: list[Any]) -> None:
        ctx, lengths, size = call.ctx, call.lengths, call.ctx.num_ranks
        sent = []
        for peer in range(size):
            for x, width, ranks_per_head in zip(
                call.x, call.widths, call.ranks_per_head, strict=True
            ):
                if x is not None and call.is_pre_attn:
                    heads = width // x.shape[3]
                    sent.append(x.narrow(2, peer // ranks_per_head * heads, heads).flatten())
                elif x is not None:
                    sent.append(x.narrow(1, sum(lengths[:peer]), lengths[peer]).flatten())
        own_tokens = (call.own_tokens,) * size
        sent_tokens, received_tokens = (
            (own_tokens, lengths) if call.is_pre_attn else (lengths, own_tokens)
        )
        sent_sizes, received_sizes = (
            [call.batch * tokens * sum(call.widths) for tokens in each]
            for each in (sent_tokens, received_tokens)
        )
        received = sent[0].new_empty(sum(received_sizes))
        dist.all_to_all_single(
            received, torch.cat(sent), received_sizes, sent_sizes, group=ctx.group
        )
        blocks = (
            each.split([call.batch * tokens * width for width in call.widths])
            for each, tokens in zip(received.split(received_sizes), received_tokens, strict=True)
        )
        for result, width, ranks_per_head, received_blocks in zip(
            out, call.widths, call.ranks_per_head, zip(*blocks, strict=True), strict=True
        ):
            if result is None:
                continue
            rows = [block.view(call.batch, -1, width) for block in received_blocks]
            target = result.flatten(2)
            if ranks_per_head == 1 or call.is_pre_attn:
                torch.cat(rows, 1 if call.is_pre_attn else 2, out=target)
            else:
                sums = (
                    torch.stack(rows).unflatten(0, (-1, ranks_per_head)).sum(1, dtype=torch.float32)
                )
                target.copy_(torch.cat(tuple(sums), 2))


PRE_ATTN = Algorithms("ulysses_pre_attn", (Push(), Collective()))
POST_ATTN = Algorithms("ulysses_post_attn", (Push(), Collective()))
