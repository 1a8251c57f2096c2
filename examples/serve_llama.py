"""Serve a tensor-parallel Llama: bash scripts/launch.sh examples/serve_llama.py

One call processes all prompts (prefill). Then each step decodes one token of every sequence. Keys
and values are in a cache of fixed size, so the shapes of a step do not change, and on GPUs it is
captured in a CUDA graph and replayed. The tokens are compared with the model's on one rank.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

from triton_dist.layers.nvidia import TensorParallel, parallelize
from triton_dist.layers.nvidia.tp_attn import _set_cos_sin_cache
from triton_dist.models.kv_cache import KV_Cache
from triton_dist.models.llama import Llama
from triton_dist.models.utils import init_model_cpu, seed_everything
from triton_dist.testing.timing import captured
from triton_dist.utils import (
    dist_print,
    finalize_distributed,
    initialize_distributed,
    is_cuda,
)


class Server:
    """A parallelized model, with its cache and current tokens."""

    def __init__(self, model: Llama, ranks: TensorParallel, batch: int, most: int) -> None:
        self.model, config = model, model.config
        dtype = model.lm_head.weight.dtype
        self.cos_sin = _set_cos_sin_cache(model.model.rotary_emb.inv_freq, most)
        self.cache = KV_Cache(
            config.num_hidden_layers, batch, most, config.num_key_value_heads, config.head_dim,
            dtype, ranks.num_ranks,
        )  # fmt: skip
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=ranks.device)

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="tiny, tiny-moe, or a folder's config.json")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument(
        "--prompt", type=int, default=32 if is_cuda() else 5, help="tokens of a prompt"
    )
    parser.add_argument(
        "--tokens", type=int, default=32 if is_cuda() else 4, help="tokens to decode"
    )
    args = parser.parse_args()

    initialize_distributed()
    seed_everything(0)
    model = init_model_cpu(args.model, torch.float32)
    prompts = torch.randint(model.config.vocab_size, (args.batch, args.prompt))
    golden = on_one_rank(model, prompts, args.tokens)

    with parallelize(model, max_M=args.batch * args.prompt) as ranks:
        server = Server(model, ranks, args.batch, args.prompt + args.tokens + 1)
        server.token.copy_(server.next_token(prompts.to(ranks.device)))
        tokens = [server.token.clone()]
        server.step()  # tune the shapes of a step before the capture
        tokens.append(server.token.clone())
        state = server.token.clone(), server.cache.kv_offset.clone()
        step = captured(server.step)  # runs the step; the next lines restore the state
        server.token.copy_(state[0])
        server.cache.kv_offset.copy_(state[1])
        while len(tokens) < args.tokens:
            step()
            tokens.append(server.token.clone())
        found = torch.cat(tokens, 1).cpu()
        del step  # delete the graph before the contexts that it uses
        assert torch.equal(found, golden), f"{found}, on one rank {golden}"
    dist_print(f"{args.tokens} tokens of {args.batch} sequences, as on one rank: {found.tolist()}")
    assert dist.get_world_size() == ranks.num_ranks
    finalize_distributed()


if __name__ == "__main__":
    main()
