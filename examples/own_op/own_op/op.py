"""RMS normalisation of a matrix whose columns are split over ranks.

``out = x * rsqrt(mean(x**2) + eps) * weight``, with the mean over the columns of all ranks, as for
queries and keys under tensor parallelism. Each rank stores one fp32 sum of squares per row in the
memory of every rank, sets a flag there, and waits for the flags of its peers.

A flag contains the number of the call (its epoch), so flags are never reset. Consecutive calls use
different slots of memory: a rank may send while a peer still reads the sums of the previous call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import triton_dist
from triton_dist import language as dl
from triton_dist import tune
from triton_dist.errors import InvalidArgument
from triton_dist.ops import (
    Algorithm,
    Algorithms,
    EpochSlots,
    Launch,
    OpCall,
    OpContext,
    current_flag,
    op,
    timeout_words_at,
)
from triton_dist.utils import is_cuda

# 1. The kernel.


class Slot(NamedTuple):
    """Memory of one call: local pointers, and tables of the addresses on all ranks."""

    sums: Any  # fp32 [max_rows, num_ranks]
    sums_table: Any
    flags: Any  # int64 [max_rows, num_ranks]: one flag per block of rows and source rank
    flags_table: Any
    epoch: Any


@triton_dist.jit(do_not_specialize=["rows", "rank"])
def kernel_rms_norm(
    x_ptr, weight_ptr, out_ptr, slot, rows, rank, eps,
    COLUMNS: tl.constexpr, NUM_RANKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SEND: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    """Send the sums of squares of blocks of rows, normalise the blocks, or both. Any grid (n,)."""
    column = tl.arange(0, BLOCK_N)
    for block in range(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.num_programs(0)):
        row = block * BLOCK_M + tl.arange(0, BLOCK_M)
        index = row[:, None].to(tl.int64) * COLUMNS + column[None, :]
        mask = (row[:, None] < rows) & (column[None, :] < COLUMNS)
        x = tl.load(x_ptr + index, mask=mask, other=0.0).to(tl.float32)
        flag = current_flag(slot.epoch, rows)
        if SEND:
            for step in tl.static_range(NUM_RANKS):
                peer = (rank + step) % NUM_RANKS
                sums = dl.symm_at(slot.sums, slot.sums_table, peer)
                tl.store(sums + row * NUM_RANKS + rank, tl.sum(x * x, axis=1), mask=row < rows)
                flags = dl.symm_at(slot.flags, slot.flags_table, peer)
                dl.notify(flags + block * NUM_RANKS + rank, flag)  # release: after the store
        if NORMALISE:
            # Acquire: before the loads of sums, which depend on the token.
            flags = slot.flags + block * NUM_RANKS
            token = dl.wait(flags, NUM_RANKS, flag, timeout_words_at(slot.epoch), True)
            total = tl.zeros((BLOCK_M,), tl.float32)
            for source in tl.static_range(NUM_RANKS):
                sums = slot.sums + dl.consume_token(row * NUM_RANKS + source, token)
                total += tl.load(sums, mask=row < rows, other=0.0)
            scale = tl.rsqrt(total / (COLUMNS * NUM_RANKS) + eps)
            weight = tl.load(weight_ptr + column, mask=column < COLUMNS, other=0.0)
            out = x * scale[:, None] * weight.to(tl.float32)[None, :]
            tl.store(out_ptr + index, out.to(out_ptr.dtype.element_ty), mask=mask)


# 2. The context: symmetric memory, allocated by all ranks together.


class NormContext(OpContext[EpochSlots]):
    """Memory of ``sharded_rms_norm`` for up to ``max_rows`` rows. Creation is collective."""

    def __init__(self, max_rows: int, group: dist.ProcessGroup | None = None) -> None:
        super().__init__("sharded_rms_norm", group)
        self.max_rows = max_rows
        regions = {
            "sums": ((max_rows, self.num_ranks), torch.float32),
            "flags": ((max_rows, self.num_ranks), torch.int64),
        }
        with self.allocating() as add:
            self.buffer = add(EpochSlots("own_op", regions, ("flags",), "kernel_rms_norm", group))


# 3. The algorithms, each with its configs.


@dataclass(eq=False, repr=False)
class Call(OpCall):
    """Arguments of one call, checked."""

    x: torch.Tensor
    weight: torch.Tensor
    ctx: NormContext
    eps: float
    block_m: int
    num_warps: int
    algorithm: str | None

    def __post_init__(self) -> None:
        key_fn(self.x, self.weight, self.ctx)
        self.chosen_algorithm = ALGORITHMS[self.algorithm or OneLaunch.name]


class KernelAlgorithm(Algorithm[Call, int]):
    """Base of the algorithms that launch our kernel."""

    tunables: ClassVar[tuple[str, ...]] = ("block_m", "num_warps")
    launches: ClassVar[tuple[tuple[bool, bool], ...]]
    """``SEND`` and ``NORMALISE`` of each launch."""

    def candidates(self) -> list[tuple[int, int]]:
        return [(1, 4), (1, 8), (2, 8), (4, 8)]

    def fits(self, config: Mapping[str, Any], rows: int) -> bool:
        return bool(config["block_m"] <= rows)

    def compile(self, call: Call) -> None:
        for launch in self.prepared(call, torch.empty_like(call.x)):
            launch.compile()

    def run(self, call: Call) -> torch.Tensor:
        out, slots, num_ranks = torch.empty_like(call.x), call.ctx.buffer, call.ctx.num_ranks
        rows, flags = len(call.x), triton.cdiv(len(call.x), call.block_m) * num_ranks
        slots.take(rows)  # switch to the other slot; wait for peers that may still read it
        for launch in self.prepared(call, out):
            launch.run()
        # The next call needs no wait for peers, because this call waits for all of them.
        awaited = [flag for flag in range(flags) if flag % num_ranks != call.ctx.rank]
        slots.finish(has_awaited_peers=True, awaited_flags=lambda: {"flags": awaited})
        return out

    def prepared(self, call: Call, out: torch.Tensor) -> Iterator[Launch]:
        """Yield the launches of a call in the current slot."""
        (rows, columns), ctx, slots = call.x.shape, call.ctx, call.ctx.buffer
        sums, flags = slots["sums"], slots["flags"]
        slot = Slot(sums.local, sums.pointers, flags.local, flags.pointers, slots.epoch)
        args = (call.x, call.weight, out, slot, rows, ctx.rank, call.eps)
        grid = triton.cdiv(rows, call.block_m)
        for send, normalise in self.launches:
            # Programs that send and wait need the peers' programs, so the whole grid must run.
            programs = min(grid, ctx.device.num_sms) if send and normalise else grid
            options = {
                "COLUMNS": columns, "NUM_RANKS": ctx.num_ranks, "BLOCK_M": call.block_m,
                "BLOCK_N": triton.next_power_of_2(columns), "SEND": send, "NORMALISE": normalise,
                "num_warps": call.num_warps,
            }  # fmt: skip
            yield Launch(kernel_rms_norm, (programs,), args, options)


class OneLaunch(KernelAlgorithm):
    """Each program sends its sums and waits for its peers; x stays in registers."""

    name, launches = "one_launch", ((True, True),)


class TwoLaunches(KernelAlgorithm):
    """The first launch sends all sums, the second waits for them and reads x again."""

    name, launches = "two_launches", ((True, False), (False, True))


class Library(Algorithm[Call, int]):
    """The group's all-reduce (NCCL; gloo on CPU ranks) and torch's operators."""

    name, is_fallback = "library", True

    def candidates(self) -> list[tuple[()]]:
        return [()] if is_cuda() else []  # CPU ranks exist to run our kernels

    def fits(self, config: Mapping[str, Any], rows: int) -> bool:
        return True

    def run(self, call: Call) -> torch.Tensor:
        return call.ctx.buffer.run_without_slots(
            lambda: torch_rms_norm(call.x, call.weight, call.eps, call.ctx.group)
        )


def torch_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Compute the op in fp32 by torch and the group's all-reduce."""
    total = x.float().square().sum(1, keepdim=True)
    dist.all_reduce(total, group=group)
    columns = x.shape[1] * dist.get_world_size(group)
    return (x.float() * torch.rsqrt(total / columns + eps) * weight.float()).to(x.dtype)


ALGORITHMS = Algorithms("sharded_rms_norm", (OneLaunch(), TwoLaunches(), Library()))

# 4. The op. `key_fn` checks the arguments on every rank before any launch.


def key_fn(x: torch.Tensor, weight: torch.Tensor, ctx: NormContext, *_: Any, **__: Any) -> Any:
    """Return the key of a tuning: all calls with an equal key use one config."""
    checks = (
        ("x.shape", tuple(x.shape), x.ndim == 2 and 1 <= len(x) <= ctx.max_rows,
         f"[1 to {ctx.max_rows} rows, columns]"),
        ("x.is_contiguous()", False, x.is_contiguous(), "True"),
        ("weight.shape", tuple(weight.shape), weight.shape == x.shape[1:], "[columns of x]"),
    )  # fmt: skip
    for argument, value, good, expected in checks:
        if not good:
            raise InvalidArgument("sharded_rms_norm", argument, value, expected)
    return tune.bucket(len(x)), x.shape[1], x.dtype, weight.dtype, ctx.num_ranks


@op(
    algorithms=ALGORITHMS,
    call=Call,
    sizes=lambda x, *_, **__: tune.bucket(len(x)),
    key_fn=key_fn,
    agree_fn=lambda x, *_, **__: f"{len(x)} rows",
    version="1",
)
def sharded_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    ctx: NormContext,
    eps: float = 1e-6,
    block_m: int = 1,
    num_warps: int = 4,
    algorithm: str | None = None,
) -> torch.Tensor:
    """Return ``x * rsqrt(mean(x**2) + eps) * weight``, with the mean over the columns of all ranks.

    Args:
        x: [rows, columns], this rank's columns; contiguous, equal shapes on all ranks.
        weight: [columns], this rank's part.
        ctx: memory for at least the rows of x.
        eps: added to the mean.
        block_m, num_warps, algorithm: tuned.
    """
    return Call(x, weight, ctx, eps, block_m, num_warps, algorithm).run()
