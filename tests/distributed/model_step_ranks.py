"""What ranks run in ``test_model_step``."""

from __future__ import annotations

import importlib

import torch


def train(*arguments: str) -> int:
    from examples import model_step

    return model_step.main(arguments)


def two_starts_with_a_library() -> tuple[int, int]:
    """Extra calls of the first, and of one that finds its records.

    In one process: the library takes longer to import than all of this.
    """
    # It asks Triton's driver for the GPU when it is imported; once kernels are, a driver for the
    # interpreter stands there.
    importlib.import_module("fla.modules")
    race = ("--kernels", "fla", "--race", "--steps", "1")
    return train(*race), train(*race)


def gradients_of_own_ops() -> list[float]:
    """Largest differences from torch: output, then gradients of x, weight, gate and up."""
    from examples import model_step

    ops = model_step.own_ops()
    torch.manual_seed(0)
    x = torch.randn(3, 7, 48, requires_grad=True)
    weight = torch.randn(48, requires_grad=True)
    gate, up = (torch.randn(5, 33, requires_grad=True) for _ in range(2))

    def run(rms_norm, swiglu):
        outputs = rms_norm(x, weight), swiglu(gate, up)
        loss = sum(output.square().sum() for output in outputs)
        return [*outputs, *torch.autograd.grad(loss, (x, weight, gate, up))]

    ours = run(ops.rms_norm, ops.swiglu)
    theirs = run(
        lambda x, weight: torch.nn.functional.rms_norm(x, (48,), weight, 1e-6),
        lambda gate, up: torch.nn.functional.silu(gate) * up,
    )
    return [float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)]
