"""Context of the Ulysses ops."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from triton_dist.kernels.common.collective.pushed import PushedShards
from triton_dist.kernels.common.context import (
    Check,
    OpContext,
    agree_to_create,
    dtype_checks,
    int_checks,
)
from triton_dist.kernels.common.exchange.buffer import ExchangeBuffer
from triton_dist.kernels.common.peers import Disagreements
from triton_dist.runtime.launch import BoundedDict
from triton_dist.runtime.ranks import Group, process_group_of


class UlyssesContext(OpContext[ExchangeBuffer]):
    """Symmetric memory of ``ulysses_pre_attn`` and ``ulysses_post_attn``. A context manager."""

    def __init__(
        self,
        max_tokens: int,
        max_local_tokens: int,
        q_heads: int,
        kv_heads: int,
        head_dims: tuple[int, int],
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__("ulysses", group)
        self.max_tokens, self.max_local_tokens = max_tokens, max_local_tokens
        self.q_heads, self.kv_heads, self.head_dims = q_heads, kv_heads, head_dims
        self.dtype = dtype
        self.ranks_per_kv_head = max(1, self.num_ranks // kv_heads)
        """Number of ranks that share a KV head."""
        head_dim, v_head_dim = head_dims
        local_kv = max(1, kv_heads // self.num_ranks)
        self.widths = (
            q_heads // self.num_ranks * max(head_dims), local_kv * head_dim, local_kv * v_head_dim
        )  # fmt: skip
        """Maximum numbers of elements per token of q, k and v on a rank after the exchange."""
        tokens = max(max_tokens, self.num_ranks * max_local_tokens)
        nbytes = tokens * sum(self.widths) * dtype.itemsize if self.num_ranks > 1 else 1
        disagreements = Disagreements("digest of shapes and seq_lens of a Ulysses op", group)
        with self.allocating() as add:
            self.buffer = add(ExchangeBuffer(nbytes, group, "ulysses", 0, disagreements))
            shard_bytes = -(-nbytes // (16 * self.num_ranks)) * 16
            self.pushed = add(PushedShards(shard_bytes, group, "ulysses", disagreements))
        self._lengths: BoundedDict[tuple[int, ...], torch.Tensor] = BoundedDict()
        self._captured_lengths: dict[tuple[int, ...], torch.Tensor] = {}
        """Lengths that CUDA graphs read, so they must stay alive."""

    def lengths(self, seq_lens: tuple[int, ...]) -> torch.Tensor:
        """Return an int32 [2, ranks] on the device: ``seq_lens``, and the tokens before each rank.

        The first call with new lengths copies them to the device, so it must not be in a graph
        capture.
        """
        lengths = self._captured_lengths.get(seq_lens)
        if lengths is None:
            lengths = self._lengths.get(seq_lens)
        if lengths is None:
            before = [sum(seq_lens[:rank]) for rank in range(self.num_ranks)]
            device = self.device.torch_device
            lengths = torch.tensor([seq_lens, before], dtype=torch.int32, device=device)
            self._lengths[seq_lens] = lengths
        if self.device.is_capturing():
            self._captured_lengths[seq_lens] = lengths
        return lengths


def create_ulysses_context(
    rank: int,
    world_size: int,
    local_world_size: int,
    max_tokens: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    v_head_dim: int | None = None,
    max_local_tokens: int | None = None,
    group: Group = None,
) -> UlyssesContext:
    """Create the context of the Ulysses ops. Collective over ``group``.

    In the memory of each rank, the context uses about 4 times the bytes of the largest q, k and v
    of a rank.

    Args:
        rank, world_size, local_world_size: this rank, the number of ranks of the group, and the
            number of ranks on this host.
        max_tokens: maximum, over all calls, of the batch size times the tokens of all ranks.
        q_heads: number of heads of q, a multiple of ``world_size`` and of ``kv_heads``.
        kv_heads: number of heads of k and v, a multiple or a divisor of ``world_size``.
        head_dim: number of elements of a head of q and k, a multiple of 8.
        dtype: fp16, bf16 or fp32.
        v_head_dim: number of elements of a head of v, a multiple of 8; default: ``head_dim``.
        max_local_tokens: maximum, over all calls, of the batch size times the tokens of one rank;
            default: ``max_tokens`` divided by ``world_size``, rounded up.
        group: process group; default: the world, or this process alone.

    Returns:
        The context. Call ``finalize()`` or use ``with`` to free it.

    Raises:
        InvalidArgument, RankDisagreement, SymmetricMemoryFull: see ``create_ag_gemm_context``.
    """
    group = process_group_of(group)
    v_dim = head_dim if v_head_dim is None else v_head_dim
    sizes = {
        "max_tokens": max_tokens, "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim,
        "v_head_dim": v_dim,
    }  # fmt: skip

    def checks() -> Iterator[Check]:
        shares = kv_heads % world_size == 0 or world_size % kv_heads == 0
        expected = f"a multiple or a divisor of world_size = {world_size}"
        yield "kv_heads", kv_heads, shares, expected
        fits = q_heads % world_size == 0 and q_heads % kv_heads == 0
        expected = f"a multiple of world_size = {world_size} and of kv_heads = {kv_heads}"
        yield "q_heads", q_heads, fits, expected
        for name, dim in (("head_dim", head_dim), ("v_head_dim", v_dim)):
            yield name, dim, dim % 8 == 0, "a multiple of 8"
        yield from dtype_checks("dtype", dtype)
        if max_local_tokens is not None:
            yield from int_checks(max_local_tokens=max_local_tokens)
            fits = max_local_tokens * world_size >= max_tokens
            expected = "None, or at least max_tokens / world_size"
            yield "max_local_tokens", max_local_tokens, fits, expected

    agree_to_create(
        "create_ulysses_context", "a Ulysses", group, rank,
        {"world_size": world_size, "local_world_size": local_world_size}, sizes, checks(),
        max_local_tokens=max_local_tokens or 0, dtype=dtype,
    )  # fmt: skip
    local = -(-max_tokens // world_size) if max_local_tokens is None else max_local_tokens
    return UlyssesContext(max_tokens, local, q_heads, kv_heads, (head_dim, v_dim), dtype, group)
