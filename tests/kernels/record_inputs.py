"""Calls for the keys of shipped records, with meta tensors, for the ops of every OpInfo.

A context is replaced by an object with the attributes that ``key_fn`` and ``prune_fn`` read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from triton_dist.kernels.common.context import ProductKey
from triton_dist.kernels.common.moe.summing import SumKey
from triton_dist.kernels.nvidia.allgather_group_gemm.context import RoutedKey
from triton_dist.kernels.nvidia.grouped_gemm.algorithms import GroupedKey
from triton_dist.testing.opinfo.base import Call, OpInfo
from triton_dist.testing.opinfo.moe import FIRST_PRODUCTS, GroupedShape

BF16 = torch.bfloat16
LAYOUTS = ("row-major", "column-major", "strided")
OPTIONS = {"gemm_rs": ("reduce_st", False), "gemm_ar": ("copy_to_local", True)}
"""Argument that is part of the key in addition to the operands, and its default."""


def meta(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


def laid_out(layout: str, dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    """Return a meta tensor whose last two dimensions have the given layout."""
    *batch, rows, columns = sizes
    if layout == "row-major":
        return meta(dtype, *sizes)
    if layout == "column-major":
        return meta(dtype, *batch, columns, rows).mT
    return meta(dtype, *batch, rows, 2 * columns)[..., ::2]


def inputs_for(info: OpInfo[Any], key: Any) -> Call:
    """Return the largest call of ``key``."""
    if info.name == "ag_gemm":
        return ag_gemm_inputs(key)
    if info.name in OPTIONS:
        return summed_gemm_inputs(info, key)
    if info.name == "ag_group_gemm":
        return ag_group_gemm_inputs(key)
    if info.name == "grouped_gemm":
        return grouped_gemm_inputs(key)
    if info.name.startswith("run_moe_reduce"):
        return moe_reduce_inputs(info, key)
    return collective_inputs(info, key)


def ag_gemm_inputs(key: tuple[ProductKey, bool]) -> Call:
    (M, columns, K, dtype, layout, _, num_ranks), local_copy = key
    rows = M // num_ranks
    ctx = SimpleNamespace(
        K=K, N=columns * num_ranks, max_M=rows * num_ranks, dtype=dtype, num_ranks=num_ranks,
        checked_keys={}, buffer=SimpleNamespace(num_ranks=num_ranks),
        symm_workspace=meta(dtype, 1, K),
    )  # fmt: skip
    args = meta(dtype, rows, K), laid_out(layout, dtype, K, columns), ctx
    return args, {} if local_copy else {"local_copy": False}


def summed_gemm_inputs(info: Any, key: tuple[ProductKey, bool]) -> Call:
    (M, N, K, dtype, layout, contiguous, num_ranks), option = key
    M -= 0 if info.any_rows else M % num_ranks  # the end of a bucket may not be a multiple
    A = meta(dtype, M, K) if contiguous else meta(dtype, M, 2 * K)[:, ::2]
    slots = SimpleNamespace(epoch=meta(dtype, 1))
    ctx = SimpleNamespace(
        N=N, max_M=M, output_dtype=dtype, num_ranks=num_ranks, checked_keys={}, reduce_st=option,
        buffer=SimpleNamespace(slots=slots, num_ranks=num_ranks),
    )  # fmt: skip
    return (A, laid_out(layout, dtype, K, N), ctx), {OPTIONS[info.name][0]: option}


def ag_group_gemm_inputs(key: RoutedKey) -> Call:
    M, N, K, E, topk, dtype, layout, num_ranks = key
    M -= M % num_ranks  # the end of a bucket may not be a multiple of the ranks
    b = laid_out(layout, dtype, E, K, N)
    ctx = SimpleNamespace(
        max_ntokens=M, K=K, N_per_rank=N, num_experts=E, topk=topk, dtype=dtype,
        num_ranks=num_ranks, checked_keys={},
        buffer=SimpleNamespace(num_ranks=num_ranks, workspace=meta(dtype, 1)),
    )  # fmt: skip
    return (meta(dtype, M // num_ranks, K), b, ctx, meta(torch.int32, M, topk)), {}


def grouped_gemm_inputs(key: GroupedKey) -> Call:
    M, N, K, E, topk, dtype, layout, rows, order, activation = key
    A = meta(dtype, M if rows == "token" else M * topk, K)
    B = laid_out(layout, dtype, E, K, N)
    return (A, B, meta(torch.int32, M, topk)), {"order": order, "activation": activation}


def moe_reduce_inputs(info: Any, key: Any) -> Call:
    fixed = {}
    if not isinstance(key, SumKey):
        key, n_chunks, config = key
        assert config is None  # no shipped record has the caller's tiles
        fixed["n_chunks"] = n_chunks
    M, N, K, E, topk, dtype, layout, num_ranks, n_chunks_max = key
    # The end of a bucket may not be a multiple of the ranks.
    M -= M % (num_ranks if info.shares_rows else 1)
    weights = laid_out(layout, dtype, E, K, N)
    slots = SimpleNamespace(epoch=meta(dtype, 1))
    ctx = SimpleNamespace(
        N=N, E=E, topk=topk, dtype=dtype, max_tokens=M, max_routes=M * topk, checked_keys={},
        num_ranks=num_ranks, n_chunks_max=n_chunks_max, function=info.name,
        buffer=SimpleNamespace(slots=slots),
    )  # fmt: skip
    routing = meta(torch.int32, M, topk), meta(torch.float32, M, topk)
    return (meta(dtype, M * topk, K), weights, *routing, ctx), fixed


def collective_inputs(info: Any, key: Any) -> Call:
    """Return a call of the bucket's largest size, which always fits 16-byte vectors."""
    elements, dtype, _, num_ranks, *rest = key
    x = meta(dtype, elements * (num_ranks if info.scatters else 1))
    buffer = SimpleNamespace(device=SimpleNamespace(torch_device=x.device))
    ctx = SimpleNamespace(num_ranks=num_ranks, buffer=buffer, workspace_nbytes=1 << 40)
    if info.name != "all_reduce":
        return (x, ctx), {}
    method, in_place = rest
    return (x, ctx), {"method": method, **({"output": x} if in_place else {})}


def grouped_key(shape: GroupedShape, dtype: torch.dtype) -> GroupedKey:
    """Return the key of a call with row-major weights and one row per token."""
    sizes = (shape.M, shape.N, shape.K, shape.E, shape.topk)
    return GroupedKey(*sizes, dtype, "row-major", "token", "route", None)


def example_keys(info: OpInfo[Any]) -> Iterator[Any]:
    """Yield 24 keys of all kinds of calls."""
    both = (True, False)
    if info.name == "ag_gemm":
        for rows, layout, local_copy in itertools.product((1, 4, 1024, 4096), LAYOUTS, both):
            yield ProductKey(4 * rows, 7168, 8192, BF16, layout, True, 4), local_copy
    elif info.name in OPTIONS:
        for rows, layout, contiguous in itertools.product((4, 16, 1024, 4096), LAYOUTS, both):
            key = ProductKey(rows, 8192, 7168, BF16, layout, contiguous, 4)
            yield key, OPTIONS[info.name][1]
    elif info.name == "ag_group_gemm":
        names = ("Mixtral 8x7B", "DeepSeek-V3")
        for name, M, layout in itertools.product(names, (4, 64, 1024, 16384), LAYOUTS):
            shape = FIRST_PRODUCTS[name]
            yield RoutedKey(M, shape.N // 4, shape.K, shape.E, shape.topk, BF16, layout, 4)
    elif info.name == "grouped_gemm":
        orders, activations = ("route", "sorted"), (None, "silu_mul")
        for rows, layout, order, activation in itertools.product(
            (16, 1024), LAYOUTS, orders, activations
        ):
            key = grouped_key(GroupedShape(rows, 1536, 4096, 128, 8), BF16)
            yield key._replace(layout=layout, order=order, activation=activation)
    elif info.name.startswith("run_moe_reduce"):
        for rows, layout in itertools.product((16, 64, 1024, 4096), LAYOUTS):
            key = SumKey(rows, 4096, 768, 128, 8, BF16, layout, 4, 8)
            yield key
            yield key, 2, None
    elif info.name == "all_reduce":
        for exponent, in_place in itertools.product(range(10, 22), both):
            yield 1 << exponent, BF16, True, 4, None, in_place
    else:
        for exponent, dtype in itertools.product(range(10, 22), (BF16, torch.float32)):
            yield 1 << exponent, dtype, True, 4


def sample_inputs(info: OpInfo[Any]) -> Iterator[Call]:
    """Yield all kinds of calls."""
    return (inputs_for(info, key) for key in example_keys(info))
