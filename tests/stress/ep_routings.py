"""Call ep_dispatch and ep_combine with random routings on CPU ranks, and count wrong results.

    TRITON_INTERPRET=1 TRITON_DIST_DEVICE=cpu python -m tests.stress.ep_routings --ranks 3

The reference uses numpy and no code of the ops. All ranks draw the arguments of all ranks from one
generator, so that each rank computes the expected result without communication. Results must be
equal in all bits if the algorithm sums in the documented order.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from triton_dist.kernels.nvidia import create_ep_context, ep_combine, ep_dispatch, ep_send
from triton_dist.kernels.nvidia.expert_parallel import EPContext, Received
from triton_dist.kernels.nvidia.expert_parallel.algorithms import DISPATCH
from triton_dist.kernels.nvidia.expert_parallel.combine import COMBINE
from triton_dist.testing import spawn_ranks

CALLS_OF_CONTEXT = 25
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Sizes:
    """Arguments of a context, and the ranks."""

    num_ranks: int
    max_tokens: int
    hidden: int
    local_experts: int
    topk: int
    dtype: torch.dtype
    capacity: int | None


@dataclass(frozen=True)
class RandomCall:
    """Arguments of a call on all ranks: one array for each rank."""

    sizes: Sizes
    limit: int
    x: list[torch.Tensor]
    ids: list[np.ndarray]
    weights: list[np.ndarray] | None
    expert_map: np.ndarray | None
    fp8: str
    """"no", "quantise", or "given" for fp8 tokens with scales."""
    weighted_by: str
    """"combine" or "experts"."""
    alignment: int
    apart: bool
    """Send and receive in two launches."""
    dispatch: str
    combine: str
    options: dict[str, Any]
    """Other arguments of the combine."""


def draw_sizes(rng: np.random.Generator, num_ranks: int) -> Sizes:
    topk = int(rng.choice([1, 2, 3, 8, 16], p=[0.3, 0.3, 0.25, 0.12, 0.03]))
    local_experts = max(int(rng.integers(1, 3)), -(-topk // num_ranks))
    max_tokens = int(rng.integers(1, 10))
    capacity = int(rng.integers(1, max_tokens + 1)) if rng.random() < 0.3 else None
    hidden, dtype = int(rng.choice([16, 48, 130])), DTYPES[rng.integers(3)]
    return Sizes(num_ranks, max_tokens, hidden, local_experts, topk, dtype, capacity)


def draw_call(rng: np.random.Generator, sizes: Sizes) -> RandomCall:
    """Return the next call. Values are small integers, and weights are multiples of 1/8."""
    experts, topk = sizes.num_ranks * sizes.local_experts, int(rng.integers(1, sizes.topk + 1))
    limit = int(rng.integers(1, sizes.max_tokens + 1))
    expert_map, logical = None, experts
    if rng.random() < 0.3:
        logical = int(rng.integers(topk, experts + 1))
        replicas = int(rng.integers(1, 4))
        expert_map = np.full((logical, replicas), -1, np.int32)
        for row in expert_map:
            number = rng.integers(1, min(replicas, experts) + 1)
            row[:number] = rng.choice(experts, number, replace=False)
    skew = rng.choice(["even", "zipf", "equal"])
    odds = np.arange(1, logical + 1) ** -1.2 if skew == "zipf" else np.ones(logical)
    masked = rng.choice([0.0, 0.3, 1.0], p=[0.5, 0.4, 0.1])
    equal = rng.permutation(logical)[:topk]
    x, ids, weights = [], [], []
    for _ in range(sizes.num_ranks):
        tokens = int(rng.choice([0, limit, rng.integers(0, limit + 1)]))
        x.append(torch.from_numpy(rng.integers(-4, 5, (tokens, sizes.hidden))).to(sizes.dtype))
        rows = np.empty((tokens, topk), np.int64)
        for row in rows:
            row[:] = rng.choice(logical, topk, replace=False, p=odds / odds.sum())
            if skew == "equal":
                row[:] = equal
        rows[rng.random(rows.shape) < masked] = -1
        ids.append(rows)
        weights.append(rng.integers(1, 9, rows.shape).astype(np.float32) / 8)
    return RandomCall(
        sizes, limit, x, ids, weights if rng.random() < 0.7 else None, expert_map,
        fp8=str(rng.choice(["no", "no", "quantise", "given"])),
        weighted_by=str(rng.choice(["combine", "combine", "experts"])),
        alignment=int(rng.choice([1, 4, 16], p=[0.8, 0.15, 0.05])), apart=bool(rng.random() < 0.3),
        dispatch=str(rng.choice(["push", *DISPATCH])), combine=str(rng.choice(["push", *COMBINE])),
        options={"num_chunks": int(rng.integers(1, 3)), "num_ctas": int(rng.choice([1, 1, 1, 2]))},
    )  # fmt: skip


class Expected:
    """Reference of a call on one rank."""

    def __init__(self, call: RandomCall, rank: int) -> None:
        self.call, self.rank = call, rank
        sizes = call.sizes
        local, num_ranks = sizes.local_experts, sizes.num_ranks
        self.capacity = min(sizes.capacity or sizes.max_tokens, call.limit)
        self.physical = [self.replica(source) for source in range(num_ranks)]
        owner = [np.where(ids >= 0, ids // local, -1) for ids in self.physical]
        self.kept, self.dropped = [], 0
        for source, owners in enumerate(owner):
            kept = np.zeros_like(owners, bool)
            for peer in range(num_ranks):
                goes = (owners == peer).any(1)
                fits = goes & (np.cumsum(goes) <= self.capacity)
                kept |= (owners == peer) & fits[:, None]
                self.dropped += int((goes & ~fits).sum()) if source == rank else 0
            self.kept.append(kept)
        self.rows, self.scales = zip(*map(self.wire, call.x), strict=True)
        self.lay_out(owner)

    def replica(self, source: int) -> np.ndarray:
        ids, table = self.call.ids[source], self.call.expert_map
        if table is None:
            return ids
        choice = (np.arange(len(ids)) + source)[:, None] % (table >= 0).sum(1)[ids]
        return np.where(ids >= 0, table[ids, choice], -1)

    def wire(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the rows and scales that travel."""
        if self.call.fp8 == "no":
            return x, None
        groups = -(-x.shape[1] // 128)
        padded = torch.zeros(len(x), groups * 128)
        padded[:, : x.shape[1]] = x.float()
        blocks = padded.view(len(x), groups, 128)
        scales = blocks.abs().amax(2).clamp(min=1e-12) / 448
        rows = (blocks / scales[..., None]).flatten(1)[:, : x.shape[1]]
        return rows.to(torch.float8_e4m3fn), scales

    def lay_out(self, owner: list[np.ndarray]) -> None:
        """Sort the routes of this rank by expert, source, token and choice."""
        call, sizes = self.call, self.call.sizes
        found = [
            np.argwhere(kept & (owners == self.rank))
            for kept, owners in zip(self.kept, owner, strict=True)
        ]
        source = np.concatenate([np.full(len(routes), i) for i, routes in enumerate(found)])
        token, choice = np.concatenate(found).T
        expert = np.array(
            [
                self.physical[s][t, c] - self.rank * sizes.local_experts
                for s, t, c in zip(source, token, choice, strict=True)
            ],
            np.int64,
        )
        order = np.lexsort((choice, token, source, expert))
        self.routes = np.stack([expert, source, token, choice], 1)[order]
        number = np.bincount(expert, minlength=sizes.local_experts)
        padded = -(-number // call.alignment) * call.alignment
        self.ends = np.cumsum(padded)
        begins = self.ends - padded
        first = np.cumsum(number) - number
        self.position = np.arange(len(order)) + (begins - first)[self.routes[:, 0]]
        self.counts = np.zeros((sizes.local_experts, sizes.num_ranks), int)
        np.add.at(self.counts, (self.routes[:, 0], self.routes[:, 1]), 1)

    def errors_of(self, received: Received) -> Iterator[str]:
        """Yield the names of wrong arrays of a dispatch."""
        call, (expert, source, token, choice) = self.call, self.routes.T
        positions = np.full((call.sizes.num_ranks * call.limit, call.ids[0].shape[1]), -1)
        local_ids = positions.copy()
        positions[source * call.limit + token, choice] = self.position
        local_ids[source * call.limit + token, choice] = expert
        for name, want in (
            ("position_of_route", positions), ("local_ids", local_ids), ("ends", self.ends),
            ("counts", self.counts),
        ):  # fmt: skip
            if not np.array_equal(getattr(received, name).numpy(), want):
                yield name
        index = received.row_of_position[: self.ends[-1]].long()
        is_padding = np.ones(self.ends[-1], bool)
        is_padding[self.position] = False
        if not (index[is_padding] == -1).all():
            yield "padding"
        row = index[self.position]
        pairs = list(zip(source.tolist(), token.tolist(), strict=True))
        for name, values in (("rows", self.rows), ("scales", self.scales)):
            got = getattr(received, name)
            if (got is None) != (values[0] is None):
                yield name
            elif got is not None and pairs:
                want = torch.stack([values[s][t] for s, t in pairs])
                if not torch.equal(got[row].float(), want.float()):
                    yield name
        if call.weights is not None:
            want = [call.weights[s][t, c] for s, t, c in self.routes[:, 1:]]
            if received.weights[self.position].tolist() != want:
                yield "weights"
        if call.alignment > 1:
            expanded, _ = received.expanded()
            rows = received.rows[index.clamp(min=0)].float()
            want = torch.where((index >= 0)[:, None], rows, 0.0)
            if not torch.equal(expanded[: len(index)].float(), want):
                yield "expanded"

    def product(self, rows: torch.Tensor, scales: Any, expert: Any) -> torch.Tensor:
        """Stand for the grouped GEMM of rows: a product with a number of the expert."""
        if scales is not None:
            rows = rows.float() * scales.repeat_interleave(128, 1)[:, : rows.shape[1]]
        factor = torch.as_tensor(expert)[:, None] % 3 + 1
        return (rows.float() * factor).to(self.call.sizes.dtype)

    def sums(self) -> torch.Tensor:
        """Return this rank's combined tokens: ranks in order, and choices in order on each."""
        call, sizes, dtype = self.call, self.call.sizes, self.call.sizes.dtype
        ids, kept = self.physical[self.rank], self.kept[self.rank]
        rows, scales = self.rows[self.rank], self.scales[self.rank]
        total = torch.zeros(rows.shape)
        for peer in range(sizes.num_ranks):
            partial = torch.zeros(rows.shape)
            here = kept & (np.where(ids >= 0, ids // sizes.local_experts, -1) == peer)
            for choice in range(ids.shape[1]):
                product = self.product(rows, scales, ids[:, choice] % sizes.local_experts)
                if call.weights is not None:
                    weight = torch.from_numpy(call.weights[self.rank][:, choice, None])
                    product = product.float() * weight
                    if call.weighted_by == "experts":
                        product = product.to(dtype)
                partial += product.float() * torch.from_numpy(here[:, choice, None])
            total += partial.to(dtype).float()
        return total.to(dtype)


def errors_of(call: RandomCall, ctx: EPContext, dropped: int) -> tuple[list[str], int]:
    """Make a call; return the names of wrong arrays, and the tokens dropped since the start."""
    rank, expected = ctx.rank, Expected(call, ctx.rank)
    x, x_scale = call.x[rank], None
    if call.fp8 == "given":
        x, x_scale = expected.rows[rank], expected.scales[rank]
    ids = torch.from_numpy(call.ids[rank])
    weights = None if call.weights is None else torch.from_numpy(call.weights[rank])
    options = {
        "topk_weights": weights, "x_scale": x_scale, "quantise": call.fp8 == "quantise",
        "max_tokens": call.limit, "alignment": call.alignment, "block_bytes": 512, "num_ctas": 1,
        "expert_map": None if call.expert_map is None else torch.from_numpy(call.expert_map),
    }  # fmt: skip

    has_capacity = expected.capacity < call.limit
    has_packets = ctx.num_ranks > 1 and ctx.hidden % 16 == 0
    if call.apart:
        received = ep_send(x, ids, ctx, **options).wait()
    else:
        needs_push = has_capacity or (call.dispatch == "packets" and not has_packets)
        algorithm = "push" if needs_push else call.dispatch
        received = ep_dispatch.fn(x, ids, ctx, algorithm=algorithm, **options)
    wrong = list(expected.errors_of(received))
    dropped += expected.dropped
    if int(ctx.dropped) != dropped and has_capacity:
        wrong.append("dropped")

    size = int(received.ends[-1])
    y = torch.full((max(1, size), ctx.hidden), float("nan"), dtype=ctx.dtype)
    expert = torch.bucketize(torch.arange(size), received.ends.long(), right=True)
    row = received.row_of_position[:size].long()
    scales = None if received.scales is None else received.scales[row.clamp(min=0)]
    y[:size] = expected.product(received.rows[row.clamp(min=0)], scales, expert)
    by_experts = call.weighted_by == "experts" and received.weights is not None
    if by_experts:
        y[:size] = (y[:size].float() * received.weights[:size, None]).to(ctx.dtype)
    y[:size][row < 0] = float("nan")

    algorithm = call.combine
    out = ep_combine.fn(
        y, received, ctx, apply_weights=not by_experts, algorithm=algorithm, block_bytes=512,
        **call.options,
    )  # fmt: skip
    want = expected.sums()
    if algorithm == "push":
        is_equal = torch.equal(out, want)
    else:  # another order of the sums
        rounding = {torch.float32: 2**-20, torch.bfloat16: 2**-6, torch.float16: 2**-9}[ctx.dtype]
        is_equal = torch.allclose(out.float(), want.float(), rtol=rounding, atol=64 * rounding)
    if not is_equal:
        wrong.append(f"out ({algorithm})")
    return wrong, dropped


def random_routings(calls: int, seed: int, report: bool = False) -> tuple[int, list[str]]:
    """Make random calls; return their number, and what was wrong on this rank."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    rng, wrong, begin = np.random.default_rng([seed, num_ranks]), [], time.monotonic()
    for first in range(0, calls, CALLS_OF_CONTEXT):
        sizes = draw_sizes(rng, num_ranks)
        with create_ep_context(
            rank, num_ranks, num_ranks, sizes.max_tokens, sizes.hidden,
            num_ranks * sizes.local_experts, sizes.topk, sizes.dtype, capacity=sizes.capacity,
        ) as ctx:  # fmt: skip
            dropped = 0
            for number in range(first, min(calls, first + CALLS_OF_CONTEXT)):
                call = draw_call(rng, sizes)
                errors, dropped = errors_of(call, ctx, dropped)
                if errors:
                    call = replace(call, x=[])
                    wrong.append(f"call {number}: {', '.join(errors)} of {call}")
            ctx.check()
        if report and rank == 0 and (first // CALLS_OF_CONTEXT) % 20 == 0:
            seconds = time.monotonic() - begin
            print(f"{first} calls, {seconds:.0f} s, {len(wrong)} wrong", flush=True)
    return calls, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    results = spawn_ranks(
        args.ranks, random_routings, args.calls, args.seed, True, timeout=36_000.0
    )
    wrong = [message for _, messages in results for message in messages]
    print(*wrong[:5], sep="\n")
    print(f"W = {args.ranks}: {args.calls} calls, {len(wrong)} wrong results")


if __name__ == "__main__":
    main()
