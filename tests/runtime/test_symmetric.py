"""Symmetric memory: equal regions on all ranks, each mapped by all ranks, freed without a rest, and
named by address."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from triton_dist import knobs
from triton_dist.debugging.modes import interpreter_checks
from triton_dist.errors import InvalidArgument, RankDisagreement, SymmetricMemoryFull
from triton_dist.runtime import symmetric
from triton_dist.runtime.addresses import describe_address, forget, register
from triton_dist.runtime.ranks import group_for
from triton_dist.runtime.symmetric import host

exact_memory = pytest.mark.skipif(
    "race" in interpreter_checks(knobs.debug.get()),
    reason="interp:race adds its notes to symmetric memory, and they are listed with the rest",
)
"""A mark of tests that say exactly which regions there are, and how large."""
REGIONS = {
    "rows": ((3, 5), torch.float16),
    "flags": ((7,), torch.int32),
    "nothing": ((0, 4), torch.float32),
    "bytes": ((513,), torch.uint8),
    "last": ((2, 2, 2), torch.bfloat16),
}


def check_regions(group_members=None):
    """Shapes, zeros, alignment, tables; then every rank writes to every rank's memory."""
    groups = [dist.new_group(ranks) for ranks in group_members] if group_members else [None]
    mine = next((i for i, ranks in enumerate(group_members or []) if dist.get_rank() in ranks), 0)
    ranks = group_for(groups[mine])
    with symmetric.allocate("test", REGIONS, groups[mine]) as memory:
        ranks.barrier("nobody has written yet")
        for name, (shape, dtype) in REGIONS.items():
            region = memory[name]
            assert region.name == name
            assert len(region.peers) == ranks.size
            assert region.peers[ranks.rank] is region.local
            assert region.pointers.dtype == torch.int64
            assert region.pointers.tolist() == [peer.data_ptr() for peer in region.peers]
            for peer in region.peers:
                assert tuple(peer.shape) == shape
                assert peer.dtype == dtype
                assert peer.is_contiguous()
                assert not peer.any()
            if region.local.numel():
                alignment = 512 if ranks.size > 1 else 64  # alone: what torch.empty gives
                assert {peer.data_ptr() % alignment for peer in region.peers} == {0}
                assert len(set(region.pointers.tolist())) == ranks.size
        memory.barrier()
        for peer in range(ranks.size):
            memory["flags"].peers[peer][ranks.rank] = 10 * peer + ranks.rank + 1
        # A kernel writes through the table.
        address = int(memory["bytes"].pointers[(ranks.rank + 1) % ranks.size])
        ctypes.c_uint8.from_address(address + 512).value = ranks.rank + 1
        memory.barrier()
        flags = [10 * ranks.rank + peer + 1 for peer in range(ranks.size)]
        assert memory["flags"].local.tolist() == flags + [0] * (7 - ranks.size)
        assert memory["bytes"].local[512] == (ranks.rank - 1) % ranks.size + 1
        assert memory["bytes"].local[:512].sum() == 0
        assert not memory["rows"].local.any()
        assert not memory["last"].local.any()
        memory.barrier()
        names = [describe_address(peer.data_ptr() + 8) for peer in memory["flags"].peers]
        address = memory["flags"].local.data_ptr()
    assert describe_address(address) == hex(address)
    memory.free()
    with pytest.raises(KeyError):
        memory["flags"]
    return names


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_rank_reads_and_writes_every_rank(spawn_ranks, world_size):
    for rank, names in enumerate(spawn_ranks(world_size, check_regions)):
        assert names == [
            "test.flags[2]" if peer == rank else f"test.flags of rank {peer}[2]"
            for peer in range(world_size)
        ]


def test_a_group_of_one(spawn_ranks):
    spawn_ranks(3, check_regions, [[1], [0, 2]])


@pytest.mark.parametrize(
    "asked", [((2,), "int32"), (2, torch.int32), ((2.0,), torch.int32), ((-1,), torch.int32), (2,)]
)
def test_a_region_that_is_none_is_refused(asked):
    with pytest.raises(InvalidArgument, match=r"regions\['x'\] is .* expected a shape and a torch"):
        symmetric.allocate("odd", {"y": ((1,), torch.int8), "x": asked})


USUAL = ("test", (4, 4), torch.int32)
OTHERS = (("other", *USUAL[1:]), ("test", (4, 5), torch.int32), ("test", (4, 4), torch.float32))


def ask_for_something_else():
    """Rank 1 asks for another name, shape or dtype; what each error says, by rank."""
    seen = []
    for other in OTHERS:
        name, shape, dtype = other if dist.get_rank() == 1 else USUAL
        with pytest.raises(RankDisagreement) as disagreement:
            symmetric.allocate(name, {"region": (shape, dtype)})
        seen.append(disagreement.value.by_rank)
    symmetric.allocate("then", {"region": ((4, 4), torch.int32)}).free()
    return seen


@exact_memory
def test_different_regions_are_an_error_on_every_rank(spawn_ranks):
    usual, *others = (
        f"{name}: region {list(shape)} {dtype}" for name, shape, dtype in (USUAL, *OTHERS)
    )
    by_rank = [{0: usual, 1: other, 2: usual} for other in others]
    assert spawn_ranks(3, ask_for_something_else) == [by_rank] * 3


def ask_for_too_much():
    with pytest.raises(SymmetricMemoryFull) as full:
        symmetric.allocate("huge", {"region": ((2**46,), torch.uint8)})
    error = full.value
    assert f"{error.needed} bytes, {error.available} bytes are available" in str(error)
    assert "remount" in str(error)
    with symmetric.allocate("small", {"region": ((4,), torch.uint8)}) as memory:
        memory.barrier()
    return error.needed, error.available


@exact_memory
def test_a_full_shared_memory_says_how_much_is_missing(spawn_ranks):
    for needed, available in spawn_ranks(2, ask_for_too_much):
        assert needed == 2**46
        assert 0 < available < needed


def reserve_in_a_small_file_system(nbytes):
    """What ``_reserve`` says of a file that cannot grow to ``nbytes``, and the file's size then."""
    fd = os.open(host.SHARED_MEMORY, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        return host._reserve(fd, nbytes), os.fstat(fd).st_size
    finally:
        os.close(fd)


def test_a_reservation_that_failed_takes_nothing():
    state = os.statvfs(host.SHARED_MEMORY)
    available, size = reserve_in_a_small_file_system(2**46)
    assert size == 0
    assert abs(available - state.f_bavail * state.f_frsize) < 1 << 30  # others use it too
    assert reserve_in_a_small_file_system(8192) == (None, 8192)


def mappings():
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm" in line]


def leave_nothing():
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        memory = symmetric.allocate("test", REGIONS)
        held = mappings()
        assert len(held) == dist.get_world_size()
        assert all(line.endswith("(deleted)") for line in held)
        memory.barrier()
        memory.free()
        memory.free()
        del memory
        gc.collect()
        assert not mappings()
    # The first wait opens a connection to the store.
    return len(os.listdir("/proc/self/fd")) - descriptors


def test_memory_has_no_name_and_goes_when_freed(spawn_ranks):
    assert max(spawn_ranks(2, leave_nothing)) <= 1


@pytest.fixture
def flags():
    register(0x1000, 64, 4, "context.flags")
    register(0x2000, 32, 2, "context.rows")
    register(0x3000, 192, 8, "context.words", (2, 3, 4))
    yield
    forget(0x1000)
    forget(0x2000)
    forget(0x3000)


@pytest.mark.parametrize(
    ("address", "name"),
    [
        (0x1000, "context.flags[0]"),
        (0x1003, "context.flags[0]"),
        (0x1004, "context.flags[1]"),
        (0x103F, "context.flags[15]"),
        (0x1040, "0x1040"),
        (0x0FFF, "0xfff"),
        (0x2002, "context.rows[1]"),
        (0x2020, "0x2020"),
        (0x3000, "context.words[0, 0, 0]"),
        (0x3000 + 8 * (12 + 2 * 4 + 3), "context.words[1, 2, 3]"),
    ],
)
def test_an_address_is_named_by_region_and_index(flags, address, name):
    assert describe_address(address) == name


def test_a_forgotten_address_is_a_number(flags):
    forget(0x1000)
    assert describe_address(0x1004) == "0x1004"
    assert describe_address(0x2000) == "context.rows[0]"
    forget(0x1000)


def test_memory_that_was_dropped_leaves_no_name_to_what_takes_its_place(flags):
    register(0x1010, 16, 4, "context.later")
    assert describe_address(0x1010) == "context.later[0]"
    assert describe_address(0x1004) == "0x1004"
    forget(0x1010)
