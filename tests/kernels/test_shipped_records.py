"""Each result that comes with the package is a hit for its op, on the hardware that it names.

That hardware is not here: a device stands for it that has its facts and launches nothing. Calls are
made with tensors without memory, and tuning is forbidden.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from triton_dist._tuning import compose
from triton_dist._tuning.source import source_of
from triton_dist._tuning.store.layout import readable_json
from triton_dist._tuning.store.packs import PACKAGE_RECORDS
from triton_dist._tuning.values import (
    Key,
    Measurement,
    Trial,
    TuningRecord,
    codec,
    pack,
    unpack,
)
from triton_dist.errors import TuningFrozen
from triton_dist.kernels.common.gemm import launch as gemm_launch
from triton_dist.kernels.nvidia import (
    ag_gemm,
    all_gather,
    all_reduce,
    gemm_ar,
    gemm_rs,
    reduce_scatter,
)
from triton_dist.runtime.device import current_device, detect
from triton_dist.runtime.device.cpu import CpuDevice
from triton_dist.runtime.peaks import device_peak
from triton_dist.runtime.ranks.solo import SoloRank

SHIPPED = sorted(PACKAGE_RECORDS.glob("*.json"))
FOUR = {"world_size": "4", "local_world_size": "4"}


class FakeGpu(CpuDevice):
    """A GPU of Hopper's size: what a config space and ``prune_fn`` ask for."""

    name = "cuda"
    interprets = False
    has_libraries = True
    num_sms = 132
    torch_device = torch.device("meta")

    def __init__(self, gpu: str) -> None:
        self.gpu = gpu

    def facts(self) -> Mapping[str, str]:
        return {"gpu": self.gpu, "capability": "9.0", "driver": "999.9", "sms": "132"}


class FakeRanks(SoloRank):
    """The first of several, which say what it says."""

    def __init__(self, topology: Mapping[str, str]) -> None:
        self.topology = dict(topology)

    def facts(self) -> Mapping[str, str]:
        return self.topology


def ag_gemm_call(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with the largest M of the bucket."""
    rows, columns, K, dtype, layout, num_ranks, local_copy = value

    def meta(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    B = {
        "row-major": lambda: meta(K, columns),
        "column-major": lambda: meta(columns, K).T,
        "strided": lambda: meta(K, 2 * columns)[:, ::2],
    }[layout]()
    ctx = SimpleNamespace(
        K=K,
        N=columns * num_ranks,
        max_M=rows * num_ranks,
        dtype=dtype,
        num_ranks=num_ranks,
        accepted={},
        buffer=SimpleNamespace(num_ranks=num_ranks),
        symm_workspace=meta(1, K),
    )
    return (meta(rows, K), B, ctx), {} if local_copy else {"local_copy": False}


def gemm_rs_call(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with the largest M of the bucket."""
    rows, *others, adds = value
    return _summed_call((rows * value[6], *others), reduce_st=adds), {}


def gemm_ar_call(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same."""
    *looks, copy_to_local = value
    return _summed_call(looks), {"copy_to_local": copy_to_local}


def _summed_call(looks: Sequence[Any], **attributes: Any) -> tuple[Any, ...]:
    """A, B and a context of an op that sums products over ranks."""
    M, N, K, dtype, layout, contiguous, num_ranks = looks

    def meta(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    A = meta(M, K) if contiguous else meta(M, 2 * K)[:, ::2]
    B = {
        "row-major": lambda: meta(K, N),
        "column-major": lambda: meta(N, K).T,
        "strided": lambda: meta(K, 2 * N)[:, ::2],
    }[layout]()
    slots = SimpleNamespace(epoch=meta(1))
    ctx = SimpleNamespace(
        N=N,
        max_M=M,
        output_dtype=dtype,
        num_ranks=num_ranks,
        accepted={},
        buffer=SimpleNamespace(slots=slots, num_ranks=num_ranks),
        **attributes,
    )
    return A, B, ctx


def all_reduce_call(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with the largest size of the bucket, which always fits vectors."""
    elements, dtype, _, num_ranks, method, in_place = value
    x = torch.empty(elements, dtype=dtype, device="meta")
    output = {"output": x} if in_place else {}
    return (x, _collective_context(num_ranks)), {"method": method, **output}


def all_gather_call(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same."""
    elements, dtype, _, num_ranks = value
    return (torch.empty(elements, dtype=dtype, device="meta"), _collective_context(num_ranks)), {}


def reduce_scatter_call(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same."""
    elements, *others = value
    (_, ctx), _ = all_gather_call(value)
    return (torch.empty(elements * ctx.num_ranks, dtype=others[0], device="meta"), ctx), {}


def _collective_context(num_ranks: int) -> Any:
    device = SimpleNamespace(torch_device=torch.device("meta"))
    buffer = SimpleNamespace(device=device)
    return SimpleNamespace(num_ranks=num_ranks, buffer=buffer, workspace_nbytes=1 << 40)


# By the full name of an op: a call that has a key.
CALLS: dict[str, Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "triton_dist.kernels.nvidia.allgather.all_gather": all_gather_call,
    "triton_dist.kernels.nvidia.allgather_gemm.ag_gemm": ag_gemm_call,
    "triton_dist.kernels.nvidia.allreduce.all_reduce": all_reduce_call,
    "triton_dist.kernels.nvidia.gemm_allreduce.gemm_ar": gemm_ar_call,
    "triton_dist.kernels.nvidia.gemm_reduce_scatter.gemm_rs": gemm_rs_call,
    "triton_dist.kernels.nvidia.reduce_scatter.reduce_scatter": reduce_scatter_call,
}


class On:
    """Puts this process on other hardware."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.touched: list[Any] = []

    def __call__(self, tuned: Any, gpu: str, topology: Mapping[str, str]) -> None:
        """Of one GPU the space is evaluated anew."""
        device, ranks = FakeGpu(gpu), FakeRanks(topology)
        self.monkeypatch.setattr(detect, "_cpu", lambda: device)
        self.monkeypatch.setattr(compose, "group_for", lambda *_: ranks)
        self.monkeypatch.setattr(gemm_launch, "compiles_for_hopper", lambda: True)
        self.touched.append(tuned)
        self.forget()

    def forget(self) -> None:
        device_peak.cache_clear()
        for tuned in self.touched:
            tuned.clear()
            for cached in ("_configs", "_by_digest", "names", "digest", "functions"):
                vars(tuned.config_space).pop(cached, None)


@pytest.fixture
def on(monkeypatch) -> Iterator[On]:
    monkeypatch.setenv("TRITON_DIST_DEVICE", "cpu")
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_FROZEN", "1")
    # Sources stay what they are, and to digest them for each of hundreds of keys takes a while.
    digests = functools.cache(lambda roots: source_of(roots))
    monkeypatch.setattr(compose, "source_of", lambda roots, *_: digests(tuple(roots)))
    made = On(monkeypatch)
    yield made
    made.forget()


def read(tree: Any) -> Any:
    """The value of a key of our ops, from its text."""
    match tree:
        case {"tuple": items}:
            return tuple(read(item) for item in items)
        case {"dtype": name}:
            return getattr(torch, name.removeprefix("torch."))
        case None | bool() | int() | str():
            return tree
    raise AssertionError(f"{tree} in a key")


def every_record_is_a_hit(path: Path, on: On) -> int:
    """How many there are; raises for one that is no hit."""
    records, last = list(unpack(json.loads(path.read_text()))), None
    for record in records:
        tuned = getattr(importlib.import_module(record.key.module), record.key.function)
        hardware = record.fingerprint.hardware["gpu"], record.fingerprint.topology
        if hardware != last:  # the space takes a while to evaluate
            on(tuned, *hardware)
            last = hardware
        value = read(json.loads(record.key.text))
        args, kwargs = CALLS[record.key.full_name](value)
        assert tuned.key_fn(*args, **kwargs) == value
        found = tuned.tune(*args, **kwargs)
        assert found.digest == record.digest, "another file has that key too"
        assert tuned.best_config(*args, **kwargs).digest == record.best.digest
    return len(records)


def test_every_shipped_record_is_a_hit(on):
    """The tests below, on files that are made there, show that this one can fail."""
    for path in SHIPPED:
        assert every_record_is_a_hit(path, on) > 0, path


def keys_of(op: Any) -> Iterator[tuple[Any, ...]]:
    """Keys of all kinds."""
    if op in (all_reduce, all_gather, reduce_scatter):
        more = ((None, False), (None, True)) if op is all_reduce else ((),)
        for elements in (1 << exponent for exponent in range(10, 22)):
            for dtype in (torch.bfloat16, torch.float32)[: 3 - len(more)]:
                yield from ((elements, dtype, True, 4, *rest) for rest in more)
        return
    for rows in (1, 4, 1024, 4096):
        for layout in ("row-major", "column-major", "strided"):
            for flag in (True, False):
                if op is ag_gemm:
                    yield (rows, 7168, 8192, torch.bfloat16, layout, 4, flag)
                else:
                    yield (rows, 8192, 7168, torch.bfloat16, layout, flag, 4, op is gemm_ar)


def made(
    on: On,
    folder: Path,
    change: Callable[[Any], None] = lambda tree: None,
    op: Any = ag_gemm,
) -> Path:
    """A file as a tuning on four H200 would leave it."""
    on(op, "NVIDIA H200", FOUR)
    origin = op.origin()
    hardware = "cuda, NVIDIA H200, local_world_size 4, world_size 4"
    records = []
    for value in keys_of(op):
        key = Key.of(origin, value, hardware)
        args, kwargs = CALLS[key.full_name](value)
        kept, _ = op.config_space.prune(op.prune_fn, args, kwargs)
        trial = Trial.of(kept[len(records) % len(kept)], Measurement((1.25,), 3))
        records.append(
            TuningRecord(key, op.fingerprint(), (trial,), "2030-01-02T03:04:05+00:00", 60.0)
        )
    tree = json.loads(readable_json(pack(records)))
    change(tree)
    path = folder / "packs" / f"{op.fn.__name__}.NVIDIA_H200.json"
    path.parent.mkdir()
    path.write_text(readable_json(tree, 200))
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_READONLY_DIRS", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    "op",
    [ag_gemm, all_gather, all_reduce, gemm_ar, gemm_rs, reduce_scatter],
    ids=lambda op: op.fn.__name__,
)
def test_every_record_of_a_file_made_here_is_a_hit(on, folder, op):
    assert every_record_is_a_hit(made(on, folder, op=op), on) == 24


def drop_a_config(tree: Any) -> None:
    """As if the op had no longer the config of some records."""
    name, config = next(iter(tree["configs"].items()))
    config["num_chunks"] = 77
    del tree["configs"][name]
    tree["configs"][codec.digest(config)[:8]] = config
    for result in tree["groups"][0]["results"]:
        if result["config"] == name:
            result["config"] = codec.digest(config)[:8]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tree: tree.update(version="0"), "version: that of the function was 0, is "),
        (drop_a_config, "config space: the winner .* is not in it"),
        (lambda tree: tree["groups"][0].update(hardware_group="cuda, other"), "no record"),
    ],
)
def test_a_file_that_does_not_fit_is_found_out(on, folder, change, said):
    path = made(on, folder, change)
    with pytest.raises(TuningFrozen, match=said):
        every_record_is_a_hit(path, on)


def test_a_winner_that_is_pruned_for_the_call_is_found_out(on, folder, monkeypatch):
    path = made(on, folder)
    monkeypatch.setattr(FakeGpu, "shared_memory_bytes", lambda self: 100_000)
    with pytest.raises(TuningFrozen, match="prune_fn drops the winner"):
        every_record_is_a_hit(path, on)


def test_on_other_hardware_they_are_no_hits(on, folder):
    made(on, folder)
    args, kwargs = ag_gemm_call((4, 7168, 8192, torch.bfloat16, "column-major", 4, True))
    for gpu, topology in (
        ("NVIDIA H100 80GB HBM3", FOUR),
        ("NVIDIA H200", {**FOUR, "world_size": "8"}),
        ("NVIDIA H200", {**FOUR, "local_world_size": "8"}),
    ):
        on(ag_gemm, gpu, topology)
        assert current_device().facts()["gpu"] == gpu
        with pytest.raises(TuningFrozen, match="no record"):
            ag_gemm.tune(*args, **kwargs)
    on(ag_gemm, "NVIDIA H200", FOUR)
    assert ag_gemm.tune(*args, **kwargs).shipped


def test_every_file_of_the_package_has_a_name_under_which_it_is_found():
    for path in SHIPPED:
        function = json.loads(path.read_text())["function"].rpartition(".")[2]
        assert path.name.startswith(f"{function}.")
