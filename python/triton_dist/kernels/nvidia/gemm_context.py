"""What contexts of GEMMs across ranks have in common: how they are created, what they refuse, how
they end."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from triton_dist.errors import ContextFinalized, InvalidArgument, RankDisagreement
from triton_dist.kernels.common.launch import Launch, Launcher, fits_descriptor
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for
from triton_dist.runtime.triton_compat import is_interpreting

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MOST_FORMS = 4096

Check: TypeAlias = tuple[str, object, bool, str]
"""An argument, its value, whether that is good, and what was expected."""


class Buffer(Protocol):
    """What ranks share in a context."""

    rank: int
    num_ranks: int

    def free(self) -> None:
        """Free the memory; idempotent. Every rank must have finished its calls."""


B = TypeVar("B", bound=Buffer)
K = TypeVar("K")
C = TypeVar("C", bound="GEMMContext[Any]")


class GEMMContext(Generic[B]):
    """Symmetric memory of a GEMM op. A context manager."""

    title: ClassVar[str]
    """Of the op, for errors."""

    def __init__(self, buffer: B, group: dist.ProcessGroup | None) -> None:
        self._buffer: B | None = buffer
        self.group = group
        self.rank, self.num_ranks = buffer.rank, buffer.num_ranks
        self.device = current_device()
        # What was found to be good: checking takes several us, looking here less than one.
        self.accepted: dict[Any, Any] = {}

    @property
    def buffer(self) -> B:
        if self._buffer is None:
            raise ContextFinalized(type(self).__name__)
        return self._buffer

    def barrier_all(self) -> None:
        """Line up all ranks on their current streams."""
        group_for(self.group).align()

    def sleep(self, straggler_option: tuple[int, int] | None) -> None:
        """``(rank, cycles)``: if this is that rank, keep the stream busy for so long."""
        if straggler_option is not None and straggler_option[0] == self.rank:
            self.device.sleep(straggler_option[1])

    def finalize(self) -> None:
        """Free the symmetric memory; idempotent. Collective: it waits until every rank has
        come here."""
        if self._buffer is None:
            return
        self.device.synchronize()
        group_for(self.group).barrier(f"finalize of the {self.title} context")
        self._free()

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if failure is None:
            self.finalize()
        elif self._buffer is not None:  # peers may never come: free without them
            self._free()

    def _free(self) -> None:
        if self._buffer is not None:
            self._buffer.free()
        self._buffer = None


def agree_to_create(
    function: str,
    a_context: str,
    asked: Mapping[str, Hashable],
    checks: Iterable[Check],
    group: dist.ProcessGroup | None,
) -> None:
    """Let all ranks go on to create ``a_context``, or raise on each. Collective.

    Args:
        asked: what all ranks have to ask for alike, by the name of the argument.
        checks: of this rank's arguments, made in turn until one fails.

    Raises:
        InvalidArgument: on a rank whose arguments cannot work.
        RankDisagreement: ranks ask for different contexts, or those of another cannot work.
    """
    refusal = first_refusal(function, checks)
    answers = group_for(group).gather(
        f"creation of {a_context} context", (*asked.values(), str(refusal or ""))
    )
    if refusal is not None:
        raise refusal
    if len(set(answers)) > 1:
        raise RankDisagreement(
            f"{', '.join(asked)} or validity of {a_context} context", dict(enumerate(answers))
        )


def first_refusal(function: str, checks: Iterable[Check]) -> InvalidArgument | None:
    """The error of the first check that fails."""
    for argument, value, good, expected in checks:
        if not good:
            return InvalidArgument(function, argument, value, expected)
    return None


def group_checks(
    size_name: str, num_ranks: int, rank: int, group: dist.ProcessGroup | None
) -> Iterator[Check]:
    """That the caller's idea of its group is right; ``size_name``: the argument ``num_ranks``."""
    ranks = group_for(group)
    expected = f"{ranks.size}, the size of the group"
    yield size_name, num_ranks, num_ranks == ranks.size, expected
    yield "rank", rank, rank == ranks.rank, f"{ranks.rank}, this process's rank in the group"


def kernel_checks(dtype_name: str, dtype: torch.dtype) -> Iterator[Check]:
    """That kernels here can multiply ``dtype``, and run."""
    expected = "torch.float16, torch.bfloat16 or torch.float32"
    yield dtype_name, dtype, dtype in DTYPES, expected
    runs = current_device().name != "cpu" or is_interpreting()
    expected = "1, set before kernels are imported, to run on CPU ranks"
    yield "TRITON_INTERPRET", "unset", runs, expected


def look_of(*tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """What decides whether tensors can be operands, apart from their addresses."""
    return tuple(
        tensor is not None and (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        for tensor in tensors
    )


def accept(
    accepted: dict[Any, Any],
    looks: Hashable,
    function: str,
    checks: Callable[[], Iterable[Check]],
    make: Callable[[], K],
) -> K:
    """What ``make`` made of operands that look so, once they passed all ``checks``; one object for
    the same looks.

    Raises:
        InvalidArgument: the call cannot work.
    """
    known: K | None = accepted.get(looks)
    if known is None:
        refusal = first_refusal(function, checks())
        if refusal is not None:
            raise refusal
        if len(accepted) >= _MOST_FORMS:
            accepted.clear()
        known = accepted[looks] = make()
    return known


def kind_checks(
    dtype: torch.dtype, device: torch.device, **tensors: torch.Tensor | None
) -> Iterator[Check]:
    """That operands have the context's dtype and device."""
    for name, tensor in tensors.items():
        if tensor is not None:
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
    """That ``A @ B`` can be an addend of [M, N], to whose sum ``bias`` is added; ``row_checks`` say
    which M are good."""
    is_matrix = A.ndim == 2 and A.shape[1] >= 1
    yield "A.shape", tuple(A.shape), is_matrix, "[M, K_per_rank]"
    yield from row_checks()
    shape = (A.shape[1], N)
    yield "B.shape", tuple(B.shape), tuple(B.shape) == shape, f"[K_per_rank, N] = {shape}"
    if bias is not None:
        yield "bias.shape", tuple(bias.shape), tuple(bias.shape) == (N,), f"[N] = {(N,)}"
        expected = "a contiguous bias; call bias.contiguous()"
        yield "bias.stride()", bias.stride(), bias.is_contiguous(), expected
    yield from kind_checks(dtype, device, A=A, B=B, bias=bias)


def layout_of(B: torch.Tensor) -> str:
    """What decides which kernel can serve B, and how."""
    if not fits_descriptor(B):
        return "strided"
    return "column-major" if B.stride(0) == 1 else "row-major"


def run_gemm(
    launcher: Launcher,
    key: tuple[Any, ...],
    launch: Callable[[], Launch],
    tensors: Mapping[str, torch.Tensor],
    alive: object,
) -> None:
    """Launch a GEMM; one like another before only with other addresses.

    Args:
        key: what the launch depends on beside the operands' addresses and the precision of fp32;
            may hold the ``id`` of what is in ``alive``.
        tensors: by the names of the kernel's arguments, those whose addresses vary.
    """
    addresses = [tensor.data_ptr() for tensor in tensors.values()]
    # Triton compiles another kernel for pointers that are no multiples of 16 bytes, TMA takes none
    # such, and ``dot_precision`` asks whether fp32 may be multiplied as tf32.
    misaligned = tuple(address % 16 for address in addresses)
    is_fp32 = tensors["a_ptr"].dtype is torch.float32
    tf32 = is_fp32 and torch.backends.cuda.matmul.allow_tf32
    launcher.run((*key, misaligned, tf32), launch, addresses, tuple(tensors), alive)
