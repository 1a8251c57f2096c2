"""A linear layer with column-sharded input, such as ``down_proj`` of a feed-forward layer."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
import triton

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.nvidia import (
    AllReduceContext,
    GEMMAllReduceMethod,
    all_reduce,
    create_allreduce_ctx,
    create_gemm_ar_context,
    gemm_ar,
    matmul,
)
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for

_TILE_NAMES = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "EPILOGUE_SUBTILE")


class GemmARLayer(torch.nn.Module, AbstractContextManager["GemmARLayer"]):
    """Linear layer with a column-sharded input: ``(sum over ranks of input @ weight.T) + bias``.

    Every rank returns the whole result. The layer has no backward. The weight is passed with each
    call, or stored in the layer (``has_weight=True``). The first call with each number of rows
    tunes ``gemm_ar``, unless ``user_gemm_config`` is set. Creation is collective over ``tp_group``.
    The layer is a context manager.

    Attributes:
        ctx: context of ``gemm_ar`` for up to ``max_M`` rows.
        weight: [N, K_per_rank], uninitialised until ``load_weight`` or ``load_state_dict``; or
            ``None``.
        bias: [N], equal on all ranks, initially zero; or ``None``.

    Args:
        tp_group: process group; ``None``: the world, or this process alone without
            ``torch.distributed``.
        max_M: largest number of rows of a call: the product of all dimensions but the last.
        N: rows of the whole weight.
        K: columns of the whole weight, a multiple of the group's size.
        input_dtype: dtype of weight, input and output: fp16, bf16 or fp32.
        output_dtype: must equal ``input_dtype``, the default.
        local_world_size: ranks on one host; -1: all ranks. All ranks must be on one host.
        persistent: with ``user_gemm_config``: use the persistent GEMM kernel.
        use_ll_kernel: with ``user_gemm_config``: use the one-shot algorithm if the rows fit, else
            the two-shot algorithm.
        copy_to_local: if ``False``, a result may be a view of the context's memory. The next call
            does not overwrite it, but the call after the next does.
        NUM_COMM_SMS, NUM_SM_MARGIN, TILE_MAP_LEVEL: ignored; accepted for existing scripts.
        user_gemm_config: tile sizes, warps and stages; ``None``: tune. Other names are ignored.
        has_weight: the layer stores its weight.
        has_bias: the layer stores a bias.

    Raises:
        InvalidArgument: sizes or dtypes are invalid; raised on every rank.
        RankDisagreement: ranks pass different sizes or dtypes.
        SymmetricMemoryFull: a rank has too little memory; raised on every rank.
    """

    weight: torch.Tensor | None
    bias: torch.Tensor | None

    def __init__(
        self,
        tp_group: dist.ProcessGroup | None,
        max_M: int,
        N: int,
        K: int,
        input_dtype: torch.dtype,
        output_dtype: torch.dtype | None = None,
        local_world_size: int = -1,
        persistent: bool = True,
        use_ll_kernel: bool = False,
        copy_to_local: bool = True,
        NUM_COMM_SMS: int = 16,
        NUM_SM_MARGIN: int = 0,
        TILE_MAP_LEVEL: int = 0,
        user_gemm_config: triton.Config | None = None,
        *,
        has_weight: bool = False,
        has_bias: bool = False,
    ) -> None:
        super().__init__()
        ranks = group_for(tp_group)
        if ranks.size > K or K % ranks.size:
            expected = f"a positive multiple of the group's size {ranks.size}"
            raise InvalidArgument("GemmARLayer", "K", K, expected)
        if output_dtype not in (None, input_dtype):
            expected = f"input_dtype, {input_dtype}: outputs are not converted"
            raise InvalidArgument("GemmARLayer", "output_dtype", output_dtype, expected)
        ranks_on_host = ranks.size if local_world_size == -1 else local_world_size
        self.ctx = create_gemm_ar_context(
            max_M, N, ranks.rank, ranks.size, ranks_on_host, input_dtype, tp_group=tp_group
        )
        self._all_reduce_ctx: AllReduceContext | None = None
        self.persistent, self.use_ll_kernel = persistent, use_ll_kernel
        self.copy_to_local = copy_to_local
        self._tile_config = None if user_gemm_config is None else _tile_config(user_gemm_config)
        self.K_per_rank = K // ranks.size
        options: dict[str, Any] = {"dtype": input_dtype, "device": current_device().torch_device}
        weight = torch.empty(N, self.K_per_rank, **options) if has_weight else None
        bias = torch.zeros(N, **options) if has_bias else None
        for name, tensor in (("weight", weight), ("bias", bias)):
            parameter = None if tensor is None else torch.nn.Parameter(tensor, requires_grad=False)
            self.register_parameter(name, parameter)

    def load_weight(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Copy this rank's columns of the whole weight [N, K], and ``bias`` [N].

        Raises:
            InvalidArgument: wrong shape, a layer without a weight, or a bias that does not match
                ``has_bias``.
        """
        shape = (self.ctx.N, self.K_per_rank * self.ctx.num_ranks)
        if self.weight is None:
            raise InvalidArgument("load_weight", "self", "GemmARLayer", "has_weight=True")
        if tuple(weight.shape) != shape:
            raise InvalidArgument(
                "load_weight", "weight.shape", tuple(weight.shape), f"[N, K] = {shape}"
            )
        if (bias is None) != (self.bias is None):
            expected = "None: has_bias=False" if self.bias is None else "a tensor: has_bias=True"
            raise InvalidArgument("load_weight", "bias", bias, expected)
        if bias is not None and tuple(bias.shape) != (self.ctx.N,):
            expected = f"[N] = ({self.ctx.N},)"
            raise InvalidArgument("load_weight", "bias.shape", tuple(bias.shape), expected)
        first = self.ctx.rank * self.K_per_rank
        with torch.no_grad():
            self.weight.copy_(weight[:, first : first + self.K_per_rank])
            if bias is not None and self.bias is not None:
                self.bias.copy_(bias)

    def forward(
        self,
        input: torch.Tensor,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the sum over ranks of ``input @ weight.T``, plus the bias. Collective.

        Args:
            input: [..., K_per_rank], columns of this rank.
            weight: [N, K_per_rank]; default: the layer's weight.
            bias: [N], equal on all ranks, added after the sum; default: the layer's bias.
            scale_a, scale_b: must be ``None``.

        Returns:
            [..., N], equal on every rank.

        Raises:
            InvalidArgument: an argument has a wrong shape, dtype or device.
            ContextFinalized: the layer was finalized.
        """
        weight, bias = self._weight_and_bias(weight, bias, scale_a, scale_b)
        rows = input.reshape(-1, input.shape[-1])
        options: dict[str, Any] = {"bias": bias, "copy_to_local": self.copy_to_local}
        if self._tile_config is None:
            total = gemm_ar(rows, weight.T, self.ctx, autotune_pg=self.ctx.group, **options)
        else:
            one_shot = self.use_ll_kernel and rows.shape[0] <= self.ctx.max_one_shot_M
            method = GEMMAllReduceMethod.ONE_SHOT if one_shot else GEMMAllReduceMethod.TWO_SHOT
            total = gemm_ar.fn(
                rows, weight.T, self.ctx, self._tile_config, self.persistent, method, **options
            )
        return total.view(*input.shape[:-1], self.ctx.N)

    def _weight_and_bias(
        self, weight: torch.Tensor | None, bias: torch.Tensor | None, *scales: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return weight and bias, or the layer's if an argument is ``None``; reject scales."""
        for name, scale in zip(("scale_a", "scale_b"), scales, strict=True):
            if scale is not None:
                expected = "None: products of int8 and fp8 are not supported"
                raise InvalidArgument("GemmARLayer", name, tuple(scale.shape), expected)
        weight = self.weight if weight is None else weight
        if weight is None:
            expected = "a tensor [N, K_per_rank], or a layer with has_weight=True"
            raise InvalidArgument("GemmARLayer", "weight", None, expected)
        return weight, self.bias if bias is None else bias

    def forward_gemm(
        self,
        input: torch.Tensor,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return this rank's ``input @ weight.T + bias``, not summed over ranks.

        Tuned unless ``user_gemm_config`` is set.
        """
        weight, bias = self._weight_and_bias(weight, bias, scale_a, scale_b)
        if self._tile_config is None:
            product = matmul(input, weight.T)
        else:
            product = matmul.fn(input, weight.T, self._tile_config, self.persistent)
        return product if bias is None else product.add_(bias)

    def forward_ar(self, input: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``input`` over the ranks. Tuned.

        The first call allocates memory and therefore cannot be captured in a CUDA graph.
        """
        ctx = self.ctx
        if self._all_reduce_ctx is None:
            self._all_reduce_ctx = create_allreduce_ctx(
                ctx.max_M * ctx.N * ctx.output_dtype.itemsize, ctx.rank, ctx.num_ranks,
                ctx.local_world_size, group=ctx.group,
            )  # fmt: skip
        return all_reduce(input, self._all_reduce_ctx, autotune_pg=self._all_reduce_ctx.group)

    def finalize(self) -> None:
        """Free the symmetric memory; idempotent. Collective."""
        self.ctx.finalize()
        if self._all_reduce_ctx is not None:
            self._all_reduce_ctx.finalize()

    def __exit__(self, failure: type[BaseException] | None, *rest: object) -> None:
        self.ctx.__exit__(failure, *rest)
        if self._all_reduce_ctx is not None:
            self._all_reduce_ctx.__exit__(failure, *rest)


def _tile_config(config: triton.Config) -> triton.Config:
    tiles = {name: config.kwargs[name] for name in _TILE_NAMES if name in config.kwargs}
    return triton.Config(tiles, num_warps=config.num_warps, num_stages=config.num_stages)
