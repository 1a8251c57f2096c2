"""Output projection of sequence-parallel attention, under the names of Triton-distributed.

New programs should call ``ulysses_post_attn_gemm``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.nvidia.sp_ulysess_qkv_gemm_all2all import UlyssesKernel, lengths_of
from triton_dist.kernels.nvidia.ulysses import ulysses_post_attn
from triton_dist.kernels.nvidia.ulysses_gemm import ulysses_post_attn_gemm


class SpUlysessOAll2AllGemmKernel(UlyssesKernel):
    """Exchange shards of heads for shards of the sequence, and apply the output projection. Tuned.

    Args:
        world_group: process group; ``None``: the world.
        nnodes: number of hosts, must be 1.
        sp_size: number of ranks that share a sequence.
        max_batch, max_seqlen: maximum batch size, and maximum number of tokens of a sequence over
            all ranks.
        num_head, head_dim: number of heads over all ranks, and of elements of a head.
        input_dtype: dtype of all tensors.
        a2a_only: must be ``True``: tensors are [batch, tokens, heads, head_dim].
        max_num_comm_buf, output_dtype, fuse_sync, use_persistent: ignored.
    """

    def __init__(
        self, world_group: dist.ProcessGroup | None, nnodes: int, sp_size: int, max_batch: int,
        num_head: int, max_seqlen: int, head_dim: int, max_num_comm_buf: int = 1,
        input_dtype: torch.dtype = torch.bfloat16, output_dtype: torch.dtype = torch.bfloat16,
        a2a_only: bool = True, fuse_sync: bool = True, use_persistent: bool = True,
    ) -> None:  # fmt: skip
        if not a2a_only:
            expected = "True, for tensors [batch, tokens, heads, head_dim]"
            raise InvalidArgument("SpUlysessOAll2AllGemmKernel", "a2a_only", a2a_only, expected)
        max_tokens = max_batch * max_seqlen
        super().__init__(world_group, nnodes, sp_size, max_tokens, head_dim, input_dtype)
        self.ctx = self.context(num_head, num_head)

    def post_attn_a2a(
        self, inputs: torch.Tensor, seq_lens_cpu: torch.Tensor | None = None, *_: Any, **__: Any
    ) -> torch.Tensor:
        """Return this rank's tokens with all heads, [batch, tokens, heads * head_dim].

        Args:
            inputs: [batch, tokens of all ranks, heads of this rank, head_dim].
            seq_lens_cpu: int32 [sp_size], number of tokens of each rank; default: equally many.
        """
        (rows,) = ulysses_post_attn(inputs, self.ctx, seq_lens=lengths_of(seq_lens_cpu))
        return rows.flatten(2)

    post_attn_a2a_no_cpy = post_attn_a2a

    def forward(
        self, inputs: torch.Tensor, weight: torch.Tensor, seq_lens_cpu: torch.Tensor | None = None,
        bias: torch.Tensor | None = None, output: torch.Tensor | None = None,
        a2a_output: torch.Tensor | None = None, transpose_weight: bool = False,
        num_comm_sms: int = -1, sm_margin: int = 0,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """Return the product [batch, tokens, features], and ``a2a_output`` if it is given.

        Args:
            inputs, seq_lens_cpu: see ``post_attn_a2a``.
            weight: [features, heads * head_dim], or with ``transpose_weight`` its transpose.
            bias: added to the product.
            output, a2a_output: memory for the product and its left operand.
            num_comm_sms, sm_margin: ignored.
        """
        B, lengths = weight if transpose_weight else weight.T, lengths_of(seq_lens_cpu)
        if a2a_output is None:
            out = ulysses_post_attn_gemm(inputs, B, self.ctx, None, lengths)
        else:
            rows = self.post_attn_a2a(inputs, seq_lens_cpu)
            out = rows @ B
            a2a_output.copy_(rows.view(a2a_output.shape))
        if bias is not None:
            out += bias.view(out.shape) if bias.numel() == out.numel() else bias
        out = out if output is None else output.copy_(out)
        return (out,) if a2a_output is None else (out, a2a_output)
