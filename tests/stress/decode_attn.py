"""Call sp_decode_attn with random arguments on ranks, and count wrong results.

    TRITON_INTERPRET=1 TRITON_DIST_DEVICE=cpu python -m tests.stress.decode_attn --ranks 3

The reference uses fp64 and no code of the op. All ranks draw the arguments of all ranks from one
generator, so each rank computes the expected result without communication. The tolerance is a bound
of the rounding errors of each element.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from triton_dist.kernels.nvidia import create_sp_decode_context, sp_decode_attn
from triton_dist.kernels.nvidia.decode_attention import SpDecodeContext
from triton_dist.kernels.nvidia.decode_attention.algorithms import TUNABLES
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for
from triton_dist.testing import spawn_ranks

CALLS_OF_CONTEXT = 20
ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Sizes:
    """Arguments of a context."""

    num_ranks: int
    batch: int
    q_len: int
    heads: int
    kv_heads: int
    dim: int
    v_dim: int
    dtype: torch.dtype
    shard_queries: bool


@dataclass(frozen=True)
class RandomCall:
    """Arguments of a call on all ranks."""

    sizes: Sizes
    q: torch.Tensor
    keys: list[torch.Tensor]
    """Keys of each sequence, over all ranks: [tokens, KV heads, dim]."""
    values: list[torch.Tensor]
    counts: np.ndarray
    """Keys of each rank and sequence."""
    order: list[list[np.ndarray]]
    """Positions of the keys of each rank and sequence."""
    page: int
    shares_v: bool
    seed: int
    options: dict[str, Any]
    """Other arguments of the op."""


def draw_sizes(rng: np.random.Generator, num_ranks: int, dtypes: Any = None) -> Sizes:
    kv_heads = int(rng.choice([1, 2]))
    group = int(rng.choice([1, 2, 3, 4, 5]))
    dim, v_dim = [(16, 16), (64, 64), (96, 96), (24, 24), (64, 32), (48, 32), (160, 128)][
        rng.choice(7, p=[0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1])
    ]
    heads = kv_heads * group
    dtype = (dtypes or [torch.float32, torch.bfloat16, torch.float16])[rng.integers(3)]
    sharded = heads % num_ranks == 0 and rng.random() < 0.3
    return Sizes(
        num_ranks, int(rng.integers(1, 4)), int(rng.choice([1, 1, 2, 4])), heads, kv_heads, dim,
        v_dim, dtype, sharded,
    )  # fmt: skip


def draw_call(rng: np.random.Generator, sizes: Sizes, longest: int, algorithms: Any) -> RandomCall:
    """Return the next call."""
    batch = int(rng.integers(1, sizes.batch + 1))
    q_len = int(rng.integers(1, sizes.q_len + 1))
    is_fp8 = bool(rng.random() < 0.25)
    options: dict[str, Any] = {"interleave": None}
    if rng.random() < 0.4:
        options["interleave"] = int(rng.choice([1, 2, 16]))
    if rng.random() < 0.3:
        options["window"] = int(rng.choice([1, 7, 40]))
    if rng.random() < 0.3:
        options["soft_cap"] = float(rng.choice([1.5, 30.0]))
    if rng.random() < 0.3:
        options["sinks"] = torch.from_numpy(rng.standard_normal(sizes.heads)).float()
    if is_fp8 or rng.random() < 0.1:
        number = int(rng.choice([1, sizes.kv_heads]))
        for name in ("k_scale", "v_scale"):
            options[name] = torch.from_numpy(rng.uniform(0.5, 1.5, number)).float()
    if rng.random() < 0.3:
        options["scale"] = 0.2
    if sizes.heads % sizes.num_ranks == 0 and rng.random() < 0.4:
        options["shard_output"] = True
    options["lse_base"] = str(rng.choice(["e", "2"]))
    options["algorithm"] = str(rng.choice(algorithms))
    options |= dict(zip(TUNABLES, (1, int(rng.choice([16, 32])), 2, 4), strict=True))
    shares_v = sizes.v_dim < sizes.dim and bool(rng.random() < 0.7)
    page = int(rng.choice([0, 0, 1, 3, 16]))
    return fill_call(rng, sizes, batch, q_len, longest, page, shares_v, is_fp8, options)


def fill_call(
    rng: np.random.Generator, sizes: Sizes, batch: int, q_len: int, longest: int, page: int,
    shares_v: bool, is_fp8: bool, options: dict[str, Any],
) -> RandomCall:  # fmt: skip
    """Return a call with random lengths, queries, keys and values."""
    ranks, step = sizes.num_ranks, options["interleave"]
    totals = rng.choice([0, 1, longest, longest // 3], batch) + rng.integers(0, 9, batch)
    counts, order = np.zeros((ranks, batch), np.int64), []
    for _ in range(ranks):
        order.append([np.zeros(0, np.int64)] * batch)
    for sequence in range(batch):
        position = np.arange(totals[sequence])
        if step is None:
            cuts = np.sort(rng.integers(0, totals[sequence] + 1, ranks - 1))
            if rng.random() < 0.3:
                cuts[:] = rng.choice([0, totals[sequence]])
            owner = np.searchsorted(cuts, position, side="right")
        else:
            owner = position // step % ranks
        for rank in range(ranks):
            order[rank][sequence] = position[owner == rank]
            counts[rank, sequence] = (owner == rank).sum()
    seed = int(rng.integers(2**31))
    generator = torch.Generator().manual_seed(seed)
    dtype = FP8 if is_fp8 else sizes.dtype

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    q = torch.randn((batch, q_len, sizes.heads, sizes.dim), generator=generator).to(sizes.dtype)
    keys, values = [], []
    for total in map(int, totals):
        keys.append(normal(total, sizes.kv_heads, sizes.dim))
        shared = keys[-1][..., : sizes.v_dim]
        values.append(shared if shares_v else normal(total, sizes.kv_heads, sizes.v_dim))
    return RandomCall(sizes, q, keys, values, counts, order, page, shares_v, seed, options)


def expected(call: RandomCall, rank: int) -> tuple[torch.Tensor, ...]:
    """Return output and LSE in fp64, and bounds of their errors."""
    sizes, options = call.sizes, call.options
    batch, q_len, heads, dim = call.q.shape
    group, u = heads // sizes.kv_heads, ROUNDOFF[sizes.dtype]
    scale = options.get("scale", dim**-0.5)
    out = torch.zeros(batch, q_len, heads, sizes.v_dim, dtype=torch.float64)
    lse = torch.full((batch, q_len, heads), -math.inf, dtype=torch.float64)
    out_bound, lse_bound = torch.zeros_like(out), torch.zeros_like(lse)
    for b in range(batch):
        k, v = (each[b].double().repeat_interleave(group, 1) for each in (call.keys, call.values))
        for name, each in (("k_scale", k), ("v_scale", v)):
            if name in options:
                factors = options[name].double().expand(sizes.kv_heads)
                each *= factors.repeat_interleave(group)[:, None]
        q = call.q[b].double()
        scores = torch.einsum("shd,nhd->shn", q, k) * scale
        # fp32 sums of dim products, and the operations up to the exponent.
        error = torch.einsum("shd,nhd->shn", q.abs(), k.abs()) * scale * (dim + 8) * 2.0**-24
        if options.get("soft_cap"):
            cap = options["soft_cap"]
            scores = cap * torch.tanh(scores / cap)
            error = error + cap * 2.0**-20
        error = error + scores.abs() * 2.0**-22 + 2.0**-21
        distance = len(k) - q_len + torch.arange(q_len)[:, None] - torch.arange(len(k))[None]
        visible = distance >= 0
        if options.get("window"):
            visible &= distance < options["window"]
        scores = scores.masked_fill(~visible[:, None], -math.inf)
        sink = options["sinks"].double() if "sinks" in options else torch.full((heads,), -math.inf)
        with_sink = torch.cat([scores, sink.double().expand(q_len, heads)[..., None]], -1)
        lse[b] = torch.logsumexp(with_sink, -1)
        weights = torch.exp(scores - lse[b][..., None]).nan_to_num(0)
        out[b] = torch.einsum("shn,nhd->shd", weights, v)
        worst = (error * visible[:, None]).amax(-1) if len(k) else torch.zeros(q_len, heads)
        # Weights, each partial output and each addend of a sum over ranks are rounded.
        relative = 2 * worst + (4 + sizes.num_ranks) * u + (len(k) + 64) * 2.0**-24
        out_bound[b] = torch.einsum("shn,nhd->shd", weights, v.abs()) * relative[..., None]
        lse_bound[b] = (
            worst + (64 + len(k)) * 2.0**-24 + lse[b].abs().nan_to_num(0, 0, 0) * 2.0**-21
        )
    if options["lse_base"] == "2":
        lse, lse_bound = lse / math.log(2), lse_bound / math.log(2)
    # Results below the normal numbers of fp16 are rounded absolutely.
    out_bound = out_bound + (2.0**-24 if sizes.dtype == torch.float16 else 0.0) * 4
    if options.get("shard_output"):
        own = slice(heads // sizes.num_ranks * rank, heads // sizes.num_ranks * (rank + 1))
        return tuple(each[:, :, own] for each in (out, lse, out_bound, lse_bound))
    return out, lse, out_bound, lse_bound


def arguments(call: RandomCall, rank: int, room: int = 0) -> tuple[Any, ...]:
    """Return q, caches with ``room`` keys per sequence, lengths and block table of a rank.

    Unused memory is NaN. By default, the rooms of the ranks differ.
    """
    device, sizes = current_device().torch_device, call.sizes
    rng = np.random.default_rng(call.seed + rank)
    batch, dtype = len(call.keys), call.keys[0].dtype
    own = call.counts[rank]
    room = room or max(1, int(own.max()) + int(rng.integers(0, 3)))
    page = call.page or room
    pages = -(-room // page)
    number = batch * pages + (3 if call.page else 0)
    shape = (number, page, sizes.kv_heads)
    k = torch.full((*shape, sizes.dim), math.nan).to(dtype)
    v = torch.full((*shape, sizes.v_dim), math.nan).to(dtype)
    table = rng.permutation(number)[: batch * pages].reshape(batch, pages)
    if not call.page:
        table = np.arange(batch)[:, None]
    # fp8 tensors cannot be indexed on all devices.
    k_bytes, v_bytes = k.view(torch.uint8), v.view(torch.uint8)
    for sequence in range(batch):
        index, position = np.arange(own[sequence]), call.order[rank][sequence]
        at = torch.from_numpy(table[sequence, index // page]), torch.from_numpy(index % page)
        k_bytes[at] = call.keys[sequence].view(torch.uint8)[torch.from_numpy(position)]
        if not call.shares_v:
            v_bytes[at] = call.values[sequence].view(torch.uint8)[torch.from_numpy(position)]
    cyclic = call.options["interleave"] is not None
    lens = torch.from_numpy(call.counts.sum(0) if cyclic else call.counts).int()
    q = call.q
    if sizes.shard_queries:
        heads = sizes.heads // sizes.num_ranks
        q = q[:, :, heads * rank : heads * (rank + 1)].contiguous()
    blocks = torch.from_numpy(table).int().to(device) if call.page else None
    return (
        q.to(device), k.to(device), None if call.shares_v else v.to(device), lens.to(device), blocks
    )  # fmt: skip


def run_call(call: RandomCall, ctx: SpDecodeContext) -> list[str]:
    """Run the call; return what is wrong."""
    q, k, v, lens, table = arguments(call, ctx.rank)
    moved = {
        name: each.to(q.device) if isinstance(each, torch.Tensor) else each
        for name, each in call.options.items()
    }
    out, lse = sp_decode_attn.fn(q, k, v, lens, ctx, table, **moved)
    want, want_lse, bound, lse_bound = expected(call, ctx.rank)
    wrong = []
    if not bool(((out.double().cpu() - want).abs() <= bound).all()):
        wrong.append(f"output, {float(((out.double().cpu() - want).abs() / bound).max()):.3g}")
    difference = (lse.double().cpu() - want_lse).abs()
    if not bool(((difference <= lse_bound) | (lse.double().cpu() == want_lse)).all()):
        wrong.append(f"LSE, {float(difference.max()):.3g}")
    return [f"{each}: {call.sizes} {call.options} page {call.page}" for each in wrong]


def create(sizes: Sizes, group: Any = None) -> SpDecodeContext:
    ranks = group_for(group)
    return create_sp_decode_context(
        ranks.rank, ranks.size, ranks.size, sizes.batch, sizes.heads, sizes.dim, sizes.dtype,
        v_head_dim=sizes.v_dim, max_q_len=sizes.q_len, shard_queries=sizes.shard_queries,
        group=group,
    )  # fmt: skip


def random_calls(calls: int, seed: int, longest: int = 70) -> tuple[int, list[str]]:
    """Run on every rank; return the number of calls and the wrong results."""
    num_ranks = dist.get_world_size()
    rng = np.random.default_rng(seed)
    algorithms = ["packets", "packets", "all_to_all", "reduce_scatter"]
    done, wrong = 0, []
    while done < calls:
        sizes = draw_sizes(rng, num_ranks)
        with create(sizes) as ctx:
            for _ in range(min(CALLS_OF_CONTEXT, calls - done)):
                wrong += run_call(draw_call(rng, sizes, longest, algorithms), ctx)
                done += 1
            ctx.check()
    return done, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    begin = time.monotonic()
    results = spawn_ranks(options.ranks, random_calls, options.calls, options.seed, timeout=36000.0)
    wrong = [text for _, texts in results for text in texts]
    print("\n".join(wrong[:20]))
    seconds = time.monotonic() - begin
    print(f"{options.ranks} ranks: {results[0][0]} calls, {len(wrong)} wrong, {seconds:.0f} s")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
