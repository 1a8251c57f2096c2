"""GEMM-AllReduce as scripts call it: with a weight that comes with each call."""

from __future__ import annotations

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
from triton_dist.runtime.ranks import group_for

_TILE_NAMES = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "EPILOGUE_SUBTILE")


class GemmARLayer(torch.nn.Module):
    """``sum over ranks of input @ weight.T``, on every rank; ``GEMMARLayer`` holds its weight.

    Tuned at the first call of a number of rows, unless ``user_gemm_config`` says how to multiply.
    Creation is collective over ``tp_group``.

    Attributes:
        ctx: symmetric memory for up to ``max_M`` rows.

    Args:
        tp_group: process group; ``None``: the world, or without ``torch.distributed`` this process.
        max_M: most rows of a call.
        N, K: sizes of the whole weight; K is a multiple of the group's size.
        input_dtype, output_dtype: one and the same: fp16, bf16 or fp32.
        local_world_size: ranks on one host; -1: all, since all must be on one host.
        persistent: kind of the GEMM kernel with ``user_gemm_config``.
        use_ll_kernel: with ``user_gemm_config``: go to all ranks in one shot, as far as rows fit;
            else to owners, who add, in two.
        copy_to_local: ``False``: a result may be a view of the context's memory, which is valid
            until the call after the next one begins.
        NUM_COMM_SMS, NUM_SM_MARGIN, TILE_MAP_LEVEL: of other kernels than ours; without effect.
        user_gemm_config: tiles, warps and stages; what else it names is for other kernels.

    Raises:
        InvalidArgument: on every rank, for sizes or dtypes that cannot work.
        RankDisagreement: ranks ask for different layers.
        SymmetricMemoryFull: on every rank, if some rank has too little memory.
    """

    def __init__(
        self,
        tp_group: dist.ProcessGroup | None,
        max_M: int,
        N: int,
        K: int,
        input_dtype: torch.dtype,
        output_dtype: torch.dtype,
        local_world_size: int = -1,
        persistent: bool = True,
        use_ll_kernel: bool = False,
        copy_to_local: bool = True,
        NUM_COMM_SMS: int = 16,
        NUM_SM_MARGIN: int = 0,
        TILE_MAP_LEVEL: int = 0,
        user_gemm_config: triton.Config | None = None,
    ) -> None:
        super().__init__()
        ranks = group_for(tp_group)
        if ranks.size > K or K % ranks.size:
            expected = f"a positive multiple of the group's size {ranks.size}"
            raise InvalidArgument("GemmARLayer", "K", K, expected)
        if output_dtype != input_dtype:
            expected = f"input_dtype, {input_dtype}: products are not scaled"
            raise InvalidArgument("GemmARLayer", "output_dtype", output_dtype, expected)
        hosts_ranks = ranks.size if local_world_size == -1 else local_world_size
        self.ctx = create_gemm_ar_context(
            max_M, N, ranks.rank, ranks.size, hosts_ranks, input_dtype, tp_group=tp_group
        )
        self._reducer: AllReduceContext | None = None
        self.persistent, self.use_ll_kernel = persistent, use_ll_kernel
        self.copy_to_local = copy_to_local
        self._tiles = None if user_gemm_config is None else _tiles(user_gemm_config)

    def forward(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """input: [M, K_per_rank]; weight: [N, K_per_rank]; bias: [N], the same on all ranks, added
        once. Returns [M, N]. All ranks call alike.

        Raises:
            InvalidArgument, ContextFinalized: before anything is launched; a scale is one.
        """
        _refuse_scales(scale_a, scale_b)
        options: dict[str, Any] = {"bias": bias, "copy_to_local": self.copy_to_local}
        if self._tiles is None:
            return gemm_ar(input, weight.T, self.ctx, autotune_pg=self.ctx.group, **options)  # type: ignore[no-any-return]
        one_shot = self.use_ll_kernel and input.shape[0] <= self.ctx.one_shot_rows
        method = GEMMAllReduceMethod.ONE_SHOT if one_shot else GEMMAllReduceMethod.TWO_SHOT
        return gemm_ar.fn(  # type: ignore[no-any-return]
            input, weight.T, self.ctx, self._tiles, self.persistent, method, **options
        )

    def forward_gemm(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The product of this rank alone, to see what the sum adds to it; tuned without
        ``user_gemm_config``."""
        _refuse_scales(scale_a, scale_b)
        if self._tiles is None:
            product: torch.Tensor = matmul(input, weight.T)
        else:
            product = matmul.fn(input, weight.T, self._tiles, self.persistent)
        return product if bias is None else product.add_(bias)

    def forward_ar(self, input: torch.Tensor) -> torch.Tensor:
        """The sum of ``input`` over ranks; tuned. The first call allocates memory for it, also one
        that needs no tuning, and cannot be in a CUDA graph's capture."""
        ctx = self.ctx
        if self._reducer is None:
            self._reducer = create_allreduce_ctx(
                ctx.max_M * ctx.N * ctx.output_dtype.itemsize, ctx.rank, ctx.num_ranks,
                ctx.local_world_size, group=ctx.group,
            )  # fmt: skip
        return all_reduce(input, self._reducer, autotune_pg=self._reducer.group)  # type: ignore[no-any-return]

    def finalize(self) -> None:
        """Free the symmetric memory; idempotent. Collective."""
        self.ctx.finalize()
        if self._reducer is not None:
            self._reducer.finalize()


def _tiles(config: triton.Config) -> triton.Config:
    kept = {name: config.kwargs[name] for name in _TILE_NAMES if name in config.kwargs}
    return triton.Config(kept, num_warps=config.num_warps, num_stages=config.num_stages)


def _refuse_scales(*scales: torch.Tensor | None) -> None:
    for name, scale in zip(("scale_a", "scale_b"), scales, strict=True):
        if scale is not None:
            expected = "None: products of int8 and fp8 are not supported"
            raise InvalidArgument("GemmARLayer", name, tuple(scale.shape), expected)
