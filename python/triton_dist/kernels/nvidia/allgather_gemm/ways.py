"""What a tuning of AllGather-GEMM tries: tiles and communication together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton

from triton_dist.kernels.common import vendor
from triton_dist.kernels.common.gemm.gathered_spaces import (
    fits_fused,
    fits_shape,
    fused_tiles,
    split_k_tiles,
)
from triton_dist.kernels.common.gemm.spaces import (
    get_config_space,
    warp_specialized_tiles,
)
from triton_dist.kernels.common.launch import fits_descriptor
from triton_dist.kernels.common.slots.gathered import AllGatherMethod
from triton_dist.kernels.common.vendor import VendorMethod
from triton_dist.kernels.nvidia.allgather_gemm.serial import COMM_SMS, fits_serial
from triton_dist.kernels.nvidia.gemm import prune_fn as suits_gemm
from triton_dist.runtime.device import current_device


def prune_fn(
    config: Mapping[str, Any], A: torch.Tensor, B: torch.Tensor, ctx: Any, *args: Any, **kwargs: Any
) -> bool:
    """Whether a config is worth trying for A [M_per_rank, K] and B [K, N_per_rank]."""
    if isinstance(config.get("method"), VendorMethod):
        return bool(ctx.num_ranks > 1)  # one rank gathers nothing
    if config.get("method") is AllGatherMethod.SERIAL:
        return fits_serial(A, config.get("num_comm_sms"), ctx.num_ranks)
    if ctx.num_ranks <= 2 and config.get("method") is AllGatherMethod.RING_PUSH_1D:
        return False  # with two ranks a ring is a full mesh
    if not suits_gemm(config, A, B, ctx):
        return False
    if config.get("method") is AllGatherMethod.FUSED_PUSH and not fits_fused(A, B, ctx.num_ranks):
        return False
    tiles = config["gemm_config"]
    if "SPLIT_K" in tiles.kwargs and not fits_descriptor(B):
        return False  # on pointers it would be the same as another one
    return fits_shape(tiles, A.shape[0], B.shape[1], ctx.num_ranks)


def config_space() -> list[dict[str, Any]]:
    """Tiles and communication together; the first is the default.

    Every tile shape with the schedule that was best nearly everywhere on 4 H200 (push, one stream,
    one chunk), then every other schedule with the default tiles, then tiles for specialised warps
    and those that are cut along K, then those with the transfer in the same grid, then our
    all-gather before torch's product (interpreted, with one number of programs), then what torch
    brings.
    """
    descriptors = current_device().prefers_descriptors
    tiles = [
        (config, persistent)
        for persistent in (descriptors, not descriptors)
        for config in get_config_space(persistent)
    ]
    schedules = [
        (AllGatherMethod.FULL_MESH_PUSH, 1, 2),
        (AllGatherMethod.FULL_MESH_PUSH, 2, 2),
        (AllGatherMethod.FULL_MESH_PUSH, 1, 4),
        (AllGatherMethod.FULL_MESH_PULL, 1, 1),
        (AllGatherMethod.FULL_MESH_PULL, 2, 2),
        (AllGatherMethod.RING_PUSH_1D, 1, 1),
        (AllGatherMethod.RING_PUSH_1D, 1, 4),
    ]
    default, persistent = tiles[0]
    interpreted = current_device().interprets
    by_descriptor = descriptors or interpreted
    specialized = warp_specialized_tiles()
    more = [*specialized, *(split_k_tiles() if by_descriptor else ())]
    fused = fused_tiles() if by_descriptor else []
    serial = COMM_SMS[: 1 if interpreted else None]
    return (
        [_config(config, p, AllGatherMethod.FULL_MESH_PUSH, 1, 1) for config, p in tiles]
        + [_config(default, persistent, *schedule) for schedule in schedules]
        + [_config(config, True, AllGatherMethod.FULL_MESH_PUSH, 1, 1) for config in more]
        + [
            _config(config, True, AllGatherMethod.FULL_MESH_PUSH, 1, num_chunks)
            for config in specialized[:2]
            for num_chunks in (2, 4)
        ]
        + [
            _config(config, True, AllGatherMethod.FUSED_PUSH, 1, chunks, num_comm_sms)
            for config, num_comm_sms, chunks in fused
        ]
        + [_config(None, None, AllGatherMethod.SERIAL, 1, 1, number) for number in serial]
        + [_config(None, None, method, 1, 1) for method in vendor.candidates_here()]
    )


def _config(
    gemm_config: triton.Config | None,
    persistent: bool | None,
    method: AllGatherMethod | VendorMethod,
    num_streams: int,
    num_chunks: int,
    num_comm_sms: int | None = None,
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "gemm_config": gemm_config,
        "persistent": persistent,
        "method": method,
        "num_streams": num_streams,
        "num_chunks": num_chunks,
    }
    # Set only for methods that send from SMs: digests of all other configs stay valid.
    return config if num_comm_sms is None else config | {"num_comm_sms": num_comm_sms}
