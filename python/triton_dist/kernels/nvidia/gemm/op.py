"""Plain GEMM, its config space, and what prunes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton

from triton_dist import tune
from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.gemm.launch import (
    can_specialize_warps,
    config_for,
    sharded_gemm,
)
from triton_dist.kernels.common.gemm.spaces import get_config_space, warp_specialized_tiles
from triton_dist.kernels.common.launch import Launch, fits_descriptor
from triton_dist.kernels.common.op import tuned
from triton_dist.kernels.nvidia.gemm_perf_model import get_tensorcore_tflops
from triton_dist.runtime.device import current_device
from triton_dist.runtime.peaks import device_peak

# Operations that a memory access must be worth before a GEMM counts as compute-bound: time of the
# arithmetic over time of the traffic.
_COMPUTE_BOUND = 2.0


def _gemm_config(config: Mapping[str, Any]) -> triton.Config:
    """The one ``triton.Config`` in ``config``, under any name."""
    found = [value for value in config.values() if isinstance(value, triton.Config)]
    if len(found) != 1:
        raise InvalidArgument(
            "prune", "config", config, "a config that holds exactly one triton.Config"
        )
    return found[0]


def prune_fn_by_shared_memory(
    config: Mapping[str, Any], A: torch.Tensor, *args: Any, **kwargs: Any
) -> bool:
    """Keep a config whose pipelined tiles of A and B fit the device's shared memory per block.

    Counts ``num_stages`` tiles of A and of B in A's dtype; what the epilogue stages comes on top
    where the compiler cannot reuse them, and then shows as a failed compilation.
    """
    gemm = _gemm_config(config)
    tile = gemm.kwargs
    elements = (tile["BLOCK_SIZE_M"] + tile["BLOCK_SIZE_N"]) * tile["BLOCK_SIZE_K"]
    return bool(
        A.element_size() * elements * gemm.num_stages <= current_device().shared_memory_bytes()
    )


def prune_fn_by_group_size_m(
    config: Mapping[str, Any], A: torch.Tensor, B: torch.Tensor, *args: Any, **kwargs: Any
) -> bool:
    """Drop ``GROUP_SIZE_M = 1`` where the roofline says that the GEMM is compute-bound, and nothing
    else.

    A [M_per_rank, K] is gathered by an op with a context: with ``num_ranks`` on any argument, M is
    the gathered one. Without grouping, tiles that run together share too little of the L2 cache.
    """
    if _gemm_config(config).kwargs.get("GROUP_SIZE_M") != 1:
        return True
    ranks = next(
        (arg.num_ranks for arg in (*args, *kwargs.values()) if hasattr(arg, "num_ranks")), 1
    )
    M, K, N = A.shape[0] * ranks, A.shape[1], B.shape[1]
    arithmetic = 2.0 * M * N * K / (get_tensorcore_tflops(A.dtype) * 1e12)
    traffic = (M * K + K * N + M * N) * A.element_size() / (device_peak().memory_gbps * 1e9)
    return arithmetic / traffic <= _COMPUTE_BOUND


def _check(A: torch.Tensor, B: torch.Tensor) -> None:
    if A.ndim != 2 or B.ndim != 2 or A.shape[1] != B.shape[0]:
        raise InvalidArgument(
            "matmul", "B", tuple(B.shape), f"[K, N] for an A of {tuple(A.shape)} = [M, K]"
        )
    if A.dtype != B.dtype or A.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise InvalidArgument(
            "matmul", "B.dtype", B.dtype, f"that of A ({A.dtype}), one of fp16, bf16, fp32"
        )
    if A.device != B.device or A.device.type != current_device().torch_device.type:
        raise InvalidArgument(
            "matmul", "B.device", B.device, f"{current_device().torch_device}, as A's {A.device}"
        )


def _key(A: torch.Tensor, B: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    _check(A, B)
    return (tune.to_hashable(A), tune.to_hashable(B))


def prune_fn(
    config: Mapping[str, Any], A: torch.Tensor, B: torch.Tensor, *args: Any, **kwargs: Any
) -> bool:
    """Keep configs that fit shared memory as launched for A's dtype, are worth trying, and would
    not fall back to another kernel: specialised warps need 16-bit operands that TMA can read."""
    if _gemm_config(config).kwargs.get("WARP_SPECIALIZED") and not (
        can_specialize_warps(A.dtype)
        and A.is_contiguous()
        and fits_descriptor(A, B)
        and B.shape[1] * B.element_size() % 16 == 0  # rows of the product
    ):
        return False
    launched = {"gemm_config": config_for(_gemm_config(config), A.dtype)}
    return prune_fn_by_shared_memory(launched, A) and prune_fn_by_group_size_m(
        launched, A, B, *args, **kwargs
    )


def _space(persistent: bool) -> list[dict[str, Any]]:
    return [{"gemm_config": config} for config in get_config_space(persistent)]


def _both_spaces() -> list[dict[str, Any]]:
    first = current_device().prefers_descriptors
    return [
        {**config, "persistent": kind} for kind in (first, not first) for config in _space(kind)
    ] + [{"gemm_config": config, "persistent": True} for config in warp_specialized_tiles()]


def _launch(
    A: torch.Tensor, B: torch.Tensor, config: triton.Config, persistent: bool
) -> tuple[torch.Tensor, Launch]:
    _check(A, B)
    C = torch.empty(A.shape[0], B.shape[1], dtype=A.dtype, device=A.device)
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
    prune_fn=prune_fn,
    prepare_fn=_prepare(True),
    scope="rank",
)
def matmul(
    A: torch.Tensor, B: torch.Tensor, gemm_config: triton.Config, persistent: bool = True
) -> torch.Tensor:
    """``A @ B``: A [M, K], B [K, N] of one dtype (fp16, bf16, fp32), any strides; returns [M, N] of
    that dtype.

    fp32 accumulation; fp32 inputs are multiplied as ``torch.backends.cuda.matmul.allow_tf32`` says.
    Each rank tunes alone.

    Raises:
        InvalidArgument: shapes, dtypes or devices that do not go together.
    """
    return _run(A, B, gemm_config, persistent)


@tuned(
    config_space=lambda: _space(True),
    key_fn=_key,
    prune_fn=prune_fn,
    prepare_fn=_prepare(True),
    scope="rank",
)
def gemm_persistent(
    A: torch.Tensor, B: torch.Tensor, ctx: object = None, *, gemm_config: triton.Config
) -> torch.Tensor:
    """``matmul`` by the persistent kernel. ``ctx`` is not looked at; callers may pass ag_gemm's."""
    return _run(A, B, gemm_config, True)


@tuned(
    config_space=lambda: _space(False),
    key_fn=_key,
    prune_fn=prune_fn,
    prepare_fn=_prepare(False),
    scope="rank",
)
def gemm_non_persistent(
    A: torch.Tensor, B: torch.Tensor, ctx: object = None, *, gemm_config: triton.Config
) -> torch.Tensor:
    """``matmul`` by the kernel on pointers. ``ctx`` is not looked at; callers may pass
    ag_gemm's."""
    return _run(A, B, gemm_config, False)
