"""Base classes of op contexts, which own an op's symmetric memory, and checks of arguments."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from triton_dist.errors import ContextFinalized, InvalidArgument, RankDisagreement
from triton_dist.kernels.common.peers import Disagreements
from triton_dist.runtime.device import current_device
from triton_dist.runtime.launch import BoundedDict, fits_descriptor
from triton_dist.runtime.ranks import Group, group_for
from triton_dist.runtime.triton_compat import missing_gpu_error

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DTYPE_NAMES = "torch.float16, torch.bfloat16 or torch.float32"

Check: TypeAlias = tuple[str, object, bool, str]
"""Name of an argument, its value, whether it is valid, and the expected value."""
ContextT = TypeVar("ContextT", bound="OpContext[Any]")
KeyT = TypeVar("KeyT")


class Memory(Protocol):
    """Memory that a context owns, resets and frees."""

    def reset(self) -> None:
        """Return to the initial state after a call failed on some rank. Collective."""

    def free(self) -> None:
        """Free the memory; idempotent. Every rank must have finished its calls."""


class Buffer(Memory, Protocol):
    """The main memory of a context."""

    rank: int
    num_ranks: int
    disagreements: Disagreements


BufferT = TypeVar("BufferT", bound=Buffer)
MemoryT = TypeVar("MemoryT", bound=Memory)


class OpContext(Generic[BufferT]):
    """Context manager that owns the memories of an op.

    The constructor of a subclass sets ``buffer`` and allocates further memories inside
    ``allocating``. A context has the attributes ``group``, ``rank``, ``num_ranks`` and ``device``.
    """

    def __init__(self, op: str, group: dist.ProcessGroup | None) -> None:
        self._op = op
        self.group = group
        ranks = group_for(group)
        self.rank, self.num_ranks = ranks.rank, ranks.size
        self.device = current_device()
        self._buffer: BufferT | None = None
        self._memories: tuple[Memory, ...] = ()

    @contextmanager
    def allocating(self) -> Iterator[Callable[[MemoryT], MemoryT]]:
        """Yield a function that registers a memory with the context and returns it.

        If the block raises, for example in a later allocation, the registered memories are freed.
        """

        def add(memory: MemoryT) -> MemoryT:
            self._memories += (memory,)
            return memory

        try:
            yield add
        except BaseException:
            self.free()
            raise

    @property
    def buffer(self) -> BufferT:
        """The main memory. Raises ``ContextFinalized`` after ``finalize`` or ``free``."""
        if self._buffer is None:
            raise ContextFinalized(type(self).__name__)
        return self._buffer

    @buffer.setter
    def buffer(self, buffer: BufferT) -> None:
        self._buffer = buffer

    def check(self) -> None:
        """Wait for the device, and raise if ranks called an op with different numbers of rows.

        Each call of an op checks the previous calls without waiting. Use ``check`` after the last
        replay of a CUDA graph.

        Raises:
            RankDisagreement: the numbers differ. The message has the number of each rank.
        """
        self.buffer.disagreements.check_when_done()

    def barrier_all(self) -> None:
        """Wait for all ranks, on the host and on the current stream of each rank."""
        ranks = group_for(self.group)
        ranks.barrier("barrier_all")
        ranks.device_barrier()

    def sleep(self, straggler_option: tuple[int, int] | None) -> None:
        """Delay one rank's stream. ``straggler_option`` is (rank, GPU clock cycles) or ``None``."""
        if straggler_option is not None and straggler_option[0] == self.rank:
            self.device.sleep(straggler_option[1])

    def reset(self) -> None:
        """Return all memories to their initial state after a call failed on some rank. Collective.

        Raises:
            ContextFinalized: the memories have been freed.
        """
        if self._buffer is None:
            raise ContextFinalized(type(self).__name__)
        for memory in self._memories:
            memory.reset()

    def finalize(self) -> None:
        """Free the memories; idempotent. Collective: wait until every rank calls ``finalize``."""
        if self._buffer is None:
            return
        self.device.synchronize()
        group_for(self.group).barrier(f"finalize of the {self._op} context")
        self.free()

    def __enter__(self: ContextT) -> ContextT:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if failure is None:
            self.finalize()
        else:  # Peers may never call finalize: free without waiting for them.
            self.free()

    def free(self) -> None:
        """Free the memories without waiting for other ranks; idempotent."""
        memories, self._memories, self._buffer = self._memories, (), None
        with ExitStack() as freed:  # Free all memories even if one raises.
            for memory in memories:
                freed.callback(memory.free)


def agree_to_create(
    function: str,
    context_name: str,
    group: Group,
    rank: int,
    group_sizes: Mapping[str, int],
    sizes: Mapping[str, int],
    checks: Iterable[Check],
    **equal_arguments: Hashable,
) -> None:
    """Raise on every rank unless all ranks can create a context with equal arguments. Collective.

    Args:
        function: name of the caller's public function, for errors.
        context_name: what the context is for, in errors, such as "an AllGather-GEMM".
        rank: the caller's rank in the group.
        group_sizes: numbers of ranks of the group and on one host, by argument name.
        sizes: ints that must be at least 1 and equal on all ranks, by argument name.
        checks: further checks of this rank's arguments. They run after the checks of the ints.
        equal_arguments: further arguments that must be equal on all ranks.
    """
    all_checks = itertools.chain(
        int_checks(**sizes), group_checks(group, rank, **group_sizes),
        ((name, size, size >= 1, "at least 1") for name, size in sizes.items()), checks,
    )  # fmt: skip
    equal_arguments = {**sizes, **equal_arguments}
    try:
        error = first_error(function, all_checks) or (
            None if current_device().runs_kernels else missing_gpu_error()
        )
    # A check compared a value that is not a number. First send the error to the other ranks.
    except TypeError as failure:
        error = InvalidArgument(function, "an argument", str(failure), "int sizes")
    ranks = group_for(group)
    # Texts replace values of other types, because any two texts can be compared.
    values = [
        each if isinstance(each, numbers.Integral | str) else repr(each)
        for each in equal_arguments.values()
    ]
    answers = ranks.all_gather(f"creation of {context_name} context", (*values, str(error or "")))
    if error is not None:
        raise error
    if len(set(answers)) > 1:
        raise RankDisagreement(
            f"{', '.join(equal_arguments)} or validity of {context_name} context",
            {ranks.global_rank(rank): answer for rank, answer in enumerate(answers)},
        )


def first_error(function: str, checks: Iterable[Check]) -> InvalidArgument | None:
    for argument, value, is_valid, expected in checks:
        if not is_valid:
            return InvalidArgument(function, argument, value, expected)
    return None


def raise_first_error(function: str, checks: Iterable[Check]) -> None:
    error = first_error(function, checks)
    if error is not None:
        raise error


def int_checks(**sizes: object) -> Iterator[Check]:
    """Yield checks that arguments are ints. Run them before checks of the arguments' values."""
    for name, size in sizes.items():
        yield name, size, is_int(size), "an int"


def is_int(number: object) -> bool:
    """Return whether an argument is a Python or NumPy integer, but not a bool."""
    return isinstance(number, numbers.Integral) and not isinstance(number, bool)


def group_checks(group: Group, rank: int, **sizes: int) -> Iterator[Check]:
    """Yield checks of the caller's ``rank`` and of two ``sizes``, whose keywords are their names.

    The first size is the number of ranks of the group, the second the number of ranks per host.
    """
    yield from int_checks(rank=rank, **sizes)
    ranks, ((name, size), (local_name, local_size)) = group_for(group), sizes.items()
    yield name, size, size == ranks.size, f"{ranks.size}, the size of the group"
    yield "rank", rank, rank == ranks.rank, f"{ranks.rank}, this process's rank in the group"
    yield local_name, local_size, local_size >= 1, "at least 1"


def range_check(maximum: int, name: str, value: int) -> Check:
    return name, value, 1 <= value <= maximum, f"1 to {maximum}"


def checked_buffer(
    ctx: Any, ctx_type: type[OpContext[BufferT]], function: str, creator: str
) -> BufferT:
    """Return ``ctx.buffer``. Raise unless ctx is a ``ctx_type`` or a substitute with a ``buffer``.

    ``creator`` is the public function that creates contexts, for errors.
    """
    if isinstance(ctx, ctx_type):
        if ctx._buffer is None:
            raise ContextFinalized(ctx_type.__name__)
        return ctx._buffer
    if isinstance(ctx, OpContext | type) or not hasattr(ctx, "buffer"):
        expected = f"a context that {creator}(…) made on all ranks"
        raise InvalidArgument(function, "ctx", ctx, expected)
    buffer: BufferT = ctx.buffer
    return buffer


def is_differentiated(tensor: torch.Tensor) -> bool:
    """Return whether autograd would record operations on ``tensor``."""
    return tensor.requires_grad and torch.is_grad_enabled()


def gradient_check(name: str, tensor: torch.Tensor) -> Check:
    """Return the check that ``tensor`` needs no gradient, because ops have no backward."""
    expected = "False: use layers.nvidia.functional, which has a backward, or torch.no_grad()"
    return f"{name}.requires_grad", True, not is_differentiated(tensor), expected


class GEMMContext(OpContext[BufferT]):
    """Context of a GEMM op."""

    op_name: ClassVar[str]
    """Name of the op in errors."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__(self.op_name, group)
        # Tuning keys by ``operand_signature``: checking takes several us, a lookup < 1 us.
        self.checked_keys: BoundedDict[Any, Any] = BoundedDict()


def dtype_checks(dtype_name: str, dtype: torch.dtype) -> Iterator[Check]:
    """Yield the check that our kernels can multiply ``dtype``."""
    yield dtype_name, dtype, dtype in DTYPES, DTYPE_NAMES


def operand_signature(aligned: torch.Tensor, *tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """Return all properties of the tensors that the checks of operands depend on.

    Calls with equal signatures skip the checks. The signature includes the address of ``aligned``
    modulo 16, because TMA requires 16-byte alignment. If an argument is not a tensor, the signature
    matches no checked call.
    """
    try:
        properties = tuple(
            x is not None
            and (x.shape, x.stride(), x.dtype, x.device, is_differentiated(x), x.is_neg())
            for x in tensors
        )
        return properties, aligned.data_ptr() % 16
    except (AttributeError, TypeError):
        return (None,)


def tensor_checks(**tensors: object) -> Iterator[Check]:
    """Yield checks that arguments are tensors. Run them before checks that read attributes."""
    for name, tensor in tensors.items():
        yield name, tensor, isinstance(tensor, torch.Tensor), "a tensor"


class ProductKey(NamedTuple):
    """Tuning key of a GEMM across ranks, without the options of a particular op.

    ``M`` is the sum of rows over all ranks. ``N``, ``K``, ``layout`` (of B) and ``contiguous`` (of
    A) describe this rank's operands.
    """

    M: int
    N: int
    K: int
    dtype: torch.dtype
    layout: str
    contiguous: bool
    num_ranks: int


def cached_after_checks(
    cache: dict[Any, Any],
    signature: Hashable,
    function: str,
    checks: Callable[[], Iterable[Check]],
    make_key: Callable[[], KeyT],
) -> KeyT:
    """Return ``make_key()``, cached by ``signature``. The first call with a signature checks."""
    key: KeyT | None = cache.get(signature)
    if key is None:
        raise_first_error(function, checks())
        key = cache[signature] = make_key()
    return key


def operand_checks(
    dtype: torch.dtype, device: torch.device, **tensors: torch.Tensor | None
) -> Iterator[Check]:
    """Yield checks that operands have the context's dtype and device, and need no gradient.

    An operand may be ``None``.
    """
    for name, tensor in tensors.items():
        if tensor is not None:
            yield gradient_check(name, tensor)
            expected = "False: call resolve_neg(), because kernels ignore the negation bit"
            yield f"{name}.is_neg()", True, not tensor.is_neg(), expected
            expected = f"the context's {dtype}"
            yield f"{name}.dtype", tensor.dtype, tensor.dtype == dtype, expected
            expected = f"the context's {device}"
            yield f"{name}.device", tensor.device, tensor.device == device, expected


def layout_of(B: torch.Tensor) -> str:
    """Return "row-major" or "column-major" if TMA can read B, else "strided" (read by pointers)."""
    if not fits_descriptor(B):
        return "strided"
    return "column-major" if B.stride(0) == 1 else "row-major"
