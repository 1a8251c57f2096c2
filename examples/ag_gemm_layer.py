"""A tensor-parallel linear layer: bash scripts/launch.sh examples/ag_gemm_layer.py

Tokens and the weight's columns are sharded over the ranks. Each rank computes its columns for all
tokens, ``all_gather(x) @ weight``. Some shards are transferred while others are multiplied.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn

from triton_dist.kernels.common.libraries import all_gather_matmul
from triton_dist.kernels.nvidia import ag_gemm, create_ag_gemm_context
from triton_dist.test.utils import assert_allclose
from triton_dist.utils import (
    dist_print,
    finalize_distributed,
    initialize_distributed,
    is_cuda,
    rand_tensor,
)


class ColumnParallelLinear(nn.Module):
    """Map x [tokens / world size, inputs] to y [tokens, outputs / world size]."""

    def __init__(self, max_tokens: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        rank, world_size = dist.get_rank(), dist.get_world_size()
        device = "cuda" if is_cuda() else "cpu"
        weight = rand_tensor([outputs // world_size, inputs], dtype, device) * inputs**-0.5
        self.weight = nn.Parameter(weight, requires_grad=False)  # ag_gemm has no gradients
        self.context = create_ag_gemm_context(max_tokens, outputs, inputs, dtype, rank, world_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ag_gemm(x, self.weight.T, self.context)

    def close(self) -> None:
        """Free the symmetric memory. Collective."""
        self.context.finalize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    large = is_cuda()  # the interpreter computes about 1e7 multiply-adds per second
    parser.add_argument(
        "--tokens", type=int, default=4096 if large else 24, help="tokens of each rank"
    )
    parser.add_argument("--inputs", type=int, default=4096 if large else 64)
    parser.add_argument(
        "--outputs", type=int, default=8192 if large else 64, help="columns of all ranks"
    )
    args = parser.parse_args()

    initialize_distributed()
    world_size = dist.get_world_size()
    layer = ColumnParallelLinear(args.tokens * world_size, args.inputs, args.outputs, torch.float16)
    for step in range(3):
        tokens = args.tokens - step  # any number up to max_tokens / world_size
        x = rand_tensor([tokens, args.inputs], torch.float16, layer.weight.device)
        # To save time, only the first shape is tuned. Other shapes use the default config.
        y = layer(x) if step == 0 else ag_gemm(x, layer.weight.T, layer.context, autotune=False)
        assert_allclose(y, all_gather_matmul(x, layer.weight.T), rtol=1e-2, atol=1e-2)
        dist_print(f"step {step}: {tokens} tokens per rank -> y {tuple(y.shape)}")
    layer.close()
    finalize_distributed()


if __name__ == "__main__":
    main()
