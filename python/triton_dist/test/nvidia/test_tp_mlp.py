"""The tensor-parallel feed-forward layer on all ranks:
``bash scripts/launch.sh test_tp_mlp.py --check``.

The layer is built from a torch MLP with random weights and the sizes of a known model; nothing is
downloaded. ``check``: compare the results of layer and MLP. ``perf``: also time the layer in CUDA
graphs, with our ops and with torch's GEMMs and all-reduce. On CPU ranks, sizes are smaller.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

from triton_dist.layers.nvidia.tp_mlp import TP_MLP
from triton_dist.test import tp_layer
from triton_dist.test.tp_layer import CPU_SCALE, LayerCall, rows_of_rank
from triton_dist.utils import initialize_distributed, is_cuda


def get_args() -> argparse.Namespace:
    parser = tp_layer.make_parser(__doc__, "Qwen/Qwen3-32B")
    parser.add_argument("-M", "--M", type=int, default=4096, help="tokens over all ranks")
    parser.add_argument("--use_allreduce", action="store_true", help="only the all-reduce mode")
    tp_layer.add_ignored_options(parser, "--ag_gemm_persistent", "--gemm_rs_persistent")
    return parser.parse_args()


def main() -> None:
    args = get_args()
    group = initialize_distributed(args.seed)
    size = dist.get_world_size()
    M = max(1, (args.M if is_cuda() else args.M // CPU_SCALE) // size) * size
    block, config = tp_layer.random_block(args)
    x = tp_layer.random_input(args, M, config.hidden_size)
    layer = TP_MLP(rank=dist.get_rank(), world_size=size, group=group)
    layer._init_parameters(block.mlp, verbose=True)
    layer._init_ctx(max_M=M)
    with torch.no_grad():
        golden = block.mlp(x)
    own = rows_of_rank(x)
    gate, up = layer.torch_ag_gemm(own).chunk(2, -1)
    hidden = layer.act_fn(gate) * up

    layer_calls = {"torch": LayerCall(lambda: layer.torch_fwd(x), golden)}
    if not args.use_allreduce:
        own_golden = rows_of_rank(golden)
        gathered, scattered = torch.cat([gate, up], -1), layer.torch_gemm_rs(hidden)
        layer_calls |= {
            "sequence-parallel": LayerCall(lambda: layer.dist_triton_fwd(own), own_golden),
            "torch, first product": LayerCall(lambda: layer.torch_ag_gemm(own), gathered),
            "first product": LayerCall(lambda: layer.dist_triton_ag_gemm(own), gathered),
            "torch, last product": LayerCall(lambda: layer.torch_gemm_rs(hidden), scattered),
            "last product": LayerCall(lambda: layer.dist_triton_gemm_rs(hidden), scattered),
        }
    layer_calls["all-reduce"] = LayerCall(lambda: layer.dist_triton_AR_fwd(x), golden)
    shape = f"{M} tokens, {config.hidden_size} x {config.intermediate_size}"
    tp_layer.run(args, f"{args.model}: {shape} on {size} ranks", layer_calls, layer)


if __name__ == "__main__":
    main()
