"""AllGather-GEMM in a world of one, its config space, and the names that scripts import."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.distributed.gemm_calls import AllGatherGEMM, default_tiles
from triton_dist.errors import (
    ContextFinalized,
    DeviceUnavailable,
    InvalidArgument,
)
from triton_dist.kernels import nvidia
from triton_dist.kernels.common import libraries
from triton_dist.kernels.common.exchange import buffer
from triton_dist.kernels.common.exchange.buffer import LaunchParams
from triton_dist.kernels.common.gemm.launch import split_k_tiles
from triton_dist.kernels.common.gemm.spaces import max_rows_of_key
from triton_dist.kernels.nvidia import (
    AllGatherGEMMTensorParallelContext,
    AllGatherMethod,
    LibraryAlgorithm,
    ag_gemm,
    create_ag_gemm_context,
)
from triton_dist.kernels.nvidia.allgather_gemm import algorithms as allgather_gemm_algorithms
from triton_dist.kernels.nvidia.allgather_gemm.algorithms import (
    ALGORITHMS,
    is_serial_worth_trying,
    serial_params,
)
from triton_dist.kernels.nvidia.allgather_gemm.context import MAX_GATHERED_BYTES, max_exchange_M
from triton_dist.runtime.device import cpu

config_space, prune_fn = ALGORITHMS.config_space, ag_gemm.prune_fn


@pytest.mark.parametrize("local_copy", [True, False])
def test_all_rows_go_to_memory_apart_from_the_own_ones(local_copy):
    with create_ag_gemm_context(32, 32, 64, torch.float16, 0, 1) as ctx:
        A, B = torch.ones(16, 64).half(), torch.ones(64, 32).half()
        own, apart = (A, ctx.symm_workspace[:16])[:: 1 if local_copy else -1]
        ctx.own_rows(16).fill_(1)
        options = {"gemm_config": default_tiles(), "local_copy": local_copy}
        with pytest.raises(InvalidArgument, match="gathered is 'memory that overlaps"):
            ag_gemm.fn(A, B, ctx, gathered=own, **options)
        assert ag_gemm.fn(A, B, ctx, gathered=apart.fill_(0), **options).eq(64).all()
        assert apart.eq(1).all()


def on_gpus(monkeypatch):
    """Whose torch has no async tensor parallelism."""
    gpu = SimpleNamespace(
        interprets=False, has_nccl=True, has_async_tp=True, prefers_descriptors=True
    )
    for module in (libraries, allgather_gemm_algorithms):
        monkeypatch.setattr(module, "current_device", lambda: gpu)
    monkeypatch.setattr(libraries, "has_operator", lambda operator: False)


def test_the_space_has_tiles_and_communication(monkeypatch):
    space = config_space()
    assert len({str(config) for config in space}) == len(space)
    assert {config["algorithm"] for config in space} == {method.value for method in AllGatherMethod}
    assert set(ALGORITHMS) == {each.value for each in (*AllGatherMethod, *LibraryAlgorithm)}
    tiled = [config for config in space if "gemm_config" in config]
    assert all(config["persistent"] for config in tiled), "the other kind is for GPUs alone"
    on_gpus(monkeypatch)
    serial = [
        {"algorithm": "serial", "num_chunks": 1, "num_comm_sms": number}
        for number in (128, 64, 32, 16, 8)
    ]
    assert space[len(tiled) :] == serial[-1:]
    assert config_space()[len(tiled) :] == [*serial, {"algorithm": "collective"}]
    monkeypatch.setattr(libraries, "has_operator", lambda operator: True)
    assert config_space()[-1] == {"algorithm": "async_tp"}
    assert max(config.get("num_streams", 0) for config in space) > 1
    assert max(config["num_chunks"] for config in space) > 1
    assert ag_gemm.config_space.names == {*space[0], "num_comm_sms"}


def test_a_ring_is_tried_where_not_all_gpus_are_linked(monkeypatch):
    on_gpus(monkeypatch)
    A, B = torch.empty(8, 64, dtype=torch.float16), torch.empty(64, 64, dtype=torch.float16)

    def tried(size):
        ctx = SimpleNamespace(num_ranks=size)
        return {config["algorithm"] for config in config_space() if prune_fn(config, A, B, ctx)}

    linked = tried(4)
    assert "collective" in linked
    assert linked == tried(2)
    monkeypatch.setattr(allgather_gemm_algorithms, "has_links_between_all_gpus", lambda: False)
    assert tried(4) == linked | {"ring_push_1d"}
    assert tried(2) == linked  # a ring of two is a full mesh


def test_an_older_keyword_names_the_only_way():
    rows = torch.empty(8, 64, dtype=torch.float16), torch.empty(64, 64, dtype=torch.float16)
    ctx = SimpleNamespace(num_ranks=4)
    for method in AllGatherMethod:
        kept = [config for config in config_space() if prune_fn(config, *rows, ctx, method=method)]
        assert {config["algorithm"] for config in kept} == {method.value}


@pytest.mark.parametrize(
    ("rows", "K", "columns", "dtype", "num_ranks", "kept"),
    [
        (128, 8192, 64, torch.float16, 4, True),
        (512, 8192, 64, torch.float16, 4, True),
        (1024, 8192, 64, torch.float16, 4, True),  # 16 MiB
        (1024, 8200, 64, torch.float16, 4, False),
        (1000, 8208, 64, torch.float16, 4, False),  # as 1024 rows
        (1025, 64, 64, torch.float16, 4, False),
        (128, 8192, 64, torch.float16, 1, False),
        (128, 8192, 64, torch.float32, 4, False),  # without matrix units: by pointers
        (128, 100, 64, torch.float16, 4, False),
        (128, 8192, 60, torch.float16, 4, False),
    ],
)
def test_small_shards_alone_are_sent_by_sms(rows, K, columns, dtype, num_ranks, kept):
    A = torch.empty(rows, K, dtype=dtype, device="meta")
    B = torch.empty(K, columns, dtype=dtype)
    space, context = config_space(), SimpleNamespace(num_ranks=num_ranks)
    fused = [each for each in space if each["algorithm"] == "fused_push"]
    assert any(prune_fn(config, A, B, context) for config in fused) is kept


@pytest.mark.parametrize(
    ("rows", "K", "num_ranks", "programs"),
    [
        (1, 72, 4, [8]),
        (1, 8192, 4, [8]),  # a block of 2 KB for each program
        (4, 8192, 4, [8, 16, 32]),
        (1, 12288, 4, [8, 16]),
        (65, 8192, 2, [8, 16, 32, 64, 128]),
        (512, 8192, 4, [8, 16, 32, 64, 128]),  # 32 MiB
        (449, 8192, 4, [8, 16, 32, 64, 128]),  # as 512 rows
        (513, 8192, 4, []),
        (512, 8200, 4, []),
        (1, 8192, 1, []),  # gathers nothing
    ],
)
def test_few_rows_alone_are_gathered_before_the_product(monkeypatch, rows, K, num_ranks, programs):
    on_gpus(monkeypatch)
    A = torch.empty(rows, K, dtype=torch.bfloat16, device="meta")
    B, ctx = torch.empty(K, 64, dtype=torch.bfloat16), SimpleNamespace(num_ranks=num_ranks)
    serial = [each for each in config_space() if each["algorithm"] == "serial"]
    kept = [each["num_comm_sms"] for each in serial if prune_fn(each, A, B, ctx)]
    assert kept == programs[::-1]


def test_what_the_key_keeps_the_context_has_room_for():
    """Of a bucket that is kept, every M."""
    for num_ranks, K, max_M in ((4, 8192, 1 << 20), (4, 8200, 1 << 20), (2, 515, 96), (3, 7, 9)):
        most = max_exchange_M(max_M, K, torch.float16, num_ranks)
        assert most % num_ranks == 0
        rows = range(1, max_M // num_ranks + 1)
        for bucket in sorted({max_rows_of_key(each, num_ranks) for each in rows}):
            A = torch.empty(bucket, K, dtype=torch.float16, device="meta")
            if is_serial_worth_trying(A, 8, num_ranks):
                assert min(bucket * num_ranks, max_M) <= most
            else:
                assert bucket * num_ranks * K * 2 > MAX_GATHERED_BYTES


@pytest.mark.parametrize(
    ("shard_bytes", "asked", "chunks", "shape"),
    [
        (1, None, 1, (8, 2048)),
        (16 << 10, None, 1, (8, 2048)),
        (128 << 10, None, 1, (64, 2048)),
        (256 << 10, None, 1, (32, 8192)),
        (4 << 20, None, 1, (128, 8192)),
        (4 << 20, 1, 1, (1, 8192)),
        (60 << 10, 16, 1, (16, 4096)),
        (60 << 10, 16, 2, (16, 2048)),
        (256 << 10, 256, 1, (256, 2048)),
    ],
)
def test_a_program_moves_little_at_a_time_where_it_moves_little(
    shard_bytes, asked, chunks, shape, monkeypatch
):
    monkeypatch.setattr(buffer, "params_for_device", lambda shape: shape)  # as on GPUs
    expected = LaunchParams(*shape, chunks)
    assert serial_params.__wrapped__(shard_bytes, asked, chunks) == expected


def test_where_kernels_are_interpreted_a_program_is_one_of_three():
    assert serial_params(128 << 10, None, 1) == LaunchParams(3, 8192)
    assert serial_params(128 << 10, 16, 1) == LaunchParams(16, 8192)


@pytest.mark.parametrize("number", [0, -1, 3, 33])
def test_some_sms_send_and_some_multiply(number):
    """Of the three that a CPU pretends to have."""
    A, B = torch.ones(4, 8), torch.ones(8, 8)
    with create_ag_gemm_context(8, 8, 8, torch.float32, 0, 1) as ctx:
        with pytest.raises(InvalidArgument, match="1 to 2"):
            ag_gemm.fn(A, B, ctx, default_tiles(), algorithm="fused_push", num_comm_sms=number)
        # Others send nothing.
        ag_gemm.fn(A, B, ctx, default_tiles(), num_comm_sms=number)


def test_one_rank_tries_no_vendor():
    A, B = torch.empty(8, 64, dtype=torch.float16), torch.empty(64, 64, dtype=torch.float16)
    config = {"algorithm": "collective"}
    assert not prune_fn(config, A, B, SimpleNamespace(num_ranks=1))
    assert prune_fn(config, A, B, SimpleNamespace(num_ranks=2))


def test_attributes_of_a_context():
    ctx = create_ag_gemm_context(12, 40, 72, torch.bfloat16, 0, 1, num_local_ranks=8)
    assert isinstance(ctx, AllGatherGEMMTensorParallelContext)
    assert (ctx.rank, ctx.num_ranks, ctx.num_local_ranks, ctx.local_num_ranks) == (0, 1, 1, 1)
    assert (ctx.max_M, ctx.N, ctx.K, ctx.dtype) == (12, 40, 72, torch.bfloat16)
    assert ctx.all_gather_method is AllGatherMethod.FULL_MESH_PUSH
    assert ctx.symm_workspace.shape == (12, 72)
    assert ctx.symm_workspace.dtype == torch.bfloat16
    assert ctx.own_rows(5).data_ptr() == ctx.symm_workspace.data_ptr()
    assert ctx.max_exchange_M == 12
    ctx.finalize()
    ctx.finalize()
    with pytest.raises(ContextFinalized, match="AllGatherGEMMTensorParallelContext was finalized"):
        ctx.symm_workspace  # noqa: B018


def test_the_context_says_how_a_call_that_names_no_way_gathers(monkeypatch):
    started = []
    ctx = create_ag_gemm_context(
        8, 8, 8, torch.float32, 0, 1, all_gather_method=AllGatherMethod.RING_PUSH_1D
    )
    start = ctx.buffer.start

    def record(own, method, num_streams, num_chunks, *rest):
        started.append((method, num_streams, num_chunks))
        return start(own, method, num_streams, num_chunks)

    monkeypatch.setattr(ctx.buffer, "start", record)
    A, B = torch.ones(4, 8), torch.ones(8, 8)
    ag_gemm.fn(A, B, ctx, default_tiles())
    push = AllGatherMethod.FULL_MESH_PUSH
    ag_gemm.fn(A, B, ctx, default_tiles(), method=push, num_chunks=2)
    ag_gemm.fn(A, B, ctx, default_tiles(), algorithm="full_mesh_push", num_streams=2)
    assert started == [(AllGatherMethod.RING_PUSH_1D, 1, 1), (push, 1, 2), (push, 2, 1)]
    ctx.finalize()


def test_the_workspace_for_parts_of_tiles_is_allocated_once_when_it_is_needed():
    calls = AllGatherGEMM(max_rows=20, columns=40, K=72)
    local = calls.ctx._lazy_split_workspace
    calls(20)
    assert "workspace" not in vars(local)
    seen = set()
    for config in split_k_tiles():
        calls(20, gemm_config=config)
        seen.add(vars(local)["workspace"].partials.data_ptr())
    assert len(seen) == 1
    calls.finish()
    assert "workspace" not in vars(local)


def test_cpu_ranks_need_the_interpreter(monkeypatch):
    monkeypatch.setattr(cpu, "is_interpreting", lambda: False)
    with pytest.raises(DeviceUnavailable, match=r"Set TRITON_INTERPRET=1 before .*launch\.sh"):
        create_ag_gemm_context(8, 8, 8, torch.float16, 0, 1)


@pytest.mark.parametrize(
    ("op", "creator"),
    [
        ("ag_gemm", "create_ag_gemm_context"),
        ("gemm_rs", "create_gemm_rs_context"),
        ("gemm_ar", "create_gemm_ar_context"),
        ("all_reduce", "create_allreduce_ctx"),
        ("all_gather", "create_all_gather_ctx"),
        ("reduce_scatter", "create_reduce_scatter_ctx"),
    ],
)
def test_who_has_no_context_is_told_who_makes_one(op, creator):
    operands = (torch.ones(4, 4),) * (2 if "gemm" in op else 1)
    with pytest.raises(InvalidArgument, match=rf"{op}: ctx is None, .* {creator}\(…\) made"):
        getattr(nvidia, op)(*operands, None)


def test_a_failing_consumer_leaves_the_context_usable(monkeypatch):
    calls = AllGatherGEMM(max_rows=5, columns=40, K=72)
    with monkeypatch.context() as patch:
        patch.setattr(allgather_gemm_algorithms, "sharded_gemm", lambda *_, **__: 1 / 0)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                ag_gemm.fn(
                    torch.ones(5, 72).half(), torch.ones(72, 40).half(), calls.ctx, default_tiles()
                )
    calls(5)
    assert calls.finish() == 1
