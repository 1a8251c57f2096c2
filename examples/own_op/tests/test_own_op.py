"""``sharded_rms_norm`` on CPU ranks: odd sizes, repeated calls, errors and tuning."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from own_op.op import ALGORITHMS, NormContext, sharded_rms_norm
from own_op.opinfo import SHARDED_RMS_NORM as INFO
from own_op.opinfo import Shape
from triton_dist.errors import InvalidArgument, RankDisagreement
from triton_dist.testing import assert_allclose, spawn_ranks

RANKS = 3


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """Keep records of tests out of the user's cache; ranks inherit the variable."""
    monkeypatch.setenv("TRITON_DIST_CACHE_DIR", str(tmp_path / "cache"))


def check_results():
    """Each algorithm is right at each call: calls alternate between slots, and sizes change."""
    cases = (
        (torch.float32, Shape(37, 33 * RANKS), 4),
        (torch.bfloat16, Shape(5, 8 * RANKS), 1),
        (torch.float32, Shape(1, RANKS), 4),
    )
    with NormContext(max_rows=37) as ctx:
        for dtype, size, block_m in cases:
            operands, tolerance = INFO.operands(size, dtype, RANKS), INFO.tolerance(dtype, RANKS)
            args, _ = INFO.arguments(operands, ctx)
            for algorithm in (*ALGORITHMS, *ALGORITHMS):
                INFO.refill(operands, RANKS)
                out = sharded_rms_norm.fn(*args, block_m=block_m, algorithm=algorithm)
                assert_allclose(out, INFO.reference(operands), tolerance, tolerance)


def error_inputs(good):
    """Return invalid calls: by the argument that the error names, what replaces good arguments."""
    x, weight = good["x"], good["weight"]
    return {
        "x.shape": {"x": torch.cat([x, x])},
        "x.shape (no rows)": {"x": x[:0]},
        "x.is_contiguous()": {"x": torch.cat([x, x], 1)[:, ::2]},
        "weight.shape": {"weight": weight[:-1]},
    }


def check_errors_and_tuning():
    """Invalid arguments and different rows are errors. Afterwards the op is tuned and right."""
    with NormContext(max_rows=4) as ctx:
        ranks = dist.get_world_size()
        operands = INFO.operands(Shape(4, 8 * ranks), torch.float32, ranks)
        for name, changed in error_inputs(operands).items():
            args, _ = INFO.arguments({**operands, **changed}, ctx)
            with pytest.raises(InvalidArgument) as error:
                sharded_rms_norm.fn(*args)
            assert f"{name.partition(' (')[0]} is " in str(error.value)

        x, weight, _ = INFO.arguments(operands, ctx)[0]
        with pytest.raises(RankDisagreement):
            sharded_rms_norm.fn(x[: 2 + dist.get_rank() % 2], weight, ctx)
        ctx.reset()

        for _ in range(3):  # tunes, then uses the winner
            out = sharded_rms_norm(x, weight, ctx)
            assert_allclose(out, INFO.reference(operands), 1e-4, 1e-4)
        assert sharded_rms_norm.num_tunings == 1
        return sharded_rms_norm.best_config(x, weight, ctx)


def test_every_algorithm_matches_the_reference():
    spawn_ranks(RANKS, check_results)


def test_errors_and_tuning():
    first, second = spawn_ranks(2, check_errors_and_tuning)
    assert first == second
