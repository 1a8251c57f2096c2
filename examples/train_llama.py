"""Train a tensor-parallel Llama: bash scripts/launch.sh examples/train_llama.py

A small model with random weights learns to repeat a few sequences. One call of ``parallelize``
shards the weights of attention and feed-forward layers over the ranks; tokens are sharded too. An
equal model is trained on one rank, and the losses are compared.
"""

from __future__ import annotations

import argparse

import torch
from torch.nn.functional import cross_entropy

from triton_dist.layers.nvidia import parallelize, sum_gradients
from triton_dist.models.llama import Llama
from triton_dist.models.utils import init_model_cpu, seed_everything
from triton_dist.utils import (
    dist_print,
    finalize_distributed,
    initialize_distributed,
    is_cuda,
)


def optimiser_of(model: Llama) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="tiny, tiny-moe, or a folder's config.json")
    parser.add_argument("--steps", type=int, default=20 if is_cuda() else 4)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument(
        "--tokens", type=int, default=64 if is_cuda() else 8, help="tokens of a sequence"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    tolerance = 1e-4 if dtype is torch.float32 else 3e-2

    initialize_distributed()
    seed_everything(0)
    model, whole = (init_model_cpu(args.model, dtype) for _ in range(2))
    rows = args.batch * args.tokens
    ids = torch.randint(model.config.vocab_size, (args.batch, args.tokens + 1))

    with parallelize(model, max_M=rows, sequence_parallel=True, keep_gathered=True) as ranks:
        whole.to(ranks.device)
        ids = ids.to(ranks.device)
        inputs, targets = ids[:, :-1], ids[:, 1:].flatten()
        shard = (ranks.rank, ranks.num_ranks)
        own_targets = targets.chunk(ranks.num_ranks)[ranks.rank]
        optimiser, alone = optimiser_of(model), optimiser_of(whole)
        for step in range(args.steps):
            optimiser.zero_grad()
            # Logits of this rank's tokens. The loss is the sum over ranks, divided by all tokens.
            logits = model(inputs, shard).logits.float()
            own = cross_entropy(logits, own_targets, reduction="sum") / rows
            own.backward()
            sum_gradients(model)
            optimiser.step()
            loss = ranks.all_reduce(own.detach().clone()).item()

            alone.zero_grad()
            expected = cross_entropy(whole(inputs).logits.flatten(0, 1).float(), targets)
            expected.backward()
            alone.step()
            close = abs(loss - expected.item()) <= tolerance * abs(expected.item())
            assert close, f"step {step}: loss {loss}, on one rank {expected.item()}"
            dist_print(f"step {step}: loss {loss:.4f}, on one rank {expected.item():.4f}")
    finalize_distributed()


if __name__ == "__main__":
    main()
