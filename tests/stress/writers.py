"""A program: writers of tuning records that are killed again and again, and readers that watch.

``python -m tests.stress.writers FOLDER KILLS SEED``

Each of 8 writers puts records of a key of its own and of one that all share, and after each ``put``
that returned it notes the number in a log of its own, which is on the disk before it goes on. The
program kills them one by one with SIGKILL at random moments and starts them again. It ends with one
line of JSON: what was counted.

It imports neither torch nor triton, so that a writer is forked in a millisecond.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

from triton_dist._tuning.store import FileStore
from triton_dist._tuning.values import (
    Config,
    Fingerprint,
    Key,
    Measurement,
    Trial,
    TuningRecord,
)

WRITERS = 8
READERS = 2
SHARED = Key.of("stress", "shared", "fake")
GENERATION = 1_000_000
"""Numbers of one life of a writer: the next one's are higher, whatever the last one came to."""


def own_key(writer: int) -> Key:
    return Key.of("stress", writer, "fake")


def record(key: Key, number: int) -> TuningRecord:
    """About 20 KB, so that a torn file would be seen. ``seconds`` carries the number."""
    trials = tuple(
        Trial.of(Config({"n": n}), Measurement((float(n + 1),) * 10, 3)) for n in range(60)
    )
    group = {"name": "value"}
    fingerprint = Fingerprint(group, group, group, group, group, "space")
    return TuningRecord(key, fingerprint, trials, "2030-01-01T00:00:00+00:00", float(number))


def number_of(store: FileStore, key: Key) -> int:
    """Number of the record of ``key``; -1: there is none."""
    return next((int(found.record.seconds) for found in store.find(key)), -1)


def write(folder: Path, writer: int, generation: int) -> None:
    """Until it is killed."""
    store, chance = FileStore(folder), random.Random(generation)
    log = os.open(folder / f"{writer}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    number = generation * GENERATION
    while True:
        number += 1
        if chance.random() < 0.2:
            store.put(record(SHARED, number))
        elif store.put(record(own_key(writer), number)):
            os.write(log, f"{number}\n".encode())
            os.fsync(log)


def read(folder: Path, reader: int) -> None:
    """Until it is told to end: every record that was ever there is there, whole, and not older."""
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
    store = FileStore(folder)
    seen = dict.fromkeys([SHARED, *map(own_key, range(WRITERS))], -1)
    reads, wrong = 0, []
    while not ended:
        for key, last in seen.items():
            try:
                number = number_of(store, key)
            except Warning as warning:
                number = -1
                wrong.append(str(warning))
            if (number < last and key != SHARED) or number < 0 <= last:
                wrong.append(f"{key}: {number} after {last}")
            seen[key] = max(number, last)
            reads += 1
    (folder / f"reader-{reader}.json").write_text(json.dumps({"reads": reads, "wrong": wrong}))


def fork(body: Callable[..., None], *arguments: object) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            body(*arguments)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


def stress(folder: Path, kills: int, seed: int) -> dict[str, object]:
    chance, generations = random.Random(seed), iter(range(1, kills + WRITERS + 1))
    writers = {writer: fork(write, folder, writer, next(generations)) for writer in range(WRITERS)}
    readers = [fork(read, folder, reader) for reader in range(READERS)]
    died_alone = 0
    try:
        for kill in range(kills + WRITERS):
            time.sleep(chance.uniform(0.005, 0.03))
            writer = chance.choice(sorted(writers))
            pid = writers.pop(writer)
            os.kill(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
            died_alone += not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL)
            if kill < kills:
                writers[writer] = fork(write, folder, writer, next(generations))
    finally:
        for pid in [*writers.values(), *readers]:
            os.kill(pid, signal.SIGKILL if pid in writers.values() else signal.SIGTERM)
            os.waitpid(pid, 0)
    return {"kills": kills + WRITERS, "died_alone": died_alone, **verify(folder)}


def verify(folder: Path) -> dict[str, object]:
    store, committed, lost = FileStore(folder), 0, []
    for writer in range(WRITERS):
        log = folder / f"{writer}.log"
        numbers = [int(line) for line in log.read_text().split()] if log.exists() else []
        committed += len(numbers)
        kept = number_of(store, own_key(writer))
        if numbers and kept < max(numbers):
            lost.append(f"writer {writer}: {max(numbers)} was committed, {kept} is there")
    reports = [json.loads(path.read_text()) for path in folder.glob("reader-*.json")]
    return {
        "committed": committed,
        "lost": lost,
        "shared": number_of(store, SHARED),
        "readers": len(reports),
        "reads": sum(report["reads"] for report in reports),
        "unreadable": [wrong for report in reports for wrong in report["wrong"]],
        "set_aside": len(list(folder.rglob("*.damaged"))),
    }


if __name__ == "__main__":
    warnings.simplefilter("error")
    print(json.dumps(stress(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
