"""assert_allclose and poisoned_empty."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from triton_dist.testing import assert_allclose, poisoned_empty


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int32])
def test_equal_tensors_pass(dtype: torch.dtype) -> None:
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    assert_allclose(tensor, tensor.clone(), rtol=0, atol=0)
    assert_allclose(tensor[:0], tensor[:0])


def test_the_bound_is_atol_plus_rtol_of_expected() -> None:
    expected = torch.tensor([0.0, 100.0])
    assert_allclose(torch.tensor([0.09, 100.9]), expected, rtol=0.01, atol=0.1)
    with pytest.raises(AssertionError):
        assert_allclose(torch.tensor([0.11, 100.0]), expected, rtol=0.01, atol=0.1)
    with pytest.raises(AssertionError):
        assert_allclose(torch.tensor([0.0, 101.2]), expected, rtol=0.01, atol=0.1)


def test_the_message_has_the_count_and_the_worst_element() -> None:
    expected = torch.zeros(2, 3, 4)
    actual = expected.clone()
    actual[0, 1, 2] = 1.0
    actual[1, 2, 3] = -5.0
    with pytest.raises(AssertionError) as failed:
        assert_allclose(actual, expected, rtol=1e-3, atol=1e-3)
    message = str(failed.value)
    assert "2 of 24 values differ" in message
    assert "worst at (1, 2, 3): actual -5.0, expected 0.0, difference 5" in message
    with pytest.raises(AssertionError, match=r"^2 of 24 values differ$"):
        assert_allclose(actual, expected, verbose=False)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_fails_on_either_side(value: float) -> None:
    fine = torch.zeros(2, 2)
    broken = fine.clone()
    broken[1, 0] = value
    with pytest.raises(AssertionError, match=r"actual has 1 of 4 values .* first at \(1, 0\)"):
        assert_allclose(broken, fine)
    with pytest.raises(AssertionError, match="expected has 1 of 4"):
        assert_allclose(fine, broken)


def test_a_difference_of_float16_is_not_rounded_away() -> None:
    # 2048 + 1 is not a float16, so a bound computed in float16 would hide a difference of 2.
    actual, expected = (torch.tensor([x], dtype=torch.float16) for x in (2050.0, 2048.0))
    with pytest.raises(AssertionError, match="difference 2"):
        assert_allclose(actual, expected, rtol=0, atol=1.5)


def test_shape_and_dtype_must_be_the_same() -> None:
    with pytest.raises(AssertionError, match=r"actual is \(2, 1\) .* expected is \(2,\)"):
        assert_allclose(torch.zeros(2, 1), torch.zeros(2))
    with pytest.raises(AssertionError, match=r"torch\.float16, expected is \(2,\) torch\.float32"):
        assert_allclose(torch.zeros(2, dtype=torch.float16), torch.zeros(2))


def test_values_that_are_not_finite_may_be_allowed_where_both_have_them() -> None:
    nan, inf = float("nan"), float("inf")
    expected = torch.tensor([nan, inf, -inf, 1.0])
    allowed = {"allow_nan": True, "allow_inf": True}
    assert_allclose(expected.clone(), expected, **allowed)
    for place, value in ((0, 1.0), (1, -inf), (2, 0.0), (3, nan), (3, inf)):
        actual = expected.clone()
        actual[place] = value
        with pytest.raises(AssertionError, match=rf"1 of 4 values differ .* worst at \({place},\)"):
            assert_allclose(actual, expected, **allowed)
    with pytest.raises(AssertionError, match="actual has 1 of 4"):
        assert_allclose(expected, expected, allow_inf=True)
    with pytest.raises(AssertionError, match="actual has 2 of 4"):
        assert_allclose(expected, expected, allow_nan=True)


def test_a_check_that_zeros_would_pass_may_be_refused() -> None:
    expected = torch.tensor([1e-4, -1e-3])
    assert_allclose(expected, expected)
    with pytest.raises(AssertionError, match="nothing was checked"):
        assert_allclose(expected, expected, fail_if_too_small=True)
    assert_allclose(expected + 1, expected + 1, fail_if_too_small=True)


def test_the_names_that_scripts_give() -> None:
    assert_allclose(x=torch.ones(2), y=torch.ones(2) + 0.01, rtol=0.1, atol=0.0)
    with pytest.raises(AssertionError, match=r"^2 of 2 values differ$"):
        assert_allclose(torch.ones(2), torch.zeros(2), 1e-3, 1e-3, False)


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
