"""A linear layer whose input is sharded by columns: the second of a tensor-parallel pair."""

from __future__ import annotations

import torch
import torch.distributed as dist

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.nvidia import create_gemm_ar_context, gemm_ar
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for


class GEMMARLayer(torch.nn.Module):
    """``x @ weight.T + bias``, of which each rank has a shard of x and of the weight along K, and
    gets the whole result. For inference: the result has no history for autograd. A context manager.

    Creation is collective over ``group``.

    Attributes:
        weight: [N, K_per_rank], uninitialised until ``load_weight`` or a state dict fills it.
        bias: [N], the same on all ranks; zeros at first, or ``None``.
        ctx: symmetric memory for up to ``max_M`` rows.

    Args:
        group: process group; ``None``: the world, or without ``torch.distributed`` this process.
        max_M: most rows of a call, over all leading dimensions.
        N, K: sizes of the whole weight; K is a multiple of the group's size.
        dtype: of weight, input and output: fp16, bf16 or fp32.
        local_world_size: ranks on one host; default: all, since all must be on one host.

    Raises:
        InvalidArgument: on every rank, for sizes that cannot work.
        RankDisagreement: ranks ask for different layers.
        SymmetricMemoryFull: on every rank, if some rank has too little memory.
    """

    bias: torch.Tensor | None

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        max_M: int,
        N: int,
        K: int,
        dtype: torch.dtype = torch.bfloat16,
        *,
        bias: bool = False,
        local_world_size: int | None = None,
    ) -> None:
        super().__init__()
        ranks, device = group_for(group), current_device().torch_device
        if ranks.size > K or K % ranks.size:
            expected = f"a positive multiple of the group's size {ranks.size}"
            raise InvalidArgument("GEMMARLayer", "K", K, expected)
        self.ctx = create_gemm_ar_context(
            max_M, N, ranks.rank, ranks.size, local_world_size or ranks.size, dtype, tp_group=group
        )

        def parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
            return torch.nn.Parameter(tensor, requires_grad=False)

        self.K_per_rank = K // ranks.size
        self.weight = parameter(torch.empty(N, self.K_per_rank, dtype=dtype, device=device))
        zeros = parameter(torch.zeros(N, dtype=dtype, device=device)) if bias else None
        self.register_parameter("bias", zeros)

    def load_weight(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Take this rank's columns of the whole weight [N, K], and ``bias`` [N].

        Raises:
            InvalidArgument: another shape, or a bias for a layer without one.
        """
        shape = (self.ctx.N, self.K_per_rank * self.ctx.num_ranks)
        if tuple(weight.shape) != shape:
            raise InvalidArgument(
                "load_weight", "weight.shape", tuple(weight.shape), f"[N, K] = {shape}"
            )
        if (bias is None) != (self.bias is None):
            expected = "None, as the layer has none" if self.bias is None else "the layer's bias"
            raise InvalidArgument("load_weight", "bias", bias, expected)
        if bias is not None and tuple(bias.shape) != (self.ctx.N,):
            expected = f"[N] = ({self.ctx.N},)"
            raise InvalidArgument("load_weight", "bias.shape", tuple(bias.shape), expected)
        first = self.ctx.rank * self.K_per_rank
        with torch.no_grad():
            self.weight.copy_(weight[:, first : first + self.K_per_rank])
            if bias is not None and self.bias is not None:
                self.bias.copy_(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., K_per_rank], this rank's columns. Returns [..., N], the same on every rank.

        All ranks call alike, and the first call of a number of rows tunes ``gemm_ar``.

        Raises:
            InvalidArgument, ContextFinalized: before anything is launched.
        """
        rows = x.reshape(-1, x.shape[-1])
        total: torch.Tensor = gemm_ar(
            rows, self.weight.T, self.ctx, bias=self.bias, autotune_pg=self.ctx.group
        )
        return total.view(*x.shape[:-1], self.ctx.N)

    def finalize(self) -> None:
        """Free the symmetric memory; idempotent. Collective."""
        self.ctx.finalize()

    def __enter__(self) -> GEMMARLayer:
        return self

    def __exit__(self, failure: type[BaseException] | None, *rest: object) -> None:
        self.ctx.__exit__(failure, *rest)
