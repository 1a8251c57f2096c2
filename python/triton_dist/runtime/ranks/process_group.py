"""The ranks of a torch process group, co-ordinated over its key-value store.

Every word goes over the group's c10d store and has a deadline, so a rank that is missing is an
error that names it; a collective of the data plane would hang for the process group's timeout, 30
minutes by default. (Two-phase agreement over the store instead of a collective:
pytorch/pytorch#176920.)
"""

from __future__ import annotations

import datetime
import pickle
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from triton_dist import knobs
from triton_dist.errors import RankDisagreement, RankTimeout

T = TypeVar("T")


class ProcessGroupRanks:
    """Words that all ranks of ``process_group`` say together, in the same order.

    Steps are numbered; the n-th word of a rank meets the n-th word of the others. ``phase`` says
    what the step is for: it is in the error when a rank is missing, and different phases at one
    step are an error on every rank.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        self.is_leader = self.rank == 0
        self._store = dist.PrefixStore(
            "triton_dist/ranks", distributed_c10d._get_process_group_store(process_group)
        )
        # A store client holds its lock while it waits; each thread talks through a client of its
        # own, so that a wait here does not block another thread's tuning, or NCCL's heartbeat.
        self._clients = threading.local()
        self._step = 0
        self._written: list[tuple[int, str]] = []
        self._align_word: torch.Tensor | None = None

    def facts(self) -> Mapping[str, str]:
        return {
            "world_size": str(self.size),
            "local_world_size": str(knobs.local_world_size.get()),
        }

    def decide(self, phase: str, value: T | None) -> T:
        step = self._next_step()
        if self.is_leader:
            self._put(step, (phase, value))
            return value  # type: ignore[return-value]  # the leader always brings a value
        ((leaders_phase, decided),) = self._take(step, phase, [0])
        if leaders_phase != phase:
            raise RankDisagreement(
                f"step {step} of the tuning", {0: leaders_phase, self.rank: phase}
            )
        return decided  # type: ignore[no-any-return]

    def gather(self, phase: str, value: T) -> list[T]:
        step = self._next_step()
        self._put(step, (phase, value))
        entries = self._take(step, phase, range(self.size))
        if any(other != phase for other, _ in entries):
            raise RankDisagreement(
                f"step {step} of the tuning",
                {rank: other for rank, (other, _) in enumerate(entries)},
            )
        self._forget_before(step)
        return [value for _, value in entries]

    def all_agree(self, phase: str, flag: bool) -> bool:
        return all(self.gather(phase, flag))

    def maximum(self, phase: str, values: Sequence[float]) -> list[float]:
        return [max(column) for column in zip(*self.gather(phase, list(values)), strict=True)]

    def barrier(self, phase: str) -> None:
        self.gather(phase, None)

    def align(self) -> None:
        """On GPUs a one-element all-reduce, queued on the current stream; on CPU ranks a barrier.

        The all-reduce follows a barrier over the store, so every rank is known to be about to queue
        it.
        """
        self.barrier("align")
        if torch.cuda.is_available() and "nccl" in dist.get_backend_config(self.process_group):
            if self._align_word is None:
                self._align_word = torch.zeros(1, device="cuda")
            dist.all_reduce(self._align_word, group=self.process_group)

    def _next_step(self) -> int:
        self._step += 1
        return self._step

    def _client(self) -> dist.Store:
        client: dist.Store | None = getattr(self._clients, "store", None)
        if client is None:
            client = self._clients.store = self._store.clone()  # type: ignore[attr-defined]
        return client

    def _put(self, step: int, entry: tuple[str, Any]) -> None:
        key = f"{step}/{self.rank}"
        self._client().set(key, pickle.dumps(entry))  # type: ignore[arg-type]  # takes bytes
        self._written.append((step, key))

    def _take(self, step: int, phase: str, ranks: Sequence[int]) -> list[tuple[str, Any]]:
        client, limit = self._client(), knobs.autotune_timeout.get()
        keys = [f"{step}/{rank}" for rank in ranks]
        begin = time.monotonic()
        try:
            client.wait(keys, datetime.timedelta(seconds=limit))
        except dist.DistStoreError as timeout:
            missing = [
                rank for rank, key in zip(ranks, keys, strict=True) if not client.check([key])
            ]
            raise RankTimeout(
                rank=self.rank, phase=phase, missing=missing, seconds=time.monotonic() - begin
            ) from timeout
        return [pickle.loads(client.get(key)) for key in keys]

    def _forget_before(self, step: int) -> None:
        """Delete own entries of earlier steps: all ranks are at ``step``, so all have read them."""
        client = self._client()
        for _, key in (entry for entry in self._written if entry[0] < step):
            client.delete_key(key)
        self._written = [entry for entry in self._written if entry[0] >= step]
