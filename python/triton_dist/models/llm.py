"""Tensor-parallel Llama-like models for inference, with the interface of Triton-distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from triton_dist.errors import InvalidArgument
from triton_dist.layers.nvidia import Collectives, TensorParallel, TP_MoE, parallelize
from triton_dist.layers.nvidia.tp_attn import _set_cos_sin_cache
from triton_dist.models.config import ModelConfig
from triton_dist.models.kv_cache import KV_Cache
from triton_dist.models.utils import init_model_cpu
from triton_dist.runtime.ranks import Group

__all__ = ["LLM", "AutoLLM"]

_FORWARDS = {
    "torch": "torch_fwd",
    "triton_dist": "dist_triton_fwd",
    "triton_dist_AR": "dist_triton_AR_fwd",
    "triton_dist_gemm_ar": "dist_triton_gemm_ar_fwd",
}
"""Method of the layers for each mode of ``LLM``."""


class LLM:
    """Decoder whose attention and feed-forward layers are sharded over the ranks of a group.

    Every rank has whole embeddings, norms and head.

    Attributes:
        model: module with ``model.embed_tokens``, ``model.layers``, ``model.norm``, ``lm_head``.
        num_layers, num_key_value_heads, head_dim, max_length: sizes for a ``KV_Cache``.
        model_type: ``"moe"`` or ``"dense"``.
        mode: mode in which ``inference`` runs, such as ``"triton_dist"``; set it with ``set_fwd``.

    Args:
        config: name and settings of the model; ``init_model_cpu`` creates the model from them.
        group: process group; ``None``: the world, or this process alone without
            ``torch.distributed``.

    Raises:
        InvalidArgument: the model cannot be sharded, or its rotary embedding is scaled.
    """

    def __init__(self, config: ModelConfig, group: Group = None) -> None:
        stock: Any = init_model_cpu(config.model_name, config.dtype).requires_grad_(False)
        rotary, self.config = stock.model.rotary_emb, stock.config
        if getattr(rotary, "attention_scaling", 1.0) != 1.0:
            raise InvalidArgument("LLM", "attention_scaling", rotary.attention_scaling, "1.0")
        self.collectives: Collectives = Collectives(group)
        self.group, self.rank = group, self.collectives.rank
        self.world_size = self.collectives.num_ranks
        for name in ("rank", "world_size"):
            if getattr(config, name) != getattr(self, name):
                expected = f"{getattr(self, name)}, as in the group"
                raise InvalidArgument("LLM", f"config.{name}", getattr(config, name), expected)
        parallelize(stock, max_M=1, collectives=self.collectives)
        self.model = stock.eval()
        blocks = [(block.self_attn, block.mlp) for block in stock.model.layers]
        self._layers = [layer for block in blocks for layer in block]
        self._set_collectives(None)
        self.model_type = "moe" if any(isinstance(mlp, TP_MoE) for _, mlp in blocks) else "dense"
        self.dtype, self.max_length = config.dtype, config.max_length
        self.num_layers = len(blocks)
        self.num_key_value_heads = self.config.num_key_value_heads
        self.head_dim = blocks[0][0].head_dim
        self.cos_sin_cache = _set_cos_sin_cache(rotary.inv_freq, config.max_length)
        self.set_fwd()

    def set_fwd(self, mode: str = "torch") -> None:
        """Select how ``inference`` computes the layers.

        Args:
            mode: ``"torch"``: torch's GEMM and all-reduce; all sequences are on all ranks.
                ``"triton_dist"``: each rank has some of the sequences (AllGather-GEMM and
                GEMM-ReduceScatter). ``"triton_dist_AR"`` or ``"triton_dist_gemm_ar"``, which are
                equal: GEMM-AllReduce; all sequences are on all ranks.

        Raises:
            InvalidArgument: unknown mode.
        """
        if mode not in _FORWARDS:
            raise InvalidArgument("LLM.set_fwd", "mode", mode, f"one of {', '.join(_FORWARDS)}")
        self.mode = mode

    def init_triton_dist_ctx(self, max_M: int = 4096, ar_method: object = None) -> None:
        """Create contexts for calls of up to ``max_M`` tokens over all ranks. Collective.

        Modes other than ``"torch"`` require contexts. Existing contexts are freed first.
        ``ar_method`` is ignored, because calls are tuned.

        Raises:
            InvalidArgument: ``max_M`` is less than 1.
        """
        self.finalize()
        self.collectives = TensorParallel(max_M, self.group)
        self._set_collectives(self.collectives)

    init_triton_dist_AR_ctx = init_triton_dist_ctx
    init_triton_dist_gemm_ar_ctx = init_triton_dist_ctx

    def _set_collectives(self, collectives: Collectives | None) -> None:
        for layer in self._layers:
            layer.collectives = collectives

    @torch.no_grad()
    def inference(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        kv_cache: KV_Cache,
        wo_lm_head: bool = False,
    ) -> torch.Tensor:
        """Return the logits of the last token of each sequence, fp32 [batch, 1, vocabulary].

        Keys and values are written to ``kv_cache`` at its ``kv_offset``, which is not advanced.

        Args:
            input_ids: [batch, tokens]. In mode ``"triton_dist"`` these are this rank's sequences,
                [batch / ranks, tokens], and the result has this rank's sequences too.
            position_ids: [batch, tokens], positions of the tokens of the whole batch.
            kv_cache: cache for the whole batch.
            wo_lm_head: return the input of ``lm_head``, [batch, 1, hidden], instead of the logits.

        Raises:
            InvalidArgument: there are more tokens than the contexts allow, the batch is larger than
                the cache, or the mode requires contexts and there are none.
        """
        decoder, method = self.model.model, _FORWARDS[self.mode]
        cache_arguments = position_ids, self.cos_sin_cache, kv_cache
        x = decoder.embed_tokens(input_ids)
        for number, block in enumerate(decoder.layers):
            attention, feed_forward = getattr(block.self_attn, method), getattr(block.mlp, method)
            x = x + attention(block.input_layernorm(x), *cache_arguments, number)
            x = x + feed_forward(block.post_attention_layernorm(x))
        last: torch.Tensor = decoder.norm(x[:, -1:])
        if wo_lm_head:
            return last
        logits: torch.Tensor = self.model.lm_head(last).float()
        return logits

    def tune(
        self,
        batch: int,
        prompt_lengths: Sequence[int],
        decode_batches: Sequence[int],
        mode: str | None = None,
    ) -> None:
        """Call ``inference`` once for each shape, so that all ops are tuned. Collective.

        A server can then start with ``TRITON_DIST_AUTOTUNE_FROZEN=1`` (no tuning at run time). If
        there are no contexts, they are created for the largest shape.

        Args:
            batch: number of sequences of each prefill.
            prompt_lengths: prompt lengths in tokens; a prefill is tuned for each.
            decode_batches: batch sizes of decode steps (one token per sequence) to tune.
            mode: mode to tune; default: the current mode.

        Raises:
            InvalidArgument: a prompt exceeds ``max_length``, or the number of sequences is not a
                multiple of the ranks in mode ``"triton_dist"``.
        """
        shapes = [
            *((batch, tokens) for tokens in prompt_lengths),
            *((number, 1) for number in decode_batches),
        ]
        previous_mode, mode = self.mode, self.mode if mode is None else mode
        sequence_parallel = mode == "triton_dist"
        for sequences, tokens in shapes:
            if tokens > self.max_length:
                expected = f"at most max_length = {self.max_length}"
                raise InvalidArgument("LLM.tune", "prompt_lengths", tokens, expected)
            if sequence_parallel and sequences % self.world_size:
                expected = f"a multiple of the {self.world_size} ranks"
                raise InvalidArgument("LLM.tune", "batch or decode_batches", sequences, expected)
        if not isinstance(self.collectives, TensorParallel):
            self.init_triton_dist_ctx(max(sequences * tokens for sequences, tokens in shapes))
        self.set_fwd(mode)
        device = self.collectives.device
        for sequences, tokens in shapes:
            local_batch = sequences // self.world_size if sequence_parallel else sequences
            cache = self.new_cache(sequences, tokens)
            positions = torch.arange(tokens, device=device).expand(sequences, -1)
            ids = torch.zeros(local_batch, tokens, dtype=torch.long, device=device)
            self.inference(ids, positions, cache)
        self.set_fwd(previous_mode)

    def new_cache(self, batch: int, max_length: int | None = None) -> KV_Cache:
        """Return an empty ``KV_Cache`` of this model.

        Args:
            batch: number of sequences.
            max_length: largest number of tokens of a sequence; default: the model's.
        """
        return KV_Cache(
            self.num_layers, batch, max_length or self.max_length, self.num_key_value_heads,
            self.head_dim, self.dtype, self.world_size,
        )  # fmt: skip

    def finalize(self) -> None:
        """Free the layers' contexts; idempotent. Collective."""
        self._set_collectives(None)
        collectives, self.collectives = self.collectives, Collectives(self.group)
        collectives.finalize()


class AutoLLM:
    """Factory with the name that scripts use."""

    from_pretrained: Callable[..., LLM] = staticmethod(LLM)
