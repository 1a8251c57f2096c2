"""Assertions about tensors whose messages say what to look at, and memory that holds NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from triton_dist.debugging.accesses import ALLOCATIONS, replace, undo_all


def assert_allclose(
    x: torch.Tensor,
    y: torch.Tensor,
    rtol: float = 1e-3,
    atol: float = 1e-3,
    verbose: bool = True,
    allow_nan: bool = False,
    allow_inf: bool = False,
    fail_if_too_small: bool = False,
) -> None:
    """All of ``x``, the actual result, is finite, and ``|x - y| <= atol + rtol * |y|``; ``y`` is
    the expected one.

    Both tensors have the same shape and dtype. A NaN or an infinity fails in either of them: an
    expectation that is not finite would let a broken kernel pass.

    Args:
        allow_nan, allow_inf: such values may be there, at the same places and alike in both.
        fail_if_too_small: fail if zeros in place of ``x`` would pass: then nothing is checked.

    Raises:
        AssertionError: with the number of mismatches, the worst index and both values there, unless
            ``verbose`` is false.
    """
    if x.shape != y.shape or x.dtype != y.dtype:
        raise AssertionError(
            f"actual is {tuple(x.shape)} {x.dtype}, expected is {tuple(y.shape)} {y.dtype}"
        )
    y = y.to(x.device)
    for name, tensor in (("actual", x), ("expected", y)):
        not_finite = tensor.isnan() * (not allow_nan) | tensor.isinf() * (not allow_inf)
        count = int(not_finite.sum())
        if count:
            first = _index(int(not_finite.flatten().int().argmax()), tensor.shape)
            raise AssertionError(
                f"{name} has {count} of {tensor.numel()} values that are NaN or infinite, "
                f"the first at {first}: {tensor[first].item()}"
            )
    # In double precision, so that neither the difference nor the bound is rounded to the dtype.
    found, wanted = x.to(torch.float64), y.to(torch.float64)
    bound = atol + rtol * wanted.abs()
    if fail_if_too_small and bool((wanted.abs() <= bound).all()):
        raise AssertionError(
            f"expected is at most {wanted.abs().max().item():.6g}, within atol={atol} + rtol={rtol}"
            " * |expected| of zeros: nothing was checked"
        )
    alike = (found == wanted) | (found.isnan() & wanted.isnan())  # infinities have no difference
    difference = torch.where(alike, 0.0, found - wanted).abs()
    excess = torch.where(difference.isfinite(), difference - bound, torch.inf)
    excess = torch.where(alike, 0.0, excess)
    mismatches = int((excess > 0).sum())
    if mismatches == 0:
        return
    if not verbose:
        raise AssertionError(f"{mismatches} of {x.numel()} values differ")
    worst = _index(int(excess.flatten().argmax()), x.shape)
    raise AssertionError(
        f"{mismatches} of {x.numel()} values differ by more than "
        f"atol={atol} + rtol={rtol} * |expected|; worst at {worst}: "
        f"actual {x[worst].item()}, expected {y[worst].item()}, "
        f"difference {difference[worst].item():.6g}"
    )


def count_mismatches(
    actual: torch.Tensor, expected: torch.Tensor, rtol: float, atol: float
) -> torch.Tensor:
    """Number of values of ``actual`` not within ``atol + rtol * |expected|``; NaN never is.

    A scalar on the tensors' device: nothing waits for it, so a test can check many outputs and look
    once. For 16-bit dtypes: differences are taken in single precision.
    """
    wanted = expected.float()
    bound = wanted.abs().mul_(rtol).add_(atol)
    return ((actual.float() - wanted).abs_() <= bound).logical_not_().sum()


def _index(flat: int, shape: torch.Size) -> tuple[int, ...]:
    """The index into ``shape`` of the element at ``flat`` in row-major order."""
    index = []
    for size in reversed(shape):
        flat, position = divmod(flat, size)
        index.append(position)
    return tuple(reversed(index))


def bitwise_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """True if two tensors have the same shape, dtype and bits (NaN equals the same NaN)."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    as_bytes = (tensor.contiguous().view(torch.uint8).cpu() for tensor in (left, right))
    return torch.equal(*as_bytes)


def assert_bitwise_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise ``AssertionError`` that counts the differing elements, unless ``bitwise_equal``."""
    if bitwise_equal(actual, expected):
        return
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise AssertionError(
            f"actual is {tuple(actual.shape)} {actual.dtype}, "
            f"expected is {tuple(expected.shape)} {expected.dtype}"
        )
    differing = int((actual.cpu() != expected.cpu()).sum())
    raise AssertionError(f"{differing} of {actual.numel()} values differ in their bits")


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """While active, the ``torch.empty`` family returns floating-point tensors full of NaN.

    A kernel that reads, or leaves unwritten, an element of a fresh buffer mostly finds a harmless
    value there. With NaN the mistake shows in each run. Integer tensors are left alone: they have
    no value that spreads.
    """
    undo = undo_all([replace(owner, name, _poisoned) for owner, name in ALLOCATIONS])
    try:
        yield
    finally:
        undo()


def _poisoned(allocate: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    tensor = allocate(*args, **kwargs)
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.detach().fill_(float("nan"))
    return tensor
