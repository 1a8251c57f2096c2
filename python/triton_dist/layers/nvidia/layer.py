"""Base of the tensor-parallel layers: their ranks, modes, shards of weights, and end."""

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
    """A layer of a model, of which each rank has a share of the weights.

    Two modes. *Sequence-parallel*: each rank has a share of the tokens, [tokens / ranks, hidden],
    rows that follow one another, and gets the same of the result: AllGather-GEMM, then
    GEMM-ReduceScatter. *All-reduce*: all ranks have all tokens, any number: GEMM, then
    GEMM-AllReduce. ``forward`` has gradients and can be compiled. The other call forms are those of
    existing scripts, for inference: ``dist_triton_fwd`` (the first mode), ``dist_triton_AR_fwd``
    and ``dist_triton_gemm_ar_fwd`` (the second), and ``torch_fwd``, the second by torch's own
    product and all-reduce.

    Args:
        rank, world_size: this rank in the group, and its size; default: as they are.
        group: process group; ``None``: the world, or without ``torch.distributed`` this process.
        ranks: contexts that layers share, in place of those of ``_init_ctx``.
        sequence_parallel: the mode of ``forward``.
        keep_gathered: keep gathered tokens for the backward instead of gathering them again.

    Raises:
        InvalidArgument: another rank or size than those of the group.
    """

    shards: ClassVar[tuple[str, ...]]
    """Names of parameters of which this rank has a share, and the gradient of it."""

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
            raise self._refusal("rank", rank, f"{self.rank}, this process's rank in the group")
        if world_size not in (None, self.world_size):
            expected = f"{self.world_size}, the size of the group"
            raise self._refusal("world_size", world_size, expected)

    @abstractmethod
    def _init_parameters(self, module: torch.nn.Module, verbose: bool = False) -> None:
        """Take this rank's share of the weights of ``module``."""

    def _init_ctx(self, max_M: int = 0, *unused: Any, M: int = 0, **also_unused: Any) -> None:
        """Give the layer contexts for calls of up to ``max_M`` tokens, over all ranks; ``M`` is
        another name of it. What else scripts say, for other kernels, means nothing. Collective.

        Raises:
            InvalidArgument, RankDisagreement, SymmetricMemoryFull: as of the ops' contexts.
        """
        self.finalize()
        self.ranks, self._is_owner = TensorParallel(max_M or M, self.group), True

    _init_AR_ctx = _init_ctx
    _init_gemm_ar_ctx = _init_ctx

    def finalize(self) -> None:
        """Free the contexts of ``_init_ctx``; idempotent. Collective. Those that were given are
        their owner's."""
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
        is_spread: bool,
    ) -> torch.Tensor:
        """Multiply rows by the transposes of ``first``, sharded by columns, and ``last``, by rows.

        between: what happens to the first product. is_spread: sequence-parallel, else all-reduce.
        """
        rows = x.reshape(-1, x.shape[-1])
        if is_spread:
            keeps = self.keep_gathered
            product = functional.ag_gemm(rows, first.T, ranks, keep_gathered=keeps)
        else:
            product = functional.gemm(rows, first.T, ranks)
        multiply = functional.gemm_rs if is_spread else functional.gemm_ar
        return multiply(between(product), last.T, ranks)

    def _across(self) -> Collectives:
        if self.ranks is None:
            raise self._refusal("ranks", None, "a TensorParallel; call _init_ctx(max_M) before")
        return self.ranks

    def _refusal(self, argument: str, value: object, expected: str) -> InvalidArgument:
        return InvalidArgument(type(self).__name__, argument, value, expected)

    def _check_members(self, name: str, module: torch.nn.Module, *members: str) -> None:
        if not all(hasattr(module, member) for member in members):
            expected = f"one with {', '.join(members)}"
            raise self._refusal(name, type(module), expected)

    def _linear(
        self,
        name: str,
        linear: torch.nn.Module,
        shape: tuple[int | None, int | None],
        may_be_other: bool = False,
    ) -> torch.Tensor:
        """The weight of a linear layer, which must have ``shape``, where that says a size; of what
        is known to be one, such as a router, if it ``may_be_other``."""
        weight = getattr(linear, "weight", None)
        is_trusted = may_be_other and not isinstance(linear, torch.nn.Linear)
        if type(linear).forward is not _FORWARD and not is_trusted:
            expected = "a torch.nn.Linear, without a forward of its own"
            raise self._refusal(name, type(linear), expected)
        if not isinstance(weight, torch.Tensor) or weight.ndim != 2:
            shown = None if weight is None else tuple(weight.shape)
            raise self._refusal(f"{name}.weight", shown, "a matrix [outputs, inputs]")
        self.library.check_dtype(type(self).__name__, f"{name}.weight.dtype", weight.dtype)
        if weight.is_meta:
            raise self._refusal(f"{name}.weight.device", "meta", "one with values")
        found = tuple(weight.shape)
        if any(size not in (None, have) for size, have in zip(shape, found, strict=True)):
            wanted = tuple("any" if size is None else size for size in shape)
            raise self._refusal(f"{name}.weight.shape", found, f"[outputs, inputs] = {wanted}")
        return weight

    def _check_split(self, name: str, size: int) -> None:
        if size % self.world_size:
            raise self._refusal(name, size, f"a multiple of the {self.world_size} ranks")

    def _shard(self, weight: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's share of a weight along ``dim``, where the layer runs."""
        return weight.detach().chunk(self.world_size, dim)[self.rank].to(self.library.device)

    def _parameter(self, weight: torch.Tensor, like: torch.Tensor) -> torch.nn.Parameter:
        """A parameter that is trained if ``like`` is."""
        return torch.nn.Parameter(weight.contiguous(), requires_grad=like.requires_grad)

    def _tell(self, verbose: bool) -> None:
        if verbose:
            shapes = ", ".join(f"{name} {tuple(p.shape)}" for name, p in self.named_parameters())
            print(f"[rank {self.rank}] {type(self).__name__}: {shapes}")


class TokenLayer(TensorParallelLayer):
    """A layer whose result for a token depends on this token alone."""

    @abstractmethod
    def _run(self, x: torch.Tensor, ranks: Collectives, is_spread: bool) -> torch.Tensor:
        """Compute x [..., hidden] to the same, sequence-parallel if ``is_spread``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden] to the same, in the layer's mode. Tuned at the first call of a shape.

        Raises:
            InvalidArgument, ContextFinalized: before anything is launched.
            RankDisagreement: at the first call of a shape, if ranks chose other experts.
        """
        return self._run(x, self._across(), self.sequence_parallel)

    @torch.no_grad()
    def torch_fwd(self, x: torch.Tensor) -> torch.Tensor:
        return self._run(x, self.library, False)

    @torch.no_grad()
    def dist_triton_fwd(self, x: torch.Tensor, *unused: Any, **also_unused: Any) -> torch.Tensor:
        return self._run(x, self._across(), True)

    @torch.no_grad()
    def dist_triton_AR_fwd(self, x: torch.Tensor) -> torch.Tensor:
        return self._run(x, self._across(), False)

    dist_triton_gemm_ar_fwd = dist_triton_AR_fwd
