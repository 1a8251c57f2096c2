"""Right and wrong calls, for mypy and basedpyright; never executed.

Each wrong line names the error that both must report. An error that is not named, and a name
without its error, fail the check.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from typing_extensions import assert_type

import triton_dist
from triton_dist import language as dl
from triton_dist import runner
from triton_dist._tuning.values import Config, TuningRecord
from triton_dist.autotuner import contextual_autotune
from triton_dist.kernels.nvidia import AllGatherGEMMTensorParallelContext, ag_gemm, gemm_rs, matmul
from triton_dist.layers.nvidia import TensorParallel
from triton_dist.tune import AutoTuner, autotune, bucket

x = torch.ones(2, 2)


# All tunable parameters have defaults: the function's parameters count.
@autotune([{"n": 1}, {"n": 2}], key_fn=lambda a, b="": a)
def with_default(a: int, b: str = "", n: int = 1) -> float:
    return a * n


assert_type(with_default(1), float)
assert_type(with_default(1, b="b"), float)
assert_type(with_default(1, n=2, autotune_allow_arg_overwrite=True), float)
assert_type(with_default(1, autotune=False, autotune_verbose=True, autotune_pg=None), float)
assert_type(with_default.fn(1, "b", 2), float)
assert_type(with_default.tune(1, autotune_verbose=True), TuningRecord)
assert_type(with_default.best_config(1), Config)
with_default()  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
with_default("a")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
with_default(1, c=2)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
with_default(1, autotune=1.5)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
with_default.tune("a")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
with_default.best_config()  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
with_default.fn("a")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


# A tunable parameter without a default may be left out: the parameters of key_fn count.
@autotune(lambda: [{"n": 1}], key_fn=lambda a, b: a)
def without_default(a: int, b: str, n: int) -> float:
    return a * n


def key(a: int, b: str) -> int:
    return bucket(a)


@autotune([{"n": 1}], key_fn=key)
def with_typed_key(a: int, b: str, *, n: int) -> float:
    return a * n


@autotune([{"n": 1}], key_fn=lambda a, *rest, **others: a)
def with_open_key(a: int, b: str, n: int) -> float:
    return a * n


assert_type(without_default(1, "b"), float)
assert_type(without_default(1, b="b", autotune=False), float)
assert_type(without_default.fn(1, "b", n=2), float)
assert_type(with_typed_key(1, "b"), float)
assert_type(with_open_key(1, "b"), float)
assert_type(with_open_key(1, "b", n=1, autotune_allow_arg_overwrite=True), float)
without_default(1)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
without_default(1, "b", c=1)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
with_typed_key("a", "b")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
with_open_key()  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]


@contextual_autotune(is_dist=True)
def step(a: int) -> str:
    return str(a)


assert_type(step(1), str)
assert_type(step.fn(1), str)
assert_type(step.choices(), dict[str, Any])
step("a")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
step(1, autotune=False)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


class Layer:
    @autotune([{"n": 1}], key_fn=lambda self, a: a)
    def forward(self, a: int, n: int = 1) -> float:
        return a * n

    @autotune([{"n": 1}], key_fn=lambda self, a: a)
    def backward(self, a: int, n: int) -> float:
        return a * n

    @staticmethod
    @autotune([{"n": 1}], key_fn=lambda a: a)
    def static(a: int, n: int = 1) -> float:
        return a * n

    @classmethod
    @autotune([{"n": 1}], key_fn=lambda cls, a: a)
    def of_class(cls, a: int, n: int = 1) -> float:
        return a * n

    @contextual_autotune()
    def contextual(self, a: int) -> float:
        return a


class Module(torch.nn.Module):
    @contextual_autotune()
    def forward(self, a: int) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        return a


layer = Layer()
assert_type(Module().forward(1), int)
assert_type(layer.forward(1), float)
assert_type(layer.forward(1, autotune=False), float)
assert_type(layer.backward(1), float)
assert_type(layer.contextual(1), float)
assert_type(Layer.forward(layer, 1), float)
assert_type(Layer.forward.tune(layer, 1), TuningRecord)
assert_type(Layer.static(1), float)
assert_type(Layer.of_class(1), float)
assert_type(layer.of_class(1), float)
layer.forward("a")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
layer.forward(1, c=2)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
layer.backward()  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
layer.contextual("a")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
layer.of_class("a")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
layer.forward.tune(1)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


def ops(ctx: AllGatherGEMMTensorParallelContext, group: TensorParallel) -> None:
    assert_type(group.ag_context(1, 1, x.dtype), AllGatherGEMMTensorParallelContext)
    assert_type(ag_gemm(x, x, ctx), torch.Tensor)
    assert_type(ag_gemm(x, x, ctx, algorithm="library", autotune=False), torch.Tensor)
    assert_type(ag_gemm.fn(x, x, ctx, algorithm="library"), torch.Tensor)
    assert_type(matmul(x, x), torch.Tensor)
    ag_gemm(x, x)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    ag_gemm(x, x, x)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    gemm_rs(x, x, ctx)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    matmul(x, 1)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]


@triton_dist.jit(do_not_specialize=["rank"])
def kernel(flags_ptr: Any, rank: int, BLOCK: tl.constexpr) -> None:
    token = dl.wait(flags_ptr, 1, rank)
    dl.consume_token(flags_ptr, token)
    with dl.mark("store"):
        dl.notify(flags_ptr + rank, 1, op="add")
    assert_type(add_one(rank), int)
    dl.wait(flags_ptr, 1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    dl.notify(flags_ptr, 1, scope="sys")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    add_one("a")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@triton_dist.jit
def add_one(a: int) -> int:
    return a + 1


@runner.jit
def from_artefact(x_ptr: Any, n: int) -> int:
    return n


kernel[(1,)](x, 0, BLOCK=64, num_warps=4)
from_artefact[(1,)](x, 0, cubin_dir="folder")
from_artefact.fn(x, "a")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def tuned_functions(functions: list[AutoTuner[..., float]]) -> list[float]:
    return [function(1) for function in functions]


tuned_functions([with_default, without_default, with_typed_key])
