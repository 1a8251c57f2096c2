"""Plain collectives with fresh data, checked after the last call: on CPU ranks and on GPUs alike.

Every operand is a function of the rank and of the call, so a rank knows what to expect by itself:
no collective of a check lines the ranks up, and calls follow one another as in production.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.compiled_ahead import is_rehearsal, note
from triton_dist.kernels.nvidia import (
    all_gather,
    all_reduce,
    create_all_gather_ctx,
    create_allreduce_ctx,
    create_reduce_scatter_ctx,
    reduce_scatter,
)
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for
from triton_dist.testing import assert_allclose
from triton_dist.testing.assertions import assert_bitwise_equal

NAN = float("nan")
# Of a word of a packet that nobody has sent: the highest bit, which every tag has, is not set.
NO_TAG = 0x7F
OPS = {
    "all_reduce": (all_reduce, create_allreduce_ctx),
    "reduce_scatter": (reduce_scatter, create_reduce_scatter_ctx),
    "all_gather": (all_gather, create_all_gather_ctx),
}


ALGORITHMS = {
    "all_reduce": ("one_shot", "packets", "two_shot"),
    "reduce_scatter": ("push", "copy_engine"),
    "all_gather": ("push", "copy_engine"),
}


def algorithm(op: str, name: str) -> dict[str, Any]:
    """Options that ask ``op`` for a way by name; packets are one of the two kinds of one shot."""
    if op == "all_reduce" and name in ("one_shot", "packets"):
        return {"algorithm": "one_shot", "packets": name == "packets"}
    return {"algorithm": name}


def addend(seed: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers whose sum depends on the order in which they are added, as fp32 has them."""
    generator = torch.Generator().manual_seed(seed)
    magnitude = torch.randint(-3, 3, (elements,), generator=generator)
    values = torch.randn(elements, generator=generator) * 10.0**magnitude
    return values.to(dtype).to(current_device().torch_device)


def sum_in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    """In fp32, rank 0's first, rounded once; of one part a copy."""
    if len(parts) == 1:
        return parts[0]
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)


def expected_result(op: str, parts: list[torch.Tensor], rank: int) -> torch.Tensor:
    """Return the exact result of ``op`` on ``rank`` for the x of all ranks, flat."""
    if op == "all_gather":
        return torch.cat(parts)
    if op == "reduce_scatter":
        elements = parts[0].numel() // len(parts)
        parts = [part[rank * elements : (rank + 1) * elements] for part in parts]
    return sum_in_order(parts)


class Calls:
    """Calls of ``op`` in one context over ``group`` (default: the world). Collective.

    What peers write to holds NaN before the first call and is never lined up after it. x becomes
    NaN as soon as a call returned.
    """

    def __init__(
        self, op: str, workspace_nbytes: int, group: dist.ProcessGroup | None = None
    ) -> None:
        ranks = group_for(group)
        self.members = (
            dist.get_process_group_ranks(group or dist.group.WORLD)
            if dist.is_initialized()
            else [0]
        )
        self.name = op
        self.op, create = OPS[op]
        self.ctx = create(workspace_nbytes, ranks.rank, ranks.size, ranks.size, group=group)
        self.poison()
        ranks.barrier("memory is poisoned")
        self.results: list[tuple[str, torch.Tensor, torch.Tensor, bool]] = []
        self._number = 0

    def poison(self) -> None:
        """Bytes that are NaN in every dtype, where peers write; in packets, such as are no word."""
        self.ctx.buffer.memory["slots"].local.fill_(0xFF)
        self.ctx.buffer.memory["packets"].local.view(torch.uint8).fill_(NO_TAG)
        if self.name != "all_reduce":
            for slot in range(2):
                self.ctx.pushed.slots.memory[f"shards{slot}"].local.fill_(0xFF)
        current_device().synchronize()

    def __call__(
        self,
        elements: int,
        dtype: torch.dtype = torch.float16,
        misaligned: bool = False,
        in_place: bool = False,
        tuned: bool = False,
        **options: Any,
    ) -> None:
        """One call with ``elements`` elements a rank, of a reduce-scatter a shard."""
        self._number += 1
        size = len(self.members)
        length = elements * size if self.name == "reduce_scatter" else elements
        if is_rehearsal():
            self._note(length, dtype, misaligned, in_place, options)
            return
        parts = [addend(1000 * self._number + rank, length, dtype) for rank in self.members]
        rank = self.ctx.rank
        method = options.get("method")
        asked = options.get("algorithm") or (method.value if method else "")
        expected = expected_result(self.name, parts, rank)
        around = torch.full((length + 1,), NAN, dtype=dtype, device=parts[0].device)
        x = around[1:] if misaligned else around[:length]
        x.copy_(parts[rank])
        if in_place:
            options["output"] = x
        call = self.op if tuned else self.op.fn
        result = call(x, self.ctx, **options)
        if in_place:
            assert result is x
            result = x.clone()
        x.fill_(NAN)
        what = f"{self.name} {self._number}: {elements} {dtype}, {options}"
        exact = self.name == "all_gather" or asked != "collective"
        self.results.append((what, result, expected, exact))

    def _note(
        self,
        length: int,
        dtype: torch.dtype,
        misaligned: bool,
        in_place: bool,
        options: dict[str, Any],
    ) -> None:
        around = torch.empty(length + 1, dtype=dtype, device=current_device().torch_device)
        x = around[1:] if misaligned else around[:length]
        if in_place:
            options["output"] = x
        note(lambda: self.op._hooks.prepare(x, self.ctx, **options))

    def skip(self) -> None:
        """Leave out the call that other ranks make now."""
        self._number += 1

    def check(self) -> int:
        """Compare all results, to the bit but for those of a library; returns how many."""
        current_device().synchronize()
        for what, result, expected, exact in self.results:
            try:
                if exact:
                    assert_bitwise_equal(result, expected)
                else:
                    assert_allclose(result, expected, rtol=1e-2, atol=5.0)
            except AssertionError as error:
                raise AssertionError(f"{what}: {error}") from None
        return len(self.results)

    def finish(self) -> int:
        """Check, and free the context."""
        count = self.check()
        self.ctx.finalize()
        return count
