"""QKV projection and exchange before attention, under the names of Triton-distributed.

New programs should call ``ulysses_gemm_pre_attn`` and ``ulysses_pre_attn``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.nvidia.ulysses import (
    UlyssesContext,
    create_ulysses_context,
    ulysses_pre_attn,
)
from triton_dist.kernels.nvidia.ulysses_gemm import ulysses_gemm_pre_attn
from triton_dist.runtime.ranks import group_for


class UlyssesKernel:
    """Base class with contexts of Ulysses ops, for groups of ``sp_size`` ranks on one host.

    The constructor and the first call with new numbers of heads are collective.
    """

    def __init__(
        self, world_group: dist.ProcessGroup | None, nnodes: int, sp_size: int, max_tokens: int,
        head_dim: int, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        if nnodes != 1:
            raise InvalidArgument(type(self).__name__, "nnodes", nnodes, "1")
        self.group, _ = dist.new_subgroups(sp_size, world_group)
        self.max_tokens, self.head_dim, self.dtype = max_tokens, head_dim, dtype
        self.contexts: dict[tuple[int, int], UlyssesContext] = {}

    def context(self, q_heads: int, kv_heads: int) -> UlyssesContext:
        """Return the context for the given numbers of heads. The first call creates it."""
        key = q_heads, kv_heads
        if key not in self.contexts:
            ranks = group_for(self.group)
            self.contexts[key] = create_ulysses_context(
                ranks.rank, ranks.size, ranks.size, self.max_tokens, q_heads, kv_heads,
                self.head_dim, self.dtype, group=self.group,
            )  # fmt: skip
        return self.contexts[key]

    def sp_group_barrier_all_intra_node(self, stream: Any = None) -> None:
        """Wait for all ranks of the group, on the host and on the current stream.

        ``stream`` is ignored.
        """
        ranks = group_for(self.group)
        ranks.barrier("sp_group_barrier_all_intra_node")
        ranks.device_barrier()

    def finalize(self) -> None:
        """Free the memory; idempotent. Collective."""
        for ctx in self.contexts.values():
            ctx.finalize()
        self.contexts.clear()


class SpUlysessQKVGemmAll2AllKernel(UlyssesKernel):
    """Project to q, k and v, and exchange the sequence for the heads. Tuned.

    Args:
        world_group: process group; ``None``: the world.
        nnodes: number of hosts, must be 1.
        sp_size: number of ranks that share a sequence.
        max_batch_size, max_seq_len: maximum batch size, and maximum number of tokens of a sequence
            over all ranks.
        sizes: one or two hidden sizes (ignored), ``head_dim``, and ``head_dim`` times the number of
            heads of q, k and v together.
        input_dtype: dtype of all tensors.
        gqa: number of heads of q per head of k, at least 1.
        output_dtype, max_num_comm_buf, use_persistent: ignored.
    """

    def __init__(
        self, world_group: dist.ProcessGroup | None, nnodes: int, sp_size: int,
        max_batch_size: int, max_seq_len: int, *sizes: int,
        input_dtype: torch.dtype = torch.bfloat16, output_dtype: torch.dtype = torch.bfloat16,
        gqa: int = 1, max_num_comm_buf: int = 1, use_persistent: bool = False,
    ) -> None:  # fmt: skip
        *_, head_dim, features = sizes
        if gqa < 1 or features % (head_dim * (gqa + 2)):
            expected = f"at least 1, so that {features // head_dim} heads are divisible by gqa + 2"
            raise InvalidArgument("SpUlysessQKVGemmAll2AllKernel", "gqa", gqa, expected)
        max_tokens = max_batch_size * max_seq_len
        super().__init__(world_group, nnodes, sp_size, max_tokens, head_dim, input_dtype)
        kv_heads = features // (head_dim * (gqa + 2))
        self.heads = gqa * kv_heads, kv_heads, kv_heads
        self.buffers: dict[int, torch.Tensor] = {}

    def get_input_comm_buf(self, tensor: torch.Tensor, comm_buf_idx: int) -> torch.Tensor:
        """Return a tensor like ``tensor``, which is the input of the ``_no_cpy`` methods.

        Calls with equal shapes return the same tensor.
        """
        buffer = self.buffers.get(comm_buf_idx)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffer = self.buffers[comm_buf_idx] = torch.empty_like(tensor)
        return buffer

    def forward(
        self, attention_input: torch.Tensor, weight: torch.Tensor,
        seq_lens_cpu: torch.Tensor | None = None, bias: torch.Tensor | None = None,
        outputs: list[torch.Tensor] | None = None, num_comm_sms: int = -1, sm_margin: int = 0,
    ) -> list[torch.Tensor]:  # fmt: skip
        """Return q, k and v of the whole sequence for this rank's heads.

        Args:
            attention_input: [batch, tokens of this rank, hidden].
            weight: [features, hidden], rows of q, then of k, then of v.
            seq_lens_cpu: int32 [sp_size], number of tokens of each rank; default: equally many.
            bias: [features].
            outputs: memory for the results.
            num_comm_sms, sm_margin: ignored.
        """
        ctx, lengths = self.context(*self.heads[:2]), lengths_of(seq_lens_cpu)
        results = ulysses_gemm_pre_attn(attention_input, weight.T, ctx, bias, lengths)
        if outputs is None:
            return [*results]
        return [out.copy_(each) for out, each in zip(outputs, results, strict=True)]

    def qkv_pack_a2a(
        self, qkv: torch.Tensor, seq_lens_cpu: torch.Tensor | None = None, num_comm_sms: int = -1,
        is_input_in_comm_buf: bool = False, comm_buf_idx: int = 0,
    ) -> list[torch.Tensor]:  # fmt: skip
        """Exchange q, k and v that are packed in [batch, tokens, heads of all three, head_dim].

        With ``is_input_in_comm_buf``, the tensor of ``get_input_comm_buf`` replaces ``qkv``.
        """
        qkv = self.buffers[comm_buf_idx] if is_input_in_comm_buf else qkv
        ctx = self.context(*self.heads[:2])
        q, k, v = qkv.split(self.heads, 2)
        return [*ulysses_pre_attn(q, k, v, ctx, lengths_of(seq_lens_cpu))]

    def qkv_pack_a2a_no_cpy(
        self, qkv: torch.Tensor, seq_lens_cpu: torch.Tensor | None = None, num_comm_sms: int = -1,
        comm_buf_idx: int = 0,
    ) -> list[torch.Tensor]:  # fmt: skip
        """Call ``qkv_pack_a2a`` with the tensor of ``get_input_comm_buf``."""
        return self.qkv_pack_a2a(qkv, seq_lens_cpu, num_comm_sms, True, comm_buf_idx)

    def pre_attn_a2a(
        self, inputs: torch.Tensor, seq_lens_cpu: torch.Tensor | None = None,
        num_comm_sms: int = -1, is_input_in_comm_buf: bool = False, comm_buf_idx: int = 0,
    ) -> torch.Tensor:  # fmt: skip
        """Exchange one tensor, [batch, tokens, heads, head_dim]; see ``qkv_pack_a2a``."""
        inputs = self.buffers[comm_buf_idx] if is_input_in_comm_buf else inputs
        ctx = self.context(inputs.shape[2], inputs.shape[2])
        out: torch.Tensor = ulysses_pre_attn(inputs, None, None, ctx, lengths_of(seq_lens_cpu))[0]
        return out

    def pre_attn_a2a_no_cpy(
        self, inputs: torch.Tensor, seq_lens_cpu: torch.Tensor | None = None,
        num_comm_sms: int = -1, comm_buf_idx: int = 0,
    ) -> torch.Tensor:  # fmt: skip
        """Call ``pre_attn_a2a`` with the tensor of ``get_input_comm_buf``."""
        return self.pre_attn_a2a(inputs, seq_lens_cpu, num_comm_sms, True, comm_buf_idx)


def lengths_of(seq_lens_cpu: torch.Tensor | None) -> list[int] | None:
    return None if seq_lens_cpu is None else seq_lens_cpu.tolist()
