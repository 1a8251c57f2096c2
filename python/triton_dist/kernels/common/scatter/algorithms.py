"""Base classes of algorithms that compute ``sum over ranks of A @ B`` plus ``bias``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch

from triton_dist.kernels.common.context import raise_first_error
from triton_dist.kernels.common.exchange.buffer import ExchangeBuffer, shard_elements
from triton_dist.kernels.common.gemm.scales import fits_library, library_check, library_matmul
from triton_dist.kernels.common.op import SelectableAlgorithm
from triton_dist.kernels.common.scatter.call import SummingCall, SummingSizes
from triton_dist.kernels.common.scatter.kernel import scattered_gemm
from triton_dist.kernels.common.scatter.one_launch import exchanged_gemm, num_programs_of
from triton_dist.kernels.common.scatter.partials import Scattering, tiles_of_row_block
from triton_dist.kernels.common.scatter.tiles import add_deferred
from triton_dist.runtime.device import current_device
from triton_dist.runtime.launch import Launch


def outputs(C: torch.Tensor, bias: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return output and bias by kernel argument name. Their addresses change between calls."""
    return {"out.c": C} if bias is None else {"out.c": C, "out.bias": bias}


def inputs(call: SummingCall) -> dict[str, torch.Tensor]:
    """Return the operands and their scales by kernel argument name."""
    tensors = {"a_ptr": call.A, "b_ptr": call.B}
    if call.A_scale is not None and call.B_scale is not None:
        tensors |= {"scales.a_scale": call.A_scale, "scales.b_scale": call.B_scale}
    return tensors


@dataclass  # Not frozen, because that would take 1 us more per call.
class ScatteredLaunches:
    """Launches of a call that sends tiles to the ranks that own their rows, and sums them in C.

    ``scattering`` is the memory in which tiles arrive. ``scattered_gemm`` is the main launch.
    """

    kernel: ClassVar[Any]
    """The persistent GEMM kernel."""
    call: SummingCall
    C: torch.Tensor
    scattering: Scattering

    def __post_init__(self) -> None:
        self.key = self._key()
        """Key of the launches: all their properties except the addresses of tensors."""
        # The key contains the id() of these objects, so they must stay alive.
        self._keep_alive = self.scattering, self.call.gemm_config

    def run(self) -> None:
        self.multiply()
        self.add_deferred()

    def multiply(self) -> None:
        """Load all kernels that follow the GEMM, then launch the GEMM."""
        self._launch(self.key, self._gemm, inputs(self.call) | self._output_tensors())

    def add_deferred(self) -> None:
        """Launch the kernel that adds deferred tiles, if the GEMM may defer tiles.

        ``scatter/tiles.py`` describes deferred tiles.
        """
        if self._may_defer():
            self._launch(("deferred", *self.key), self._deferred, self._output_tensors())

    def compile(self) -> None:
        self._gemm().compile()

    def _key(self) -> tuple[object, ...]:
        call = self.call
        ids = id(self.scattering), id(call.gemm_config)
        return *call.layouts(), *ids, call.persistent, call.num_chunks

    def _launch(self, key: object, make: Any, tensors: dict[str, torch.Tensor]) -> None:
        self.call.ctx.buffer.slots.launcher.run(key, make, tensors, self._keep_alive)

    def _output_tensors(self) -> dict[str, torch.Tensor]:
        return outputs(self.C, self.call.bias)

    def _may_defer(self) -> bool:
        return self.call.persistent and self.scattering.num_ranks > 1

    def _later_launches(self) -> Iterator[Launch]:
        if self._may_defer():
            yield self._deferred()

    def _gemm(self) -> Launch:
        call = self.call
        return scattered_gemm(
            call.A, call.B, self.C, call.bias, call.gemm_config, self.scattering,
            kernel=self.kernel, num_sms=current_device().num_sms, persistent=call.persistent,
            num_chunks=call.num_chunks, scales=call.scaling.kernel_argument(call.A, call.B),
        ).preload(*self._later_launches())  # fmt: skip

    def _deferred(self) -> Launch:
        call = self.call
        return add_deferred(
            self.C, call.bias, call.gemm_config, self.scattering,
            M=call.A.shape[0], num_sms=current_device().num_sms, num_chunks=call.num_chunks,
        )  # fmt: skip


@dataclass  # Not frozen, because that would take 1 us more per call.
class ExchangeLaunch:
    """The single launch of a call that multiplies, sends, waits and adds.

    Without ``to_owners``, every rank adds and returns all M rows. With ``to_owners``, each rank
    adds and returns its M / num_ranks rows. With ``to_owners`` and ``broadcasts_sums``, each rank
    adds its rows and sends the sums to all ranks, so that every rank returns all M rows.
    """

    call: SummingCall
    buffer: ExchangeBuffer
    to_owners: bool
    broadcasts_sums: bool = False

    def run(self) -> torch.Tensor:
        call, buffer, C = self.call, self.buffer, self._output()
        num_ctas = num_programs_of(
            call.gemm_config, call.A.shape[0], C.shape[1], buffer.device.num_sms, buffer.num_ranks,
            self.to_owners,
        )  # fmt: skip
        buffer.begin(self.phases(), num_ctas, num_chunks=1)
        buffer.launcher.run(
            (
                type(self), *call.layouts(), id(call.gemm_config), call.persistent, self.to_owners,
                self.broadcasts_sums,
            ),
            lambda: self.gemm(C),
            inputs(call) | outputs(C, call.bias),
            keep_alive=(call.gemm_config,),
        )  # fmt: skip
        buffer.timeout_words.end()
        return C

    def compile(self) -> None:
        self.gemm(self._output()).compile()

    def phases(self) -> int:
        """Return how often a program waits for flags of its peers."""
        return 2 if self.broadcasts_sums else 1

    def gemm(self, C: torch.Tensor) -> Launch:
        call, buffer = self.call, self.buffer
        rows = -(-call.A.shape[0] // buffer.num_ranks) if self.to_owners else call.A.shape[0]
        return exchanged_gemm(
            call.A, call.B, C, call.bias, call.gemm_config, buffer.regions(C.dtype),
            shard_elements(rows * C.shape[1]), rank=buffer.rank, num_ranks=buffer.num_ranks,
            num_sms=buffer.device.num_sms, persistent=call.persistent, to_owners=self.to_owners,
            broadcasts_sums=self.broadcasts_sums,
            scales=call.scaling.kernel_argument(call.A, call.B),
        )  # fmt: skip

    def _output(self) -> torch.Tensor:
        A, B = self.call.A, self.call.B
        is_scattered = self.to_owners and not self.broadcasts_sums
        rows = A.shape[0] // (self.buffer.num_ranks if is_scattered else 1)
        return A.new_empty((rows, B.shape[1]), dtype=self.call.ctx.output_dtype)


C = TypeVar("C", bound=SummingCall)


class SummingAlgorithm(SelectableAlgorithm[C, SummingSizes]):
    """Base class of algorithms of ops that sum products over ranks."""

    supports_all_calls: ClassVar[bool] = False
    """True if the algorithm also supports a single rank and ``SummingSizes.adds_on_arrival``."""

    def fits(self, config: Mapping[str, Any], sizes: SummingSizes) -> bool:
        fits_sizes = self.supports_all_calls or (sizes.num_ranks > 1 and not sizes.adds_on_arrival)
        return fits_sizes and super().fits(config, sizes)


class OverlappedAlgorithm(SummingAlgorithm[C], Generic[C]):
    """Algorithm that sends tiles while the next tiles are multiplied."""

    uses_copy_engines: ClassVar[bool] = False
    """True if copy engines, not the GEMM kernel, send the tiles."""

    def check(self, call: C) -> None:
        call.check_tiles()

    def compile(self, call: C) -> None:
        self.scattered(call).compile()

    def run(self, call: C) -> torch.Tensor:
        ctx, work_items, awaited = call.ctx, self.work_items(call), False
        ctx.buffer.slots.take(call.A.shape[0], copied=self.uses_copy_engines)
        try:
            ctx.sleep(call.straggler_option)
            scattered = self.scattered(call)
            scattered.run()
            awaited = True  # the kernels wait for tiles of each peer
        finally:
            ctx.buffer.slots.finish(awaited, lambda: ctx.buffer.expected(work_items))
        return scattered.C

    def work_items(self, call: C) -> int:
        """Return the number of flags of a row block: by default one per tile."""
        rows = call.ctx.rows_of_rank(call.A.shape[0])
        return tiles_of_row_block(call.gemm_config, rows, call.ctx.N)

    @abstractmethod
    def scattered(self, call: C) -> ScatteredLaunches:
        """Return the launches that multiply ``call`` and send the tiles to their owners."""


class OneLaunchAlgorithm(SummingAlgorithm[C], Generic[C]):
    """Algorithm with a single launch that multiplies, sends, waits and adds."""

    tunables = ("gemm_config", "persistent")
    launches: ClassVar[type[ExchangeLaunch]] = ExchangeLaunch
    to_owners: ClassVar[bool] = False
    broadcasts_sums: ClassVar[bool] = False
    """``ExchangeLaunch`` describes ``to_owners`` and ``broadcasts_sums``."""

    def compile(self, call: C) -> None:
        self.exchanged(call).compile()

    def run(self, call: C) -> torch.Tensor:
        call.ctx.sleep(call.straggler_option)
        result: torch.Tensor = call.ctx.buffer.slots.run_without_slots(self.exchanged(call).run)
        return result

    def exchanged(self, call: C) -> ExchangeLaunch:
        return self.launches(call, call.ctx.exchange, self.to_owners, self.broadcasts_sums)


class UnfusedAlgorithm(SummingAlgorithm[C], Generic[C]):
    """Algorithm that computes the product with ``torch.matmul`` or ``scaled_mm``, then sums it.

    The bias is added after the sum is rounded to the output's dtype.
    """

    def fits(self, config: Mapping[str, Any], sizes: SummingSizes) -> bool:
        return fits_library(sizes.A, sizes.B, sizes.scaling) and super().fits(config, sizes)

    def check(self, call: C) -> None:
        check = library_check(self.name, call.A, call.B, call.scaling)
        raise_first_error(call.ctx_type.function, [check])

    def run(self, call: C) -> torch.Tensor:
        call.ctx.sleep(call.straggler_option)
        A, B = call.A.detach(), call.B.detach()  # like our kernels, without autograd history

        def run_unfused() -> torch.Tensor:
            if call.ctx.num_ranks == 1:
                return library_matmul(A, B, call.scaling)
            return self.multiply(call, A, B)

        C: torch.Tensor = call.ctx.buffer.slots.run_without_slots(run_unfused)
        return C if call.bias is None else C.add_(call.bias.detach())

    def multiply(self, call: C, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        """Return this rank's result of the sum of ``A @ B`` over ranks, for several ranks."""
        return self.sum(call, library_matmul(A, B, call.scaling))

    @abstractmethod
    def sum(self, call: C, product: torch.Tensor) -> torch.Tensor:
        """Return this rank's result of the sum of ``product`` over ranks."""
