"""What goes wrong, one function a scenario, and how it must end.

Each function runs on every rank. What happens to the victim (``is_victim``) happens in the first
start only; a second start, where the table asks for one, goes on undisturbed.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.distributed.chaos_rank import (
    Me,
    at,
    chosen,
    die,
    fail,
    hang,
    is_armed,
    is_victim,
    tuner,
)
from tests.distributed.chaos_start import GRACE, TIMEOUT
from triton_dist._tuning.store import file, journal
from triton_dist._tuning.store.layout import with_checksum
from triton_dist.errors import RankDisagreement


@dataclass(frozen=True)
class Scenario:
    """One row of the table. ``None`` for the victim: it ends like the others."""

    run: Callable[[Me], Any]
    others: int | str
    """The n that is chosen, or the error."""
    victim: int | str | None = None
    """The same; ``"killed"``, or ``"ended"`` by its watchdog."""
    says: tuple[str, ...] = ()
    """In each error of the others; ``{victim}`` is its rank."""
    leads: bool = False
    """Whether the victim is the leader, and not the last rank."""
    then: int | None = None
    """What is chosen by a second start."""
    repeats: int | None = None
    """How many of the three requests of an undisturbed tuning may be done twice."""
    quick: bool = False

    @property
    def name(self) -> str:
        function = self.run.__name__.strip("_")
        side = "leader" if self.leads else "follower"
        return function if self.victim is None else f"{function}-{side}"


TABLE: list[Scenario] = []


def scenario(
    others: int | str, victim: int | str | None = None, **expected: Any
) -> Callable[[Any], Any]:
    """Adds a row."""

    def add(run: Callable[[Me], Any]) -> Callable[[Me], Any]:
        TABLE.append(Scenario(run, others, victim, **expected))
        return run

    return add


def either(others: int | str, victim: int | str, **expected: Any) -> Callable[[Any], Any]:
    """Adds two rows: it happens to the leader, and to a follower."""

    def add(run: Callable[[Me], Any]) -> Callable[[Me], Any]:
        for leads in (True, False):
            TABLE.append(Scenario(run, others, victim, leads=leads, **expected))
        return run

    return add


# Caches that differ, and files that are not what they were.


@scenario(1, quick=True)
def warm_cache_on_one_rank_only(me: Me) -> int:
    op = tuner()
    op(7)
    op.clear()
    dist.barrier()  # the leader writes the record while the others go on
    if not is_victim():
        os.environ["TRITON_DIST_CACHE_DIR"] = str(me.folder / f"empty-{me.rank}")
    result: int = op(7)
    assert op.num_tunings == 1
    return result


def spoil_record(me: Me, change: Callable[[Path], object]) -> int:
    """Tune, change the file, tune again."""
    op = tuner()
    op(7)
    op.clear()
    dist.barrier()
    if me.rank == 0:
        (path,) = Path(os.environ["TRITON_DIST_CACHE_DIR"]).rglob("*.json")
        change(path)
    dist.barrier()
    result: int = op(7)
    assert op.num_tunings == 2
    return result


@scenario(1, quick=True)
def truncated_cache_file(me: Me) -> int:
    return spoil_record(me, lambda path: path.write_bytes(path.read_bytes()[:100]))


@scenario(1)
def version_change(me: Me) -> int:
    def change(path: Path) -> None:
        tree = json.loads(path.read_text())
        tree["fingerprint"]["software"]["triton"] = "3.0.0"
        tree["best"]["digest"] = tree["trials"][0]["digest"]
        path.write_text(with_checksum(tree))

    return spoil_record(me, change)


@scenario(1)
def two_jobs_on_one_cache(me: Me) -> int:
    """Halves of the world, of equal size: the same key and the same file."""
    half = me.size // 2
    jobs = [dist.new_group(list(range(half))), dist.new_group(list(range(half, me.size)))]
    result: int = tuner()(7, autotune_pg=jobs[me.rank // half])
    return result


def refuse(number: int) -> Callable[..., Any]:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return refused


@scenario(1)
def disk_full(me: Me) -> int:
    journal._write = file.make_folder = refuse(errno.ENOSPC)
    return chosen()


@scenario(1)
def disk_full_during_the_tuning(me: Me) -> int:
    def run(n: int) -> None:
        if n == 2 and is_armed():
            journal._write = file.make_folder = refuse(errno.ENOSPC)

    return chosen(run)


@scenario(1)
def read_only_cache(me: Me) -> int:
    Path.mkdir = refuse(errno.EROFS)  # type: ignore[method-assign]
    return chosen()


# Ranks that come with different things, or not at all.


@scenario("RankDisagreement", says=("key of", "rank {victim}: 8"))
def threads_come_in_another_order(me: Me) -> int:
    """Two threads tune two keys; every rank begins with another one."""
    op = tuner()
    first, second = (8, 7) if is_victim() else (7, 8)
    with ThreadPoolExecutor(2) as threads:
        one = threads.submit(op, first)
        time.sleep(TIMEOUT / 4)
        two = threads.submit(op, second)
    assert isinstance(two.exception(), RankDisagreement), two.exception()
    result: int = one.result()
    return result


@either("TuningTimeout", 0, says=("first call of a key", r"rank\(s\) {victim} did not"))
def rank_does_not_come(me: Me) -> int:
    if is_victim():
        time.sleep(TIMEOUT + 1)
        return 0
    return chosen()


@scenario(1)
def rank_comes_late(me: Me) -> int:
    if is_victim():
        time.sleep(TIMEOUT / 2)
    return chosen()


@scenario(1)
def rank_is_slow(me: Me) -> int:
    return chosen(lambda n: time.sleep(TIMEOUT / 10 if is_victim() else 0))


@scenario(1)
def group_smaller_than_the_world(me: Me) -> int:
    group = dist.new_group(list(range(me.size - 1)))
    result: int = 1 if is_victim() else tuner()(7, autotune_pg=group)
    return result


@scenario("RankDisagreement", "KeyError", says=("rank {victim}: KeyError: 9",), quick=True)
def key_fn_raises_where_the_other_has_a_hit(me: Me) -> int:
    """The victim learns it at once, and nobody else; then all come to another key, and the victim
    fails there."""
    op = tuner(key_fn=lambda x: {7: 7}[x] if is_victim() else min(x, 8))
    assert op(7) == 1
    begin = time.monotonic()
    if is_victim():
        try:
            op(6)
        except KeyError:
            assert time.monotonic() - begin < TIMEOUT / 2
    else:
        op(7)
    return int(op(9))


@scenario(1, quick=True)
def elastic_restart(me: Me) -> int:
    """The world is left and entered again, by a victim that was replaced and knows nothing."""
    op = tuner()
    op(7)
    dist.barrier()
    dist.destroy_process_group()
    store = dist.FileStore(str(me.folder / "again"), me.size)
    dist.init_process_group("gloo", store=store, rank=me.rank, world_size=me.size)
    if is_victim():
        op.clear()
    result: int = op(7)
    assert op(8) == op(9) == 1
    dist.barrier()  # who is done first would tear the connections of the others
    return result


@scenario(1)
def rank_is_later_than_a_step_may_take(me: Me) -> int:
    """As one that saves a checkpoint: the first meeting has a limit of its own."""
    os.environ["TRITON_DIST_AUTOTUNE_MEETING_TIMEOUT"] = str(10 * TIMEOUT)
    if is_victim():
        time.sleep(1.5 * TIMEOUT)
    return chosen()


@scenario(1, quick=True)
def child_is_forked_beside_a_tuning(me: Me) -> int:
    """As by a data loader: its own first tuned call works, alone."""
    children: list[int] = []
    begun: list[bool] = []

    def fork_once(n: int) -> None:
        if not begun:
            begun.append(True)  # before the fork: the child, which tunes too, forks no more
            children.append(fork_beside(op))

    op = tuner(fork_once)
    result: int = op(7)
    assert [os.waitpid(child, 0)[1] for child in children] == [0]
    return result


def fork_beside(op: Any) -> int:
    """From another thread than the one that holds all locks."""

    def fork() -> int:
        child = os.fork()
        if child == 0:
            signal.alarm(int(TIMEOUT) + 5)  # ends a child that hangs
            os._exit(0 if op(3) == 1 else 1)
        return child

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(fork).result()


# Failures.


@scenario(2, quick=True)
def config_raises_on_one_rank(me: Me) -> int:
    return chosen(lambda n: fail() if n == 1 and is_victim() else None)


@scenario(2)
def config_raises_in_a_timed_run(me: Me) -> int:
    runs = []

    def run(n: int) -> None:
        runs.append(n)
        if n == 1 and is_victim() and runs.count(1) == 3:
            fail()

    return chosen(run)


@scenario(
    "TuningAborted", says=("rank {victim}: RuntimeError: stays broken", "config {{'n': 1}}"), then=2
)
def recover_fn_raises_on_one_rank(me: Me) -> int:
    def recover_fn(x: int) -> None:
        if is_victim():
            fail("stays broken")

    return chosen(lambda n: fail() if n == 1 and is_armed() else None, recover_fn=recover_fn)


@scenario("NoValidConfig", says=("launch on rank {victim}: RuntimeError: bad PTX",), then=1)
def all_configs_fail(me: Me) -> int:
    return chosen(lambda n: fail() if is_victim() else None)


@scenario(1, "RuntimeError")
def final_call_raises(me: Me) -> int:
    tuned: list[int] = []
    op = tuner(lambda n: fail() if tuned and is_victim() else None)
    op.tune(7)
    tuned.append(1)
    result: int = op(7)
    return result


def interrupt() -> None:
    raise KeyboardInterrupt


@either(
    "TuningTimeout",
    "KeyboardInterrupt",
    says=("run 2/3", "rank {victim} left: KeyboardInterrupt", "config {{'n': 1}}"),
    then=1,
    repeats=1,
)
def interrupted(me: Me) -> int:
    return chosen(lambda n: interrupt() if n == 1 and is_victim() else None)


# Ranks that are stuck.

STUCK = ("rank {victim} left: TuningTimeout", "is stuck in the user's code")


@either("TuningTimeout", "ended", says=("run 2/3", "config {{'n': 1}}", *STUCK), then=2, repeats=0)
def config_hangs(me: Me) -> int:
    return chosen(lambda n: hang() if n == 1 and is_victim() else None)


@scenario("TuningTimeout", "ended", says=("measure 2/3", "config {{'n': 1}}", *STUCK), then=2)
def config_hangs_in_a_timed_run(me: Me) -> int:
    runs = []

    def run(n: int) -> None:
        runs.append(n)
        if n == 1 and is_victim() and runs.count(1) == 3:
            hang()

    return chosen(run)


@scenario("TuningTimeout", "ended", says=("prepare 2/3", "config {{'n': 1}}", *STUCK), then=2)
def prepare_fn_hangs(me: Me) -> int:
    return chosen(prepare_fn=lambda x, n: hang() if n == 1 and is_victim() else None)


@scenario("TuningTimeout", "ended", leads=True, says=("prune_fn", *STUCK), then=1)
def prune_fn_hangs_on_the_leader(me: Me) -> int:
    return chosen(prune_fn=lambda config, x: hang() if is_victim() else True)


@scenario("TuningTimeout", "ended", says=("recover after 2/3", *STUCK), then=2)
def recover_fn_hangs(me: Me) -> int:
    return chosen(
        lambda n: fail() if n == 1 and is_armed() else None,
        recover_fn=lambda x: hang() if is_victim() else None,
    )


@scenario(
    "TuningTimeout or ended",
    "TuningTimeout",
    says=("rank {victim}", "config {{'n': 1}}"),
    then=2,
)
def peer_of_a_collective_failed(me: Me) -> int:
    def run(n: int) -> None:
        if n == 1 and is_armed():
            if is_victim():
                fail()
            dist.barrier()

    return chosen(run)


@scenario(1)
def process_is_stopped(me: Me) -> int:
    """For longer than a step may take, in the user's code: no config is to blame. The others wait
    for as long as they would at a meeting."""
    os.environ["TRITON_DIST_AUTOTUNE_MEETING_TIMEOUT"] = str(10 * TIMEOUT)

    def run(n: int) -> None:
        if n == 1 and is_victim() and not stopped:
            stopped.append(n)
            again = f"sleep {TIMEOUT + GRACE + 2}; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", again])
            os.kill(os.getpid(), signal.SIGSTOP)

    stopped: list[int] = []
    return chosen(run)


# Ranks that are killed, in each phase.


def killed(says: tuple[str, ...], others: str = "TuningTimeout", **row: Any) -> Any:
    """Rows for a rank that is killed; the others say where they waited for it."""
    gone = r"rank\(s\) [\d, ]*{victim}\b[\d, ]* did not arrive.* rank {victim} ended"
    expected = {"says": (*says, gone), "then": 1, "repeats": 1} | row
    return either(others, "killed", **expected)


CONFIG = "config {{'n': 3}}"


@killed(("first call of a key",))
def killed_before_the_meeting(me: Me) -> int:
    at("first call", die)
    return chosen()


@killed(("prune_fn|quarantine",))
def killed_while_pruning(me: Me) -> int:
    at("prune_fn", die)
    return chosen()


@killed(("prepare 1/3", CONFIG))
def killed_in_prepare_fn(me: Me) -> int:
    return chosen(prepare_fn=lambda x, n: die() if is_victim() else None)


@killed(("run 1/3", CONFIG))
def killed_in_the_first_run(me: Me) -> int:
    return chosen(lambda n: die() if is_victim() else None)


@killed(("measure 1/3", CONFIG), quick=True)
def killed_while_measuring(me: Me) -> int:
    runs = []

    def run(n: int) -> None:
        runs.append(n)
        if is_victim() and len(runs) == 3:
            die()

    return chosen(run)


@killed(("request 2|prepare 2/3|run 2/3",))
def killed_between_candidates(me: Me) -> int:
    at("request 2", die)
    return chosen()


@killed(("end",), others="TuningTimeout or 1")
def killed_at_the_end(me: Me) -> int:
    at("end", die)
    return chosen()


@scenario(1, "killed", leads=True, then=1, repeats=0)
def killed_while_writing_the_record(me: Me) -> int:
    replace = os.replace
    if is_victim():
        os.replace = lambda *paths: die() or replace(*paths)  # type: ignore[assignment,func-returns-value]
    return chosen()


@scenario(
    "TuningTimeout",
    "killed",
    leads=True,
    says=("request 2", "rank {victim} ended"),
    then=1,
    repeats=1,
)
def killed_while_writing_the_journal(me: Me) -> int:
    write = journal._write

    def torn(handle: int, line: Any) -> None:
        if "n" in line and is_victim():
            os.write(handle, b"\n" + json.dumps(line).encode()[:40])
            die()
        write(handle, line)

    journal._write = torn
    return chosen()


@scenario("killed", then=1, repeats=1)
def all_ranks_are_killed(me: Me) -> int:
    return chosen(lambda n: die() if n == 2 and is_armed() else None)


# Errors count the ranks of the group: the last of the world is the last of its half.
@scenario("TuningTimeout or 1", "killed", says=(r"rank \d( \(.*\))? ended",), then=1)
def killed_in_one_of_two_groups(me: Me) -> int:
    half = me.size // 2
    groups = [dist.new_group(list(range(half))), dist.new_group(list(range(half, me.size)))]
    mine = me.rank // half
    op = tuner(lambda n: die() if is_victim() else None)
    result: int = op(mine, autotune_pg=groups[mine])
    return result
