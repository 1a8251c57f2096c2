"""The example of a whole training step, on CPU ranks."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch

from tests.docs.markdown import ROOT
from tests.docs.run_blocks import run_program


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


EXAMPLE = str(ROOT / "examples" / "model_step.py")


@pytest.fixture(autouse=True)
def logs(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_LOG_DIR", str(tmp_path / "logs"))


def test_own_kernels_compute_what_torch_does(spawn_ranks):
    (differences,) = spawn_ranks(1, gradients_of_own_ops, init=False)
    assert max(differences) < 2e-4


def test_all_ranks_agree_and_a_second_start_tunes_nothing(spawn_ranks):
    """Four kernels with four configs: 4 * (3 + 5) extra calls."""
    for calls in (32, 0):
        printed, _ = spawn_ranks(2, run_program, EXAMPLE, "--steps", "1", init=False)
        assert "step 0: loss " in printed
        assert f"\n2 ranks agree on 4 kernels and keys; {calls} tuning calls\n" in printed


@pytest.mark.stress
@pytest.mark.skipif(
    importlib.util.find_spec("fla") is None, reason="needs fla-core, of the test extra"
)
def test_kernels_of_a_library(spawn_ranks):
    """In one rank, since the library takes six seconds to import; that ranks agree is tested
    above."""
    (calls,) = spawn_ranks(1, two_starts_with_a_library, timeout=200, new_interpreters=True)
    assert calls[0] > 0
    assert calls[1] == 0
