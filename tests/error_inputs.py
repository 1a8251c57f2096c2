"""Invalid calls of each op, which raise ``InvalidArgument`` before any launch."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

from triton_dist.kernels.common.exchange.buffer import MAX_CTAS
from triton_dist.kernels.common.scatter import partials
from triton_dist.kernels.common.slots import gathered
from triton_dist.kernels.nvidia.gemm_allreduce import GEMMAllReduceMethod
from triton_dist.testing.opinfo.allgather_gemm import AllGatherGEMMOpInfo
from triton_dist.testing.opinfo.allgather_group_gemm import AllGatherGroupGEMMOpInfo
from triton_dist.testing.opinfo.base import Operands, OpInfo
from triton_dist.testing.opinfo.collectives import (
    AllReduceOpInfo,
    CollectiveOpInfo,
    ReduceScatterOpInfo,
    ShardOpInfo,
)
from triton_dist.testing.opinfo.decode_attention import DecodeOpInfo
from triton_dist.testing.opinfo.expert_parallel import (
    CombineOpInfo,
    DispatchGroupGemmOpInfo,
    DispatchOpInfo,
    EPOpInfo,
)
from triton_dist.testing.opinfo.gemm import GEMMOpInfo, SummedGEMMOpInfo
from triton_dist.testing.opinfo.grouped_gemm import GroupedGEMMOpInfo
from triton_dist.testing.opinfo.moe_reduce import MoEReduceOpInfo, MoEReduceRSOpInfo
from triton_dist.testing.opinfo.sequence_parallel import (
    PreAttnOpInfo,
    ProjectedOpInfo,
    SPAttentionOpInfo,
    UlyssesOpInfo,
)
from triton_dist.testing.opinfo.summed_gemm import GEMMAllReduceOpInfo, GEMMReduceScatterOpInfo


@functools.singledispatch
def error_inputs(info: OpInfo[Any], good: Operands, num_ranks: int) -> dict[str, dict[str, Any]]:
    """Return invalid calls: by name, arguments that replace valid arguments.

    The name is the argument that the error reports. If several calls have the same name, a text in
    parentheses follows it. ``good`` has the largest valid operands for the context.
    """
    raise NotImplementedError(info.name)


def other_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return a 16-bit floating dtype different from ``dtype``."""
    return torch.float16 if dtype is torch.bfloat16 else torch.bfloat16


def operand_errors(name: str, x: torch.Tensor) -> dict[str, dict[str, Any]]:
    """Return invalid values of an operand and of ``algorithm``, for ``error_inputs``."""
    return {
        name: {name: None},
        f"{name}.dtype": {name: x.to(other_dtype(x.dtype))},
        f"{name}.device": {name: x.to("meta")},
        f"{name}.requires_grad": {name: x.clone().requires_grad_()},
        "algorithm": {"algorithm": "ring"},
    }


@error_inputs.register
def _(info: CollectiveOpInfo, good, num_ranks):
    x = good["x"]
    columns = x.new_ones(x.numel(), 2)
    algorithm = "two_shot" if info.name == "all_reduce" else "push"
    return {
        **operand_errors("x", x),
        "x (of another library)": {"x": x.cpu().numpy()},
        "x.dtype": {"x": x.int()},
        "x.stride()": {"x": columns[:, 0]},
        "x.shape": {"x": x[:0]},
        "output.dtype": {"output": x.to(other_dtype(x.dtype))},
        "output.device": {"output": x.to("meta")},
        "output.shape": {"output": x[:3]},
        "output.stride()": {"output": columns[:, 0]},
        "output": {"output": "output"},
        "straggler_option": {"straggler_option": {}},
        "method": {"method": "one_shot"},
        **{
            f"{name} ({value!r})": {name: value, "algorithm": algorithm}
            for name, value in (
                ("num_ctas", "2"), ("num_ctas", 1.5), ("num_ctas", 0),
                ("block_bytes", "2"), ("block_bytes", 1000),
                ("num_chunks", "2"), ("num_chunks", 17),
            )
        },
    }  # fmt: skip


@error_inputs.register
def _(info: AllReduceOpInfo, good, num_ranks):
    packets = {"packets": True, "algorithm": "two_shot"}
    return {**error_inputs.dispatch(CollectiveOpInfo)(info, good, num_ranks), "packets": packets}


@error_inputs.register
def _(info: ShardOpInfo, good, num_ranks):
    x = good["x"]
    return {
        **error_inputs.dispatch(CollectiveOpInfo)(info, good, num_ranks),
        "x.nbytes": {"x": x.new_ones(x.numel() + num_ranks)},
        "x.shape (no rows)": {"x": x[0]},
    }


@error_inputs.register
def _(info: ReduceScatterOpInfo, good, num_ranks):
    bad = error_inputs.dispatch(ShardOpInfo)(info, good, num_ranks)
    return {**bad, "x.shape (not a multiple)": {"x": good["x"][:-1]}}


@error_inputs.register
def _(info: GEMMOpInfo, good, num_ranks):
    """Return invalid arguments for all GEMMs across ranks. ``M (too many)`` is invalid only for
    a context that was created for the rows of ``good``."""
    A, B = good["A"], good["B"]
    (rows, K), N, other = A.shape, B.shape[1], other_dtype(A.dtype)
    step = 1 if info.returns_all_rows or not info.sums_over_ranks else num_ranks
    return {
        **operand_errors("A", A),
        "A (of another library)": {"A": A.cpu().numpy()},
        "B": {"B": 2},
        "straggler_option": {"straggler_option": (0,)},
        "straggler_option (before now)": {"straggler_option": (0, -1)},
        "num_chunks (a text)": {"num_chunks": "2"},
        "gemm_config": {"gemm_config": triton.Config({})},
        "A.dtype (integers)": {"A": A.int()},
        "B.dtype": {"B": B.to(other)},
        "B.device": {"B": B.to("meta")},
        "A.shape (vector)": {"A": A[0]},
        "A.shape (3-D)": {"A": A[None]},
        "A.shape (no rows)": {"A": A[:0]},
        "M (too many)": {"A": A.new_ones(rows + step, K)},
        "B.shape": {"B": B.new_ones(K, N + 1)},
        "B.shape (K)": {"B": B.new_ones(K - 1, N)},
        "B.shape (transposed)": {"B": B.new_ones(N, K)},
        "B.shape (vector)": {"B": B[0]},
    }


@error_inputs.register
def _(info: SummedGEMMOpInfo, good, num_ranks):
    B = good["B"]
    N = B.shape[1]
    return {
        **error_inputs.dispatch(GEMMOpInfo)(info, good, num_ranks),
        "bias": {"bias": [1.0]},
        "bias.dtype": {"bias": B.new_ones(N).to(other_dtype(B.dtype))},
        "bias.device": {"bias": B.new_ones(N).to("meta")},
        "bias.shape": {"bias": B.new_ones(N + 1)},
        "bias.shape (2-D)": {"bias": B.new_ones(1, N)},
        "bias.stride()": {"bias": B.new_ones(N, 2)[:, 0]},
        "num_chunks": {"num_chunks": partials.MAX_CHUNKS + 1},
        "num_chunks (none)": {"num_chunks": 0},
    }


@error_inputs.register
def _(info: AllGatherGEMMOpInfo, good, num_ranks):
    A = good["A"]
    rows, K = A.shape
    return {
        **error_inputs.dispatch(GEMMOpInfo)(info, good, num_ranks),
        "A.shape": {"A": A.new_ones(rows, K + 1)},
        "A.stride()": {"A": A.new_ones(2 * rows, K)[::2]},
        "A.stride() (transposed)": {"A": A.new_ones(K, rows).T},
        "num_chunks": {"num_chunks": 0},
        "num_chunks (many)": {"num_chunks": gathered.MAX_CHUNKS + 1},
        "num_streams": {"num_streams": 0},
        "num_streams (a text)": {"num_streams": "2"},
        "gathered": {"gathered": 1},
        "method": {"method": "full_mesh_push"},
        "gathered.shape": {"gathered": A.new_ones(rows, K + 1)},
        "num_comm_sms": {"algorithm": "serial", "num_comm_sms": 0},
        "num_comm_sms (many)": {"algorithm": "serial", "num_comm_sms": MAX_CTAS + 1},
    }


@error_inputs.register
def _(info: GEMMReduceScatterOpInfo, good, num_ranks):
    """Return invalid arguments for a context created without ``reduce_st``."""
    A = good["A"]
    return {
        **error_inputs.dispatch(SummedGEMMOpInfo)(info, good, num_ranks),
        "M": {"A": A.new_ones(A.shape[0] + 1, A.shape[1])},
        "reduce_st": {"reduce_st": True},
        "algorithm": {"algorithm": "ring"},
        "method": {"method": "collective"},
    }


@error_inputs.register
def _(info: GEMMAllReduceOpInfo, good, num_ranks):
    return {
        **error_inputs.dispatch(SummedGEMMOpInfo)(info, good, num_ranks),
        "algorithm": {"algorithm": "three_shot"},
        "method": {"method": "two_shot"},
        "gemm_config (none)": {"gemm_config": None, "method": GEMMAllReduceMethod.TWO_SHOT},
        "num_ctas": {"algorithm": "serial", "num_ctas": "2"},
        "block_bytes": {"algorithm": "serial", "block_bytes": 1000},
        "reduction": {"algorithm": "serial", "reduction": "tree"},
    }


@error_inputs.register
def _(info: GroupedGEMMOpInfo, good, num_ranks):
    A, B, ids = good["A"], good["B"], good["topk_ids"]
    (M, K), N = A.shape, B.shape[2]
    return {
        **operand_errors("A", A),
        "B": {"B": "B"},
        "topk_ids": {"topk_ids": ids.tolist()},
        "gemm_config (no tiles)": {"gemm_config": triton.Config({})},
        "A.dtype": {"A": A.int()},
        "B.dtype": {"B": B.to(other_dtype(A.dtype))},
        "B.device": {"B": B.to("meta")},
        "topk_ids.device": {"topk_ids": ids.to("meta")},
        "A.shape": {"A": A.new_ones(M, K + 1)},
        "A.shape (rows)": {"A": A.new_ones(M + 1, K)},
        "A.shape (vector)": {"A": A[0]},
        "A.stride()": {"A": A.new_ones(K, M).T},
        "B.shape": {"B": B[0]},
        "B.shape (odd N)": {"B": B[:, :, : N - 1 + N % 2], "activation": "silu_mul"},
        "E": {"B": B.new_ones(513, K, N)},
        "topk_ids.dtype": {"topk_ids": ids.to(torch.int16)},
        "topk_ids.shape": {"topk_ids": ids[0]},
        "topk_ids.shape (none)": {"topk_ids": ids[:0]},
        "topk_ids.shape (many)": {"topk_ids": ids.new_zeros(M, 11)},
        "topk_ids.stride()": {"topk_ids": ids.new_zeros(2, M).T},
        "order": {"order": "expert"},
        "activation": {"activation": "gelu"},
        "routing_skew": {"routing_skew": "uniform"},
        "algorithm (odd sizes)": {"algorithm": "library", "B": B.new_ones(2, K, N + 1)},
        "gemm_config": {"gemm_config": None},
    }


@error_inputs.register
def _(info: AllGatherGroupGEMMOpInfo, good, num_ranks):
    a, b, ids = good["a"], good["b"], good["full_topk_ids"]
    (rows, K), (E, _, N), (M, topk) = a.shape, b.shape, ids.shape
    return {
        **operand_errors("a", a),
        "full_topk_ids": {"full_topk_ids": ids.tolist()},
        "straggler_option": {"straggler_option": "4"},
        "num_groups (a text)": {"num_groups": "1"},
        "gemm_config": {"gemm_config": triton.Config({})},
        "b.dtype": {"b": b.to(other_dtype(a.dtype))},
        "b.device": {"b": b.to("meta")},
        "full_topk_ids.device": {"full_topk_ids": ids.to("meta")},
        "a.shape": {"a": a.new_ones(rows, K + 1)},
        "a.shape (vector)": {"a": a[0]},
        "a.shape (no rows)": {"a": a[:0]},
        "a.stride()": {"a": a.new_ones(2 * rows, K)[::2]},
        "M": {
            "a": a.new_ones(rows + 1, K), "full_topk_ids": ids.new_zeros(M + num_ranks, topk),
        },
        "b.shape": {"b": b.new_ones(E + 1, K, N)},
        "b.shape (N)": {"b": b.new_ones(E, K, N + 1)},
        "b.shape (matrix)": {"b": b[0]},
        "full_topk_ids.dtype": {"full_topk_ids": ids.float()},
        "full_topk_ids.shape (topk)": {"full_topk_ids": ids.new_zeros(M, topk + 1)},
        "full_topk_ids.shape (own rows)": {"full_topk_ids": ids.new_zeros(M + 1, topk)},
        "full_topk_ids.shape (flat)": {"full_topk_ids": ids.flatten()},
        "full_topk_ids.stride()": {"full_topk_ids": ids.new_zeros(topk, M).T},
        "num_groups": {"num_groups": 0},
        "num_groups (many)": {"num_groups": 5},
        "gather": {"gather": "collective"},
        "gather (serial)": {"algorithm": "serial", "gather": "full_mesh_push"},
        "routing_skew": {"routing_skew": "uniform"},
    }  # fmt: skip


@error_inputs.register
def _(info: MoEReduceOpInfo, good, num_ranks):
    """Return invalid arguments for a context with ``n_chunks_max`` = 8."""
    x, weights, ids, expert_weight = (
        good[name] for name in ("x", "weights", "chosen_experts", "expert_weight")
    )
    (E, K, N), (M, topk) = weights.shape, ids.shape
    more = M + num_ranks
    many = {
        "x": x.new_ones(more * topk, K),
        "chosen_experts": ids.new_zeros(more, topk),
        "expert_weight": expert_weight.new_zeros(more, topk),
    }
    return {
        **operand_errors("x", x),
        "weights": {"weights": weights.cpu().numpy()},
        "expert_weight": {"expert_weight": 1.0},
        "num_chunks": {"num_chunks": 0},
        "num_chunks (a text)": {"num_chunks": "2"},
        "gemm_config (no tiles)": {"gemm_config": triton.Config({})},
        "x.dtype (integers)": {"x": x.int()},
        "x.device": {
            "x": x.to("meta"), "chosen_experts": ids.to("meta"),
            "expert_weight": expert_weight.to("meta"),
        },
        "x.shape": {"x": x.new_ones(len(x) + 1, K)},
        "x.shape (K)": {"x": x.new_ones(len(x), K + 1)},
        "x.shape (vector)": {"x": x[0]},
        "x.stride()": {"x": x.new_ones(K, len(x)).T},
        "weights.dtype": {"weights": weights.to(other_dtype(x.dtype))},
        "weights.device": {"weights": weights.to("meta")},
        "weights.shape (E)": {"weights": weights.new_ones(E + 1, K, N)},
        "weights.shape (N)": {"weights": weights.new_ones(E, K, N + 1)},
        "weights.shape (matrix)": {"weights": weights[0]},
        "chosen_experts.dtype": {"chosen_experts": ids.short()},
        "chosen_experts.device": {"chosen_experts": ids.to("meta")},
        "chosen_experts.shape (vector)": {"chosen_experts": ids[0]},
        "chosen_experts.shape (topk)": {"chosen_experts": ids.new_zeros(M, topk + 1)},
        "chosen_experts.stride()": {"chosen_experts": ids.new_zeros(topk, M).T},
        "expert_weight.dtype": {"expert_weight": expert_weight.double()},
        "expert_weight.device": {"expert_weight": expert_weight.to("meta")},
        "expert_weight.shape": {"expert_weight": expert_weight[:1]},
        "expert_weight.stride()": {"expert_weight": expert_weight.new_zeros(topk, M).T},
        "M (too many)": many,
        "n_chunks": {"n_chunks": 9},
        "n_chunks (none)": {"n_chunks": 0},
        "config": {"config": "128x128"},
        "routing_skew": {"routing_skew": "uniform"},
        "gemm_config": {"gemm_config": None},
        "reduction": {"algorithm": "serial", "reduction": "ring"},
    }  # fmt: skip


@error_inputs.register
def _(info: MoEReduceRSOpInfo, good, num_ranks):
    bad = error_inputs.dispatch(MoEReduceOpInfo)(info, good, num_ranks)
    if num_ranks > 1:
        names, topk = ("chosen_experts", "expert_weight"), good["expert_weight"].shape[1]
        bad["M"] = {name: good[name][:-1] for name in names} | {"x": good["x"][:-topk]}
    return bad


@error_inputs.register
def _(info: EPOpInfo, good, num_ranks):
    name, rows = info.row_operand, good[info.row_operand]
    return {
        **operand_errors(name, rows),
        f"{name}.shape": {name: rows.new_ones(len(rows), rows.shape[1] + 1)},
        f"{name}.stride()": {name: rows.T.contiguous().T},
        "num_sms": {"num_sms": 0},
    }


@error_inputs.register
def _(info: DispatchOpInfo, good, num_ranks):
    ids, weights = good["topk_ids"], good["topk_weights"]
    return {
        **error_inputs.dispatch(EPOpInfo)(info, good, num_ranks),
        "topk_ids": {"topk_ids": [[0]]},
        "topk_ids.dtype": {"topk_ids": ids.short()},
        "topk_ids.device": {"topk_ids": ids.to("meta")},
        "topk_ids.shape": {"topk_ids": ids[1:]},
        "topk_weights.dtype": {"topk_weights": weights.double()},
        "topk_weights.shape": {"topk_weights": weights[1:]},
        "max_tokens": {"max_tokens": len(ids) + 1},
        "alignment": {"alignment": 3},
        "routing_skew": {"routing_skew": "uniform"},
    }


@error_inputs.register
def _(info: CombineOpInfo, good, num_ranks):
    of_rows = error_inputs.dispatch(EPOpInfo)(info, good, num_ranks)
    return {**of_rows, "received": {"received": None}}


@error_inputs.register
def _(info: DispatchGroupGemmOpInfo, good, num_ranks):
    B, of_dispatch = good["B"], error_inputs.dispatch(DispatchOpInfo)(info, good, num_ranks)
    del of_dispatch["num_sms"], of_dispatch["alignment"]
    return {
        **of_dispatch,
        "B": {"B": None},
        "B.dtype": {"B": B.double()},
        "B.device": {"B": B.to("meta")},
        "B.shape": {"B": B[1:]},
        "B.requires_grad": {"B": B.clone().requires_grad_()},
        "activation": {"activation": "gelu"},
    }


@error_inputs.register
def _(info: UlyssesOpInfo, good, num_ranks):
    name, x = next(iter(good.items()))
    batch, tokens, heads, dim = x.shape
    return {
        **operand_errors(name, x),
        f"{name}.shape": {name: x.new_ones(batch, tokens, heads + 1, dim)},
        f"{name}.shape (a vector)": {name: x.flatten()},
        f"{name}.stride()": {name: x.mT.contiguous().mT},
        "seq_lens": {"seq_lens": [tokens] * (num_ranks + 1)},
        "seq_lens (negative)": {"seq_lens": [-1] * num_ranks},
        f"{name}.shape (of seq_lens)": {"seq_lens": [tokens + 1] * num_ranks},
        "num_ctas": {"num_ctas": 0, "algorithm": "push"},
    }


@error_inputs.register
def _(info: PreAttnOpInfo, good, num_ranks):
    k, v = good["k"], good["v"]
    return {
        **error_inputs.dispatch(UlyssesOpInfo)(info, good, num_ranks),
        "q.shape (too many tokens)": {name: torch.cat([x, x], 1) for name, x in good.items()},
        "k.dtype": {"k": k.to(other_dtype(k.dtype))},
        "v.shape": {"v": v[:, 1:]},
        "v": {"k": None},
    }


@error_inputs.register
def _(info: ProjectedOpInfo, good, num_ranks):
    (rows, x), (_, B), *_ = good.items()
    # The first operand's errors of ``ulysses_pre_attn`` that do not depend on its dimensions.
    return {
        **operand_errors(rows, x),
        f"{rows}.shape": {rows: x[..., None]},
        "seq_lens": {"seq_lens": [1] * (num_ranks + 1)},
        f"{rows}.shape (of seq_lens)": {"seq_lens": [x.shape[1] + 1] * num_ranks},
        **operand_errors("B", B),
        "B.shape": {"B": B[1:]},
        "bias.shape": {"bias": B.new_ones(1)},
        "bias.dtype": {"bias": B.new_ones(B.shape[1], dtype=other_dtype(B.dtype))},
        "gemm_config": {"gemm_config": None, "algorithm": "fused"},
        "num_ctas": {"num_ctas": 0, "algorithm": "serial"},
    }


@error_inputs.register
def _(info: SPAttentionOpInfo, good, num_ranks):
    q, k, v = good["q"], good["k"], good["v"]
    batch, tokens, heads, dim = q.shape
    return {
        **operand_errors("q", q),
        "q.shape": {"q": q.new_ones(batch, tokens, heads + 1, dim)},
        "q.shape (a vector)": {"q": q.flatten()},
        "q.shape (too many tokens)": {n: torch.cat([x, x], 1) for n, x in good.items()},
        "q.shape (odd)": {n: x[:, 1:].contiguous() for n, x in good.items()},
        "q.stride()": {"q": q.mT.contiguous().mT},
        "k.shape": {"k": k[:, 1:]},
        "v.dtype": {"v": v.to(other_dtype(v.dtype))},
        "seq_lens": {"seq_lens": [tokens + 2]},
        "backend": {"backend": "math"},
    }


@error_inputs.register
def _(info: DecodeOpInfo, good, num_ranks):
    q, k, v, lens = (good[name] for name in ("q", "k_cache", "v_cache", "kv_lens"))
    heads = q.shape[1]
    return {
        **operand_errors("q", q),
        "q.shape": {"q": q.new_ones(len(q), heads + 1, q.shape[2])},
        "q.shape (new tokens)": {"q": q.new_ones(len(q), 2, *q.shape[1:])},
        "q.stride(-1)": {"q": q.mT.contiguous().mT},
        "k_cache.requires_grad": {"k_cache": k.clone().requires_grad_()},
        "k_cache.dtype": {"k_cache": k.double(), "v_cache": v.double()},
        "k_cache.shape": {"k_cache": k[..., :8]},
        "k_cache.shape[0]": {"k_cache": k.repeat(2, 1, 1, 1), "v_cache": v.repeat(2, 1, 1, 1)},
        "v_cache.dtype": {"v_cache": v.double()},
        "v_cache.shape": {"v_cache": v[:, 1:]},
        "kv_lens.dtype": {"kv_lens": lens.long()},
        "kv_lens.shape": {"kv_lens": lens[:, None]},
        "kv_lens.shape (cyclic)": {"interleave": 1},
        "block_table.shape": {"block_table": lens.new_ones(len(q) + 1, 1)},
        "scale": {"scale": float("inf")},
        "soft_cap": {"soft_cap": -1.0},
        "window": {"window": 0},
        "sinks": {"sinks": q.new_ones(heads)},
        "k_scale": {"k_scale": lens.new_ones(3).float()},
        "v_scale": {"k_scale": lens.new_ones(1).float()},
        "interleave": {"interleave": 0},
        "shard_output": {"shard_output": 1},
        "lse_base": {"lse_base": "10"},
        "max_kv_len": {"max_kv_len": 0},
    }
