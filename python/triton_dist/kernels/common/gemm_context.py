"""Base of the contexts of GEMMs across ranks: the operands that they accept."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from triton_dist.kernels.common.bounded import Bounded
from triton_dist.kernels.common.context import (
    DTYPE_NAMES,
    DTYPES,
    B,
    Check,
    OpContext,
    first_refusal,
    gradient_check,
    is_differentiated,
)
from triton_dist.kernels.common.launch import fits_descriptor

K = TypeVar("K")


class GEMMContext(OpContext[B]):
    """Memories of a GEMM op. A context manager."""

    title: ClassVar[str]
    """Name of the op, for errors."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__(self.title, group)
        # What was found to be good: checking takes several us, looking here less than one.
        self.accepted: Bounded[Any, Any] = Bounded()


def kernel_checks(dtype_name: str, dtype: torch.dtype) -> Iterator[Check]:
    """Check that kernels here can multiply ``dtype``."""
    yield dtype_name, dtype, dtype in DTYPES, DTYPE_NAMES


def signature_of(*tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """All of tensors that decides whether they can be operands, apart from their addresses."""
    return tuple(
        tensor is not None
        and (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, is_differentiated(tensor))
        for tensor in tensors
    )


class ProductKey(NamedTuple):
    """All that a tuning of a GEMM over ranks depends on, but for options of the op."""

    M: int
    """Rows of all ranks. The tuner rounds it up: a tuning serves a range."""
    N: int
    """Columns of B, on this rank."""
    K: int
    """Of the product on this rank."""
    dtype: torch.dtype
    layout: str
    """Of B."""
    contiguous: bool
    """A is."""
    num_ranks: int
    """Of the context; those that tune together may be more."""


def accept(
    accepted: dict[Any, Any],
    signature: Hashable,
    function: str,
    checks: Callable[[], Iterable[Check]],
    make: Callable[[], K],
) -> K:
    """The result of ``make`` for operands of this signature, once they passed all ``checks``; one
    object for each signature.

    Raises:
        InvalidArgument: the call cannot work.
    """
    known: K | None = accepted.get(signature)
    if known is None:
        refusal = first_refusal(function, checks())
        if refusal is not None:
            raise refusal
        known = accepted[signature] = make()
    return known


def kind_checks(
    dtype: torch.dtype, device: torch.device, **tensors: torch.Tensor | None
) -> Iterator[Check]:
    """Checks that operands have the context's dtype and device, and are not differentiated."""
    for name, tensor in tensors.items():
        if tensor is not None:
            yield gradient_check(name, tensor)
            expected = f"the context's {dtype}"
            yield f"{name}.dtype", tensor.dtype, tensor.dtype == dtype, expected
            expected = f"the context's {device}"
            yield f"{name}.device", tensor.device, tensor.device == device, expected


def addend_checks(
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    row_checks: Callable[[], Iterable[Check]],
    N: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[Check]:
    """Checks that ``A @ B`` can be an addend of [M, N], to whose sum ``bias`` is added;
    ``row_checks`` say which M are good."""
    is_matrix = A.ndim == 2 and A.shape[1] >= 1
    yield "A.shape", tuple(A.shape), is_matrix, "[M, K_per_rank]"
    expected = "[M, K_per_rank] with at least one row"
    yield "A.shape", tuple(A.shape), A.shape[0] >= 1, expected
    yield from row_checks()
    shape = (A.shape[1], N)
    yield "B.shape", tuple(B.shape), tuple(B.shape) == shape, f"[K_per_rank, N] = {shape}"
    if bias is not None:
        yield "bias.shape", tuple(bias.shape), tuple(bias.shape) == (N,), f"[N] = {(N,)}"
        expected = "a contiguous bias; call bias.contiguous()"
        yield "bias.stride()", bias.stride(), bias.is_contiguous(), expected
    yield from kind_checks(dtype, device, A=A, B=B, bias=bias)


def layout_of(B: torch.Tensor) -> str:
    """Kind of strides of B, by which it is served by TMA, in either order, or by pointers."""
    if not fits_descriptor(B):
        return "strided"
    return "column-major" if B.stride(0) == 1 else "row-major"
