"""One training step of a transformer block whose Triton kernels are tuned together.

    bash scripts/launch.sh examples/model_step.py                 # on GPUs: fla-core's kernels
    bash scripts/launch.sh examples/model_step.py --kernels own   # the kernels below

Every ``@triton.autotune`` kernel that the step launches, forward and backward, is timed inside the
step, on all ranks at the same time. This includes kernels of libraries, which cannot be edited.
All ranks choose the same config for every kernel. The next start reads these configs from disk.

The wrapped function is called repeatedly until all kernels are tuned. It must therefore be
repeatable: it clears the gradients, and the optimizer steps outside of it.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch.nn import functional

import triton_dist
from triton_dist.autotuner import contextual_autotune
from triton_dist.errors import RankDisagreement
from triton_dist.runtime.device import current_device
from triton_dist.utils import (
    dist_print,
    finalize_distributed,
    init_seed,
    initialize_distributed,
    is_cuda,
)

_ROWS = [triton.Config({}, num_warps=warps) for warps in (1, 2, 4, 8)]
_BLOCKS = [
    triton.Config({"BLOCK": block}, num_warps=warps)
    for block, warps in ((512, 2), (1024, 4), (2048, 8), (4096, 8))
]


@triton.autotune(_ROWS, key=["N"])
@triton_dist.jit
def rms_norm_kernel(x_ptr, weight_ptr, y_ptr, inverse_rms_ptr, N, eps, WIDTH: tl.constexpr):
    """y = x / rms(x) * weight, one row per program; 1 / rms(x) is stored for the backward pass."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    x = tl.load(x_ptr + row * N + column, mask=column < N, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < N, other=0.0).to(tl.float32)
    inverse_rms = 1.0 / tl.sqrt(tl.sum(x * x) / N + eps)
    tl.store(inverse_rms_ptr + row, inverse_rms)
    y = (x * inverse_rms * weight).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * N + column, y, mask=column < N)


@triton.autotune(_ROWS, key=["N"])
@triton_dist.jit
def rms_norm_backward_kernel(
    x_ptr, weight_ptr, inverse_rms_ptr, dy_ptr, dx_ptr, N, WIDTH: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    x = tl.load(x_ptr + row * N + column, mask=column < N, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < N, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * N + column, mask=column < N, other=0.0).to(tl.float32)
    inverse_rms = tl.load(inverse_rms_ptr + row)
    scaled = dy * weight
    dx = inverse_rms * (scaled - x * inverse_rms * inverse_rms * (tl.sum(scaled * x) / N))
    tl.store(dx_ptr + row * N + column, dx.to(dx_ptr.dtype.element_ty), mask=column < N)


@triton.autotune(_BLOCKS, key=["N"])
@triton_dist.jit
def swiglu_kernel(gate_ptr, up_ptr, y_ptr, N, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + index, mask=index < N, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + index, mask=index < N, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(y_ptr + index, y.to(y_ptr.dtype.element_ty), mask=index < N)


@triton.autotune(_BLOCKS, key=["N"])
@triton_dist.jit
def swiglu_backward_kernel(gate_ptr, up_ptr, dy_ptr, dgate_ptr, dup_ptr, N, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + index, mask=index < N, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + index, mask=index < N, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + index, mask=index < N, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    dgate = dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(dgate_ptr + index, dgate.to(dgate_ptr.dtype.element_ty), mask=index < N)
    dup = dy * gate * sigmoid
    tl.store(dup_ptr + index, dup.to(dup_ptr.dtype.element_ty), mask=index < N)


class RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x = x.contiguous()
        N = x.shape[-1]
        y, inverse_rms = torch.empty_like(x), x.new_empty(x.numel() // N, dtype=torch.float32)
        width = triton.next_power_of_2(N)
        rms_norm_kernel[(len(inverse_rms),)](x, weight, y, inverse_rms, N, eps, WIDTH=width)
        ctx.save_for_backward(x, weight, inverse_rms)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, inverse_rms = ctx.saved_tensors
        dy, dx, N = dy.contiguous(), torch.empty_like(x), x.shape[-1]
        width = triton.next_power_of_2(N)
        rms_norm_backward_kernel[(len(inverse_rms),)](
            x, weight, inverse_rms, dy, dx, N, WIDTH=width
        )
        normalised = x.reshape(-1, N) * inverse_rms[:, None]
        dweight = (dy.reshape(-1, N) * normalised).sum(0).to(weight.dtype)
        return dx, dweight, None


class SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        y, N = torch.empty_like(gate), gate.numel()
        swiglu_kernel[lambda meta: (triton.cdiv(N, meta["BLOCK"]),)](gate, up, y, N)
        ctx.save_for_backward(gate, up)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        dgate, dup, N = torch.empty_like(gate), torch.empty_like(up), gate.numel()
        swiglu_backward_kernel[lambda meta: (triton.cdiv(N, meta["BLOCK"]),)](
            gate, up, dy.contiguous(), dgate, dup, N
        )
        return dgate, dup


Op = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Ops:
    """Functions of a block other than matrix products."""

    rms_norm: Op
    """``rms_norm(x, weight)``, over the last dimension."""
    swiglu: Op
    """``swiglu(gate, up)``"""
    attention: Op
    """``attention(q, k, v)``, causal, [batch, tokens, heads, width] each."""


def softmax_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    return functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)


def own_ops() -> Ops:
    return Ops(lambda x, weight: RmsNorm.apply(x, weight, 1e-6), SwiGlu.apply, softmax_attention)


def fla_ops() -> Ops:
    """Return the functions of fla-core (flash-linear-attention): pip install fla-core."""
    from fla.modules.activations import swiglu
    from fla.modules.norm.layernorm import rms_norm
    from fla.ops.retention import chunk_retention

    def retention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = chunk_retention(q, k, v)[0]
        return output

    # Triton's interpreter cannot run fla-core's attention kernels.
    attention = retention if is_cuda() else softmax_attention
    return Ops(lambda x, weight: rms_norm(x, weight, None), swiglu, attention)


KERNELS = {"own": own_ops, "fla": fla_ops}


class Block(torch.nn.Module):
    """Attention and MLP, each with a norm before it and a residual connection."""

    def __init__(self, width: int, heads: int, ops: Ops) -> None:
        super().__init__()
        self.heads, self.ops = heads, ops
        self.norms = torch.nn.ParameterList([torch.ones(width) for _ in range(2)])
        self.qkv = torch.nn.Linear(width, 3 * width, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.gate_up = torch.nn.Linear(width, 8 * width, bias=False)
        self.down = torch.nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [batch, tokens, width] to a tensor of equal shape."""
        normed = self.ops.rms_norm(x, self.norms[0])
        q, k, v = self.qkv(normed).unflatten(-1, (3, self.heads, -1)).unbind(2)
        mixed = self.ops.attention(q.contiguous(), k.contiguous(), v.contiguous())
        x = x + self.out(mixed.flatten(2))
        gate, up = self.gate_up(self.ops.rms_norm(x, self.norms[1])).chunk(2, dim=-1)
        hidden: torch.Tensor = self.ops.swiglu(gate.contiguous(), up.contiguous())
        return x + self.down(hidden)


def check_and_count_configs(choices: dict[str, Any]) -> int:
    """Return the number of tuned kernels and keys; raise if ranks chose different configs."""
    own = {name: str(config) for name, config in choices.items()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    if any(each != own for each in everyone):
        raise RankDisagreement("the configs of the step's kernels", dict(enumerate(everyone)))
    return len(own)


def main(argv: Sequence[str] | None = None) -> int:
    """Train some steps; return the number of additional calls of the step that tuning made."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kernels",
        choices=list(KERNELS),
        help="default: fla on GPUs if fla-core is installed, else own",
    )
    parser.add_argument("--race", action="store_true", help="stop measuring slow configs early")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args(argv)
    initialize_distributed()
    device = current_device().torch_device
    batch, tokens, width, heads = (4, 2048, 2048, 16) if is_cuda() else (1, 16, 32, 2)
    dtype = torch.bfloat16 if is_cuda() else torch.float32
    has_fla = is_cuda() and importlib.util.find_spec("fla") is not None
    ops = KERNELS[args.kernels or ("fla" if has_fla else "own")]()
    init_seed(0)  # equal weights on all ranks
    block = Block(width, heads, ops).to(device, dtype)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.01)
    init_seed(1 + dist.get_rank())  # different data on each rank

    @contextual_autotune(is_dist=True, race=args.race)
    def forward_backward(x: torch.Tensor) -> torch.Tensor:
        """Return the loss; store the mean gradients of all ranks in the parameters."""
        optimizer.zero_grad()
        loss = (block(x) - x).square().mean()
        loss.backward()
        for parameter in block.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()  # type: ignore[operator]
        return loss.detach()

    for step in range(args.steps):
        loss = forward_backward(torch.randn(batch, tokens, width, device=device, dtype=dtype))
        optimizer.step()
        dist_print(f"step {step}: loss {float(loss):.4f}")
    count = check_and_count_configs(forward_backward.choices())
    for name, config in forward_backward.choices().items():
        dist_print(f"  {name}: {config}")
    calls = forward_backward.num_tuning_calls
    dist_print(
        f"{dist.get_world_size()} ranks agree on {count} kernels and keys; {calls} tuning calls"
    )
    return calls


if __name__ == "__main__":
    main()
    finalize_distributed()
