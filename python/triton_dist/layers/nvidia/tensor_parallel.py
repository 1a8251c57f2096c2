"""The GEMMs and collectives across ranks that layers call.

``Collectives`` computes them with torch's libraries. ``TensorParallel`` has the same methods and
computes them with the ops of this package. Each object has a name, by which a custom op finds it,
because a graph of ``torch.compile`` contains only tensors and plain values.

Shapes: M, N and K are whole sizes; m = M / ranks, n = N / ranks and k = K / ranks are the sizes of
this rank's shard.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from triton_dist.errors import ContextFinalized, InvalidArgument
from triton_dist.kernels.common import libraries
from triton_dist.kernels.common.context import DTYPES, OpContext
from triton_dist.kernels.common.gemm.scales import Scaling
from triton_dist.kernels.nvidia import (
    AllGatherGEMMTensorParallelContext,
    GEMMAllReduceTensorParallelContext,
    GEMMReduceScatterTensorParallelContext,
    ag_gemm,
    ag_group_gemm,
    create_ag_gemm_context,
    create_ag_group_gemm_context,
    create_ep_context,
    create_gemm_ar_context,
    create_gemm_rs_context,
    create_moe_ar_context,
    create_moe_rs_context,
    ep_combine,
    ep_dispatch,
    gemm_ar,
    gemm_rs,
    grouped_gemm,
    matmul,
    run_moe_reduce_ar,
    run_moe_reduce_rs,
)
from triton_dist.kernels.nvidia.expert_parallel import Received
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import Group, group_for, process_group_of
from triton_dist.tune import AutoTuner

P = ParamSpec("P")
ContextT = TypeVar("ContextT", bound=OpContext[Any])
_name_counter = itertools.count()
_live_collectives: weakref.WeakValueDictionary[str, Collectives] = weakref.WeakValueDictionary()


def collectives_by_name(name: str) -> Collectives:
    """Return the ``Collectives`` or ``TensorParallel`` with this name.

    Raises:
        ContextFinalized: the object no longer exists.
    """
    found = _live_collectives.get(name)
    if found is None:
        raise ContextFinalized(f"TensorParallel {name!r}")
    return found


class Collectives:
    """GEMMs across the ranks of ``group`` by ``torch.matmul`` and the group's collectives.

    A and B are matrices of one dtype with any strides. All ranks must make the same calls.

    Attributes:
        rank: this rank in the group.
        num_ranks: number of ranks in the group.
        device: device of this rank's tensors.
        name: name for ``collectives_by_name``, valid as long as the object lives.
    """

    dtypes: tuple[torch.dtype, ...] = (*DTYPES, torch.float64)

    def __init__(self, group: Group = None) -> None:
        self.group = process_group_of(group)
        ranks = group_for(self.group)
        self.rank, self.num_ranks = ranks.rank, ranks.size
        self.device = current_device().torch_device
        self.name = f"ranks {next(_name_counter)}"
        _live_collectives[self.name] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> Collectives:
        """Return ``self``: copies of a layer share process group and contexts."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled: it has a process group and contexts. Save "
            "the model's state_dict() instead of the model."
        )

    @cached_property
    def mesh(self) -> DeviceMesh | None:
        """The ranks as a 1-D mesh, or ``None`` without ``torch.distributed``."""
        if self.group is None:
            return None
        return DeviceMesh.from_group(self.group, self.device.type)

    def check_dtype(self, function: str, argument: str, dtype: torch.dtype) -> None:
        """Check that products of this dtype are supported.

        Raises:
            InvalidArgument: the dtype is not in ``dtypes``.
        """
        if dtype not in self.dtypes:
            *most, last = map(str, self.dtypes)
            raise InvalidArgument(function, argument, dtype, f"{', '.join(most)} or {last}")

    def all_gather(self, shard: torch.Tensor) -> torch.Tensor:
        """Concatenate the ranks' shards [m, …] to [M, …], in rank order."""
        if self.num_ranks == 1:
            return shard
        return libraries.all_gather_rows(shard.contiguous(), self.group)

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Return ``tensor`` of rank ``source``. Others pass a tensor of its shape and dtype."""
        if self.num_ranks == 1:
            return tensor
        whole = tensor.contiguous()
        if self.rank != source:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        # gloo has no fp8.
        dist.broadcast(whole.reshape(-1).view(torch.uint8), group=self.group, group_src=source)
        return whole

    def reduce_scatter(self, addend: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows, [m, …], of the sum of [M, …] over ranks."""
        if self.num_ranks == 1:
            return addend
        return libraries.reduce_scatter(addend.contiguous(), self.group)

    def all_reduce(self, addend: torch.Tensor) -> torch.Tensor:
        """Sum ``addend`` over ranks in place and return it."""
        return addend if self.num_ranks == 1 else libraries.all_reduce(addend, self.group)

    def multiply_fp8(
        self, function: str, operands: list[torch.Tensor], scaling: dict[str, Any]
    ) -> torch.Tensor:
        """Return the result of method ``function`` for fp8 operands with scales.

        Args:
            function: name of a method that multiplies A and B, such as ``"gemm"``.
            operands: A, B and further positional arguments of the method.
            scaling: ``A_scale``, ``B_scale`` and ``out_dtype``.
        """
        A, B, *routing = operands
        A, B = Scaling(**scaling).dequantised(A, B)
        product: torch.Tensor = getattr(self, function)(A, B, *routing)
        return product.to(scaling["out_dtype"])

    def gemm(self, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        """Return ``A @ B`` on this rank: [M, K] and [K, n] to [M, n]."""
        return A @ B

    def ag_gemm(
        self, A: torch.Tensor, B: torch.Tensor, gathered: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return ``all_gather(A) @ B``: [m, K] and [K, n] to [M, n].

        ``gathered``: optional output [M, K] for ``all_gather(A)``.
        """
        rows = self.all_gather(A)
        if gathered is not None:
            gathered.copy_(rows)
        return rows @ B

    def gemm_rs(self, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of the sum over ranks of ``A @ B``: [M, k], [k, N] to [m, N]."""
        return self.reduce_scatter(A @ B)

    def gemm_ar(self, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks of ``A @ B``: [M, k] and [k, N] to [M, N]."""
        return self.all_reduce(A @ B)

    def group_gemm(self, A: torch.Tensor, B: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return each token times the weights of each of its topk experts.

        A is [M, K], or [M * topk, K] with a row per token and expert; B is [E, K, n]; ids are
        [M, topk]. The result is [M * topk, n]. An id outside 0 to E - 1 gives a row of zeros.
        """
        flat, choices_per_row = ids.flatten(), ids.shape[1] if len(A) == len(ids) else 1
        C = A.new_zeros(flat.numel(), B.shape[2])
        for expert in range(len(B)):
            (routes,) = torch.where(flat == expert)
            C[routes] = A[routes // choices_per_row] @ B[expert]
        return C

    def ag_group_gemm(self, A: torch.Tensor, B: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return ``group_gemm`` of the gathered A [m, K]. Other shapes are as in ``group_gemm``."""
        return self.group_gemm(self.all_gather(A), B, ids)

    def moe_reduce_rs(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return this rank's sums of ``topk_weights * group_gemm`` over experts and ranks.

        x is [M * topk, k], weights are [E, k, N], ids and topk_weights are [M, topk]. The result is
        [m, N].
        """
        return self.reduce_scatter(self._weighted_sums(x, weights, ids, topk_weights))

    def moe_reduce_ar(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the sums of ``moe_reduce_rs`` for all tokens, [M, N], on every rank."""
        return self.all_reduce(self._weighted_sums(x, weights, ids, topk_weights))

    def _weighted_sums(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        products = self.group_gemm(x, weights, ids).view(*ids.shape, weights.shape[2])
        return (products * topk_weights[..., None]).sum(1).to(x.dtype)

    def finalize(self) -> None:
        """Do nothing; ``TensorParallel`` frees contexts here."""


class TensorParallel(Collectives, AbstractContextManager["TensorParallel"]):
    """GEMMs across ranks by the ops of this package. A context manager.

    Each combination of op, sizes and dtype has one context (symmetric memory). The first call that
    needs a context creates it collectively; layers with equal sizes share it. The first call with a
    shape tunes the op over the ranks of the group. Before a CUDA graph captures a call, make the
    same call once without capture.

    Args:
        max_M: largest M (number of rows over all ranks) of a call.
        group: process group; ``None``: the world, or this process alone without
            ``torch.distributed``.

    Raises:
        InvalidArgument: ``max_M`` is less than 1.
    """

    dtypes = DTYPES

    def __init__(self, max_M: int, group: Group = None) -> None:
        if max_M < 1:
            raise InvalidArgument("TensorParallel", "max_M", max_M, "at least 1")
        super().__init__(group)
        self.max_M, self.max_tokens = max_M, -(-max_M // self.num_ranks)
        self.padded_max_M = self.max_tokens * self.num_ranks
        self.rank_arguments = self.rank, self.num_ranks, self.num_ranks  # all ranks are on one host
        self._contexts: dict[Hashable, OpContext[Any]] | None = {}

    def multiply_fp8(
        self, function: str, operands: list[torch.Tensor], scaling: dict[str, Any]
    ) -> torch.Tensor:
        return getattr(self, function)(*operands, **scaling)  # type: ignore[no-any-return]

    def gemm(self, A: torch.Tensor, B: torch.Tensor, **scaling: Any) -> torch.Tensor:
        return matmul(A, B, **scaling) if scaling else A @ B

    def ag_gemm(
        self, A: torch.Tensor, B: torch.Tensor, gathered: torch.Tensor | None = None, **scaling: Any
    ) -> torch.Tensor:
        context = self.ag_context(B.shape[1], A.shape[1], A.dtype)
        return self._call(ag_gemm, A.contiguous(), B, context, gathered=gathered, **scaling)

    def gemm_rs(self, A: torch.Tensor, B: torch.Tensor, **scaling: Any) -> torch.Tensor:
        context = self.rs_context(B.shape[1], scaling.pop("out_dtype", A.dtype))
        return self._call(gemm_rs, A, B, context, **scaling)

    def gemm_ar(self, A: torch.Tensor, B: torch.Tensor, **scaling: Any) -> torch.Tensor:
        context = self.ar_context(B.shape[1], scaling.pop("out_dtype", A.dtype))
        return self._call(gemm_ar, A, B, context, **scaling)

    def group_gemm(
        self, A: torch.Tensor, B: torch.Tensor, ids: torch.Tensor, **scaling: Any
    ) -> torch.Tensor:
        return grouped_gemm(A.contiguous(), B, ids, **scaling)

    def ag_group_gemm(
        self, A: torch.Tensor, B: torch.Tensor, ids: torch.Tensor, **scaling: Any
    ) -> torch.Tensor:
        (E, K, columns), topk = B.shape, ids.shape[1]
        context = self.context(
            ("ag_group_gemm", columns, K, E, topk, A.dtype), create_ag_group_gemm_context,
            self.padded_max_M, columns, K, E, topk, A.dtype, *self.rank_arguments, group=self.group,
        )  # fmt: skip
        return self._call(ag_group_gemm, A.contiguous(), B, context, ids, **scaling)

    def moe_reduce_rs(self, x: torch.Tensor, *routed: torch.Tensor, **scaling: Any) -> torch.Tensor:
        return self._moe_reduce(run_moe_reduce_rs, create_moe_rs_context, x, *routed, **scaling)

    def moe_reduce_ar(self, x: torch.Tensor, *routed: torch.Tensor, **scaling: Any) -> torch.Tensor:
        return self._moe_reduce(run_moe_reduce_ar, create_moe_ar_context, x, *routed, **scaling)

    def _moe_reduce(
        self,
        op: AutoTuner[..., torch.Tensor],
        creator: Callable[..., OpContext[Any]],
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        topk_weights: torch.Tensor,
        **scaling: Any,
    ) -> torch.Tensor:
        (E, _, N), topk = weights.shape, ids.shape[1]
        dtype = scaling.pop("out_dtype", weights.dtype)
        context = self.context(
            (creator, N, E, topk, dtype), creator,
            *self.rank_arguments, self.padded_max_M * topk, N, E, topk, dtype, tp_group=self.group,
        )  # fmt: skip
        return self._call(op, x.contiguous(), weights, ids, topk_weights, context, **scaling)

    def ep_dispatch(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        num_experts: int,
        dtype: torch.dtype,
        **options: Any,
    ) -> Received:
        """Send this rank's tokens x to the ranks of their experts.

        ``dtype`` is the dtype of ``ep_combine``'s result. The op ``ep_dispatch`` explains the rest.
        """
        hidden, topk = x.shape[1], ids.shape[1]
        context = self.context(
            ("expert_parallel", hidden, num_experts, topk, dtype), create_ep_context,
            *self.rank_arguments, self.max_tokens, hidden, num_experts, topk, dtype,
            group=self.group,
        )  # fmt: skip
        return ep_dispatch(x, ids, context, weights, autotune_pg=self.group, **options)

    def ep_combine(
        self, y: torch.Tensor, received: Received, apply_weights: bool = True
    ) -> torch.Tensor:
        return self._call(ep_combine, y, received, received.ctx, apply_weights=apply_weights)

    def _call(self, op: AutoTuner[..., torch.Tensor], *args: Any, **options: Any) -> torch.Tensor:
        return op(*args, autotune_pg=self.group, **options)

    def ag_context(
        self, columns: int, K: int, dtype: torch.dtype
    ) -> AllGatherGEMMTensorParallelContext:
        """Return the context of ``ag_gemm`` for a B [K, columns]."""
        return self.context(
            ("ag_gemm", columns, K, dtype), create_ag_gemm_context, self.padded_max_M,
            columns * self.num_ranks, K, dtype, *self.rank_arguments, group=self.group,
        )  # fmt: skip

    def rs_context(self, N: int, dtype: torch.dtype) -> GEMMReduceScatterTensorParallelContext:
        """Return the context of ``gemm_rs`` for results with N columns."""
        return self.context(
            ("gemm_rs", N, dtype), create_gemm_rs_context,
            self.padded_max_M, N, *self.rank_arguments, dtype, tp_group=self.group,
        )  # fmt: skip

    def ar_context(self, N: int, dtype: torch.dtype) -> GEMMAllReduceTensorParallelContext:
        """Return the context of ``gemm_ar`` for results with N columns."""
        return self.context(
            ("gemm_ar", N, dtype), create_gemm_ar_context,
            self.max_M, N, *self.rank_arguments, dtype, tp_group=self.group,
        )  # fmt: skip

    def context(
        self, key: Hashable, create: Callable[P, ContextT], *args: P.args, **options: P.kwargs
    ) -> ContextT:
        """Return the context of ``key``, or create it with ``create(*args, **options)``.

        Raises:
            ContextFinalized: ``finalize`` was called.
        """
        if self._contexts is None:
            raise ContextFinalized("TensorParallel")
        found: Any = self._contexts.get(key)
        if found is None:
            with torch.inference_mode(False), torch.no_grad():  # the context outlives the call
                found = self._contexts[key] = create(*args, **options)
        return found  # type: ignore[no-any-return]

    def finalize(self) -> None:
        """Free the contexts; idempotent. Collective."""
        contexts, self._contexts = self._contexts or {}, None
        for context in contexts.values():
            context.finalize()

    def __exit__(self, failure: type[BaseException] | None, *rest: object) -> None:
        if failure is None:
            self.finalize()
            return
        contexts, self._contexts = self._contexts or {}, None
        for context in contexts.values():  # a collective call could hang after an error
            context.free()


def check_operand(
    function: str, argument: str, x: torch.Tensor, weight: torch.Tensor, collectives: Collectives
) -> None:
    """Check operand ``x`` [..., K] of a product with ``weight`` [K, N].

    Raises:
        InvalidArgument: dtypes differ (an fp8 weight accepts any dtype), x does not have K columns,
            or x or weight is not on this rank's device.
    """
    collectives.check_dtype(function, f"{argument}.dtype", x.dtype)
    expected = f"the weight's {weight.dtype}"
    if x.dtype != weight.dtype and weight.itemsize > 1:
        raise InvalidArgument(function, f"{argument}.dtype", x.dtype, expected)
    for name, tensor in ((argument, x), ("weight", weight)):
        if tensor.device != collectives.device:
            expected = f"{collectives.device}, the device of this rank"
            raise InvalidArgument(function, f"{name}.device", tensor.device, expected)
    if x.ndim < 1 or x.shape[-1] != weight.shape[0]:
        expected = f"[…, {weight.shape[0]}] for a weight [K, N] = {tuple(weight.shape)}"
        raise InvalidArgument(function, f"{argument}.shape", tuple(x.shape), expected)
