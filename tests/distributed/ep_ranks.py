"""What every rank does in the tests of expert parallelism, on CPU ranks and on GPUs."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.calls import some_configs
from tests.distributed.compiled_ahead import compile_together
from triton_dist.errors import InvalidArgument, RankDisagreement, WaitTimeout
from triton_dist.kernels.common.exchange.protocol import MAX_CTAS
from triton_dist.kernels.nvidia import create_ep_context, ep_combine, ep_dispatch, ep_send
from triton_dist.kernels.nvidia.expert_parallel import EPContext, Received
from triton_dist.kernels.nvidia.expert_parallel.algorithms import DispatchCall
from triton_dist.runtime.device import current_device
from triton_dist.runtime.waits import bounded_waits
from triton_dist.testing import assert_allclose
from triton_dist.testing.assertions import assert_bitwise_equal
from triton_dist.testing.opinfo.base import tolerance

ALGORITHMS = ("push", "packets", "collective")


def gathered(value: Any) -> list[Any]:
    """Return the value of each rank, tensors on the CPU."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@dataclass
class Routing:
    """Random tokens of this rank, and those of all ranks."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor | None
    expert_map: torch.Tensor | None = None

    def __post_init__(self) -> None:
        cpu = [None if t is None else t.cpu() for t in (self.x, self.ids, self.weights)]
        self.all_x, self.all_ids, self.all_weights = zip(*gathered(cpu), strict=True)

    def physical_ids(self, source: int) -> torch.Tensor:
        """Return the physical experts of a rank's tokens."""
        ids = self.all_ids[source].long()
        if self.expert_map is None:
            return ids
        table = self.expert_map.cpu().long()
        rows = table[ids.clamp(min=0)]
        choice = (torch.arange(len(ids))[:, None] + source) % (rows >= 0).sum(-1).clamp(min=1)
        return torch.where(ids >= 0, rows.gather(-1, choice[..., None])[..., 0], ids)

    def routes(self, rank: int, local_experts: int, capacity: int) -> list[tuple[int, ...]]:
        """Return (expert, source, token, choice, location) of the routes of a rank, sorted."""
        found, size = [], len(self.all_x)
        for source in range(size):
            ids, location = self.physical_ids(source), -1
            for token, experts in enumerate(ids.tolist()):
                here = [e // local_experts == rank and e >= 0 for e in experts]
                location += any(here)
                for choice, expert in enumerate(experts):
                    if here[choice] and location < capacity:
                        found.append(
                            (expert - rank * local_experts, source, token, choice, location)
                        )
        return sorted(found)


def expert_function(x: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
    """Stand for the grouped GEMM: exact in 16 bits for small integers."""
    return x * (expert[:, None] % 3 + 1).to(x.dtype)


def draw(
    rng: random.Random, ctx: EPContext, tokens: int, kind: str, logical: int, topk: int
) -> torch.Tensor:
    """Return random ids; a token's experts differ."""
    rows = []
    for _ in range(tokens):
        if kind == "same":
            row = list(range(topk))
        elif kind == "masked":
            row = [e if rng.random() < 0.5 else -1 for e in rng.sample(range(logical), topk)]
        else:
            row = rng.sample(range(logical), topk)
        rows.append(row)
    ids = torch.tensor(rows, dtype=torch.int32).view(tokens, topk)
    return ids.to(current_device().torch_device)


def check_layout(received: Received, routing: Routing, capacity: int, alignment: int) -> None:
    """Compare all that a dispatch returns with the reference, elementwise."""
    ctx = received.ctx
    routes = routing.routes(ctx.rank, ctx.local_experts, capacity)
    rows, scales = received.rows.cpu().float(), received.scales
    index, ends = received.row_of_position.cpu(), received.ends.cpu().tolist()
    counts, positions = received.counts.cpu(), received.position_of_route.cpu()
    expected = torch.full_like(positions, -1)
    begin = 0
    for expert in range(ctx.local_experts):
        own = [route for route in routes if route[0] == expert]
        for place, (_, source, token, choice, location) in enumerate(own):
            at = begin + place
            expected[source * received.max_tokens + token, choice] = at
            row = int(index[at])
            slot = location if capacity < received.max_tokens else token
            assert row == source * min(ctx.capacity, received.max_tokens) + slot
            x = routing.all_x[source][token].float()
            if scales is None:
                assert torch.equal(rows[row], x)
            else:
                scale = scales[row].cpu().repeat_interleave(128)[: len(x)]
                assert_allclose(rows[row] * scale, x, rtol=0.07, atol=1e-3)
            if received.weights is not None:
                weight = routing.all_weights[source][token, choice]
                assert float(received.weights[at]) == float(weight)
        padded = -(-len(own) // alignment) * alignment
        assert ends[expert] == begin + padded
        assert (index[begin + len(own) : begin + padded] == -1).all()
        begin += padded
        for source in range(ctx.num_ranks):
            assert int(counts[expert, source]) == sum(route[1] == source for route in own)
    assert torch.equal(positions, expected)
    assert received.num_positions() == begin


def expected_sum(routing: Routing, ctx: EPContext, capacity: int) -> torch.Tensor:
    """Return the combined tokens of this rank, summed in fp64."""
    x = routing.all_x[ctx.rank].double()
    total = torch.zeros_like(x)
    for rank in range(ctx.num_ranks):
        for expert, source, token, choice, _ in routing.routes(rank, ctx.local_experts, capacity):
            if source == ctx.rank:
                weight = 1.0
                if routing.weights is not None:
                    weight = float(routing.all_weights[source][token, choice])
                total[token] += weight * x[token] * (expert % 3 + 1)
    return total


def products(received: Received) -> torch.Tensor:
    """Return the products of all positions; rows without position are NaN."""
    ctx, size = received.ctx, received.num_positions()
    y = torch.full(
        (max(1, size), ctx.hidden), float("nan"), dtype=ctx.dtype, device=received.rows.device
    )
    row = received.row_of_position[:size].long()
    experts = torch.bucketize(
        torch.arange(size, device=row.device), received.ends.long(), right=True
    )
    rows = received.rows
    if received.scales is not None:
        scale = received.scales.repeat_interleave(128, 1)[:, : ctx.hidden]
        rows = rows.float() * scale
    y[:size] = expert_function(rows.to(ctx.dtype)[row.clamp(min=0)], experts)
    y[:size][row < 0] = float("nan")
    return y


def random_calls(seed: int, rounds: int) -> int:
    """Call both ops with random routings, sizes, dtypes and algorithms; return the calls checked.

    The random numbers of all ranks are equal, except tokens and ids.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    device, count = current_device().torch_device, 0
    shared = random.Random(seed)
    own = random.Random(1000 * seed + rank)
    for number in range(rounds):
        dtype = shared.choice([torch.float32, torch.bfloat16, torch.float16])
        hidden, local = shared.choice([16, 48, 130]), shared.choice([1, 2, 5])
        experts = local * size
        topk = shared.randint(1, min(experts, 5))
        limit = shared.randint(1, 9)
        capacity = shared.choice([None, None, max(1, limit // 2)])
        kind = shared.choice(["even", "same", "masked"])
        expert_map, logical = None, experts
        if shared.random() < 0.3:
            logical = max(topk, experts - 1)
            table = [[e, e + logical if e + logical < experts else -1] for e in range(logical)]
            expert_map = torch.tensor(table, dtype=torch.int32, device=device)
        with create_ep_context(
            rank, size, size, 3 * limit, hidden, experts, topk, dtype,
            capacity=capacity and 3 * capacity,
        ) as ctx:  # fmt: skip
            for which in range(3):
                name = ALGORITHMS[(number + which) % len(ALGORITHMS)]
                tokens = own.choice([0, limit, own.randint(0, limit)])
                max_tokens = limit if which else 3 * limit
                x = torch.randint(-4, 5, (tokens, hidden), device=device).to(dtype)
                weights = None
                if shared.random() < 0.7:
                    weights = (torch.randint(1, 9, (tokens, topk), device=device) / 8).float()
                ids = draw(own, ctx, tokens, kind, logical, topk)
                routing = Routing(x, ids, weights, expert_map)
                limited = min(ctx.capacity, max_tokens)
                if limited < max_tokens or (hidden % 16 and name == "packets"):
                    name = "push"
                alignment, quantise = shared.choice([1, 1, 4]), shared.random() < 0.3
                options = {
                    "quantise": quantise, "max_tokens": max_tokens, "expert_map": expert_map,
                    "alignment": alignment, "algorithm": name, "block_bytes": 512,
                    "num_sms": shared.choice([None, 4]),
                }  # fmt: skip
                if name == "push" and shared.random() < 0.3:
                    received = ep_send(x, ids, ctx, topk_weights=weights, **options).wait()
                else:
                    received = ep_dispatch.fn(x, ids, ctx, weights, **options)
                check_layout(received, routing, limited, alignment)
                dist.barrier()  # no peer begins its combine before rows are compared
                y = products(received)
                how = ("push", "push", "collective")[(number + 2 * which) % 3]
                out = [
                    ep_combine.fn(
                        y, received, ctx, algorithm=how, num_chunks=chunks, block_bytes=512
                    )
                    for chunks in (1, 2)
                ]
                assert_bitwise_equal(*out)
                want = expected_sum(routing, ctx, limited)
                if how == "collective":
                    limit_of_error = tolerance(dtype, size + 1) * 16
                else:
                    limit_of_error = tolerance(dtype, 2) * 16
                if quantise:
                    limit_of_error = 4.0
                assert_allclose(
                    out[0].cpu().double(), want, rtol=limit_of_error, atol=limit_of_error
                )
                count += 1
            ctx.check()
    return count


def products_in_graph(received: Received) -> torch.Tensor:
    """Return the products of all positions without the host; others have arbitrary values."""
    number = len(received.row_of_position)
    position = torch.arange(number, device=received.rows.device)
    experts = torch.bucketize(position, received.ends.long(), right=True)
    rows = received.rows[received.row_of_position.long().clamp(0, len(received.rows) - 1)]
    return expert_function(rows, experts)


def factors(ids: torch.Tensor, weights: torch.Tensor, local_experts: int) -> torch.Tensor:
    """Return [tokens, 1], the number by which both ops multiply each token."""
    factor = torch.where(ids >= 0, ids % local_experts % 3 + 1, 0)
    return (factor * weights).sum(1, keepdim=True)


def replayed(rounds: int, sleeps: bool = False) -> int:
    """Replay graphs of both ops with new tokens and ids; return the number of checked results.

    Each graph has three calls. With ``sleeps``, one rank is late in each replay.
    """
    rank, size, device = dist.get_rank(), dist.get_world_size(), current_device()
    hidden, experts, topk, count = 256, 4 * size, 3, 0
    tokens, rng = 9 if device.interprets else 33, random.Random(rank)
    with create_ep_context(rank, size, size, tokens, hidden, experts, topk, torch.bfloat16) as ctx:
        x = torch.zeros(tokens, hidden, dtype=torch.bfloat16, device=device.torch_device)
        ids = torch.zeros(tokens, topk, dtype=torch.int32, device=device.torch_device)
        weights = torch.ones(tokens, topk, device=device.torch_device)
        outs: list[torch.Tensor] = []

        def call() -> None:
            outs.clear()
            for algorithm in ("packets", "push", "packets"):
                received = ep_dispatch.fn(x, ids, ctx, weights, algorithm=algorithm)
                y = products_in_graph(received)
                outs.append(ep_combine.fn(y, received, ctx))

        call()
        replay = device.capture(call, 60.0)
        for number in range(rounds):
            x.copy_(torch.randint(-4, 5, x.shape))
            kind = ("even", "same", "masked")[number % 3]
            ids.copy_(draw(rng, ctx, tokens, kind, experts, topk))
            weights.copy_(torch.randint(1, 9, weights.shape) / 8)
            if sleeps and number % size == rank:
                device.sleep(int(2e6))
            replay()
            device.synchronize()
            want = x.float() * factors(ids, weights, experts // size)
            limit = 16 * tolerance(torch.bfloat16, 2)
            for out in outs:
                assert_allclose(out.float(), want, rtol=limit, atol=limit)
                count += 1
        ctx.check()
    return count


def stragglers(rounds: int) -> int:
    """Call both ops many times without waiting in between, with late ranks; check all results."""
    rank, size, device = dist.get_rank(), dist.get_world_size(), current_device()
    hidden, experts, topk, limit = 64, 2 * size, 2, 12
    rng, shared = random.Random(rank), random.Random(7)
    results = []
    with create_ep_context(rank, size, size, limit, hidden, experts, topk, torch.float32) as ctx:
        for _ in range(rounds):
            tokens = rng.randint(0, limit)
            x = torch.randint(-4, 5, (tokens, hidden), device=device.torch_device).float()
            ids = draw(rng, ctx, tokens, "masked", experts, topk)
            late = shared.randrange(2 * size)
            ctx.sleep((late, 300_000))
            algorithm = shared.choice(ALGORITHMS[:2])
            received = ep_dispatch.fn(x, ids, ctx, algorithm=algorithm)
            ctx.sleep(((late + 1) % (2 * size), 300_000))
            y = products_in_graph(received)
            chunks = shared.choice([1, 4])
            out = ep_combine.fn(y, received, ctx, num_chunks=chunks)
            results.append((x, ids, out))
        ctx.check()
        for x, ids, out in results:
            assert torch.equal(out, x * factors(ids, torch.ones_like(ids), experts // size))
    return len(results)


def on_two_streams(rounds: int) -> int:
    """Send on one stream and receive on another, every second time in a graph. Requires GPUs."""
    rank, size, device = dist.get_rank(), dist.get_world_size(), current_device()
    tokens, hidden, experts, rng = 65, 256, 4 * size, random.Random(rank)
    side, outs = torch.cuda.Stream(), []
    with create_ep_context(rank, size, size, tokens, hidden, experts, 3, torch.float32) as ctx:
        x = torch.zeros(tokens, hidden, device=device.torch_device)
        ids = draw(rng, ctx, tokens, "masked", experts, 3)

        def call() -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                device.sleep(1_000_000)
                received = ep_send(x, ids, ctx)
            received.wait()
            outs.append(ep_combine.fn(products_in_graph(received), received, ctx))

        replay = device.capture(call, 60.0)
        captured = outs[-1]
        for number in range(rounds):
            x.copy_(torch.randint(-4, 5, x.shape))
            ids.copy_(draw(rng, ctx, tokens, "masked", experts, 3))
            (replay if number % 2 else call)()
            device.synchronize()
            out = captured if number % 2 else outs[-1]
            assert torch.equal(out, x * factors(ids, torch.ones_like(ids), experts // size))
        ctx.check()
    return rounds


def two_contexts(rounds: int) -> int:
    """Launch calls of two contexts on two streams, on the ranks in different orders. Requires
    GPUs."""
    rank, size, device = dist.get_rank(), dist.get_world_size(), current_device()
    tokens, hidden, experts = 1024, 1024, 64 * size
    sizes = (rank, size, size, tokens, hidden, experts, 4, torch.float32)
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    x = torch.randint(-4, 5, (tokens, hidden), device=device.torch_device).float()
    with create_ep_context(*sizes) as first, create_ep_context(*sizes) as second:
        ids = draw(random.Random(rank), first, tokens, "even", experts, 4)
        want = x * factors(ids, torch.ones_like(ids), experts // size)
        outs: list[torch.Tensor] = []

        def call(is_reversed: bool, block_bytes: int) -> None:
            contexts = list(zip((first, second), streams, strict=True))
            for ctx, stream in contexts[:: -1 if is_reversed else 1]:
                with torch.cuda.stream(stream):
                    received = ep_dispatch.fn(x, ids, ctx)
                    y = products_in_graph(received)
                    options = {"num_ctas": 256, "block_bytes": block_bytes}
                    outs.append(ep_combine.fn(y, received, ctx, **options))

        # Load kernels and allocate memory first, because both can wait for running kernels.
        for block_bytes in (8192, 16384):
            call(False, block_bytes)
        device.synchronize(60.0)
        outs.clear()
        for number in range(rounds):
            call((rank + number) % 2 == 1, (8192, 16384)[number // 2 % 2])
        device.synchronize(60.0)
        assert all(torch.equal(out, want) for out in outs)
        first.check()
        second.check()
    return len(outs)


def every_config() -> int:
    """Call every candidate of both ops; return the number of calls. In the interpreter, only the
    candidates with few programs."""
    rank, size, device = dist.get_rank(), dist.get_world_size(), current_device()
    tokens, hidden, experts = 6 - rank % 2, 768, 2 * size
    most = 4 if device.interprets else MAX_CTAS
    x = torch.randint(-4, 5, (tokens, hidden), device=device.torch_device).bfloat16()
    with create_ep_context(rank, size, size, 6, hidden, experts, 2, torch.bfloat16) as ctx:
        ids = draw(random.Random(rank), ctx, tokens, "masked", experts, 2)
        weights = torch.full(ids.shape, 0.5, device=device.torch_device)
        want = x.float() * factors(ids, weights, experts // size)
        dispatched = ep_dispatch.fn(x, ids, ctx, weights)
        calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
            (op, args, dict(config))
            for op, args in (
                (ep_dispatch, (x, ids, ctx, weights)),
                (ep_combine, (products_in_graph(dispatched), dispatched, ctx)),
            )
            for config in op.config_space
            if config.get("num_ctas", 1) <= most
        ]
        if not device.interprets:
            compile_together(
                functools.partial(op._hooks.prepare, *args, **config) for op, args, config in calls
            )
        for op, args, config in calls:
            out = op.fn(*args, **config)
            if op is ep_dispatch:
                out = ep_combine.fn(products_in_graph(out), out, ctx)
            assert_allclose(out.float(), want, rtol=0.1, atol=0.1)
        ctx.check()
    return len(calls)


def give_up_and_start_again() -> list[str]:
    """Let rank 0 make half of a call alone; after a reset, all ranks call again.

    Return the flags that did not arrive.
    """
    rank, size, device = dist.get_rank(), dist.get_world_size(), current_device()
    flags = []
    with create_ep_context(rank, size, size, 4, 64, size, 1, torch.float32) as ctx:
        x = torch.ones(3, 64, device=device.torch_device)
        ids = torch.arange(3, dtype=torch.int32, device=device.torch_device)[:, None] % size

        def dispatch(algorithm: str) -> Received:
            received: Received = ep_dispatch.fn(x, ids, ctx, algorithm=algorithm)
            return received

        def combine(received: Received) -> torch.Tensor:
            out: torch.Tensor = ep_combine.fn(products_in_graph(received), received, ctx)
            return out

        def alone(call: Callable[[], object]) -> None:
            def checked_call() -> None:
                with bounded_waits(0.2):
                    call()
                    ctx.check()

            if rank == 0:
                with pytest.raises(WaitTimeout) as raised:
                    checked_call()
                flags.append(raised.value.flag.split("[")[0].rstrip("01"))
            dist.barrier()
            ctx.reset()

        for algorithm in ALGORITHMS[:2]:
            alone(lambda a=algorithm: dispatch(a))
            received = dispatch(algorithm)
            alone(lambda r=received: combine(r))
            for _ in range(3):
                assert torch.equal(combine(dispatch(algorithm)), x)
            ctx.check()
    return flags


def tuned() -> tuple[int, int]:
    """Tune both ops, whose result the cache then serves; return the numbers of tunings."""
    rank, size, device = dist.get_rank(), dist.get_world_size(), current_device()
    with (
        some_configs(ep_dispatch),
        some_configs(ep_combine),
        create_ep_context(rank, size, size, 8, 32, 2 * size, 2, torch.float32) as ctx,
    ):
        for number in range(3):
            tokens = (5, 4, 0)[(number + rank) % 3]
            x = torch.randint(-4, 5, (tokens, 32), device=device.torch_device).float()
            ids = draw(random.Random(rank), ctx, tokens, "even", 2 * size, 2)
            received = ep_dispatch(x, ids, ctx)
            out = ep_combine(products(received), received, ctx)
            want = expected_sum(Routing(x, ids, None), ctx, 8)
            assert torch.equal(out.cpu().double(), want)
        with pytest.raises(RankDisagreement, match="zipf"):
            ep_dispatch(x, ids, ctx, routing_skew=("even", "zipf")[rank % 2])
    return ep_dispatch.num_tunings, ep_combine.num_tunings


def rows_stay() -> int:
    """Rank 1 reads its rows late, while the others begin the next call; no peer overwrites them."""
    rank, size, device = dist.get_rank(), dist.get_world_size(), current_device()
    tokens, hidden = 3, 32
    with create_ep_context(rank, size, size, tokens, hidden, size, size, torch.float32) as ctx:
        x = torch.full((tokens, hidden), rank + 1.0, device=device.torch_device)
        ids = torch.arange(size, device=device.torch_device).repeat(tokens, 1)
        received = ep_dispatch.fn(x, ids, ctx)
        ctx.sleep((1, 500_000_000))
        rows = received.rows.clone()
        ep_dispatch.fn(-x, ids, ctx)
        want = torch.arange(1.0, size + 1).repeat_interleave(tokens)[:, None].expand(-1, hidden)
        assert torch.equal(rows.cpu(), want)
    return len(rows)


def faults() -> list[str]:
    """Return the errors that every rank raises if one rank passes invalid ids or weights."""
    rank, size, device = dist.get_rank(), dist.get_world_size(), current_device()
    messages = []
    with create_ep_context(rank, size, size, 4, 16, size, 1, torch.float32) as ctx:
        for bad in ("ids", "weights"):
            x = torch.ones(4, 16, device=device.torch_device)
            ids = torch.zeros(4, 1, dtype=torch.int32, device=device.torch_device)
            weights = torch.ones(4, 1, device=device.torch_device)
            if rank == 1 and bad == "ids":
                ids[2] = size
            elif rank == 1:
                weights[3] = float("nan")
            ep_dispatch.fn(x, ids, ctx, weights)
            with pytest.raises(InvalidArgument) as raised:
                ctx.check()
            messages.append(raised.value.argument)
    return messages


def different_arguments() -> None:
    """Raise on every rank if ranks pass different arguments; a reset context works again.

    A dispatch whose waits gave up has written no positions that its readers may use.
    """
    rank, size, device = dist.get_rank(), dist.get_world_size(), current_device()
    results, result = [], DispatchCall.result
    with (
        pytest.MonkeyPatch.context() as patch,
        create_ep_context(rank, size, size, 4, 16, size, 1, torch.float32) as ctx,
    ):
        patch.setattr(
            DispatchCall, "result", lambda call: results.append(result(call)) or results[-1]
        )
        x = torch.ones(2, 16, device=device.torch_device)
        ids = torch.zeros(2, 1, dtype=torch.int32, device=device.torch_device)
        weights = torch.ones(2, 1, device=device.torch_device)

        def call(apply_weights: bool = True, **options: Any) -> None:
            received = ep_dispatch.fn(x, ids, ctx, **{"topk_weights": weights, **options})
            ep_combine.fn(x.new_ones(4 * size, 16), received, ctx, apply_weights=apply_weights)
            ctx.check()

        for name, values, algorithm in (
            ("max_tokens", (4, 3), "push"),
            ("quantise", (False, True), "push"),
            ("topk_weights", (None, weights), "push"),
            ("num_ctas", (1, 2), "push"),
            ("num_ctas", (1, 2), "packets"),
            ("apply_weights", (True, False), "push"),
        ):
            options = {"apply_weights": False, name: values[rank == 1], "algorithm": algorithm}
            with pytest.raises(RankDisagreement):
                call(**options)
            if name != "apply_weights":
                assert not results[-1].ends.any()
            dist.barrier()
            ctx.reset()
        call()
        assert results[-1].ends.tolist() == [2 * size if rank == 0 else 0]


def checked() -> int:
    """Call both ops, also in two halves, for ``under_checks``; return the calls."""
    rank, size, count = dist.get_rank(), dist.get_world_size(), 0
    for capacity in (None, 1):
        hidden, experts = 144, 2 * size
        with create_ep_context(
            rank, size, size, 5, hidden, experts, 2, torch.float32, capacity=capacity
        ) as ctx:
            for number in range(2):
                tokens = (4 + number - rank) % 5
                x = torch.ones(tokens, hidden)
                ids = draw(random.Random(rank), ctx, tokens, "masked", experts, 2)
                weights = torch.ones(tokens, 2)
                options = {"topk_weights": weights, "quantise": number == 1, "num_ctas": 2}
                received = ep_send(x, ids, ctx, **options).wait()
                received.expanded()
                for algorithm in ALGORITHMS[: 2 if capacity is None else 1]:
                    received = ep_dispatch.fn(x, ids, ctx, algorithm=algorithm, **options)
                    y = torch.ones(received.num_positions(), hidden)
                    options_of_sum = {"num_ctas": 2, "num_chunks": 2}
                    ep_combine.fn(y, received, ctx, **options_of_sum)
                    count += 1
            ctx.check()
    return count
