"""Keys of all ops: they differ in what a tuning depends on, and in nothing else."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from triton_dist.kernels.common.moe import spaces
from triton_dist.kernels.common.moe.rows import grouped_library_supports
from triton_dist.kernels.common.moe.spaces import GROUPED_TILES, grouped_tiles
from triton_dist.kernels.nvidia import (
    AllGatherMethod,
    AllReduceMethod,
    GatherMethod,
    LibraryAlgorithm,
    ReduceScatterMethod,
)
from triton_dist.runtime.device import current_device
from triton_dist.testing.opinfo import OPINFOS
from triton_dist.testing.opinfo.collectives import CollectiveSize
from triton_dist.testing.opinfo.decode_attention import DecodeShape
from triton_dist.testing.opinfo.expert_parallel import MultipliedTokenShape, TokenShape
from triton_dist.testing.opinfo.gemm import Shape
from triton_dist.testing.opinfo.moe import GroupedShape
from triton_dist.testing.opinfo.sequence_parallel import HeadsShape, ProjectedShape

SHAPES = {
    Shape: Shape(64, 48, 32),
    GroupedShape: GroupedShape(64, 48, 32, 4, 2),
    CollectiveSize: CollectiveSize(4096),
}
SHAPES |= {TokenShape: TokenShape(16, 24, 2), HeadsShape: HeadsShape(16, 4, 2, 8)}
SHAPES[MultipliedTokenShape] = MultipliedTokenShape(16, 24, 2, 32)
SHAPES[ProjectedShape] = ProjectedShape(16, 4, 2, 8, 24)
SHAPES[DecodeShape] = DecodeShape(32, 2, 8, 2, 16)
SKEWS = [{"routing_skew": skew} for skew in ("even", "zipf", "same_experts")]
REDUCE = [{"n_chunks": 2}, {"config": grouped_tiles()[0]}, *SKEWS]
OPTIONS = {
    "ag_gemm": [
        {"local_copy": False},
        {"method": AllGatherMethod.SERIAL},
        {"method": LibraryAlgorithm.COLLECTIVE},
    ],
    "ag_group_gemm": SKEWS,
    "ep_combine": [{"num_sms": 4}, {"apply_weights": False}],
    "ep_dispatch": [{"num_sms": 4}, {"quantise": True}, {"alignment": 8}, *SKEWS],
    "ep_dispatch_group_gemm": [{"activation": "silu_mul"}, *SKEWS],
    "grouped_gemm": SKEWS,
    "gemm_rs": [{"reduce_st": True}],
    "gemm_ar": [{"copy_to_local": False}],
    "all_gather": [{"method": each} for each in GatherMethod],
    "all_reduce": [{"method": each} for each in AllReduceMethod if each.replacement is None],
    "reduce_scatter": [{"method": each} for each in ReduceScatterMethod],
    "run_moe_reduce_ar": REDUCE,
    "sp_decode_attn": [{"window": 4}, {"shard_output": True}],
    "run_moe_reduce_rs": REDUCE,
    "sp_ag_attention": [{"is_causal": False}, {"zigzag": False}, {"seq_lens": [8, 8]}],
    **{
        f"ulysses_{name}": [{"seq_lens": [16]}]
        for name in ("gemm_pre_attn", "post_attn", "post_attn_gemm", "pre_attn")
    },
}
"""Options of calls that a tuning depends on."""
SAME = {name: {"kv_heads", "dim"} for name in ("ulysses_post_attn", "ulysses_post_attn_gemm")}
"""Sizes that a key ignores, or that it contains only as a factor of another size."""
LAYOUTS = {
    "row-major": lambda B: B.contiguous(),
    "column-major": lambda B: B.mT.contiguous().mT,
    "strided": lambda B: torch.stack([B, B], dim=-1).flatten(-2)[..., ::2],
}


@pytest.mark.parametrize("name", OPINFOS)
def test_keys_differ_in_what_a_tuning_depends_on(name):
    info = OPINFOS[name]
    base, keys = SHAPES[info.shape_type], []

    def add(shape=base, dtype=torch.float16, change=lambda operands: None, **options):
        operands = info.operands(shape, dtype, 1)
        change(operands)
        created = {"reduce_st": True} if "reduce_st" in options else {}
        with info.context(shape, dtype, **created) as ctx:
            args, kwargs = info.arguments(operands, ctx)
            keys.append(info.op.key_fn(*args, **kwargs, **options))

    add()
    add()
    assert keys.pop() == keys[0]
    add(dtype=torch.bfloat16)
    for field in dataclasses.fields(base):
        if field.name in SAME.get(name, ()):
            continue
        add(dataclasses.replace(base, **{field.name: 2 * getattr(base, field.name)}))
    for options in OPTIONS.get(name, []):
        add(**options)
    right = {"B", "b", "weights"} & info.operands(base, torch.float16, 1).keys()
    for lay_out in LAYOUTS.values() if right else ():
        add(change=lambda given, f=lay_out: given.update({n: f(given[n]) for n in right}))
    assert len(set(keys)) == len(keys) - bool(right)  # the first key has one of the layouts


@pytest.mark.parametrize("name", [n for n, i in OPINFOS.items() if i.shape_type is GroupedShape])
@pytest.mark.parametrize("dtype", ["bf16", "fp8-block"])
def test_tiles_are_as_high_as_the_same_experts_have_rows(name, dtype, monkeypatch):
    info, shape = OPINFOS[name].with_dtype(dtype), GroupedShape(64, 128, 128, 64, 2)
    tiles = next(
        each
        for each in GROUPED_TILES
        if (each.kwargs["BLOCK_SIZE_M"], each.kwargs["BLOCK_SIZE_N"]) == (64, 64)
    )
    config = {**info.op.config_space[0], "gemm_config": tiles}
    memory = current_device().shared_memory_bytes
    device = SimpleNamespace(interprets=False, shared_memory_bytes=memory)
    monkeypatch.setattr(spaces, "current_device", lambda: device)
    with info.context(shape, torch.bfloat16) as ctx:
        args, kwargs = info.arguments(info.operands(shape, torch.bfloat16, 1), ctx)
        for skew in (None, "even", "zipf", "same_experts"):
            kept = info.op.prune_fn(config, *args, **kwargs, routing_skew=skew)
            assert kept is (skew == "same_experts"), skew
            key = info.op.key_fn(*args, **kwargs, routing_skew=skew)
            assert grouped_library_supports(key) is (dtype == "bf16")
