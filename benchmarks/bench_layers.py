"""Compare our tensor-parallel layers with implementations by torch, at sizes of real models.

    bash scripts/launch.sh benchmarks/bench_layers.py --tokens 4096,1,16,64,128 --json layers.json
    bash scripts/launch.sh benchmarks/bench_layers.py --models tiny --tokens 16 --baselines nccl

The layers are the feed-forward and the attention layer of a block with random weights. With 1024
tokens or more they are sequence-parallel (one sequence, as in prefill and training). With fewer
tokens they use an all-reduce (one token of each sequence, as in decoding). The pass ``forward`` is
timed in a CUDA graph. The pass ``both`` is forward and backward, with the gradients of x and of all
weights. It is not captured, and is measured with 1024 tokens or more.

``ours_compiled`` is our layer under ``torch.compile(fullgraph=True)``, for a comparison with
compiled baselines: compilation fuses the operations between the GEMMs into one kernel.

Baselines: ``nccl``: our layer on NCCL collectives and cuBLAS, in sequence, as in Megatron;
``async_tp``: functional collectives, compiled with torch's async tensor parallelism; ``dtensor``:
the original module under ``torch.distributed.tensor.parallel``. A baseline that fails is reported
with its error. Results are first compared with ``nccl``. All are timed interleaved, with a cold
cache; times are medians of the slowest rank.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from overlap.results import environment, software
from overlap.shapes import parse_numbers

from triton_dist.layers.nvidia import TP_MLP, Collectives, TensorParallel, TP_Attn
from triton_dist.layers.nvidia.functional import shard_rows
from triton_dist.models.llama import Block, LlamaConfig, RotaryEmbedding
from triton_dist.models.utils import scaled_down
from triton_dist.runtime.device import current_device
from triton_dist.test.utils import TIMES_NOT_MEANINGFUL, dtype_named
from triton_dist.testing.timing import capture_graph, time_interleaved
from triton_dist.utils import dist_print, finalize_distributed, initialize_distributed, is_cuda

MODELS = "meta-llama/Meta-Llama-3-8B,meta-llama/Meta-Llama-3-70B"
BASELINES = ("nccl", "async_tp", "dtensor")
OURS, COMPILED = "ours", "ours_compiled"
MIN_SEQUENCE_PARALLEL_TOKENS = 1024
"""Layers are sequence-parallel with at least this number of tokens."""
_CPU_SCALE = 64
_FUSED = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
"""torch's overlapped operators. If compilation does not use them, ``async_tp`` equals ``nccl``."""
Call = Callable[[torch.Tensor], torch.Tensor]


def get_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = lambda text: text.split(",")  # noqa: E731
    parser.add_argument(
        "--models", type=names, default=names(MODELS), help="names or folders, see LlamaConfig.of"
    )
    parser.add_argument("--layers", type=names, default=["mlp", "attention"])
    parser.add_argument("--tokens", type=parse_numbers, default=[4096, 1, 16, 64, 128])
    parser.add_argument("--baselines", type=names, default=list(BASELINES))
    parser.add_argument("--passes", type=names, default=["forward", "both"])
    parser.add_argument("--dtype", default="bfloat16", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, help="start no point after this time")
    parser.add_argument("--json", type=Path, help="written at each point")
    return parser.parse_args()


class Candidates:
    """All implementations of one layer of a model, for one number of tokens."""

    def __init__(self, args: argparse.Namespace, model: str, layer: str, tokens: int) -> None:
        config = LlamaConfig.of(model)
        config = config if is_cuda() else scaled_down(config, _CPU_SCALE)
        self.is_sequence_parallel = tokens >= MIN_SEQUENCE_PARALLEL_TOKENS
        self.is_mlp = layer == "mlp"
        self.size, self.rank = dist.get_world_size(), dist.get_rank()
        device, dtype = current_device().torch_device, dtype_named(args.dtype)
        torch.manual_seed(0)
        with torch.device(device):
            block = Block(config, 0).to(dtype)
            self.stock = block.mlp if self.is_mlp else block.self_attn
            rotary = RotaryEmbedding(config.head_dim, config.rope_theta)
            self.tokens = tokens if self.is_sequence_parallel else 1  # of a sequence
            self.rotary = rotary(torch.arange(self.tokens), dtype)
            whole = torch.randn(tokens, config.hidden_size).to(dtype)
        self.x = shard_rows(whole, self.rank, self.size) if self.is_sequence_parallel else whole
        self.collectives = TensorParallel(tokens)
        self.plain = self._layer(Collectives())

    def _layer(self, collectives: Collectives) -> TP_MLP | TP_Attn:
        kind = TP_MLP if self.is_mlp else TP_Attn
        layer = kind(
            collectives=collectives, sequence_parallel=self.is_sequence_parallel, keep_gathered=True
        )
        layer._init_parameters(self.stock)
        return layer

    def _call(self, layer: TP_MLP | TP_Attn) -> Call:
        if self.is_mlp:
            return layer
        return lambda x: layer(x, self.rotary)[0]

    def make(self, name: str) -> tuple[Call, list[torch.Tensor]]:
        """Return implementation ``name`` as a function of x, and its parameters.

        Raise an exception if torch does not support the implementation here.
        """
        if name == "dtensor":
            return self._dtensor()
        layer = self._layer(self.collectives) if name in (OURS, COMPILED) else self.plain
        call = self._call(layer) if name != "async_tp" else self._async_tp(self.plain)
        if name == COMPILED:
            call = torch.compile(call, fullgraph=True)
        return call, list(layer.parameters())

    @property
    def names(self) -> list[str]:
        """Return the names of our implementations."""
        return [OURS, COMPILED] if self.is_sequence_parallel and is_cuda() else [OURS]

    def _async_tp(self, layer: TP_MLP | TP_Attn) -> Call:
        import torch._inductor.config
        from torch.distributed import _functional_collectives as collectives
        from torch.distributed import _symmetric_memory as symmetric_memory

        if not self.is_sequence_parallel:
            raise RuntimeError("async tensor parallelism is for the sequence-parallel mode")
        if not is_cuda():
            raise RuntimeError("needs GPUs")
        group = dist.group.WORLD
        symmetric_memory.enable_symm_mem_for_group(group.group_name)  # else nothing is fused
        names = ("gate_up_proj", "down_proj") if self.is_mlp else ("wqkv", "wo")
        cos, sin = (each.unsqueeze(-2) for each in self.rotary)

        def between(rows: torch.Tensor) -> torch.Tensor:
            """Return the operations between the two GEMMs: activation or attention."""
            if self.is_mlp:
                return layer._activate(rows)
            attend = layer._attend_over_cache
            return layer._attention_of_rows(rows, self.tokens, cos, sin, attend)

        def forward(x: torch.Tensor) -> torch.Tensor:
            first, last = (getattr(layer, name) for name in names)
            rows = collectives.all_gather_tensor_autograd(x, 0, group)
            product = between(rows @ first.T) @ last.T
            return collectives.reduce_scatter_tensor_autograd(product, "sum", 0, group)

        torch._inductor.config._micro_pipeline_tp = True
        compiled = torch.compile(forward, fullgraph=True)
        with torch.no_grad():
            missing = [name for name in _FUSED if name not in operators(compiled, self.x)]
        if missing:
            raise RuntimeError(f"inductor fused no {' and no '.join(missing)}")
        return compiled

    def _dtensor(self) -> tuple[Call, list[torch.Tensor]]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor import parallel as tp

        module = copy.deepcopy(self.stock)
        mesh = init_device_mesh(self.x.device.type, (self.size,))
        shard_placement = Shard(0) if self.is_mlp else Shard(1)
        token_placement = shard_placement if self.is_sequence_parallel else Replicate()
        columns = ("gate_proj", "up_proj") if self.is_mlp else ("q_proj", "k_proj", "v_proj")
        plan: dict[str, Any] = {name: tp.ColwiseParallel() for name in columns}
        last = "down_proj" if self.is_mlp else "o_proj"
        plan[last] = tp.RowwiseParallel(output_layouts=token_placement)
        if self.is_mlp:
            input_placement = tp.PrepareModuleInput(
                input_layouts=(token_placement,), desired_input_layouts=(Replicate(),)
            )
        else:
            input_placement = tp.PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": token_placement},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            )
        tp.parallelize_module(module, mesh, plan)
        tp.parallelize_module(module, mesh, input_placement)
        parameters = list(module.parameters())
        if self.is_mlp:
            return module, parameters

        def call(x: torch.Tensor) -> torch.Tensor:
            # One sequence, or one token of each.
            rows = x[None] if self.is_sequence_parallel else x[:, None]
            attention_output = module(hidden_states=rows, position_embeddings=self.rotary)[0]
            return attention_output.reshape(x.shape)

        return call, parameters


def wait_for(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for the collective that computes ``tensor``. DTensor itself waits only when the tensor
    is used."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor

    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def operators(call: Call, x: torch.Tensor) -> str:
    """Return the names of the operators that a call runs."""
    call(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call(x)
    return " ".join(event.key for event in profile.key_averages())


def make_forward(call: Call, x: torch.Tensor, _: list[torch.Tensor]) -> Callable[[], Any]:
    return torch.no_grad()(lambda: wait_for(call(x)))


def make_forward_backward(
    call: Call, x: torch.Tensor, parameters: list[torch.Tensor]
) -> Callable[[], Any]:
    leaf, grad = x.clone().requires_grad_(), torch.ones_like(x)

    def run() -> Any:
        result = call(leaf)
        wait_for(result)  # the returned tensor has no gradient
        return [*map(wait_for, torch.autograd.grad(result, [leaf, *parameters], grad))]

    return run


def has_failed_anywhere(failures: dict[str, str], name: str, error: str | None) -> bool:
    """Record the first rank's ``error``, if any, in ``failures`` on all ranks. Collective."""
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, error)
    first = next((each for each in found if each is not None), None)
    if first is not None:
        failures[name] = first
    return first is not None


def attempt(function: Callable[[], Any]) -> tuple[Any, str | None]:
    try:
        return function(), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}".splitlines()[0][:200]


def measure_point(
    args: argparse.Namespace, model: str, layer: str, tokens: int
) -> Iterator[dict[str, Any]]:
    """Yield, for each pass, the times and the errors of failed candidates. Collective."""
    candidates = Candidates(args, model, layer, tokens)
    failures: dict[str, str] = {}
    ready: dict[str, tuple[Call, list[torch.Tensor]]] = {}
    expected = torch.no_grad()(candidates._call(candidates.plain))(candidates.x).float()
    for name in (*candidates.names, *args.baselines):
        candidate, error = attempt(lambda name=name: candidates.make(name))
        if error is None:
            result, error = attempt(make_forward(candidate[0], candidates.x, []))
        if error is None:
            ratio = (result.float() - expected).abs().max() / expected.abs().max()
            error = f"wrong by {ratio:.3g} of the largest" if not ratio < 3e-2 else None
        if not has_failed_anywhere(failures, name, error):
            ready[name] = candidate
    for pass_name in args.passes:
        if pass_name == "both" and not candidates.is_sequence_parallel:
            continue
        make = make_forward if pass_name == "forward" else make_forward_backward
        calls, missing = {}, dict(failures)
        for name, (call, parameters) in ready.items():
            run = make(call, candidates.x, parameters)
            _, error = attempt(run)
            if error is None and pass_name == "forward":
                run, error = attempt(lambda run=run: capture_graph(run))
            if not has_failed_anywhere(missing, name, error):
                calls[name] = run
        samples = time_interleaved(calls, rounds=args.rounds, warmup_rounds=3 if is_cuda() else 0)
        calls.clear()
        yield {
            "model": model, "layer": layer, "tokens": tokens, "pass": pass_name,
            "mode": "sequence-parallel" if candidates.is_sequence_parallel else "all-reduce",
            "ms": {name: round(each.median, 4) for name, each in samples.items()},
            "samples": {name: each.milliseconds for name, each in samples.items()},
            "errors": missing,
        }  # fmt: skip
    candidates.collectives.finalize()


def ratio(found: dict[str, Any]) -> float | None:
    """Return the ratio of the best baseline's time to our best time."""
    ours = [ms for name, ms in found["ms"].items() if name in (OURS, COMPILED)]
    baselines = [ms for name, ms in found["ms"].items() if name not in (OURS, COMPILED)]
    return min(baselines) / min(ours) if baselines and ours else None


def show(found: dict[str, Any]) -> None:
    times = "  ".join(f"{name} {ms:.4f}" for name, ms in found["ms"].items())
    best = ratio(found) if is_cuda() else None
    shown = "" if best is None else f"  best baseline / ours {best:.3f}"
    where = f"{found['model'].split('/')[-1]} {found['layer']} {found['tokens']} {found['pass']}"
    dist_print(f"{where}: {times} ms{shown}")
    for name, error in found["errors"].items():
        dist_print(f"    {name} does not run: {error}")


def main() -> None:
    args, begin = get_args(), time.perf_counter()
    initialize_distributed()
    tree: dict[str, Any] = {
        "benchmark": "layers", "dtype": args.dtype, "ranks": dist.get_world_size(),
        "hardware": dict(current_device().facts()), "software": software(),
        "environment": environment(), "points": [],
    }  # fmt: skip
    if not is_cuda():
        dist_print(TIMES_NOT_MEANINGFUL)
    points = [(m, each, n) for m in args.models for n in args.tokens for each in args.layers]
    for model, layer, tokens in points:
        late = [args.seconds is not None and time.perf_counter() - begin > args.seconds]
        dist.broadcast_object_list(late, 0)
        if late[0]:
            dist_print(f"stopped after {args.seconds} s, at {model} {layer} {tokens}")
            break
        for found in measure_point(args, model, layer, tokens):
            tree["points"].append(found)
            show(found)
            if args.json is not None and dist.get_rank() == 0:
                args.json.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    ratios = [each for each in map(ratio, tree["points"]) if each is not None]
    if ratios and is_cuda():
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        dist_print(f"best baseline / ours: geometric mean {mean:.3f}, lowest {min(ratios):.3f}")
    finalize_distributed()


if __name__ == "__main__":
    main()
