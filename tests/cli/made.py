"""Records of tunings that never were, with known times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from triton_dist import knobs
from triton_dist._tuning.store import FileStore
from triton_dist._tuning.values import (
    Config,
    Failure,
    Fingerprint,
    Key,
    Measurement,
    Origin,
    Outcome,
    Trial,
    TuningRecord,
)


def timed(*samples: float) -> Measurement:
    return Measurement(samples, 0)


SPACE = [
    ({"block": 64, "warps": 4}, timed(1.0, 1.0, 1.02)),
    ({"block": 128, "warps": 4}, timed(2.0, 2.0, 2.0)),
    ({"block": 64, "warps": 8}, timed(1.1, 1.1, 1.1)),
    ({"block": 128, "warps": 8}, timed(2.2, 2.2, 2.2)),
    ({"block": 256, "warps": 4}, Failure("resources", "too much shared memory", 1)),
    ({"block": 256, "warps": 8}, Failure("resources", "too much shared memory", 0)),
]


def record(
    space: Sequence[tuple[Mapping[str, object], Outcome]] = SPACE,
    *,
    key: object = 4096,
    ranks: int = 2,
    **fingerprint: object,
) -> TuningRecord:
    hardware = f"cuda, NVIDIA H200, world_size {ranks}"
    about = {
        "hardware": {"gpu": "NVIDIA H200"}, "software": {"triton": "3.6.0"},
        "topology": {"world_size": str(ranks)}, "policy": {}, "source": {"gemm": "1"}, "space": "1",
    }  # fmt: skip
    return TuningRecord(
        Key.of(Origin("gemm", "shop.ops", "(x)"), key, hardware),
        Fingerprint(**(about | fingerprint)),
        tuple(Trial.of(Config(values), outcome) for values, outcome in space),
        "2030-01-02T03:04:05+00:00",
        1.5,
    )


def kept(*records: TuningRecord) -> list[str]:
    """The files of ``records``, in the user's cache."""
    store = FileStore(knobs.cache_dir.get())
    return [store.put(each) for each in records]
