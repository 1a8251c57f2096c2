"""Serve a tensor-parallel Llama: bash scripts/launch.sh examples/serve_llama.py

One call processes all prompts (prefill). Then each step decodes one token of every sequence. Keys
and values are in a cache of fixed size, so the shapes of a step do not change. On GPUs, a step is
therefore captured in a CUDA graph and replayed. The tokens are compared with the tokens of the same
model on one rank.

``--fp8`` quantises the weights of the layers, with a scale per row or per block of 128 x 128
(``--fp8 block``), as in fp8 checkpoints. Rounding may then change the best of two similar
tokens, so the logits of the served tokens are compared instead.

With ``--kv-shards``, rank r stores all heads of tokens r, r + ranks, ..., instead of some heads of
all tokens. Decoding then uses ``sp_decode_attn``.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad, scaled_dot_product_attention

from triton_dist.kernels.common.libraries import all_gather_rows
from triton_dist.kernels.nvidia import create_sp_decode_context, sp_decode_attn
from triton_dist.layers.nvidia import TensorParallel, parallelize
from triton_dist.layers.nvidia.tp_attn import _set_cos_sin_cache
from triton_dist.models.kv_cache import KV_Cache
from triton_dist.models.llama import Llama
from triton_dist.models.utils import init_model_cpu, seed_everything
from triton_dist.testing.timing import capture_graph
from triton_dist.utils import (
    dist_print,
    finalize_distributed,
    initialize_distributed,
    is_cuda,
)


class ShardedCache:
    """Keys and values of all heads. Token t of a sequence is stored on rank t % ranks."""

    def __init__(
        self, config: Any, batch: int, max_tokens: int, dtype: torch.dtype, device: Any
    ) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.tokens_per_rank = -(-max_tokens // self.size)
        self.replicas = max(1, self.size // config.num_key_value_heads)
        heads, kv_heads, dim = (
            config.num_attention_heads, config.num_key_value_heads, config.head_dim,
        )  # fmt: skip
        # The last position receives the tokens of other ranks, and is never read.
        shape = (config.num_hidden_layers, batch, self.tokens_per_rank + 1, kv_heads, dim)
        self.k, self.v = torch.zeros(2, *shape, dtype=dtype, device=device)
        self.kv_offset = torch.zeros(batch, dtype=torch.int32, device=device)
        self.ctx = create_sp_decode_context(
            self.rank, self.size, self.size, batch, heads, dim, dtype, shard_queries=True
        )

    def inc_offset(self, tokens: int) -> None:
        self.kv_offset += tokens

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store the new tokens, and return the attention of this rank's heads."""
        batch, tokens = q.shape[:2]
        position = self.kv_offset[:, None] + torch.arange(tokens, device=q.device)
        cache_position = torch.where(
            position % self.size == self.rank, position // self.size, self.tokens_per_rank
        )
        sequence = torch.arange(batch, device=q.device)[:, None]
        for cache, new in ((self.k, k), (self.v, v)):
            heads = all_gather_rows(new.contiguous()[None])[:: self.replicas]
            cache[layer][sequence, cache_position] = heads.movedim(0, 2).flatten(2, 3)
        if tokens > 1:  # prefill: the cache is empty
            heads = (each.transpose(1, 2) for each in (q, k, v))
            out = scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2)
        lens = self.kv_offset + 1
        out, _ = sp_decode_attn(
            q.contiguous(), self.k[layer], self.v[layer], lens, self.ctx, interleave=1,
            shard_output=True,
        )  # fmt: skip
        return out


class Server:
    """A parallelized model, with its cache and current tokens."""

    def __init__(
        self, model: Llama, collectives: TensorParallel, batch: int, max_tokens: int,
        shards_tokens: bool,
    ) -> None:  # fmt: skip
        self.model, config = model, model.config
        dtype = model.lm_head.weight.dtype
        self.cos_sin = _set_cos_sin_cache(model.model.rotary_emb.inv_freq, max_tokens)
        self.cache: Any
        if shards_tokens:
            self.cache = ShardedCache(config, batch, max_tokens, dtype, collectives.device)
        else:
            self.cache = KV_Cache(
                config.num_hidden_layers, batch, max_tokens, config.num_key_value_heads,
                config.head_dim, dtype, collectives.num_ranks,
            )  # fmt: skip
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=collectives.device)

    def step(self) -> None:
        """Replace ``token`` by the next token of each sequence."""
        self.token.copy_(self.next_token(self.token))

    @torch.no_grad()
    def next_token(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the most likely token after each sequence of ids [batch, tokens], [batch, 1]."""
        decoder, tokens = self.model.model, ids.shape[1]
        offset = self.cache.kv_offset[:, None]
        positions = (offset + torch.arange(tokens, device=ids.device)).long()
        x = decoder.embed_tokens(ids)
        for number, block in enumerate(decoder.layers):
            h = block.input_layernorm(x)
            x = x + block.self_attn.dist_triton_AR_fwd(
                h, positions, self.cos_sin, self.cache, number
            )
            x = x + block.mlp.dist_triton_AR_fwd(block.post_attention_layernorm(x))
        self.cache.inc_offset(tokens)
        return self.model.lm_head(decoder.norm(x[:, -1:])).argmax(-1)


def on_one_rank(model: Llama, ids: torch.Tensor, tokens: int) -> torch.Tensor:
    """Decode without a cache, from whole sequences. Return [batch, tokens]."""
    with torch.no_grad():
        for _ in range(tokens):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return ids[:, -tokens:]


def quantise(module: torch.nn.Module, recipe: str) -> None:
    """Give the linear layers in ``module``, except a router, fp8 weights with scales."""
    for name, child in module.named_children():
        if not isinstance(child, torch.nn.Linear) or name == "gate":
            quantise(child, recipe)
            continue
        weight = child.weight.detach()
        (N, K), is_block = weight.shape, recipe == "block"
        block_rows, block_columns = (128, 128) if is_block else (1, K)
        tiles = pad(weight, (0, -K % block_columns, 0, -N % block_rows))
        tiles = tiles.unflatten(1, (-1, block_columns)).unflatten(0, (-1, block_rows))
        scale = tiles.abs().amax((1, 3)).clamp(min=1e-12) / 448
        quotients = (tiles / scale[:, None, :, None]).flatten(2).flatten(0, 1)[:N, :K]
        child.weight = torch.nn.Parameter(quotients.to(torch.float8_e4m3fn), requires_grad=False)
        scale_name = "weight_scale_inv" if is_block else "weight_scale"
        setattr(child, scale_name, torch.nn.Parameter(scale, requires_grad=False))


def quantise_layers(model: Llama, recipe: str) -> None:
    """Quantise attention and feed-forward layers.

    Attention whose heads on a rank are not whole blocks of 128 rows is quantised by row.
    """
    config = model.config
    rows = config.num_key_value_heads * config.head_dim // dist.get_world_size()
    for block in model.model.layers:
        quantise(block.self_attn, "row" if rows % 128 else recipe)
        quantise(block.mlp, recipe)


def largest_logit_gap(served_tokens: torch.Tensor, stock: Llama, prompts: torch.Tensor) -> float:
    """Return the largest difference between the best logit of a step and the served token's logit.

    The unit is the standard deviation of the logits.
    """
    with torch.no_grad():
        logits = stock(torch.cat([prompts, served_tokens[:, :-1]], 1)).logits[
            :, prompts.shape[1] - 1 :
        ]
    gap = logits.amax(-1, keepdim=True) - logits.gather(-1, served_tokens[..., None])
    return float(gap.max() / logits.std())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", default="tiny", help="tiny, tiny-moe, or a folder with a config.json"
    )
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument(
        "--prompt", type=int, default=32 if is_cuda() else 5, help="tokens of a prompt"
    )
    parser.add_argument(
        "--tokens", type=int, default=32 if is_cuda() else 4, help="tokens to decode"
    )
    parser.add_argument(
        "--fp8", nargs="?", const="row", choices=("row", "block"), help="scales of fp8 weights"
    )
    parser.add_argument("--kv-shards", action="store_true", help="shard the cache by tokens")
    args = parser.parse_args()

    initialize_distributed()
    seed_everything(0)
    model = init_model_cpu(args.model, torch.float32)
    prompts = torch.randint(model.config.vocab_size, (args.batch, args.prompt))
    stock = copy.deepcopy(model)
    if args.fp8:
        quantise_layers(model, args.fp8)

    with parallelize(model, max_M=args.batch * args.prompt) as collectives:
        server = Server(
            model, collectives, args.batch, args.prompt + args.tokens + 1, args.kv_shards
        )
        server.token.copy_(server.next_token(prompts.to(collectives.device)))
        tokens = [server.token.clone()]
        server.step()  # tune the shapes of a step before the capture
        tokens.append(server.token.clone())
        state = server.token.clone(), server.cache.kv_offset.clone()
        step = capture_graph(server.step)  # runs the step; the next lines restore the state
        server.token.copy_(state[0])
        server.cache.kv_offset.copy_(state[1])
        while len(tokens) < args.tokens:
            step()
            tokens.append(server.token.clone())
        served_tokens = torch.cat(tokens, 1).cpu()
        del step  # delete the graph before the contexts that it uses
        if args.kv_shards:
            server.cache.ctx.finalize()
    if args.fp8:
        gap = largest_logit_gap(served_tokens, stock, prompts)
        assert gap < 0.5, gap
        as_expected = f"logits at most {gap:.2f} standard deviations below the best"
    else:
        golden = on_one_rank(stock, prompts, args.tokens)
        assert torch.equal(served_tokens, golden), f"{served_tokens}, on one rank {golden}"
        as_expected = "as on one rank"
    dist_print(
        f"{args.tokens} tokens of {args.batch} sequences, {as_expected}: {served_tokens.tolist()}"
    )
    assert dist.get_world_size() == collectives.num_ranks
    finalize_distributed()


if __name__ == "__main__":
    main()
