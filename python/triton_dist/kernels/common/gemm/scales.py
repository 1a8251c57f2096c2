"""Scales of fp8 operands: recipes, checks, and their application inside the GEMM kernels.

Before rounding to fp8, numbers were divided by an fp32 scale. A *recipe* is the granularity of the
scales. There are three, with the layouts of ``torch.nn.functional.scaled_mm``:

=======  ======================================  =================================================
recipe   ``A_scale``                             ``B_scale``
=======  ======================================  =================================================
TENSOR   one element                             one element
ROW      [M] or [M, 1]                           [N], [1, N] or [N, 1]
BLOCK    [M, K / 128], strides (1, M)            [K / 128, N / 128] with strides (1, K / 128), or
                                                 [N / 128, K / 128], contiguous (DeepSeek-V3)
=======  ======================================  =================================================

K / 128 and N / 128 are rounded up. If B holds the weights of E experts, [E, K, N], ``B_scale`` has
a leading dimension E; TENSOR may have a single scale for all experts. With experts, BLOCK scales of
A may also be row-major. In a ROW call, one of the operands may have a single scale. TENSOR and ROW
scales multiply the accumulator once. BLOCK scales multiply the product of every 128 elements of K,
and the scaled products are added in fp32.

Hopper's tensor cores add fp8 products with fewer bits than fp32. Unless ``use_fast_accum`` is set,
partial sums over 128 elements of K are added in fp32, as cuBLAS does. BLOCK always does this.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import torch
import triton.language as tl

from triton_dist._jit import jit
from triton_dist.kernels.common.context import Check, gradient_check, operand_signature
from triton_dist.runtime.device import current_device

KeyT = TypeVar("KeyT")
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
BLOCK_ELEMENTS = 128
"""Length of a block along K, and along N for B."""
SCALE_BLOCK = tl.constexpr(BLOCK_ELEMENTS)
OUTPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Recipe(enum.Enum):
    """Granularity of the scales of a call."""

    TENSOR = "tensor"
    ROW = "row"
    BLOCK = "block"

    __repr__ = enum.Enum.__str__


# Values of the kernels' constant SCALING; kernels compare them with < and >=. They are ints because
# Triton 3.6 rejects a str as a default. From FAST_ACCUM on, a bias is optional.
UNSCALED = tl.constexpr(0)
"""Neither scales nor a bias."""
BIAS_ONLY = tl.constexpr(1)
FAST_ACCUM = tl.constexpr(2)
"""TENSOR or ROW scales, ``use_fast_accum``."""
PROMOTED_ACCUM = tl.constexpr(3)
"""TENSOR or ROW scales, partial sums in fp32."""
BLOCK_SCALES = tl.constexpr(4)
"""BLOCK scales."""


class Scales(NamedTuple):
    """Kernel argument: fp32 scales of A and B, and a bias of the output's dtype or ``None``.

    Strides are in elements; the stride of a single scale is 0. ``gathered_scales`` has the scales
    of all shards of A, ``stride_shard`` elements apart. The kernels' constant SCALING selects the
    members that are used, because Triton 3.6 can neither compare a tuple with ``None`` nor nest it
    in another tuple.
    """

    a_scale: Any
    b_scale: Any
    bias: Any
    stride_am: Any
    stride_ak: Any
    stride_bk: Any
    stride_bn: Any
    gathered_scales: Any
    stride_shard: Any


@jit
def scaled_dot(
    accumulator, a, b, k, column, scales, a_scale_ptr, row, rows, N,
    INPUT_PRECISION: tl.constexpr, SCALING: tl.constexpr,
):  # fmt: skip
    """Return ``accumulator + a @ b`` for a step along K; apply BLOCK scales, if there are any.

    Args:
        accumulator: [M, N], or [N, M] to compute the transposed product.
        k, column: first element of the step along K, and first column of the tile.
        a_scale_ptr: result of ``scales_of_shard``.
        row, rows: first row of the tile in its shard, and number of rows of the shard.
    """
    a_scale = 0
    b_scale_ptr = 0
    if SCALING == BLOCK_SCALES:
        # Load the scales before the product, to overlap with it.
        a_scale_ptr += k // SCALE_BLOCK * scales.stride_ak
        a_scale = load_row_scales(scales, a_scale_ptr, row, rows, a.shape[0])
        b_scale_ptr = scales.b_scale
    # Both sizes are powers of two, so a tile lies in one block of columns or covers whole blocks.
    return add_product(
        accumulator, a, b, k, column, N, a_scale, b_scale_ptr, scales,
        b.shape[1] <= SCALE_BLOCK, INPUT_PRECISION, SCALING,
    )  # fmt: skip


@jit
def add_product(
    accumulator, a, b, k, column, N, a_scale, b_scale_ptr, scales,
    SINGLE_B_SCALE: tl.constexpr, INPUT_PRECISION: tl.constexpr, SCALING: tl.constexpr,
):  # fmt: skip
    """Return ``accumulator + a @ b`` for a step along K; apply BLOCK scales, if there are any.

    Args:
        accumulator: [M, N], or [N, M] to compute the transposed product. The result has its shape.
        k, column: first element of the step along K, and first column of the tile.
        a_scale: scales of the tile's rows for this step. Only used with BLOCK scales.
        b_scale_ptr: address of the scales of B. Only used with BLOCK scales.
        scales: only the strides ``stride_bk`` and ``stride_bn`` of the scales of B are used.
        SINGLE_B_SCALE: all columns of the tile lie in one block of 128 columns.
    """
    AXIS: tl.constexpr = 1 if accumulator.shape[0] == a.shape[0] else 0  # of the columns
    if AXIS == 0:
        a, b = b.T, a.T
    if SCALING == BLOCK_SCALES:
        b_scale_ptr += k // SCALE_BLOCK * scales.stride_bk
        if SINGLE_B_SCALE:
            b_scale = tl.load(b_scale_ptr + column // SCALE_BLOCK * scales.stride_bn)
            factor = tl.expand_dims(a_scale * b_scale, AXIS)
        else:
            columns = column + tl.arange(0, accumulator.shape[AXIS])
            b_ptr = b_scale_ptr + columns // SCALE_BLOCK * scales.stride_bn
            b_scale = tl.load(b_ptr, mask=columns < N, other=0.0)
            factor = tl.expand_dims(a_scale, AXIS) * tl.expand_dims(b_scale, 1 - AXIS)
        zeros = tl.zeros(accumulator.shape, dtype=tl.float32)
        return accumulator + tl.dot(a, b, zeros) * factor
    elif SCALING == PROMOTED_ACCUM:
        return tl.dot(a, b, accumulator, max_num_imprecise_acc=min(a.shape[1], SCALE_BLOCK))
    else:
        return tl.dot(a, b, accumulator, input_precision=INPUT_PRECISION)


@jit
def scales_of_shard(scales, shard, SCALING: tl.constexpr):
    """Return the address of the scales of shard number ``shard`` of the gathered A.

    If ``shard`` is ``None``, return the address of the scales of A. Without scales, return 0.
    """
    if SCALING < FAST_ACCUM:
        return 0
    elif shard is None:
        return scales.a_scale
    else:
        return scales.gathered_scales + shard.to(tl.int64) * scales.stride_shard


@jit
def load_row_scales(scales, a_scale_ptr, row, rows, BLOCK_SIZE_M: tl.constexpr):
    """Return the scales [BLOCK_SIZE_M] of the rows of A that begin at ``row``.

    The load bypasses L1, which may hold outdated scales.
    """
    row_index = row + tl.arange(0, BLOCK_SIZE_M)
    return tl.load(
        a_scale_ptr + row_index * scales.stride_am,
        mask=row_index < rows, other=0.0, cache_modifier=".cg",
    )  # fmt: skip


@jit
def apply_epilogue_scales(
    accumulator, scales, a_scale_ptr, row, rows, column, N, SCALING: tl.constexpr
):
    """Return a tile's accumulator, multiplied by TENSOR or ROW scales if there are any."""
    if SCALING >= FAST_ACCUM and SCALING != BLOCK_SCALES:
        a_scale = load_row_scales(scales, a_scale_ptr, row, rows, accumulator.shape[0])
        accumulator = apply_scales(accumulator, a_scale, scales.b_scale, scales, column, N)
    return accumulator


@jit
def apply_scales(accumulator, a_scale, b_scale_ptr, scales, column, N):
    """Return a tile multiplied by the scales of its rows (``a_scale``) and of its columns."""
    columns = column + tl.arange(0, accumulator.shape[1])
    b_ptr = b_scale_ptr + columns * scales.stride_bn
    b_scale = tl.load(b_ptr, mask=columns < N, other=0.0)
    return accumulator * a_scale[:, None] * b_scale[None, :]


@jit
def add_bias(accumulator, scales, column, N, SCALING: tl.constexpr):
    """Return ``accumulator``, a tile, with the bias added if there is one."""
    if SCALING != UNSCALED:
        accumulator = add_bias_at(accumulator, scales.bias, column, N)
    return accumulator


@jit
def add_bias_at(accumulator, bias_ptr, column, end):
    """Return a tile plus the bias of its columns before ``end``, if there is a bias."""
    if bias_ptr is not None:
        columns = column + tl.arange(0, accumulator.shape[1])
        bias = tl.load(bias_ptr + columns, mask=columns < end, other=0.0)
        accumulator += bias.to(tl.float32)[None, :]
    return accumulator


def num_scale_blocks(size: int) -> int:
    """Return the number of blocks of 128 that cover ``size`` elements."""
    return -(-size // BLOCK_ELEMENTS)


NO_SCALES = Scales(*(None,) * 9)


class ScaledKey(NamedTuple):
    """Tuning key of a call with fp8 operands or a bias. It also has the attributes of ``key``."""

    key: Any
    recipe: str
    single_scales: tuple[bool, bool]
    """Whether A has a single scale, and whether B has a single scale."""
    out_dtype: torch.dtype
    use_fast_accum: bool
    has_bias: bool

    def __getattr__(self, name: str) -> Any:
        return getattr(self.key, name)


_TAG_ROW_BITS = 18
_SCALE_LAYOUTS = ("no scales", "one scale", "scales of rows", "scales of blocks")


def call_tag(key: Any, rows: int) -> int:
    """Return the call tag for ``rows`` and the layout of A's scales, packed into one number.

    Flags contain the call tag. Ranks compare it to detect unequal calls (``common/peers.py``).
    """
    if not isinstance(key, ScaledKey) or not key.recipe:
        return rows
    layout = 3 if key.recipe == Recipe.BLOCK.value else 2 - key.single_scales[0]
    return rows % (1 << _TAG_ROW_BITS) | layout << _TAG_ROW_BITS


def describe_tag(tag: int) -> str:
    """Return a result of ``call_tag`` as text."""
    return f"{tag % (1 << _TAG_ROW_BITS)} rows, {_SCALE_LAYOUTS[tag >> _TAG_ROW_BITS]}"


class Scaling(NamedTuple):
    """Arguments of a GEMM call other than A and B: scales, bias and output."""

    A_scale: torch.Tensor | None = None
    B_scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None
    use_fast_accum: bool = False

    def checks(
        self, A: torch.Tensor, B: torch.Tensor, a: str = "A", b: str = "B"
    ) -> Iterator[Check]:
        """Yield the checks of these arguments, for valid A [M, K] and B [K, N] or [E, K, N].

        ``a`` and ``b`` are the names of the operands in errors.
        """
        A_scale, B_scale, bias, out_dtype, _ = self
        is_fp8 = A.dtype in FP8
        if is_fp8:
            yield from _fp8_checks(A, B, A_scale, B_scale, a, b)
        else:
            for name, scale in (("A_scale", A_scale), ("B_scale", B_scale)):
                shown: object = scale
                if isinstance(scale, torch.Tensor):
                    shown = f"{scale.dtype}, shape {tuple(scale.shape)}"
                yield name, shown, scale is None, f"None: {a} is {A.dtype}, not fp8"
        is_valid = out_dtype is None or out_dtype in (OUTPUT_DTYPES if is_fp8 else (A.dtype,))
        expected = "torch.bfloat16, torch.float16 or torch.float32" if is_fp8 else f"{a}'s dtype"
        yield "out_dtype", out_dtype, is_valid, f"None or {expected}"
        if bias is not None:
            yield "bias", bias, isinstance(bias, torch.Tensor), "None or a tensor"
            is_valid = tuple(bias.shape) == (B.shape[1],) and bias.is_contiguous()
            yield "bias.shape", tuple(bias.shape), is_valid, f"[N] = {(B.shape[1],)}, contiguous"
            dtype = self.output_dtype(A)
            yield "bias.dtype", bias.dtype, bias.dtype is dtype, f"the output's {dtype}"
            yield "bias.device", bias.device, bias.device == A.device, f"{A.device}, like {a}"

    def signature(self, B: torch.Tensor) -> tuple[object, ...]:
        """Return all properties that ``checks`` reads, except the bias; () for ``NO_SCALING``."""
        if self is NO_SCALING:
            return ()
        scales = operand_signature(B, self.A_scale, self.B_scale)
        return *scales, self.out_dtype, self.use_fast_accum

    def output_dtype(self, A: torch.Tensor) -> torch.dtype:
        """Return the output's dtype: bf16 by default if A is fp8, else A's dtype."""
        return self.out_dtype or (torch.bfloat16 if A.dtype in FP8 else A.dtype)

    def recipe(self, A: torch.Tensor, B: torch.Tensor) -> Recipe | None:
        """Return the recipe that the scales' shapes and strides match, or ``None``."""
        a, b = self.A_scale, self.B_scale
        if a is None or b is None:
            return None
        (M, K), (*experts, _, N) = A.shape, B.shape
        a_shape, b_shape = tuple(a.shape), list(b.shape)
        is_single = b.numel() == 1 or b_shape == experts
        has_rows = a.numel() == 1 or a_shape in ((M,), (M, 1))
        has_columns = is_single or b_shape in ([*experts, *end] for end in ((N,), (1, N), (N, 1)))
        if has_rows and has_columns and a.is_contiguous() and b.is_contiguous():
            return Recipe.TENSOR if a.numel() == 1 and is_single else Recipe.ROW
        fits = a.t().is_contiguous() or (experts and a.is_contiguous())
        if a_shape != (M, num_scale_blocks(K)) or not fits or b.ndim != B.ndim:
            return None
        memory_shape = [
            *experts,
            num_scale_blocks(N),
            num_scale_blocks(K),
        ]  # of both layouts of B_scale
        has_blocks = any(list(x.shape) == memory_shape and x.is_contiguous() for x in (b, b.mT))
        return Recipe.BLOCK if has_blocks else None

    def extend_key(self, key: KeyT, A: torch.Tensor, B: torch.Tensor) -> KeyT:
        """Return the tuning key of a checked call: ``key``, or a ``ScaledKey`` that extends it."""
        has_bias = self.bias is not None
        if A.dtype not in FP8 and not has_bias:
            return key
        recipe = self.recipe(A, B)
        name = "" if recipe is None else recipe.value
        has_single_scale: Any = tuple(x is not None and x.numel() == 1 for x in self[:2])
        dtype, fast = self.output_dtype(A), self.use_fast_accum
        return ScaledKey(key, name, has_single_scale, dtype, fast, has_bias)  # type: ignore[return-value]

    def scaling_constant(self, recipe: Recipe | None) -> int:
        """Return the kernels' constant SCALING for scales of this recipe."""
        accumulation = FAST_ACCUM if self.use_fast_accum else PROMOTED_ACCUM
        return int((BLOCK_SCALES if recipe is Recipe.BLOCK else accumulation).value)

    def kernel_argument(
        self, A: torch.Tensor, B: torch.Tensor, gathered: torch.Tensor | None = None
    ) -> tuple[Scales, int]:
        """Return the kernels' arguments ``scales`` and SCALING for a checked call.

        ``gathered`` has the scales of all shards of A. The scales of a shard have the layout of
        ``A_scale``.
        """
        A_scale, B_scale, recipe = self.A_scale, self.B_scale, self.recipe(A, B)
        if A_scale is None or B_scale is None:
            scaling = UNSCALED if self.bias is None else BIAS_ONLY
            return NO_SCALES._replace(bias=self.bias), scaling.value
        strides = (int(A_scale.numel() > 1), 0, 0, int(B_scale.numel() > 1))
        if recipe is Recipe.BLOCK:
            strides = (1, A.shape[0], 1, num_scale_blocks(A.shape[1]))
        scales = Scales(A_scale, B_scale, self.bias, *strides, gathered, A_scale.numel())
        return scales, self.scaling_constant(recipe)

    def scales_by_block(
        self, A: torch.Tensor, B: torch.Tensor
    ) -> tuple[Recipe, torch.Tensor, torch.Tensor]:
        """Return (recipe, scales of A, scales of B) of a checked call, as views.

        With BLOCK the scales are [M, K / 128] and [..., K / 128, N / 128], else [M, 1] and
        [..., 1, N]. ``...`` is the dimension of experts, if B has one.
        """
        recipe_and_scales: Any = self.recipe(A, B), self.A_scale, self.B_scale
        recipe, a, b = recipe_and_scales
        *experts, K, N = B.shape
        if recipe is Recipe.BLOCK:
            is_k_by_n = (
                b.shape[-2:] == (num_scale_blocks(K), num_scale_blocks(N)) and b.mT.is_contiguous()
            )
            return recipe, a, b if is_k_by_n else b.mT
        b = b.reshape(*((1,) * len(experts) if b.numel() == 1 else experts), 1, -1)
        return recipe, a.reshape(-1, 1).expand(len(A), 1), b.expand(*experts, 1, N)

    def row_wise_scales(
        self, A: torch.Tensor, B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, bool] | None:
        """Return (scales of A [M, 1], scales of B [1, N], ``use_fast_accum``) of a ROW or TENSOR
        call.

        Return ``None`` without scales.
        """
        if self.A_scale is None:
            return None
        _, a, b = self.scales_by_block(A, B)
        return a.contiguous(), b.contiguous(), self.use_fast_accum

    def dequantised(
        self, A: torch.Tensor, B: torch.Tensor, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A and B multiplied by their scales, in ``dtype``."""
        recipe, a, b = self.scales_by_block(A, B)
        if recipe is Recipe.BLOCK:
            *_, K, N = B.shape
            a, b = (x.repeat_interleave(BLOCK_ELEMENTS, -1) for x in (a, b))
            a, b = a[:, :K], b.repeat_interleave(BLOCK_ELEMENTS, -2)[..., :K, :N]
        return A.to(dtype) * a.to(dtype), B.to(dtype) * b.to(dtype)


NO_SCALING = Scaling()


def scaling_of(
    A_scale: torch.Tensor | None = None,
    B_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    **_: Any,
) -> Scaling:
    """Return the ``Scaling`` of a call's keywords; without tensors and dtype ``NO_SCALING``."""
    if A_scale is None and B_scale is None and bias is None and out_dtype is None:
        return NO_SCALING
    return Scaling(A_scale, B_scale, bias, out_dtype, use_fast_accum)


def library_supports(A: torch.Tensor, B: torch.Tensor, scaling: Scaling) -> bool:
    """Return whether torch can multiply the operands: cuBLAS restricts fp8 operands."""
    if A.dtype not in FP8 or A.device.type == "cpu":
        return True
    (K, N), is_block = B.shape, scaling.recipe(A, B) is Recipe.BLOCK
    fits = K % 16 == N % 16 == 0 and not (
        is_block and (num_scale_blocks(K) % 4 or A.dtype is FP8[1])
    )
    return fits and scaling.output_dtype(A) is torch.bfloat16


def library_check(algorithm: str, A: torch.Tensor, B: torch.Tensor, scaling: Scaling) -> Check:
    """Return the check that torch can multiply the operands, for an error about ``algorithm``."""
    expected = "another algorithm: scaled_mm requires bf16 output and K and N divisible by 16; "
    expected += "block scales also require e4m3 and K / 128, rounded up, divisible by 4"
    return "algorithm", algorithm, library_supports(A, B, scaling), expected


def async_tp_supports(A: torch.Tensor, B: torch.Tensor, scaling: Scaling) -> bool:
    """Return whether async tensor parallelism supports the operands.

    It supports fp8 only as e4m3 without BLOCK scales.
    """
    if A.dtype not in FP8:
        return True
    return A.dtype is torch.float8_e4m3fn and scaling.recipe(A, B) is not Recipe.BLOCK


def async_tp_check(algorithm: str, A: torch.Tensor, B: torch.Tensor, scaling: Scaling) -> Check:
    """Return the check that async TP supports A and B, for an error about ``algorithm``."""
    expected = "another algorithm for block scales and for e5m2"
    return "algorithm", algorithm, async_tp_supports(A, B, scaling), expected


def library_matmul(
    A: torch.Tensor, B: torch.Tensor, scaling: Scaling, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``A @ B`` by torch's ``matmul`` or ``scaled_mm``, in ``out`` or new memory.

    On CPU, fp8 operands are multiplied in fp32.
    """
    if A.dtype not in FP8:
        return torch.matmul(A, B, out=out)
    bias, dtype = scaling.bias, scaling.output_dtype(A)
    if scaling.recipe(A, B) is Recipe.BLOCK and len(A) % 4:
        return _padded_matmul(A, B, scaling, out)
    if A.device.type == "cpu":
        product = torch.matmul(*scaling.dequantised(A, B)) + (0 if bias is None else bias)
        return product.to(dtype) if out is None else out.copy_(product)
    recipe, a_scale, b_scale = scaling.scales_by_block(A, B)
    if recipe is Recipe.ROW:
        a_scale, b_scale = a_scale.contiguous(), b_scale.contiguous()
    elif recipe is Recipe.TENSOR:
        a_scale, b_scale = a_scale[:1, :1], b_scale[:1, :1]
    fast = scaling.use_fast_accum and recipe is not Recipe.BLOCK  # torch refuses it
    functional: Any = torch.nn.functional
    if out is not None or not hasattr(functional, "scaled_mm"):  # torch below 2.11
        options: Any = {"bias": bias, "out_dtype": dtype, "use_fast_accum": fast, "out": out}
        return torch._scaled_mm(A, B, a_scale, b_scale, **options)
    types = functional.ScalingType
    a_type = b_type = types.RowWise if recipe is Recipe.ROW else types.TensorWise
    if recipe is Recipe.BLOCK:
        a_type, b_type = types.BlockWise1x128, types.BlockWise128x128
    return functional.scaled_mm(  # type: ignore[no-any-return]
        A, B, a_scale, a_type, b_scale, b_type,
        bias=bias, output_dtype=dtype, use_fast_accum=fast,
    )  # fmt: skip


def _padded_matmul(
    A: torch.Tensor, B: torch.Tensor, scaling: Scaling, out: torch.Tensor | None
) -> torch.Tensor:
    """Return ``library_matmul`` with rows padded to a multiple of 4, which cuBLAS requires."""
    assert scaling.A_scale is not None
    pad, num_padding_rows = torch.nn.functional.pad, -len(A) % 4
    scaling = scaling._replace(A_scale=pad(scaling.A_scale.t(), (0, num_padding_rows)).t())
    padded = pad(A.view(torch.uint8), (0, 0, 0, num_padding_rows)).view(A.dtype)
    product = library_matmul(padded, B, scaling)[: len(A)]
    return product if out is None else out.copy_(product)


def _fp8_checks(
    A: torch.Tensor, B: torch.Tensor, A_scale: Any, B_scale: Any, a: str, b: str
) -> Iterator[Check]:
    expected = "16-bit operands: fp8 requires a GPU of compute capability 8.9 or later"
    yield f"{a}.dtype", A.dtype, current_device().multiplies_fp8, expected
    expected = f"torch.float8_e4m3fn, because {a} is fp8"
    yield f"{b}.dtype", B.dtype, B.dtype is torch.float8_e4m3fn, expected
    *experts, K, N = B.shape
    expected = "unit stride along K: an fp8 {} must be K-major, the transpose of a contiguous {}"
    is_valid = B.stride(-2) == 1 or K == 1
    yield f"{b}.stride()", B.stride(), is_valid, expected.format(b, [*experts, N, K])
    for name, scale in (("A_scale", A_scale), ("B_scale", B_scale)):
        yield name, scale, isinstance(scale, torch.Tensor), f"a tensor, because {a} is fp8"
        yield f"{name}.dtype", scale.dtype, scale.dtype is torch.float32, "torch.float32"
        yield f"{name}.device", scale.device, scale.device == A.device, f"{A.device}, like {a}"
        yield gradient_check(name, scale)
    M, along_k, along_n = len(A), num_scale_blocks(K), num_scale_blocks(N)
    passed = "; ".join(f"{tuple(scale.shape)}, {scale.stride()}" for scale in (A_scale, B_scale))
    of_expert = f", each for {experts} experts" if experts else ""
    expected = (
        f"shapes and strides of one recipe: one element each; [{M}] or [{M}, 1] for {a}, and "
        f"[{N}], [1, {N}] or [{N}, 1] for {b}; or [{M}, {along_k}] with strides (1, {M})"
        f"{' or contiguous' if experts else ''} for {a}, and [{along_k}, {along_n}] with strides "
        f"(1, {along_k}) or a contiguous [{along_n}, {along_k}] for {b}{of_expert}"
    )
    is_valid = Scaling(A_scale, B_scale).recipe(A, B) is not None
    yield "A_scale, B_scale", passed, is_valid, expected
