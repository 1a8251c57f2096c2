"""Base of the contexts of all ops: a creation on which ranks agree, memories, and their end; and
the operands that GEMMs across ranks accept."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from triton_dist.errors import (
    ContextFinalized,
    InvalidArgument,
    RankDisagreement,
)
from triton_dist.kernels.common.launch import Bounded, fits_descriptor
from triton_dist.kernels.common.peers import Disagreements
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import Group, group_for
from triton_dist.runtime.triton_compat import no_device_for_kernels

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DTYPE_NAMES = "torch.float16, torch.bfloat16 or torch.float32"

Check: TypeAlias = tuple[str, object, bool, str]
"""An argument, its value, whether that is good, and what was expected."""
C = TypeVar("C", bound="OpContext[Any]")
K = TypeVar("K")


class Memory(Protocol):
    """Memory that a context owns: it lives as long, and is reset and freed with it."""

    def reset(self) -> None:
        """Bring all ranks back to the same state after a call that failed on some rank.
        Collective."""

    def free(self) -> None:
        """Free the memory; idempotent. Every rank must have finished its calls."""


class Buffer(Memory, Protocol):
    """Memory that ranks share, the first of a context."""

    rank: int
    num_ranks: int
    disagreements: Disagreements


B = TypeVar("B", bound=Buffer)
M = TypeVar("M", bound=Memory)


class OpContext(Generic[B]):
    """Memories of an op, which its errors call ``op``. A context manager.

    A subclass allocates them in its constructor, ``_allocating``: its ``_buffer``, and others.
    """

    def __init__(self, op: str, group: dist.ProcessGroup | None) -> None:
        self._op = op
        self.group = group
        ranks = group_for(group)
        self.rank, self.num_ranks = ranks.rank, ranks.size
        self.device = current_device()
        self._buffer: B | None = None
        self._memories: tuple[Memory, ...] = ()

    @contextmanager
    def _allocating(self) -> Iterator[Callable[[M], M]]:
        """Within, what is yielded makes a memory the context's own, and returns it. If anything
        fails, say the second allocation, the memories that are there by then are freed."""

        def own(memory: M) -> M:
            self._memories += (memory,)
            return memory

        try:
            yield own
        except BaseException:
            self.free()
            raise

    @property
    def buffer(self) -> B:
        if self._buffer is None:
            raise ContextFinalized(type(self).__name__)
        return self._buffer

    def check(self) -> None:
        """Wait for the device, and raise if ranks have come to a call with different rows. An op's
        next call does so without waiting; this is for CUDA graphs, after which comes no call.

        Raises:
            RankDisagreement: names the ranks and what each came with.
        """
        self.buffer.disagreements.check_when_done()

    def barrier_all(self) -> None:
        """Line up all ranks on their current streams."""
        group_for(self.group).align()

    def sleep(self, straggler_option: tuple[int, int] | None) -> None:
        """``(rank, cycles)``: if this is that rank, keep the stream busy for so long."""
        if straggler_option is not None and straggler_option[0] == self.rank:
            self.device.sleep(straggler_option[1])

    def reset(self) -> None:
        """Bring the memories of all ranks back to one state after a call that failed on some rank.
        Collective.

        Raises:
            ContextFinalized: there are none any more.
        """
        if self._buffer is None:
            raise ContextFinalized(type(self).__name__)
        for memory in self._memories:
            memory.reset()

    def finalize(self) -> None:
        """Free the memories; idempotent. Collective: it waits until every rank has come here."""
        if self._buffer is None:
            return
        self.device.synchronize()
        group_for(self.group).barrier(f"finalize of the {self._op} context")
        self.free()

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if failure is None:
            self.finalize()
        else:  # peers may never come: free without them
            self.free()

    def free(self) -> None:
        """The same as ``finalize``, without waiting for anybody."""
        memories, self._memories, self._buffer = self._memories, (), None
        with ExitStack() as freed:  # each, whatever another one raises
            for memory in memories:
                freed.callback(memory.free)


def agree_to_create(
    function: str,
    a_context: str,
    asked: Mapping[str, Hashable],
    checks: Iterable[Check],
    group: Group,
) -> None:
    """Let all ranks go on to create ``a_context``, or raise on each. Collective.

    Args:
        asked: what all ranks have to ask for alike, by the name of the argument.
        checks: of this rank's arguments, made in turn until one fails.

    Raises:
        InvalidArgument: on a rank whose arguments cannot work.
        DeviceUnavailable: on a rank that cannot run kernels.
        RankDisagreement: ranks ask for different contexts, or those of another cannot work.
    """
    try:
        refusal = first_refusal(function, checks) or (
            None if current_device().runs_kernels else no_device_for_kernels()
        )
    except TypeError as error:  # of comparing what is no number: the others are told, too
        refusal = InvalidArgument(function, "an argument", str(error), "sizes that are ints")
    ranks = group_for(group)
    # What cannot be compared was refused: the others get it as text.
    values = [
        each if isinstance(each, numbers.Integral | str) else repr(each) for each in asked.values()
    ]
    answers = ranks.all_gather(f"creation of {a_context} context", (*values, str(refusal or "")))
    if refusal is not None:
        raise refusal
    if len(set(answers)) > 1:
        raise RankDisagreement(
            f"{', '.join(asked)} or validity of {a_context} context",
            {ranks.named(rank): answer for rank, answer in enumerate(answers)},
        )


def first_refusal(function: str, checks: Iterable[Check]) -> InvalidArgument | None:
    """The error of the first check that fails."""
    for argument, value, good, expected in checks:
        if not good:
            return InvalidArgument(function, argument, value, expected)
    return None


def refuse(function: str, checks: Iterable[Check]) -> None:
    """Raise the error of the first check that fails, an ``InvalidArgument``."""
    refusal = first_refusal(function, checks)
    if refusal is not None:
        raise refusal


def int_checks(**sizes: object) -> Iterator[Check]:
    """Checks that arguments are whole numbers, made before they are compared to any."""
    for name, size in sizes.items():
        yield name, size, is_int(size), "an int"


def is_int(number: object) -> bool:
    """Tell whether an argument is a whole number, in Python or of a library, and no truth value."""
    return isinstance(number, numbers.Integral) and not isinstance(number, bool)


def group_checks(group: Group, rank: int, **sizes: int) -> Iterator[Check]:
    """Yield the checks of what a caller says about its group: ``rank``, and by the names of their
    arguments the sizes of the group and of its part on this host."""
    yield from int_checks(rank=rank, **sizes)
    ranks, ((name, size), (local_name, local_size)) = group_for(group), sizes.items()
    yield name, size, size == ranks.size, f"{ranks.size}, the size of the group"
    yield "rank", rank, rank == ranks.rank, f"{ranks.rank}, this process's rank in the group"
    yield local_name, local_size, local_size >= 1, "at least 1"


def from_1_to(most: int, name: str, value: int) -> Check:
    """Return the check that an argument is from 1 to ``most``."""
    return name, value, 1 <= value <= most, f"1 to {most}"


def buffer_of(ctx: Any, kind: type[OpContext[B]], function: str, creator: str) -> B:
    """``ctx.buffer``, of a context of ``kind``, or of what stands in for one.

    Raises:
        InvalidArgument: it is no such context; ``creator`` makes one.
        ContextFinalized: it has none any more.
    """
    if isinstance(ctx, kind):
        if ctx._buffer is None:
            raise ContextFinalized(kind.__name__)
        return ctx._buffer
    if isinstance(ctx, OpContext | type) or not hasattr(ctx, "buffer"):
        expected = f"a context that {creator}(…) made, on all ranks"
        raise InvalidArgument(function, "ctx", ctx, expected)
    buffer: B = ctx.buffer
    return buffer


def is_differentiated(tensor: torch.Tensor) -> bool:
    """Say whether autograd would want a history of what is computed from ``tensor``."""
    return tensor.requires_grad and torch.is_grad_enabled()


def gradient_check(name: str, tensor: torch.Tensor) -> Check:
    """Check that nobody expects a gradient, which no op here has."""
    expected = "False: layers.nvidia.functional has ops with a backward; or use torch.no_grad()"
    return f"{name}.requires_grad", True, not is_differentiated(tensor), expected


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


def signature_of(aligned: torch.Tensor, *tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """All of tensors that decides whether they can be operands, apart from their addresses; of
    ``aligned``, one of them, also whether TMA can begin at its address. Of what is no tensor, what
    none has, so that the call is checked."""
    try:
        looks = tuple(
            x is not None
            and (x.shape, x.stride(), x.dtype, x.device, is_differentiated(x), x.is_neg())
            for x in tensors
        )
        return looks, aligned.data_ptr() % 16
    except (AttributeError, TypeError):
        return (None,)


def tensor_checks(**tensors: object) -> Iterator[Check]:
    """Checks that arguments are tensors, made before their attributes are looked at."""
    for name, tensor in tensors.items():
        yield name, tensor, isinstance(tensor, torch.Tensor), "a tensor"


class ProductKey(NamedTuple):
    """All that a tuning of a GEMM over ranks depends on, but for options of the op. M: of all
    ranks; N, K, layout of B, and whether A is contiguous: of this one. num_ranks: the context's."""

    M: int
    N: int
    K: int
    dtype: torch.dtype
    layout: str
    contiguous: bool
    num_ranks: int


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
        refuse(function, checks())
        known = accepted[signature] = make()
    return known


def kind_checks(
    dtype: torch.dtype, device: torch.device, **tensors: torch.Tensor | None
) -> Iterator[Check]:
    """Checks that operands have the context's dtype and device, and are not differentiated."""
    for name, tensor in tensors.items():
        if tensor is not None:
            yield gradient_check(name, tensor)
            expected = "False: call resolve_neg(), kernels read the memory as it is"
            yield f"{name}.is_neg()", True, not tensor.is_neg(), expected
            expected = f"the context's {dtype}"
            yield f"{name}.dtype", tensor.dtype, tensor.dtype == dtype, expected
            expected = f"the context's {device}"
            yield f"{name}.device", tensor.device, tensor.device == device, expected


def layout_of(B: torch.Tensor) -> str:
    """Kind of strides of B, by which it is served by TMA, in either order, or by pointers."""
    if not fits_descriptor(B):
        return "strided"
    return "column-major" if B.stride(0) == 1 else "row-major"
