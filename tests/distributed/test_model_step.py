"""The example of a whole training step, on CPU ranks."""

from __future__ import annotations

import importlib.util

import pytest

from tests.distributed import model_step_ranks as ranks
from tests.docs.markdown import ROOT
from tests.docs.run_blocks import run_program

EXAMPLE = str(ROOT / "examples" / "model_step.py")


@pytest.fixture(autouse=True)
def logs(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_LOG_DIR", str(tmp_path / "logs"))


def test_own_kernels_compute_what_torch_does(spawn_ranks):
    (differences,) = spawn_ranks(1, ranks.gradients_of_own_ops, init=False)
    assert max(differences) < 2e-4


def test_all_ranks_agree_and_a_second_start_tunes_nothing(spawn_ranks):
    """Four kernels with four configs: 4 * (3 + 5) extra calls."""
    for calls in (32, 0):
        printed, _ = spawn_ranks(2, run_program, EXAMPLE, init=False)
        assert "step 2: loss " in printed
        assert f"\n2 ranks agree on 4 kernels and keys; {calls} tuning calls\n" in printed


@pytest.mark.skipif(
    importlib.util.find_spec("fla") is None, reason="needs fla-core, of the test extra"
)
def test_kernels_of_a_library(spawn_ranks):
    """In one rank, since the library takes six seconds to import; that ranks agree is tested
    above."""
    (calls,) = spawn_ranks(1, ranks.two_starts_with_a_library, timeout=200, fresh=True)
    assert calls[0] > 0
    assert calls[1] == 0
