"""Train with FSDP2, save, resume on another mesh, and load the weights into a model on one rank.

    bash scripts/launch.sh --nproc_per_node=4 examples/save_and_resume.py

Trains a small model on 2 replicas of 2 tensor-parallel ranks and saves it. Resumes on 4
tensor-parallel ranks without replicas. Loads the gathered weights into the stock model, the same
model without tensor parallelism.
"""

from __future__ import annotations

import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from triton_dist.errors import TritonDistWarning
from triton_dist.layers.nvidia import (
    TrainingState,
    clip_grad_norm_,
    gather_state_dict,
    parallelize,
    sum_gradients,
)
from triton_dist.models.llama import Llama
from triton_dist.models.utils import init_model_cpu, seed_everything
from triton_dist.utils import dist_print, finalize_distributed, initialize_distributed, is_cuda


def stock_model() -> Llama:
    return init_model_cpu("tiny", torch.float32, num_layers=1)


def step(model: Llama, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids[:, :-1]).logits
    loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    sum_gradients(model)
    clip_grad_norm_(model, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def main() -> None:
    initialize_distributed()
    seed_everything(0)  # all ranks draw the same sequences
    device = "cuda" if is_cuda() else "cpu"
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("fsdp", "tp"))
    sequences = torch.randint(64, (2, 9), device=device)
    batch = sequences.chunk(2)[mesh["fsdp"].get_local_rank()]  # different for each replica

    # Train: parallelize first, then fully_shard, then the optimiser.
    model = stock_model()
    tensor_parallel = parallelize(model, mesh["tp"], max_M=16)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh["fsdp"])
    fully_shard(model, mesh=mesh["fsdp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        step(model, optimizer, batch)

    # Save. All ranks write their shards to one folder.
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    dcp.save({"app": TrainingState(model, optimizer)}, checkpoint_id=folders[0])
    weights = gather_state_dict(model)
    golden = step(model, optimizer, sequences)
    tensor_parallel.finalize()

    # Resume on 4 tensor-parallel ranks. Each key-value head is stored on two ranks.
    warnings.simplefilter("ignore", TritonDistWarning)
    model = stock_model()
    tensor_parallel = parallelize(model, max_M=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dcp.load({"app": TrainingState(model, optimizer)}, checkpoint_id=folders[0])
    torch.testing.assert_close(step(model, optimizer, sequences), golden, rtol=1e-4, atol=1e-4)
    tensor_parallel.finalize()

    # Serve: the gathered weights have the names and shapes of the stock model.
    stock_model().load_state_dict(weights)
    dist_print("the resumed loss is equal; the stock model has", len(weights), "weights")
    finalize_distributed()


if __name__ == "__main__":
    main()
