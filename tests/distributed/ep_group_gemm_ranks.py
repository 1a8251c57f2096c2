"""What every rank does in the tests of dispatch + grouped GEMM, on CPU ranks and on GPUs."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.calls import some_configs
from tests.distributed.ep_ranks import Routing, check_layout, draw
from triton_dist.kernels.common.moe.routing import TILE_RECORD_WORDS
from triton_dist.kernels.common.moe.spaces import grouped_tiles
from triton_dist.kernels.nvidia import (
    create_ep_context,
    ep_dispatch,
    ep_dispatch_group_gemm,
)
from triton_dist.kernels.nvidia.ep_group_gemm.kernel import kernel_order_tiles
from triton_dist.runtime.device import current_device
from triton_dist.runtime.launch import Launch
from triton_dist.testing import assert_allclose
from triton_dist.testing.opinfo.base import tolerance

Routes = list[tuple[int, ...]]


def expected_product(
    routing: Routing, routes: Routes, B: torch.Tensor, silu: bool = False
) -> torch.Tensor:
    """Return the products of this rank's routes in the order of positions, in fp64."""
    weights = B.cpu().double()
    rows = [routing.all_x[source][token].double() @ weights[e] for e, source, token, _, _ in routes]
    product = torch.stack(rows) if rows else weights.new_empty(0, B.shape[2])
    if not silu:
        return product
    gate, up = product.chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


def random_calls(seed: int, rounds: int) -> int:
    """Compare products with fp64 for random routings, with late ranks; return the calls
    checked.

    Calls follow each other without synchronisation, and alternate with other dispatches.
    Some ranks have no tokens, some experts no rows. The random numbers of all ranks are equal,
    except tokens and ids.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    device, count = current_device().torch_device, 0
    shared, own = random.Random(seed), random.Random(1000 * seed + rank)

    def integers(most: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(-most, most + 1, shape, device=device).to(dtype)

    for number in range(rounds):
        dtype = (torch.bfloat16, torch.float16, torch.float32)[(number + seed) % 3]
        hidden, local, N = shared.choice([16, 48, 130]), shared.choice([1, 3]), 64
        experts, limit = local * size, shared.choice([5, 24])
        topk, silu = shared.randint(1, min(experts, 4)), shared.random() < 0.5
        kind, expert_map, logical = ("even", "same", "masked")[number % 3], None, experts
        if number % 2:
            logical = max(topk, experts - 1)
            table = [[e, e + logical if e + logical < experts else -1] for e in range(logical)]
            expert_map = torch.tensor(table, dtype=torch.int32, device=device)
        B = integers(2, local, hidden, N, dtype=dtype)
        calls: list[Any] = []
        with create_ep_context(rank, size, size, limit, hidden, experts, topk, dtype) as ctx:
            for _ in range(3):
                tokens = own.choice([0, limit, own.randint(0, limit)])
                x = integers(2, tokens * hidden + 1, dtype=dtype)[1:].view(tokens, hidden)
                ids = draw(own, ctx, tokens, kind, logical, topk)
                scores = torch.rand(tokens, topk, device=device)
                options = {"gemm_config": shared.choice(grouped_tiles()[:3])}
                ctx.sleep((shared.randrange(2 * size), 300_000))
                ep_dispatch.fn(-x, ids, ctx, scores, expert_map=expert_map)
                C, received = ep_dispatch_group_gemm.fn(
                    x, ids, B, ctx, scores, "silu_mul" if silu else None, expert_map=expert_map,
                    algorithm="fused", num_ctas=shared.choice([1, 3]),
                    local_first_fraction=shared.choice([0.0, 0.5, 1.0]), **options,
                )  # fmt: skip
                used, rows = received.num_positions(), received.rows.clone()
                calls.append((Routing(x, ids, scores, expert_map), C[:used], received, rows))
            ctx.check()
            for routing, C, received, rows in calls:
                received.rows.copy_(rows)
                check_layout(received, routing, limit, 1)
                routes = routing.routes(rank, local, limit)
                expected = expected_product(routing, routes, B, silu)
                each = tolerance(dtype, hidden)
                assert_allclose(C.cpu().double(), expected, rtol=each, atol=each)
                count += 1
                dist.barrier()
    return count


def tiles_of_arbitrary_counts() -> list[int]:
    """Order tiles if ends are 0 and counts are arbitrary, as after a wait that gave up.

    Return the number of tiles, and the number of words that were written.
    """
    device = current_device().torch_device
    counts = torch.tensor([[100, -50], [-70, 90]], dtype=torch.int32, device=device)
    ends, tiles = counts.new_zeros(2), counts.new_full((128, TILE_RECORD_WORDS.value), -1)
    num_tiles = counts.new_full((2,), -1)
    arguments = ends, counts, tiles[64:], num_tiles, dist.get_rank(), 16, 2
    options = {"EXPERTS": 2, "EXPERT_LANES": 2, "NUM_RANKS": 2, "LANES": 2, "BLOCK": 16}
    Launch(kernel_order_tiles, (2,), arguments, {**options, "num_warps": 4}).run()
    return [*num_tiles.tolist(), int((tiles != -1).sum())]


def tuned() -> int:
    """Tune the op, whose result the cache then serves; return the number of tunings."""
    rank, size, device = dist.get_rank(), dist.get_world_size(), current_device().torch_device
    own, B = random.Random(rank), torch.ones(2, 40, 64, device=device)
    with (
        some_configs(ep_dispatch, 1),
        some_configs(ep_dispatch_group_gemm),
        create_ep_context(rank, size, size, 8, 40, 2 * size, 2, torch.float32) as ctx,
    ):
        before = ep_dispatch.num_tunings
        for number in range(3):
            tokens = (5, 8, 0)[(number + rank) % 3]
            x = torch.randint(-4, 5, (tokens, 40), device=device).float()
            ids = draw(own, ctx, tokens, "even", 2 * size, 2)
            C, received = ep_dispatch_group_gemm(x, ids, B, ctx)
            used = received.num_positions()
            routing = Routing(x, ids, None)
            expected = expected_product(routing, routing.routes(rank, 2, 8), B)
            assert torch.equal(C[:used].cpu().double(), expected)
        assert ep_dispatch.num_tunings == before + 1  # "serial" runs a tuned dispatch
    return ep_dispatch_group_gemm.num_tunings
