"""The tensor-parallel mixture-of-experts layer on all ranks:
``bash scripts/launch.sh test_tp_moe.py --bsz 32 --seq_len 128 --check``.

The layer is built from a block with random weights and the model's sizes; nothing is downloaded.
``check``: compare the layer's results with the block's. ``perf``: also time the layer, and torch's
products of all tokens with all experts. On CPU ranks, sizes are reduced for the interpreter.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

from triton_dist.errors import InvalidArgument
from triton_dist.layers.nvidia.tp_moe import TP_MoE
from triton_dist.test import tp_layer
from triton_dist.test.tp_layer import LayerCall, rows_of_rank
from triton_dist.utils import initialize_distributed

_CPU_BATCH, _CPU_TOKENS = 4, 4


def get_args() -> argparse.Namespace:
    parser = tp_layer.make_parser(__doc__, "Qwen/Qwen3-30B-A3B", bsz=32)
    tp_layer.add_ignored_options(parser, "--autotune")
    return parser.parse_args()


def main() -> None:
    args = get_args()
    group = initialize_distributed(args.seed)
    size = dist.get_world_size()
    batch, tokens = tp_layer.batch_and_tokens(args, _CPU_BATCH, _CPU_TOKENS)
    block, config = tp_layer.random_block(args)
    if not config.num_experts:
        raise InvalidArgument("test_tp_moe", "model", args.model, "a model with experts")
    x = tp_layer.random_input(args, batch, tokens, config.hidden_size)
    layer = TP_MoE(rank=dist.get_rank(), world_size=size, group=group)
    layer._init_parameters(block.mlp, verbose=True)
    layer._init_ctx(M=batch * tokens)
    own = rows_of_rank(x)
    with torch.no_grad():
        golden = block.mlp(x)[0]
    layer_calls = {
        "torch": LayerCall(lambda: layer.torch_fwd_no_loop(x), golden),
        "sequence-parallel": LayerCall(lambda: layer.dist_triton_fwd(own), rows_of_rank(golden)),
        "all-reduce": LayerCall(lambda: layer.dist_triton_AR_fwd(x), golden),
    }
    shape = f"{batch} x {tokens} tokens, {config.num_experts} experts of {config.hidden_size} x "
    shape += str(config.moe_intermediate_size)
    tp_layer.run(args, f"{args.model}: {shape} on {size} ranks", layer_calls, layer)


if __name__ == "__main__":
    main()
