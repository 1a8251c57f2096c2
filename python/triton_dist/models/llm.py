"""A model of LLaMA's kind that is shared out over ranks, for inference, as scripts call it."""

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
"""Modes, and the call form of the layers in each."""


class LLM:
    """A decoder whose attention and feed-forward layers are shared out over the ranks of a group;
    embeddings, norms and the head are whole on each.

    Attributes:
        model: with ``model.embed_tokens``, ``model.layers``, ``model.norm`` and ``lm_head``.
        num_layers, num_key_value_heads, head_dim, max_length: what a ``KV_Cache`` is made of.
        model_type: ``"moe"`` with experts, else ``"dense"``.
        mode: of ``inference``; ``set_fwd`` changes it.

    Args:
        config: what to make, by ``init_model_cpu``.
        group: process group; ``None``: the world, or without ``torch.distributed`` this process.

    Raises:
        InvalidArgument: a model that cannot be shared out; rotary positions that are scaled.
    """

    def __init__(self, config: ModelConfig, group: Group = None) -> None:
        stock: Any = init_model_cpu(config.model_name, config.dtype).requires_grad_(False)
        rotary, self.config = stock.model.rotary_emb, stock.config
        if getattr(rotary, "attention_scaling", 1.0) != 1.0:
            raise InvalidArgument("LLM", "attention_scaling", rotary.attention_scaling, "1.0")
        self.ranks: Collectives = Collectives(group)
        self.group, self.rank, self.world_size = group, self.ranks.rank, self.ranks.num_ranks
        for name in ("rank", "world_size"):
            if getattr(config, name) != getattr(self, name):
                expected = f"{getattr(self, name)}, as in the group"
                raise InvalidArgument("LLM", f"config.{name}", getattr(config, name), expected)
        parallelize(stock, max_M=1, ranks=self.ranks)
        self.model = stock.eval()
        blocks = [(block.self_attn, block.mlp) for block in stock.model.layers]
        self._layers = [layer for block in blocks for layer in block]
        self._share(None)
        self.model_type = "moe" if any(isinstance(mlp, TP_MoE) for _, mlp in blocks) else "dense"
        self.dtype, self.max_length = config.dtype, config.max_length
        self.num_layers = len(blocks)
        self.num_key_value_heads = self.config.num_key_value_heads
        self.head_dim = blocks[0][0].head_dim
        self.cos_sin_cache = _set_cos_sin_cache(rotary.inv_freq, config.max_length)
        self.set_fwd()

    def set_fwd(self, mode: str = "torch") -> None:
        """Choose the call form of the layers: ``"torch"``, by torch's products and all-reduce;
        ``"triton_dist"``, sequences spread over ranks; ``"triton_dist_AR"`` and
        ``"triton_dist_gemm_ar"``, all of them on all ranks.

        Raises:
            InvalidArgument: another mode.
        """
        if mode not in _FORWARDS:
            raise InvalidArgument("LLM.set_fwd", "mode", mode, f"one of {', '.join(_FORWARDS)}")
        self.mode = mode

    def init_triton_dist_ctx(self, max_M: int = 4096, ar_method: object = None) -> None:
        """Give the layers contexts for calls of up to ``max_M`` tokens, over all ranks, in place of
        those that they had; ``ar_method`` means nothing, calls are tuned. Collective.

        Raises:
            InvalidArgument: ``max_M`` is less than 1.
        """
        self.finalize()
        self.ranks = TensorParallel(max_M, self.group)
        self._share(self.ranks)

    init_triton_dist_AR_ctx = init_triton_dist_ctx
    init_triton_dist_gemm_ar_ctx = init_triton_dist_ctx

    def _share(self, ranks: Collectives | None) -> None:
        for layer in self._layers:
            layer.ranks = ranks

    @torch.no_grad()
    def inference(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        kv_cache: KV_Cache,
        wo_lm_head: bool = False,
    ) -> torch.Tensor:
        """Logits of the last token of each sequence, fp32 [batch, 1, vocabulary]; keys and values
        are written to ``kv_cache`` from its ``kv_offset`` on, which stays as it is.

        Args:
            input_ids: [batch, tokens]; in the mode ``"triton_dist"`` this rank's sequences, [batch
                / ranks, tokens], and so is the result.
            position_ids: [batch, tokens] of the whole batch.
            wo_lm_head: return what the head would take, [batch, 1, hidden].

        Raises:
            InvalidArgument: more tokens than contexts are for, a batch beyond the cache's, or no
                contexts.
        """
        decoder, form = self.model.model, _FORWARDS[self.mode]
        rest = position_ids, self.cos_sin_cache, kv_cache
        x = decoder.embed_tokens(input_ids)
        for number, block in enumerate(decoder.layers):
            attention, feed_forward = getattr(block.self_attn, form), getattr(block.mlp, form)
            x = x + attention(block.input_layernorm(x), *rest, number)
            x = x + feed_forward(block.post_attention_layernorm(x))
        last: torch.Tensor = decoder.norm(x[:, -1:])
        if wo_lm_head:
            return last
        logits: torch.Tensor = self.model.lm_head(last).float()
        return logits

    def tune(
        self, batch: int, prompts: Sequence[int], steps: Sequence[int], mode: str | None = None
    ) -> None:
        """Call ``inference`` once for each shape that will come, so that every product is tuned, or
        found in the cache: a server starts with ``TRITON_DIST_AUTOTUNE_FROZEN=1`` then. Contexts
        for the largest are made if there are none. Collective.

        Args:
            batch: sequences of a prefill.
            prompts: lengths of prompts.
            steps: numbers of sequences that are decoded together, a token each.
            mode: default: the present one.

        Raises:
            InvalidArgument: a prompt beyond ``max_length``; sequences that ranks cannot share.
        """
        shapes = [*((batch, tokens) for tokens in prompts), *((number, 1) for number in steps)]
        before, mode = self.mode, self.mode if mode is None else mode
        is_spread = mode == "triton_dist"
        for sequences, tokens in shapes:
            if tokens > self.max_length:
                expected = f"at most max_length = {self.max_length}"
                raise InvalidArgument("LLM.tune", "prompts", tokens, expected)
            if is_spread and sequences % self.world_size:
                expected = f"a multiple of the {self.world_size} ranks"
                raise InvalidArgument("LLM.tune", "sequences", sequences, expected)
        if not isinstance(self.ranks, TensorParallel):
            self.init_triton_dist_ctx(max(sequences * tokens for sequences, tokens in shapes))
        self.set_fwd(mode)
        device = self.ranks.device
        for sequences, tokens in shapes:
            own = sequences // self.world_size if is_spread else sequences
            cache = self.new_cache(sequences, tokens)
            positions = torch.arange(tokens, device=device).expand(sequences, -1)
            ids = torch.zeros(own, tokens, dtype=torch.long, device=device)
            self.inference(ids, positions, cache)
        self.set_fwd(before)

    def new_cache(self, batch: int, max_length: int | None = None) -> KV_Cache:
        """An empty ``KV_Cache`` of this model for ``batch`` sequences of up to ``max_length``
        tokens; default: the model's."""
        return KV_Cache(
            self.num_layers, batch, max_length or self.max_length, self.num_key_value_heads,
            self.head_dim, self.dtype, self.world_size,
        )  # fmt: skip

    def finalize(self) -> None:
        """Free the layers' contexts; idempotent. Collective."""
        self._share(None)
        ranks, self.ranks = self.ranks, Collectives(self.group)
        ranks.finalize()


class AutoLLM:
    """The name under which scripts make a model."""

    from_pretrained: Callable[..., LLM] = staticmethod(LLM)
