"""poisoned_empty: what it fills, what it leaves alone, that it ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from triton_dist.testing import poisoned_empty

ALLOCATIONS: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "empty": lambda dtype: torch.empty(3, 5, dtype=dtype),
    "empty_like": lambda dtype: torch.empty_like(torch.zeros(3, 5, dtype=dtype)),
    "empty_strided": lambda dtype: torch.empty_strided((3, 5), (5, 1), dtype=dtype),
    "new_empty": lambda dtype: torch.zeros(1, dtype=dtype).new_empty(3, 5),
    "new_empty_strided": lambda dtype: torch.zeros(1, dtype=dtype).new_empty_strided(
        (3, 5), (5, 1)
    ),
}


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("name", ALLOCATIONS)
def test_fresh_floating_point_memory_is_nan(name: str, dtype: torch.dtype) -> None:
    with poisoned_empty():
        assert ALLOCATIONS[name](dtype).float().isnan().all()


def test_every_test_runs_poisoned() -> None:
    assert torch.empty(64).isnan().all()


def test_integers_gradients_and_shapes_are_as_asked() -> None:
    with poisoned_empty():
        assert torch.empty(2, dtype=torch.int32).shape == (2,)
        assert torch.empty(2, requires_grad=True).requires_grad
        assert torch.empty((2, 3), device="meta").shape == (2, 3)


def test_what_was_there_before_is_back_after_an_error() -> None:
    before = torch.empty, torch.Tensor.new_empty
    with poisoned_empty():
        assert torch.empty is not before[0]
    with pytest.raises(KeyError), poisoned_empty():
        raise KeyError
    assert (torch.empty, torch.Tensor.new_empty) == before
