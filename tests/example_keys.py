"""Tuning keys that cover all kinds of calls of our ops, and calls that have these keys."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch

from triton_dist.kernels.common.context import ProductKey
from triton_dist.kernels.common.moe.summing import SumKey
from triton_dist.kernels.nvidia.allgather_group_gemm.context import RoutedKey
from triton_dist.kernels.nvidia.grouped_gemm.algorithms import GroupedKey
from triton_dist.kernels.nvidia.sp_ag_attention.algorithms import AttentionKey
from triton_dist.kernels.nvidia.ulysses.algorithms import UlyssesKey
from triton_dist.kernels.nvidia.ulysses_gemm.algorithms import UlyssesGEMMKey
from triton_dist.testing.opinfo import OPINFOS
from triton_dist.testing.opinfo.base import Call
from triton_dist.testing.opinfo.moe import FIRST_GEMMS

BF16 = torch.bfloat16
BOTH = (False, True)
LAYOUTS = ("row-major", "column-major", "strided")
"""Memory layouts of B and of weights."""
TOKENS = (256, 512, 2048, 4096, 8192, 16384)


def sample_inputs(op: str) -> Iterator[Call]:
    """A call for each of ``EXAMPLE_KEYS[op]``, with meta tensors."""
    return map(OPINFOS[op].inputs_for, EXAMPLE_KEYS[op])


def _summed_products(option: bool) -> list[Any]:
    return [
        (ProductKey(rows, 8192, 7168, BF16, layout, contiguous, 4), option)
        for rows, layout, contiguous in product((4, 16, 1024, 4096), LAYOUTS, BOTH)
    ]


def _routed_products() -> Iterator[RoutedKey]:
    for name, M, layout in product(("Mixtral 8x7B", "DeepSeek-V3"), (4, 64, 1024, 16384), LAYOUTS):
        shape = FIRST_GEMMS[name]
        yield RoutedKey(M, shape.N // 4, shape.K, shape.E, shape.topk, BF16, layout, 4)


def _sums_of_routes() -> Iterator[Any]:
    for rows, layout in product((16, 64, 1024, 4096), LAYOUTS):
        key = SumKey(rows, 4096, 768, 128, 8, BF16, layout, 4, 8)
        yield key
        yield key, 2, None


_SHARDS = [(1 << n, dtype, True, 4) for n, dtype in product(range(10, 22), (BF16, torch.float32))]
_DISPATCHES = [
    SimpleNamespace(
        M=M, hidden=7168, topk=topk, num_experts=256, dtype=BF16, num_ranks=4,
        has_weights=has_weights, num_sms=None, routing_skew=None,
    )
    for M, topk, has_weights in product((1, 8, 32, 128, 512, 4096), (2, 8), BOTH)
]  # fmt: skip
_HEADS = [
    UlyssesKey(M, (2048, width, width), BF16, 1, False, has_lengths, 2)
    for M, width, has_lengths in product(TOKENS, (2048, 128), BOTH)
]


def _projected_heads(has_kv: bool) -> Iterator[UlyssesGEMMKey]:
    for key in _HEADS:
        q, k, _ = key.widths
        layout = "row-major" if k == q else "column-major"
        widths = key.widths if has_kv else (q, 0, 0)
        yield UlyssesGEMMKey(key._replace(widths=widths), 4096, layout, False)


EXAMPLE_KEYS: dict[str, list[Any]] = {
    "ag_gemm": [
        (ProductKey(4 * rows, 7168, 8192, BF16, layout, True, 4), local_copy)
        for rows, layout, local_copy in product((1, 4, 1024, 4096), LAYOUTS, (True, False))
    ],
    "ag_group_gemm": [*_routed_products()],
    "all_gather": _SHARDS,
    "all_reduce": [
        (1 << n, BF16, True, 4, None, in_place) for n, in_place in product(range(10, 22), BOTH)
    ],
    "ep_combine": _DISPATCHES,
    "ep_dispatch": _DISPATCHES,
    "ep_dispatch_group_gemm": [
        SimpleNamespace(
            M=M, N=1536, K=2048, num_experts=128, topk=8, dtype=BF16, num_ranks=4,
            layout="row-major", activation=activation, has_weights=has_weights, routing_skew=None,
        )
        for M, activation, has_weights in product(
            (1, 8, 32, 128, 512, 4096), (None, "silu_mul"), BOTH
        )
    ],
    "gemm_ar": _summed_products(True),
    "gemm_rs": _summed_products(False),
    "grouped_gemm": [
        GroupedKey(rows, 1536, 4096, 128, 8, BF16, layout, "token", order, activation)
        for rows, layout, order, activation in product(
            (16, 1024), LAYOUTS, ("route", "sorted"), (None, "silu_mul")
        )
    ],
    "reduce_scatter": _SHARDS,
    "run_moe_reduce_ar": [*_sums_of_routes()],
    "run_moe_reduce_rs": [*_sums_of_routes()],
    "sp_ag_attention": [
        AttentionKey(M, 1, 32, kv_heads, 128, BF16, True, zigzag, 1, 2)
        for M, kv_heads, zigzag in product(TOKENS, (8, 32), BOTH)
    ],
    "sp_decode_attn": [
        SimpleNamespace(
            batch=batch, max_kv_len=tokens, q_heads=heads, kv_heads=kv_heads, head_dim=128,
            dtype=BF16, num_ranks=4,
        )
        for tokens, batch, (heads, kv_heads) in product(
            (1024, 8192, 131072), (1, 8, 64, 256), ((96, 12), (32, 8))
        )
    ],
    "ulysses_gemm_pre_attn": [*_projected_heads(has_kv=True)],
    "ulysses_post_attn": _HEADS,
    "ulysses_post_attn_gemm": [*_projected_heads(has_kv=False)],
    "ulysses_pre_attn": _HEADS,
}  # fmt: skip
