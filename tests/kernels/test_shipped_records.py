"""Each result that comes with the package is a hit for its op, on the hardware that it names.

That hardware is not here: a device stands for it that has its facts and launches nothing. Calls are
made with tensors without memory, and tuning is forbidden.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.example_keys import sample_inputs
from triton_dist._archive import PACKAGE_RECORDS, PackContents, write
from triton_dist._tuning import compose
from triton_dist._tuning.store.layout import readable_json
from triton_dist._tuning.values import (
    Key,
    Measurement,
    Sizes,
    Trial,
    TuningRecord,
    codec,
    fine_bucket,
    pack,
    unpack,
)
from triton_dist.errors import TuningFrozen
from triton_dist.kernels.common.context import ProductKey
from triton_dist.kernels.common.gemm import spaces as gemm_spaces
from triton_dist.kernels.common.moe.summing import SumKey
from triton_dist.kernels.nvidia import ag_gemm
from triton_dist.kernels.nvidia.allgather_group_gemm.context import RoutedKey
from triton_dist.kernels.nvidia.decode_attention.algorithms import DecodeKey
from triton_dist.kernels.nvidia.ep_group_gemm.algorithms import EPGroupGEMMKey
from triton_dist.kernels.nvidia.expert_parallel.algorithms import Key as EPKey
from triton_dist.kernels.nvidia.grouped_gemm.algorithms import GroupedKey
from triton_dist.kernels.nvidia.sp_ag_attention.algorithms import AttentionKey
from triton_dist.kernels.nvidia.ulysses.algorithms import UlyssesKey
from triton_dist.kernels.nvidia.ulysses_gemm.algorithms import UlyssesGEMMKey
from triton_dist.runtime.device import current_device
from triton_dist.runtime.device.cpu import CpuDevice
from triton_dist.runtime.peaks import device_peak
from triton_dist.runtime.ranks.solo import SoloRank
from triton_dist.testing.opinfo import OPINFOS

SHIPPED = sorted(PACKAGE_RECORDS.glob("*.json"))
KEYS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        AttentionKey,
        DecodeKey,
        EPKey,
        EPGroupGEMMKey,
        GroupedKey,
        UlyssesKey,
        UlyssesGEMMKey,
        ProductKey,
        RoutedKey,
        SumKey,
    )
}
FOUR = {"world_size": "4", "local_world_size": "4"}


class FakeGpu(CpuDevice):
    """A GPU of Hopper's size: what a config space and ``prune_fn`` ask for."""

    name = "cuda"
    interprets = False
    has_nccl = has_async_tp = True
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


class On:
    """Puts this process on other hardware."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.touched: list[Any] = []

    def __call__(self, tuned: Any, gpu: str, topology: Mapping[str, str]) -> None:
        """Of one GPU the space is evaluated anew."""
        device, ranks = FakeGpu(gpu), FakeRanks(topology)
        self.monkeypatch.setattr("triton_dist.runtime.device._cpu", lambda: device)
        self.monkeypatch.setattr(compose, "group_for", lambda *_: ranks)
        self.monkeypatch.setattr(gemm_spaces, "compiles_for_hopper", lambda: True)
        self.touched.append(tuned)
        self.forget()

    def forget(self) -> None:
        device_peak.cache_clear()
        for tuned in self.touched:
            tuned.clear()
            space = tuned.config_space
            for name in list(vars(space)):
                if isinstance(getattr(type(space), name, None), functools.cached_property):
                    del vars(space)[name]


M_IN_RANGES = Sizes("a shipped op", {"M": fine_bucket})


@pytest.fixture
def on(monkeypatch) -> Iterator[On]:
    monkeypatch.setenv("TRITON_DIST_DEVICE", "cpu")
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_FROZEN", "1")
    # Sources stay what they are, and to digest them for each of hundreds of keys takes a while.
    sources_of, known = compose.sources_of, dict[Any, Any]()

    def sources_once(roots: Any, validators: Any, *rest: Any) -> Any:
        key = tuple(roots), tuple(validators), tuple(rest[-1])
        if key not in known:
            known[key] = sources_of(roots, validators, *rest)
        return known[key]

    monkeypatch.setattr(compose, "sources_of", sources_once)
    made = On(monkeypatch)
    yield made
    made.forget()


def read(tree: Any) -> Any:
    """The value of a key of our ops, from its text."""
    match tree:
        case {"tuple": items}:
            return tuple(read(item) for item in items)
        case {"namedtuple": name, "items": items}:
            kind = KEYS[name.rpartition(":")[2]]
            return kind(*(read(item) for item in items))
        case {"dtype": name}:
            return getattr(torch, name.removeprefix("torch."))
        case None | bool() | int() | str():
            return tree
    raise AssertionError(f"{tree} in a key")


def every_record_is_a_hit(tree: Any, on: On, step: int = 1) -> int:
    """Return the number of records; raise if one of every ``step`` is not a hit."""
    records, last = list(unpack(tree))[::step], None
    for record in records:
        info = OPINFOS[record.key.function]
        tuned = getattr(importlib.import_module(record.key.module), record.key.function)
        assert tuned is info.op
        hardware = record.fingerprint.hardware["gpu"], record.fingerprint.topology
        if hardware != last:  # the space takes a while to evaluate
            on(tuned, *hardware)
            last = hardware
        value = read(json.loads(record.key.text))
        args, kwargs = info.inputs_for(measured_at(record, value))
        asked = tuned.key_fn(*args, **kwargs)  # as many rows as the ranks can share
        assert asked == value or M_IN_RANGES.rounded_key(asked) == value
        found = tuned.tune(*args, **kwargs)
        assert found.digest == record.digest, "another file has that key too"
        assert tuned.best_config(*args, **kwargs).digest == record.best.digest
    return len(records)


def measured_at(record: TuningRecord, value: Any) -> Any:
    """The key of ``value`` at the size inside its range that ``record`` was measured at. At others
    of the range another config may be the faster one, as its own times say."""
    if not record.measured_sizes:
        return value
    (size,) = record.measured_sizes
    return M_IN_RANGES._replaced(value, lambda *_: size)


def test_shipped_records_are_hits(on):
    """Check one of 48 records of each file: most differ only in sizes. The tests below, on files
    that are made there, show that this test can fail."""
    for path in SHIPPED:
        assert every_record_is_a_hit(json.loads(path.read_text()), on, step=48) > 0, path


def made(
    on: On,
    folder: Path,
    change: Callable[[Any], None] = lambda tree: None,
    op: Any = ag_gemm,
    step: int = 1,
) -> Any:
    """Write a pack as a tuning on four H200 would, with a record for one of every ``step`` sample
    inputs, and return its tree of records."""
    on(op, "NVIDIA H200", FOUR)
    identity = op.identity()
    hardware = "cuda, NVIDIA H200, local_world_size 4, world_size 4"
    records = []
    for args, kwargs in islice(sample_inputs(op.fn.__name__), 0, None, step):
        key = Key.of(identity, op.key_fn(*args, **kwargs), hardware)
        kept, _ = op.config_space.prune(op.prune_fn, args, kwargs)
        trial = Trial.of(kept[len(records) % len(kept)], Measurement((1.25,), 3))
        records.append(
            TuningRecord(key, op.fingerprint(), (trial,), "2030-01-02T03:04:05+00:00", 60.0)
        )
    tree = json.loads(readable_json(pack(records)))
    del tree["checksum"]
    change(tree)
    files = {f"{op.fn.__name__}.NVIDIA_H200.json": readable_json(tree, 200).encode()}
    write(folder / "packs" / "op.tdpack", PackContents(files, {}))
    return tree


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_READONLY_DIRS", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", OPINFOS)
def test_every_record_of_a_file_made_here_is_a_hit(on, folder, name):
    tree = made(on, folder, op=OPINFOS[name].op, step=8)
    assert every_record_is_a_hit(tree, on) == 3


def drop_a_config(tree: Any) -> None:
    """As if the op had no longer the config of some records."""
    results = tree["groups"][0]["results"]
    # The package has no record of this layout, so none is found in place of the one that is lost.
    name = next(each["config"] for each in results if "strided" in str(each["key"]))
    config = tree["configs"].pop(name) | {"num_chunks": 77}
    tree["configs"][codec.digest(config)[:8]] = config
    for result in results:
        if result["config"] == name:
            result["config"] = codec.digest(config)[:8]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tree: tree.update(version="0"), "version: the version of the function was 0, is "),
        (drop_a_config, "config space: the winner .* is not in it"),
        (lambda tree: tree["groups"][0].update(hardware_group="cuda, other"), "no record"),
    ],
)
def test_a_file_that_does_not_fit_is_found_out(on, folder, change, said):
    tree = made(on, folder, change)
    with pytest.raises(TuningFrozen, match=said):
        every_record_is_a_hit(tree, on)


def test_a_winner_that_is_pruned_for_the_call_is_found_out(on, folder, monkeypatch):
    tree = made(on, folder)
    monkeypatch.setattr(FakeGpu, "shared_memory_bytes", lambda self: 100_000)
    with pytest.raises(TuningFrozen, match="prune_fn drops the winner"):
        every_record_is_a_hit(tree, on)


def test_on_other_hardware_they_are_no_hits(on, folder):
    made(on, folder)
    key = (ProductKey(16, 7168, 8192, torch.bfloat16, "column-major", True, 4), True)
    args, kwargs = OPINFOS["ag_gemm"].inputs_for(key)
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
    assert ag_gemm.tune(*args, **kwargs).is_shipped


def test_every_file_of_the_package_has_a_name_under_which_it_is_found():
    for path in SHIPPED:
        function = json.loads(path.read_text())["function"].rpartition(".")[2]
        assert path.name.startswith(f"{function}.")
