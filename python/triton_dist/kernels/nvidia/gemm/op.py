"""GEMM on one GPU: ``matmul``, and its two kernels as separate ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import triton

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.context import DTYPES, raise_first_error
from triton_dist.kernels.common.gemm.launch import sharded_gemm
from triton_dist.kernels.common.gemm.scales import (
    FP8,
    NO_SCALING,
    Scaling,
    library_matmul,
    scaling_of,
)
from triton_dist.kernels.common.gemm.spaces import (
    fits_gemm,
    get_config_space,
    predict_gemm_ms,
    predict_library_ms,
    tiles_with_persistent,
    warp_specialized_tiles,
)
from triton_dist.kernels.common.op import check_tiles, tuned
from triton_dist.runtime.device import current_device
from triton_dist.runtime.launch import Launch


def _check(A: torch.Tensor, B: torch.Tensor, scaling: Scaling = NO_SCALING) -> None:
    try:
        if A.ndim != 2 or B.ndim != 2 or A.shape[1] != B.shape[0]:
            raise InvalidArgument(
                "matmul", "B", tuple(B.shape), f"[K, N] for an A of {tuple(A.shape)} = [M, K]"
            )
        is_supported_without_scales = A.dtype == B.dtype and A.dtype in DTYPES
        if not is_supported_without_scales and A.dtype not in FP8:
            expected = f"A's dtype ({A.dtype}): fp16, bf16 or fp32"
            raise InvalidArgument("matmul", "B.dtype", B.dtype, expected)
        if A.device != B.device or A.device.type != current_device().torch_device.type:
            raise InvalidArgument(
                "matmul",
                "B.device",
                B.device,
                f"{current_device().torch_device}, like A ({A.device})",
            )
        if scaling is not NO_SCALING or not is_supported_without_scales:
            raise_first_error("matmul", scaling.checks(A, B))
    except (AttributeError, TypeError) as error:
        for name, matrix in (("A", A), ("B", B)):
            if not isinstance(matrix, torch.Tensor):
                raise InvalidArgument("matmul", name, matrix, "a tensor") from error
        raise


class GEMMKey(NamedTuple):
    """Tuning key of a GEMM. One tuning serves a range of M."""

    M: int
    N: int
    K: int
    dtype: torch.dtype
    A_strides: tuple[int, ...] | None
    """Strides of A; ``None`` if A is contiguous."""
    B_strides: tuple[int, ...]


def _key(A: torch.Tensor, B: torch.Tensor, *args: Any, **kwargs: Any) -> GEMMKey:
    scaling = scaling_of(**kwargs) if kwargs else NO_SCALING
    _check(A, B, scaling)
    (M, K), N = A.shape, B.shape[1]
    A_strides = None if A.is_contiguous() else tuple(A.stride())
    key = GEMMKey(M, N, K, A.dtype, A_strides, tuple(B.stride()))
    return scaling.extend_key(key, A, B)


def _num_waves(key: GEMMKey, config: Mapping[str, Any]) -> float:
    if config["gemm_config"] is None:  # a library, whose tiles are unknown
        tiles = triton.cdiv(key.M, 128) * triton.cdiv(key.N, 256)
        return float(tiles / current_device().num_sms)
    tile = config["gemm_config"].kwargs
    tiles = triton.cdiv(key.M, tile["BLOCK_SIZE_M"]) * triton.cdiv(key.N, tile["BLOCK_SIZE_N"])
    return float(tiles / current_device().num_sms)


def _predicted_ms(
    config: Mapping[str, Any], /, A: torch.Tensor, B: torch.Tensor, *_: Any, **__: Any
) -> float:
    tiles, sizes = config["gemm_config"], (A.shape[0], B.shape[1], A.shape[1], A.dtype)
    return (
        predict_library_ms(*sizes)
        if tiles is None
        else predict_gemm_ms(tiles, *sizes, config["persistent"])
    )


def fits_matmul(
    config: Mapping[str, Any], /, A: torch.Tensor, B: torch.Tensor, *args: Any, **kwargs: Any
) -> bool:
    """Return whether a config of ``matmul`` is worth trying for a call."""
    if config["gemm_config"] is None:
        return A.dtype in FP8 and not current_device().interprets
    return fits_gemm(config, A, B, *args, **kwargs)


def _kernel_configs(persistent: bool) -> list[dict[str, Any]]:
    return [{"gemm_config": config} for config in get_config_space(persistent)]


def matmul_configs() -> list[dict[str, Any]]:
    """Return the configs of ``matmul`` to try on this device. A ``None`` config is the library."""
    specialized = ((tiles, True) for tiles in warp_specialized_tiles())
    return [
        {"gemm_config": tiles, "persistent": persistent}
        for tiles, persistent in (
            *tiles_with_persistent(get_config_space),
            *specialized,
            (None, True),
        )
    ]


def _build_launch(
    A: torch.Tensor,
    B: torch.Tensor,
    config: triton.Config,
    persistent: bool,
    scaling: Scaling = NO_SCALING,
) -> tuple[torch.Tensor, Launch]:
    _check(A, B, scaling)
    dtype = A.dtype if scaling is NO_SCALING else scaling.output_dtype(A)
    C = torch.empty(A.shape[0], B.shape[1], dtype=dtype, device=A.device)
    check_tiles("matmul", config)
    return C, sharded_gemm(
        A, B, C, config,
        num_sms=current_device().num_sms, persistent=persistent,
        scales=scaling.kernel_argument(A, B),
    )  # fmt: skip


def _run(
    A: torch.Tensor,
    B: torch.Tensor,
    config: triton.Config,
    persistent: bool,
    scaling: Scaling = NO_SCALING,
) -> torch.Tensor:
    C, launch = _build_launch(A, B, config, persistent, scaling)
    launch.run()
    return C


def _prepare_fn(persistent: bool) -> Callable[..., None]:
    def prepare(
        A: torch.Tensor, B: torch.Tensor, *args: Any, gemm_config: Any, **kwargs: Any
    ) -> None:
        if gemm_config is not None:  # a library compiles nothing
            is_persistent = kwargs.get("persistent", persistent)
            _build_launch(A, B, gemm_config, is_persistent, scaling_of(**kwargs))[1].compile()

    return prepare


@tuned(
    config_space=matmul_configs,
    key_fn=_key,
    prune_fn=fits_matmul,
    prepare_fn=_prepare_fn(True),
    prior_fn=_predicted_ms,
    scope="rank",
    sizes=("M",),
    waves_fn=_num_waves,
    fallback_fn=lambda config: config["gemm_config"] is None,
    version="2",  # change when the shipped results (records/) must no longer be used
)
def matmul(
    A: torch.Tensor,
    B: torch.Tensor,
    gemm_config: triton.Config | None,
    persistent: bool = True,
    *,
    A_scale: torch.Tensor | None = None,
    B_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Return ``A @ B``, accumulated in fp32. Each rank tunes alone, once per range of M.

    fp8 operands are multiplied by their scales.

    Args:
        A: [M, K], any strides; fp16, bf16, fp32, fp8 e4m3 or e5m2.
        B: [K, N], any strides, dtype of A. If A is fp8, B is e4m3 and K-major: the transpose of a
            contiguous [N, K]. ``torch.backends.cuda.matmul.allow_tf32`` applies to fp32 operands.
        gemm_config: tile sizes (tuned). ``None``: torch's ``scaled_mm``, for fp8 operands only.
        persistent: use the persistent kernel (tuned).
        A_scale, B_scale: fp32 scales of fp8 operands: one per tensor, one per row of A and column
            of B, or one per block of 128. ``triton_dist.kernels.common.gemm.scales`` lists the
            layouts.
        bias: [N], contiguous, dtype of the output; added before rounding.
        out_dtype: bf16 (default), fp16 or fp32 for fp8 operands; otherwise A's dtype.
        use_fast_accum: add fp8 products over all of K in the accumulator of Hopper's tensor cores,
            which has fewer bits than fp32. By default, partial sums over 128 elements of K are
            added in fp32.

    Returns:
        [M, N], ``out_dtype``.

    Raises:
        InvalidArgument: shapes, strides, dtypes or devices do not match.
    """
    scaling = scaling_of(A_scale, B_scale, bias, out_dtype, use_fast_accum)
    if gemm_config is None and getattr(A, "dtype", None) in FP8:
        _check(A, B, scaling)
        return library_matmul(A, B, scaling)
    return _run(A, B, gemm_config, persistent, scaling)


@tuned(
    config_space=lambda: _kernel_configs(True),
    key_fn=_key,
    prune_fn=fits_gemm,
    prepare_fn=_prepare_fn(True),
    scope="rank",
    sizes=("M",),
    waves_fn=_num_waves,
    version="2",  # change when the shipped results (records/) must no longer be used
)
def gemm_persistent(
    A: torch.Tensor, B: torch.Tensor, ctx: object = None, *, gemm_config: triton.Config
) -> torch.Tensor:
    """Return ``A @ B`` from the persistent kernel. ``ctx`` is ignored.

    ``matmul`` describes the other arguments.
    """
    return _run(A, B, gemm_config, True)


@tuned(
    config_space=lambda: _kernel_configs(False),
    key_fn=_key,
    prune_fn=fits_gemm,
    prepare_fn=_prepare_fn(False),
    scope="rank",
    sizes=("M",),
    waves_fn=_num_waves,
    version="2",  # change when the shipped results (records/) must no longer be used
)
def gemm_non_persistent(
    A: torch.Tensor, B: torch.Tensor, ctx: object = None, *, gemm_config: triton.Config
) -> torch.Tensor:
    """Return ``A @ B`` from the non-persistent kernel, which reads through pointers.

    ``ctx`` is ignored. ``matmul`` describes the other arguments.
    """
    return _run(A, B, gemm_config, False)
