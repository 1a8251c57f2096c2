"""Tensor-parallel attention: heads are sharded over ranks.

torch's ``scaled_dot_product_attention`` computes attention on each rank.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.functional import pad, scaled_dot_product_attention

from triton_dist.errors import TritonDistWarning
from triton_dist.kernels.common.gemm.scales import BLOCK_ELEMENTS
from triton_dist.layers.nvidia.layer import TensorParallelLayer
from triton_dist.layers.nvidia.stock_weights import StockWeight, local_part
from triton_dist.layers.nvidia.tensor_parallel import Collectives
from triton_dist.runtime.device import current_device

AttentionFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Function that returns attention of queries, keys and values [batch, tokens, heads, head_dim]."""

_CACHE_NAMES = ("past_key_value", "cache")
"""Names of the argument ``past_key_values`` in other versions of transformers. An ignored cache
would give wrong results without an error."""


class TP_Attn(TensorParallelLayer):
    """Attention of Llama, Qwen and similar models, with the heads distributed over the ranks.

    Supports grouped queries, rotary positions, q and k norms per head, and biases.
    ``TensorParallelLayer`` describes arguments, modes and methods. With fewer key-value heads than
    ranks, several ranks have the same head, and a warning is issued.

    Attributes:
        wqkv: [(num_heads + 2 * num_kv_heads) * head_dim, hidden].
        wo: [hidden, num_heads * head_dim].
        wqkv_scale, wo_scale, wqkv_input_scale, wo_input_scale: scales of fp8 weights and of their
            inputs (``layers/nvidia/fp8.py``), if a checkpoint has them.
        bqkv, bo: biases, or ``None``.
        num_heads, num_kv_heads: numbers of query and key-value heads of this rank.
        kv_replicas: number of ranks that have the same key-value head.
        kv_index: index of this rank's key-value head if ``kv_replicas`` > 1, else the rank.
        total_kv_heads: number of key-value heads over all ranks.
    """

    sharded_names = ("wqkv", "bqkv", "wo")
    wqkv: torch.nn.Parameter
    wo: torch.nn.Parameter
    bqkv: torch.nn.Parameter | None
    bo: torch.nn.Parameter | None
    q_norm: torch.nn.Module | None
    k_norm: torch.nn.Module | None

    def _init_parameters(self, self_attn: torch.nn.Module, verbose: bool = False) -> None:
        """Copy this rank's shard of an attention module, which may be on any device.

        Args:
            self_attn: module with ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj`` and ``head_dim``.
            verbose: print the shapes of the shards.

        Raises:
            InvalidArgument: weights do not match, heads cannot be sharded, or the module has an
                unsupported feature.
        """
        source: Any = self_attn
        self._check_members("module", self_attn, "q_proj", "k_proj", "v_proj", "o_proj", "head_dim")
        q = self._checked_weight("q_proj", source.q_proj, (None, None))
        q_columns, hidden = q.shape
        like = ("q_proj", q)
        k = self._checked_weight("k_proj", source.k_proj, (None, hidden), like=like)
        self._checked_weight("v_proj", source.v_proj, (k.shape[0], hidden), like=like)
        self._checked_weight("o_proj", source.o_proj, (hidden, q_columns), like=like)
        for name, value, supported in (
            ("sliding_window", getattr(source, "sliding_window", None), None),
            ("clip_qkv", getattr(getattr(source, "config", None), "clip_qkv", None), None),
            ("sinks", None if getattr(source, "sinks", None) is None else "present", None),
            ("is_causal", getattr(source, "is_causal", True), True),
            ("attention_dropout", getattr(source, "attention_dropout", 0.0), 0.0),
        ):
            if value != supported:
                raise self._invalid(name, value, str(supported))
        self.head_dim: int = source.head_dim
        for name, size in (("q_proj", q_columns), ("k_proj", k.shape[0])):
            if self.head_dim < 1 or size % self.head_dim:
                expected = f"a divisor of the {size} columns of {name}"
                raise self._invalid("head_dim", self.head_dim, expected)
        self.scaling: float = getattr(source, "scaling", self.head_dim**-0.5)
        self.layer_idx: int = getattr(source, "layer_idx", 0)
        self._assign_heads(q_columns // self.head_dim, k.shape[0] // self.head_dim)
        if q_columns % k.shape[0]:
            expected = f"a multiple of the {k.shape[0] // self.head_dim} key-value heads"
            raise self._invalid("heads of q_proj", q_columns // self.head_dim, expected)
        self._set_scales(getattr(source, f"{name}_proj") for name in "qkvo")
        self._check_blocks()
        rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.wqkv = self._parameter("wqkv", self_attn, rows, hidden)
        self.wo = self._parameter("wo", self_attn, hidden, self.num_heads * self.head_dim)
        self._init_scales(self_attn, "wqkv", "wo")
        biases = [getattr(getattr(source, f"{name}_proj"), "bias", None) for name in "qkvo"]
        qkv_biases = [bias for bias in biases[:3] if bias is not None]
        if len(qkv_biases) not in (0, 3):
            raise self._invalid(
                "biases of q_proj, k_proj, v_proj", len(qkv_biases), "0 or 3 biases"
            )
        self.bqkv = self._parameter("bqkv", self_attn, rows) if qkv_biases else None
        # The bias of o is equal on all ranks and added after the sum over ranks.
        self.bo = None if biases[3] is None else self._parameter("bo", self_attn, hidden)
        for name in ("q_norm", "k_norm"):
            norm = getattr(source, name, None)
            scale = getattr(norm, "weight", None)
            if scale is not None and tuple(scale.shape) != (self.head_dim,):
                expected = f"a norm per head, [{self.head_dim}]"
                raise self._invalid(f"{name}.weight.shape", tuple(scale.shape), expected)
            setattr(self, name, None if norm is None else norm.to(self.torch_collectives.device))
        self._print_shapes(verbose)

    def _assign_heads(self, heads: int, kv_heads: int) -> None:
        size = self.world_size
        self._check_split("heads of q_proj", heads)
        if kv_heads % size and size % kv_heads:
            expected = f"a multiple or a divisor of the {size} ranks"
            raise self._invalid("heads of k_proj", kv_heads, expected)
        self.kv_replicas = max(1, size // kv_heads)
        self.num_heads, self.num_kv_heads = heads // size, max(1, kv_heads // size)
        self.kv_index, self.total_kv_heads = self.rank // self.kv_replicas, kv_heads
        if self.kv_replicas > 1 and self.rank == 0:
            warnings.warn(
                f"TP_Attn: with {kv_heads} key-value heads for {size} ranks, {self.kv_replicas} "
                "ranks replicate each head and its cache",
                TritonDistWarning,
                stacklevel=3,
            )

    def _check_blocks(self) -> None:
        """Raise if the boundary between two ranks' heads is inside a block of 128 scaled rows."""
        if self.scales is None or not self.scales.is_block:
            return
        heads_per_block = BLOCK_ELEMENTS // math.gcd(BLOCK_ELEMENTS, self.head_dim)
        for name, heads in (("q_proj", self.num_heads), ("k_proj", self.num_kv_heads)):
            if heads % heads_per_block:
                padded = -(-heads // heads_per_block) * heads_per_block
                expected = f"whole blocks of 128 rows: pad with zeros to {padded} heads per rank"
                raise self._invalid(f"heads of {name} per rank", heads, expected)

    def _weights_of(self, name: str, tensor: torch.Tensor) -> list[StockWeight]:
        if name == "wo":
            return [StockWeight("o_proj.weight", tensor, 1)]
        if name == "bo":
            return [StockWeight("o_proj.bias", tensor, None)]
        member = "weight" if name == "wqkv" else "bias"
        heads = self.num_heads, self.num_kv_heads, self.num_kv_heads
        q, k, v = tensor.split([each * tensor.shape[0] // sum(heads) for each in heads])
        return [
            StockWeight(f"q_proj.{member}", q, 0),
            StockWeight(f"k_proj.{member}", k, 0, self.kv_replicas),
            StockWeight(f"v_proj.{member}", v, 0, self.kv_replicas),
        ]

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return the attention output and ``None``, like Hugging Face's attention modules.

        Args:
            hidden_states: [..., hidden]: this rank's tokens in sequence-parallel mode, all tokens
                in all-reduce mode.
            position_embeddings: cos and sin, [batch or 1, tokens, head_dim], of the whole sequence
                in both modes.
            attention_mask: mask of ``scaled_dot_product_attention``; ``None``: causal.
            past_key_values: cache whose ``update(k, v, layer_idx)`` appends k and v [batch, heads,
                tokens, head_dim] and returns all keys and values. It may also be passed as
                ``past_key_value`` or ``cache``.
            kwargs: ignored, except that a mask or cache under another name raises.

        Raises:
            InvalidArgument: an argument is not supported or has a wrong shape, dtype or device.
            ContextFinalized: the contexts were finalized.
        """
        self._compare_input(hidden_states)
        cache = past_key_values
        for name, value in kwargs.items():
            if value is None:
                continue
            if name in _CACHE_NAMES and cache is None:
                cache = value
            elif "mask" in name or (hasattr(value, "update") and not isinstance(value, dict)):
                expected = "a mask as attention_mask and one cache as past_key_values"
                raise self._invalid(name, type(value), expected)
        cos, sin = (each.unsqueeze(-2) for each in position_embeddings)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return self._attend_over_cache(q, k, v, attention_mask, cache)

        tokens = position_embeddings[0].shape[-2]
        group, sequence_parallel = self._required_collectives(), self.sequence_parallel
        return self._run(hidden_states, group, sequence_parallel, tokens, cos, sin, attend), None

    def _attend_over_cache(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None = None,
        cache: Any = None,
    ) -> torch.Tensor:
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        is_causal = mask is None
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
            queries, keys_seen = q.shape[2], k.shape[2]
            if is_causal and queries != keys_seen:  # queries are the last positions of the keys
                is_causal = False
                mask = torch.ones(queries, keys_seen, dtype=torch.bool, device=q.device)
                mask = mask.tril(keys_seen - queries)
        attended = scaled_dot_product_attention(
            q, k, v, mask, is_causal=is_causal, scale=self.scaling,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )  # fmt: skip
        return attended.transpose(1, 2)

    def norm_parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters of q and k norms. Each rank computes an addend of the gradients."""
        norms = (norm for norm in (self.q_norm, self.k_norm) if norm is not None)
        return [parameter for norm in norms for parameter in norm.parameters()]

    def replicated_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of the rows of ``tensor`` for key-value heads that several ranks have.

        ``tensor`` has the shape of ``wqkv`` or ``bqkv``. If FSDP2 shards it, only the rows of the
        local part are returned.
        """
        first = self.num_heads * self.head_dim if self.kv_replicas > 1 else tensor.shape[0]
        if isinstance(tensor, DTensor):
            _, offset = compute_local_shape_and_global_offset(
                tensor.shape, tensor.device_mesh, tensor.placements
            )
            first -= offset[0]
        return local_part(tensor)[max(first, 0) :]

    def sum_partial_gradients(self) -> None:
        """Sum over ranks the gradients of q and k norms and of replicated kv heads. Collective.

        Each rank has computed these gradients only from its own query heads.
        """
        for parameter in self.norm_parameters():
            if parameter.grad is not None:
                self.torch_collectives.all_reduce(local_part(parameter.grad))
        for weight in (self.wqkv, self.bqkv):
            if weight is not None and weight.grad is not None:
                own = self.replicated_rows(weight.grad)
                if own.numel():
                    by_head = own.new_zeros(self.total_kv_heads, *own.shape)
                    by_head[self.kv_index] = own
                    own.copy_(self.torch_collectives.all_reduce(by_head)[self.kv_index])

    def _run(
        self,
        x: torch.Tensor,
        collectives: Collectives,
        sequence_parallel: bool,
        tokens: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: AttentionFunction,
    ) -> torch.Tensor:
        """Run the layer; ``attend`` computes attention of this rank's heads.

        Args:
            x: [..., hidden]. In sequence-parallel mode, the last rows of the last ranks may be
                padding, in total fewer rows than ranks.
            tokens: length of a whole sequence.
            cos, sin: [batch or 1, tokens, 1, head_dim].
        """
        rows = math.prod(x.shape[:-1]) * (collectives.num_ranks if sequence_parallel else 1)
        padding = rows % tokens if tokens else rows
        if padding >= (collectives.num_ranks if sequence_parallel else 1):
            expected = f"a multiple of {tokens}, the tokens of position_embeddings"
            raise self._invalid("rows of hidden_states", rows, expected)

        attention = partial(self._attention_of_rows, tokens=tokens, cos=cos, sin=sin, attend=attend)
        y = self._two_gemms(x, "wqkv", attention, "wo", collectives, sequence_parallel)
        return (y if self.bo is None else y + self.bo).view(x.shape)

    def _attention_of_rows(
        self,
        qkv: torch.Tensor,
        tokens: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: AttentionFunction,
    ) -> torch.Tensor:
        """Return the attention output [rows, num_heads * head_dim] for qkv, the rows of q, k and v.
        Rows after the last whole sequence are padding; their outputs are zero."""
        rows, heads, kv_heads = qkv.shape[0], self.num_heads, self.num_kv_heads
        sequences = rows // tokens if tokens else 0
        padding = rows - sequences * tokens
        if self.bqkv is not None:
            qkv = qkv + self.bqkv
        qkv = qkv[: rows - padding].view(sequences, tokens, heads + 2 * kv_heads, self.head_dim)
        q, k, v = qkv.split([heads, kv_heads, kv_heads], -2)
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        attended = attend(apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v)
        attended = attended.reshape(rows - padding, heads * self.head_dim)
        return pad(attended, (0, 0, 0, padding)) if padding else attended

    def _with_cache(
        self,
        x: torch.Tensor,
        position_ids: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        kv_cache: Any,
        layer_idx: int,
        collectives: Collectives,
        sequence_parallel: bool,
    ) -> torch.Tensor:
        """Run the layer and write keys and values to ``kv_cache``. Attention reads the whole cache
        with a mask, so that one CUDA graph serves all positions."""
        cos, sin = (
            torch.cat([half, half], -1).unsqueeze(-2)
            for half in cos_sin_cache[position_ids].chunk(2, -1)
        )
        tokens = position_ids.shape[1]
        if hasattr(kv_cache, "attend"):
            attend_layer = partial(kv_cache.attend, layer_idx)
            return self._run(x, collectives, sequence_parallel, tokens, cos, sin, attend_layer)
        k_cache, v_cache, offset = kv_cache.update_kv_cache(None, None, layer_idx)
        cache_length = k_cache.shape[1]
        if k_cache.shape[2] != self.num_kv_heads:
            expected = f"{self.num_kv_heads}, the heads of this rank"
            raise self._invalid("heads of kv_cache", k_cache.shape[2], expected)
        if k_cache.dtype != x.dtype:
            expected = f"the dtype of x, {x.dtype}"
            raise self._invalid("dtype of kv_cache", k_cache.dtype, expected)
        batch = x.shape[0] * (collectives.num_ranks if sequence_parallel else 1)
        if batch > k_cache.shape[0]:
            expected = f"at most the cache's batch_size = {k_cache.shape[0]}"
            raise self._invalid("batch", batch, expected)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            positions = offset[:batch, None] + torch.arange(tokens, device=x.device)
            sequences = torch.arange(batch, device=x.device)[:, None]
            k_cache[sequences, positions], v_cache[sequences, positions] = k, v
            # Queries that share a key head become rows of one head. Otherwise keys and values would
            # have to be repeated for each query head.
            group = self.num_heads // self.num_kv_heads
            q = q.view(batch, tokens, -1, group, self.head_dim).permute(0, 2, 3, 1, 4)
            q = q.reshape(batch, -1, group * tokens, self.head_dim)
            mask = torch.arange(cache_length, device=x.device) <= positions[..., None]
            mask = mask.repeat(1, group, 1)[:, None]
            keys, values = (each[:batch].transpose(1, 2) for each in (k_cache, v_cache))
            attended = scaled_dot_product_attention(q, keys, values, mask, scale=self.scaling)
            attended = attended.view(batch, -1, group, tokens, self.head_dim)
            return attended.permute(0, 3, 1, 2, 4).reshape(batch, tokens, -1, self.head_dim)

        return self._run(x, collectives, sequence_parallel, tokens, cos, sin, attend)

    @torch.no_grad()
    def torch_fwd(
        self,
        x: torch.Tensor,
        position_ids: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        kv_cache: Any,
        layer_idx: int,
    ) -> torch.Tensor:
        """Return [batch, tokens, hidden]. Append keys and values to the cache at its ``kv_offset``.

        Args:
            x: [batch, tokens, hidden].
            position_ids: [batch or 1, tokens], positions of the tokens in their sequences.
            cos_sin_cache: [positions, head_dim] from ``_set_cos_sin_cache``.
            kv_cache: ``triton_dist.models.kv_cache.KV_Cache`` or an equivalent object; or an object
                whose ``attend(layer_idx, q, k, v)`` returns the attention of this rank's heads,
                [batch, tokens, heads, head_dim].
            layer_idx: index of the layer in the cache.
        """
        return self._with_cache(
            x, position_ids, cos_sin_cache, kv_cache, layer_idx, self.torch_collectives, False
        )

    @torch.no_grad()
    def dist_triton_fwd(
        self,
        x: torch.Tensor,
        position_ids: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        kv_cache: Any,
        layer_idx: int,
        *unused: Any,
        **also_unused: Any,
    ) -> torch.Tensor:
        """Return the result for this rank's sequences.

        x is [batch / ranks, tokens, hidden]. ``position_ids`` and ``kv_cache`` are for the whole
        batch; see ``torch_fwd``.
        """
        return self._with_cache(
            x, position_ids, cos_sin_cache, kv_cache, layer_idx, self._required_collectives(), True
        )

    @torch.no_grad()
    def dist_triton_AR_fwd(
        self,
        x: torch.Tensor,
        position_ids: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        kv_cache: Any,
        layer_idx: int,
    ) -> torch.Tensor:
        """Return the result of ``torch_fwd``, computed by ``gemm_ar``."""
        return self._with_cache(
            x, position_ids, cos_sin_cache, kv_cache, layer_idx, self._required_collectives(), False
        )

    dist_triton_gemm_ar_fwd = dist_triton_AR_fwd


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply the rotary position embedding to x [batch, tokens, heads, head_dim]."""
    left, right = x.chunk(2, -1)
    return (x * cos + torch.cat([-right, left], -1) * sin).to(x.dtype)


def _set_cos_sin_cache(inv_freq: torch.Tensor, max_length: int) -> torch.Tensor:
    """Return fp32 [max_length, head_dim]: cosines in the left half, sines in the right half."""
    device = current_device().torch_device
    positions = torch.arange(max_length, device=device, dtype=torch.float32)
    angles = torch.outer(positions, inv_freq.to(device, torch.float32))
    return torch.cat([angles.cos(), angles.sin()], -1)
