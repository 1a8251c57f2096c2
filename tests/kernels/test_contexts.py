"""The life of a context: what is there of it when its creation fails, and after its end."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed import dropped_contexts
from tests.distributed.every_op_ranks import NAMES, context_inputs
from triton_dist.errors import ContextFinalized, InvalidArgument, SymmetricMemoryFull
from triton_dist.kernels.nvidia import (
    ag_gemm,
    all_gather,
    all_reduce,
    create_ag_gemm_context,
    create_all_gather_ctx,
    create_allreduce_ctx,
    create_gemm_ar_context,
    create_gemm_rs_context,
    create_moe_ar_context,
    create_moe_rs_context,
    create_reduce_scatter_ctx,
    gemm_ar,
    gemm_rs,
    reduce_scatter,
    run_moe_reduce_rs,
)
from triton_dist.runtime import addresses, symmetric
from triton_dist.runtime.symmetric import host

FP16 = torch.float16
CREATE = {
    "ag_gemm": lambda rank, size: create_ag_gemm_context(8, 8, 8, FP16, rank, size),
    "gemm_rs": lambda rank, size: create_gemm_rs_context(8, 8, rank, size, size, FP16),
    "gemm_ar": lambda rank, size: create_gemm_ar_context(8, 8, rank, size, size, FP16),
    "moe_rs": lambda rank, size: create_moe_rs_context(rank, size, size, 16, 8, 4, 2, FP16),
    "moe_ar": lambda rank, size: create_moe_ar_context(rank, size, size, 16, 8, 4, 2, FP16),
    "all_gather": lambda rank, size: create_all_gather_ctx(64, rank, size, size),
    "reduce_scatter": lambda rank, size: create_reduce_scatter_ctx(64, rank, size, size),
}


def copy_threads():
    return [each for each in threading.enumerate() if "copy-stream" in each.name]


def what_is_left():
    """Names of live symmetric memory, and copy threads; those that end get a second to do so."""
    until = time.monotonic() + 1
    while copy_threads() and time.monotonic() < until:
        time.sleep(0.01)
    return [name for *_, name, _ in addresses._regions], len(copy_threads())


@pytest.mark.parametrize("op", CREATE)
def test_a_second_allocation_that_fails_frees_the_first(monkeypatch, op):
    allocate, names = symmetric.allocate, []

    def too_little_for_two(name, *arguments):
        names.append(name)
        if len(names) == 2:
            raise SymmetricMemoryFull(name, 1, 0, "")
        return allocate(name, *arguments)

    before = what_is_left()
    monkeypatch.setattr(symmetric, "allocate", too_little_for_two)
    with pytest.raises(SymmetricMemoryFull):
        CREATE[op](0, 1)
    assert what_is_left() == before
    CREATE[op](0, 1).finalize()
    assert len(names) == 4
    assert what_is_left() == before


def second_memory_of_one_rank_is_too_large():
    """What is left on this rank when rank 1 has no memory for the second allocation; then the
    context is created after all."""
    reserve, asked = host._reserve, []

    def reserve_once(fd, nbytes):
        asked.append(nbytes)
        if dist.get_rank() == 1 and len(asked) == 2:
            return 0
        return reserve(fd, nbytes)

    host._reserve = reserve_once
    with pytest.raises(SymmetricMemoryFull, match="the exchange of ag_gemm, rank 1"):
        CREATE["ag_gemm"](dist.get_rank(), dist.get_world_size())
    left = what_is_left()
    with CREATE["ag_gemm"](dist.get_rank(), dist.get_world_size()):
        pass
    return left, what_is_left()


def test_a_rank_without_memory_for_the_second_leaves_nothing_on_any(spawn_ranks):
    nothing = ([], 0)
    assert spawn_ranks(2, second_memory_of_one_rank_is_too_large) == [(nothing, nothing)] * 2


def test_contexts_that_are_dropped_leave_nothing(spawn_ranks):
    nothing = {op: [[], 0, 0, 0] for op in dropped_contexts.CALL}
    assert spawn_ranks(2, dropped_contexts.every, 1 << 15, 2) == [nothing] * 2


def test_every_memory_is_freed_whatever_another_raises():
    before = what_is_left()
    ctx = CREATE["ag_gemm"](0, 1)
    free = ctx.buffer.free
    ctx.buffer.free = lambda: (free(), 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ctx.free()
    assert what_is_left() == before
    ctx.free()


@pytest.mark.parametrize("create", [*CREATE.values(), lambda *at: create_allreduce_ctx(64, *at, 1)])
def test_a_context_is_reset_until_it_ends(create):
    ctx = create(0, 1)
    reset = []
    for memory in ctx._memories:
        memory.reset = lambda memory=memory: reset.append(memory)
    ctx.reset()
    assert reset == [*ctx._memories]
    ctx.finalize()
    with pytest.raises(ContextFinalized):
        ctx.reset()


def test_operands_that_kernels_would_misread_are_refused():
    A, B = torch.rand(4, 16), torch.complex(torch.zeros(16, 6), torch.rand(16, 6)).conj().imag
    with create_ag_gemm_context(4, 6, 16, torch.float32, 0, 1) as ctx:
        with pytest.raises(InvalidArgument, match=r"B.is_neg\(\) is True"):
            ag_gemm(A, B, ctx, autotune=False)
        with pytest.raises(InvalidArgument, match=r"gathered is .* expected separate memory"):
            ag_gemm(A, B.resolve_neg(), ctx, gathered=A, autotune=False)


@pytest.mark.parametrize("name", NAMES)
def test_a_size_that_is_no_whole_number_is_refused(name):
    create, good, _ = context_inputs(name, 0, 1)
    for argument in [each for each, given in good.items() if isinstance(given, int)]:
        for value in (8.0, "8", None, [8], True):
            with pytest.raises(InvalidArgument) as refusal:
                create(**{**good, argument: value})
            assert refusal.value.argument == argument
            assert refusal.value.expected == "an int"


def test_attributes_of_contexts():
    with (
        create_gemm_rs_context(12, 40, 0, 1, 8, torch.bfloat16) as rs,
        create_gemm_ar_context(11, 40, 0, 1, 8, torch.bfloat16) as ar,
        create_allreduce_ctx(1 << 14, 0, 1, 8) as all_reducing,
    ):
        for ctx in (rs, ar, all_reducing):
            ranks = (ctx.rank, ctx.num_ranks, ctx.world_size, ctx.local_world_size)
            assert ranks == (0, 1, 1, 1)
        assert (rs.max_M, rs.N, rs.output_dtype, rs.reduce_st) == (12, 40, torch.bfloat16, False)
        assert (ar.max_M, ar.N, ar.output_dtype) == (11, 40, torch.bfloat16)
        assert all_reducing.workspace_nbytes == 1 << 14


def test_a_context_of_another_op_is_refused():
    made = {op: create(0, 1) for op, create in CREATE.items()}
    made["all_reduce"] = create_allreduce_ctx(64, 0, 1, 1)
    x, ids = torch.ones(8, 8).half(), torch.zeros(8, 2, dtype=torch.int32)
    for op, operands in {
        ag_gemm: (x, x),
        gemm_rs: (x, x),
        gemm_ar: (x, x),
        all_reduce: (x[0],),
        all_gather: (x[0],),
        reduce_scatter: (x[0],),
        run_moe_reduce_rs: (torch.ones(16, 8).half(), torch.ones(4, 8, 8).half(), ids, ids.half()),
    }.items():
        own = op.__name__.removeprefix("run_").replace("moe_reduce", "moe")
        for name, ctx in made.items():
            for other in (type(ctx), *([] if name == own else [ctx])):
                for call in (op, op.fn):
                    with pytest.raises(
                        InvalidArgument, match=r"a context that create_.*\(…\) made"
                    ):
                        call(*operands, other)
    for ctx in made.values():
        ctx.finalize()
