"""Groups of unusual kinds, and what becomes of them; each function runs in a rank or a process of
its own."""

from __future__ import annotations

import os
import socket
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from triton_dist.errors import InvalidArgument
from triton_dist.runtime import symmetric
from triton_dist.runtime.ranks import SoloRank, group_for


def meshes_and_other_values() -> list[Any]:
    """A mesh of one dimension is its group; what is no group is refused."""
    mesh = init_device_mesh("cpu", (2,))
    square = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    seen: list[Any] = [group_for(mesh).all_gather("mesh", dist.get_rank())]
    seen.append(group_for(square["b"]).size)
    seen.append(group_for(mesh) is group_for(mesh.get_group()))
    with symmetric.allocate("test", {"x": ((1,), torch.int32)}, mesh) as memory:
        seen.append(len(memory["x"].peers))
    for wrong in (square, [0, 1], "0", 3):
        try:
            group_for(wrong)  # type: ignore[arg-type]
        except InvalidArgument as error:
            seen.append(str(error))
    return seen


def a_world_after_another() -> list[bool]:
    """The second has ranks of its own, which meet from the beginning. Threads and connections of
    the first one end with it: nobody keeps its process group."""
    first, process_group = group_for(), weakref.ref(dist.group.WORLD)
    first.barrier("first")
    first.channel("op").first_all_gather("word", 1)
    current = [first.is_current()]
    enter_world_of_own_store()
    assert process_group() is None
    second = group_for()
    assert second.channel("op").first_all_gather("word", dist.get_rank()) == [0, 1]
    seen = [*current, first.is_current(), second.is_current(), first is second]
    dist.barrier()  # rank 0 serves the store
    return seen


def enter_world_of_own_store() -> None:
    """Instead of the present one; rank 0 serves the store, and no launcher."""
    rank, size, port = dist.get_rank(), dist.get_world_size(), [0]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = [free.getsockname()[1]]
        dist.broadcast_object_list(port)
    dist.destroy_process_group()
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")
    address = f"tcp://127.0.0.1:{port[0]}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)


def the_store_ends_with_rank_0() -> None:
    enter_world_of_own_store()
    ranks = group_for()
    ranks.barrier("both are here")
    if ranks.rank == 0:
        os._exit(0)
    time.sleep(0.5)
    ranks.barrier("rank 0 is gone")


class PythonStore(dist.Store):
    """A store as a user may write one: no ``clone``."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self.entries[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key: str) -> bytes:
        return self.entries[key]

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        if key not in self.entries:
            self.set(key, desired)
        return self.entries[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.entries for key in keys)

    def wait(self, *_: Any) -> None:
        pass

    def add(self, key: str, amount: int) -> int:
        self.entries[key] = str(int(self.entries.get(key, b"0")) + amount).encode()
        return int(self.entries[key])

    def set_timeout(self, timeout: Any) -> None:
        pass


def fake_backend() -> bool:
    dist.init_process_group("fake", rank=0, world_size=4)
    try:
        return isinstance(group_for(), SoloRank)
    finally:
        dist.destroy_process_group()


def store_in_python() -> list[int]:
    store = PythonStore()  # torch does not keep it
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        ranks = group_for()
        for _ in range(3):
            ranks.channel("op").first_all_gather("word", 1)
        ranks.channel("op").abort("in vain")
        return ranks.channel("op").first_all_gather("word", 7)
    finally:
        dist.destroy_process_group()
