"""The fused fp8 operators of ``torch.ops.symm_mem``, computed by ``ag_gemm`` and ``gemm_rs``.

The functions take the arguments of torch's operators. Their results differ from torch's only by
rounding. The functions also run on CPU ranks.

A context (symmetric memory of an op) is created for the number of rows, rounded up to a power of
two. The first call with a new rounded number is collective and creates a context, which lives as
long as the process. The first call with a new shape tunes the op.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import triton

from triton_dist.kernels.common import libraries
from triton_dist.kernels.common.context import Check, raise_first_error
from triton_dist.kernels.common.gemm.scales import FP8, OUTPUT_DTYPES
from triton_dist.kernels.nvidia import ag_gemm, gemm_rs, matmul
from triton_dist.layers.nvidia.tensor_parallel import TensorParallel


def fused_all_gather_scaled_matmul(
    A: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    A_scale: torch.Tensor,
    B_scales: Sequence[torch.Tensor],
    gather_dim: int,
    group_name: Any,
    biases: Sequence[torch.Tensor | None],
    result_scales: Sequence[torch.Tensor | None],
    out_dtypes: Sequence[torch.dtype | None],
    use_fast_accum: Sequence[bool],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return ``all_gather(A)`` along ``gather_dim``, and its product with each matrix of ``Bs``.

    Args:
        A: fp8 [..., K], the shard of this rank.
        Bs: e4m3 matrices [K, N], K-major.
        A_scale: one element, equal on all ranks; or one scale per row, [..., 1], for this rank's
            shard or for the gathered A.
        B_scales: one element or [1, N] for each B.
        gather_dim: dimension of A, not the last one.
        group_name: name of the process group.
        biases: [N] or ``None`` for each B.
        result_scales: must be ``None`` for each fp8 product; ignored for other products.
        out_dtypes: dtype of each product; ``None``: dtype of its B.
        use_fast_accum: see ``matmul``, for each B.

    Raises:
        InvalidArgument: shapes, dtypes or numbers of arguments do not match.
    """
    group = dist.distributed_c10d._resolve_process_group(group_name)
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    shard = (*A.shape[:-1], 1)
    whole = tuple(size * num_ranks if d == gather_dim else size for d, size in enumerate(shard))

    def checks() -> Iterator[Check]:
        lists = {
            "B_scales": B_scales, "biases": biases, "result_scales": result_scales,
            "out_dtypes": out_dtypes, "use_fast_accum": use_fast_accum,
        }  # fmt: skip
        for name, each in lists.items():
            yield f"len({name})", len(each), len(each) == len(Bs), f"len(Bs) = {len(Bs)}"
        expected = "a dimension of A before the last"
        yield "gather_dim", gather_dim, 0 <= gather_dim < A.ndim - 1, expected
        for number, (scale, dtype) in enumerate(zip(result_scales, out_dtypes, strict=True)):
            is_valid = scale is None or dtype in OUTPUT_DTYPES
            yield f"result_scales[{number}]", scale, is_valid, "None for an fp8 result"
        is_valid = A_scale.numel() == 1 or tuple(A_scale.shape) in (shard, whole)
        yield "A_scale.shape", tuple(A_scale.shape), is_valid, f"one element, {shard} or {whole}"

    raise_first_error("fused_all_gather_scaled_matmul", checks())
    scale = A_scale.flatten()
    if A_scale.numel() > 1:
        scale = _as_rows(A_scale, gather_dim).flatten()
        scale = scale if A_scale.shape == shard else scale.chunk(num_ranks)[rank]
    local = _as_rows(A, gather_dim).contiguous()
    rows = local.new_empty(len(local) * num_ranks, A.shape[-1])
    contexts = _contexts_of(group, triton.next_power_of_2(len(rows)))
    products = []
    for number, (B, bias) in enumerate(zip(Bs, biases, strict=True)):
        dtype = out_dtypes[number] or B.dtype
        options: Any = {
            "A_scale": scale, "B_scale": B_scales[number],
            "use_fast_accum": use_fast_accum[number],
            "out_dtype": torch.float32 if bias is not None or dtype in FP8 else dtype,
        }  # fmt: skip
        if number == 0:
            context = contexts.ag_context(B.shape[1], B.shape[0], A.dtype)
            C = ag_gemm(local, B, context, gathered=rows, **options)
            if len(Bs) > 1 and scale.numel() > 1:
                scale = libraries.all_gather_rows(scale.contiguous(), group)
        else:
            C = matmul(rows, B, **options)
        C = C if bias is None else C + bias
        if dtype in FP8:
            C = C.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
        products.append(C.to(dtype))

    def in_original_layout(x: torch.Tensor) -> torch.Tensor:
        leading = A.movedim(gather_dim, 0).shape[1:-1]
        return x.view(-1, *leading, x.shape[1]).movedim(0, gather_dim)

    return in_original_layout(rows), [in_original_layout(C) for C in products]


def fused_scaled_matmul_reduce_scatter(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: Any,
    output_shape: Sequence[int] | None,
    bias: torch.Tensor | None = None,
    result_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Return this rank's part of the sum over ranks of ``A @ B``, scattered along a dimension.

    Args:
        A: fp8 [..., K], this rank's columns.
        B: e4m3 [K, N], this rank's rows, K-major.
        A_scale: one element, or [..., 1].
        B_scale: one element, or [1, N].
        reduce_op: ``"sum"`` or ``"avg"``.
        orig_scatter_dim: dimension of ``output_shape`` to scatter, not the last one.
        scatter_dim_after_maybe_reshape: ignored; ``output_shape`` determines the order of rows.
        group_name: name of the process group.
        output_shape: shape of the sum before the scatter, [..., N]; ``None``: the shape of A with N
            in place of K.
        bias: [N]; the sum of all ranks' biases is added, as in torch.
        result_scale: ignored.
        out_dtype: bf16, fp16 or fp32.
        use_fast_accum: see ``matmul``.

    Raises:
        InvalidArgument: shapes, dtypes or ``reduce_op`` do not match.
    """
    group = dist.distributed_c10d._resolve_process_group(group_name)
    num_ranks, dim = dist.get_world_size(group), orig_scatter_dim
    shape = [*A.shape[:-1], B.shape[1]] if output_shape is None else [*output_shape]

    def checks() -> Iterator[Check]:
        yield "reduce_op", reduce_op, reduce_op in ("sum", "avg"), "'sum' or 'avg'"
        expected = f"the {prod(A.shape[:-1])} rows of A, and N = {B.shape[1]}"
        is_valid = prod(shape[:-1]) == prod(A.shape[:-1]) and shape[-1] == B.shape[1]
        yield "output_shape", shape, is_valid, expected
        expected = f"a dimension of {shape} before the last, of a size divisible by {num_ranks}"
        is_valid = 0 <= dim < len(shape) - 1 and shape[dim] % num_ranks == 0
        yield "orig_scatter_dim", dim, is_valid, expected
        expected = f"one element, or {(*A.shape[:-1], 1)}"
        is_valid = A_scale.numel() == 1 or A_scale.shape == (*A.shape[:-1], 1)
        yield "A_scale.shape", tuple(A_scale.shape), is_valid, expected
        expected = "bf16, fp16 or fp32: sums are not fp8"
        yield "out_dtype", out_dtype, out_dtype in OUTPUT_DTYPES, expected

    raise_first_error("fused_scaled_matmul_reduce_scatter", checks())
    assert out_dtype is not None

    def in_scatter_order(x: torch.Tensor) -> torch.Tensor:
        return _as_rows(x.reshape(*shape[:-1], x.shape[-1]), dim)

    rows = in_scatter_order(A)
    if bias is not None:
        bias = libraries.all_reduce(bias.float(), group).to(out_dtype)
    contexts = _contexts_of(group, triton.next_power_of_2(len(rows)))
    context = contexts.rs_context(B.shape[1], out_dtype)
    scale = A_scale.flatten() if A_scale.numel() == 1 else in_scatter_order(A_scale).contiguous()
    C = gemm_rs(
        rows, B, context, bias=bias, A_scale=scale, B_scale=B_scale, use_fast_accum=use_fast_accum
    )
    if reduce_op == "avg":
        C = C.div_(num_ranks)
    others = [size for number, size in enumerate(shape) if number != dim]
    return C.view(-1, *others).movedim(0, dim).contiguous()


@functools.cache
def _contexts_of(group: dist.ProcessGroup, max_M: int) -> TensorParallel:
    """Return the contexts of a group. They are never freed, because CUDA graphs may use them."""
    return TensorParallel(max_M, group)


def _as_rows(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return x [..., n] as a matrix; dimension ``dim`` varies slowest over its rows."""
    return x.movedim(dim, 0).flatten(0, -2)
