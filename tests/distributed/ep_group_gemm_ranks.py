"""What every rank does in the tests of dispatch + grouped GEMM, on CPU ranks and on GPUs."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.calls import some_configs
from tests.distributed.ep_ranks import Routing, check_layout, draw
from triton_dist import knobs
from triton_dist.debugging.checks import checking
from triton_dist.debugging.modes import checks_of
from triton_dist.kernels.common.moe.spaces import grouped_tiles
from triton_dist.kernels.nvidia import create_ep_context, ep_dispatch_group_gemm
from triton_dist.kernels.nvidia.expert_parallel import Received
from triton_dist.runtime.device import current_device
from triton_dist.testing import assert_allclose
from triton_dist.testing.opinfo.base import tolerance


def expected_product(routing: Routing, received: Received, B: torch.Tensor) -> torch.Tensor:
    """Return the products of this rank's routes in the order of positions, in fp64."""
    ctx, weights = received.ctx, B.cpu().double()
    routes = routing.routes(ctx.rank, ctx.local_experts, received.max_tokens)
    rows = [routing.all_x[source][token].double() @ weights[e] for e, source, token, _, _ in routes]
    return torch.stack(rows) if rows else weights.new_empty(0, B.shape[2])


def checked_calls(seed: int, rounds: int) -> int:
    """Make ``random_calls`` under the checks for races and bounds."""
    active = checks_of(knobs.debug.get())
    with checking(*(check for check in ("race", "bounds") if check not in active)):
        return random_calls(seed, rounds)


def silu_mul(product: torch.Tensor) -> torch.Tensor:
    gate, up = product.chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


def random_calls(seed: int, rounds: int) -> int:
    """Compare products of random routings with fp64, with late ranks; return the calls checked.

    Calls follow each other without synchronisation. Some ranks have no tokens, some experts no
    rows. The random numbers of all ranks are equal, except tokens and ids.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    device, count = current_device(), 0
    shared, own = random.Random(seed), random.Random(1000 * seed + rank)
    for number in range(rounds):
        dtype = shared.choice([torch.float32, torch.bfloat16])
        hidden, local, N = shared.choice([16, 48, 130]), shared.choice([1, 3]), 64
        experts, limit = local * size, shared.choice([5, 40])
        topk = shared.randint(1, min(experts, 4))
        kind, silu = ("even", "same", "masked")[number % 3], shared.random() < 0.5
        activation = "silu_mul" if silu else None
        B = torch.randint(-2, 3, (local, hidden, N), device=device.torch_device).to(dtype)
        calls: list[Any] = []
        with create_ep_context(rank, size, size, limit, hidden, experts, topk, dtype) as ctx:
            for _ in range(3):
                tokens = own.choice([0, limit, own.randint(0, limit)])
                x = torch.randint(-4, 5, (tokens, hidden), device=device.torch_device).to(dtype)
                ids = draw(own, ctx, tokens, kind, experts, topk)
                scores = torch.rand(tokens, topk, device=device.torch_device)
                ctx.sleep((shared.randrange(2 * size), 300_000))
                C, received = ep_dispatch_group_gemm.fn(
                    x, ids, B, ctx, scores, activation, algorithm="fused",
                    gemm_config=shared.choice(grouped_tiles()), num_ctas=shared.choice([1, 3]),
                    ahead=shared.choice([0.0, 0.5, 1.0]),
                )  # fmt: skip
                used = received.num_positions()
                assert used <= len(C)
                rows = received.rows.clone()
                calls.append((x, ids, scores, C[:used].cpu(), received, rows))
            ctx.check()
            for x, ids, scores, C, received, rows in calls:
                routing = Routing(x, ids, scores)
                received.rows.copy_(rows)
                check_layout(received, routing, limit, 1)
                expected = expected_product(routing, received, B)
                expected = silu_mul(expected) if silu else expected
                assert_allclose(C.double(), expected, **_tolerance(dtype, hidden))
                count += 1
                dist.barrier()
    return count


def _tolerance(dtype: torch.dtype, K: int) -> dict[str, float]:
    each = tolerance(dtype, K)
    return {"rtol": each, "atol": each}


def tuned() -> int:
    """Tune the op, whose result the cache then serves; return the number of tunings."""
    rank, size, device = dist.get_rank(), dist.get_world_size(), current_device().torch_device
    own, B = random.Random(rank), torch.ones(2, 32, 64, device=device)
    with (
        some_configs(ep_dispatch_group_gemm),
        create_ep_context(rank, size, size, 8, 32, 2 * size, 2, torch.float32) as ctx,
    ):
        for number in range(3):
            tokens = (5, 8, 0)[(number + rank) % 3]
            x = torch.randint(-4, 5, (tokens, 32), device=device).float()
            ids = draw(own, ctx, tokens, "even", 2 * size, 2)
            C, received = ep_dispatch_group_gemm(x, ids, B, ctx)
            used = received.num_positions()
            expected = expected_product(Routing(x, ids, None), received, B)
            assert torch.equal(C[:used].cpu().double(), expected)
    return ep_dispatch_group_gemm.tuning_count
