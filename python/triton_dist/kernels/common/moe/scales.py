"""Scales of fp8 operands of grouped GEMMs: recipes, checks, and their application in the kernel.

The recipes of ``gemm/scales.py``, with one set of scales of B per expert. ``rows`` is the number of
rows of A.

=======  ===================================  ==================================================
recipe   ``A_scale``                          ``B_scale``
=======  ===================================  ==================================================
TENSOR   one element                          one element, or [E]
ROW      [rows] or [rows, 1]                  [E, N], [E, 1, N] or [E, N, 1]
BLOCK    [rows, K / 128], strides (1, rows)   [E, N / 128, K / 128], contiguous (DeepSeek-V3), or
                                              its transpose [E, K / 128, N / 128]
=======  ===================================  ==================================================

Divisions round up. A ROW call may have TENSOR scales on one side.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton.language as tl

from triton_dist._jit import jit
from triton_dist.kernels.common.context import Check, gradient_check, operand_signature
from triton_dist.kernels.common.gemm.scales import (
    BLOCK_ELEMENTS,
    FP8,
    OUTPUTS,
    Recipe,
    Scaling,
    blocks,
)
from triton_dist.runtime.device import current_device

_BLOCK = tl.constexpr(BLOCK_ELEMENTS)
_ALIGNMENT = 16


class GroupedScales(NamedTuple):
    """Kernel argument: fp32 scales and their strides in elements, 0 along equal scales.

    ``own`` has the scales of this rank's rows if peers send the other rows, else it is ``None``.
    """

    a: Any
    b: Any
    own: Any
    stride_am: Any
    stride_ak: Any
    stride_be: Any
    stride_bk: Any
    stride_bn: Any


@jit
def scales_of_step(scale_rows, k, inside, scales, SCALING: tl.constexpr):
    """Return the BLOCK scales of a tile's rows at ``k``, or 0 for other recipes.

    ``scale_rows`` are the addresses of the first scale of each row.
    """
    if SCALING == "block":
        # Bypass L1, which may hold the scales of an earlier call.
        return tl.load(
            scale_rows + k // _BLOCK * scales.stride_ak,
            mask=inside, other=0.0, cache_modifier=".cg",
        )  # fmt: skip
    else:
        return 0


@jit
def grouped_dot(
    product, a, weights, k, column, N, a_scale, b_scale_ptr, scales, grouped_plan: tl.constexpr
):
    """Add ``a @ weights`` at ``k`` and ``column`` to a tile's product; apply BLOCK scales.

    ``b_scale_ptr`` is the address of the expert's scales.
    """
    SCALING: tl.constexpr = grouped_plan.SCALING
    if SCALING == "block":
        COLUMNS: tl.constexpr = product.shape[1]
        b_scale_ptr += k // _BLOCK * scales.stride_bk
        if grouped_plan.SINGLE_B_SCALE:
            b_scale = tl.load(b_scale_ptr + column // _BLOCK * scales.stride_bn)
            factor = (a_scale * b_scale)[:, None]
        else:
            columns = column + tl.arange(0, COLUMNS)
            b_ptr = b_scale_ptr + columns // _BLOCK * scales.stride_bn
            factor = a_scale[:, None] * tl.load(b_ptr, mask=columns < N, other=0.0)[None, :]
        zeros = tl.zeros((product.shape[0], COLUMNS), dtype=tl.float32)
        return product + tl.dot(a, weights, zeros) * factor
    elif SCALING == "promoted":
        return tl.dot(a, weights, product, max_num_imprecise_acc=min(a.shape[1], _BLOCK))
    else:
        return tl.dot(a, weights, product, input_precision=grouped_plan.PRECISION)


@jit
def finish_grouped_scales(
    product, column, N, scale_rows, b_scale_ptr, inside, scales, SCALING: tl.constexpr
):
    """Return a tile's product after TENSOR and ROW scales.

    Padding has no scales: ``inside`` is false and N is 0, and the result is 0.
    """
    if SCALING == "fast" or SCALING == "promoted":  # Triton has no ``in``
        columns = column + tl.arange(0, product.shape[1])
        a_scale = tl.load(scale_rows, mask=inside, other=0.0, cache_modifier=".cg")
        b_ptr = b_scale_ptr + columns * scales.stride_bn
        b_scale = tl.load(b_ptr, mask=columns < N, other=0.0)
        product = product * a_scale[:, None] * b_scale[None, :]
    return product


class OperandScales(NamedTuple):
    """Checked scales of a call: a [rows, 1 or blocks of K], b [E, 1 or blocks of K, columns or
    blocks of N], and the kernel's constant SCALING (see ``gemm/scales.py``)."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: str
    own: torch.Tensor | None = None

    @classmethod
    def of(cls, A: torch.Tensor, B: torch.Tensor, scaling: Scaling) -> OperandScales | None:
        """Return the scales of a checked call; ``None`` for operands that are not fp8."""
        a, b = scaling.A_scale, scaling.B_scale
        if A.dtype not in FP8 or a is None or b is None:
            return None
        (E, _, N), rows = B.shape, A.shape[0]
        if grouped_recipe(A, B, a, b) is Recipe.BLOCK:
            has_deepseek_layout = b.is_contiguous() and b.shape[1:] == (
                blocks(N),
                blocks(B.shape[1]),
            )
            return cls(a, b.mT if has_deepseek_layout else b, "block")
        a = a.reshape(-1, 1).expand(rows, 1)
        b = b.reshape(1 if b.numel() == 1 else E, 1, -1).expand(E, 1, N)
        return cls(a, b, "fast" if scaling.use_fast_accum else "promoted")

    def columns(self, first: int, end: int) -> OperandScales:
        """Return the scales of columns ``first`` to ``end`` of B.

        BLOCK requires that ``first`` is a multiple of 128.
        """
        if self.scaling == "block":
            first, end = first // BLOCK_ELEMENTS, blocks(end)
        return self._replace(b=self.b[:, :, first:end])

    def of_rows(self, rows: torch.Tensor, own: torch.Tensor | None = None) -> OperandScales:
        """Return the scales for packed rows (``unpacked``), and for ``own`` packed rows."""
        width = self.a.shape[1]
        return self._replace(a=rows[:, :width], own=None if own is None else own[:, :width])

    def kernel_argument(self) -> GroupedScales:
        return GroupedScales(self.a, self.b, self.own, *self.a.stride(), *self.b.stride())


def dequantised_experts(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fp8 operands multiplied by their scales, in ``dtype``."""
    scales = OperandScales.of(A, B, Scaling(A_scale, B_scale))
    assert scales is not None
    a, b = scales.a, scales.b
    if scales.scaling == Recipe.BLOCK.value:
        a = a.repeat_interleave(BLOCK_ELEMENTS, 1)[:, : A.shape[1]]
        b = b.repeat_interleave(BLOCK_ELEMENTS, 1)[:, : B.shape[1]]
        b = b.repeat_interleave(BLOCK_ELEMENTS, 2)[:, :, : B.shape[2]]
    return A.to(dtype) * a.to(dtype), B.to(dtype) * b.to(dtype)


def packed_form(K: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """Return width and dtype of the rows [K] of A that travel between ranks.

    A row of fp8 travels in one piece with its scales, which precede it. Both begin at multiples of
    16 bytes. As fp32, it suits every collective.
    """
    if dtype not in FP8:
        return K, dtype
    return (_first_element(K) + -(-K // _ALIGNMENT) * _ALIGNMENT) // 4, torch.float32


def _first_element(K: int) -> int:
    """Return the byte of a packed row at which its elements begin, after its scales."""
    return -(-4 * blocks(K) // _ALIGNMENT) * _ALIGNMENT


def pack(A: torch.Tensor, scales: OperandScales, out: torch.Tensor) -> None:
    """Copy rows and their scales to ``out``, of ``packed_form``."""
    out[:, : scales.a.shape[1]].copy_(scales.a)
    unpacked(out, A.dtype, A.shape[1]).view(torch.uint8).copy_(A.view(torch.uint8))


def unpacked(rows: torch.Tensor, dtype: torch.dtype, K: int) -> torch.Tensor:
    """Return the elements of packed rows as a view [rows, K]."""
    first = _first_element(K)
    return rows.view(torch.uint8)[:, first : first + K].view(dtype)


class ScaledKey(NamedTuple):
    """Key of an fp8 call: the op's key without scales, and all else that a tuning depends on."""

    key: Any
    recipe: str
    out_dtype: torch.dtype
    use_fast_accum: bool

    def __getattr__(self, name: str) -> Any:
        return getattr(self.key, name)

    @classmethod
    def of(cls, key: Any, A: torch.Tensor, B: torch.Tensor, scaling: Scaling) -> Any:
        """Return the key of a checked call: ``key`` if its operands are not fp8."""
        A_scale, B_scale, _, _, fast = scaling
        if A.dtype not in FP8 or A_scale is None or B_scale is None:
            return key
        recipe = grouped_recipe(A, B, A_scale, B_scale)
        assert recipe is not None
        return cls(key, recipe.value, scaling.output_dtype(A), fast)


def scaling_signature(scaling: Scaling) -> tuple[object, ...]:
    """Return all that the checks of a call read from its scaling."""
    given: tuple[Any, Any] = (scaling.A_scale, scaling.B_scale)
    scales = (operand_signature(each, each) for each in given)
    return (*scales, scaling.out_dtype, scaling.use_fast_accum)


def grouped_recipe(
    A: torch.Tensor, B: torch.Tensor, A_scale: torch.Tensor, B_scale: torch.Tensor
) -> Recipe | None:
    """Return the recipe of the scales' shapes and strides, or ``None`` if there is none."""
    (rows, K), (E, _, N) = A.shape, B.shape
    a_shape, b_shape = tuple(A_scale.shape), tuple(B_scale.shape)
    has_rows = A_scale.numel() == 1 or a_shape in ((rows,), (rows, 1))
    is_single = B_scale.numel() == 1 or b_shape == (E,)
    has_columns = is_single or b_shape in ((E, N), (E, 1, N), (E, N, 1))
    if has_rows and has_columns and A_scale.is_contiguous() and B_scale.is_contiguous():
        return Recipe.TENSOR if A_scale.numel() == 1 and is_single else Recipe.ROW
    in_memory = (E, blocks(N), blocks(K))  # both layouts of B_scale have the memory of this tensor
    has_blocks = (
        a_shape == (rows, blocks(K))
        and A_scale.t().is_contiguous()
        and (
            (b_shape == in_memory and B_scale.is_contiguous())
            or (b_shape == (E, blocks(K), blocks(N)) and B_scale.mT.is_contiguous())
        )
    )
    return Recipe.BLOCK if has_blocks else None


def scaling_checks(
    A: torch.Tensor, B: torch.Tensor, scaling: Scaling, a: str = "A", b: str = "B"
) -> Iterator[Check]:
    """Yield checks of dtypes, scales and output of operands [rows, K] and [E, K, N].

    ``a`` and ``b`` are the names of the operands.
    """
    A_scale, B_scale, _, out_dtype, _ = scaling
    is_fp8 = A.dtype in FP8
    if not is_fp8:
        for name, scale in (("A_scale", A_scale), ("B_scale", B_scale)):
            yield name, "given", scale is None, f"None: {a} is {A.dtype}, not fp8"
    good = out_dtype is None or out_dtype in (OUTPUTS if is_fp8 else (A.dtype,))
    expected = "torch.bfloat16, torch.float16 or torch.float32" if is_fp8 else f"{a}'s dtype"
    yield "out_dtype", out_dtype, good, f"None or {expected}"
    if not is_fp8:
        return
    expected = "16-bit operands: fp8 requires a GPU of compute capability 8.9 or later"
    yield f"{a}.dtype", A.dtype, current_device().multiplies_fp8, expected
    expected = f"torch.float8_e4m3fn, because {a} is fp8"
    yield f"{b}.dtype", B.dtype, B.dtype is torch.float8_e4m3fn, expected
    expected = "unit stride along K: fp8 weights must be K-major, the mT of a contiguous [E, N, K]"
    yield f"{b}.stride()", B.stride(), B.stride(1) == 1 or B.shape[1] == 1, expected
    for name, scale in (("A_scale", A_scale), ("B_scale", B_scale)):
        yield name, scale, isinstance(scale, torch.Tensor), f"a tensor, because {a} is fp8"
        assert scale is not None
        yield f"{name}.dtype", scale.dtype, scale.dtype is torch.float32, "torch.float32"
        yield f"{name}.device", scale.device, scale.device == A.device, f"{A.device}, like {a}"
        yield gradient_check(name, scale)
    assert A_scale is not None
    assert B_scale is not None
    (rows, K), (E, _, N) = A.shape, B.shape
    given = "; ".join(f"{tuple(each.shape)}, {each.stride()}" for each in (A_scale, B_scale))
    expected = (
        f"shapes and strides of one recipe: one element for {a}, and one or [{E}] for {b}; "
        f"[{rows}] or [{rows}, 1], and [{E}, {N}], [{E}, 1, {N}] or [{E}, {N}, 1]; or "
        f"[{rows}, {blocks(K)}] with strides (1, {rows}), and a contiguous "
        f"[{E}, {blocks(N)}, {blocks(K)}] or its transpose [{E}, {blocks(K)}, {blocks(N)}]"
    )
    good = grouped_recipe(A, B, A_scale, B_scale) is not None
    yield "A_scale, B_scale", given, good, expected
