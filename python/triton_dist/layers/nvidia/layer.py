"""Base classes of the tensor-parallel layers: ranks, modes, weight shards and clean-up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from triton_dist.errors import InvalidArgument
from triton_dist.layers.nvidia import functional
from triton_dist.layers.nvidia.tensor_parallel import Collectives, TensorParallel
from triton_dist.runtime.ranks import Group

_FORWARD = torch.nn.Linear.forward


class TensorParallelLayer(torch.nn.Module, ABC):
    """A model layer whose weights are sharded over the ranks.

    There are two modes. *Sequence-parallel*: each rank has consecutive rows of the tokens, [tokens
    / ranks, hidden], and returns the same rows of the result (AllGather-GEMM, then
    GEMM-ReduceScatter). *All-reduce*: all ranks have all tokens, any number (GEMM, then
    GEMM-AllReduce).

    ``forward`` is differentiable and can be compiled. The other call forms are for inference with
    existing scripts: ``dist_triton_fwd`` (sequence-parallel), ``dist_triton_AR_fwd`` and
    ``dist_triton_gemm_ar_fwd`` (all-reduce), and ``torch_fwd`` (all-reduce with torch's GEMM and
    the group's collective).

    Args:
        rank: this rank in the group; checked if given.
        world_size: number of ranks in the group; checked if given.
        group: process group; ``None``: the world, or this process alone without
            ``torch.distributed``.
        ranks: contexts shared by several layers, instead of contexts from ``_init_ctx``.
        sequence_parallel: mode of ``forward``.
        keep_gathered: keep gathered tokens for the backward instead of gathering them again.

    Raises:
        InvalidArgument: ``rank`` or ``world_size`` does not match the group.
    """

    shards: ClassVar[tuple[str, ...]]
    """Names of the sharded parameters. Their gradients are sharded too."""

    def __init__(
        self,
        rank: int | None = None,
        world_size: int | None = None,
        group: Group = None,
        *,
        ranks: Collectives | None = None,
        sequence_parallel: bool = False,
        keep_gathered: bool = False,
    ) -> None:
        super().__init__()
        self.library = Collectives(group if ranks is None else ranks.group)
        self.group, self.ranks, self._is_owner = self.library.group, ranks, False
        self.rank, self.world_size = self.library.rank, self.library.num_ranks
        self.sequence_parallel, self.keep_gathered = sequence_parallel, keep_gathered
        if rank not in (None, self.rank):
            raise self._invalid("rank", rank, f"{self.rank}, this process's rank in the group")
        if world_size not in (None, self.world_size):
            expected = f"{self.world_size}, the size of the group"
            raise self._invalid("world_size", world_size, expected)

    @abstractmethod
    def _init_parameters(self, module: torch.nn.Module, verbose: bool = False) -> None:
        """Copy this rank's shard of the weights of ``module``."""

    def _init_ctx(self, max_M: int = 0, *unused: Any, M: int = 0, **also_unused: Any) -> None:
        """Create contexts for calls of up to ``max_M`` tokens over all ranks. Collective.

        ``M`` is an alias of ``max_M``. Arguments of existing scripts for other kernels are ignored.

        Raises:
            InvalidArgument, RankDisagreement, SymmetricMemoryFull: see the ops' contexts.
        """
        self.finalize()
        self.ranks, self._is_owner = TensorParallel(max_M or M, self.group), True

    _init_AR_ctx = _init_ctx
    _init_gemm_ar_ctx = _init_ctx

    def finalize(self) -> None:
        """Free the contexts of ``_init_ctx``; idempotent. Collective.

        Contexts passed as ``ranks`` are not freed.
        """
        ranks = self.ranks
        if self._is_owner and ranks is not None:
            self.ranks, self._is_owner = None, False
            ranks.finalize()

    def _pair(
        self,
        x: torch.Tensor,
        first: torch.Tensor,
        between: Callable[[torch.Tensor], torch.Tensor],
        last: torch.Tensor,
        ranks: Collectives,
        sequence_parallel: bool,
    ) -> torch.Tensor:
        """Multiply rows by the transposes of ``first`` (column-sharded) and ``last`` (row-sharded).

        Args:
            between: function applied to the first product.
            sequence_parallel: use the sequence-parallel mode, else the all-reduce mode.
        """
        rows = x.reshape(-1, x.shape[-1])
        if sequence_parallel:
            keeps = self.keep_gathered
            product = functional.ag_gemm(rows, first.T, ranks, keep_gathered=keeps)
        else:
            product = functional.gemm(rows, first.T, ranks)
        multiply = functional.gemm_rs if sequence_parallel else functional.gemm_ar
        return multiply(between(product), last.T, ranks)

    def _required_ranks(self) -> Collectives:
        if self.ranks is None:
            raise self._invalid("ranks", None, "a TensorParallel; call _init_ctx(max_M) first")
        return self.ranks

    def _invalid(self, argument: str, value: object, expected: str) -> InvalidArgument:
        return InvalidArgument(type(self).__name__, argument, value, expected)

    def _check_members(self, name: str, module: torch.nn.Module, *members: str) -> None:
        if not all(hasattr(module, member) for member in members):
            expected = f"one with {', '.join(members)}"
            raise self._invalid(name, type(module), expected)

    def _linear(
        self,
        name: str,
        linear: torch.nn.Module,
        shape: tuple[int | None, int | None],
        may_be_other: bool = False,
    ) -> torch.Tensor:
        """Return the weight of a linear layer after checks of its shape, dtype and device.

        ``None`` in ``shape`` accepts any size. With ``may_be_other``, accept a module that is not a
        ``torch.nn.Linear`` but behaves like one, such as a router.
        """
        weight = getattr(linear, "weight", None)
        is_trusted = may_be_other and not isinstance(linear, torch.nn.Linear)
        if type(linear).forward is not _FORWARD and not is_trusted:
            expected = "a torch.nn.Linear that does not override forward"
            raise self._invalid(name, type(linear), expected)
        if not isinstance(weight, torch.Tensor) or weight.ndim != 2:
            shown = None if weight is None else tuple(weight.shape)
            raise self._invalid(f"{name}.weight", shown, "a matrix [outputs, inputs]")
        self.library.check_dtype(type(self).__name__, f"{name}.weight.dtype", weight.dtype)
        if weight.is_meta:
            raise self._invalid(f"{name}.weight.device", "meta", "a tensor with values")
        found = tuple(weight.shape)
        if any(size not in (None, have) for size, have in zip(shape, found, strict=True)):
            wanted = tuple("any" if size is None else size for size in shape)
            raise self._invalid(f"{name}.weight.shape", found, f"[outputs, inputs] = {wanted}")
        return weight

    def _check_split(self, name: str, size: int) -> None:
        if size % self.world_size:
            raise self._invalid(name, size, f"a multiple of the {self.world_size} ranks")

    def _shard(self, weight: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's shard of a weight along ``dim``, on this rank's device."""
        return weight.detach().chunk(self.world_size, dim)[self.rank].to(self.library.device)

    def _parameter(self, weight: torch.Tensor, like: torch.Tensor) -> torch.nn.Parameter:
        """Return a parameter that is trained if ``like`` is trained."""
        return torch.nn.Parameter(weight.contiguous(), requires_grad=like.requires_grad)

    def _print_shapes(self, verbose: bool) -> None:
        if verbose:
            shapes = ", ".join(f"{name} {tuple(p.shape)}" for name, p in self.named_parameters())
            print(f"[rank {self.rank}] {type(self).__name__}: {shapes}")


class TokenLayer(TensorParallelLayer):
    """A layer whose result for a token depends only on this token."""

    @abstractmethod
    def _run(self, x: torch.Tensor, ranks: Collectives, sequence_parallel: bool) -> torch.Tensor:
        """Return the result for x [..., hidden] in the given mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., hidden] for x [..., hidden], in the layer's mode.

        The first call of a shape tunes the ops.

        Raises:
            InvalidArgument: x has a wrong shape, dtype or device.
            ContextFinalized: the contexts were finalized.
            RankDisagreement: ranks chose different experts at the first call of a shape.
        """
        return self._run(x, self._required_ranks(), self.sequence_parallel)

    @torch.no_grad()
    def torch_fwd(self, x: torch.Tensor) -> torch.Tensor:
        return self._run(x, self.library, False)

    @torch.no_grad()
    def dist_triton_fwd(self, x: torch.Tensor, *unused: Any, **also_unused: Any) -> torch.Tensor:
        return self._run(x, self._required_ranks(), True)

    @torch.no_grad()
    def dist_triton_AR_fwd(self, x: torch.Tensor) -> torch.Tensor:
        return self._run(x, self._required_ranks(), False)

    dist_triton_gemm_ar_fwd = dist_triton_AR_fwd
