"""A Llama model in plain torch for one process, with the module names of Hugging Face.

Scripts and tests use it in place of a downloaded model. ``parallelize`` replaces its layers, and
results of a sharded model are compared with it. It has no tokenizer and no trained weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from triton_dist import _files
from triton_dist.errors import InvalidArgument
from triton_dist.layers.nvidia.functional import shard_rows

__all__ = ["Llama", "LlamaConfig"]


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a model, named as in Hugging Face's ``config.json``.

    With ``num_experts`` > 0, the feed-forward layers are mixtures of experts.
    """

    hidden_size: int = 64
    intermediate_size: int = 96
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16
    vocab_size: int = 64
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    num_experts: int = 0
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 32
    qk_norm: bool = False

    @classmethod
    def of(cls, model: str) -> LlamaConfig:
        """Return the config of a known model, or of a folder with a ``config.json``.

        Raises:
            InvalidArgument: ``model`` is neither a known model nor such a folder. The message lists
                the known models.
        """
        path = Path(model, "config.json")
        if path.exists():
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            found.setdefault("head_dim", found["hidden_size"] // found["num_attention_heads"])
            found = {**found.get("rope_parameters", {}), **found}  # transformers 5 nests rope_theta
            found.setdefault("qk_norm", found.get("model_type", "").startswith("qwen3"))
            names = {field.name for field in fields(cls)}
            return cls(**{name: value for name, value in found.items() if name in names})
        if model not in KNOWN_CONFIGS:
            expected = f"a folder with a config.json, or one of {', '.join(KNOWN_CONFIGS)}"
            raise InvalidArgument("LlamaConfig.of", "model", model, expected)
        return KNOWN_CONFIGS[model]

    def save(self, folder: str | Path) -> None:
        """Create ``folder`` and write a ``config.json`` that ``AutoConfig`` can read."""
        family = "Qwen3Moe" if self.num_experts else "Qwen3" if self.qk_norm else "Llama"
        names = {"Qwen3Moe": "qwen3_moe", "Qwen3": "qwen3", "Llama": "llama"}
        written = {
            "architectures": [f"{family}ForCausalLM"],
            "model_type": names[family],
            "tie_word_embeddings": False,
            **asdict(self),
        }
        text = json.dumps(written, indent=2) + "\n"
        _files.write(Path(folder, "config.json"), text.encode())


KNOWN_CONFIGS = {
    "tiny": LlamaConfig(),
    "tiny-moe": LlamaConfig(num_experts=4),
    "meta-llama/Meta-Llama-3-8B": LlamaConfig(
        4096, 14336, 32, 32, 8, 128, 128256, 1e-5, 500000.0
    ),
    "meta-llama/Meta-Llama-3-70B": LlamaConfig(
        8192, 28672, 80, 64, 8, 128, 128256, 1e-5, 500000.0
    ),
    "Qwen/Qwen3-32B": LlamaConfig(
        5120, 25600, 64, 64, 8, 128, 151936, 1e-6, 1e6, qk_norm=True
    ),
    "Qwen/Qwen3-30B-A3B": LlamaConfig(
        2048, 6144, 48, 32, 4, 128, 151936, 1e-6, 1e6, 128, 8, 768, qk_norm=True
    ),
}  # fmt: skip


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_fp32 = x.float()
        scale = torch.rsqrt(x_fp32.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (x_fp32 * scale).to(x.dtype)


class RotaryEmbedding(nn.Module):
    inv_freq: torch.Tensor

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        exponents = torch.arange(0, head_dim, 2).float() / head_dim
        self.register_buffer("inv_freq", theta**-exponents, persistent=False)

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return cos and sin for positions [tokens] or [batch, tokens].

        The shape of both is [1, tokens, head_dim] or [batch, tokens, head_dim].
        """
        angles = torch.atleast_2d(positions).float()[..., None] * self.inv_freq
        both = torch.cat([angles, angles], -1)
        return both.cos().to(dtype), both.sin().to(dtype)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.head_dim, self.layer_idx = config, config.head_dim, layer_idx
        queries = config.num_attention_heads * self.head_dim
        keys = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        norm = RMSNorm if config.qk_norm else lambda *_: None
        self.q_norm = norm(self.head_dim, config.rms_norm_eps)
        self.k_norm = norm(self.head_dim, config.rms_norm_eps)
        self.sp_attn: Callable[..., torch.Tensor] | None = None
        """Attention function of q, k and v [batch, tokens, heads, head_dim] for tokens that are
        distributed over ranks; ``None``: all tokens are on this rank."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        cos, sin = position_embeddings

        def split_heads(proj: nn.Linear, norm: Callable[..., Any] | None = None) -> torch.Tensor:
            x: torch.Tensor = proj(hidden_states).unflatten(-1, (-1, self.head_dim))
            return (x if norm is None else norm(x)).transpose(1, 2)

        def rotated(x: torch.Tensor) -> torch.Tensor:
            left, right = x.chunk(2, -1)
            return x * cos[:, None] + torch.cat([-right, left], -1) * sin[:, None]

        q = rotated(split_heads(self.q_proj, self.q_norm))
        k = rotated(split_heads(self.k_proj, self.k_norm))
        v = split_heads(self.v_proj)
        if self.sp_attn is not None:
            rows = (x.transpose(1, 2).contiguous() for x in (q, k, v))
            return self.o_proj(self.sp_attn(*rows).flatten(2)), None
        attended = scaled_dot_product_attention(
            q, k, v, attention_mask, is_causal=attention_mask is None, enable_gqa=True
        )
        return self.o_proj(attended.transpose(1, 2).flatten(2)), None


class MLP(nn.Module):
    def __init__(self, hidden: int, columns: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, columns, bias=False)
        self.up_proj = nn.Linear(hidden, columns, bias=False)
        self.down_proj = nn.Linear(columns, hidden, bias=False)
        self.act_fn = silu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class SparseMoE(nn.Module):
    """Mixture of experts: softmax over all experts, then the best ``top_k`` for each token.

    The weights of a token's experts are normalised to sum 1. ``forward`` also returns the router's
    logits, as Hugging Face's modules do.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.num_experts, self.top_k = config.num_experts, config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, self.num_experts, bias=False)
        sizes = config.hidden_size, config.moe_intermediate_size
        self.experts = nn.ModuleList(MLP(*sizes) for _ in range(self.num_experts))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = x.flatten(0, -2)
        logits = linear(rows, self.gate.weight)
        weights, ids = logits.softmax(-1, dtype=torch.float32).topk(self.top_k, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        total = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, choice = torch.where(ids == number)
            addend = expert(rows[token]) * weights[token, choice, None].to(x.dtype)
            total = total.index_add(0, token, addend)
        return total.view(x.shape), logits


class Block(nn.Module):
    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer_idx)
        mlp_sizes = config.hidden_size, config.intermediate_size
        self.mlp = SparseMoE(config) if config.num_experts else MLP(*mlp_sizes)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, **attention_options: Any) -> torch.Tensor:
        x = x + self.self_attn(hidden_states=self.input_layernorm(x), **attention_options)[0]
        y: Any = self.mlp(self.post_attention_layernorm(x))
        total: torch.Tensor = x + (y[0] if isinstance(y, tuple) else y)
        return total


class Decoder(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config.head_dim, config.rope_theta)

    def forward(
        self,
        ids: torch.Tensor,
        shard: tuple[int, int] = (0, 1),
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the last hidden states, [batch, tokens, hidden], of ``ids`` [batch, tokens].

        If ``shard``, a pair (rank, number of ranks), has several ranks, return only this rank's
        rows [rows, hidden]: at most ceil(batch * tokens / ranks) consecutive tokens.
        """
        x = self.embed_tokens(ids)
        num_rows = ids.shape[0]
        if shard[1] > 1:
            x = shard_rows(x.flatten(0, 1), *shard)
            num_rows = min(max(ids.numel() - shard[0] * len(x), 0), len(x))  # without padding
        if position_ids is None:
            position_ids = torch.arange(ids.shape[1], device=ids.device)
        positions = self.rotary_emb(position_ids, x.dtype)
        for layer in self.layers:
            x = layer(x, position_embeddings=positions)
        y: torch.Tensor = self.norm(x[:num_rows])
        return y


class Output(NamedTuple):
    """Result of a model, with Hugging Face's field name."""

    logits: torch.Tensor


class Llama(nn.Module):
    """Decoder with a language-model head."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config).to(dtype)
        # Rotary frequencies stay in fp32: 16-bit dtypes cannot distinguish distant positions.
        self.model.rotary_emb = RotaryEmbedding(config.head_dim, config.rope_theta)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)

    def forward(
        self,
        input_ids: torch.Tensor,
        shard: tuple[int, int] = (0, 1),
        position_ids: torch.Tensor | None = None,
    ) -> Output:
        """Return ``logits`` [batch, tokens, vocab] of ``input_ids`` [batch, tokens].

        Args:
            input_ids: token ids.
            shard: (rank, number of ranks). With several ranks, return only this rank's rows, [rows,
                vocab]. The layers must be sequence-parallel.
            position_ids: [tokens] or [batch, tokens]; default: 0, 1, 2, ….
        """
        return Output(self.lm_head(self.model(input_ids, shard, position_ids)))
