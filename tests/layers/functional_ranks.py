"""What every rank does in the tests of differentiable products, on CPU ranks and on GPUs alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from triton_dist.errors import ContextFinalized, InvalidArgument
from triton_dist.layers.nvidia import TensorParallel, functional
from triton_dist.layers.nvidia.tensor_parallel import Collectives
from triton_dist.runtime.device import current_device

M, K, N = 12, 20, 36  # of the product; K is a layer's for the second of a pair
SPREAD = {"ag_gemm": True, "gemm_rs": True, "gemm": False, "gemm_ar": False}
"""Products, and whether rows are spread over ranks (else all ranks have them)."""


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same on all ranks."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype).to(current_device().torch_device)


def part(whole: torch.Tensor, ranks: Collectives, dim: int) -> torch.Tensor:
    return whole.chunk(ranks.num_ranks, dim)[ranks.rank]


def operands(name: str, ranks: Collectives, dtype: torch.dtype) -> list[torch.Tensor]:
    """A, B and the weights of the loss: leaves, this rank's of the whole ones."""
    A, B, weights = whole(dtype)
    if name in ("ag_gemm", "gemm"):
        own = [part(A, ranks, 0) if SPREAD[name] else A, part(B, ranks, 1), part(weights, ranks, 1)]
    else:
        own = [part(A, ranks, 1), part(B, ranks, 0), weights]
        if SPREAD[name]:
            own[2] = part(weights, ranks, 0)
    return [each.clone() for each in own]


def whole(dtype: torch.dtype) -> list[torch.Tensor]:
    return [drawn(1, M, K, dtype=dtype), drawn(2, K, N, dtype=dtype), drawn(3, M, N, dtype=dtype)]


def summed(value: torch.Tensor, name: str, ranks: Collectives) -> torch.Tensor:
    """The one loss: ranks add what they compute of their own; for ``gemm_ar`` all have it."""
    value = value.detach().clone()
    return value if name == "gemm_ar" else ranks.all_reduce(value)


def gradients_of_wrappers(eps: float = 1e-6) -> int:
    """fp64, products by libraries: each analytic gradient against a difference of the one loss, in
    a random direction of all ranks' operands."""
    ranks, count = Collectives(), 0
    for name in SPREAD:
        product: Any = getattr(functional, name)
        A, B, weights = operands(name, ranks, torch.float64)
        for options in ({}, {"keep_gathered": True}) if name == "ag_gemm" else ({},):
            for which in range(2):
                leaves = [A.clone().requires_grad_(which == 0), B.clone().requires_grad_(which > 0)]
                (product(*leaves, ranks, **options) * weights).sum().backward()
                grad, other = leaves[which].grad, leaves[1 - which].grad
                assert grad is not None
                assert other is None
                # All ranks must step alike where they have the same operand.
                is_shared = name == "gemm" and which == 0
                seed = 10 + which + (0 if is_shared else ranks.rank)
                step = drawn(seed, *grad.shape, dtype=torch.float64)
                losses = []
                for sign in (1, -1):
                    moved = [A.clone(), B.clone()]
                    moved[which] += sign * eps * step
                    with torch.no_grad():
                        value = (product(*moved, ranks) * weights).sum()
                    losses.append(summed(value, name, ranks))
                slope = (grad * step).sum()
                if not is_shared:
                    slope = ranks.all_reduce(slope.clone())
                torch.testing.assert_close(
                    slope, (losses[0] - losses[1]) / (2 * eps), rtol=1e-6, atol=1e-6
                )
                count += 1
    return count


def expected(name: str, ranks: Collectives) -> list[torch.Tensor]:
    """The product and both gradients by autograd of the whole operands, in fp32: this rank's."""
    A, B, weights = (each.requires_grad_() for each in whole(torch.float32))
    C = A @ B
    (C * weights).sum().backward()
    assert A.grad is not None
    assert B.grad is not None
    if name in ("ag_gemm", "gemm"):
        dA = part(A.grad, ranks, 0) if SPREAD[name] else A.grad
        return [part(C.detach(), ranks, 1), dA, part(B.grad, ranks, 1)]
    C = part(C, ranks, 0) if SPREAD[name] else C
    return [C.detach(), part(A.grad, ranks, 1), part(B.grad, ranks, 0)]


def same(found: list[torch.Tensor | None], wanted: list[torch.Tensor], rtol: float = 1e-4) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one is not None
        torch.testing.assert_close(one, other.to(one.dtype), rtol=rtol, atol=rtol)


def algorithms_to_differentiate() -> dict[str, Callable[..., torch.Tensor]]:
    """How a product may be used in a model."""
    return {
        "plain": lambda product, A, B, *rest: product(A, B, *rest),
        "checkpointed": lambda product, *rest: checkpoint(product, *rest, use_reentrant=False),
        "strided": lambda product, A, B, *rest: product(
            A.T.contiguous().T, B.T.contiguous().T, *rest
        ),
    }


def gradients_of_ops() -> int:
    """fp32, our ops: against autograd of the whole product."""
    count = 0
    with TensorParallel(M) as ranks:
        for name in SPREAD:
            product: Any = getattr(functional, name)
            wanted = expected(name, ranks)
            for use in algorithms_to_differentiate().values():
                A, B, weights = operands(name, ranks, torch.float32)
                A.requires_grad_(), B.requires_grad_()
                C = use(product, A, B, ranks)
                (C * weights).sum().backward()
                same([C.detach(), A.grad, B.grad], wanted)
                count += 1
        A, B, weights = operands("ag_gemm", ranks, torch.float32)
        B.requires_grad_()
        kept = functional.ag_gemm(A, B, ranks, keep_gathered=True)
        twice = functional.ag_gemm(A, B, ranks)
        ((kept + twice) * weights / 2).sum().backward()  # one operand, used twice
        wanted = expected("ag_gemm", ranks)
        same([kept.detach(), twice.detach(), B.grad], [wanted[0], wanted[0], wanted[2]])
        A, B, weights = operands("gemm_rs", ranks, torch.float32)
        A.requires_grad_()  # B is frozen: nothing but a gather beside a product
        (functional.gemm_rs(A, B, ranks) * weights).sum().backward()
        same([A.grad], [expected("gemm_rs", ranks)[1]])
    return count + 2


def without_gradients() -> int:
    """``no_grad``, ``inference_mode`` and autocast, whose gradients are those of the leaves."""
    with TensorParallel(M) as ranks:
        for name in SPREAD:
            product: Any = getattr(functional, name)
            A, B, weights = operands(name, ranks, torch.float32)
            A.requires_grad_(), B.requires_grad_()
            wanted = expected(name, ranks)
            with torch.no_grad():
                same([product(A, B, ranks)], wanted[:1])
            with torch.inference_mode():
                C = product(A, B, ranks)
                assert C.is_inference()
                same([C], wanted[:1])
            with torch.autocast(A.device.type, torch.bfloat16):
                C = product(A, B, ranks)
            assert C.dtype == torch.bfloat16
            (C.float() * weights).sum().backward()
            for one, other in zip((C.detach().float(), A.grad, B.grad), wanted, strict=True):
                assert one is not None
                assert one.dtype == torch.float32
                assert (one - other).abs().max() < 2e-2 * other.abs().max() + 2e-2
    return len(SPREAD)


def mistakes() -> list[str]:
    """Messages of what a caller can get wrong."""
    seen = []

    def refused(kind: type[Exception], call: Callable[[], object]) -> None:
        try:
            call()
        except kind as error:
            seen.append(str(error))

    A = drawn(1, 6, K).requires_grad_()
    B = drawn(2, K, N // dist.get_world_size())
    ranks, call = TensorParallel(M), functional.ag_gemm
    refused(InvalidArgument, lambda: call(A, B.half(), ranks))
    refused(InvalidArgument, lambda: call(A.to(torch.int8), B.to(torch.int8), ranks))
    refused(InvalidArgument, lambda: call(A.double(), B.double(), ranks))
    refused(InvalidArgument, lambda: call(A[:, 1:], B, ranks))
    refused(InvalidArgument, lambda: call(drawn(1, 7, K).requires_grad_(), B, ranks))
    refused(InvalidArgument, lambda: functional.gemm_rs(A[:5], B, ranks))
    (dA,) = torch.autograd.grad(call(A, B, ranks).square().sum(), A, create_graph=True)
    refused(RuntimeError, lambda: dA.sum().backward())
    ranks.finalize()
    refused(InvalidArgument, lambda: TensorParallel(0))
    refused(ContextFinalized, lambda: call(A, B, ranks))
    refused(ContextFinalized, lambda: torch.ops.triton_dist.gemm_rs(A, B, "nobody"))
    return seen
