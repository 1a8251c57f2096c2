"""Tensor assertions with detailed messages, and a context in which new tensors contain NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from triton_dist.debugging.accesses import ALLOCATIONS, patch, undo_all


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
    """Assert that ``|x - y| <= atol + rtol * |y|`` everywhere and that all values are finite.

    NaN or infinity in either tensor fails, because a wrong test may expect non-finite values.

    Args:
        x: actual result.
        y: expected result, with the shape and dtype of ``x``.
        rtol: relative tolerance.
        atol: absolute tolerance.
        verbose: include the worst index and its values in the message.
        allow_nan, allow_inf: allow NaN, or infinity, where both tensors have it.
        fail_if_too_small: fail if ``y`` is so small that a result of zeros would pass too.

    Raises:
        AssertionError: values differ. The message has the number of mismatches.
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
            first = _index_of_largest(not_finite.int())
            raise AssertionError(
                f"{name} has {count} of {tensor.numel()} values that are NaN or infinite, "
                f"the first at {first}: {tensor[first].item()}"
            )
    # In double precision, so that difference and bound are not rounded to the dtype.
    actual, expected = x.to(torch.float64), y.to(torch.float64)
    bound = atol + rtol * expected.abs()
    if fail_if_too_small and bool((expected.abs() <= bound).all()):
        raise AssertionError(
            f"the largest expected value is {expected.abs().max().item():.6g}: zeros would pass "
            f"with atol={atol} and rtol={rtol}, so nothing was checked"
        )
    equal = (actual == expected) | (actual.isnan() & expected.isnan())  # inf - inf would be NaN
    difference = torch.where(equal, 0.0, actual - expected).abs()
    excess = torch.where(difference.isfinite(), difference - bound, torch.inf)
    excess = torch.where(equal, 0.0, excess)
    mismatches = int((excess > 0).sum())
    if mismatches == 0:
        return
    if not verbose:
        raise AssertionError(f"{mismatches} of {x.numel()} values differ")
    worst = _index_of_largest(excess)
    raise AssertionError(
        f"{mismatches} of {x.numel()} values differ by more than "
        f"atol={atol} + rtol={rtol} * |expected|; worst at {worst}: "
        f"actual {x[worst].item()}, expected {y[worst].item()}, "
        f"difference {difference[worst].item():.6g}"
    )


def count_mismatches(
    actual: torch.Tensor, expected: torch.Tensor, rtol: float, atol: float
) -> torch.Tensor:
    """Return the number of values of ``actual`` not within ``atol + rtol * |expected|``.

    NaN counts as a mismatch. The result is a scalar on the tensors' device, without
    synchronisation, so a test can check many outputs and read the results once. Differences are
    computed in single precision, for 16-bit tensors.
    """
    expected = expected.float()
    bound = expected.abs().mul_(rtol).add_(atol)
    return ((actual.float() - expected).abs_() <= bound).logical_not_().sum()


def _index_of_largest(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(map(int, torch.unravel_index(tensor.argmax(), tensor.shape)))


def bitwise_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether shape, dtype and bits are equal (NaN equals NaN with equal bits)."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    as_bytes = (tensor.contiguous().view(torch.uint8).cpu() for tensor in (left, right))
    return torch.equal(*as_bytes)


def assert_bitwise_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise ``AssertionError`` with the number of differing elements unless ``bitwise_equal``."""
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
    """Context manager in which ``torch.empty`` and similar functions return tensors full of NaN.

    Zeros or old results in new memory can hide two bugs: a kernel reads an element that was not
    written, or does not write an element. NaN reveals both. Integer tensors are not changed,
    because no integer propagates like NaN.
    """
    undo = undo_all([patch(owner, name, _poisoned) for owner, name in ALLOCATIONS])
    try:
        yield
    finally:
        undo()


def _poisoned(allocate: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    tensor = allocate(*args, **kwargs)
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.detach().fill_(float("nan"))
    return tensor
