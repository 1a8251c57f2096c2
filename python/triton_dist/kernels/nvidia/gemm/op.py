"""GEMM on one GPU: ``matmul``, and its two kernels as separate ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import triton

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.gemm.launch import sharded_gemm
from triton_dist.kernels.common.gemm.spaces import (
    fits_gemm,
    get_config_space,
    warp_specialized_tiles,
    with_persistent,
)
from triton_dist.kernels.common.launch import Launch
from triton_dist.kernels.common.op import check_tiles, tuned
from triton_dist.runtime.device import current_device


def _check(A: torch.Tensor, B: torch.Tensor) -> None:
    try:
        if A.ndim != 2 or B.ndim != 2 or A.shape[1] != B.shape[0]:
            raise InvalidArgument(
                "matmul", "B", tuple(B.shape), f"[K, N] for an A of {tuple(A.shape)} = [M, K]"
            )
        if A.dtype != B.dtype or A.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise InvalidArgument(
                "matmul", "B.dtype", B.dtype, f"A's dtype ({A.dtype}): fp16, bf16 or fp32"
            )
        if A.device != B.device or A.device.type != current_device().torch_device.type:
            raise InvalidArgument(
                "matmul",
                "B.device",
                B.device,
                f"{current_device().torch_device}, like A ({A.device})",
            )
    except (AttributeError, TypeError) as error:
        for name, matrix in (("A", A), ("B", B)):
            if not isinstance(matrix, torch.Tensor):
                raise InvalidArgument("matmul", name, matrix, "a tensor") from error
        raise


class GEMMKey(NamedTuple):
    """Key of a GEMM; M is bucketed."""

    M: int
    N: int
    K: int
    dtype: torch.dtype
    A_strides: tuple[int, ...] | None
    """``None`` if A is row-major, so that the key does not depend on M."""
    B_strides: tuple[int, ...]


def _key(A: torch.Tensor, B: torch.Tensor, *args: Any, **kwargs: Any) -> GEMMKey:
    _check(A, B)
    (M, K), N = A.shape, B.shape[1]
    A_strides = None if A.is_contiguous() else tuple(A.stride())
    return GEMMKey(M, N, K, A.dtype, A_strides, tuple(B.stride()))


def _waves(key: GEMMKey, config: Mapping[str, Any]) -> float:
    tile = config["gemm_config"].kwargs
    tiles = triton.cdiv(key.M, tile["BLOCK_SIZE_M"]) * triton.cdiv(key.N, tile["BLOCK_SIZE_N"])
    return float(tiles / current_device().num_sms)


def _space(persistent: bool) -> list[dict[str, Any]]:
    return [{"gemm_config": config} for config in get_config_space(persistent)]


def _both_spaces() -> list[dict[str, Any]]:
    specialized = ((tiles, True) for tiles in warp_specialized_tiles())
    return [
        {"gemm_config": tiles, "persistent": persistent}
        for tiles, persistent in (*with_persistent(get_config_space), *specialized)
    ]


def _launch(
    A: torch.Tensor, B: torch.Tensor, config: triton.Config, persistent: bool
) -> tuple[torch.Tensor, Launch]:
    _check(A, B)
    C = torch.empty(A.shape[0], B.shape[1], dtype=A.dtype, device=A.device)
    check_tiles("matmul", config)
    return C, sharded_gemm(A, B, C, config, num_sms=current_device().num_sms, persistent=persistent)


def _run(A: torch.Tensor, B: torch.Tensor, config: triton.Config, persistent: bool) -> torch.Tensor:
    C, launch = _launch(A, B, config, persistent)
    launch.run()
    return C


def _prepare(persistent: bool) -> Callable[..., None]:
    def prepare(
        A: torch.Tensor, B: torch.Tensor, *args: Any, gemm_config: triton.Config, **kwargs: Any
    ) -> None:
        _launch(A, B, gemm_config, kwargs.get("persistent", persistent))[1].compile()

    return prepare


@tuned(
    config_space=_both_spaces,
    key_fn=_key,
    prune_fn=fits_gemm,
    prepare_fn=_prepare(True),
    scope="rank",
    sizes=("M",),
    waves_fn=_waves,
    version="2",  # change when the shipped results (records/) must no longer be used
)
def matmul(
    A: torch.Tensor, B: torch.Tensor, gemm_config: triton.Config, persistent: bool = True
) -> torch.Tensor:
    """Return ``A @ B``, accumulated in fp32. Each rank tunes alone, once per bucket of M.

    Args:
        A: [M, K], any strides; fp16, bf16 or fp32.
        B: [K, N], any strides, dtype of A. fp32 products obey
            ``torch.backends.cuda.matmul.allow_tf32``.
        gemm_config: tile sizes (tuned).
        persistent: use the persistent kernel (tuned).

    Returns:
        [M, N], dtype of A.

    Raises:
        InvalidArgument: shapes, dtypes or devices do not match.
    """
    return _run(A, B, gemm_config, persistent)


@tuned(
    config_space=lambda: _space(True),
    key_fn=_key,
    prune_fn=fits_gemm,
    prepare_fn=_prepare(True),
    scope="rank",
    sizes=("M",),
    waves_fn=_waves,
    version="2",  # change when the shipped results (records/) must no longer be used
)
def gemm_persistent(
    A: torch.Tensor, B: torch.Tensor, ctx: object = None, *, gemm_config: triton.Config
) -> torch.Tensor:
    """Return ``A @ B`` from the persistent kernel. ``ctx`` is ignored; arguments: ``matmul``."""
    return _run(A, B, gemm_config, True)


@tuned(
    config_space=lambda: _space(False),
    key_fn=_key,
    prune_fn=fits_gemm,
    prepare_fn=_prepare(False),
    scope="rank",
    sizes=("M",),
    waves_fn=_waves,
    version="2",  # change when the shipped results (records/) must no longer be used
)
def gemm_non_persistent(
    A: torch.Tensor, B: torch.Tensor, ctx: object = None, *, gemm_config: triton.Config
) -> torch.Tensor:
    """Return ``A @ B`` from the non-persistent kernel, which reads through pointers.

    ``ctx`` is ignored; arguments: ``matmul``.
    """
    return _run(A, B, gemm_config, False)
