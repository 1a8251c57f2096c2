"""What every rank does in the tests that all ops across ranks share, on CPU ranks and on GPUs."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from inspect import signature
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.distributed.calls import some_configs
from tests.distributed.gemm_calls import default_tiles
from tests.error_inputs import error_inputs
from triton_dist.errors import ContextFinalized, InvalidArgument, RankDisagreement, TritonDistError
from triton_dist.kernels import nvidia
from triton_dist.kernels.common.moe.spaces import grouped_tiles
from triton_dist.kernels.common.slots.gathered import AllGatherBuffer
from triton_dist.kernels.nvidia.allgather_gemm import local_copy_and_barrier_all
from triton_dist.kernels.nvidia.allgather_gemm.algorithms import ALGORITHMS as AG_GEMM
from triton_dist.kernels.nvidia.allreduce.algorithms import ALGORITHMS as ALL_REDUCE
from triton_dist.kernels.nvidia.gemm_allreduce.algorithms import ALGORITHMS as GEMM_AR
from triton_dist.kernels.nvidia.gemm_reduce_scatter.algorithms import ALGORITHMS as GEMM_RS
from triton_dist.kernels.nvidia.shard_collectives.algorithms import AllGatherCall, ReduceScatterCall
from triton_dist.runtime.device import current_device
from triton_dist.runtime.launch import Launch, Launcher
from triton_dist.testing import assert_allclose
from triton_dist.testing.opinfo import OPINFOS
from triton_dist.testing.opinfo.base import OpInfo
from triton_dist.testing.opinfo.collectives import CollectiveSize
from triton_dist.testing.opinfo.decode_attention import DecodeShape
from triton_dist.testing.opinfo.expert_parallel import MultipliedTokenShape, TokenShape
from triton_dist.testing.opinfo.gemm import Shape
from triton_dist.testing.opinfo.moe import GroupedShape
from triton_dist.testing.opinfo.sequence_parallel import HeadsShape, ProjectedShape

NAMES = sorted(OPINFOS.keys() - {"grouped_gemm"})
DTYPE = torch.float16
COLLECTIVE = nvidia.LibraryAlgorithm.COLLECTIVE


class Calls:
    """Small calls of an op, in a context with no room for more."""

    def __init__(self, name: str) -> None:
        self.info: OpInfo[Any] = OPINFOS[name]
        self.size = size = dist.get_world_size()
        self.shape, self.tiles = {
            Shape: (Shape(6 * size, 40 * size, 24 * size), {"gemm_config": default_tiles()}),
            GroupedShape: (
                GroupedShape(6 * size, 40 * size, 16 * size, 3, 2),
                {"gemm_config": grouped_tiles()[0]},
            ),
            CollectiveSize: (CollectiveSize(512 * size), {}),
            TokenShape: (TokenShape(6 * size, 48, 2), {}),
            MultipliedTokenShape: (MultipliedTokenShape(6 * size, 48, 2, 32), {}),
            HeadsShape: (HeadsShape(6 * size, 2 * size, size, 8), {}),
            ProjectedShape: (
                ProjectedShape(6 * size, 2 * size, size, 8, 40),
                {"gemm_config": default_tiles()},
            ),
            DecodeShape: (DecodeShape(6 * size, 2, 2 * size, 2, 16), {"block_n": 16}),
        }[self.info.shape_type]
        self.operands = self.info.operands(self.shape, DTYPE, size)

    def context(self) -> Any:
        return self.info.context(self.shape, DTYPE)

    def __call__(self, ctx: Any, **options: Any) -> torch.Tensor:
        """Call the op's function and check the result."""
        args, kwargs = self.info.arguments(self.operands, ctx)
        C = self.info.output(self.info.op.fn(*args, **kwargs, **{**self.tiles, **options}))
        limit = self.info.tolerance(DTYPE, self.size)
        assert_allclose(C, self.info.reference(self.operands), rtol=limit, atol=limit)
        return C


def refusal(call: Callable[[], object]) -> Any:
    with pytest.raises(TritonDistError) as raised:
        call()
    return raised.value


@contextmanager
def launched() -> Iterator[list[str]]:
    """Note the names of kernels that a rank launches, and copies of shards that it queues."""
    names: list[str] = []
    run, repeat, start = Launch.run, Launcher.run, AllGatherBuffer.start

    def running(launch: Launch) -> Any:
        names.append(launch.kernel.__name__)
        return run(launch)

    def repeating(launcher: Launcher, key: Any, make: Any, *rest: Any, **named: Any) -> None:
        before, made = len(names), []

        def making() -> Launch:
            launch: Launch = make()
            made.append(launch.kernel.__name__)
            return launch

        repeat(launcher, key, making, *rest, **named)
        if len(names) == before:  # what a launcher repeats is no ``Launch.run``
            names.extend(made or ["repeated"])

    def starting(*args: Any, **named: Any) -> Any:
        names.append("copies")
        return start(*args, **named)

    with (
        mock.patch.object(Launch, "run", running),
        mock.patch.object(Launcher, "run", repeating),
        mock.patch.object(AllGatherBuffer, "start", starting),
    ):
        yield names


def refused_inputs(name: str) -> tuple[dict[str, tuple[str, str]], list[str], list[str]]:
    """Argument and message of the error of each error input; what those launched, and what a good
    call launches."""
    calls, seen = Calls(name), {}
    info, good = calls.info, calls.operands
    tunables = {name for config in info.op.config_space for name in config} | {"method"}
    with calls.context() as ctx:
        for _ in range(2):
            calls(ctx)
        args, kwargs = info.arguments(good, ctx)
        valid = signature(info.op.fn).bind(*args, **kwargs).arguments
        with launched() as of_bad:
            for which, changes in error_inputs(info, good, calls.size).items():
                arguments = {**valid, **changes}
                error = refusal(lambda a=arguments: info.op.fn(**{**calls.tiles, **a}))
                assert isinstance(error, InvalidArgument), which
                if not tunables & set(changes):
                    assert str(refusal(lambda a=arguments: info.op(**a))) == str(error), which
                seen[which] = error.argument, str(error)
        with launched() as of_good:
            calls(ctx)
    return seen, of_bad, of_good


def context_ends(name: str) -> None:
    """A context manager frees once; after that, and after an error inside, nothing works."""
    calls = Calls(name)
    op = calls.info.op
    with calls.context() as ctx:
        calls(ctx)
    ctx.finalize()
    with pytest.raises(KeyError), calls.context() as failed:
        raise KeyError

    def uses(ended: Any) -> Iterator[Callable[[], object]]:
        def call(function: Callable[..., object], **options: Any) -> None:
            args, kwargs = calls.info.arguments(calls.operands, ended)
            function(*args, **kwargs, **options)

        yield lambda: call(op)
        yield lambda: call(op, autotune=False)
        yield lambda: call(op.fn, **calls.tiles)
        if name == "ag_gemm":
            yield lambda: ended.symm_workspace
            yield lambda: ended.own_rows(1)
            yield lambda: local_copy_and_barrier_all(calls.operands["A"], ended)

    for use in (*uses(ctx), *uses(failed)):
        error = refusal(use)
        assert isinstance(error, ContextFinalized)
        assert "was finalized" in str(error)


def without_history(name: str) -> int:
    """Call every algorithm in inference mode, and the first under ``no_grad``.

    The operands require grad. Neither results nor memory that peers share record it.
    """
    calls, count = Calls(name), 0
    info = calls.info
    algorithms: dict[Any, dict[str, Any]] = {}
    for config in info.op.config_space:
        if config["algorithm"] != "symmetric_collective":  # takes no fp16
            algorithms.setdefault(config["algorithm"], config)
    for operand in calls.operands.values():
        operand.requires_grad_(operand.is_floating_point())
    configs = [*algorithms.values()]
    for mode, called in ((torch.no_grad, configs[:1]), (torch.inference_mode, configs)):
        with mode(), calls.context() as ctx:
            for config in called:
                assert not calls(ctx, **config).requires_grad
                count += 1
            current_device().synchronize()
            dist.barrier()  # no peer writes while regions are looked at
            memory = getattr(ctx.buffer, "slots", ctx.buffer).memory
            for region in memory._regions.values():
                assert not any(peer.requires_grad for peer in region.peers), region.name
    return count - 1 - len(configs)


def context_inputs(
    name: str, rank: int, size: int
) -> tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]:
    """Return the function that creates a context, arguments that it accepts, and such that it
    refuses. Text in brackets tells several values of an argument apart."""
    ranks = {"rank": rank, "world_size": size, "local_world_size": size}
    bad_ranks = {"rank": rank + 1, "world_size": size + 1, "local_world_size": 0}
    own_ranks = {"rank": rank, "num_ranks": size}
    bad_own_ranks = {
        "rank": rank + 1, "num_ranks": size + 1, "num_ranks (none)": 0, "num_local_ranks": None,
        "num_local_ranks (none)": 0,
    }  # fmt: skip
    if name == "ag_gemm":
        good = {"max_M": 6 * size, "N": 40 * size, "K": 72, "dtype": DTYPE, **own_ranks}
        bad = {
            **bad_own_ranks,
            "max_M": 6 * size + 1, "max_M (none)": 0, "max_M (negative)": -size,
            "max_M (a list)": [6], "N": 40 * size + 1, "N (none)": 0, "K": 0,
            "K (half of an odd number)": 36.5, "dtype": torch.float64,
            "dtype (integers)": torch.int8, "all_gather_method": "ring_push_1d",
        }  # fmt: skip
        return nvidia.create_ag_gemm_context, good, bad
    if name == "ag_group_gemm":
        good = {
            "max_ntokens": 6 * size, "N_per_rank": 40, "K": 72, "num_experts": 4, "topk": 2,
            "dtype": DTYPE, **own_ranks,
        }  # fmt: skip
        bad = {
            **bad_own_ranks,
            "max_ntokens": 6 * size + 1, "max_ntokens (none)": 0, "N_per_rank": 0, "K": 0,
            "num_experts": 513, "topk": 11, "dtype": torch.int8, "BLOCK_SIZE_M": 48,
            "BLOCK_SIZE_N": 512, "BLOCK_SIZE_K": 8, "GROUP_SIZE_M": 0, "stages": 0, "num_warps": 3,
        }  # fmt: skip
        return nvidia.create_ag_group_gemm_context, good, bad
    if name in ("gemm_ar", "gemm_rs"):
        good = {"max_M": 6 * size, "N": 40, "output_dtype": DTYPE, **ranks}
        bad = {**bad_ranks, "max_M": 0, "N": 0, "output_dtype": torch.float64}
        if name == "gemm_rs":
            bad["max_M (no multiple)"] = 6 * size + 1
        return getattr(nvidia, f"create_{name}_context"), good, bad
    if name.startswith("run_moe_reduce"):
        good = {
            "max_token_num": 8 * size, "hidden_dim": 32, "num_experts": 4, "topk": 2,
            "input_dtype": DTYPE, **ranks,
        }  # fmt: skip
        bad = {
            **bad_ranks,
            "max_token_num": 8 * size + 1, "max_token_num (none)": 0, "hidden_dim": 0,
            "num_experts": 513, "topk": 11, "input_dtype": torch.int8, "n_chunks_max": 0,
        }  # fmt: skip
        return getattr(nvidia, f"create_moe_{name[-2:]}_context"), good, bad
    if name.startswith("ep_"):
        good = {
            "max_tokens": 6, "hidden": 40, "num_experts": 4 * size, "topk": 2, "dtype": DTYPE,
            **ranks,
        }  # fmt: skip
        bad = {
            **bad_ranks,
            "max_tokens": 0, "hidden": 0, "num_experts": 4 * size + 1, "topk": 17,
            "dtype": torch.int8, "capacity": 7,
        }  # fmt: skip
        return nvidia.create_ep_context, good, bad
    if name == "sp_ag_attention":
        good = {"max_tokens": 6, "kv_heads": 2, "head_dim": 8, "dtype": DTYPE, **ranks}
        bad = {**bad_ranks, "max_tokens": 0, "kv_heads": 0, "head_dim": 4, "dtype": torch.int8}
        return nvidia.create_sp_ag_attention_context, good, bad
    if name.startswith("ulysses"):
        good = {
            "max_tokens": 6 * size, "q_heads": 2 * size, "kv_heads": size, "head_dim": 8,
            "dtype": DTYPE, **ranks,
        }  # fmt: skip
        bad = {
            **bad_ranks,
            "max_tokens": 0, "q_heads": 2 * size + 1, "q_heads (of kv_heads)": 0, "kv_heads": 0,
            "kv_heads (between)": 2 * size + 1, "head_dim": 4, "dtype": torch.int8,
            "v_head_dim": 9, "max_local_tokens": 5,
        }  # fmt: skip
        return nvidia.create_ulysses_context, good, bad
    if name == "sp_decode_attn":
        good = {"max_batch": 2, "num_q_heads": 4, "head_dim": 16, "dtype": DTYPE, **ranks}
        bad = {
            **bad_ranks, "max_batch": 0, "num_q_heads": 0, "head_dim": 20, "v_head_dim": 8,
            "max_q_len": 9, "dtype": torch.int8,
        }  # fmt: skip
        return nvidia.create_sp_decode_context, good, bad
    create = {
        "all_gather": nvidia.create_all_gather_ctx,
        "all_reduce": nvidia.create_allreduce_ctx,
        "reduce_scatter": nvidia.create_reduce_scatter_ctx,
    }[name]
    return create, {"workspace_nbytes": 1024, **ranks}, {**bad_ranks, "workspace_nbytes": 0}


def refused_contexts(name: str) -> tuple[str, dict[str, tuple[str, str]], str]:
    """Name of the function that creates contexts; for each argument that it refuses, argument and
    message of the error; and what all ranks are told where rank 1 asks for more."""
    rank = dist.get_rank()
    create, good, bad = context_inputs(name, rank, dist.get_world_size())
    seen = {}
    for which, value in bad.items():
        changes = {which.split(" (")[0]: value}
        error = refusal(lambda c=changes: create(**{**good, **c}))
        assert isinstance(error, InvalidArgument), which
        seen[which] = error.argument, str(error)
    size = min({"K", "N", "head_dim", "hidden", "hidden_dim", "workspace_nbytes"} & set(good))
    error = refusal(lambda: create(**{**good, size: good[size] + 8 * rank}))
    assert isinstance(error, RankDisagreement), error
    create(**good).finalize()
    return create.__name__, seen, str(error)


SUMS = {"copy_engine": {"fuse_scatter": False}, "fused": {"fuse_scatter": True}}
BY_NAME: dict[str, tuple[Any, Iterable[Any], dict[str, Any]]] = {
    "ag_gemm": (AG_GEMM, (*nvidia.AllGatherMethod, COLLECTIVE), {}),
    "gemm_rs": (GEMM_RS, (COLLECTIVE,), SUMS),
    "gemm_ar": (GEMM_AR, nvidia.GEMMAllReduceMethod, {}),
    "all_reduce": (ALL_REDUCE, [m for m in nvidia.AllReduceMethod if not m.replacement], {}),
    "all_gather": (AllGatherCall.algorithms, nvidia.GatherMethod, {}),
    "reduce_scatter": (ReduceScatterCall.algorithms, nvidia.ReduceScatterMethod, {}),
}
"""Algorithms of each op, the methods that name one, and other keywords that name one."""


def named_algorithms(name: str) -> int:
    """Call the op without tuning, with each keyword that names an algorithm; then with wrong ones.

    Returns the number of calls.
    """
    calls, (algorithms, methods, others) = Calls(name), BY_NAME[name]
    asked = {each.value: {"method": each} for each in methods} | others
    ran: list[str] = []

    def call(ctx: Any, **options: Any) -> None:
        args, kwargs = calls.info.arguments(calls.operands, ctx)
        C = calls.info.op(*args, **kwargs, autotune=False, **options)
        limit = calls.info.tolerance(DTYPE, calls.size)
        assert_allclose(C, calls.info.reference(calls.operands), rtol=limit, atol=limit)

    with ExitStack() as patches:
        for algorithm in algorithms.values():
            noted = functools.partial(_noted, ran, algorithm.name, algorithm.run)
            patches.enter_context(mock.patch.object(algorithm, "run", noted))
        with calls.context() as ctx:
            for expected, options in asked.items():
                call(ctx, **options)
                assert ran == [expected]
                ran.clear()
        if name == "ag_gemm":
            ring = nvidia.AllGatherMethod.RING_PUSH_1D
            with calls.info.context(calls.shape, DTYPE, all_gather_method=ring) as ctx:
                call(ctx)
            assert ran == [ring.value]
        with calls.context() as ctx:
            for method in ("one_shot", 5, nvidia.LibraryAlgorithm.ASYNC_TP):
                error = refusal(lambda m=method: call(ctx, method=m))
                assert isinstance(error, InvalidArgument)
                assert re.search(r"method is |algorithm is 'async_tp', expected", str(error))
    return len(asked)


def _noted(ran: list[str], name: str, run: Callable[[Any], Any], call: Any) -> Any:
    ran.append(name)
    return run(call)


def everything(name: str) -> tuple[Any, ...]:
    """Run all checks of an op in one start of ranks."""
    # ep_dispatch_group_gemm calls the tuned ep_dispatch, whose config does not matter here.
    is_nested = name == "ep_dispatch_group_gemm"
    with some_configs(nvidia.ep_dispatch, most=1) if is_nested else nullcontext():
        results = refused_inputs(name), refused_contexts(name), without_history(name)
        context_ends(name)
    return results
