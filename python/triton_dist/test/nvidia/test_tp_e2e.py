"""A tensor-parallel model on all ranks:
``bash scripts/launch.sh test_tp_e2e.py --bsz 8 --num_layers 2 --mode gemm_ar --check``.

The model has random weights and the sizes of the named model, or the weights of a folder; nothing
is downloaded. ``check``: compare the logits with the logits of the model on one rank. A prefill
compares them after the prompt's last token, a decode step after one further token. ``perf``: also
time a call in a CUDA graph, and the same call with torch's GEMMs and all-reduce. On CPU ranks,
sizes are reduced for the interpreter.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist

from triton_dist.models import AutoLLM, ModelConfig
from triton_dist.models.utils import init_model_cpu, seed_everything
from triton_dist.runtime.device import current_device
from triton_dist.test import tp_layer
from triton_dist.test.tp_layer import LayerCall, rows_of_rank
from triton_dist.test.utils import dtype_named
from triton_dist.utils import initialize_distributed

_CPU_BATCH, _CPU_TOKENS = 4, 4
_MODES = {"ag_rs": "triton_dist", "allreduce": "triton_dist_AR", "gemm_ar": "triton_dist_gemm_ar"}


def get_args() -> argparse.Namespace:
    parser = tp_layer.make_parser(__doc__, "Qwen/Qwen3-32B", bsz=128)
    parser.add_argument("--num_layers", type=int, help="number of layers; default: all")
    tp_layer.add_mode_options(parser)
    return parser.parse_args()


def main() -> None:
    args = get_args()
    group = initialize_distributed(args.seed)
    seed_everything(args.seed)
    size, device = dist.get_world_size(), current_device().torch_device
    batch, prompt = tp_layer.batch_and_tokens(args, _CPU_BATCH, _CPU_TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        name = tp_layer.reduced_model(args.model, args.num_layers, folder)
        config = ModelConfig(name, prompt + 4, dtype_named(args.dtype), True, dist.get_rank(), size)
        stock = init_model_cpu(name, config.dtype).to(device)
        model = AutoLLM.from_pretrained(config, group)
    ids = torch.randint(0, model.config.vocab_size, (batch, prompt + 1), device=device)
    positions = torch.arange(prompt + 1, device=device).expand(batch, -1)
    with torch.no_grad():
        logits = stock(input_ids=ids, position_ids=positions).logits.float()
    del stock
    is_decoding = args.run_type == "decode"
    begin, end = (prompt, prompt + 1) if is_decoding else (0, prompt)
    golden = logits[:, end - 1 : end]
    largest = golden.abs().max()  # errors accumulate over layers, so compare relative to this
    cache = model.new_cache(batch)
    if is_decoding:
        model.inference(ids[:, :prompt], positions[:, :prompt], cache)
        cache.inc_offset(prompt)
    inputs, input_positions = ids[:, begin:end], positions[:, begin:end]

    def layer_call(mode: str) -> LayerCall:
        sequence_parallel = mode == "triton_dist"
        own = rows_of_rank(inputs) if sequence_parallel else inputs

        def call() -> torch.Tensor:
            model.set_fwd(mode)
            return torch.div(model.inference(own, input_positions, cache), largest)

        return LayerCall(call, (rows_of_rank(golden) if sequence_parallel else golden) / largest)

    model.init_triton_dist_ctx(max_M=batch * (end - begin))
    layer_calls = {"torch": layer_call("torch"), args.mode: layer_call(_MODES[args.mode])}
    shape = f"{args.run_type} of {batch} x {prompt} tokens, {model.num_layers} layers"
    tp_layer.run(args, f"{args.model}: {shape} on {size} ranks", layer_calls, model)


if __name__ == "__main__":
    main()
