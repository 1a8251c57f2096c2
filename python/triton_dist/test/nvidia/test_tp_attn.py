"""The tensor-parallel attention layer on all ranks:
``bash scripts/launch.sh test_tp_attn.py --run_type decode --mode gemm_ar --check``.

The layer is built from a block with random weights and the model's sizes; nothing is downloaded.
``check``: compare the layer's result of a prefill with the block's. A decode step, whose cache has
random values, is compared with the same layer on torch's GEMMs and all-reduce. ``perf``: also time
the calls in CUDA graphs. On CPU ranks, sizes are reduced for the interpreter.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

from triton_dist.layers.nvidia.tp_attn import TP_Attn, _set_cos_sin_cache
from triton_dist.models.kv_cache import KV_Cache
from triton_dist.models.llama import RotaryEmbedding
from triton_dist.runtime.device import current_device
from triton_dist.test import tp_layer
from triton_dist.test.tp_layer import LayerCall, rows_of_rank
from triton_dist.test.utils import dtype_named
from triton_dist.utils import initialize_distributed, is_cuda

_CPU_BATCH, _CPU_TOKENS = 4, 8
_FREE_POSITIONS = 128  # of the cache, after the prompt


def get_args() -> argparse.Namespace:
    parser = tp_layer.make_parser(__doc__, "Qwen/Qwen3-32B", bsz=128)
    tp_layer.add_mode_options(parser)
    tp_layer.add_ignored_options(parser, "--ag_gemm_persistent", "--gemm_rs_persistent")
    return parser.parse_args()


def main() -> None:
    args = get_args()
    group = initialize_distributed(args.seed)
    size, device = dist.get_world_size(), current_device().torch_device
    batch, prompt = tp_layer.batch_and_tokens(args, _CPU_BATCH, _CPU_TOKENS)
    is_decoding = args.run_type == "decode"
    first, tokens = (prompt, 1) if is_decoding else (0, prompt)
    block, config = tp_layer.random_block(args)
    layer = TP_Attn(rank=dist.get_rank(), world_size=size, group=group)
    layer._init_parameters(block.self_attn, verbose=True)
    layer._init_ctx(max_M=batch * tokens)

    with torch.device(device):
        rotary = RotaryEmbedding(config.head_dim, config.rope_theta)
    max_positions = prompt + (_FREE_POSITIONS if is_cuda() else 1)
    cos_sin = _set_cos_sin_cache(rotary.inv_freq, max_length=max_positions)
    heads, dtype = config.num_key_value_heads, dtype_named(args.dtype)
    cache = KV_Cache(1, batch, max_positions, heads, config.head_dim, dtype, size)
    if is_decoding:
        cache.rand_fill_kv_cache(prompt)
    cache.kv_offset.fill_(first)
    x = tp_layer.random_input(args, batch, tokens, config.hidden_size)
    positions = torch.arange(first, first + tokens, device=device)
    attention = (positions[None].expand(batch, -1), cos_sin, cache, 0)
    if is_decoding:
        golden = layer.torch_fwd(x, *attention)
    else:
        with torch.no_grad():
            golden = block.self_attn(x, rotary(positions, x.dtype))[0]

    layer_calls = {"torch": LayerCall(lambda: layer.torch_fwd(x, *attention), golden)}
    if args.mode == "ag_rs":
        own = rows_of_rank(x)
        call = LayerCall(lambda: layer.dist_triton_fwd(own, *attention), rows_of_rank(golden))
        layer_calls["sequence-parallel"] = call
    else:
        layer_calls["all-reduce"] = LayerCall(
            lambda: layer.dist_triton_AR_fwd(x, *attention), golden
        )
    shape = f"{args.run_type} of {batch} x {prompt} tokens, {config.num_attention_heads} heads"
    tp_layer.run(args, f"{args.model}: {shape} on {size} ranks", layer_calls, layer)


if __name__ == "__main__":
    main()
