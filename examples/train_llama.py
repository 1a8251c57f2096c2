"""Train a tensor-parallel Llama: bash scripts/launch.sh examples/train_llama.py

A small model with random weights learns to repeat a few sequences. ``parallelize`` shards the
attention and feed-forward layers over tensor-parallel ranks, and the tokens over the same ranks.
With ``--fsdp N``, N replicas train on different sequences, and FSDP2 shards all parameters over the
replicas. The same model is also trained on one rank, and the losses are compared.

With ``--sp N``, the layers are not sharded, but the tokens of each sequence are spread over all
ranks. ``SP_Attn`` exchanges tokens for heads within groups of N ranks, and gathers k and v across
groups. On GPUs, also pass ``--dtype bfloat16``, because attention libraries do not support fp32.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from triton_dist.layers.nvidia import SP_Attn, clip_grad_norm_, parallelize, sum_gradients
from triton_dist.layers.nvidia.functional import shard_rows
from triton_dist.models.llama import Llama
from triton_dist.models.utils import init_model_cpu, seed_everything
from triton_dist.utils import (
    dist_print,
    finalize_distributed,
    initialize_distributed,
    is_cuda,
)

MAX_NORM = 1.0


def make_optimiser(model: Llama) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_sequence_parallel(args: argparse.Namespace, dtype: torch.dtype, tolerance: float) -> None:
    """Train with ``SP_Attn``: each rank has some tokens of each sequence, and all weights."""
    world, device_type = dist.get_world_size(), "cuda" if is_cuda() else "cpu"
    mesh = init_device_mesh(device_type, (world // args.sp, args.sp))
    model, reference_model = (init_model_cpu(args.model, dtype) for _ in range(2))
    config, length = model.config, -(-args.tokens // (2 * world)) * 2 * world
    attention = SP_Attn(
        mesh, args.batch * length // world, config.num_attention_heads,
        config.num_key_value_heads, config.head_dim, dtype,
    )  # fmt: skip
    own_tokens = attention.tokens(length)
    model.to(own_tokens.device)
    reference_model.to(own_tokens.device)
    for block in model.model.layers:
        block.self_attn.sp_attn = attention
    ids = torch.randint(config.vocab_size, (args.batch, length + 1)).to(own_tokens.device)
    inputs, targets = ids[:, :-1], ids[:, 1:]
    optimiser, reference_optimiser = make_optimiser(model), make_optimiser(reference_model)
    for step in range(args.steps):
        optimiser.zero_grad()
        logits = model(inputs[:, own_tokens], position_ids=own_tokens).logits.flatten(0, 1).float()
        own_loss = (
            cross_entropy(logits, targets[:, own_tokens].flatten(), reduction="sum")
            / targets.numel()
        )
        own_loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimiser.step()
        loss = own_loss.detach().clone()
        dist.all_reduce(loss)

        reference_optimiser.zero_grad()
        expected = cross_entropy(
            reference_model(inputs).logits.flatten(0, 1).float(), targets.flatten()
        )
        expected.backward()
        reference_optimiser.step()
        close = abs(loss.item() - expected.item()) <= tolerance * abs(expected.item())
        assert close, f"step {step}: loss {loss.item()}, on one rank {expected.item()}"
        dist_print(f"step {step}: loss {loss.item():.4f}, on one rank {expected.item():.4f}")
    attention.finalize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", default="tiny", help="tiny, tiny-moe, or a folder with a config.json"
    )
    parser.add_argument("--steps", type=int, default=20 if is_cuda() else 4)
    parser.add_argument("--batch", type=int, default=2, help="sequences of each replica")
    parser.add_argument(
        "--tokens", type=int, default=64 if is_cuda() else 9, help="tokens of a sequence"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--fsdp", type=int, default=1, help="number of replicas")
    parser.add_argument("--sp", type=int, default=0, help="sequence parallelism: ranks per group")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    tolerance = 1e-4 if dtype is torch.float32 else 3e-2

    initialize_distributed()
    seed_everything(0)
    if args.sp:
        train_sequence_parallel(args, dtype, tolerance)
        finalize_distributed()
        return
    sizes = (args.fsdp, dist.get_world_size() // args.fsdp)
    device_type = "cuda" if is_cuda() else "cpu"
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=("fsdp", "tp"))
    model, reference_model = (init_model_cpu(args.model, dtype) for _ in range(2))
    rows = args.batch * args.tokens
    ids = torch.randint(model.config.vocab_size, (args.fsdp * args.batch, args.tokens + 1))

    options = {"max_M": rows, "sequence_parallel": True, "keep_gathered": True}
    with parallelize(model, mesh["tp"], **options) as collectives:
        if args.fsdp > 1:
            for block in model.model.layers:
                fully_shard(block, mesh=mesh["fsdp"])
            fully_shard(model, mesh=mesh["fsdp"])
        reference_model.to(collectives.device)
        ids = ids.to(collectives.device)
        all_inputs, all_targets = ids[:, :-1], ids[:, 1:]
        replica = mesh["fsdp"].get_local_rank()
        inputs = all_inputs.chunk(args.fsdp)[replica]
        shard = (collectives.rank, collectives.num_ranks)
        # The rows of the last rank may end with padding, which the loss ignores.
        own_rows = shard_rows(torch.arange(1, rows + 1, device=collectives.device), *shard)
        own_rows = own_rows[own_rows > 0] - 1
        own_targets = all_targets.chunk(args.fsdp)[replica].flatten()[own_rows]
        optimiser, reference_optimiser = make_optimiser(model), make_optimiser(reference_model)
        for step in range(args.steps):
            optimiser.zero_grad()
            # This rank's share of the replica's mean loss: the sum over tensor-parallel ranks is
            # the mean. FSDP2 averages the gradients over the replicas.
            logits = model(inputs, shard).logits.flatten(0, -2).float()
            own_loss = cross_entropy(logits, own_targets, reduction="sum") / rows
            own_loss.backward()
            sum_gradients(model)
            norm = clip_grad_norm_(model, MAX_NORM)
            optimiser.step()
            loss = own_loss.detach().clone()
            dist.all_reduce(loss)
            loss = loss.item() / args.fsdp

            reference_optimiser.zero_grad()
            logits = reference_model(all_inputs).logits.flatten(0, 1).float()
            expected = cross_entropy(logits, all_targets.flatten())
            expected.backward()
            golden_norm = torch.nn.utils.clip_grad_norm_(reference_model.parameters(), MAX_NORM)
            reference_optimiser.step()
            for name, value, golden in (("loss", loss, expected), ("norm", norm, golden_norm)):
                close = abs(float(value) - golden.item()) <= tolerance * abs(golden.item())
                assert close, f"step {step}: {name} {value}, on one rank {golden.item()}"
            dist_print(f"step {step}: loss {loss:.4f}, on one rank {expected.item():.4f}")
    finalize_distributed()


if __name__ == "__main__":
    main()
